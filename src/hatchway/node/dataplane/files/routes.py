"""The paths for files."""

from starlette.routing import BaseRoute, Route

from hatchway.node.dataplane.files import entries
from hatchway.node.dataplane.files.access import Files
from hatchway.node.dataplane.files.archive import Archive
from hatchway.node.dataplane.files.content import Content
from hatchway.node.dataplane.files.limits import FileLimits
from hatchway.node.dataplane.files.watch import Mark, Watch
from hatchway.node.dataplane.plane import Plane


def make_routes(plane: Plane, limits: FileLimits | None = None) -> list[BaseRoute]:
    """Returns the routes below `/v1/sandboxes/{id}/files`; each checks the token of its request."""
    files = Files(plane, limits or FileLimits())
    at = "/v1/sandboxes/{sandbox_id}/files"
    return [
        Route(f"{at}/content", Content(files), methods=["GET", "PUT"]),
        Route(f"{at}/stat", entries.Stat(files), methods=["GET"]),
        Route(f"{at}/list", entries.List(files), methods=["GET"]),
        Route(f"{at}/mkdir", entries.Mkdir(files), methods=["POST"]),
        Route(f"{at}/move", entries.Move(files), methods=["POST"]),
        Route(f"{at}/remove", entries.Remove(files), methods=["POST"]),
        Route(f"{at}/chmod", entries.Chmod(files), methods=["POST"]),
        Route(f"{at}/watch", Watch(files), methods=["GET"]),
        Route(f"{at}/watch/{{watch}}/marks", Mark(files), methods=["POST"]),
        Route(f"{at}/archive", Archive(files), methods=["GET", "PUT"]),
    ]
