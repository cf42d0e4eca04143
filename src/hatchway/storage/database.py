"""One database, asked asynchronously: whole transactions go in, their results come out.

A transaction is a plain function of a SQLAlchemy connection. Handing over the function, not single statements, makes one
switch of threads per transaction where a driver that is asynchronous per statement makes one per statement (measured: docs/decisions/
0010-whole-transactions-in-one-thread.md). The same functions run on PostgreSQL through `AsyncConnection.run_sync`.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, text

from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.storage import dialect, migrate
from hatchway.wire.ballast import Ballast

P = ParamSpec("P")
T = TypeVar("T")


log = logging.getLogger(__name__)

__all__ = ["Connection", "Database", "answers"]


def answers(connection: Connection) -> None:
    """Asks the database for nothing, to see that it is there."""
    connection.execute(text("SELECT 1"))


MAX_TOGETHER = 64
"""Transactions that share one commit, when that many wait."""
MAX_WAITING = 10_000
"""Transactions that may wait for the writer; the next one is refused."""
BALLAST = 16 << 20
"""Octets that are held beside the file for a full disk."""
FULL_TRIES = 8
"""How often a transaction is tried again with another piece of it: those who fill the disk may be quicker once or twice."""
KEEP_EVERY_S = 5.0


class Database:
    """An open database. `await Database.open(path)`, and `close()` it at the end.

    Writers are queued and never meet each other; those that wait while a commit is being made durable share the next one.
    Readers see the last committed state and never wait for a writer.
    """

    def __init__(self, store: dialect.Sqlite, ballast: Ballast) -> None:
        self._store = store
        self._ballast = ballast
        self._kept_at = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="db-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="db-read")
        self._waiting: deque[tuple[Callable[[Connection], Any], asyncio.Future[Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._closed = False
        self.on_transaction: Callable[[str, str, float], None] = lambda kind, result, seconds: None
        """Told of every transaction that ended: `read` or `write`, `ok` or `error`, and its seconds with the wait for its turn."""
        self.on_commit: set[Callable[[], None]] = set()
        """Called in the event loop after every commit: how readers of the outbox hear that it may have grown."""

    @classmethod
    async def open(cls, path: str, *, ballast: int = BALLAST) -> "Database":
        """Opens or makes the database file, migrated to the newest release; `ballast` octets are held beside it for a full disk.

        Raises `Unavailable` with `database_in_use` while another process owns it, `database_insecure` where others could
        write it, `database_too_new`, or `database_unusable` when it cannot be opened.
        """
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
        """Runs `body(connection, …)` in one transaction that is durable on return; an exception rolls it back and comes through.

        A caller that is cancelled meanwhile does not stop the transaction. Raises `HostExhausted("host_disk_full")`,
        `Unavailable("database_unusable")` for what the file system does, and `Unavailable("database_busy")`.
        """
        self._require_open()
        if len(self._waiting) >= MAX_WAITING:
            raise Unavailable("database_busy", "Too many changes wait for the database.", "Try again in a moment.")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((lambda connection: body(connection, *args, **kwargs), future))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_waiting(), name="database writes")
        with self._timed("write"):
            return await future

    @property
    def waiting(self) -> int:
        """How many transactions wait for the writer."""
        return len(self._waiting)

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began, result = time.perf_counter(), "error"
        try:
            yield
            result = "ok"
        finally:
            self.on_transaction(kind, result, time.perf_counter() - began)

    async def require_room(self) -> None:
        """Raises `HostExhausted("host_disk_full")` while the disk is so full that only what makes room may be recorded.

        For whoever is about to record something new; deletions and what happened go on.
        """
        if not self._ballast.whole and not await self._in_thread(self._writer, self._ballast.keep):
            raise _full("The disk of the database is full: nothing new is taken on.")

    async def read(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `body(connection, …)` on one consistent state; it cannot write."""
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

    def _tell_committed(self) -> None:
        for listener in list(self.on_commit):
            try:
                listener()
            except Exception:  # the writing goes on: everyone waits for it
                log.exception("a listener to commits failed")

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("database_closed", "The database is being closed.", "Try again in a moment.")

    async def _in_thread(self, pool: ThreadPoolExecutor, body: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, body)
        except dialect.DiskFull:
            raise _full("The disk of the database is full; nothing was changed.") from None


def _full(cause: str) -> HostExhausted:
    return HostExhausted(
        "host_disk_full",
        cause,
        "Delete sandboxes, or free space on the file system of the data folder, then try again.",
    )
