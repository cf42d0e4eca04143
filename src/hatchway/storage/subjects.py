"""What an operation is about: a sandbox; or a snapshot that is imported, for which no sandbox is there.

Who carries operations out asks for project and node of a sandbox. Of such a snapshot they are told as of a sandbox that was never stored.
"""

from sqlalchemy import Connection, bindparam, select

from hatchway.domain.lifecycle import State
from hatchway.storage import rows, sandboxes
from hatchway.storage.rows import OperationRow, SandboxRow, SnapshotRow
from hatchway.storage.tables import snapshots

_SNAPSHOT = select(snapshots).where(snapshots.c.id == bindparam("id"))


def of(connection: Connection, operation: OperationRow) -> SandboxRow | None:
    """The operation's sandbox, or what stands in for it; None when it is forgotten."""
    if not operation.of_snapshot:
        return sandboxes.find(connection, operation.target)
    row = connection.execute(_SNAPSHOT, {"id": operation.target}).mappings().one_or_none()
    return None if row is None else stand_in(rows.snapshot(row))


def stand_in(row: SnapshotRow) -> SandboxRow:
    """A snapshot that is imported, as what carries operations out knows sandboxes. It is in no table."""
    return SandboxRow(
        id=row.id,
        project=row.project,
        name=row.name,
        state=State.PENDING,
        desired=State.PENDING,
        version=1,
        generation=1,
        node_id=row.node_id,
        observed_sequence=0,
        operation_id=row.operation_id,
        template=row.template,
        template_digest=row.template_digest,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        metadata={},
        env={},
        require_isolation=None,
        isolation=None,
        boot_id=None,
        cause=None,
        reason="",
        last_process_id=row.last_process_id,
        forked_from=None,
        snapshot_id=None,
        head_snapshot_id=None,
        stored_bytes=None,
        artifact=None,
        created_at=row.created_at,
        updated_at=row.updated_at,
        deleted_at=None,
    )
