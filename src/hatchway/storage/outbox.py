"""The outbox: an append-only list of what happened, written in the transaction that made it happen."""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, func, insert, select, text

from hatchway.storage.rows import EventRow
from hatchway.storage.tables import events

INSTALLATION = ""
"""Project of the events that belong to no project, such as a node that went away; only administrators see them."""

HELD = "outbox"
"""Where a connection keeps the events of its transaction that are written at its end, together; without it they are written at once."""

_INSERT = insert(events)
_WRITE = text(
    "INSERT INTO events (project, kind, subject, data, created_at)"
    " SELECT one->>'project', one->>'kind', one->>'subject', one->'data', (one->>'created_at')::double precision"
    " FROM json_array_elements(CAST(:rows AS json)) WITH ORDINALITY AS held(one, place) ORDER BY place"
)
_AFTER = (
    select(events)
    .where(events.c.sequence > bindparam("after"), events.c.project.in_(bindparam("projects", expanding=True)))
    .order_by(events.c.sequence)
    .limit(bindparam("count"))
)
_AFTER_ANY = (
    select(events).where(events.c.sequence > bindparam("after")).order_by(events.c.sequence).limit(bindparam("count"))
)


def append(connection: Connection, project: str, kind: str, subject: str, data: dict[str, Any]) -> None:
    """Adds an event to the transaction."""
    row = {"project": project, "kind": kind, "subject": subject[:64], "data": data, "created_at": time.time()}
    held: list[dict[str, Any]] | None = connection.info.get(HELD)
    if held is None:
        connection.execute(_INSERT, row)
    else:
        held.append(row)


def write(connection: Connection, held: list[dict[str, Any]]) -> None:
    """Writes what was held, in its order, in one statement. On PostgreSQL."""
    connection.execute(_WRITE, {"rows": msgspec.json.encode(held).decode()})


def after_any(connection: Connection, sequence: int, limit: int) -> list[EventRow]:
    """The events of all projects after `sequence`, oldest first, at most `limit`."""
    rows = connection.execute(_AFTER_ANY, {"after": sequence, "count": limit}).mappings()
    return [EventRow(**row) for row in rows]


def after(connection: Connection, sequence: int, projects: tuple[str, ...], limit: int) -> list[EventRow]:
    """The events after `sequence`, oldest first, at most `limit`."""
    rows = connection.execute(_AFTER, {"after": sequence, "projects": projects, "count": limit}).mappings()
    return [EventRow(**row) for row in rows]


def bounds(connection: Connection) -> tuple[int, int]:
    """The first and the last sequence that are kept; (0, 0) when none is."""
    first, last = connection.execute(select(func.min(events.c.sequence), func.max(events.c.sequence))).one()
    return first or 0, last or 0
