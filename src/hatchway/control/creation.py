"""POST /v1/sandboxes: from a template, from a snapshot, or out of a pool."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import policies, requests, timing
from hatchway.control.accepted import proceed
from hatchway.control.endpoints import Call
from hatchway.control.fields import (
    Annotations,
    DiskMib,
    MemoryMib,
    Name,
    Reference,
    Vcpus,
    check_annotations,
    check_caps,
    check_env,
    check_metadata,
    check_size,
    unknown_template,
)
from hatchway.control.nodes import node_timeout
from hatchway.control.poolkeeper import pool_key
from hatchway.domain import shapes
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Conflict, NotFound, Unprocessable
from hatchway.domain.quotas import template_allowed
from hatchway.storage import accepting, pools, projects, snapshots
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.projects import ProjectRow
from hatchway.wire.node import ResolveTemplate, TemplateRelease

NODE_WAIT_S = 3.0
"""How long a create waits for a node that is just being restarted before it answers 503."""
RESOLVE_WITHIN_S = 10.0


class CreateSandbox(policies.WithPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a new sandbox is made from, a template or a snapshot, and how large it is. A snapshot has its size already: only the disk can be larger."""

    template: Reference | UnsetType = UNSET
    snapshot: Annotated[str, Meta(description="Id of a snapshot of the project.")] | UnsetType = UNSET
    name: Name | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: Annotations = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    vcpus: Vcpus | UnsetType = UNSET
    memory_mib: MemoryMib | UnsetType = UNSET
    disk_mib: DiskMib | UnsetType = UNSET
    require_isolation: Literal["hardware", "emulated"] | None = None
    pool: Annotated[
        str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="`auto`, `never`, or a pool's name.")
    ] = pools.ANY


def _shape(body: CreateSandbox) -> shapes.Shape:
    given = {"vcpus": body.vcpus, "memory_mib": body.memory_mib, "disk_mib": body.disk_mib}
    return shapes.Shape(**{name: value for name, value in given.items() if value is not UNSET})


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


async def create(call: Call[CreateSandbox]) -> Response:
    """Accepts a new sandbox."""
    body = call.body
    check_env(body.env, "env")
    check_metadata(body.metadata)
    check_annotations(body.annotations)
    await call.plane.database.require_room()
    if (body.template is UNSET) == (body.snapshot is UNSET):
        raise Unprocessable(
            "missing_field" if body.template is UNSET else "invalid_field",
            "A sandbox is made either from a `template` or from a `snapshot`.",
            "Give one of the two.",
            field="template",
            allowed=["template", "snapshot"],
        )
    project = await call.plane.database.read(projects.get, call.project)
    lifetime, schedule = timing.of_new(body, project.caps)
    new = await (
        _from_snapshot(call, project, body.snapshot)
        if body.snapshot is not UNSET
        else _from_template(call, project, str(body.template))
    )
    new = msgspec.structs.replace(
        new,
        lifetime=lifetime,
        schedule=schedule,
        annotations=body.annotations or None,
        **policies.assignment(body),
    )
    return await proceed(call, await _accepted(call, new))


async def _accepted(call: Call[CreateSandbox], new: NewSandbox) -> Accepted:
    """The sandbox that was asked for: a member of a pool where one is there to be claimed, else a new one.

    Raises `NotFound("unknown_pool")`, `Conflict("pool_does_not_fit")` for a pool that never has what was asked for.
    """
    plane, pool = call.plane, call.body.pool
    if new.snapshot_id is not None:
        return await plane.database.write(snapshots.accept_create, new, call.idempotency)
    link = plane.nodes.find(new.node_id)
    if pool == pools.NEVER or link is None or link.info is None:
        return await plane.database.write(accepting.accept_create, new, call.idempotency)
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
    accepted = await plane.database.write(pools.claim_or_create, new, pool, key, call.idempotency)
    if pools.CLAIM in accepted.operation.arguments:
        plane.pools.look()
    return accepted


async def _from_template(call: Call[CreateSandbox], project: ProjectRow, reference: str) -> NewSandbox:
    body, plane, shape = call.body, call.plane, _shape(call.body)
    await plane.nodes.wait(None, within=NODE_WAIT_S)
    candidates = plane.nodes.ready()
    check_size(shape, candidates)
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


async def _from_snapshot(call: Call[CreateSandbox], project: ProjectRow, snapshot_id: str) -> NewSandbox:
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
