"""The beginning of every operation: what is asked for is stored, with the operation that will do it.

Each function is one transaction. What may follow what is not decided here but in `domain.lifecycle`. A sandbox is owned by at
most one operation (`operation_id`), which it gets here and loses in `ending`.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, bindparam, insert, select, update

from hatchway.domain import schedules
from hatchway.domain.errors import Conflict
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import VERBS, State, Verb, admits, verbs_from
from hatchway.domain.lifetimes import Lifetime
from hatchway.domain.shapes import Shape
from hatchway.storage import approvals, ending, idempotency, leases, operations, policies, quotas, rows, sandboxes
from hatchway.storage.ending import POOL
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.tables import operations as operations_table
from hatchway.storage.tables import sandboxes as table
from hatchway.storage.tables import snapshots as snapshots_table

_INSERT_SANDBOX = insert(table)
# The agent in what a snapshot kept knows its processes by their numbers, those that have ended and were not forgotten yet too.
# Of one that an earlier version made, its sandbox says it, if that is still there.
_NUMBERS_USED = (
    select(snapshots_table.c.last_process_id, table.c.last_process_id)
    .outerjoin_from(
        snapshots_table,
        table,
        and_(snapshots_table.c.sandbox_id == table.c.id, snapshots_table.c.project == table.c.project),
    )
    .where(snapshots_table.c.id == bindparam("snapshot"))
)
_INSERT_OPERATION = insert(operations_table)
_TAKE = (
    update(table)
    .where(
        table.c.id == bindparam("sandbox"),
        table.c.version == bindparam("read_version"),
        table.c.state.in_(bindparam("sources", expanding=True)),
    )
    .values(
        desired=bindparam("new_desired"),
        operation_id=bindparam("new_operation"),
        version=table.c.version + 1,
        updated_at=bindparam("now"),
    )
    .returning(table)
)
_PREEMPTED = {
    "code": "preempted",
    "cause": "The sandbox was deleted before the operation ended.",
    "remedy": "Create a new sandbox.",
}


class NewSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """What a create asks for, checked and with its template resolved."""

    project: str
    name: str | None
    node_id: str
    template: str
    template_digest: str
    shape: Shape
    metadata: dict[str, str]
    env: dict[str, str]
    require_isolation: str | None
    snapshot_id: str | None = None
    """Make it from this snapshot of the project, which has template and shape already."""
    lifetime: Lifetime = Lifetime()
    schedule: dict[str, Any] | None = None
    """A `domain.schedules.Schedule`, as plain data."""
    policy: str | None = None
    """Name of a policy of the project, tier `sandbox`; or `policy_document`, one of its own in canonical form."""
    policy_document: str | None = None
    credentials: list[str] | None = None
    """Ids of the credentials that it may use; None: all that its policy binds."""
    annotations: dict[str, Any] | None = None
    """What programs keep with it for themselves."""
    last_process_id: int = 0
    """Numbers of processes that were used where it comes from."""
    pool: str | None = None
    """Make it a member of this pool of the project."""
    pool_key: str | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """What was stored. `run` tells whether the operation is new and has to be executed; `preempted` names the one it ended."""

    sandbox: SandboxRow
    operation: OperationRow
    run: bool
    preempted: str | None = None


def accept_create(
    connection: Connection,
    new: NewSandbox,
    key: IdempotencyKey | None,
    *,
    verb: Verb = Verb.CREATE,
    desired: State = State.RUNNING,
    arguments: dict[str, Any] | None = None,
) -> Accepted:
    """Stores a sandbox in `pending` and the operation that makes it. Raises `idempotency.Answered`, and what `quotas.admit_sandboxes` does."""
    idempotency.check(connection, new.project, key)
    quotas.admit_sandboxes(connection, new.project, [new.shape], running=desired in quotas.HELD)
    now = time.time()
    operation = msgspec.structs.replace(_new_operation(new.project, new_id(), verb, now), arguments=arguments or {})
    sandbox = store_new(connection, new, operation, operation.target, now, desired=desired)
    keep_accepted(connection, operation, key)
    return Accepted(sandbox=sandbox, operation=operation, run=True)


def accept_member(connection: Connection, new: NewSandbox) -> Accepted:
    """Stores a member of a pool, which its caller has room for."""
    now = time.time()
    operation = new_create(new.project, new_id(), now, {POOL: new.pool})
    sandbox = store_new(connection, new, operation, operation.target, now, desired=State.PAUSED)
    keep_accepted(connection, operation, None)
    return Accepted(sandbox=sandbox, operation=operation, run=True)


def new_create(project: str, target: str, now: float, arguments: dict[str, Any]) -> OperationRow:
    """An operation that makes a sandbox; not stored yet."""
    return msgspec.structs.replace(_new_operation(project, target, Verb.CREATE, now), arguments=arguments)


def new_import(project: str, target: str, now: float, arguments: dict[str, Any]) -> OperationRow:
    """An operation that makes a snapshot from an archive; not stored yet."""
    return msgspec.structs.replace(_new_operation(project, target, Verb.IMPORT, now), arguments=arguments)


def store_new(
    connection: Connection,
    new: NewSandbox,
    operation: OperationRow,
    sandbox_id: str,
    now: float,
    *,
    forked_from: SandboxRow | None = None,
    desired: State = State.RUNNING,
) -> SandboxRow:
    """Stores a sandbox in `pending`, owned by `operation`. Part of a transaction."""
    if new.policy is not None and forked_from is None:
        policies.require_sandbox_tier(connection, new.project, new.policy)
    sandbox = row_of(new, operation, sandbox_id, now, forked_from=forked_from, desired=desired)
    if new.snapshot_id is not None:
        sandbox = msgspec.structs.replace(sandbox, last_process_id=numbers_used(connection, new.snapshot_id))
    connection.execute(_INSERT_SANDBOX, msgspec.structs.asdict(sandbox))
    return sandbox


def numbers_used(connection: Connection, snapshot_id: str) -> int:
    """The highest number that a process in a snapshot may have had."""
    used = connection.execute(_NUMBERS_USED, {"snapshot": snapshot_id}).one()
    return max(one or 0 for one in used)


def row_of(
    new: NewSandbox,
    operation: OperationRow,
    sandbox_id: str,
    now: float,
    *,
    forked_from: SandboxRow | None = None,
    desired: State = State.RUNNING,
) -> SandboxRow:
    """What is stored of a sandbox that is about to be made."""
    head = new.snapshot_id if forked_from is None else forked_from.head_snapshot_id
    return SandboxRow(
        id=sandbox_id,
        project=new.project,
        name=new.name,
        state=State.PENDING,
        desired=desired,
        version=1,
        generation=1,
        node_id=new.node_id,
        observed_sequence=0,
        operation_id=operation.id,
        template=new.template,
        template_digest=new.template_digest,
        vcpus=new.shape.vcpus,
        memory_mib=new.shape.memory_mib,
        disk_mib=new.shape.disk_mib,
        metadata=new.metadata,
        env=new.env,
        require_isolation=new.require_isolation,
        isolation=None,
        boot_id=None,
        cause=None,
        reason="",
        # The agent in a branch knows the processes of its source by their numbers.
        last_process_id=new.last_process_id if forked_from is None else forked_from.last_process_id,
        forked_from=None if forked_from is None else forked_from.id,
        snapshot_id=new.snapshot_id,
        head_snapshot_id=head,
        stored_bytes=None,
        artifact=None,
        created_at=now,
        updated_at=now,
        deleted_at=None,
        timeout_s=new.lifetime.timeout_s,
        idle_timeout_s=new.lifetime.idle_timeout_s,
        on_timeout=new.lifetime.on_timeout,
        auto_wake=new.lifetime.auto_wake,
        state_since=now,
        schedule=new.schedule,
        disk_due_at=schedules.next_due(None, (new.schedule or {}).get("disk_every_s"), now),
        full_due_at=schedules.next_due(None, (new.schedule or {}).get("full_every_s"), now),
        pool=new.pool,
        pool_key=new.pool_key,
        policy=new.policy,
        policy_document=new.policy_document,
        credentials=new.credentials,
        policy_revision=1,
        annotations=new.annotations,
    )


def accept_verb(
    connection: Connection,
    project: str,
    sandbox_id: str,
    verb: Verb,
    key: IdempotencyKey | None,
    *,
    timed: Callable[[Connection, SandboxRow], dict[str, Any]] | None = None,
    gated: bool = False,
) -> Accepted:
    """Stores the intent to do `verb`, one that needs no arguments. `gated`: a client asks, and its project may want somebody's consent.
    `timed` makes columns of the row that change with it, of its lifetime.

    Where its target state already holds, the operation is stored as one that succeeded. A delete ends the operation in flight;
    any other verb beside one raises `Conflict("operation_in_flight")`. Raises `Conflict("wrong_state")`, `NotFound`, `Gone`,
    `idempotency.Answered`, and `Forbidden("quota_exceeded")` for what would give a sandbox a machine.
    """
    idempotency.check(connection, project, key)
    row = sandboxes.get(connection, project, sandbox_id)
    if verb is Verb.DELETE:
        return _accept_delete(connection, row, key, gated)
    row = alone(connection, project, sandbox_id)
    rule = VERBS[verb]
    assert rule.target is not None, f"{verb} has arguments, and a function of its own"
    if timed is not None:
        require_admitted(row, verb)
        row = sandboxes.change(connection, project, sandbox_id, {}, timed)
    if row.state not in rule.satisfied:
        require_admitted(row, verb)
        if rule.target in quotas.HELD:
            quotas.admit_running(connection, row)
        return take(connection, row, verb, key, desired=rule.target)
    now = time.time()
    operation = msgspec.structs.replace(
        _new_operation(project, sandbox_id, verb, now),
        status="succeeded",
        phase="done",
        progress=1.0,
        result={"state": str(row.state), "changed": False},
        started_at=now,
        finished_at=now,
    )
    keep_accepted(connection, operation, key)
    return Accepted(sandbox=row, operation=operation, run=False)


def alone(connection: Connection, project: str, sandbox_id: str) -> SandboxRow:
    """The sandbox, when nothing is in hand with it. Raises `Conflict("operation_in_flight")`, `NotFound`, `Gone`."""
    row = sandboxes.get_alive(connection, project, sandbox_id)
    if row.operation_id is None:
        return row
    in_flight = operations.get(connection, project, row.operation_id)
    raise Conflict(
        "operation_in_flight",
        f"The sandbox {sandbox_id} has a {in_flight.kind} in hand.",
        "Wait for the operation to end, or delete the sandbox.",
        operation=in_flight.id,
        state=str(row.state),
    )


def take(
    connection: Connection,
    row: SandboxRow,
    verb: Verb,
    key: IdempotencyKey | None,
    *,
    desired: State,
    arguments: dict[str, Any] | None = None,
    preempted: str | None = None,
    gated: bool = False,
) -> Accepted:
    """Stores an operation as the owner of `row`, which was read in this transaction. Raises `Conflict` (`wrong_state changed_meanwhile`).

    A `gated` one waits for somebody's consent where the project wants that (`approvals.gate`).
    """
    require_admitted(row, verb)
    now = time.time()
    operation = msgspec.structs.replace(_new_operation(row.project, row.id, verb, now), arguments=arguments or {})
    if gated and approvals.required(connection, row.project, verb):
        operation = approvals.gate(connection, row, operation)
    taken = (
        connection.execute(
            _TAKE,
            {
                "sandbox": row.id,
                "read_version": row.version,
                "sources": tuple(VERBS[verb].sources),
                "new_desired": desired,
                "new_operation": operation.id,
                "now": now,
            },
        )
        .mappings()
        .one_or_none()
    )
    if taken is None:
        raise sandboxes.changed_meanwhile(row.id)
    keep_accepted(connection, operation, key)
    return Accepted(sandbox=rows.sandbox(taken), operation=operation, run=True, preempted=preempted)


def _accept_delete(connection: Connection, row: SandboxRow, key: IdempotencyKey | None, gated: bool) -> Accepted:
    preempted = None
    if row.operation_id is not None:
        in_flight = operations.get(connection, row.project, row.operation_id)
        if in_flight.kind is Verb.DELETE and (gated or not approvals.waits(in_flight)):
            idempotency.keep(connection, row.project, key, _answer(in_flight))
            return Accepted(sandbox=row, operation=in_flight, run=False)
        if gated and approvals.required(connection, row.project, Verb.DELETE):
            alone(connection, row.project, row.id)  # a deletion that may be refused ends nothing before it is allowed
        if in_flight.target == row.id:
            ending.give_up(connection, in_flight, "cancelled", _PREEMPTED, None)
            preempted = in_flight.id
        # Else it is a branch that its source's fork is making: the fork goes on without it.
    elif row.state is State.DELETED:
        now = time.time()
        operation = msgspec.structs.replace(
            _new_operation(row.project, row.id, Verb.DELETE, now),
            status="succeeded",
            phase="done",
            progress=1.0,
            result={"state": str(row.state), "changed": False},
            started_at=now,
            finished_at=now,
        )
        keep_accepted(connection, operation, key)
        return Accepted(sandbox=row, operation=operation, run=False)
    return take(connection, row, Verb.DELETE, key, desired=State.DELETED, preempted=preempted, gated=gated)


def keep_accepted(connection: Connection, operation: OperationRow, key: IdempotencyKey | None) -> None:
    """Stores an operation that was accepted, and says so. Part of a transaction."""
    row = {**msgspec.structs.asdict(operation), "controller_id": leases.owner(connection)}
    connection.execute(_INSERT_OPERATION, row)
    kind = "operation.accepted" if operation.finished_at is None else "operation.succeeded"
    data = {"operation": operation.id, "kind": str(operation.kind), **operation.about}
    ending.say(connection, operation, kind, data)
    idempotency.keep(connection, operation.project, key, _answer(operation))


def _new_operation(project: str, target: str, verb: Verb, now: float) -> OperationRow:
    return OperationRow(
        id=new_id(),
        project=project,
        target=target,
        kind=verb,
        status="pending",
        phase="accepted",
        progress=None,
        arguments={},
        result=None,
        error=None,
        created_at=now,
        started_at=None,
        finished_at=None,
    )


def _answer(operation: OperationRow) -> dict[str, Any]:
    return {**operation.about, "operation": operation.id}


def require_admitted(row: SandboxRow, verb: Verb) -> None:
    """Raises `Conflict("wrong_state")`."""
    if not admits(verb, row.state):
        raise wrong_state(row, verb)


def wrong_state(row: SandboxRow, verb: Verb) -> Conflict:
    """The error of a verb that the state does not admit, with those that it does."""
    ways = [str(way) for way in verbs_from(row.state)]
    return Conflict(
        "wrong_state",
        f"The sandbox {row.id} is {row.state}; {verb} is not possible from there.",
        "Possible are: " + ", ".join(ways) + ".",
        state=str(row.state),
        verbs=ways,
    )
