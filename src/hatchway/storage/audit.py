"""What the audit journal gets of the control plane: the outbox, from where the journal stands.

A record is written in the transaction of what it is about, and is in the outbox until the audit writer has made it durable. Its number
among the control plane's records is counted in the database before it is sent: whoever sends it, and however often, sends it under that number.
"""

from typing import Any

import msgspec
from sqlalchemy import Connection, func, select, update

from hatchway.domain.ids import new_id
from hatchway.storage import outbox, settings
from hatchway.storage.rows import EventRow
from hatchway.storage.tables import events
from hatchway.wire.audit import Entry

POSITION = "audit_position"
"""Setting: how far the journal is. Without it there is no journal."""
SENDER = "control"
ENTRY = "entry"
"""In the data of an event that is a record by itself."""
OF_SANDBOX = frozenset({"sandbox", "token", "operation"})
"""Kinds whose subject is a sandbox."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The journal has the events up to `sequence`, as the records up to `number` of `source`."""

    source: str
    number: int
    sequence: int
    sent: int = 0
    """The highest number that may have been sent: stored before it is."""


def record(connection: Connection, entry: Entry) -> None:
    """Adds a record to the transaction that is no event for clients. `actor` and `request_id` are the transaction's."""
    told = {ENTRY: msgspec.to_builtins(entry)}
    outbox.append(connection, entry.project, entry.kind, entry.sandbox_id, told, unseen=True)


def position(connection: Connection) -> Position | None:
    """How far the journal is; None where there is none."""
    stored = settings.get(connection, POSITION)
    return None if stored is None else msgspec.convert(stored, Position)


def begin(connection: Connection, known: dict[str, int] | None = None) -> Position:
    """How far the journal is, from which on it is to be told.

    `known` is what the writer has by our source, when it was asked before this transaction. If that is more than was ever sent
    according to the database, the database is an older one that was restored: it goes on under another name, or new records would be
    taken for repetitions.
    """
    now = position(connection)
    if now is None or (known or {}).get(now.source, 0) > now.sent:
        sequence = 0 if now is None else now.sequence
        now = Position(source=f"{SENDER}/{new_id()}", number=0, sequence=sequence)
        settings.put(connection, POSITION, msgspec.to_builtins(now))
    return now


def pending(connection: Connection, after: Position, limit: int) -> list[tuple[int, Entry]]:
    """The records behind a position, with the sequence of each."""
    return [(row.sequence, entry_of(row)) for row in outbox.after_any(connection, after.sequence, limit)]


def reserve(connection: Connection, before: Position, count: int) -> Position:
    """Takes note that so many records behind a position are about to be sent. Another process may have been quicker: then where that one is."""
    now = position(connection)
    if now is None or now.source != before.source or now.number != before.number:
        return now or before
    after = msgspec.structs.replace(now, sent=max(now.sent, now.number + count))
    if after != now:
        settings.put(connection, POSITION, msgspec.to_builtins(after))
    return after


def settle(connection: Connection, before: Position, number: int, sequence: int) -> Position:
    """Takes note of what the journal has. Another process may have been quicker."""
    now = position(connection)
    if now is None or now.source != before.source or now.number >= number:
        return now or before
    after = Position(source=now.source, number=number, sequence=sequence, sent=max(now.sent, number))
    settings.put(connection, POSITION, msgspec.to_builtins(after))
    return after


def hide(connection: Connection, project: str) -> None:
    """What the journal does not have yet of a project that is forgotten: nobody else sees it any more, and it goes when it is recorded."""
    now = position(connection)
    if now is not None:
        waiting = (events.c.project == project, events.c.sequence > now.sequence)
        connection.execute(update(events).where(*waiting).values(unseen=True))


def behind(connection: Connection) -> int:
    """How many records the journal does not have yet, at most."""
    now = position(connection)
    if now is None:
        return 0
    last = connection.execute(select(func.max(events.c.sequence))).scalar() or 0
    return max(0, last - now.sequence)


def forget(connection: Connection) -> None:
    """There is no journal any more: nothing is kept for it."""
    if position(connection) is not None:
        settings.put(connection, POSITION, None)


def entry_of(row: EventRow) -> Entry:
    """An event as a record."""
    actor, request_id = row.actor or SENDER, row.request_id or ""
    if row.unseen and ENTRY in row.data:
        entry = msgspec.convert(row.data[ENTRY], Entry)
        return msgspec.structs.replace(entry, actor=row.actor or entry.actor or SENDER, request_id=request_id)
    area, _, what = row.kind.partition(".")
    data: dict[str, Any] = {**row.data, "subject": row.subject, "event": row.sequence}
    error, decided = row.data.get("error"), row.data.get("decision")
    return Entry(
        kind=row.kind,
        time=row.created_at,
        project=row.project,
        sandbox_id=row.subject if area in OF_SANDBOX else str(row.data.get("sandbox") or ""),
        actor=actor,
        request_id=request_id,
        decision=str(decided or ("failed" if what in ("failed", "refused") else "asked" if what == "asked" else "")),
        reason=str(error.get("code", "")) if isinstance(error, dict) else "",
        data=data,
    )
