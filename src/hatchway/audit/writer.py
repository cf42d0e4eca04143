"""Serves the journal: takes records of the processes that may send some, many in one flush of the disk, and answers the control plane's queries."""

import asyncio
import contextlib
import logging
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from hatchway.audit import query
from hatchway.audit.journal import Journal
from hatchway.domain.errors import Exhausted, Forbidden, HatchwayError, InvalidRequest
from hatchway.wire.audit import MAX_RECORDS, METHODS, SOURCE, Append, Appended, Health, Query, Records
from hatchway.wire.fault_points import reached
from hatchway.wire.rpc import Connection, Handler

MAX_WAITING = 64
"""Requests that wait for the disk; each has at most `MAX_RECORDS` records, and `rpc.MAX_MESSAGE` octets."""
MAX_QUERIES = 4
"""Queries that read at once."""
TEND_EVERY_S = 1.0
RETAIN_EVERY_S = 600.0

log = logging.getLogger(__name__)

_PEER = struct.Struct("3i")
_SOURCE = re.compile(SOURCE)


class Writer:
    """One open journal and those who speak with it. `start`, `serve` any number of sockets, `close`."""

    def __init__(
        self, journal: Journal, senders: Mapping[int, frozenset[str]], readers: frozenset[int], *, head_every_s: float
    ) -> None:
        """`senders`: by user id, the names under which it may append; `*` admits every name."""
        self._journal = journal
        self._senders = senders
        self._readers = readers
        self._head_every_s = head_every_s
        self._waiting: list[tuple[Append, asyncio.Future[Appended]]] = []
        self._bell = asyncio.Event()
        # One thread has the journal, so that whoever appends, seals and removes does it one after the other.
        self._thread = ThreadPoolExecutor(1, "journal")
        self._reading = asyncio.Semaphore(MAX_QUERIES)
        self._tasks: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with the error after which nothing can be appended any more."""

    def start(self) -> None:
        """Begins to append."""
        loop = asyncio.get_running_loop()
        for work in (self._append_forever(), self._tend_forever()):
            task = loop.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    async def serve(self, sock: socket.socket) -> asyncio.Server:
        """Serves those who may send or read on a listening Unix socket."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            _, uid, _ = _PEER.unpack(peer)
            names = self._senders.get(uid, frozenset())
            if not names and uid not in self._readers:
                log.warning("uid %d may not speak to the audit writer", uid)
                writer.close()
                return
            await Connection(reader, writer, self._handlers(names, uid in self._readers)).run()

        return await asyncio.start_unix_server(accept, sock=sock)

    async def close(self) -> None:
        """Signs the end, and lets the journal go. What waits is sent again to the next writer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(HatchwayError, OSError):
            await self._do(self._journal.sign)
        self._thread.shutdown()
        self._journal.close()

    def _handlers(self, names: frozenset[str], reads: bool) -> dict[str, Handler]:
        async def append(request: Append) -> Appended:
            return await self._append(names, request)

        methods: dict[str, Callable[[Any], Awaitable[object]]] = {"audit.append": append, "audit.health": self._health}
        if reads:
            methods["audit.query"] = self._query
        return {name: _decoding(METHODS[name][0], method) for name, method in methods.items()}

    async def _append(self, names: frozenset[str], request: Append) -> Appended:
        name = request.source.partition("/")[0]
        if not _SOURCE.fullmatch(request.source) or not (name in names or "*" in names):
            raise Forbidden("audit_source", f"This process does not record as {request.source[:80]!r}.")
        if len(request.entries) > MAX_RECORDS or request.first < 1:
            raise InvalidRequest(
                "audit_batch", f"At most {MAX_RECORDS} records, numbered from 1 on, are taken at once."
            )
        if not request.entries:
            return Appended(last=self._journal.last_of(request.source), sequence=self._journal.sequence)
        if len(self._waiting) >= MAX_WAITING:
            raise Exhausted("audit_busy", "Too many records wait for the disk.", "Try again in a moment.")
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._bell.set()
        return await future

    async def _query(self, request: Query) -> Records:
        async with self._reading:
            return await asyncio.to_thread(lambda: query.find(self._journal.snapshot(), request))

    async def _health(self, _: object) -> Health:
        journal = self._journal
        return Health(
            writable=not journal.error,
            error=journal.error,
            head=journal.sequence,
            head_hash=journal.hash,
            octets=journal.octets,
            first=journal.segments[0].first,
            public_key=journal.public_key,
        )

    async def _append_forever(self) -> None:
        while True:
            await self._bell.wait()
            self._bell.clear()
            group, self._waiting = self._waiting, []
            if not group:
                continue
            try:
                await self._do(self._journal.append, [request for request, _ in group])
            except HatchwayError as error:
                for _, future in group:
                    if not future.done():
                        future.set_exception(error)
                continue
            reached("answered", "audit.append")
            for request, future in group:
                if not future.done():  # else the sender has gone; it asks again
                    last = self._journal.last_of(request.source)
                    future.set_result(Appended(last=last, sequence=self._journal.sequence))

    async def _tend_forever(self) -> None:
        """Signs what no head covers, removes what is too old, and takes the reserve again."""
        loop = asyncio.get_running_loop()
        retained = loop.time()
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            since = self._journal.unsigned_since
            if since is not None and self._journal.age(since) >= self._head_every_s:
                await self._do(self._journal.sign)
            await self._do(self._journal.keep_reserve)
            if loop.time() - retained >= RETAIN_EVERY_S:
                retained = loop.time()
                await self._do(self._journal.retain)

    async def _do(self, body: Callable[..., None], *arguments: object) -> None:
        work = asyncio.get_running_loop().run_in_executor(self._thread, body, *arguments)
        await asyncio.shield(work)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)


def _decoding(kind: type[Any], method: Callable[[Any], Awaitable[object]]) -> Handler:
    decoder = msgspec.msgpack.Decoder(kind)

    async def handle(_: Connection, params: msgspec.Raw) -> object:
        return await method(decoder.decode(params))

    return handle
