"""/v1/sandboxes: create, look, change, and the lifecycle verbs."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import idempotency, requests, timing, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.nodes import NodeLink, node_timeout
from hatchway.control.poolkeeper import pool_key
from hatchway.domain import shapes
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Conflict, Gone, NotFound, Unprocessable
from hatchway.domain.lifecycle import State, Verb
from hatchway.domain.quotas import template_allowed
from hatchway.storage import automatic, branches, operations, pools, projects, sandboxes, snapshots, transitions
from hatchway.storage.idempotency import Answered
from hatchway.storage.projects import ProjectRow
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.transitions import Accepted, NewSandbox
from hatchway.wire.node import ResolveTemplate, TemplateRelease

NODE_WAIT_S = 3.0
"""How long a create waits for a node that is just being restarted before it answers 503."""
RESOLVE_WITHIN_S = 10.0
MAX_METADATA = 64
MAX_ENV = 256
MAX_ENV_OCTETS = 32 * 1024
"""The guest gets its environment in one frame of 64 KiB."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_METADATA_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_REFERENCE = r"^[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})?$"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


Reference = Annotated[str, Meta(pattern=_REFERENCE, description="`name`, `name:tag` or `name@sha256:…`")]
Vcpus = Annotated[int, Meta(ge=shapes.MIN_VCPUS, le=shapes.MAX_VCPUS)]
MemoryMib = Annotated[int, Meta(ge=shapes.MIN_MEMORY_MIB, le=shapes.MAX_MEMORY_MIB)]
DiskMib = Annotated[int, Meta(ge=shapes.MIN_DISK_MIB, le=shapes.MAX_DISK_MIB)]


class CreateSandbox(timing.Timing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a new sandbox is made from, a template or a snapshot, and how large it is. A snapshot has its size already: only the disk can be larger."""

    template: Reference | UnsetType = UNSET
    snapshot: Annotated[str, Meta(description="Id of a snapshot of the project.")] | UnsetType = UNSET
    name: Name | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    vcpus: Vcpus | UnsetType = UNSET
    memory_mib: MemoryMib | UnsetType = UNSET
    disk_mib: DiskMib | UnsetType = UNSET
    require_isolation: Literal["hardware", "emulated"] | None = None
    pool: Annotated[
        str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="`auto`, `never`, or a pool's name.")
    ] = pools.ANY


class ForkSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many branches, and what of them is not as the source."""

    count: Annotated[int, Meta(ge=1, le=branches.MAX_BRANCHES)] = 1
    name: Name | None = None
    metadata: dict[str, str] | None = None
    env: dict[str, str] | None = None


class ChangeSandbox(timing.Timing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a sandbox can be changed; `metadata` replaces the whole of it, `name: null` takes the name away.

    `timeout_s` counts from now on. A deadline that would come earlier by it is an error without `shorten`.
    """

    name: Name | UnsetType | None = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    shorten: bool = False


class ListSandboxes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters; also `metadata.KEY=VALUE`, any number of them. Deleted sandboxes are listed only where `state` asks for them."""

    state: Annotated[str, Meta(description="One state, or several with commas between them.")] | None = None
    name: str | None = None
    template: Annotated[str, Meta(description="Reference, its name without the tag, or digest.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


def check_env(env: dict[str, str], field: str, *, entries: int = MAX_ENV, octets: int = MAX_ENV_OCTETS) -> None:
    """Raises `invalid_field` for what the guest could not take as environment."""
    allowed = {"entries": entries, "octets": octets, "name": _ENV_NAME.pattern}
    if len(env) > entries:
        raise invalid_field(field, f"it has {len(env)} entries.", f"at most {entries} entries")
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise invalid_field(f"{field}.{name[:64]}", "this is no name of a variable.", allowed)
        if "\0" in value:
            raise invalid_field(f"{field}.{name}", "the value has a NUL character.", allowed)
    size = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in env.items())
    if size > octets:
        raise invalid_field(field, f"it has {size} octets in all.", f"at most {octets} octets")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises `invalid_field` for too many entries, keys that no filter could name, and long values."""
    if len(metadata) > MAX_METADATA:
        raise invalid_field("metadata", f"it has {len(metadata)} entries.", f"at most {MAX_METADATA} entries")
    for key, value in metadata.items():
        if not _METADATA_KEY.fullmatch(key):
            raise invalid_field(f"metadata.{key[:64]}", "this is no key.", {"pattern": _METADATA_KEY.pattern})
        if len(value) > 512:
            raise invalid_field(f"metadata.{key}", "the value is too long.", {"type": "string", "maxLength": 512})


def _shape(body: CreateSandbox) -> shapes.Shape:
    given = {"vcpus": body.vcpus, "memory_mib": body.memory_mib, "disk_mib": body.disk_mib}
    return shapes.Shape(**{name: value for name, value in given.items() if value is not UNSET})


def check_size(shape: shapes.Shape, candidates: Sequence[NodeLink]) -> None:
    """Raises `invalid_field` for a size that no node could ever hold."""
    infos = [link.info for link in candidates if link.info is not None]
    for field, wanted, most in (
        ("vcpus", shape.vcpus, [info.cpus for info in infos]),
        ("memory_mib", shape.memory_mib, [info.memory_mib for info in infos]),
        ("disk_mib", shape.disk_mib, [info.disk_mib for info in infos]),
    ):
        if most and wanted > max(most):
            raise invalid_field(field, "no node here is that large.", {"type": "integer", "maximum": max(most)})


def check_caps(project: ProjectRow, shape: shapes.Shape) -> None:
    """Raises `invalid_field` for a sandbox that is larger than the project's may be."""
    for field in ("vcpus", "memory_mib", "disk_mib"):
        most = getattr(project.caps, field)
        if most is not None and getattr(shape, field) > most:
            raise invalid_field(
                field,
                f"no sandbox of the project {project.name} may be that large.",
                {"type": "integer", "maximum": most},
            )


def _isolation(body: CreateSandbox, project: ProjectRow) -> str | None:
    """What is required of the boundary, by the request or else by its project. Raises `isolation_unavailable` where they differ."""
    required = project.require_isolation
    isolation = body.require_isolation or required
    if required not in (None, isolation):
        raise Unprocessable(
            "isolation_unavailable",
            f"All sandboxes of the project {project.name} must have {required} isolation.",
            "Leave `require_isolation` out, or use another project.",
            field="require_isolation",
            allowed=[required],
        )
    return isolation


def unknown_template(reference: str) -> Unprocessable:
    """The error of a template that is not there, or that the project may not use."""
    return Unprocessable(
        "unknown_template",
        f"There is no template {reference[:200]!r} that the project may use.",
        "GET /v1/templates lists those that there are.",
        field="template",
    )


async def create(call: Call[CreateSandbox]) -> Response:
    """Accepts a new sandbox."""
    body = call.body
    check_env(body.env, "env")
    check_metadata(body.metadata)
    await call.plane.database.require_room()
    if (body.template is UNSET) == (body.snapshot is UNSET):
        raise Unprocessable(
            "missing_field" if body.template is UNSET else "invalid_field",
            "A sandbox is made either from a `template` or from a `snapshot`.",
            "Give one of the two.",
            field="template",
            allowed=["template", "snapshot"],
        )
    lifetime, schedule = timing.of_new(body, await call.plane.database.read(automatic.bounds, call.project))
    new = await (
        _from_snapshot(call, body.snapshot) if body.snapshot is not UNSET else _from_template(call, str(body.template))
    )
    new = msgspec.structs.replace(new, lifetime=lifetime, schedule=schedule)
    accept = transitions.accept_create if new.snapshot_id is None else snapshots.accept_create
    try:
        claimed = await _claimed(call, new)
        if claimed is not None:
            return await proceed(call, claimed)
        accepted = await call.plane.database.write(accept, new, call.idempotency)
    except Answered as earlier:
        return await repeat(call, earlier)
    return await proceed(call, accepted)


async def _claimed(call: Call[CreateSandbox], new: NewSandbox) -> Accepted | None:
    """A member of a pool, which is now the sandbox that was asked for; None where none is there to be claimed.

    Raises `NotFound("unknown_pool")`, `Conflict("pool_does_not_fit")` for a pool that never has what was asked for.
    """
    plane, pool = call.plane, call.body.pool
    link = plane.nodes.find(new.node_id)
    if pool == pools.NEVER or new.snapshot_id is not None or link is None or link.info is None:
        return None
    if pool != pools.ANY:
        row = await plane.database.read(pools.get, call.project, pool)
        asked = (new.template_digest, new.shape.vcpus, new.shape.memory_mib, new.shape.disk_mib)
        if asked != (row.template_digest, row.vcpus, row.memory_mib, row.disk_mib):
            raise Conflict(
                "pool_does_not_fit",
                f"The pool {pool} holds sandboxes of another template or size.",
                "Ask for what it holds, or say `pool: auto`.",
                pool=pool,
            )
    key = pool_key(new.template_digest, link.info)
    claimed = await plane.database.write(pools.claim, new, pool, key, call.idempotency)
    if claimed is not None:
        plane.pools.look()
    return claimed


async def _from_template(call: Call[CreateSandbox], reference: str) -> NewSandbox:
    body, plane, shape = call.body, call.plane, _shape(call.body)
    await plane.nodes.wait(None, within=NODE_WAIT_S)
    candidates = plane.nodes.ready()
    check_size(shape, candidates)
    project = await plane.database.read(projects.get, call.project)
    check_caps(project, shape)
    isolation = _isolation(body, project)
    link = plane.place(isolation, candidates)
    if link is None or link.node_id is None:
        raise Unprocessable(
            "isolation_unavailable",
            f"No node here can give {isolation} isolation.",
            "`hatchway doctor` says why; require none, of the sandbox and of its project, to take what there is.",
            field="require_isolation",
            allowed=sorted({one.info.isolation for one in candidates if one.info is not None}),
        )
    try:
        release = await link.call(
            "template.resolve",
            ResolveTemplate(reference=reference),
            TemplateRelease,
            within=RESOLVE_WITHIN_S,
        )
    except NotFound:
        raise unknown_template(reference) from None
    except TimeoutError:
        raise node_timeout() from None
    if not template_allowed(project.templates, name=release.name, tag=release.tag, digest=release.digest):
        raise unknown_template(reference)
    return NewSandbox(
        project=call.project,
        name=body.name,
        node_id=link.node_id,
        template=f"{release.name}:{release.tag}" if release.tag and "@" not in reference else reference,
        template_digest=release.digest,
        shape=shape,
        metadata=body.metadata,
        env=body.env,
        require_isolation=isolation,
    )


async def _from_snapshot(call: Call[CreateSandbox], snapshot_id: str) -> NewSandbox:
    body = call.body
    requests.check_id(snapshot_id, "snapshot", NotFound)
    row = await call.plane.database.read(snapshots.get_ready, call.project, snapshot_id)
    for field, asked, kept in (("vcpus", body.vcpus, row.vcpus), ("memory_mib", body.memory_mib, row.memory_mib)):
        if asked not in (UNSET, kept):
            raise invalid_field(field, f"the snapshot was made with {kept}.", [kept])
    if body.disk_mib is not UNSET and body.disk_mib < row.disk_mib:
        raise invalid_field("disk_mib", "a disk cannot shrink.", {"type": "integer", "minimum": row.disk_mib})
    shape = shapes.Shape(
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib if body.disk_mib is UNSET else body.disk_mib,
    )
    project = await call.plane.database.read(projects.get, call.project)
    check_caps(project, shape)
    name, _, tag = row.template.partition("@")[0].partition(":")
    if not template_allowed(project.templates, name=name, tag=tag, digest=row.template_digest):
        raise unknown_template(row.template)
    isolation = _isolation(body, project)
    link = await call.plane.nodes.wait(row.node_id, within=NODE_WAIT_S)
    if link.info is not None and isolation not in (None, link.info.isolation):
        raise Unprocessable(
            "isolation_unavailable",
            f"The node of the snapshot gives {link.info.isolation} isolation.",
            "Require none, of the sandbox and of its project, to take what there is.",
            field="require_isolation",
            allowed=[link.info.isolation],
        )
    return NewSandbox(
        project=call.project,
        name=body.name,
        node_id=row.node_id,
        template=row.template,
        template_digest=row.template_digest,
        shape=shape,
        metadata=body.metadata,
        env=body.env,
        require_isolation=isolation,
        snapshot_id=row.id,
    )


async def fork(call: Call[ForkSandbox]) -> Response:
    """Accepts a fork; `operation.result.branches` names the new sandboxes."""
    body = call.body
    if body.env is not None:
        check_env(body.env, "env")
    if body.metadata is not None:
        check_metadata(body.metadata)
    await call.plane.database.require_room()
    wanted = branches.NewBranches(count=body.count, name=body.name, metadata=body.metadata, env=body.env)
    try:
        accepted = await call.plane.database.write(
            branches.accept, call.project, sandbox_id(call), wanted, call.idempotency
        )
    except Answered as earlier:
        return await repeat(call, earlier)
    return await proceed(call, accepted)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's sandboxes."""
    query: ListSandboxes = call.query
    states = tuple(filter(None, (query.state or "").split(",")))
    for state in states:
        if state not in set(State):
            raise invalid_field("state", f"there is no state {state[:64]!r}.", [str(one) for one in State])
    wanted: dict[str, str] = {}
    for name, value in call.request.query_params.multi_items():
        if name.startswith("metadata."):
            key = name.removeprefix("metadata.")
            if not _METADATA_KEY.fullmatch(key) or len(wanted) >= MAX_METADATA:
                raise invalid_field(name[:80], "this is no key.", {"pattern": _METADATA_KEY.pattern})
            wanted[key] = value
    rows = await call.plane.database.read(
        sandboxes.list_page,
        call.project,
        states=states,
        name=query.name,
        template=query.template,
        metadata=wanted,
        before=requests.decode_cursor(query.cursor),
        limit=query.limit + 1,
    )
    rows, cursor = requests.page(rows, query.limit)
    return answer(views.SandboxPage(sandboxes=tuple(show(call, row) for row in rows), next_cursor=cursor))


async def get(call: Call[NoBody]) -> Response:
    """Shows one sandbox; a deleted one for as long as it is kept."""
    row = await call.plane.database.read(sandboxes.get, call.project, sandbox_id(call))
    return answer(views.SandboxAnswer(sandbox=show(call, row)))


async def change(call: Call[ChangeSandbox]) -> Response:
    """Changes name, metadata, lifetime and schedule."""
    changes: dict[str, Any] = {}
    if call.body.name is not UNSET:
        changes["name"] = call.body.name
    if call.body.metadata is not UNSET:
        check_metadata(call.body.metadata)
        changes["metadata"] = call.body.metadata
    bounds = await call.plane.database.read(automatic.bounds, call.project)
    more = timing.change(call.body, call.body.shorten, bounds)
    row = await call.plane.database.write(sandboxes.change, call.project, sandbox_id(call), changes, more)
    return answer(views.SandboxAnswer(sandbox=show(call, row)))


async def extend(call: Call[timing.Extend]) -> Response:
    """Puts the deadline off. Never shortens it, and gives none to a sandbox that has none."""
    bounds = await call.plane.database.read(automatic.bounds, call.project)
    more = timing.extension(call.body, bounds)
    row = await call.plane.database.write(sandboxes.change, call.project, sandbox_id(call), {}, more)
    return answer(views.SandboxAnswer(sandbox=show(call, row)))


async def do(call: Call[NoBody], verb: Verb) -> Response:
    """Accepts a lifecycle verb."""
    try:
        accepted = await call.plane.database.write(
            transitions.accept_verb, call.project, sandbox_id(call), verb, call.idempotency
        )
    except Answered as earlier:
        return await repeat(call, earlier)
    return await proceed(call, accepted)


async def delete(call: Call[NoBody]) -> Response:
    """Accepts a deletion."""
    return await do(call, Verb.DELETE)


def show(call: Call[Any], row: SandboxRow) -> views.Sandbox:
    """A sandbox, with what the engine and the reconciler know of it."""
    live = call.plane.engine.live.get(row.operation_id) if row.operation_id else None
    return views.sandbox(row, live, call.plane.conditions(row))


async def proceed(call: Call[Any], accepted: Accepted) -> Response:
    """Has what was accepted carried out, and answers."""
    if accepted.run:
        call.plane.engine.submit(accepted.operation, accepted.sandbox, accepted.preempted)
    return await _settle(call, accepted.sandbox, accepted.operation, {})


async def repeat(call: Call[Any], earlier: Answered) -> Response:
    """Answers a repeated request with the sandbox and operation of the first, as they are now."""
    names = earlier.answer
    sandbox = await call.plane.database.read(sandboxes.find, str(names.get("sandbox", "")))
    operation = await call.plane.database.read(operations.find, str(names.get("operation", "")))
    if sandbox is None or operation is None or sandbox.project != call.project:
        raise Gone("sandbox_deleted", "What this Idempotency-Key made was deleted.", "Use a new key.")
    return await _settle(call, sandbox, operation, idempotency.REPLAYED)


async def _settle(call: Call[Any], sandbox: SandboxRow, operation: OperationRow, more: dict[str, str]) -> Response:
    """Waits where the client prefers that; 200 when the operation has ended, 202 while it has not."""
    plane = call.plane
    wait = requests.prefer_wait(call.request)
    headers = {"location": f"/v1/operations/{operation.id}", **more}
    if wait is not None:
        headers["preference-applied"] = f"wait={wait}"
        if operation.finished_at is None and wait > 0:
            finished = await plane.engine.wait(operation.id, wait)
            if finished is not None:
                sandbox, operation = finished.sandbox, finished.operation
            else:
                fresh = await plane.database.read(operations.find, operation.id)
                seen = await plane.database.read(sandboxes.find, sandbox.id)
                operation, sandbox = fresh or operation, seen or sandbox
    live = plane.engine.live.get(operation.id)
    body = views.AcceptedAnswer(sandbox=show(call, sandbox), operation=views.operation(operation, live))
    return answer(body, 202 if operation.finished_at is None else 200, headers)


def sandbox_id(call: Call[Any]) -> str:
    """The sandbox that the path names. Raises `NotFound` for what cannot be an id."""
    return requests.check_id(call.path["id"], "sandbox", NotFound)


def _verb_endpoint(verb: Verb, summary: str) -> Endpoint:
    async def handler(call: Call[NoBody]) -> Response:
        return await do(call, verb)

    return Endpoint(
        "POST",
        f"/v1/sandboxes/{{id}}/{verb}",
        handler,
        summary,
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=NoBody,
        errors=(404, 409, 410),
        idempotent=True,
        waits=True,
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes",
        create,
        "Create a sandbox",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=CreateSandbox,
        errors=(503,),
        idempotent=True,
        waits=True,
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes",
        list_,
        "List sandboxes",
        {200: views.SandboxPage},
        "sandboxes",
        query=ListSandboxes,
        query_prefixes=("metadata.",),
    ),
    Endpoint(
        "GET", "/v1/sandboxes/{id}", get, "Show a sandbox", {200: views.SandboxAnswer}, "sandboxes", errors=(404,)
    ),
    Endpoint(
        "PATCH",
        "/v1/sandboxes/{id}",
        change,
        "Change name, metadata, lifetime or scheduled snapshots",
        {200: views.SandboxAnswer},
        "sandboxes",
        scope="write",
        body=ChangeSandbox,
        errors=(404, 409, 410),
    ),
    Endpoint(
        "DELETE",
        "/v1/sandboxes/{id}",
        delete,
        "Delete a sandbox, whatever it is doing",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=NoBody,
        errors=(404,),
        idempotent=True,
        waits=True,
    ),
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/extend",
        extend,
        "Put the deadline off: at least so long from now; never sooner than it was",
        {200: views.SandboxAnswer},
        "sandboxes",
        scope="write",
        body=timing.Extend,
        errors=(404, 409, 410),
    ),
    _verb_endpoint(Verb.PAUSE, "Stop the virtual CPUs; memory stays"),
    _verb_endpoint(Verb.RESUME, "Let a paused sandbox go on"),
    _verb_endpoint(Verb.STOP, "Power off; memory is lost, the disk is kept"),
    _verb_endpoint(Verb.START, "Boot on the kept disk"),
    _verb_endpoint(Verb.SUSPEND, "Keep memory and disk, and release the machine"),
    _verb_endpoint(Verb.RESTORE, "Let a suspended sandbox go on where it stood"),
    _verb_endpoint(Verb.WAKE, "Resume, restore or start, whichever the state calls for"),
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/fork",
        fork,
        "Branch new sandboxes off, which go on from where this one stands; it runs on",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=ForkSandbox,
        errors=(404, 409, 410),
        idempotent=True,
        waits=True,
    ),
)
