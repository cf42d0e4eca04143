"""The outbox: an append-only list of what happened, written in the transaction that made it happen.

Event streams and the audit journal are fed from it: what is in the one is in the other, in the same order, and nothing can be changed without it.
"""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, false, func, insert, select, text

from hatchway.storage.rows import EventRow
from hatchway.storage.tables import events, sandboxes

INSTALLATION = ""
"""Project of the events that belong to no project, such as a node that went away; only administrators see them."""

ORIGIN = "origin"
"""Where a connection keeps whose transaction it is: what `wire.tracing` has of the request that it belongs to."""
HELD = "outbox"
"""Where a connection keeps the events of its transaction that are written at its end, together; without it they are written at once."""

_INSERT = insert(events)
_WRITE = text(
    "INSERT INTO events (project, kind, subject, data, created_at, actor, request_id, unseen)"
    " SELECT one->>'project', one->>'kind', one->>'subject', one->'data', (one->>'created_at')::double precision,"
    " one->>'actor', one->>'request_id', (one->>'unseen')::boolean"
    " FROM json_array_elements(CAST(:rows AS json)) WITH ORDINALITY AS held(one, place) ORDER BY place"
)
_AFTER = (
    select(events)
    .where(
        events.c.sequence > bindparam("after"),
        events.c.project.in_(bindparam("projects", expanding=True)),
        events.c.unseen == false(),
    )
    .order_by(events.c.sequence)
    .limit(bindparam("count"))
)
_AFTER_ANY = (
    select(events).where(events.c.sequence > bindparam("after")).order_by(events.c.sequence).limit(bindparam("count"))
)


STATE_CHANGED = "sandbox.state_changed"


def append(
    connection: Connection, project: str, kind: str, subject: str, data: dict[str, Any], *, unseen: bool = False
) -> None:
    """Adds an event to the transaction; an `unseen` one is in the audit journal only."""
    origin: dict[str, str] = connection.info.get(ORIGIN) or {}
    row = {
        "project": project,
        "kind": kind,
        "subject": subject[:64],
        "data": data,
        "created_at": time.time(),
        "actor": origin.get("key_id"),
        "request_id": origin.get("request_id"),
        "unseen": unseen,
    }
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


def states_after(connection: Connection, sequence: int, annotation: str, limit: int) -> tuple[list[EventRow], int]:
    """The changes of state after `sequence` of sandboxes that have this annotation, of all projects, oldest first; and up to where was looked."""
    upto = bounds(connection)[1]
    wanted = (
        select(events)
        .join(sandboxes, sandboxes.c.id == events.c.subject)
        .where(
            events.c.sequence > sequence,
            events.c.sequence <= upto,
            events.c.kind == STATE_CHANGED,
            events.c.unseen == false(),
            sandboxes.c.annotations[annotation].as_string().is_not(None),
        )
        .order_by(events.c.sequence)
        .limit(limit)
    )
    found = [EventRow(**row) for row in connection.execute(wanted).mappings()]
    return found, found[-1].sequence if len(found) == limit else max(upto, sequence)


def bounds(connection: Connection) -> tuple[int, int]:
    """The first and the last sequence that are kept; (0, 0) when none is."""
    first, last = connection.execute(select(func.min(events.c.sequence), func.max(events.c.sequence))).one()
    return first or 0, last or 0
