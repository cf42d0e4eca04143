"""What is forgotten, and when: a periodic sweep in small transactions."""

import time

from sqlalchemy import Connection, delete, func, select

from hatchway.domain.lifecycle import State
from hatchway.storage import approvals, audit, exports, operations, settings, snapshots, tokens
from hatchway.storage.tables import events, idempotency_keys, sandboxes, sessions
from hatchway.storage.tables import operations as operations_table

DELETED_SANDBOX_S = 3600.0
OPERATION_S = 24 * 3600.0
SESSION_S = 8 * 24 * 3600.0
"""Longer than any output is kept."""
CLOSED_SESSION_S = 3600.0
EVENT_S = 24 * 3600.0
MAX_EVENTS = 200_000
BATCH = 200
"""Sandboxes per transaction: a sweep must not hold up a create."""

PURGED_TO = "events_purged_to"


def sweep(connection: Connection, now: float | None = None, *, deleted_sandbox_s: float = DELETED_SANDBOX_S) -> int:
    """Purges what has passed its time; returns how many sandboxes went. Call again while that is `BATCH`."""
    now = time.time() if now is None else now
    gone = [
        row.id
        for row in connection.execute(
            select(sandboxes.c.id)
            .where(sandboxes.c.state == State.DELETED, sandboxes.c.deleted_at < now - deleted_sandbox_s)
            .limit(BATCH)
        )
    ]
    if gone:
        connection.execute(delete(sessions).where(sessions.c.sandbox_id.in_(gone)))
        connection.execute(delete(operations_table).where(operations_table.c.target.in_(gone)))
        connection.execute(delete(sandboxes).where(sandboxes.c.id.in_(gone)))
    connection.execute(delete(idempotency_keys).where(idempotency_keys.c.expires_at < now))
    connection.execute(
        delete(operations_table).where(
            operations_table.c.status.not_in(operations.OPEN), operations_table.c.finished_at < now - OPERATION_S
        )
    )
    # Also those that nobody ever started: no node keeps them for so long.
    over = ("new", "created", "ended")
    connection.execute(delete(sessions).where(sessions.c.state.in_(over), sessions.c.updated_at < now - SESSION_S))
    connection.execute(
        delete(sessions).where(
            sessions.c.state.in_(("deleted", "lost")), sessions.c.updated_at < now - CLOSED_SESSION_S
        )
    )
    exports.sweep(connection, now)
    snapshots.purge(connection, now - deleted_sandbox_s)
    tokens.purge(connection, now)
    approvals.purge(connection, now)
    _sweep_events(connection, now)
    return len(gone)


def _sweep_events(connection: Connection, now: float) -> None:
    old = connection.execute(select(func.max(events.c.sequence)).where(events.c.created_at < now - EVENT_S)).scalar()
    last = connection.execute(select(func.max(events.c.sequence))).scalar()
    purge_to = max(old or 0, (last or 0) - MAX_EVENTS)
    recorded = audit.position(connection)
    if recorded is not None:  # what the journal does not have yet must stay
        purge_to = min(purge_to, recorded.sequence)
    if purge_to > 0:
        done = connection.execute(delete(events).where(events.c.sequence <= purge_to))
        if done.rowcount:
            settings.put(connection, PURGED_TO, purge_to)
