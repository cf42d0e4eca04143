"""What is done unasked: at deadlines, by schedules of snapshots, and by the ages that a project bounds.

Each function is one transaction, and looks once more whether it is still to be done: between the look that found it due and this
one, a request or another control process may have come.
"""

from typing import Any

import msgspec
from sqlalchemy import Connection, select, update

from hatchway.domain import schedules
from hatchway.domain.lifecycle import VERBS, SnapshotKind, State, Verb
from hatchway.domain.quotas import Caps
from hatchway.domain.schedules import Dropped, Point, Schedule
from hatchway.storage import accepting, lifetimes, outbox, rows, sandboxes, snapshots
from hatchway.storage.accepting import Accepted
from hatchway.storage.rows import SandboxRow
from hatchway.storage.tables import projects
from hatchway.storage.tables import sandboxes as table
from hatchway.storage.tables import snapshots as snapshots_table


def expire(connection: Connection, sandbox_id: str, now: float) -> Accepted | None:
    """Has done what is to be done at a deadline that has come; None where none has (any more)."""
    found = lifetimes.expected(connection, sandbox_id, now)
    if found is None:
        return None
    row, why, verb = found
    desired = VERBS[verb].target
    assert desired is not None
    arguments = {lifetimes.AUTOMATIC: str(why)}
    accepted = accepting.take(connection, row, verb, None, desired=desired, arguments=arguments)
    data = {"why": str(why), "action": str(verb), "tries": row.tries, "operation": accepted.operation.id}
    outbox.append(connection, row.project, "sandbox.timeout", row.id, data)
    return accepted


def wake(connection: Connection, sandbox_id: str) -> Accepted | None:
    """Wakes a sandbox for the traffic that waits for it; None where it has something in hand, runs, or is not woken by traffic.

    Raises `Forbidden("quota_exceeded")`.
    """
    row = sandboxes.find(connection, sandbox_id)
    if row is None or row.operation_id is not None or not row.auto_wake or row.state not in VERBS[Verb.WAKE].sources:
        return None
    accepted = accepting.accept_verb(connection, row.project, row.id, Verb.WAKE, None)
    data = {"why": "traffic", "state": str(row.state), "operation": accepted.operation.id}
    outbox.append(connection, row.project, "sandbox.wake", row.id, data)
    return accepted


def snapshot(connection: Connection, sandbox_id: str, now: float) -> Accepted | None:
    """Makes a snapshot that a schedule asks for now; None where none is due (any more). A full one stands for a disk one that is due too."""
    row = sandboxes.find(connection, sandbox_id)
    if row is None or row.operation_id is not None or row.state is not State.RUNNING or row.schedule is None:
        return None
    schedule = msgspec.convert(row.schedule, Schedule)
    full = row.full_due_at is not None and row.full_due_at <= now
    if not full and (row.disk_due_at is None or row.disk_due_at > now):
        return None
    _beat(connection, row, schedule, now)
    kind = SnapshotKind.FULL if full else SnapshotKind.DISK
    return snapshots.accept(connection, row.project, row.id, kind, None, None, scheduled=True)


def put_off(connection: Connection, sandbox_id: str, now: float, error: dict[str, Any]) -> None:
    """A snapshot that is due cannot be taken on (a quota, a full disk): that is said, and the next one is made on its beat."""
    row = sandboxes.find(connection, sandbox_id)
    if row is None or row.operation_id is not None or row.state is not State.RUNNING or row.schedule is None:
        return
    _beat(connection, row, msgspec.convert(row.schedule, Schedule), now)
    outbox.append(connection, row.project, "snapshot.refused", row.id, {"error": error})


def _beat(connection: Connection, row: SandboxRow, schedule: Schedule, now: float) -> None:
    """The next of those that are due now; also when this one fails, so that no failure is repeated at once."""
    values: dict[str, Any] = {}
    for name, every_s in (("disk_due_at", schedule.disk_every_s), ("full_due_at", schedule.full_every_s)):
        before = getattr(row, name)
        if before is None or before <= now:
            values[name] = schedules.next_due(before, every_s, now)
    after = msgspec.structs.replace(row, **values)
    due_at = lifetimes.due_at(lifetimes.of(after), after)
    connection.execute(update(table).where(table.c.id == row.id).values(**values, due_at=due_at))


def thin(connection: Connection, sandbox_id: str, now: float) -> list[Dropped]:
    """Deletes what the schedule of a sandbox does not keep of the snapshots that it made; says which and why."""
    row = sandboxes.find(connection, sandbox_id)
    if row is None or row.schedule is None:
        return []
    query = select(snapshots_table).where(
        snapshots_table.c.sandbox_id == sandbox_id, snapshots_table.c.state == "ready", snapshots_table.c.scheduled
    )
    points = [
        Point(one.id, str(one.kind), one.created_at, (one.disk_bytes or 0) + (one.memory_bytes or 0))
        for one in map(rows.snapshot, connection.execute(query).mappings())
    ]
    dropped = schedules.thin(points, msgspec.convert(row.schedule, Schedule), now)
    # The snapshot that a rollback in hand goes to must stay until it is there.
    used = snapshots.in_use(connection, [one.id for one in dropped])
    gone = [one for one in dropped if one.id not in used]
    for one in gone:
        snapshots.begin_delete(connection, row.project, one.id)
        data = {"sandbox": sandbox_id, "why": one.why}
        outbox.append(connection, row.project, "snapshot.expired", one.id, data)
    return gone


def bounds(connection: Connection, project: str) -> Caps:
    """What each sandbox of a project is bounded by."""
    caps = connection.execute(select(projects.c.caps).where(projects.c.name == project)).scalar_one_or_none()
    return msgspec.convert(caps or {}, Caps)


def all_bounds(connection: Connection) -> dict[str, Caps]:
    """The caps of every project that has any."""
    found = connection.execute(select(projects.c.name, projects.c.caps))
    return {name: msgspec.convert(caps, Caps) for name, caps in found if caps}


def scheduled(connection: Connection) -> list[str]:
    """The sandboxes that have a schedule."""
    query = select(table.c.id).where(table.c.schedule.is_not(None), table.c.state != State.DELETED)
    return list(connection.execute(query).scalars())


def too_old_suspended(connection: Connection, project: str, before: float, limit: int) -> list[str]:
    """The project's sandboxes that have been suspended since before that time."""
    query = (
        select(table.c.id)
        .where(
            table.c.state == State.SUSPENDED,
            table.c.state_since < before,
            table.c.project == project,
            table.c.operation_id.is_(None),
        )
        .limit(limit)
    )
    return list(connection.execute(query).scalars())


def delete_suspended(connection: Connection, sandbox_id: str, before: float) -> Accepted | None:
    """Deletes a sandbox that has been suspended since before that time; None where it has not (any more)."""
    row = sandboxes.find(connection, sandbox_id)
    if (
        row is None
        or row.operation_id is not None
        or row.state is not State.SUSPENDED
        or row.state_since is None
        or row.state_since >= before
    ):
        return None
    arguments = {lifetimes.AUTOMATIC: "max_suspended"}
    accepted = accepting.take(connection, row, Verb.DELETE, None, desired=State.DELETED, arguments=arguments)
    data = {"why": "max_suspended", "suspended_since": row.state_since, "operation": accepted.operation.id}
    outbox.append(connection, row.project, "sandbox.expired", row.id, data)
    return accepted


def delete_snapshots(connection: Connection, project: str, before: float, limit: int) -> int:
    """Deletes the project's snapshots that were made before that time; returns how many. Call again while that is `limit`."""
    table_ = snapshots_table
    query = (
        select(table_.c.id)
        .where(table_.c.project == project, table_.c.created_at < before, table_.c.state == "ready")
        .limit(limit)
    )
    old = list(connection.execute(query).scalars())
    used = snapshots.in_use(connection, old)
    for one in old:
        if one not in used:
            snapshots.begin_delete(connection, project, one)
            outbox.append(connection, project, "snapshot.expired", one, {"why": "max_age"})
    return len(old) - len(used)
