"""How the control plane's records reach the audit journal.

What is written in a transaction is in the outbox, and `Auditing` forwards it: one process of those that share a database, in order, again
and again until the writer has it. What belongs to no transaction, such as a key that was refused, goes to the writer by itself.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.audit.client import AuditClient, AuditLink
from hatchway.control.claims import Claims
from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.storage import audit
from hatchway.storage.audit import Position
from hatchway.storage.database import Database
from hatchway.wire import tracing
from hatchway.wire.audit import Append, Appended, Entry

T = TypeVar("T")

LEASE = "audit"
BATCH = 500
BATCH_OCTETS = 1 << 20
GATHER_S = 0.3
"""How long what is committed waits for what follows: it is safe in the database, and each batch is noted there. A creation is over by
then: what it began with and what it ended with go together, and nobody competes with its end for the database."""
LOOK_EVERY_S = 5.0
COUNT_EVERY_S = 0.5
RETRY_S = 0.5
ASK_WITHIN_S = 5.0
"""A writer that was killed is there again sooner, and answers what was asked meanwhile."""
MAX_BEHIND = 100_000
"""Records that the journal lacks, from which on nothing more is changed that would have to be recorded."""

log = logging.getLogger(__name__)


class Auditing:
    """See the module. Without a socket (`path` None) there is no journal: nothing is recorded, and `call` says so."""

    def __init__(self, database: Database, claims: Claims, path: Path | None) -> None:
        self._database = database
        self._claims = claims
        self._path = path
        self._bell = asyncio.Event()
        self._grown = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._asking = None if path is None else AuditLink(path)
        self._sending = None if path is None else AuditLink(path)
        self._client = None if path is None else AuditClient(path, audit.SENDER)
        self.behind = 0
        """How many records the journal lacked when that was last looked at."""
        self.error = ""
        """Why the writer does not take records; empty when it does."""

    async def start(self) -> None:
        """Begins to forward. Raises what the database does."""
        if self._path is None or self._client is None:
            await self._database.write(audit.forget)
            return
        await self._database.write(audit.begin)
        self._client.start()
        self._database.on_commit.add(self._ring)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._forward_forever(), name="audit"),
            loop.create_task(self._count_forever(), name="audit backlog"),
        ]

    async def close(self) -> None:
        """Stops; the next process goes on."""
        self._database.on_commit.discard(self._ring)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in (self._asking, self._sending):
            if link is not None:
                await link.close()
        if self._client is not None:
            await self._client.close()

    def require_room(self, *, deleting: bool = False) -> None:
        """Raises `Unavailable("audit_behind")` when so much waits for the journal that nothing more may be changed.

        What makes room goes on longer than the rest.
        """
        most = MAX_BEHIND + MAX_BEHIND // 10 if deleting else MAX_BEHIND
        if self.behind >= most:
            raise Unavailable(
                "audit_behind",
                f"{self.behind} records wait for the audit journal" + (f": {self.error}" if self.error else "."),
                "Nothing is changed until the audit writer takes them; `hatchway doctor` says what ails it.",
            )

    def record(self, entry: Entry) -> None:
        """Records what belongs to no transaction. What cannot be kept is dropped with a line in the log: it changed nothing here."""
        if self._client is None:
            return
        try:
            self._client.record(entry)
        except Unavailable as error:
            log.error("not recorded: %s", error, extra={"kind": entry.kind, "reason": entry.reason})

    def issued(self, what: str, project: str, sandbox_id: str, data: dict[str, object]) -> None:
        """Records a right that was given without a transaction, such as a session's token; `require_room` was asked before."""
        origin = tracing.current()
        self.record(
            Entry(
                kind=what,
                time=time.time(),
                project=project,
                sandbox_id=sandbox_id,
                actor=origin.get("key_id", audit.SENDER),
                request_id=origin.get("request_id", ""),
                data=data,
            )
        )

    async def call(self, method: str, params: object, result: type[T]) -> T:
        """Asks the writer. Raises what it answers, `Unavailable` with `audit_unavailable`, or `audit_disabled` where there is no journal."""
        if self._asking is None:
            raise Unavailable(
                "audit_disabled",
                "This control plane has no audit journal.",
                "Start it by `hatchway up`, which runs an audit writer.",
            )
        return await self._asking.call(method, params, result, within=ASK_WITHIN_S)

    async def flushed(self, within: float) -> bool:
        """Waits until the journal has everything that was committed before; tells whether it has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while await self._database.read(audit.behind):
                    self._bell.set()
                    await asyncio.sleep(0.01)
                return True
        return False

    async def _forward_forever(self) -> None:
        told = False
        position: Position | None = None
        while True:
            self._bell.clear()
            try:
                if not self._claims.shared or await self._claims.lead(LEASE):
                    position = await self._forward(position)
                    told, self.error = False, ""
                else:
                    position = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._bell.wait()
                await asyncio.sleep(GATHER_S)
                continue
            except (HatchwayError, OSError, TimeoutError) as error:
                self.error = str(error)
                if not told:
                    log.warning("the audit journal takes no records: %s", error)
                    told = True
            except Exception:  # the journal must not stay behind for good because of one mistake
                log.exception("records were not forwarded to the audit journal")
            position = None
            await asyncio.sleep(RETRY_S)

    def _ring(self) -> None:
        self._bell.set()
        self._grown.set()

    async def _count_forever(self) -> None:
        """By itself: a writer that is away is not seen by whoever waits for its answer."""
        while True:
            await self._grown.wait()
            if not self.behind:
                self._grown.clear()
            with contextlib.suppress(HatchwayError):
                self.behind = await self._database.read(audit.behind)
            await asyncio.sleep(COUNT_EVERY_S)

    async def _forward(self, position: Position | None) -> Position:
        """Sends what there is. A position that is not known is asked of writer and database."""
        assert self._sending is not None
        if position is None:
            position = await self._begin(self._sending)
        while True:
            found = _together(await self._database.read(audit.pending, position, BATCH))
            if not found:
                return position
            reserved = await self._database.write(audit.reserve, position, len(found))
            if (reserved.source, reserved.number) != (position.source, position.number):
                position = await self._begin(self._sending)
                continue
            entries = tuple(entry for _, entry in found)
            request = Append(source=position.source, first=position.number + 1, entries=entries)
            answer = await self._sending.call("audit.append", request, Appended)
            number = position.number + len(entries)
            if answer.last < number:
                raise Unavailable("audit_unavailable", f"The audit writer has {answer.last} of {number} records.")
            after = await self._database.write(audit.settle, position, number, found[-1][0])
            if after.source != position.source:
                return await self._begin(self._sending)
            position = after

    async def _begin(self, link: AuditLink) -> Position:
        stored = await self._database.read(audit.position)
        known: dict[str, int] = {}
        if stored is not None:
            # Asked before the database is, which is then never older than the answer.
            asked = await link.call("audit.append", Append(source=stored.source, first=1, entries=()), Appended)
            known = {stored.source: asked.last}
        return await self._database.write(audit.begin, known)


def _together(found: list[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
    """As many of them as one message takes."""
    octets = 0
    for number, (_, entry) in enumerate(found):
        octets += len(msgspec.msgpack.encode(entry))
        if octets > BATCH_OCTETS and number:
            return found[:number]
    return found
