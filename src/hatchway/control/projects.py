"""/v1/projects: what keys and objects belong to. A key sees its own project; one with the scope `installation` all of them, and makes and ends them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import views
from hatchway.control.auth import require_scope
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.keys import ProjectName, ended
from hatchway.domain.quotas import Caps, ProjectUsage, Quotas
from hatchway.storage import keys, projects, quotas
from hatchway.storage.database import Connection
from hatchway.storage.projects import ProjectRow

Isolation = Literal["hardware", "emulated"]
TemplateName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9._/-]{0,127}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|@sha256:[0-9a-f]{64})?$",
        description="`name`, `name:tag` or `name@sha256:…`",
    ),
]
Approvals = Annotated[
    tuple[Literal["delete", "rollback", "export"], ...],
    Meta(max_length=3, description="Verbs that wait for somebody's consent (/v1/approvals)."),
]
Templates = Annotated[tuple[TemplateName, ...], Meta(max_length=256)]


class CreateProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new project. What is not given is not bounded; `templates: null` admits every template."""

    name: ProjectName
    require_isolation: Isolation | None = None
    templates: Templates | None = None
    quotas: Quotas = Quotas()
    caps: Caps = Caps()
    approvals: Approvals = ()


class ChangeProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a project can be changed. `require_isolation: null` takes what there is again; `quotas` and `caps` replace all that was set."""

    require_isolation: Isolation | UnsetType | None = UNSET
    templates: Templates | UnsetType | None = UNSET
    quotas: Quotas | UnsetType = UNSET
    caps: Caps | UnsetType = UNSET
    approvals: Approvals | UnsetType = UNSET


class DeleteProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether what it holds is deleted with it."""

    force: Annotated[bool, Meta(description="Delete what it holds, too.")] = False


class Project(views.View, frozen=True, kw_only=True):
    """What keys and objects belong to. `state`: `active deleting`. `usage` is in the answers about one project."""

    name: str
    state: str
    created_at: float
    require_isolation: str | None
    templates: tuple[str, ...] | None
    quotas: Quotas
    caps: Caps
    approvals: tuple[str, ...]
    usage: ProjectUsage | None = None


class ProjectAnswer(views.View, frozen=True, kw_only=True):
    """One project."""

    project: Project


class ProjectPage(views.View, frozen=True, kw_only=True):
    """The projects that the key can see, by name."""

    projects: tuple[Project, ...]
    next_cursor: str | None


async def create(call: Call[CreateProject]) -> Response:
    """Makes a project; its first key is made with `POST /v1/keys` and `project`."""
    await call.plane.database.require_room()
    row = await call.plane.database.write(projects.create, call.body.name, _settings(call.body))
    return answer(ProjectAnswer(project=_show(row)), 201)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the projects that the key can see."""
    if _sees_all(call):
        rows = await call.plane.database.read(projects.list_all)
    else:
        rows = [await call.plane.database.read(projects.get, call.project)]
    return answer(ProjectPage(projects=tuple(_show(row) for row in rows), next_cursor=None))


async def get(call: Call[NoBody]) -> Response:
    """Shows a project, and what it holds now."""
    row, held = await call.plane.database.read(_with_usage, _name(call))
    return answer(ProjectAnswer(project=_show(row, held)))


async def change(call: Call[ChangeProject]) -> Response:
    """Changes a project. What is there goes on: a new bound holds for what is made or started from now on."""
    name, wanted = _name(call), _settings(call.body)
    if wanted.keys() - {"require_isolation"}:
        require_scope(call.key, "installation")  # a project does not raise its own bounds
    await call.plane.database.write(projects.change, name, wanted)
    row, held = await call.plane.database.read(_with_usage, name)
    return answer(ProjectAnswer(project=_show(row, held)))


async def delete(call: Call[NoBody]) -> Response:
    """Deletes a project. Its keys end at once; what it holds is deleted then, however long that takes."""
    query: DeleteProject = call.query
    row, key_ids = await call.plane.database.write(_begin_delete, _name(call), query.force)
    await ended(call.plane, *key_ids)
    if await call.plane.removal.remove(row.name):
        return answer(None, 204)
    return answer(ProjectAnswer(project=_show(row)), 202)


def _begin_delete(connection: Connection, name: str, force: bool) -> tuple[ProjectRow, list[str]]:
    row = projects.begin_delete(connection, name, force=force)
    return row, keys.revoke_all(connection, name)


def _with_usage(connection: Connection, name: str) -> tuple[ProjectRow, ProjectUsage]:
    return projects.get(connection, name), quotas.usage(connection, name)


def _settings(body: CreateProject | ChangeProject) -> Mapping[str, Any]:
    fields = ("require_isolation", "templates", "quotas", "caps", "approvals")
    given = {field: getattr(body, field) for field in fields}
    return {field: value for field, value in given.items() if value is not UNSET}


def _sees_all(call: Call[Any]) -> bool:
    return keys.may(call.key.scopes, "installation")


def _name(call: Call[Any]) -> str:
    """Another project than the key's own is as unknown as one that is not there."""
    name = call.path["name"]
    if name != call.project and not _sees_all(call):
        raise projects.unknown(name)
    return name


def _show(row: ProjectRow, usage: ProjectUsage | None = None) -> Project:
    return Project(**msgspec.structs.asdict(row), usage=usage)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/projects",
        create,
        "Make a project",
        {201: ProjectAnswer},
        "projects",
        scope="installation",
        body=CreateProject,
        errors=(409,),
    ),
    Endpoint("GET", "/v1/projects", list_, "List projects", {200: ProjectPage}, "projects"),
    Endpoint(
        "GET",
        "/v1/projects/{name}",
        get,
        "Show a project and what it holds",
        {200: ProjectAnswer},
        "projects",
        errors=(404,),
    ),
    Endpoint(
        "PATCH",
        "/v1/projects/{name}",
        change,
        "Change what a project may have, and what is required of its sandboxes",
        {200: ProjectAnswer},
        "projects",
        scope="admin",
        body=ChangeProject,
        errors=(404, 409),
    ),
    Endpoint(
        "DELETE",
        "/v1/projects/{name}",
        delete,
        "Delete a project",
        {204: None, 202: ProjectAnswer},
        "projects",
        scope="installation",
        body=NoBody,
        query=DeleteProject,
        errors=(404, 409),
    ),
)
