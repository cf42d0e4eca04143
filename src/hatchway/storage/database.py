"""A database, asked asynchronously: whole transactions go in, their results come out.

A transaction is a plain function of a SQLAlchemy connection. Handing over the function, not single statements, makes one
switch of threads per transaction where a driver that is asynchronous per statement makes one per statement (measured: docs/decisions/
0010-whole-transactions-in-one-thread.md). Every such function behaves as if it were alone, on both databases: on SQLite there is
one writer, PostgreSQL finds out where two met and one is run again. So a function may be run more than once, and must do nothing
but read and write the database.
"""

import abc
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, text

from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.storage import outbox
from hatchway.wire import tracing

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

__all__ = ["Connection", "Database", "answers"]

BALLAST = 16 << 20
"""Octets that are held beside an SQLite file for a full disk."""


def answers(connection: Connection) -> None:
    """Asks the database for nothing, to see that it is there."""
    connection.execute(text("SELECT 1"))


class Database(abc.ABC):
    """An open database. `await Database.open(where)`, and `close()` it at the end.

    `storage.sqlite` and `storage.postgres` are the two that there are.
    """

    shared = False
    """Whether other control processes may work on it at the same time."""

    def __init__(self) -> None:
        self._closed = False
        self.on_transaction: Callable[[str, str, float], None] = lambda kind, result, seconds: None
        """Told of every transaction that ended: `read` or `write`, `ok` or `error`, and its seconds with the wait for its turn."""
        self.on_commit: set[Callable[[], None]] = set()
        """Called in the event loop after every commit, of whichever process: how readers of the outbox hear that it may have grown."""

    @staticmethod
    async def open(
        where: str, *, password: str | None = None, controller: str | None = None, ballast: int = BALLAST
    ) -> "Database":
        """Opens a database, migrated to the newest release: `postgresql://…`, or the path of an SQLite file, which is made if need be.

        `password` goes before one in the URL. `controller` is the id of this control process, which then owns the operations that it
        accepts. `ballast` octets are held beside an SQLite file for a full disk.

        Raises `Unavailable` with `database_in_use` while another process owns the file, `database_insecure` where others could
        write it, `database_too_new`, or `database_unusable` when it cannot be opened.
        """
        if where.startswith(("postgresql:", "postgres:")):
            from hatchway.storage.postgres import PostgresDatabase

            return await PostgresDatabase.connect(where, password=password, controller=controller)
        from hatchway.storage.sqlite import SqliteDatabase

        return await SqliteDatabase.make(where.removeprefix("sqlite:"), ballast=ballast)

    @abc.abstractmethod
    async def write(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `body(connection, …)` in one transaction that is durable on return; an exception rolls it back and comes through.

        A caller that is cancelled meanwhile does not stop the transaction. Raises `HostExhausted("host_disk_full")`,
        `Unavailable("database_unusable")` for what the file system or the server does, and `Unavailable("database_busy")`.
        """

    @abc.abstractmethod
    async def read(self, body: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `body(connection, …)` on one consistent state; it cannot write."""

    async def require_room(self) -> None:  # noqa: B027  # a server looks after its own disk
        """Raises `HostExhausted("host_disk_full")` while the disk is so full that only what makes room may be recorded.

        For whoever is about to record something new; deletions and what happened go on.
        """

    @property
    @abc.abstractmethod
    def waiting(self) -> int:
        """How many transactions wait to be begun."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Waits for the transactions in hand, then lets the database go. Idempotent."""

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began, result = time.perf_counter(), "error"
        try:
            yield
            result = "ok"
        finally:
            self.on_transaction(kind, result, time.perf_counter() - began)

    def _tell_committed(self) -> None:
        for listener in list(self.on_commit):
            try:
                listener()
            except Exception:  # the writing goes on: everyone waits for it
                log.exception("a listener to commits failed")

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("database_closed", "The database is being closed.", "Try again in a moment.")


def attributed(body: Callable[[Connection], T]) -> Callable[[Connection], T]:
    """The transaction with whose request it is, for what it writes into the outbox; it runs in a thread that would not know."""
    origin = tracing.current()

    def run(connection: Connection) -> T:
        connection.info[outbox.ORIGIN] = origin
        return body(connection)

    return run


def too_many() -> Unavailable:
    """The error of a transaction that finds too many before it."""
    return Unavailable("database_busy", "Too many changes wait for the database.", "Try again in a moment.")


def full(cause: str) -> HostExhausted:
    """The error of a transaction that the disk has no room for."""
    return HostExhausted(
        "host_disk_full",
        cause,
        "Delete sandboxes, or free space on the file system of the database, then try again.",
    )
