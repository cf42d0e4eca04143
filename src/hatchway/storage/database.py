"""One database, asked asynchronously: whole transactions go in, their results come out.

A transaction is a plain function of a SQLAlchemy connection. Handing over the function, not single statements, makes one
switch of threads per transaction where a driver that is asynchronous per statement makes one per statement (measured: docs/decisions/
0101-database-threads.md). The same functions run on PostgreSQL through `AsyncConnection.run_sync`.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, text

from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.storage import dialect, migrate

P = ParamSpec("P")
T = TypeVar("T")


__all__ = ["Connection", "Database", "answers"]


def answers(connection: Connection) -> None:
    """Asks the database for nothing, to see that it is there."""
    connection.execute(text("SELECT 1"))


class Database:
    """An open database. `await Database.open(path)`, and `close()` it at the end.

    Writers are queued and never meet each other; readers see the last committed state and never wait for a writer.
    """

    def __init__(self, store: dialect.Sqlite) -> None:
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="db-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="db-read")
        self._closed = False
        self.on_commit: set[Callable[[], None]] = set()
        """Called in the event loop after every transaction that wrote: how readers of the outbox hear that it may have grown."""

    @classmethod
    async def open(cls, path: str) -> "Database":
        """Opens or makes the database file, migrated to the newest release.

        Raises `Unavailable` with `database_in_use` while another process owns it, `database_insecure` where others could
        write it, `database_too_new`, or `database_unusable` when it cannot be opened.
        """
        store = dialect.Sqlite(path)
        database = cls(store)
        try:
            await database._run(database._writer, store.open_writer)
            await database.write(migrate.upgrade)
            await database._run(database._reader, store.open_reader)
        except BaseException:
            await database.close()
            raise
        return database

    async def write(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `body(connection, …)` in one transaction that is durable on return; an exception rolls it back and comes through.

        A caller that is cancelled meanwhile does not stop the transaction. Raises `HostExhausted("host_disk_full")` and
        `Unavailable("database_unusable")` for what the file system does.
        """
        result = await self._run(
            self._writer, lambda: self._store.write(lambda connection: body(connection, *args, **kwargs))
        )
        for listener in list(self.on_commit):
            listener()
        return result

    async def read(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `body(connection, …)` on one consistent state; it cannot write."""
        return await self._run(
            self._reader, lambda: self._store.read(lambda connection: body(connection, *args, **kwargs))
        )

    async def close(self) -> None:
        """Waits for the transactions in hand, closes the file and gives up its lock. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._reader, self._store.close_reader)
        await loop.run_in_executor(self._writer, self._store.close_writer)
        self._reader.shutdown()
        self._writer.shutdown()

    async def _run(self, pool: ThreadPoolExecutor, body: Callable[[], T]) -> T:
        if self._closed:
            raise Unavailable("database_closed", "The database is being closed.", "Try again in a moment.")
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, body)
        except dialect.DiskFull:
            raise HostExhausted(
                "host_disk_full",
                "The disk of the database is full; nothing was changed.",
                "Free space on the file system of the data folder, then try again.",
            ) from None
