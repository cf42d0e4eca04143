"""The paths of E2B's API, both generations, and who answers them."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hatchway.e2b.app import Wrapper
from hatchway.e2b.errors import E2bError


def make_api(wrapper: Wrapper) -> ASGIApp:
    """The API as an application; raises `E2bError` for what is not there."""
    return Router([Route("/health", _health)], redirect_slashes=False, default=_no_route)


async def _health(_: Request) -> Response:
    return Response(None, 204)


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise E2bError(404, f"There is nothing at {scope['path'][:200]}.")
