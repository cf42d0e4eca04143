"""The outbox: an append-only list of what happened, written in the transaction that made it happen."""

import time
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select

from hatchway.storage.rows import EventRow
from hatchway.storage.tables import events

INSTALLATION = ""
"""Project of the events that belong to no project, such as a node that went away; only administrators see them."""

_INSERT = insert(events)
_AFTER = (
    select(events)
    .where(events.c.sequence > bindparam("after"), events.c.project.in_(bindparam("projects", expanding=True)))
    .order_by(events.c.sequence)
    .limit(bindparam("count"))
)


def append(connection: Connection, project: str, kind: str, subject: str, data: dict[str, Any]) -> None:
    """Adds an event to the transaction."""
    connection.execute(
        _INSERT, {"project": project, "kind": kind, "subject": subject, "data": data, "created_at": time.time()}
    )


def after(connection: Connection, sequence: int, projects: tuple[str, ...], limit: int) -> list[EventRow]:
    """The events after `sequence`, oldest first, at most `limit`."""
    rows = connection.execute(_AFTER, {"after": sequence, "projects": projects, "count": limit}).mappings()
    return [EventRow(**row) for row in rows]


def bounds(connection: Connection) -> tuple[int, int]:
    """The first and the last sequence that are kept; (0, 0) when none is."""
    first, last = connection.execute(select(func.min(events.c.sequence), func.max(events.c.sequence))).one()
    return first or 0, last or 0
