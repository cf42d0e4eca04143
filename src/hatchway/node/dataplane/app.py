"""The paths of the data plane, and what is done with every request whatever its path."""

import logging
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hatchway.domain.errors import Exhausted, HatchwayError, Internal, InvalidRequest, MethodNotAllowed, NotFound
from hatchway.node.dataplane.attach import Attach
from hatchway.node.dataplane.control import Resize, Signal
from hatchway.node.dataplane.files import routes as files
from hatchway.node.dataplane.files.limits import FileLimits
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.output import Output
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.problems import problem
from hatchway.node.dataplane.requests import ClientGone
from hatchway.node.dataplane.seam import Guests
from hatchway.node.dataplane.stdin import Stdin
from hatchway.node.dataplane.terminal import Terminal
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.dataplane.websocket import reject
from hatchway.node.sessions.sessions import Sessions

log = logging.getLogger(__name__)


def make_app(
    sessions: Sessions,
    tokens: TokenChecker,
    guests: Guests,
    *,
    limits: PlaneLimits | None = None,
    file_limits: FileLimits | None = None,
    routes: Sequence[BaseRoute] = (),
) -> "App":
    """Returns the data plane as an ASGI application; `routes` are further ones (files, ports) that check tokens themselves."""
    plane = Plane(sessions, tokens, guests, limits or PlaneLimits())
    at = "/v1/sessions/{session_id}"
    inner = Router(
        routes=[
            Route(f"{at}/attach", Attach(plane), methods=["POST"]),
            Route(f"{at}/output", Output(plane), methods=["GET"]),
            Route(f"{at}/stdin", Stdin(plane), methods=["POST"]),
            Route(f"{at}/signal", Signal(plane), methods=["POST"]),
            Route(f"{at}/resize", Resize(plane), methods=["POST"]),
            Route("/healthz", _healthz, methods=["GET"]),
            *files.make_routes(plane, file_limits),
            Route(f"{at}/ws", _handshake_missing, methods=["GET"]),
            WebSocketRoute(f"{at}/ws", Terminal(plane)),
            *routes,
            WebSocketRoute("/{path:path}", _Elsewhere()),
        ],
    )
    return App(inner, plane)


class App:
    """Bounds the requests in flight and turns every error into a problem document."""

    def __init__(self, inner: ASGIApp, plane: Plane) -> None:
        self.plane = plane
        self.in_flight = 0
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        scope["app"] = self  # so that the router raises for what it does not know
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.in_flight += 1
        try:
            if self.in_flight > self.plane.limits.requests:
                raise Exhausted(
                    "too_many_requests",
                    f"{self.plane.limits.requests} requests and streams are open on this node.",
                    "Close some, or try again later.",
                )
            await self._inner(scope, receive, watched)
        except ClientGone:
            return
        except (HatchwayError, HTTPException) as error:
            if not started:
                await _refuse(_said(error, scope), scope, receive, send)
            else:
                log.warning("an answer was cut off: %s", error)
        except Exception as error:
            log.exception("%s %s failed", scope.get("method", "WebSocket"), scope["path"])
            if not started:
                ours = Internal("internal", f"{type(error).__name__} in the data plane.")
                await _refuse(ours, scope, receive, send)
        finally:
            self.in_flight -= 1


async def _healthz(_: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _handshake_missing(_: Request) -> Response:
    raise InvalidRequest(
        "websocket_needed",
        "Only a WebSocket can be opened here.",
        "Send the handshake of a WebSocket: `Upgrade: websocket`.",
    )


class _Elsewhere:
    """Where no WebSocket is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotFound("unknown_path", f"There is no WebSocket at {scope['path'][:200]}.", "See the API's description.")


async def _refuse(error: HatchwayError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await reject(error, send)
    else:
        await problem(error)(scope, receive, send)


def _said(error: HatchwayError | HTTPException, scope: Scope) -> HatchwayError:
    if isinstance(error, HatchwayError):
        return error
    if error.status_code == 404:
        return NotFound("unknown_path", f"There is nothing at {scope['path'][:200]}.", "See the API's description.")
    allowed = (error.headers or {}).get("Allow", "")
    return MethodNotAllowed(
        "method_not_allowed",
        f"{scope['method']} is not possible here.",
        f"Possible are: {allowed}.",
        allow=allowed.split(", "),
    )
