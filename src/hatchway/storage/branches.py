"""Forks: the branches are stored with the operation that makes them, and end with it, each in its own way."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import Connection, select

from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import Cause, State, Verb
from hatchway.domain.lifetimes import Lifetime
from hatchway.domain.shapes import Shape
from hatchway.storage import accepting, ending, idempotency, quotas, rows, sessions
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.ending import Finished
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.tables import sandboxes as table
from hatchway.wire.node import BranchOutcome, ForkAnswer

MAX_BRANCHES = 100


class NewBranches(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork asks for. None means: as the source."""

    count: int
    name: str | None = None
    metadata: dict[str, str] | None = None
    env: dict[str, str] | None = None
    annotations: dict[str, Any] | None = None
    timeout_s: float | UnsetType | None = UNSET
    """UNSET means: as the source."""


def accept(
    connection: Connection, project: str, sandbox_id: str, wanted: NewBranches, key: IdempotencyKey | None
) -> Accepted:
    """Stores the branches in `pending` and the fork that makes them, which owns them and the source.

    Raises `Conflict` (`wrong_state operation_in_flight`), `NotFound`, `Gone`, `idempotency.Answered`, and what
    `quotas.admit_sandboxes` does: all branches count, or none is made.
    """
    idempotency.check(connection, project, key)
    source = accepting.alone(connection, project, sandbox_id)
    shape = Shape(vcpus=source.vcpus, memory_mib=source.memory_mib, disk_mib=source.disk_mib)
    accepting.require_admitted(source, Verb.FORK)
    quotas.admit_sandboxes(connection, project, [shape] * wanted.count)
    ids = [new_id() for _ in range(wanted.count)]
    accepted = accepting.take(connection, source, Verb.FORK, key, desired=source.state, arguments={"branches": ids})
    now = time.time()
    new = NewSandbox(
        project=project,
        name=wanted.name,
        node_id=source.node_id,
        template=source.template,
        template_digest=source.template_digest,
        shape=shape,
        metadata=source.metadata if wanted.metadata is None else wanted.metadata,
        annotations=source.annotations if wanted.annotations is None else wanted.annotations,
        env=source.env if wanted.env is None else wanted.env,
        require_isolation=source.require_isolation,
        policy=source.policy,
        policy_document=source.policy_document,
        credentials=source.credentials,
        lifetime=Lifetime(
            timeout_s=source.timeout_s if wanted.timeout_s is UNSET else wanted.timeout_s,
            idle_timeout_s=source.idle_timeout_s,
            on_timeout=source.on_timeout,
            auto_wake=source.auto_wake,
        ),
    )
    for branch_id in ids:
        accepting.store_new(connection, new, accepted.operation, branch_id, now, forked_from=source)
    return accepted


def open_branches(connection: Connection, operation: OperationRow) -> list[SandboxRow]:
    """The branches that the fork still has to make, in their order: without those that were deleted meanwhile."""
    query = select(table).where(table.c.operation_id == operation.id, table.c.id != operation.target)
    found = {row["id"]: rows.sandbox(row) for row in connection.execute(query).mappings()}
    return [found[one] for one in operation.arguments["branches"] if one in found]


def made(connection: Connection, operation: OperationRow, answer: ForkAnswer, started_at: float) -> Finished | None:
    """Ends a fork: with success when any branch runs. None when it had been ended meanwhile."""
    outcomes = {one.sandbox_id: one for one in answer.branches}
    failures = [one.error for one in answer.branches if one.error is not None]
    if answer.branches and len(failures) == len(answer.branches):
        return ending.fail(connection, operation, dict(failures[0]), answer.source, started_at)
    shown: list[dict[str, Any]] = []
    for branch_id in operation.arguments["branches"]:
        outcome = outcomes.get(branch_id)
        if outcome is None or (outcome.observed is None and outcome.error is None):
            gone = {
                "code": "sandbox_deleted",
                "cause": "It was deleted before the fork ended.",
                "remedy": "Fork again.",
            }
            outcome = BranchOutcome(sandbox_id=branch_id, error=gone)
        shown.append(
            {
                "sandbox": branch_id,
                "state": State.FAILED if outcome.observed is None else outcome.observed.state,
                "error": outcome.error,
            }
        )
    result = {"branches": shown, "source_stopped_ms": answer.source_stopped_ms}
    finished = ending.succeed(connection, operation, answer.source, started_at, result)
    if finished is None:
        return None
    _release_all(connection, operation, answer.branches)
    ending.abandon_branches(connection, operation, "The node said nothing of this branch.")
    return finished


def _release_all(connection: Connection, operation: OperationRow, outcomes: Sequence[BranchOutcome]) -> None:
    for outcome in outcomes:
        seen = outcome.observed
        state = State.FAILED if seen is None else State(seen.state)
        cause = Cause.OPERATION_FAILED if seen is None else seen.cause
        reason = str((outcome.error or {}).get("cause", "")) if seen is None else seen.reason
        if not ending.release(connection, operation, state, seen, cause, reason, sandbox_id=outcome.sandbox_id):
            continue  # deleted meanwhile
        for branched in outcome.sessions:
            sessions.branched(connection, operation.project, branched)
