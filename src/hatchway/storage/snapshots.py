"""Snapshots: kept states of sandboxes, each with a life of its own.

A row is made with the operation that makes the snapshot (`pending`) and becomes `ready` or `failed` with it. Deleting is two
steps, so that a node that is away keeps nothing for good: `deleting` is what is wanted, `deleted` is what its node said.
"""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, insert, select, tuple_, update

from hatchway.domain.errors import Conflict, Forbidden, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import ROLLBACK_TARGETS, SNAPSHOT_SOURCES, SnapshotKind, Verb
from hatchway.storage import accepting, ending, idempotency, operations, outbox, quotas, rows, sandboxes
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.ending import Finished
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import OperationRow, SnapshotRow
from hatchway.storage.tables import operations as operations_table
from hatchway.storage.tables import sandboxes as sandboxes_table
from hatchway.storage.tables import snapshots
from hatchway.wire.node import Observed, Snapshot, SnapshotMade

_ONE = select(snapshots).where(snapshots.c.id == bindparam("id"))


def find(connection: Connection, snapshot_id: str) -> SnapshotRow | None:
    """The snapshot of any project, or None."""
    row = connection.execute(_ONE, {"id": snapshot_id}).mappings().one_or_none()
    return None if row is None else rows.snapshot(row)


def get(connection: Connection, project: str, snapshot_id: str) -> SnapshotRow:
    """Raises `NotFound("unknown_snapshot")`, also for one of another project."""
    row = find(connection, snapshot_id)
    if row is None or row.project != project:
        raise NotFound(
            "unknown_snapshot", f"There is no snapshot {snapshot_id}.", "GET /v1/snapshots lists those that there are."
        )
    return row


def get_ready(connection: Connection, project: str, snapshot_id: str) -> SnapshotRow:
    """Like `get`; raises `Conflict("snapshot_not_ready")` for one that nothing can be made from."""
    row = get(connection, project, snapshot_id)
    if row.state != "ready":
        raise Conflict(
            "snapshot_not_ready",
            f"The snapshot {snapshot_id} is {row.state}.",
            "Wait for its operation to end." if row.state == "pending" else "Use another snapshot.",
            state=row.state,
        )
    return row


def list_page(
    connection: Connection,
    project: str,
    *,
    sandbox_id: str | None = None,
    kind: str | None = None,
    name: str | None = None,
    state: str | None = None,
    before: tuple[float, str] | None = None,
    limit: int,
) -> list[SnapshotRow]:
    """The project's snapshots, newest first, from behind `before` (creation time, id); without those that are deleted."""
    query = select(snapshots).where(snapshots.c.project == project, snapshots.c.state != "deleted")
    if sandbox_id is not None:
        query = query.where(snapshots.c.sandbox_id == sandbox_id)
    if kind is not None:
        query = query.where(snapshots.c.kind == kind)
    if name is not None:
        query = query.where(snapshots.c.name == name)
    if state is not None:
        query = query.where(snapshots.c.state == state)
    if before is not None:
        query = query.where(tuple_(snapshots.c.created_at, snapshots.c.id) < before)
    query = query.order_by(snapshots.c.created_at.desc(), snapshots.c.id.desc()).limit(limit)
    return [rows.snapshot(row) for row in connection.execute(query).mappings()]


def accept(
    connection: Connection,
    project: str,
    sandbox_id: str,
    kind: SnapshotKind,
    name: str | None,
    key: IdempotencyKey | None,
    *,
    scheduled: bool = False,
) -> Accepted:
    """Stores a snapshot in `pending` and the operation that makes it.

    Raises `Conflict` (`wrong_state operation_in_flight`), `NotFound`, `Gone`, `idempotency.Answered`, and
    `Forbidden("quota_exceeded")` where the project's snapshots fill their quota.
    """
    idempotency.check(connection, project, key)
    row = accepting.alone(connection, project, sandbox_id)
    if row.state not in SNAPSHOT_SOURCES[kind]:
        raise accepting.wrong_state(row, Verb.SNAPSHOT)
    quotas.admit_snapshot(connection, project)
    snapshot_id = new_id()
    arguments = {"snapshot": snapshot_id, "kind": str(kind)}
    accepted = accepting.take(connection, row, Verb.SNAPSHOT, key, desired=row.state, arguments=arguments)
    now = time.time()
    snapshot = SnapshotRow(
        id=snapshot_id,
        project=project,
        sandbox_id=sandbox_id,
        node_id=row.node_id,
        operation_id=accepted.operation.id,
        kind=kind,
        name=name,
        parent_id=row.head_snapshot_id,
        state="pending",
        template=row.template,
        template_digest=row.template_digest,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        disk_bytes=None,
        memory_bytes=None,
        digest=None,
        error=None,
        created_at=now,
        updated_at=now,
        scheduled=scheduled,
    )
    connection.execute(insert(snapshots), msgspec.structs.asdict(snapshot))
    return accepted


def made(connection: Connection, operation: OperationRow, answer: SnapshotMade, started_at: float) -> Finished | None:
    """Ends the operation of a snapshot that is whole and durable; its sandbox goes on from it. None when it had been ended.

    One that would take the project beyond its quota fails instead.
    """
    snapshot = answer.snapshot
    try:
        quotas.admit_snapshot(connection, operation.project, snapshot.disk_bytes + snapshot.memory_bytes)
    except (Forbidden, Conflict) as error:
        # How much it takes is known only now. The node removes what it made when the next comparison asks it to.
        return ending.fail(connection, operation, error.as_dict(), answer.source, started_at)
    result: dict[str, Any] = {"snapshot": snapshot.snapshot_id, "source_stopped_ms": answer.source_stopped_ms}
    finished = ending.succeed(connection, operation, answer.source, started_at, result)
    if finished is None:
        return None
    mark_ready(connection, snapshot.snapshot_id, snapshot, last_process_id=finished.sandbox.last_process_id)
    _set_head(connection, operation.target, snapshot.snapshot_id)
    data = {"sandbox": operation.target, "kind": snapshot.kind}
    outbox.append(connection, operation.project, "snapshot.created", snapshot.snapshot_id, data)
    return Finished(
        sandbox=sandboxes.get(connection, operation.project, operation.target), operation=finished.operation
    )


def accept_rollback(
    connection: Connection, project: str, sandbox_id: str, snapshot_id: str, key: IdempotencyKey | None
) -> Accepted:
    """Stores the intent to go back to a snapshot. Raises `NotFound("unknown_snapshot")` for one of another sandbox, and what `accept` does."""
    idempotency.check(connection, project, key)
    row = accepting.alone(connection, project, sandbox_id)
    snapshot = get(connection, project, snapshot_id)
    if snapshot.sandbox_id != sandbox_id:
        raise NotFound(
            "unknown_snapshot",
            f"The sandbox {sandbox_id} has no snapshot {snapshot_id}: it is another sandbox's.",
            "Create a sandbox from it instead.",
        )
    get_ready(connection, project, snapshot_id)
    accepting.require_admitted(row, Verb.ROLLBACK)
    if ROLLBACK_TARGETS[snapshot.kind] in quotas.HELD:
        quotas.admit_running(connection, row)
    return accepting.take(
        connection,
        row,
        Verb.ROLLBACK,
        key,
        desired=ROLLBACK_TARGETS[snapshot.kind],
        arguments={"snapshot": snapshot_id},
        gated=True,
    )


def rolled_back(connection: Connection, operation: OperationRow, seen: Observed, started_at: float) -> Finished | None:
    """Ends a rollback that was done. None when it had been ended meanwhile."""
    snapshot_id = str(operation.arguments["snapshot"])
    finished = ending.succeed(connection, operation, seen, started_at, {"snapshot": snapshot_id})
    if finished is None:
        return None
    _set_head(connection, operation.target, snapshot_id)
    return Finished(
        sandbox=sandboxes.get(connection, operation.project, operation.target), operation=finished.operation
    )


def begin_delete(connection: Connection, project: str, snapshot_id: str) -> SnapshotRow:
    """Stores that a snapshot is not wanted any more. Raises `NotFound`, `Conflict("snapshot_not_ready")` while it is being made."""
    row = get(connection, project, snapshot_id)
    if row.state in ("deleting", "deleted"):
        return row
    if row.state == "pending":
        raise Conflict(
            "snapshot_not_ready",
            f"The snapshot {snapshot_id} is being made.",
            "Wait for its operation to end.",
            state=row.state,
            operation=row.operation_id,
        )
    return _move(connection, row, "deleting")


def begin_delete_unused(connection: Connection, project: str, snapshot_id: str) -> SnapshotRow:
    """Like `begin_delete`; raises `Conflict("snapshot_in_use")` where an operation in hand would lose what it needs."""
    get(connection, project, snapshot_id)
    if in_use(connection, [snapshot_id]):
        raise Conflict(
            "snapshot_in_use",
            f"An operation in hand uses the snapshot {snapshot_id}.",
            "Wait for the rollback, or the creation, to end; then delete it.",
        )
    return begin_delete(connection, project, snapshot_id)


def accept_create(connection: Connection, new: NewSandbox, key: IdempotencyKey | None) -> Accepted:
    """Like `accepting.accept_create`, of a sandbox that is made from a snapshot: it must still be there. Raises as `get_ready`, too."""
    assert new.snapshot_id is not None
    idempotency.check(connection, new.project, key)
    get_ready(connection, new.project, new.snapshot_id)
    return accepting.accept_create(connection, new, key)


def deleted(connection: Connection, snapshot_id: str) -> SnapshotRow | None:
    """Its node has nothing of it any more. None when it is unknown."""
    row = find(connection, snapshot_id)
    if row is None or row.state == "deleted":
        return row
    after = _move(connection, row, "deleted")
    outbox.append(connection, row.project, "snapshot.deleted", snapshot_id, {"sandbox": row.sandbox_id})
    return after


def unwanted(connection: Connection, node_id: str) -> list[SnapshotRow]:
    """What a node may still hold although nobody wants it: being deleted, or its making failed."""
    query = select(snapshots).where(snapshots.c.node_id == node_id, snapshots.c.state.in_(("deleting", "failed")))
    return [rows.snapshot(row) for row in connection.execute(query).mappings()]


def in_use(connection: Connection, snapshot_ids: list[str]) -> set[str]:
    """Those of them that an operation in hand goes back to, or makes a sandbox from."""
    if not snapshot_ids:
        return set()
    wanted, used = set(snapshot_ids), set()
    query = select(operations_table.c.kind, operations_table.c.arguments).where(
        operations_table.c.status.in_(operations.OPEN), operations_table.c.kind == Verb.ROLLBACK
    )
    for _, arguments in connection.execute(query):
        used.add(str(arguments.get("snapshot")))
    making = select(sandboxes_table.c.snapshot_id).where(
        sandboxes_table.c.snapshot_id.in_(snapshot_ids),
        sandboxes_table.c.boot_id.is_(None),
        sandboxes_table.c.operation_id.is_not(None),
    )
    used |= {str(one) for one in connection.execute(making).scalars()}
    return wanted & used


def purge(connection: Connection, before: float) -> None:
    """Forgets rows of snapshots that were deleted before that time."""
    connection.execute(delete(snapshots).where(snapshots.c.state == "deleted", snapshots.c.updated_at < before))


def _move(connection: Connection, row: SnapshotRow, state: str) -> SnapshotRow:
    now = time.time()
    connection.execute(update(snapshots).where(snapshots.c.id == row.id).values(state=state, updated_at=now))
    return msgspec.structs.replace(row, state=state, updated_at=now)


def mark_ready(connection: Connection, snapshot_id: str, snapshot: Snapshot, **more: int) -> None:
    """A snapshot is whole and durable, as its node says; `more` is what else is known of it by now. Part of a transaction."""
    connection.execute(
        update(snapshots)
        .where(snapshots.c.id == snapshot_id, snapshots.c.state == "pending")
        .values(
            state="ready",
            disk_bytes=snapshot.disk_bytes,
            memory_bytes=snapshot.memory_bytes,
            digest=snapshot.digest,
            updated_at=time.time(),
            **more,
        )
    )


def _set_head(connection: Connection, sandbox_id: str, snapshot_id: str) -> None:
    connection.execute(
        update(sandboxes_table).where(sandboxes_table.c.id == sandbox_id).values(head_snapshot_id=snapshot_id)
    )
