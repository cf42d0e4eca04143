"""/v1/pools: sandboxes that are made ahead, so that a creation has only to claim one."""

import re
import time
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import views
from hatchway.control.creation import NODE_WAIT_S
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.fields import (
    DiskMib,
    MemoryMib,
    Reference,
    Vcpus,
    check_caps,
    check_size,
    unknown_template,
)
from hatchway.control.nodes import node_timeout
from hatchway.control.poolkeeper import pool_key, resolve
from hatchway.domain import shapes
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import NotFound
from hatchway.domain.quotas import template_allowed
from hatchway.domain.shapes import Shape
from hatchway.storage import pools, projects
from hatchway.storage.pools import Members
from hatchway.storage.rows import PoolRow

MAX_SIZE = 1000
NAME = r"[a-z0-9][a-z0-9._-]{0,62}"


class PutPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool holds: so many sandboxes of this template and size."""

    template: Reference
    size: Annotated[int, Meta(ge=0, le=MAX_SIZE)]
    vcpus: Vcpus = Shape().vcpus
    memory_mib: MemoryMib = Shape().memory_mib
    disk_mib: DiskMib = Shape().disk_mib


async def put(call: Call[PutPool]) -> Response:
    """Makes a pool or changes one; members that do not fit any more are replaced."""
    body, plane = call.body, call.plane
    name = _name(call)
    if name in (pools.ANY, pools.NEVER):
        raise invalid_field("name", f"{name} is no name of a pool.", f"any name but {pools.ANY} and {pools.NEVER}")
    await plane.database.require_room()
    shape = shapes.Shape(vcpus=body.vcpus, memory_mib=body.memory_mib, disk_mib=body.disk_mib)
    await plane.nodes.wait(None, within=NODE_WAIT_S)
    candidates = plane.nodes.ready()
    check_size(shape, candidates)
    project = await plane.database.read(projects.get, call.project)
    check_caps(project, shape)
    link = plane.place(project.require_isolation, candidates)
    if link is None or link.info is None:
        link = candidates[0]
    assert link.info is not None
    try:
        release = await resolve(link, body.template)
    except NotFound:
        raise unknown_template(body.template) from None
    except TimeoutError:
        raise node_timeout() from None
    if not template_allowed(project.templates, name=release.name, tag=release.tag, digest=release.digest):
        raise unknown_template(body.template)
    now = time.time()
    wanted = PoolRow(
        project=call.project,
        name=name,
        state="active",
        template=body.template,
        template_digest=release.digest,
        pool_key=pool_key(release.digest, link.info),
        node_id=link.info.node_id,
        size=body.size,
        vcpus=body.vcpus,
        memory_mib=body.memory_mib,
        disk_mib=body.disk_mib,
        condition="",
        retry_at=None,
        created_at=now,
        updated_at=now,
    )
    row, new = await plane.database.write(pools.put, wanted)
    plane.pools.look()
    return await _answer(call, row, 201 if new else 200)


async def get(call: Call[NoBody]) -> Response:
    """Shows a pool."""
    return await _answer(call, await call.plane.database.read(pools.get, call.project, _name(call)))


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's pools."""
    rows = await call.plane.database.read(pools.list_all, call.project)
    there = await call.plane.database.read(pools.members, call.project)
    shown = tuple(_show(row, there.get(row.name, Members())) for row in rows)
    return answer(views.PoolPage(pools=shown, next_cursor=None))


async def delete(call: Call[NoBody]) -> Response:
    """Lets a pool run dry: no member is made or claimed any more, and when all are gone it is, too."""
    row = await call.plane.database.write(pools.begin_delete, call.project, _name(call))
    call.plane.pools.look()
    return await _answer(call, row, 202)


async def _answer(call: Call[NoBody] | Call[PutPool], row: PoolRow, status: int = 200) -> Response:
    there = await call.plane.database.read(pools.members, call.project)
    return answer(views.PoolAnswer(pool=_show(row, there.get(row.name, Members()))), status)


def _show(row: PoolRow, there: Members) -> views.Pool:
    return views.Pool(
        name=row.name,
        project=row.project,
        state=row.state,
        template=row.template,
        template_digest=row.template_digest,
        size=row.size,
        ready=there.ready,
        making=there.making,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        condition=row.condition or None,
        node=row.node_id,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _name(call: Call[NoBody] | Call[PutPool]) -> str:
    name = call.path["name"]
    if not re.fullmatch(NAME, name):
        raise NotFound("unknown_pool", f"There is no pool {name[:64]!r}.", f"A name matches {NAME}.")
    return name


ENDPOINTS = (
    Endpoint("GET", "/v1/pools", list_, "List pools", {200: views.PoolPage}, "pools"),
    Endpoint("GET", "/v1/pools/{name}", get, "Show a pool", {200: views.PoolAnswer}, "pools", errors=(404,)),
    Endpoint(
        "PUT",
        "/v1/pools/{name}",
        put,
        "Make a pool, or change one",
        {200: views.PoolAnswer, 201: views.PoolAnswer},
        "pools",
        scope="write",
        body=PutPool,
        errors=(404, 503),
    ),
    Endpoint(
        "DELETE",
        "/v1/pools/{name}",
        delete,
        "Let a pool run dry and forget it",
        {202: views.PoolAnswer},
        "pools",
        scope="write",
        body=NoBody,
        errors=(404,),
    ),
)
