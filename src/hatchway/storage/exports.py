"""Exports: archives that are being made on a node, or wait there to be fetched; and the imports that sandboxes come from."""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, select, tuple_, update
from sqlalchemy import delete as delete_from

from hatchway.domain.errors import Forbidden, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import State, Verb
from hatchway.storage import accepting, approvals, automatic, ending, idempotency, outbox, snapshots
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.ending import Finished
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import OperationRow
from hatchway.storage.tables import exports
from hatchway.wire.node import ExportMade, Observed

KEPT_S = 3600.0
"""How long a whole export stays."""
MADE_WITHIN_S = 3600.0
"""One that is not whole by then never will be."""


class ExportRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `exports`."""

    id: str
    project: str
    sandbox_id: str
    snapshot_id: str | None
    node_id: str
    operation_id: str | None
    state: str
    """`pending`, `ready`, `failed`, `deleted`."""
    size_bytes: int | None
    digest: str | None
    error: dict[str, Any] | None
    created_at: float
    updated_at: float
    expires_at: float | None


def get(connection: Connection, project: str, export_id: str) -> ExportRow:
    """Raises `NotFound("unknown_export")`, also for one of another project and one that is over."""
    row = connection.execute(select(exports).where(exports.c.id == export_id)).mappings().one_or_none()
    found = None if row is None else ExportRow(**row)
    over = found is not None and found.expires_at is not None and found.expires_at < time.time()
    if found is None or found.project != project or found.state == "deleted" or over:
        raise NotFound("unknown_export", f"There is no export {export_id}.", "It may be over: export again.")
    return found


def list_page(
    connection: Connection, project: str, *, before: tuple[float, str] | None = None, limit: int
) -> list[ExportRow]:
    """The project's exports, newest first, from behind `before` (creation time, id); without those that are over."""
    over = (exports.c.state == "deleted") | (exports.c.expires_at < time.time())
    query = select(exports).where(exports.c.project == project, ~over.is_(True))
    if before is not None:
        query = query.where(tuple_(exports.c.created_at, exports.c.id) < before)
    query = query.order_by(exports.c.created_at.desc(), exports.c.id.desc()).limit(limit)
    return [ExportRow(**row) for row in connection.execute(query).mappings()]


def accept(
    connection: Connection, project: str, sandbox_id: str, include_template: bool, key: IdempotencyKey | None
) -> Accepted:
    """Stores an export in `pending` and the operation that makes it, which may have to wait for somebody's consent.

    Raises `Conflict` (`wrong_state operation_in_flight`), `NotFound`, `Gone`, `idempotency.Answered`.
    """
    idempotency.check(connection, project, key)
    row = accepting.alone(connection, project, sandbox_id)
    export_id = new_id()
    arguments: dict[str, Any] = {"export": export_id, "include_template": include_template}
    accepted = accepting.take(connection, row, Verb.EXPORT, key, desired=row.state, arguments=arguments, gated=True)
    _store(connection, export_id, project, row.id, None, row.node_id, accepted.operation.id)
    return accepted


def begin_of_snapshot(connection: Connection, project: str, snapshot_id: str) -> ExportRow:
    """Stores an export of a snapshot in `pending`. Raises what `snapshots.get_ready` does, and `Forbidden("approval_needed")`."""
    row = snapshots.get_ready(connection, project, snapshot_id)
    if approvals.required(connection, project, Verb.EXPORT):
        raise Forbidden(
            "approval_needed",
            "The project lets nothing be exported without somebody's consent, and the export of a snapshot is no operation that could wait for it.",
            "Make a sandbox from the snapshot, suspend or stop it, and export that: its operation waits.",
        )
    return _store(connection, new_id(), project, row.sandbox_id, row.id, row.node_id, None)


def made(
    connection: Connection, operation: OperationRow, answer: ExportMade, seen: Observed, started_at: float
) -> Finished | None:
    """Ends the operation of an export that is whole. None when it had been ended meanwhile."""
    result = {"export": answer.export_id, "size_bytes": answer.size_bytes, "expires_at": answer.expires_at}
    finished = ending.succeed(connection, operation, seen, started_at, result)
    if finished is not None:
        ready(connection, answer)
    return finished


def ready(connection: Connection, answer: ExportMade) -> None:
    """An export is whole, and can be fetched."""
    values: dict[str, Any] = {"size_bytes": answer.size_bytes, "digest": answer.digest, "expires_at": answer.expires_at}
    row = _move(connection, answer.export_id, "ready", **values)
    if row is not None:
        outbox.append(connection, row.project, "export.ready", row.id, {"sandbox": row.sandbox_id})


def failed(connection: Connection, export_id: str, error: dict[str, Any]) -> None:
    """An export will not be whole."""
    row = _move(connection, export_id, "failed", error=error)
    if row is not None:
        outbox.append(connection, row.project, "export.failed", row.id, {"sandbox": row.sandbox_id, "error": error})


def delete(connection: Connection, project: str, export_id: str) -> ExportRow:
    """Nobody wants an export any more. Raises `NotFound`."""
    row = get(connection, project, export_id)
    if _move(connection, export_id, "deleted", only=("pending", "ready", "failed")) is not None:
        outbox.append(connection, project, "export.deleted", export_id, {"sandbox": row.sandbox_id})
    return row


def kept_s(connection: Connection, project: str) -> float:
    """For how long an export of the project stays, from when it is whole."""
    most = automatic.bounds(connection, project).export_s
    return KEPT_S if most is None else min(KEPT_S, most)


def delete_older(connection: Connection, project: str, before: float, limit: int) -> list[ExportRow]:
    """Deletes the project's exports that were made before that time; returns them. Call again while there are `limit`."""
    query = (
        select(exports.c.id)
        .where(exports.c.project == project, exports.c.created_at < before, exports.c.state == "ready")
        .limit(limit)
    )
    gone = []
    for one in list(connection.execute(query).scalars()):
        row = _move(connection, one, "deleted", only=("ready",))
        if row is not None:
            outbox.append(connection, project, "export.expired", one, {"sandbox": row.sandbox_id, "why": "max_age"})
            gone.append(row)
    return gone


def accept_import(
    connection: Connection, new: NewSandbox, upload_id: str, memory: bool, key: IdempotencyKey | None
) -> Accepted:
    """Stores a sandbox in `pending`, and the operation that makes it from an upload. Raises what `accepting.accept_create` does."""
    arguments = {"upload": upload_id, "memory": memory}
    desired = State.SUSPENDED if memory else State.STOPPED
    return accepting.accept_create(connection, new, key, verb=Verb.IMPORT, desired=desired, arguments=arguments)


def sweep(connection: Connection, now: float) -> None:
    """Exports that are over are so here, too: their node removes them by itself. Old rows are forgotten."""
    over = exports.c.expires_at < now
    connection.execute(update(exports).where(over, exports.c.state == "ready").values(state="deleted", updated_at=now))
    error = {"code": "interrupted", "cause": "It was not finished in time.", "remedy": "Export again."}
    late = exports.c.created_at < now - MADE_WITHIN_S
    connection.execute(
        update(exports).where(late, exports.c.state == "pending").values(state="failed", error=error, updated_at=now)
    )
    ended = exports.c.state.in_(("deleted", "failed"))
    connection.execute(delete_from(exports).where(ended, exports.c.updated_at < now - KEPT_S))


def _store(
    connection: Connection,
    export_id: str,
    project: str,
    sandbox_id: str,
    snapshot_id: str | None,
    node_id: str,
    operation_id: str | None,
) -> ExportRow:
    now = time.time()
    row = ExportRow(
        id=export_id,
        project=project,
        sandbox_id=sandbox_id,
        snapshot_id=snapshot_id,
        node_id=node_id,
        operation_id=operation_id,
        state="pending",
        size_bytes=None,
        digest=None,
        error=None,
        created_at=now,
        updated_at=now,
        expires_at=None,
    )
    connection.execute(insert(exports).values(msgspec.structs.asdict(row)))
    return row


def _move(
    connection: Connection, export_id: str, state: str, *, only: tuple[str, ...] = ("pending",), **values: Any
) -> ExportRow | None:
    moved = (
        connection.execute(
            update(exports)
            .where(exports.c.id == export_id, exports.c.state.in_(only))
            .values(state=state, updated_at=time.time(), **values)
            .returning(exports)
        )
        .mappings()
        .one_or_none()
    )
    return None if moved is None else ExportRow(**moved)
