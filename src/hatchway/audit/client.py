"""How a process of ours records what happens: kept here until the writer has made it durable, within a bound.

```
sink = AuditClient(run_dir / SOCKET, "egress-0"); sink.start()
if sink.full: refuse            # before anything that would have to be recorded
sink.record(entry)              # never blocks; raises Unavailable("audit_unavailable") when it cannot be kept
await sink.durable(entry)       # returns when it is on disk: for what must not happen unrecorded, such as the use of a secret
await sink.close()
```
Records are numbered, sent in batches and sent again to the next writer, which leaves out what it has. Refusals that are alike
are counted: the first goes at once, the others in one record at the end of the window, with how many, and when the last was. What a
process had here when it was killed is lost with it; what must survive that is written by `durable`, or by an outbox.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.domain.ids import new_id
from hatchway.wire.audit import Appended, Entry
from hatchway.wire.node import Struct
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

T = TypeVar("T")

MAX_ENTRIES = 20_000
MAX_OCTETS = 16 << 20
"""What is kept here, before this process may do nothing more that has to be recorded."""
MAX_ENTRY = 256 << 10
"""Octets of one record here; the writer cuts it further."""
BATCH = 500
BATCH_OCTETS = 1 << 20
WINDOW_S = 10.0
"""For how long refusals that are alike are counted before they are recorded."""
MAX_KINDS = 64
"""Refusals of one sandbox that differ, in one window; more are counted by kind and reason alone."""
MAX_COUNTED = 16_384
"""Counters of all sandboxes in one window; more are counted by project, kind and reason."""
SUMMED = ("bytes_out", "bytes_in")
"""Members of `data` that are added up where records are counted."""
SEND_WITHIN_S = 20.0
CONNECT_WITHIN_S = 5.0
RETRY_S = 0.1
RETRY_FULL_S = 1.0

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


class _Append(Struct, frozen=True, kw_only=True):
    """`wire.audit.Append` whose entries are encoded already."""

    source: str
    first: int
    entries: tuple[msgspec.Raw, ...]


class _Counter:
    """Refusals that are alike, in one window."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.count = 0
        self.first = self.last = entry.time
        self.sums: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        if not self.count:
            self.first = entry.time
        self.count += entry.count
        self.last = entry.time
        for name in SUMMED:
            if name in entry.data:
                self.sums[name] = self.sums.get(name, 0) + entry.data[name]


class AuditClient:
    """The records of one process on their way to the writer. For one event loop."""

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        max_entries: int = MAX_ENTRIES,
        max_octets: int = MAX_OCTETS,
        window_s: float = WINDOW_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`path`: the writer's socket; `name`: this process among those that the writer admits."""
        self.source = f"{name}/{new_id()}"
        self._path = path
        self._max_entries = max_entries
        self._max_octets = max_octets
        self._window_s = window_s
        self._now = now
        self._kept: deque[bytes] = deque()
        self._octets = 0
        self._first = 1
        """The number of the oldest that is kept."""
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._counters: dict[tuple[object, ...], _Counter] = {}
        self._differing: dict[str, int] = {}
        self._bell = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self.error = ""
        """Why the writer did not take the last batch; empty when it did."""
        self._refused = False

    def start(self) -> None:
        """Begins to send."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send_forever()), loop.create_task(self._count_forever())]

    @property
    def full(self) -> bool:
        """Whether nothing more may happen that would have to be recorded: the bound is reached, or the writer's disk."""
        return self._refused or len(self._kept) >= self._max_entries or self._octets >= self._max_octets

    @property
    def waiting(self) -> int:
        """How many records are not durable yet."""
        return len(self._kept)

    def require_room(self) -> None:
        """Raises `Unavailable("audit_unavailable")` when `full`."""
        if self.full or self._closed:
            raise Unavailable(
                "audit_unavailable",
                "What happens cannot be recorded now" + (f": {self.error}." if self.error else "."),
                "Nothing is let through until the audit writer takes records again; `hatchway doctor` says what ails it.",
            )

    def record(self, entry: Entry, *, alike: bool = False, bounded: bool = False, done: bool = False) -> None:
        """Keeps it until it is durable. Raises `Unavailable("audit_unavailable")`.

        A refusal like one that was seen in this window is counted, and so is anything else that is recorded as `alike`. Of refusals, and of
        what is `bounded`, no more than `MAX_KINDS` of a sandbox are told apart in a window, and octets are added up. What is `done` already,
        after `require_room` was asked, is kept beyond the bound, up to twice of it.
        """
        bounded = bounded or entry.decision == "denied"
        if bounded and entry.decision in ("allowed", "asked"):
            self.require_room()
        if bounded or alike:
            counter = self._counter(entry, bounded)
            if counter is not None:
                counter.add(entry)
                return
        if not done or len(self._kept) >= 2 * self._max_entries or self._octets >= 2 * self._max_octets:
            self.require_room()
        self._keep(entry)

    async def durable(self, entry: Entry) -> None:
        """Records it, and returns when it is on disk. Raises `Unavailable("audit_unavailable")`, also when the writer's disk is full."""
        self.require_room()
        self._keep(entry)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._first + len(self._kept) - 1, waiter))
        await waiter

    async def flush(self, within: float) -> bool:
        """Sends what is kept and what was counted; tells whether all of it is durable within so many seconds."""
        self._end_window()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._emptied.wait()
        return not self._kept

    async def close(self, within: float = 2.0) -> None:
        """Sends what there is, as far as the writer takes it. Idempotent."""
        if self._tasks:
            await self.flush(within)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail_waiters("the process ends")
        if self._kept:
            log.error("%d audit records were not taken by the writer: %s", len(self._kept), self.error)

    # -- counting

    def _counter(self, entry: Entry, bounded: bool) -> _Counter | None:
        """Where it is counted; None for the first of its kind in this window, which is recorded by itself."""
        scope = (
            entry.kind,
            entry.project,
            entry.sandbox_id,
            entry.generation,
            entry.actor,
            entry.decision,
            entry.reason,
        )
        if bounded and any(name in entry.data for name in SUMMED):
            counted = msgspec.structs.replace(entry, data={k: v for k, v in entry.data.items() if k not in SUMMED})
        else:
            counted = entry
        key = (*scope, _encoder.encode(counted.data))
        found = self._counters.get(key)
        if found is not None:
            return found
        differing = self._differing.get(entry.sandbox_id, 0)
        many = len(self._counters) >= MAX_COUNTED
        if not bounded and not many:
            if not self.full:
                self._counters[key] = _Counter(entry)
            return None
        if many or differing >= MAX_KINDS or self.full:
            bare = msgspec.structs.replace(entry, request_id="", data={"folded": True})
            if many:
                bare = msgspec.structs.replace(bare, sandbox_id="", generation=0, actor="")
                scope = (entry.kind, entry.project, "", 0, "", entry.decision, entry.reason)
            return self._counters.setdefault((*scope, None), _Counter(bare))
        self._differing[entry.sandbox_id] = differing + 1
        self._counters[key] = _Counter(counted)
        return None

    async def _count_forever(self) -> None:
        while True:
            await asyncio.sleep(self._window_s)
            self._end_window()

    def _end_window(self) -> None:
        """Records what was counted. Counts are kept beyond the bound: there is a bounded number of counters, and none may be lost."""
        counters, self._counters, self._differing = self._counters, {}, {}
        for key, counter in counters.items():
            if not counter.count:
                continue
            if self.full:
                self._counters[key] = counter  # it goes on counting
                continue
            data = {**counter.entry.data, **counter.sums, "last": counter.last}
            entry = msgspec.structs.replace(
                counter.entry, time=counter.first, count=counter.count, data=data, request_id=""
            )
            self._keep(entry)

    # -- sending

    def _keep(self, entry: Entry) -> None:
        encoded = _encoder.encode(entry)
        if len(encoded) > MAX_ENTRY:
            data = {"cut": f"sha256:{hashlib.sha256(encoded).hexdigest()}", "octets": len(encoded)}
            encoded = _encoder.encode(msgspec.structs.replace(entry, data=data))
        _decoder.decode(encoded)  # what the writer could not read must fail here, and not hold up the others for good
        self._kept.append(encoded)
        self._octets += len(encoded)
        self._emptied.clear()
        self._bell.set()

    async def _send_forever(self) -> None:
        told = False
        while True:
            try:
                connection = await _connect(self._path)
                reading = asyncio.get_running_loop().create_task(connection.run())
                try:
                    told = False
                    await self._send_all(connection)
                finally:
                    await connection.close()
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
            except (OSError, TimeoutError, HatchwayError) as error:
                self.error = str(error) or type(error).__name__
                if not told:
                    log.warning("the audit writer does not take records: %s", self.error)
                    told = True
            await asyncio.sleep(RETRY_FULL_S if self._refused else RETRY_S)

    async def _send_all(self, connection: Connection) -> None:
        """Sends until the connection ends."""
        while True:
            while not self._kept:
                self._bell.clear()
                ringing = asyncio.ensure_future(self._bell.wait())
                closing = asyncio.ensure_future(connection.closed.wait())
                try:
                    await asyncio.wait({ringing, closing}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ringing.cancel()
                    closing.cancel()
                if connection.closed.is_set():
                    return
            request = _Append(source=self.source, first=self._first, entries=self._batch())
            try:
                answer = await connection.call("audit.append", request, Appended, within=SEND_WITHIN_S)
            except HatchwayError as error:
                if error.code == "audit_full":
                    self._refused = True
                    self._fail_waiters(str(error))
                raise
            self._refused, self.error = False, ""
            self._taken(answer.last)

    def _batch(self) -> tuple[msgspec.Raw, ...]:
        batch: list[msgspec.Raw] = []
        octets = 0
        for encoded in self._kept:
            octets += len(encoded)
            if batch and (len(batch) >= BATCH or octets > BATCH_OCTETS):
                break
            batch.append(msgspec.Raw(encoded))
        return tuple(batch)

    def _taken(self, last: int) -> None:
        while self._kept and self._first <= last:
            self._octets -= len(self._kept.popleft())
            self._first += 1
        while self._waiters and self._waiters[0][0] < self._first:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if not self._kept:
            self._emptied.set()

    def _fail_waiters(self, why: str) -> None:
        """The records stay, and are sent again; who waits must not do what they are about."""
        waiters, self._waiters = self._waiters, deque()
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(
                    Unavailable("audit_unavailable", f"It could not be recorded: {why}.", "Try again in a moment.")
                )


class AuditLink:
    """Calls to the writer, connected when one is made. For whoever asks, or keeps what it sends by its own means."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: Connection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, params: object, result: type[T], *, within: float = SEND_WITHIN_S) -> T:
        """Calls the writer. Raises what it answers, and `Unavailable("audit_unavailable")` when it is not there."""
        try:
            connection = await self._connected()
            return await connection.call(method, params, result, within=within)
        except (OSError, TimeoutError) as error:
            await self.close()
            raise _away(str(error) or "it does not answer") from error
        except Unavailable as error:
            if error.code != "peer_lost":
                raise
            raise _away(error.cause) from error

    async def close(self) -> None:
        """Lets the connection go; the next call makes another. Idempotent."""
        connection, self._connection = self._connection, None
        reading, self._reading = self._reading, None
        if connection is not None:
            await connection.close()
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is None or self._connection.closed.is_set():
                await self.close()
                self._connection = await _connect(self._path)
                self._reading = asyncio.get_running_loop().create_task(self._connection.run())
            return self._connection


async def _connect(path: Path) -> Connection:
    async with asyncio.timeout(CONNECT_WITHIN_S):
        with address(path) as reached:
            reader, writer = await asyncio.open_unix_connection(reached)
    return Connection(reader, writer)


def _away(why: str) -> Unavailable:
    return Unavailable(
        "audit_unavailable",
        f"The audit writer is not there now: {why}.",
        "Try again in a moment; `hatchway doctor` says what ails it.",
    )
