"""/v1/projects: what is required of all sandboxes of a project. A key sees its own project only."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from hatchway.control import views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.errors import NotFound
from hatchway.storage import projects
from hatchway.storage.projects import ProjectRow


class ChangeProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a project can be changed; `require_isolation: null` takes what there is again."""

    require_isolation: Literal["hardware", "emulated"] | UnsetType | None = UNSET


async def list_(call: Call[NoBody]) -> Response:
    """Lists the projects that the key can see: its own."""
    row = await call.plane.database.read(projects.get, call.project)
    return answer(views.ProjectPage(projects=(_show(row),), next_cursor=None))


async def get(call: Call[NoBody]) -> Response:
    """Shows a project."""
    return answer(views.ProjectAnswer(project=_show(await call.plane.database.read(projects.get, _name(call)))))


async def change(call: Call[ChangeProject]) -> Response:
    """Changes what is required of all its sandboxes. Those that run go on; their next start is held to it."""
    name = _name(call)
    if call.body.require_isolation is UNSET:
        row = await call.plane.database.read(projects.get, name)
    else:
        row = await call.plane.database.write(projects.change, name, {"require_isolation": call.body.require_isolation})
    return answer(views.ProjectAnswer(project=_show(row)))


def _name(call: Call[NoBody] | Call[ChangeProject]) -> str:
    """Another project than the key's own is as unknown as one that is not there."""
    name = call.path["name"]
    if name != call.project:
        raise NotFound(
            "unknown_project", f"There is no project {name[:64]!r}.", "GET /v1/projects lists those that there are."
        )
    return name


def _show(row: ProjectRow) -> views.Project:
    return views.Project(name=row.name, created_at=row.created_at, require_isolation=row.require_isolation)


ENDPOINTS = (
    Endpoint("GET", "/v1/projects", list_, "List projects", {200: views.ProjectPage}, "projects"),
    Endpoint(
        "GET", "/v1/projects/{name}", get, "Show a project", {200: views.ProjectAnswer}, "projects", errors=(404,)
    ),
    Endpoint(
        "PATCH",
        "/v1/projects/{name}",
        change,
        "Change what is required of all sandboxes of a project",
        {200: views.ProjectAnswer},
        "projects",
        scope="admin",
        body=ChangeProject,
        errors=(404,),
    ),
)
