"""The end of every operation, and what nodes saw happen unasked.

Each function is one transaction. What may follow what is not decided here but in `domain.lifecycle`. Every update names the owner
(`operation_id`) or the version that it read, so that two writers cannot both believe that they moved a sandbox. How operations begin is
in `accepting`.
"""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, select, update

from hatchway.domain.errors import Conflict
from hatchway.domain.lifecycle import CAUSES, Cause, State, Verb
from hatchway.storage import approvals, lifetimes, operations, outbox, rows, sandboxes, subjects
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.tables import exports as exports_table
from hatchway.storage.tables import operations as operations_table
from hatchway.storage.tables import sandboxes as table
from hatchway.storage.tables import snapshots as snapshots_table
from hatchway.wire.node import Observed

POOL = "pool"
"""Argument of an operation with a member of a pool: the pool's name."""
_RELEASE = (
    update(table)
    .where(table.c.id == bindparam("sandbox"), table.c.operation_id == bindparam("owner"))
    .values(
        state=bindparam("new_state"),
        desired=bindparam("new_state"),
        operation_id=None,
        version=table.c.version + 1,
        observed_sequence=bindparam("new_sequence"),
        isolation=bindparam("new_isolation"),
        boot_id=bindparam("new_boot_id"),
        stored_bytes=bindparam("new_stored_bytes"),
        artifact=bindparam("new_artifact"),
        cause=bindparam("new_cause"),
        reason=bindparam("new_reason"),
        policy_applied=bindparam("new_policy_applied"),
        policy_conditions=bindparam("new_policy_conditions"),
        updated_at=bindparam("now"),
        deleted_at=bindparam("new_deleted_at"),
        **lifetimes.BOUND,
    )
    .returning(table)
)
_END = (
    update(operations_table)
    .where(operations_table.c.id == bindparam("operation"), operations_table.c.status.in_(operations.OPEN))
    .values(
        status=bindparam("new_status"),
        phase=bindparam("new_phase"),
        progress=bindparam("new_progress"),
        result=bindparam("new_result"),
        error=bindparam("new_error"),
        started_at=bindparam("new_started_at"),
        finished_at=bindparam("now"),
    )
    .returning(operations_table)
)
_BRANCHES = select(table.c.id).where(table.c.operation_id == bindparam("owner"), table.c.id != bindparam("source"))
_FAIL_SNAPSHOT = (
    update(snapshots_table)
    .where(snapshots_table.c.operation_id == bindparam("operation"), snapshots_table.c.state == "pending")
    .values(state="failed", error=bindparam("new_error"), updated_at=bindparam("now"))
)
# What came from an archive can come again: nothing of it stays, here or on its node.
_DROP_IMPORTED = (
    update(snapshots_table)
    .where(snapshots_table.c.operation_id == bindparam("operation"), snapshots_table.c.state == "pending")
    .values(state="deleting", error=bindparam("new_error"), updated_at=bindparam("now"))
)
_FAIL_EXPORT = (
    update(exports_table)
    .where(exports_table.c.operation_id == bindparam("operation"), exports_table.c.state == "pending")
    .values(state="failed", error=bindparam("new_error"), updated_at=bindparam("now"))
)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """Sandbox and operation after the operation ended."""

    sandbox: SandboxRow
    operation: OperationRow


def succeed(
    connection: Connection,
    operation: OperationRow,
    seen: Observed,
    started_at: float,
    result: dict[str, Any] | None = None,
) -> Finished | None:
    """Ends an operation whose verb was done; None when it had been ended meanwhile (a delete came, or a cancel).

    `result` is what it made, besides the state. The sandbox is then in the state that was desired.
    """
    before = sandboxes.find(connection, operation.target)
    if before is None:
        return None
    shown = {"state": str(before.desired), "changed": True, "phases_ms": seen.phases_ms, **(result or {})}
    ended = end(connection, operation, "succeeded", shown, None, started_at)
    if ended is None:
        return None
    return release(connection, ended, before.desired, seen, None, "")


def fail(
    connection: Connection,
    operation: OperationRow,
    error: dict[str, Any],
    seen: Observed | None,
    started_at: float | None,
) -> Finished | None:
    """Ends an operation that failed, with the state that the node saw afterwards; where it could not be asked the state stays.

    A create that failed leaves a `failed` sandbox. None when the operation had been ended meanwhile.
    """
    ended = give_up(connection, operation, "failed", error, started_at)
    if ended is None:
        return None
    row = subjects.of(connection, operation)
    assert row is not None
    if operation.of_snapshot:
        return Finished(sandbox=row, operation=ended)
    if seen is not None and not _is_state(seen.state):
        seen = None
    state = row.state if seen is None else State(seen.state)
    cause = row.cause if seen is None else seen.cause
    reason = row.reason if seen is None else seen.reason
    if state in (State.PENDING, State.DELETED):
        # There is no VM and no half-made one may stay: the way out is a start or a delete.
        state, cause = State.FAILED, Cause.OPERATION_FAILED
        reason = str(error.get("cause") or "The operation failed.")
        if operation.kind is Verb.IMPORT:  # nothing of it is there, not even a disk to start from
            state, cause = State.DELETED, None
    elif state is State.FAILED and (seen is None or not reason):
        reason = str(error.get("cause") or "The operation failed.")
    return release(connection, ended, state, seen, cause, reason, failed=True)


def give_up(
    connection: Connection,
    operation: OperationRow,
    status: str,
    error: dict[str, Any],
    started_at: float | None,
) -> OperationRow | None:
    """Ends an operation without success, and what it was making with it; its sandbox is the caller's to release. None when it had ended."""
    ended = end(connection, operation, status, None, error, started_at)
    if ended is not None:
        why = str(error.get("cause") or "The operation did not succeed.")
        abandon_branches(connection, operation, why)
        for fail_made in (_DROP_IMPORTED if operation.of_snapshot else _FAIL_SNAPSHOT, _FAIL_EXPORT):
            connection.execute(fail_made, {"operation": operation.id, "new_error": error, "now": time.time()})
    return ended


def abandon_branches(connection: Connection, operation: OperationRow, why: str) -> None:
    """What a fork had stored and not made becomes `failed`, with the way out that every failed sandbox has."""
    unmade = connection.execute(_BRANCHES, {"owner": operation.id, "source": operation.target}).scalars().all()
    for branch in unmade:
        release(connection, operation, State.FAILED, None, Cause.OPERATION_FAILED, why, sandbox_id=branch)


def cancel(connection: Connection, project: str, operation_id: str) -> Finished:
    """Ends an operation that nothing has been done of yet. Raises `Conflict("not_cancellable")` for one that has begun or ended."""
    operation = operations.get(connection, project, operation_id)
    if operation.status != "pending":
        raise Conflict(
            "not_cancellable",
            f"The operation is {operation.status}.",
            "An operation can be cancelled until it begins; deleting the sandbox ends it at any time."
            if operation.status in operations.OPEN
            else "It has ended.",
            operation=operation_id,
        )
    error = {
        "code": "cancelled",
        "cause": "The operation was cancelled before it began.",
        "remedy": "Ask for it again.",
    }
    ended = give_up(connection, operation, "cancelled", error, None)
    row = subjects.of(connection, operation)
    assert ended is not None
    assert row is not None
    if operation.of_snapshot:
        return Finished(sandbox=row, operation=ended)
    state, reason = row.state, row.reason
    if state is State.PENDING:
        state, reason = State.FAILED, "The creation was cancelled before it began."
        if operation.kind is Verb.IMPORT:
            state = State.DELETED
    finished = release(connection, ended, state, None, row.cause, reason)
    assert finished is not None
    return finished


def move(connection: Connection, operation: OperationRow, node_id: str) -> SandboxRow | None:
    """A suspended sandbox is another node's from now on, under a new generation; None when the operation does not own it any more.

    Its sessions stay behind: what runs in it goes on under sessions that the other node gives it.
    """
    row = (
        connection.execute(
            update(table)
            .where(
                table.c.id == operation.target, table.c.operation_id == operation.id, table.c.state == State.SUSPENDED
            )
            .values(
                node_id=node_id,
                generation=table.c.generation + 1,
                version=table.c.version + 1,
                observed_sequence=0,
                policy_applied=0,
                policy_conditions=None,
                updated_at=time.time(),
            )
            .returning(table)
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    after = rows.sandbox(row)
    outbox.append(connection, after.project, "sandbox.moved", after.id, {"node": node_id, "operation": operation.id})
    return after


def observe(connection: Connection, seen: Observed, *, version: int | None = None) -> SandboxRow | None:
    """Takes over what a node saw happen unasked, in guest or VMM. Returns the sandbox if that changed it.

    Ignored are sandboxes with an operation in flight (its end tells the state), what is older than what is known already, what
    another generation says, and states that are none of ours (what a node of another version may have in hand). `version` is for what a node lists when it is asked: then only the row that was read before
    asking is changed, and the age is not compared (a node whose clock was set back counts from lower numbers).
    """
    row = sandboxes.find(connection, seen.sandbox_id)
    if (
        row is None
        or row.operation_id is not None
        or row.state is State.DELETED
        or not _is_state(seen.state)
        or seen.generation != row.generation
        or (row.version != version if version is not None else seen.sequence < row.observed_sequence)
    ):
        return None
    state = State(seen.state)
    if state in (State.PENDING, State.DELETED):
        # Nobody asked for that, so the node has lost it.
        state = State.FAILED
    cause = seen.cause
    if cause is not None and cause in set(Cause) and state is not CAUSES[Cause(cause)].target:
        cause = None
    applied, conditions = _in_force(row, seen)
    told = (row.state, row.cause, row.boot_id, row.policy_applied, row.policy_conditions)
    if (state, cause, seen.boot_id or row.boot_id, applied, conditions) == told:
        return None
    now = time.time()
    changed = (
        connection.execute(
            update(table)
            .where(table.c.id == row.id, table.c.version == row.version, table.c.operation_id.is_(None))
            .values(
                state=state,
                desired=state,
                version=row.version + 1,
                observed_sequence=seen.sequence,
                isolation=seen.isolation,
                boot_id=seen.boot_id or row.boot_id,
                stored_bytes=seen.stored_bytes,
                artifact=seen.artifact,
                cause=cause,
                reason=seen.reason,
                policy_applied=applied,
                policy_conditions=conditions,
                updated_at=now,
                **lifetimes.BOUND,
            )
            .returning(table),
            lifetimes.moved(row, state, now),
        )
        .mappings()
        .one_or_none()
    )
    if changed is None:
        return None
    after = rows.sandbox(changed)
    if after.state is not row.state and row.pool is None:
        outbox.append(connection, row.project, "sandbox.state_changed", row.id, _state_event(row.state, after))
    return after


def release(
    connection: Connection,
    operation: OperationRow,
    state: State,
    seen: Observed | None,
    cause: str | None,
    reason: str,
    *,
    failed: bool = False,
    sandbox_id: str | None = None,
) -> Finished | None:
    """Lets go of the sandbox that the operation owns, its target unless `sandbox_id` names a branch, in its new state, with the event.

    Returns None when it is no longer the operation's.
    """
    before = sandboxes.find(connection, sandbox_id or operation.target)
    if before is None:
        return None
    now = time.time()
    applied, conditions = _in_force(before, seen)
    row = (
        connection.execute(
            _RELEASE,
            {
                "sandbox": before.id,
                "owner": operation.id,
                "new_state": state,
                "new_sequence": before.observed_sequence if seen is None else seen.sequence,
                "new_isolation": before.isolation if seen is None else seen.isolation,
                "new_boot_id": before.boot_id if seen is None else seen.boot_id or before.boot_id,
                "new_stored_bytes": before.stored_bytes if seen is None else seen.stored_bytes,
                "new_artifact": before.artifact if seen is None else seen.artifact,
                "new_cause": cause,
                "new_reason": reason,
                "new_policy_applied": applied,
                "new_policy_conditions": conditions,
                "now": now,
                "new_deleted_at": now if state is State.DELETED else None,
                **lifetimes.moved(before, state, now, operation if failed else None),
            },
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    after = rows.sandbox(row)
    if after.state is not before.state:
        data = {**_state_event(before.state, after), "operation": operation.id}
        unseen = POOL in operation.arguments
        outbox.append(connection, after.project, "sandbox.state_changed", after.id, data, unseen=unseen)
    return Finished(sandbox=after, operation=operation)


def end(
    connection: Connection,
    operation: OperationRow,
    status: str,
    result: dict[str, Any] | None,
    error: dict[str, Any] | None,
    started_at: float | None,
) -> OperationRow | None:
    """Writes how an operation ended, and says so; None when it had ended. Part of a transaction: what it is about is the caller's."""
    row = (
        connection.execute(
            _END,
            {
                "operation": operation.id,
                "new_status": status,
                "new_phase": "done" if status == "succeeded" else operation.phase,
                "new_progress": 1.0 if status == "succeeded" else operation.progress,
                "new_result": result,
                "new_error": error,
                "new_started_at": started_at,
                "now": time.time(),
            },
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    approvals.over_with(connection, operation, status)
    data: dict[str, Any] = {"operation": operation.id, "kind": str(operation.kind), **operation.about}
    if error is not None:
        data["error"] = error
    say(connection, operation, f"operation.{status}", data)
    return rows.operation(row)


def say(connection: Connection, operation: OperationRow, kind: str, data: dict[str, Any]) -> None:
    """An event about the operation's sandbox, part of a transaction. Those of members of pools are in the audit journal only: nobody knows them yet."""
    outbox.append(connection, operation.project, kind, operation.target, data, unseen=POOL in operation.arguments)


def _in_force(row: SandboxRow, seen: Observed | None) -> tuple[int, dict[str, str] | None]:
    """Which revision of its policy holds, and what keeps it from what that allows."""
    if seen is None or seen.egress is None:
        return row.policy_applied, row.policy_conditions
    return seen.egress.revision, seen.egress.conditions or None


def _is_state(name: str) -> bool:
    return name in State.__members__.values()


def _state_event(before: State, after: SandboxRow) -> dict[str, Any]:
    return {"state": str(after.state), "previous": str(before), "cause": after.cause, "reason": after.reason}
