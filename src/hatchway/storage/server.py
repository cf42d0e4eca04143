"""All that is particular to PostgreSQL: how it is reached, how a transaction is run to its end, what its errors mean.

Writers are SERIALIZABLE: a transaction has the effect that it would have had alone, or the server ends it and it is run again.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url, text

from hatchway.domain.errors import HatchwayError, InvalidRequest, Unavailable
from hatchway.storage import leases, migrate, outbox
from hatchway.storage.database import full, too_many

T = TypeVar("T")

CHANNEL = "hatchway"
"""LISTEN on it tells that something was committed."""
OLDEST_SERVER = 130_000
CONNECT_WITHIN_S = 5
STATEMENT_WITHIN_S = 30
LOCK_WITHIN_S = 10
IDLE_WITHIN_S = 60
"""The server ends a transaction of a process that was stopped in the middle of it, so that what it locked is free."""
RECONNECT_WITHIN_S = 10.0
"""How long a transaction waits for a server that is being restarted."""
MEET_WITHIN_S = 15.0
"""How long a transaction is run again because it met others."""

_LOCKS = 0x48574159
"""First key of our advisory locks; the second says what for."""
_MIGRATING, _PUBLISHING = 1, 2

# Serialization failure, deadlock; a prepared statement from before a migration.
_MET = frozenset({"40001", "40P01"})
_GONE = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "53300"})
_BUSY = frozenset({"57014", "55P03"})

log = logging.getLogger(__name__)


class Server:
    """One database on a server, and the connections to it. Its methods are called in threads, any number at once up to `connections`."""

    def __init__(self, url: URL, *, controller: str | None, writers: int, readers: int) -> None:
        self.url = url
        self._controller = controller
        self._turn = threading.Lock()
        self._writing = _engine(url, writers, "SERIALIZABLE", read_only=False)
        self._reading = _engine(url, readers, "REPEATABLE READ", read_only=True)

    def open(self) -> None:
        """Connects once and migrates the database; processes that start together do so one after another.

        Raises `Unavailable` (`database_unusable database_too_new`).
        """
        try:
            with self._writing.connect() as connection:
                self._check(connection)
                connection.execution_options(isolation_level="READ COMMITTED")
                with connection.begin():
                    connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
                    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCKS}, {_MIGRATING})")
                    migrate.upgrade(connection)
        except exc.DBAPIError as error:
            raise self._translated(error) from error

    def write(self, body: Callable[[Connection], T]) -> T:
        """One transaction, durable on return; run again where it met others, and where the server went away before its end.

        A transaction of which the end was not heard is looked up before anything is done again. Those that met others are run again one
        at a time: together they would only meet again.
        """
        tries = _Tries()
        while True:
            try:
                if not tries.have_met:
                    return self._write_once(body)
                with self._turn:
                    return self._write_once(body)
            except _EndUnknown as unknown:
                tries.lost(self._translated(unknown.error))
                if unknown.number is not None and self._was_committed(unknown.number, tries):
                    result: T = unknown.result
                    return result
            except exc.DBAPIError as error:
                self._again(error, tries)

    def read(self, body: Callable[[Connection], T]) -> T:
        """One consistent view."""
        tries = _Tries()
        while True:
            try:
                with self._reading.connect() as connection, connection.begin():
                    return body(connection)
            except exc.DBAPIError as error:
                self._again(error, tries)

    def close(self) -> None:
        """Closes every connection; nothing may be in hand."""
        self._writing.dispose()
        self._reading.dispose()

    def arguments(self) -> dict[str, Any]:
        """What psycopg connects with."""
        _, arguments = self._writing.dialect.create_connect_args(self.url)
        return {**arguments, **_connect_arguments(self.url)}

    def _write_once(self, body: Callable[[Connection], T]) -> T:
        with self._writing.connect() as connection:
            published: list[dict[str, Any]] = []
            connection.info[outbox.HELD] = published
            connection.info[leases.CONTROLLER] = self._controller
            number: str | None = None
            transaction = connection.begin()
            try:
                result = body(connection)
                if published:
                    number = _publish(connection, published)
            except BaseException:
                _quietly_undo(transaction)
                raise
            try:
                transaction.commit()
            except exc.DBAPIError as error:
                if _is_gone(error):
                    raise _EndUnknown(error, number, result) from error
                raise
            return result

    def _was_committed(self, number: str, tries: "_Tries") -> bool:
        while True:
            try:
                with self._reading.connect() as connection, connection.begin():
                    query = text("SELECT pg_xact_status(CAST(:number AS xid8))")
                    status = connection.execute(query, {"number": number}).scalar()
            except exc.DBAPIError as error:
                tries.lost(self._translated(error))
                continue
            if status != "in progress":
                return bool(status == "committed")
            tries.lost(Unavailable("database_unusable", "Whether a change was made is not known yet.", "Look again."))

    def _again(self, error: exc.DBAPIError, tries: "_Tries") -> None:
        """Pauses before another try; raises where none is to be made."""
        code = _sqlstate(error)
        if code in _MET or (code == "0A000" and "cached plan" in str(error.orig)):
            tries.met(self._translated(error))
        elif code == "23505" and tries.unique():
            return  # another one may have made it since we looked; the next run sees it
        elif _is_gone(error):
            tries.lost(self._translated(error))
        elif isinstance(error, exc.IntegrityError):
            raise error
        else:
            raise self._translated(error) from error

    def _check(self, connection: Connection) -> None:
        """Raises `Unavailable("database_unusable")` for a server that lacks what we need."""
        with connection.begin():
            version = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
            encoding = str(connection.exec_driver_sql("SHOW server_encoding").scalar_one())
        if version < OLDEST_SERVER:
            raise self._unusable(f"the server is older than PostgreSQL {OLDEST_SERVER // 10_000}")
        if encoding != "UTF8":
            raise self._unusable(f"its encoding is {encoding}, not UTF8")

    def _translated(self, error: exc.DBAPIError) -> HatchwayError:
        code = _sqlstate(error)
        if code == "53100":
            return full("The disk of the database is full; nothing was changed.")
        if code in _MET or code in _BUSY:
            return too_many()
        if isinstance(error, exc.DataError):
            return InvalidRequest("invalid_field", f"A value cannot be stored: {_short(error)}.", "Send another value.")
        return self._unusable(_short(error))

    def _unusable(self, why: str) -> Unavailable:
        return Unavailable(
            "database_unusable",
            f"The database {self.url.render_as_string(hide_password=True)} cannot be used: {why}",
            "Check that the server runs, and that its address, user and password are right.",
        )


class _Tries:
    """How often one transaction was run, and until when it may be."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._number = 0
        self._unique = 0
        self.have_met = False

    def met(self, error: HatchwayError) -> None:
        """It met others: a short pause, of random length so that they do not meet again."""
        self.have_met = True
        self._pause(error, MEET_WITHIN_S, random.uniform(0.0, 0.0005 * 2 ** min(self._number, 9)))

    def lost(self, error: HatchwayError) -> None:
        """The server is away."""
        self._pause(error, RECONNECT_WITHIN_S, min(0.05 * 2**self._number, 0.5))

    def unique(self) -> bool:
        """Whether it is worth another run because a row was there already."""
        self._unique += 1
        return self._unique <= 3

    def _pause(self, error: HatchwayError, within: float, pause: float) -> None:
        if time.monotonic() - self._began + pause > within:
            raise error
        self._number += 1
        time.sleep(pause)


class _EndUnknown(Exception):
    """The connection was lost while a transaction, the one with that number, was being committed."""

    def __init__(self, error: exc.DBAPIError, number: str | None, result: Any) -> None:
        super().__init__()
        self.error, self.number, self.result = error, number, result


def address(where: str, password: str | None) -> URL:
    """The URL of a database. Raises `Unavailable("database_unusable")`; the message never has the password."""
    try:
        url = make_url(where)
    except exc.ArgumentError:
        raise Unavailable(
            "database_unusable",
            "The URL of the database is none.",
            "It looks like postgresql://user@host:5432/database?sslmode=verify-full.",
        ) from None
    url = url.set(drivername="postgresql+psycopg")
    return url if password is None else url.set(password=password)


def _engine(url: URL, connections: int, isolation: Any, *, read_only: bool) -> Engine:
    engine = create_engine(
        url,
        isolation_level=isolation,
        pool_size=connections,
        max_overflow=0,
        connect_args=_connect_arguments(url),
        json_serializer=lambda value: msgspec.json.encode(value).decode(),
        json_deserializer=msgspec.json.decode,
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: psycopg.Connection[Any], _record: Any) -> None:
        before, connection.autocommit = connection.autocommit, True
        for name, value in (
            ("statement_timeout", f"{STATEMENT_WITHIN_S}s"),
            ("lock_timeout", f"{LOCK_WITHIN_S}s"),
            ("idle_in_transaction_session_timeout", f"{IDLE_WITHIN_S}s"),
            # A scan of a whole table meets whoever writes into it. Ours all have an index to go by.
            ("enable_seqscan", "off"),
            ("jit", "off"),
            ("timezone", "UTC"),
        ):
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        connection.autocommit = before
        connection.read_only = read_only

    return engine


def _connect_arguments(url: URL) -> dict[str, Any]:
    arguments = {
        "connect_timeout": CONNECT_WITHIN_S,
        "application_name": "hatchway",
        # A server that is gone without a word is noticed.
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
    }
    return {name: value for name, value in arguments.items() if name not in url.query}


def _publish(connection: Connection, published: list[dict[str, Any]]) -> str:
    """Writes the transaction's events, as its last act, and returns its number.

    Who holds the lock commits before the next one gets a sequence: a reader that has seen one event will never find an older one.
    """
    query = (
        f"SELECT pg_advisory_xact_lock({_LOCKS}, {_PUBLISHING}), pg_notify('{CHANNEL}', ''), pg_current_xact_id()::text"
    )
    number = str(connection.exec_driver_sql(query).one()[2])
    outbox.write(connection, published)
    return number


def _quietly_undo(transaction: Any) -> None:
    try:
        transaction.rollback()
    except exc.DBAPIError:
        log.debug("a transaction ended with its connection")


def _sqlstate(error: exc.DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _is_gone(error: exc.DBAPIError) -> bool:
    code = _sqlstate(error)
    if error.connection_invalidated or (code is not None and (code in _GONE or code.startswith("08"))):
        return True
    return code is None and isinstance(error, exc.OperationalError)


def _short(error: exc.DBAPIError) -> str:
    diagnostic = getattr(error.orig, "diag", None)
    message = getattr(diagnostic, "message_primary", None) or str(error.orig)
    return " ".join(message.split())[:500]
