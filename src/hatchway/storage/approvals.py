"""What waits for somebody's consent: requests that a gateway holds, and operations that a project lets nobody do alone.

An approval is `pending` until it is answered (`allowed`, `denied`) or over (`ended`, with the reason in `why`): its time has passed, whoever
asked is gone, or the policy is another. One that is over stays for a day.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, false, func, insert, select, tuple_, update

from hatchway.domain.errors import Conflict, Exhausted, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import State
from hatchway.storage import outbox, sandboxes
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.tables import approvals as table
from hatchway.storage.tables import projects
from hatchway.wire.egress import Asked

ARGUMENT = "approval"
"""Argument of an operation that waits for one: its id. Also the phase that it is in."""
EGRESS, OPERATION = "egress", "operation"
PENDING, ALLOWED, DENIED, ENDED = "pending", "allowed", "denied", "ended"
MAX_PENDING_OF_SANDBOX = 32
MAX_PENDING_OF_PROJECT = 512
A_MINUTE = 60.0
MAX_ASKED_OF_SANDBOX = 60
MAX_ASKED_OF_PROJECT = 600
"""In a minute. The first beyond it is told as a denial, further ones are denied alike and not stored; a gateway asks for one sandbox half as often."""
OPERATION_WITHIN_S = 600.0
"""How long an operation waits; no answer is a refusal."""
GRACE_S = 5.0
"""A gateway says by itself that nobody answered; after so long it is assumed."""
KEPT_S = 24 * 3600.0
MAX_TEXT = 1024


class ApprovalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request for consent. `request` says what for: `rule host port protocol method path reason`, or `verb` and its arguments."""

    id: str
    project: str
    sandbox_id: str
    node_id: str
    operation_id: str | None
    generation: int
    kind: str
    state: str
    key: str
    request: dict[str, Any]
    scope: str | None
    ttl_s: float | None
    note: str
    approver: str | None
    delivered: bool
    why: str | None
    created_at: float
    expires_at: float
    answered_at: float | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody decided."""

    allow: bool
    scope: str = "once"
    ttl_s: float | None = None
    note: str = ""
    approver: str = ""


def ask(connection: Connection, asked: Asked, node_id: str) -> ApprovalRow | None:
    """Stores what a gateway holds; asked again it answers what is stored. None for a sandbox that is not there, or not on this node.

    Beyond the bounds it is denied at once; what comes too fast is not even stored.
    """
    known = find(connection, asked.ask_id)
    if known is not None:
        return known if known.sandbox_id == asked.sandbox_id else None
    sandbox = sandboxes.find(connection, asked.sandbox_id)
    if sandbox is None or sandbox.node_id != node_id or sandbox.state is State.DELETED:
        return None
    request = {
        "rule": asked.rule,
        "host": asked.host,
        "port": asked.port,
        "protocol": asked.protocol,
        "method": asked.method,
        "path": asked.path,
        "reason": asked.reason,
    }
    shown = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in request.items()}
    row = _new(sandbox, asked.ask_id, EGRESS, shown, asked.key, asked.expires_at, asked.generation)
    beyond = _beyond_rate(connection, sandbox, row.created_at)
    if beyond is not None or not _has_place(connection, sandbox):
        note = "Too many requests wait for an approval." if beyond is None else "Approvals are asked for too often."
        row = msgspec.structs.replace(row, state=DENIED, why="too_many", note=note, answered_at=row.created_at)
        if beyond:
            return row
        connection.execute(insert(table), msgspec.structs.asdict(row))
        outbox.append(connection, row.project, "approval.answered", row.id, _told(row))
        return row
    connection.execute(insert(table), msgspec.structs.asdict(row))
    outbox.append(connection, row.project, "approval.asked", row.id, _told(row))
    return row


def required(connection: Connection, project: str, verb: str) -> bool:
    """Whether the project wants somebody's consent for this verb."""
    found = connection.execute(select(projects.c.approvals).where(projects.c.name == project)).scalar_one_or_none()
    return verb in (found or ())


def gate(connection: Connection, sandbox: SandboxRow, operation: OperationRow) -> OperationRow:
    """Lets an operation that is about to be stored wait for consent. Raises `Exhausted("too_many_approvals")`."""
    if not _has_place(connection, sandbox):
        raise Exhausted(
            "too_many_approvals",
            "So many requests of the sandbox or its project wait for an approval already.",
            "`hatchway approvals ls` lists them: answer some.",
        )
    request = {"verb": str(operation.kind), **operation.arguments}
    expires_at = operation.created_at + OPERATION_WITHIN_S
    row = _new(sandbox, new_id(), OPERATION, request, f"{operation.kind} {sandbox.id}", expires_at, sandbox.generation)
    row = msgspec.structs.replace(row, operation_id=operation.id)
    connection.execute(insert(table), msgspec.structs.asdict(row))
    outbox.append(connection, row.project, "approval.asked", row.id, _told(row))
    return msgspec.structs.replace(operation, phase=ARGUMENT, arguments={**operation.arguments, ARGUMENT: row.id})


def waits(operation: OperationRow) -> bool:
    """Whether an operation may still wait for consent."""
    return ARGUMENT in operation.arguments and operation.status == "pending"


def find(connection: Connection, approval_id: str) -> ApprovalRow | None:
    """The approval of any project, or None."""
    row = connection.execute(select(table).where(table.c.id == approval_id)).mappings().one_or_none()
    return None if row is None else ApprovalRow(**row)


def get(connection: Connection, project: str, approval_id: str) -> ApprovalRow:
    """Raises `NotFound("unknown_approval")`, also for one of another project."""
    row = find(connection, approval_id)
    if row is None or row.project != project:
        raise NotFound(
            "unknown_approval", f"There is no approval {approval_id}.", "GET /v1/approvals lists those of the last day."
        )
    return row


def list_page(
    connection: Connection,
    project: str,
    *,
    states: Sequence[str] = (),
    sandbox_id: str | None = None,
    before: tuple[float, str] | None = None,
    limit: int,
) -> list[ApprovalRow]:
    """The project's approvals, newest first, from behind `before` (creation time, id)."""
    query = select(table).where(table.c.project == project)
    if states:
        query = query.where(table.c.state.in_(states))
    if sandbox_id is not None:
        query = query.where(table.c.sandbox_id == sandbox_id)
    if before is not None:
        query = query.where(tuple_(table.c.created_at, table.c.id) < before)
    query = query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit)
    return [ApprovalRow(**row) for row in connection.execute(query).mappings()]


def answer(connection: Connection, project: str, approval_id: str, given: Answer) -> ApprovalRow:
    """Decides. The same answer twice is one. Raises `NotFound`, and `Conflict` (`already_answered approval_over`)."""
    row = get(connection, project, approval_id)
    now = time.time()
    decided = ALLOWED if given.allow else DENIED
    if row.state in (ALLOWED, DENIED):
        if row.state == decided and row.scope == given.scope:
            return row
        raise Conflict(
            "already_answered",
            f"The approval {approval_id} was {row.state} by {row.approver or 'a bound'}.",
            "What follows from it cannot be undone here; the next request asks again, unless it was answered for longer.",
            state=row.state,
        )
    if row.state == ENDED or row.expires_at <= now:
        raise Conflict(
            "approval_over",
            f"The approval {approval_id} is over: {row.why or 'timeout'}. What it was about was refused.",
            "Have it asked again.",
            state=row.state,
        )
    after = msgspec.structs.replace(
        row,
        state=decided,
        scope=given.scope,
        ttl_s=given.ttl_s,
        note=given.note,
        approver=given.approver,
        answered_at=now,
        delivered=row.kind == OPERATION,
    )
    _store(connection, after)
    outbox.append(connection, project, "approval.answered", after.id, _told(after))
    return after


def delivered(connection: Connection, approval_id: str) -> None:
    """Takes note that the node has the answer."""
    connection.execute(update(table).where(table.c.id == approval_id).values(delivered=True))


def over(connection: Connection, approval_id: str, why: str, sandbox_id: str | None = None) -> ApprovalRow | None:
    """Ends one that nobody answered; None where there is none that waits."""
    row = find(connection, approval_id)
    if row is None or row.state != PENDING or sandbox_id not in (None, row.sandbox_id):
        return None
    after = msgspec.structs.replace(row, state=ENDED, why=why[:32], delivered=True)
    _store(connection, after)
    outbox.append(connection, row.project, "approval.ended", row.id, _told(after))
    return after


def over_with(connection: Connection, operation: OperationRow, why: str) -> None:
    """The operation has ended: nobody is asked about it any more."""
    approval_id = operation.arguments.get(ARGUMENT)
    if approval_id is not None:
        over(connection, str(approval_id), why)


def expire(connection: Connection, now: float) -> list[ApprovalRow]:
    """Ends what nobody answered in time: a gateway says so itself, unless it is gone."""
    late = select(table.c.id).where(
        table.c.state == PENDING,
        (table.c.kind == OPERATION) & (table.c.expires_at <= now)
        | (table.c.kind == EGRESS) & (table.c.expires_at <= now - GRACE_S),
    )
    ended = [over(connection, one, "timeout") for one in connection.execute(late).scalars().all()]
    return [row for row in ended if row is not None]


def undelivered(connection: Connection, now: float) -> list[ApprovalRow]:
    """Answers that their nodes may not have, of requests that may still be held."""
    query = select(table).where(
        table.c.state.in_((ALLOWED, DENIED)), table.c.delivered == false(), table.c.expires_at > now - GRACE_S
    )
    return [ApprovalRow(**row) for row in connection.execute(query).mappings()]


def waiting(connection: Connection) -> list[ApprovalRow]:
    """All that wait now, of every project, oldest first."""
    query = select(table).where(table.c.state == PENDING).order_by(table.c.created_at)
    return [ApprovalRow(**row) for row in connection.execute(query).mappings()]


def purge(connection: Connection, now: float) -> None:
    """Forgets what has been over for long."""
    connection.execute(delete(table).where(table.c.state != PENDING, table.c.expires_at < now - KEPT_S))


def _new(
    sandbox: SandboxRow,
    approval_id: str,
    kind: str,
    request: dict[str, Any],
    key: str,
    expires_at: float,
    generation: int,
) -> ApprovalRow:
    return ApprovalRow(
        id=approval_id,
        project=sandbox.project,
        sandbox_id=sandbox.id,
        node_id=sandbox.node_id,
        operation_id=None,
        generation=generation,
        kind=kind,
        state=PENDING,
        key=key[:512],
        request=request,
        scope=None,
        ttl_s=None,
        note="",
        approver=None,
        delivered=False,
        why=None,
        created_at=time.time(),
        expires_at=expires_at,
        answered_at=None,
    )


def _store(connection: Connection, row: ApprovalRow) -> None:
    values = msgspec.structs.asdict(row)
    connection.execute(update(table).where(table.c.id == values.pop("id")).values(**values))


def _has_place(connection: Connection, sandbox: SandboxRow) -> bool:
    pending = select(func.count()).select_from(table).where(table.c.state == PENDING)
    of_sandbox = connection.execute(pending.where(table.c.sandbox_id == sandbox.id)).scalar_one()
    of_project = connection.execute(pending.where(table.c.project == sandbox.project)).scalar_one()
    return bool(of_sandbox < MAX_PENDING_OF_SANDBOX and of_project < MAX_PENDING_OF_PROJECT)


def _beyond_rate(connection: Connection, sandbox: SandboxRow, now: float) -> int | None:
    """How many beyond the bounds were stored within the last minute; None: it is within them."""
    recent = select(func.count()).select_from(table).where(table.c.project == sandbox.project, table.c.kind == EGRESS)
    recent = recent.where(table.c.created_at > now - A_MINUTE)
    of_sandbox = connection.execute(recent.where(table.c.sandbox_id == sandbox.id)).scalar_one()
    of_project = connection.execute(recent).scalar_one()
    beyond = max(of_sandbox - MAX_ASKED_OF_SANDBOX, of_project - MAX_ASKED_OF_PROJECT)
    return None if beyond < 0 else int(beyond)


def _told(row: ApprovalRow) -> dict[str, Any]:
    """What an event says of it."""
    told: dict[str, Any] = {
        "sandbox": row.sandbox_id,
        "kind": row.kind,
        "request": row.request,
        "key": row.key,
        "expires_at": row.expires_at,
    }
    if row.operation_id is not None:
        told["operation"] = row.operation_id
    if row.state in (ALLOWED, DENIED):
        told |= {"decision": row.state, "scope": row.scope, "ttl_s": row.ttl_s, "note": row.note}
    if row.why is not None:
        told["why"] = row.why
    return told
