"""Reading operations, and noting how far they are; their beginning is in `accepting`, their end in `ending`."""

from sqlalchemy import Connection, bindparam, select, tuple_, update

from hatchway.domain.errors import NotFound
from hatchway.storage import rows
from hatchway.storage.rows import OperationRow
from hatchway.storage.tables import operations

OPEN = ("pending", "running")

_ONE = select(operations).where(operations.c.id == bindparam("id"))
_PROGRESS = (
    update(operations)
    .where(operations.c.id == bindparam("operation"), operations.c.status.in_(OPEN))
    .values(
        status="running",
        phase=bindparam("new_phase"),
        progress=bindparam("new_progress"),
        started_at=bindparam("new_started_at"),
    )
)


def find(connection: Connection, operation_id: str) -> OperationRow | None:
    """The operation of any project, or None."""
    row = connection.execute(_ONE, {"id": operation_id}).mappings().one_or_none()
    return None if row is None else rows.operation(row)


def get(connection: Connection, project: str, operation_id: str) -> OperationRow:
    """Raises `NotFound("unknown_operation")`, also for one of another project."""
    row = find(connection, operation_id)
    if row is None or row.project != project:
        raise NotFound(
            "unknown_operation",
            f"There is no operation {operation_id}.",
            "GET /v1/operations lists those of the last hours.",
        )
    return row


def list_page(
    connection: Connection,
    project: str,
    *,
    target: str | None = None,
    statuses: tuple[str, ...] = (),
    kind: str | None = None,
    before: tuple[float, str] | None = None,
    limit: int,
) -> list[OperationRow]:
    """The project's operations, newest first, from behind `before` (creation time, id)."""
    # What is done with members of pools is not the project's to see.
    member = operations.c.arguments["pool"].as_string()
    query = select(operations).where(operations.c.project == project, member.is_(None))
    if target is not None:
        query = query.where(operations.c.target == target)
    if statuses:
        query = query.where(operations.c.status.in_(statuses))
    if kind is not None:
        query = query.where(operations.c.kind == kind)
    if before is not None:
        query = query.where(tuple_(operations.c.created_at, operations.c.id) < before)
    query = query.order_by(operations.c.created_at.desc(), operations.c.id.desc()).limit(limit)
    return [rows.operation(row) for row in connection.execute(query).mappings()]


def unfinished(connection: Connection, only: str | None = None) -> list[OperationRow]:
    """The operations that have not ended, oldest first (what a process that died was working on); or the one with the id `only`."""
    query = select(operations).where(operations.c.status.in_(OPEN)).order_by(operations.c.created_at)
    if only is not None:
        query = query.where(operations.c.id == only)
    return [rows.operation(row) for row in connection.execute(query).mappings()]


def note_all_progress(connection: Connection, notes: list[tuple[str, str, float | None, float]]) -> None:
    """Writes how far operations are: (id, phase, progress from 0 to 1, start); those that have ended stay as they are."""
    for operation_id, phase, progress, started_at in notes:
        connection.execute(
            _PROGRESS,
            {"operation": operation_id, "new_phase": phase, "new_progress": progress, "new_started_at": started_at},
        )
