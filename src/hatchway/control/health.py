"""/healthz: the process serves. /readyz: what it needs is there as well."""

from starlette.responses import Response

from hatchway.control import views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.storage import database


async def healthy(call: Call[NoBody]) -> Response:
    """Answers as long as the event loop turns."""
    return answer(views.Health(status="ok", checks={}))


async def ready(call: Call[NoBody]) -> Response:
    """Tells whether a sandbox could be created now: the database answers, a node is connected."""
    checks: dict[str, str] = {}
    try:
        await call.plane.database.read(database.answers)
        checks["database"] = "ok"
    except HatchwayError as error:
        checks["database"] = error.cause
    checks["node"] = "ok" if call.plane.nodes.ready() else "no node is connected"
    if set(checks.values()) != {"ok"}:
        raise Unavailable(
            "unready", "Something that sandboxes need is not there.", "Try again in a moment.", checks=checks
        )
    return answer(views.Health(status="ok", checks=checks))


ENDPOINTS = (
    Endpoint("GET", "/healthz", healthy, "The process serves", {200: views.Health}, "health", scope=None),
    Endpoint(
        "GET", "/readyz", ready, "Sandboxes can be created", {200: views.Health}, "health", scope=None, errors=(503,)
    ),
)
