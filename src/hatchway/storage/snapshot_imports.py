"""Snapshots that come from archives: a row without a sandbox, `pending` with the operation that makes it, then `ready`, or on its way out."""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, insert

from hatchway.domain.errors import Conflict, Forbidden
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import SnapshotKind
from hatchway.domain.shapes import Shape
from hatchway.storage import accepting, ending, idempotency, outbox, quotas, subjects
from hatchway.storage.accepting import Accepted
from hatchway.storage.ending import Finished
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import OperationRow, SnapshotRow
from hatchway.storage.snapshots import mark_ready
from hatchway.storage.tables import snapshots
from hatchway.wire.node import Snapshot


class NewSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive says of a snapshot, checked."""

    project: str
    node_id: str
    kind: SnapshotKind
    name: str | None
    template: str
    template_digest: str
    shape: Shape
    source: str
    """Id of the sandbox that it was made of, wherever that is."""
    snapshot: str | None
    """Id that it had there; None where its archive does not say that."""
    key_id: str
    """Of the key that signed it."""
    last_process_id: int


def accept(connection: Connection, new: NewSnapshot, upload_id: str, key: IdempotencyKey | None) -> Accepted:
    """Stores a snapshot in `pending`, and the operation that makes it from an upload, whose target it is.

    Raises `idempotency.Answered`, and what `quotas.admit_snapshot` does.
    """
    idempotency.check(connection, new.project, key)
    quotas.admit_snapshot(connection, new.project)
    now, snapshot_id = time.time(), new_id()
    arguments = {"upload": upload_id, "snapshot": snapshot_id, "kind": str(new.kind)}
    operation = accepting.new_import(new.project, snapshot_id, now, arguments)
    row = SnapshotRow(
        id=snapshot_id,
        project=new.project,
        sandbox_id=new.source,
        node_id=new.node_id,
        operation_id=operation.id,
        kind=new.kind,
        name=new.name,
        parent_id=None,
        state="pending",
        template=new.template,
        template_digest=new.template_digest,
        vcpus=new.shape.vcpus,
        memory_mib=new.shape.memory_mib,
        disk_mib=new.shape.disk_mib,
        disk_bytes=None,
        memory_bytes=None,
        digest=None,
        error=None,
        created_at=now,
        updated_at=now,
        origin={"sandbox": new.source, "snapshot": new.snapshot, "key": new.key_id},
        last_process_id=new.last_process_id,
    )
    connection.execute(insert(snapshots), msgspec.structs.asdict(row))
    accepting.keep_accepted(connection, operation, key)
    return Accepted(sandbox=subjects.stand_in(row), operation=operation, run=True)


def made(connection: Connection, operation: OperationRow, answer: Snapshot, started_at: float) -> Finished | None:
    """Ends the operation of a snapshot that is whole and durable. None when it had been ended.

    One that would take the project beyond its quota fails instead, and its node is told to remove it.
    """
    try:
        quotas.admit_snapshot(connection, operation.project, answer.disk_bytes + answer.memory_bytes)
    except (Forbidden, Conflict) as error:
        return ending.fail(connection, operation, error.as_dict(), None, started_at)
    result: dict[str, Any] = {"snapshot": answer.snapshot_id, "changed": True}
    ended = ending.end(connection, operation, "succeeded", result, None, started_at)
    if ended is None:
        return None
    mark_ready(connection, operation.target, answer)
    data = {"sandbox": answer.sandbox_id, "kind": answer.kind, "imported": True}
    outbox.append(connection, operation.project, "snapshot.created", answer.snapshot_id, data)
    row = subjects.of(connection, ended)
    assert row is not None
    return Finished(sandbox=row, operation=ended)
