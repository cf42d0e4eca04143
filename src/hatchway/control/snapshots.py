"""/v1/snapshots, and the verbs that make and use them: snapshot and rollback."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.accepted import proceed, repeat, sandbox_id
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.fields import Name
from hatchway.control.nodes import quietly
from hatchway.domain.errors import NotFound
from hatchway.domain.lifecycle import SnapshotKind
from hatchway.storage import snapshots
from hatchway.storage.rows import SnapshotRow
from hatchway.wire.node import Empty, SnapshotRef

DELETE_WITHIN_S = 30.0


class MakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept: the disk, or memory and disk."""

    kind: SnapshotKind
    name: Name | None = None


class Rollback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of its own snapshots a sandbox goes back to."""

    snapshot: Annotated[str, Meta(description="Id of a snapshot of this sandbox.")]


class ListSnapshots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters."""

    sandbox: str | None = None
    kind: SnapshotKind | None = None
    name: str | None = None
    state: Literal["pending", "ready", "failed", "deleting"] | None = None
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


async def make(call: Call[MakeSnapshot]) -> Response:
    """Accepts a snapshot of a sandbox."""
    await call.plane.database.require_room()
    accepted = await call.plane.database.write(
        snapshots.accept, call.project, sandbox_id(call), call.body.kind, call.body.name, call.idempotency
    )
    return await proceed(call, accepted)


async def rollback(call: Call[Rollback]) -> Response:
    """Accepts to go back to a snapshot."""
    wanted = requests.check_id(call.body.snapshot, "snapshot", NotFound)
    accepted = await call.plane.database.write(
        snapshots.accept_rollback, call.project, sandbox_id(call), wanted, call.idempotency
    )
    return await proceed(call, accepted)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's snapshots."""
    query: ListSnapshots = call.query
    return await _listed(call, query.sandbox, query)


async def list_of(call: Call[NoBody]) -> Response:
    """Lists a sandbox's snapshots, also of one that was deleted."""
    query: ListSnapshots = call.query
    return await _listed(call, sandbox_id(call), query)


async def _listed(call: Call[NoBody], of: str | None, query: ListSnapshots) -> Response:
    rows = await call.plane.database.read(
        snapshots.list_page,
        call.project,
        sandbox_id=of,
        kind=query.kind,
        name=query.name,
        state=query.state,
        before=requests.decode_cursor(query.cursor),
        limit=query.limit + 1,
    )
    rows, cursor = requests.page(rows, query.limit)
    return answer(views.SnapshotPage(snapshots=tuple(views.snapshot(row) for row in rows), next_cursor=cursor))


async def get(call: Call[NoBody]) -> Response:
    """Shows one snapshot."""
    row = await call.plane.database.read(snapshots.get, call.project, _id(call))
    return answer(views.SnapshotAnswer(snapshot=views.snapshot(row)))


async def delete(call: Call[NoBody]) -> Response:
    """Deletes a snapshot; where its node is away, as soon as it is back."""
    row = await call.plane.database.write(snapshots.begin_delete_unused, call.project, _id(call))
    if row.state == "deleting":
        await quietly(remove(call, row))
        row = await call.plane.database.read(snapshots.get, call.project, row.id)
    return answer(views.SnapshotAnswer(snapshot=views.snapshot(row)), 200 if row.state == "deleted" else 202)


async def remove(call: Call[NoBody], row: SnapshotRow) -> None:
    """Has its node remove it. Raises what the node answers, and `Unavailable` while it is away; the reconciler then goes on."""
    link = await call.plane.nodes.wait(row.node_id, within=0.0)
    await link.call("snapshot.delete", SnapshotRef(snapshot_id=row.id), Empty, within=DELETE_WITHIN_S)
    await call.plane.database.write(snapshots.deleted, row.id)


def _id(call: Call[NoBody]) -> str:
    return requests.check_id(call.path["id"], "snapshot", NotFound)


_ACCEPTED: dict[int, type[msgspec.Struct] | None] = {202: views.AcceptedAnswer, 200: views.AcceptedAnswer}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/snapshots",
        make,
        "Keep the sandbox as it is now; `operation.result.snapshot` names the snapshot",
        _ACCEPTED,
        "snapshots",
        scope="write",
        body=MakeSnapshot,
        errors=(404, 409, 410),
        repeated=repeat,
        waits=True,
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes/{id}/snapshots",
        list_of,
        "List a sandbox's snapshots",
        {200: views.SnapshotPage},
        "snapshots",
        query=ListSnapshots,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/rollback",
        rollback,
        "Go back to one of its snapshots: a `full` one runs on from there, a `disk` one is stopped",
        _ACCEPTED,
        "snapshots",
        scope="write",
        body=Rollback,
        errors=(404, 409, 410),
        repeated=repeat,
        waits=True,
    ),
    Endpoint(
        "GET",
        "/v1/snapshots",
        list_,
        "List snapshots",
        {200: views.SnapshotPage},
        "snapshots",
        query=ListSnapshots,
    ),
    Endpoint(
        "GET", "/v1/snapshots/{id}", get, "Show a snapshot", {200: views.SnapshotAnswer}, "snapshots", errors=(404,)
    ),
    Endpoint(
        "DELETE",
        "/v1/snapshots/{id}",
        delete,
        "Delete a snapshot",
        {200: views.SnapshotAnswer, 202: views.SnapshotAnswer},
        "snapshots",
        scope="write",
        body=NoBody,
        errors=(404, 409),
    ),
)
