"""/v1/exports, /v1/uploads, /v1/imports: archives out of sandboxes and snapshots, and these out of archives.

The octets go between client and node, over the data plane; here is who may, and what becomes of them.
"""

import asyncio
import time
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import archive_keys, requests, views
from hatchway.control.accepted import proceed, repeat, sandbox_id, show
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.fields import Name, check_caps, check_env, check_metadata, unknown_template
from hatchway.control.nodes import NodeLink, node_timeout, quietly, unreachable
from hatchway.control.verbs import signed_export
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Conflict, HatchwayError, NotFound, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import SnapshotKind
from hatchway.domain.quotas import template_allowed
from hatchway.storage import accepting, exports, projects, snapshot_imports, snapshots
from hatchway.storage.accepting import NewSandbox
from hatchway.storage.exports import ExportRow
from hatchway.storage.idempotency import Answered
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.snapshot_imports import NewSnapshot
from hatchway.wire.node import Empty, ExportRef, ExportRequest, FetchUpload, Struct, UploadDescription, UploadStatus
from hatchway.wire.tokens import ARCHIVES

S = TypeVar("S", bound=Struct)

LOOK_WITHIN_S = 30.0
NODE_WAIT_S = 3.0
TOKEN_S = 3600.0


class MakeExport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an archive brings along."""

    include_template: bool = False
    """With the template's files: for an installation that does not have it."""


class MakeUpload(NoBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing, for an archive that the client brings; or where a node fetches it from."""

    url: (
        Annotated[
            str, Meta(max_length=1000, description="Address of an archive, under a prefix that the operator allows.")
        ]
        | UnsetType
    ) = UNSET
    upload: Annotated[str, Meta(description="Id of an upload of this address that was not finished.")] | UnsetType = (
        UNSET
    )


class MakeImport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox or a snapshot is made from, by what the archive is of; what is not given is as the archive says."""

    upload: Annotated[str, Meta(description="Id of an upload that is complete.")]
    memory: bool = True
    """Take its memory, too, where it has one; false: the disk alone. The sandbox is stopped then, the snapshot of the kind `disk`."""
    name: Name | None = None
    metadata: dict[str, str] | None = None
    """Of a sandbox alone, as is `env`."""
    env: dict[str, str] | None = None


class ListExports(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paging."""

    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


class Export(views.View, frozen=True, kw_only=True):
    """An archive on a node: `state` is `pending ready failed`; `signed_by` is what another installation has to trust to take it in."""

    id: str
    sandbox: str
    snapshot: str | None
    operation: str | None
    state: str
    size_bytes: int | None
    digest: str | None
    signed_by: str
    error: dict[str, Any] | None
    created_at: float
    expires_at: float | None


class ExportAnswer(views.View, frozen=True, kw_only=True):
    """One export."""

    export: Export


class ExportPage(views.View, frozen=True, kw_only=True):
    """Exports, newest first."""

    exports: tuple[Export, ...]
    next_cursor: str | None


class ArchiveToken(views.View, frozen=True, kw_only=True):
    """Where an archive is fetched from, or brought to, and the right to do so."""

    id: str
    url: str
    token: str
    expires_at: float


async def make(call: Call[MakeExport]) -> Response:
    """Accepts the export of a sandbox."""
    await call.plane.database.require_room()
    accepted = await call.plane.database.write(
        exports.accept, call.project, sandbox_id(call), call.body.include_template, call.idempotency
    )
    return await proceed(call, accepted)


_snapshots_out: set[asyncio.Task[None]] = set()


async def make_of_snapshot(call: Call[MakeExport]) -> Response:
    """Begins the export of a snapshot, which is no operation of any sandbox: the export itself says how far it is."""
    plane = call.plane
    await plane.database.require_room()
    snapshot_id = requests.check_id(call.path["id"], "snapshot", NotFound)
    snapshot = await plane.database.read(snapshots.get_ready, call.project, snapshot_id)
    link = plane.nodes.find(snapshot.node_id)
    if link is None or not link.connected:
        raise unreachable(snapshot.node_id)
    row = await plane.database.write(exports.begin_of_snapshot, call.project, snapshot_id)
    key_id, _ = await plane.database.read(archive_keys.own)
    used = await plane.database.read(accepting.numbers_used, snapshot_id)
    request = ExportRequest(
        sandbox_id=row.sandbox_id,
        generation=1,
        export_id=row.id,
        project=row.project,
        key_id=key_id,
        snapshot_id=snapshot_id,
        include_template=call.body.include_template,
        parents=() if snapshot.parent_id is None else (snapshot.parent_id,),
        labels={"name": snapshot.name, "metadata": {}, "processes": str(used)},
    )
    task = asyncio.get_running_loop().create_task(_export_snapshot(call, link, request))
    _snapshots_out.add(task)
    task.add_done_callback(_snapshots_out.discard)
    await asyncio.wait([task], timeout=requests.prefer_wait(call.request) or 0)
    row = await plane.database.read(exports.get, call.project, row.id)
    return answer(await _answered(call, row), 202 if row.state == "pending" else 200)


async def _export_snapshot(call: Call[MakeExport], link: NodeLink, request: ExportRequest) -> None:
    database = call.plane.database
    try:
        made = await signed_export(link, database, request)
    except (HatchwayError, TimeoutError) as error:
        told = error if isinstance(error, HatchwayError) else node_timeout()
        await database.write(exports.failed, request.export_id, msgspec.to_builtins(told.as_dict(), str_keys=True))
    else:
        await database.write(exports.ready, made)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's exports."""
    query: ListExports = call.query
    rows = await call.plane.database.read(
        exports.list_page, call.project, before=requests.decode_cursor(query.cursor), limit=query.limit + 1
    )
    rows, cursor = requests.page(rows, query.limit)
    signer = archive_keys.shown(*await call.plane.database.read(archive_keys.own))
    return answer(ExportPage(exports=tuple(_view(row, signer) for row in rows), next_cursor=cursor))


async def get(call: Call[NoBody]) -> Response:
    """Shows one export."""
    return answer(await _answered(call, await call.plane.database.read(exports.get, call.project, _id(call))))


async def delete(call: Call[NoBody]) -> Response:
    """Deletes an export; where its node is away that removes it when its time is over."""
    row = await call.plane.database.write(exports.delete, call.project, _id(call))
    link = call.plane.nodes.find(row.node_id)
    if link is not None and link.connected:
        await quietly(link.call("export.delete", ExportRef(export_id=row.id), Empty, within=LOOK_WITHIN_S))
    return answer(None, 204)


async def token(call: Call[NoBody]) -> Response:
    """Signs the right to fetch an export."""
    row = await call.plane.database.read(exports.get, call.project, _id(call))
    if row.state != "ready":
        raise Conflict(
            "export_not_ready",
            f"The export {row.id} is {row.state}.",
            "Wait for its operation to end." if row.state == "pending" else "Export again.",
            state=row.state,
        )
    link = call.plane.nodes.find(row.node_id)
    if link is None or not link.connected:
        raise unreachable(row.node_id)
    return answer(_right(call, link, row.id, f"/v1/exports/{row.id}/content", row.expires_at), 201)


async def upload(call: Call[MakeUpload]) -> Response:
    """Signs the right to bring an archive to a node, or has a node fetch one."""
    body, upload_id = call.body, new_id()
    await call.plane.nodes.wait(None, within=NODE_WAIT_S)
    link = call.plane.nodes.ready()[0]
    if body.upload is not UNSET:
        upload_id = requests.check_id(body.upload, "upload", NotFound)
        if body.url is UNSET:
            raise invalid_field("url", "it is missing beside `upload`.", "the address that is fetched")
        link, _ = await _found(call, upload_id, "upload.status", UploadStatus)
    if body.url is not UNSET:
        await call.plane.database.require_room()
        request = FetchUpload(export_id=upload_id, project=call.project, url=body.url)
        try:
            await link.call("upload.fetch", request, UploadStatus, within=LOOK_WITHIN_S)
        except TimeoutError:
            raise node_timeout() from None
    return answer(_right(call, link, upload_id, f"/v1/uploads/{upload_id}/content", None), 201)


async def import_(call: Call[MakeImport]) -> Response:
    """Accepts a sandbox that is made from an upload, or a snapshot where the archive is of one."""
    body, plane = call.body, call.plane
    upload_id = requests.check_id(body.upload, "upload", NotFound)
    await plane.database.require_room()
    link, told = await _found(call, upload_id, "upload.describe", UploadDescription)
    memory = body.memory and told.kind == SnapshotKind.FULL
    if memory and told.memory_problem:
        raise Conflict(
            "memory_lost",
            f"The archive's memory cannot be loaded here. {told.memory_problem}",
            "Its disk can be taken in without it: import with `memory` false.",
        )
    project = await plane.database.read(projects.get, call.project)
    check_caps(project, told.shape)
    name, _, tag = told.template.partition(":")
    if not template_allowed(project.templates, name=name, tag=tag, digest=told.template_digest):
        raise unknown_template(told.template)
    assert link.info is not None
    assert link.node_id is not None
    if project.require_isolation not in (None, link.info.isolation):
        raise Unprocessable(
            "isolation_unavailable",
            f"All sandboxes of the project {project.name} must have {project.require_isolation} isolation.",
            "Use another project.",
        )
    if told.of_snapshot:
        return await _import_snapshot(call, link.node_id, told, memory)
    metadata = told.metadata if body.metadata is None else body.metadata
    env = told.env if body.env is None else body.env
    check_env(env, "env")
    check_metadata(metadata)
    new = NewSandbox(
        project=call.project,
        name=body.name or _name(told.name),
        node_id=link.node_id,
        template=told.template,
        template_digest=told.template_digest,
        shape=told.shape,
        metadata=metadata,
        env=env,
        require_isolation=project.require_isolation,
        last_process_id=told.processes,
    )
    accepted = await plane.database.write(exports.accept_import, new, upload_id, memory, call.idempotency)
    return await proceed(call, accepted, _show_import)


async def _import_snapshot(call: Call[MakeImport], node_id: str, told: UploadDescription, memory: bool) -> Response:
    body = call.body
    for field, given in (("metadata", body.metadata), ("env", body.env)):
        if given:
            raise invalid_field(field, "the archive is of a snapshot, which has none.", "what is made from it may have")
    new = NewSnapshot(
        project=call.project,
        node_id=node_id,
        kind=SnapshotKind.FULL if memory else SnapshotKind.DISK,
        name=body.name or _name(told.name),
        template=told.template,
        template_digest=told.template_digest,
        shape=told.shape,
        source=told.source,
        snapshot=told.snapshot,
        key_id=told.key_id,
        last_process_id=told.processes,
    )
    accepted = await call.plane.database.write(snapshot_imports.accept, new, body.upload, call.idempotency)
    return await proceed(call, accepted, _show_import)


async def _show_import(call: Call[Any], subject: SandboxRow, operation: OperationRow) -> views.ImportAnswer:
    shown = views.operation(operation, call.plane.engine.live.get(operation.id))
    if not operation.of_snapshot:
        return views.ImportAnswer(made="sandbox", sandbox=show(call, subject), operation=shown)
    row = await call.plane.database.read(snapshots.get, call.project, operation.target)
    return views.ImportAnswer(made="snapshot", snapshot=views.snapshot(row), operation=shown)


async def _repeat_import(call: Call[Any], earlier: Answered) -> Response:
    return await repeat(call, earlier, _show_import)


async def _found(call: Call[Any], upload_id: str, method: str, kind: type[S]) -> tuple[NodeLink, S]:
    """The node that has an upload, and what it says of that. Raises `NotFound("unknown_upload")`, and what is wrong with it."""
    await call.plane.nodes.wait(None, within=NODE_WAIT_S)
    ref = ExportRef(export_id=upload_id, project=call.project)
    for link in call.plane.nodes.ready():
        try:
            return link, await link.call(method, ref, kind, within=LOOK_WITHIN_S)
        except NotFound:
            continue
    raise NotFound("unknown_upload", f"There is no upload {upload_id}.", "It may be over: upload again.")


def _name(told: str | None) -> str | None:
    try:
        return msgspec.convert(told, Name | None)
    except msgspec.ValidationError:
        return None


def _right(call: Call[Any], link: NodeLink, archive_id: str, path: str, until: float | None) -> ArchiveToken:
    assert link.info is not None
    signed, expires_at = call.plane.signer.issue(
        project=call.project,
        sandbox_id=archive_id,
        generation=1,
        ttl_s=TOKEN_S if until is None else max(1.0, min(TOKEN_S, until - time.time())),
        scopes=frozenset({ARCHIVES}),
        key_id=call.key.id,
        until=call.key.expires_at,
    )
    url = link.info.attach_url.rstrip("/") + path
    return ArchiveToken(id=archive_id, url=url, token=signed, expires_at=expires_at)


async def _answered(call: Call[Any], row: ExportRow) -> ExportAnswer:
    signer = archive_keys.shown(*await call.plane.database.read(archive_keys.own))
    return ExportAnswer(export=_view(row, signer))


def _view(row: ExportRow, signer: str) -> Export:
    return Export(
        id=row.id,
        sandbox=row.sandbox_id,
        snapshot=row.snapshot_id,
        operation=row.operation_id,
        state=row.state,
        size_bytes=row.size_bytes,
        digest=row.digest,
        signed_by=signer,
        error=row.error,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )


def _id(call: Call[Any]) -> str:
    return requests.check_id(call.path["id"], "export", NotFound)


_ACCEPTED: dict[int, type[msgspec.Struct] | None] = {202: views.AcceptedAnswer, 200: views.AcceptedAnswer}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/export",
        make,
        "Make an archive of a suspended or stopped sandbox; `operation.result.export` names it",
        _ACCEPTED,
        "archives",
        scope="write",
        body=MakeExport,
        errors=(404, 409, 410),
        repeated=repeat,
        waits=True,
    ),
    Endpoint(
        "POST",
        "/v1/snapshots/{id}/export",
        make_of_snapshot,
        "Make an archive of a snapshot",
        {202: ExportAnswer, 200: ExportAnswer},
        "archives",
        scope="write",
        body=MakeExport,
        errors=(404, 409, 503),
        waits=True,
    ),
    Endpoint("GET", "/v1/exports", list_, "List exports", {200: ExportPage}, "archives", query=ListExports),
    Endpoint("GET", "/v1/exports/{id}", get, "Show an export", {200: ExportAnswer}, "archives", errors=(404,)),
    Endpoint(
        "DELETE",
        "/v1/exports/{id}",
        delete,
        "Delete an export",
        {204: None},
        "archives",
        scope="write",
        body=NoBody,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/exports/{id}/token",
        token,
        "Get the right to fetch an export from its node",
        {201: ArchiveToken},
        "archives",
        scope="write",
        body=NoBody,
        errors=(404, 409, 503),
    ),
    Endpoint(
        "POST",
        "/v1/uploads",
        upload,
        "Get the right to bring an archive to a node, or have a node fetch one",
        {201: ArchiveToken},
        "archives",
        scope="write",
        body=MakeUpload,
        errors=(404, 409, 503, 507),
    ),
    Endpoint(
        "POST",
        "/v1/imports",
        import_,
        "Make a sandbox from an archive that was uploaded, suspended with its memory, else stopped; or a snapshot, from a snapshot's",
        {202: views.ImportAnswer, 200: views.ImportAnswer},
        "archives",
        scope="write",
        body=MakeImport,
        errors=(404, 409, 503, 507),
        repeated=_repeat_import,
        waits=True,
    ),
)
