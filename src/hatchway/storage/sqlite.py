"""The database in a file: one thread writes, another reads; what waits while a commit is being made durable shares the next one."""

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate

from sqlalchemy import Connection

from hatchway.storage import dialect, migrate
from hatchway.storage.database import BALLAST, Database, P, T, attributed, full, too_many
from hatchway.wire.ballast import Ballast
from hatchway.wire.fault_points import reached

MAX_TOGETHER = 64
"""Transactions that share one commit, when that many wait."""
MAX_WAITING = 10_000
"""Transactions that may wait for the writer; the next one is refused."""
FULL_TRIES = 8
"""How often a transaction is tried again with another piece of it: those who fill the disk may be quicker once or twice."""
KEEP_EVERY_S = 5.0


class SqliteDatabase(Database):
    """Writers are queued and never meet each other. Readers see the last committed state and never wait for a writer."""

    def __init__(self, store: dialect.Sqlite, ballast: Ballast) -> None:
        super().__init__()
        self._store = store
        self._ballast = ballast
        self._kept_at = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="db-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="db-read")
        self._waiting: deque[tuple[Callable[[Connection], Any], asyncio.Future[Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    @classmethod
    async def make(cls, path: str, *, ballast: int = BALLAST) -> "SqliteDatabase":
        """See `Database.open`."""
        store = dialect.Sqlite(path)
        database = cls(store, Ballast(store.path.with_suffix(".ballast"), ballast))
        try:
            await database._in_thread(database._writer, store.open_writer)
            await database.write(migrate.upgrade)
            await database._in_thread(database._reader, store.open_reader)
            await database._in_thread(database._writer, database._ballast.keep)
        except BaseException:
            await database.close()
            raise
        return database

    async def write(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Database.write`."""
        self._require_open()
        if len(self._waiting) >= MAX_WAITING:
            raise too_many()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((attributed(lambda connection: body(connection, *args, **kwargs)), future))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_waiting(), name="database writes")
        with self._timed("write"):
            result = await future
            reached("written", getattr(body, "__qualname__", "?"))
            return result

    @property
    def waiting(self) -> int:
        """How many transactions wait for the writer."""
        return len(self._waiting)

    async def require_room(self) -> None:
        """See `Database.require_room`."""
        if not self._ballast.whole and not await self._in_thread(self._writer, self._ballast.keep):
            raise full("The disk of the database is full: nothing new is taken on.")

    async def read(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Database.read`."""
        self._require_open()
        with self._timed("read"):
            return await self._in_thread(
                self._reader, lambda: self._store.read(lambda connection: body(connection, *args, **kwargs))
            )

    async def close(self) -> None:
        """Waits for the transactions in hand, closes the file and gives up its lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writing is not None:
            await self._writing
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._reader, self._store.close_reader)
        await loop.run_in_executor(self._writer, self._store.close_writer)
        self._reader.shutdown()
        self._writer.shutdown()

    async def _write_waiting(self) -> None:
        while self._waiting:
            together = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_TOGETHER))]
            bodies = [body for body, _ in together]
            try:
                outcomes = await self._in_thread(self._writer, functools.partial(self._write_somehow, bodies))
            except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to those who wait for it
                outcomes = [dialect.Outcome(error=error)] * len(together)
            for (_, future), outcome in zip(together, outcomes, strict=True):
                if future.done():
                    continue  # its caller was cancelled
                if outcome.error is not None:
                    future.set_exception(outcome.error)
                else:
                    future.set_result(outcome.result)
            if any(outcome.error is None for outcome in outcomes):
                self._tell_committed()
        self._writing = None

    def _write_somehow(self, bodies: list[Callable[[Connection], Any]]) -> list[dialect.Outcome]:
        """In the writer's thread: writes, on a full disk with what is held for it."""
        for left in reversed(range(FULL_TRIES)):
            try:
                outcomes = self._store.write(bodies)
            except dialect.DiskFull:
                if not left or not self._ballast.give():
                    raise
            else:
                break
        if not self._ballast.whole and time.monotonic() - self._kept_at > KEEP_EVERY_S:
            self._kept_at = time.monotonic()
            self._ballast.keep()
        return outcomes

    async def _in_thread(self, pool: ThreadPoolExecutor, body: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, body)
        except dialect.DiskFull:
            raise full("The disk of the database is full; nothing was changed.") from None
