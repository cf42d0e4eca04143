"""All that is particular to SQLite: how the file is opened, locked and written. Everything else is portable SQL."""

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, exc

from hatchway.domain.errors import Unavailable

T = TypeVar("T")

BUSY_TIMEOUT_MS = 5_000
"""How long a transaction waits for a tool of the operator that holds the file (a backup, a shell)."""


class DiskFull(Exception):
    """The file system has no room for the transaction; it was rolled back."""


@dataclass(frozen=True)
class Outcome:
    """How one transaction ended: with a result, or with the exception that rolled it back."""

    result: Any = None
    error: Exception | None = None


class Sqlite:
    """One database file: a connection that writes and one that reads, each used by one thread only."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock_fd: int | None = None
        self._engines: list[Engine] = []
        self._writer: Connection | None = None
        self._reader: Connection | None = None

    def open_writer(self) -> None:
        """Takes the lock of the file and opens it; makes it with mode 0600 when it is not there."""
        try:
            self._lock()
            self._check_file()
            self._writer = self._connect("BEGIN IMMEDIATE", read_only=False)
        except (OSError, exc.DBAPIError) as error:
            raise _unusable(self.path, error) from error

    def open_reader(self) -> None:
        """Opens the second connection; the file must have been made."""
        self._reader = self._connect("BEGIN", read_only=True)

    def write(self, bodies: Sequence[Callable[[Connection], Any]]) -> list[Outcome]:
        """Several transactions with one commit, durable on return.

        Each is undone alone when it raises. What makes the file unusable undoes all of them and is raised: `DiskFull`,
        `Unavailable`.
        """
        assert self._writer is not None
        writer = self._writer
        if len(bodies) == 1:
            try:
                return [Outcome(result=self._transaction(writer, bodies[0]))]
            except (DiskFull, Unavailable):
                raise
            except Exception as error:  # noqa: BLE001  # it is given to the one who asked
                return [Outcome(error=error)]

        def all_of_them(connection: Connection) -> list[Outcome]:
            return [_one_of_several(connection, body) for body in bodies]

        return self._transaction(writer, all_of_them)

    def read(self, body: Callable[[Connection], T]) -> T:
        """One consistent view."""
        assert self._reader is not None
        return self._transaction(self._reader, body)

    def close_reader(self) -> None:
        """Closes the reading connection."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close_writer(self) -> None:
        """Closes the file and gives up its lock."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for engine in self._engines:
            engine.dispose()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _transaction(self, connection: Connection, body: Callable[[Connection], T]) -> T:
        try:
            with connection.begin():
                return body(connection)
        except exc.OperationalError as error:
            code = getattr(error.orig, "sqlite_errorcode", 0)
            if code & 0xFF == sqlite3.SQLITE_FULL:
                raise DiskFull from error
            raise _unusable(self.path, error) from error
        except exc.DatabaseError as error:
            if isinstance(error, exc.IntegrityError):
                raise
            raise _unusable(self.path, error) from error

    def _lock(self) -> None:
        # flock belongs to the open file: the kernel gives it up when the process dies, however it dies.
        fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise Unavailable(
                "database_in_use",
                f"Another control process works on {self.path}.",
                "Stop it (`hatchway down`), or start this one with another data folder.",
            ) from None
        self._lock_fd = fd

    def _check_file(self) -> None:
        # SQLite would make the file with the umask's mode; its journal files take over the mode of the file.
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise Unavailable(
                    "database_insecure",
                    f"{self.path} belongs to another user, or others can read or write it.",
                    f"Check who changed it, then `chown {os.geteuid()}` and `chmod 600` it.",
                )
        finally:
            os.close(fd)

    def _connect(self, begin: str, *, read_only: bool) -> Connection:
        engine = create_engine(
            f"sqlite+pysqlite:///{self.path}",
            json_serializer=lambda value: msgspec.json.encode(value).decode(),
            json_deserializer=msgspec.json.decode,
        )
        self._engines.append(engine)

        @event.listens_for(engine, "connect")
        def configure(connection: sqlite3.Connection, _record: Any) -> None:
            # Transactions are begun by us, not guessed by the driver.
            connection.isolation_level = None
            for pragma in (
                f"busy_timeout = {BUSY_TIMEOUT_MS}",
                "journal_mode = WAL",
                "synchronous = FULL",
                "foreign_keys = ON",
                "cache_size = -2048",
                "query_only = ON" if read_only else "query_only = OFF",
            ):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def start(connection: Connection) -> None:
            connection.exec_driver_sql(begin)

        return engine.connect()


def _one_of_several(connection: Connection, body: Callable[[Connection], Any]) -> Outcome:
    # In plain SQL: SQLAlchemy's nested transactions keep books that nothing here needs.
    connection.exec_driver_sql("SAVEPOINT one")
    try:
        result = body(connection)
    except exc.DatabaseError as error:
        if not isinstance(error, exc.IntegrityError):
            raise  # the file, not the transaction: SQLite may have undone all of it
        outcome = Outcome(error=error)
    except Exception as error:  # noqa: BLE001  # it is given to the one who asked
        outcome = Outcome(error=error)
    else:
        connection.exec_driver_sql("RELEASE one")
        return Outcome(result=result)
    connection.exec_driver_sql("ROLLBACK TO one")
    connection.exec_driver_sql("RELEASE one")
    return outcome


def _unusable(path: Path, error: Exception) -> Unavailable:
    detail = error.orig if isinstance(error, exc.DBAPIError) else error
    return Unavailable(
        "database_unusable",
        f"The database {path} cannot be used: {detail}",
        "Check the disk and the file's owner and mode.",
    )
