"""Whose an operation is: every one that has not ended belongs to one living control process, or may be claimed by any."""

from collections.abc import Collection

from sqlalchemy import Connection, and_, func, or_, select, update

from hatchway.storage import leases, rows, subjects
from hatchway.storage.operations import OPEN
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.tables import operations
from hatchway.storage.tables import sandboxes as sandboxes_table
from hatchway.storage.tables import snapshots as snapshots_table

BATCH = 100


def claim(
    connection: Connection, controller: str, nodes: Collection[str], *, accepted_by: float
) -> list[tuple[OperationRow, SandboxRow]]:
    """Takes what belongs to nobody who lives, oldest first, at most `BATCH`: operations on these nodes, and any accepted by then.

    Two that claim at once get different ones.
    """
    living = leases.living(connection)
    nobodys = or_(operations.c.controller_id.is_(None), operations.c.controller_id.not_in(living))
    on = func.coalesce(sandboxes_table.c.node_id, snapshots_table.c.node_id)
    query = (
        select(operations.c.id)
        .outerjoin(sandboxes_table, sandboxes_table.c.id == operations.c.target)
        .outerjoin(snapshots_table, snapshots_table.c.id == operations.c.target)
        .where(
            operations.c.status.in_(OPEN),
            nobodys,
            or_(on.in_(nodes), and_(on.is_not(None), operations.c.created_at <= accepted_by)),
        )
        .order_by(operations.c.created_at)
        .limit(BATCH)
        .with_for_update(skip_locked=True, of=operations)
    )
    found = list(connection.execute(query).scalars())
    if not found:
        return []
    taken = update(operations).where(operations.c.id.in_(found)).values(controller_id=controller).returning(operations)
    claimed: list[tuple[OperationRow, SandboxRow]] = []
    for row in connection.execute(taken).mappings().all():
        operation = rows.operation(row)
        sandbox = subjects.of(connection, operation)
        if sandbox is not None:
            claimed.append((operation, sandbox))
    return sorted(claimed, key=lambda one: one[0].created_at)


def give_back(connection: Connection, controller: str, operation_id: str, phase: str) -> None:
    """Lets another control process have an operation, one whose node it reaches."""
    connection.execute(
        update(operations)
        .where(
            operations.c.id == operation_id,
            operations.c.controller_id == controller,
            operations.c.status.in_(OPEN),
        )
        .values(controller_id=None, phase=phase)
    )


def give_back_all(connection: Connection, controller: str) -> None:
    """For a control process that ends: others take up what it has not finished."""
    connection.execute(
        update(operations)
        .where(operations.c.controller_id == controller, operations.c.status.in_(OPEN))
        .values(controller_id=None)
    )
    leases.end(connection, controller)


def holds(connection: Connection, controller: str, operation_id: str) -> bool:
    """Whether the operation has not ended and is still this control process's."""
    query = select(operations.c.id).where(
        operations.c.id == operation_id, operations.c.controller_id == controller, operations.c.status.in_(OPEN)
    )
    return connection.execute(query).one_or_none() is not None


def claimed_by_another(connection: Connection, controller: str, operation_id: str) -> bool:
    """Whether another control process that lives has it in hand."""
    query = select(operations.c.controller_id).where(operations.c.id == operation_id)
    found = connection.execute(query).scalar_one_or_none()
    return found is not None and found != controller and found in leases.living(connection)
