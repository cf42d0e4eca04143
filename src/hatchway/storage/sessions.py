"""Command sessions: a row is made before the node hears of the session, and follows what the node says of it."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, bindparam, insert, select, tuple_, update

from hatchway.domain.errors import Conflict, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import VERBS, State, Verb, verbs_from
from hatchway.storage import idempotency, outbox, quotas, sandboxes
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import SandboxRow, SessionRow
from hatchway.storage.tables import sandboxes as sandboxes_table
from hatchway.storage.tables import sessions
from hatchway.wire.node import BranchedSession, SessionSpec, SessionStatus

OPEN = ("new", "created", "running", "exited")
"""States of which more can be heard; the others are `ended`, `deleted` and `lost` (a node that does not know it)."""

_ORDER = (*OPEN, "ended")

_INSERT = insert(sessions)
_NUMBER = (
    update(sandboxes_table)
    .where(sandboxes_table.c.id == bindparam("sandbox"))
    .values(last_process_id=sandboxes_table.c.last_process_id + 1)
    .returning(sandboxes_table.c.last_process_id)
)
_HEARD = (
    update(sessions)
    .where(sessions.c.id == bindparam("session"), sessions.c.state.in_((*OPEN, "ended")))
    .values(state=bindparam("new_state"), status=bindparam("new_status"), updated_at=bindparam("now"))
)


def create(
    connection: Connection, project: str, sandbox_id: str, wanted: SessionSpec, key: IdempotencyKey | None
) -> tuple[SandboxRow, SessionRow]:
    """Stores a session and gives it the sandbox's next process number; ids in `wanted` are filled in here.

    Raises `NotFound`, `Gone`, `Conflict("sandbox_not_running")`, `Forbidden("quota_exceeded")` and `idempotency.Answered`.
    """
    idempotency.check(connection, project, key)
    sandbox = sandboxes.get_alive(connection, project, sandbox_id)
    wakes = sandbox.auto_wake and sandbox.state in VERBS[Verb.WAKE].sources  # attaching to the session wakes it
    if sandbox.state is not State.RUNNING and not wakes:
        ways = [str(verb) for verb in verbs_from(sandbox.state)]
        raise Conflict(
            "sandbox_not_running",
            f"The sandbox {sandbox_id} is {sandbox.state}; commands can be started while it is running.",
            "Wait for the operation to end." if sandbox.operation_id else "Possible are: " + ", ".join(ways) + ".",
            state=str(sandbox.state),
            verbs=ways,
            **({"operation": sandbox.operation_id} if sandbox.operation_id else {}),
        )
    quotas.admit_session(connection, project)
    process_id = int(connection.execute(_NUMBER, {"sandbox": sandbox_id}).scalar_one())
    session_id = new_id()
    spec = msgspec.structs.replace(
        wanted, session_id=session_id, sandbox_id=sandbox_id, project=project, process_id=process_id
    )
    now = time.time()
    row = SessionRow(
        id=session_id,
        project=project,
        sandbox_id=sandbox_id,
        process_id=process_id,
        spec=msgspec.to_builtins(spec),
        state="new",
        status=None,
        forked_from=None,
        created_at=now,
        updated_at=now,
    )
    connection.execute(_INSERT, msgspec.structs.asdict(row))
    outbox.append(connection, project, "session.created", session_id, {"sandbox": sandbox_id, "process_id": process_id})
    idempotency.keep(connection, project, key, {"session": session_id})
    return sandbox, row


def branched(connection: Connection, project: str, one: BranchedSession) -> None:
    """Stores a session that a branch began with. Does nothing when it is stored already."""
    spec, now = one.spec, time.time()
    if find(connection, spec.session_id) is not None:
        return
    row = SessionRow(
        id=spec.session_id,
        project=project,
        sandbox_id=spec.sandbox_id,
        process_id=spec.process_id,
        spec=msgspec.to_builtins(spec),
        state=one.status.state,
        status=msgspec.to_builtins(one.status),
        forked_from=one.forked_from,
        created_at=now,
        updated_at=now,
    )
    connection.execute(_INSERT, msgspec.structs.asdict(row))
    connection.execute(
        update(sandboxes_table)
        .where(sandboxes_table.c.id == spec.sandbox_id, sandboxes_table.c.last_process_id < spec.process_id)
        .values(last_process_id=spec.process_id)
    )
    data = {"sandbox": spec.sandbox_id, "process_id": spec.process_id, "forked_from": one.forked_from}
    outbox.append(connection, project, "session.created", spec.session_id, data)


def find(connection: Connection, session_id: str) -> SessionRow | None:
    """The session of any project, or None."""
    row = connection.execute(select(sessions).where(sessions.c.id == session_id)).mappings().one_or_none()
    return None if row is None else SessionRow(**row)


def get(connection: Connection, project: str, session_id: str) -> SessionRow:
    """Raises `NotFound("unknown_session")`, also for one of another project and for a deleted one."""
    row = find(connection, session_id)
    if row is None or row.project != project or row.state == "deleted":
        raise NotFound(
            "unknown_session",
            f"There is no session {session_id}.",
            "GET /v1/sandboxes/{id}/sessions lists those of a sandbox.",
        )
    return row


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sessions; empty and None are all. `may_have_changed`: those too that were heard of in an earlier state."""

    states: tuple[str, ...] = ()
    pid: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    may_have_changed: bool = False

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        """What their rows have."""
        if self.states:
            # `new` is shown as `created`; one that a node will not say more of is where it is.
            shown = {state for one in self.states for state in (("new", one) if one == "created" else (one,))}
            last = max((_ORDER.index(state) for state in shown if state in _ORDER), default=-1)
            earlier = _ORDER[: last + 1] if self.may_have_changed else ()
            yield sessions.c.state.in_(sorted({*shown, *earlier}))
        if self.pid is not None:
            same = sessions.c.status["pid"].as_integer() == self.pid
            yield same | sessions.c.state.in_(("new", "created")) if self.may_have_changed else same
        for key, value in self.metadata.items():
            yield sessions.c.spec["metadata"][key].as_string() == value


def list_page(
    connection: Connection,
    project: str,
    sandbox_id: str,
    *,
    wanted: Wanted | None = None,
    before: tuple[float, str] | None,
    limit: int,
) -> list[SessionRow]:
    """The sandbox's sessions, newest first, from behind `before` (creation time, id)."""
    query = select(sessions).where(
        sessions.c.project == project, sessions.c.sandbox_id == sandbox_id, sessions.c.state != "deleted"
    )
    for condition in (wanted or Wanted()).conditions():
        query = query.where(condition)
    if before is not None:
        query = query.where(tuple_(sessions.c.created_at, sessions.c.id) < before)
    query = query.order_by(sessions.c.created_at.desc(), sessions.c.id.desc()).limit(limit)
    return [SessionRow(**row) for row in connection.execute(query).mappings()]


def heard(connection: Connection, statuses: tuple[SessionStatus, ...]) -> None:
    """Takes over what nodes say of sessions: states in the order given; unknown and deleted sessions are ignored."""
    now = time.time()
    for status in statuses:
        row = find(connection, status.session_id)
        if row is None or row.state not in (*OPEN, "ended"):
            continue
        data: dict[str, Any] = msgspec.to_builtins(status)
        connection.execute(
            _HEARD,
            {"session": status.session_id, "new_state": status.state, "new_status": data, "now": now},
        )
        if row.state != status.state and status.state != "created":
            outbox.append(
                connection,
                row.project,
                "session.state_changed",
                row.id,
                {"sandbox": row.sandbox_id, "state": status.state, "previous": row.state, "exit": data.get("exit")},
            )


def close(connection: Connection, session_id: str, state: str) -> None:
    """Marks a session `deleted`, or `lost` where its node does not know it."""
    connection.execute(
        update(sessions)
        .where(sessions.c.id == session_id, sessions.c.state != "deleted")
        .values(state=state, updated_at=time.time())
    )


def unfinished(connection: Connection, node_id: str) -> list[SessionRow]:
    """The sessions on a node of which more is to be heard."""
    query = (
        select(sessions)
        .join(sandboxes_table, sandboxes_table.c.id == sessions.c.sandbox_id)
        .where(sandboxes_table.c.node_id == node_id, sessions.c.state.in_(OPEN))
    )
    return [SessionRow(**row) for row in connection.execute(query).mappings()]
