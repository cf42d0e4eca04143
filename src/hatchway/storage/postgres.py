"""The database on a PostgreSQL server: transactions in a bounded number of threads, beside those of other control processes."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate

import psycopg
from sqlalchemy import Connection

from hatchway.storage.database import Database, P, T, attributed, too_many
from hatchway.storage.server import CHANNEL, Server, address
from hatchway.wire.fault_points import reached

WRITERS = 8
READERS = 4
"""Connections of one control process, and one more that listens."""
MAX_WAITING = 10_000
"""Transactions in hand; the next one is refused."""
LISTEN_AGAIN_S = 0.5

log = logging.getLogger(__name__)


class PostgresDatabase(Database):
    """See `Database`. What other processes commit rings `on_commit` too."""

    shared = True

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="db-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="db-read")
        self._in_hand: set[asyncio.Future[Any]] = set()
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, where: str, *, password: str | None, controller: str | None) -> "PostgresDatabase":
        """See `Database.open`."""
        server = Server(address(where, password), controller=controller, writers=WRITERS, readers=READERS)
        database = cls(server)
        try:
            await asyncio.get_running_loop().run_in_executor(database._writers, server.open)
        except BaseException:
            await database.close()
            raise
        database._listening = asyncio.get_running_loop().create_task(database._listen(), name="database notifications")
        return database

    async def write(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Database.write`."""
        with self._timed("write"):
            transaction = attributed(lambda connection: body(connection, *args, **kwargs))
            result = await self._in_thread(self._writers, lambda: self._server.write(transaction), True)
            reached("written", getattr(body, "__qualname__", "?"))
            return result

    async def read(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Database.read`."""
        with self._timed("read"):
            return await self._in_thread(
                self._readers, lambda: self._server.read(lambda connection: body(connection, *args, **kwargs)), False
            )

    @property
    def waiting(self) -> int:
        """How many transactions wait for a connection."""
        return max(0, len(self._in_hand) - WRITERS - READERS)

    async def close(self) -> None:
        """See `Database.close`."""
        if self._closed:
            return
        self._closed = True
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await asyncio.gather(*self._in_hand, return_exceptions=True)
        self._writers.shutdown()
        self._readers.shutdown()
        self._server.close()

    async def _in_thread(self, pool: ThreadPoolExecutor, body: Callable[[], T], writes: bool) -> T:
        self._require_open()
        if len(self._in_hand) >= MAX_WAITING:
            raise too_many()
        future = asyncio.get_running_loop().run_in_executor(pool, body)
        self._in_hand.add(future)

        def ended(done: asyncio.Future[T]) -> None:
            self._in_hand.discard(done)
            # Asking for the exception of a transaction whose caller is gone also says that somebody saw it.
            if not done.cancelled() and done.exception() is None and writes:
                self._tell_committed()

        future.add_done_callback(ended)
        return await asyncio.shield(future)

    async def _listen(self) -> None:
        """Rings for what others commit. While it cannot listen it rings now and then: whoever waits looks for himself."""
        told = False
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(**self._server.arguments(), autocommit=True)
                async with connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    told = False
                    self._tell_committed()
                    async for _ in connection.notifies():
                        self._tell_committed()
            except (psycopg.Error, OSError) as error:
                if not told:
                    log.warning("not listening to the database: %s", error)
                    told = True
            self._tell_committed()
            with contextlib.suppress(TimeoutError):
                await asyncio.sleep(LISTEN_AGAIN_S)
