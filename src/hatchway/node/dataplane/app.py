"""The paths of the data plane, and what is done with every request whatever its path."""

import logging
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hatchway.domain.errors import (
    Exhausted,
    HatchwayError,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    Misdirected,
    NotFound,
)
from hatchway.node import metrics
from hatchway.node.activity import Uses
from hatchway.node.dataplane.accesses import Accesses, Journal
from hatchway.node.dataplane.archives import Archives
from hatchway.node.dataplane.archives import make_routes as archive_routes
from hatchway.node.dataplane.attach import Attach
from hatchway.node.dataplane.control import Resize, Signal
from hatchway.node.dataplane.files import routes as files
from hatchway.node.dataplane.files.limits import FileLimits
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.output import Output
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.ports.names import DEFAULT_DOMAINS, PortNames
from hatchway.node.dataplane.ports.relay import Ports
from hatchway.node.dataplane.ports.tunnel import Tunnel
from hatchway.node.dataplane.problems import problem
from hatchway.node.dataplane.requests import ClientGone
from hatchway.node.dataplane.seam import Guests
from hatchway.node.dataplane.stdin import Stdin
from hatchway.node.dataplane.terminal import Terminal
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.dataplane.websocket import reject
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.waking import Waker
from hatchway.wire.tracing import Traced

log = logging.getLogger(__name__)

_UNTOLD = frozenset({"Stdin", "Resize", "none"})
"""What is asked for at every key that somebody presses, and what is nowhere: counted, and not written down."""
_OPEN = frozenset({"/healthz", "/metrics"})
"""What is answered though nothing can be recorded."""
_SENT = metrics.DATA_OCTETS.labels("sent")
_RECEIVED = metrics.DATA_OCTETS.labels("received")


def make_app(
    sessions: Sessions,
    tokens: TokenChecker,
    guests: Guests,
    *,
    limits: PlaneLimits | None = None,
    file_limits: FileLimits | None = None,
    port_domains: tuple[str, ...] = DEFAULT_DOMAINS,
    archives: Archives | None = None,
    uses: Uses | None = None,
    waker: Waker | None = None,
    journal: Journal | None = None,
    routes: Sequence[BaseRoute] = (),
) -> "App":
    """Returns the data plane as an ASGI application; ports have names under `port_domains`; `journal` takes the records of who reached what; `routes`
    are further ones that check tokens themselves.

    Raises `ValueError` for a domain that is none.
    """
    plane = Plane(sessions, tokens, guests, limits or PlaneLimits(), uses or Uses(), waker, Accesses(journal))
    ports = Ports(plane, PortNames(port_domains))
    tcp = "/v1/sandboxes/{sandbox_id}/ports/{port}/tcp"
    at = "/v1/sessions/{session_id}"
    inner = Router(
        routes=[
            Route(f"{at}/attach", Attach(plane), methods=["POST"]),
            Route(f"{at}/output", Output(plane), methods=["GET"]),
            Route(f"{at}/stdin", Stdin(plane), methods=["POST"]),
            Route(f"{at}/signal", Signal(plane), methods=["POST"]),
            Route(f"{at}/resize", Resize(plane), methods=["POST"]),
            Route(f"{at}/ws", _handshake_missing, methods=["GET"]),
            WebSocketRoute(f"{at}/ws", Terminal(plane)),
            Route(tcp, _handshake_missing, methods=["GET"]),
            WebSocketRoute(tcp, Tunnel(ports)),
            Route("/healthz", _healthz, methods=["GET"]),
            *files.make_routes(plane, file_limits),
            *(archive_routes(plane, archives) if archives is not None else ()),
            *routes,
            WebSocketRoute("/{path:path}", _Elsewhere()),
        ],
    )
    return App(inner, plane, ports)


class App:
    """Bounds the requests in flight and turns every error into a problem document."""

    def __init__(self, inner: ASGIApp, plane: Plane, ports: Ports) -> None:
        self.plane = plane
        self.ports = ports
        self.in_flight = 0
        self._inner = inner
        self._traced = Traced(self._serve)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await self._traced(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises for what it does not know
        started, status, began = False, 0, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal started, status
            status = message.get("status", status or 101)
            if not started and message["type"] != "websocket.close":
                self.plane.accesses.answered(scope, _endpoint(scope), status)
            started = True
            _SENT.inc(_octets(message))
            await send(message)

        async def counted() -> Message:
            message = await receive()
            _RECEIVED.inc(_octets(message))
            return message

        self.in_flight += 1
        try:
            if self.in_flight > self.plane.limits.requests:
                raise Exhausted(
                    "too_many_requests",
                    f"{self.plane.limits.requests} requests and streams are open on this node.",
                    "Close some, or try again later.",
                )
            self._refuse_hosts_of_ports(scope)
            if scope["path"] not in _OPEN:
                self.plane.accesses.require_room()
            await self._inner(scope, counted, watched)
        except ClientGone:
            return
        except (HatchwayError, HTTPException) as error:
            if not started:
                said = _said(error, scope)
                metrics.note_refusal(said)
                self.plane.accesses.refused(scope, _endpoint(scope), said)
                status = said.status
                await _refuse(said, scope, receive, send)
            else:
                log.warning("an answer was cut off: %s", error)
        except Exception as error:
            log.exception("%s %s failed", scope.get("method", "WebSocket"), scope["path"])
            if not started:
                ours = Internal("internal", f"{type(error).__name__} in the data plane.")
                status = ours.status
                await _refuse(ours, scope, receive, send)
        finally:
            self.in_flight -= 1
            endpoint = _endpoint(scope)
            metrics.DATA_REQUESTS.labels(endpoint, str(status)).inc()
            if scope.get("method", "") != "GET" and endpoint not in _UNTOLD:
                ms = round((time.perf_counter() - began) * 1e3, 1)
                more = {
                    "method": scope.get("method", "WebSocket"),
                    "path": scope["path"][:200],
                    "status": status,
                    "ms": ms,
                }
                log.info("request", extra=more)

    def _refuse_hosts_of_ports(self, scope: Scope) -> None:
        """What a browser sends to the name of a port must never be taken for a request to the API."""
        for name, value in scope["headers"]:
            if name == b"host" and self.ports.names.covers(value.decode("latin-1")):
                raise Misdirected(
                    "unknown_host",
                    f"The API has not the name {value.decode('latin-1')[:100]!r}.",
                    "Use the node's own address; for a port, a connection of its own.",
                )


def _octets(message: Message) -> int:
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")


def _endpoint(scope: Scope) -> str:
    """What served a request: the name of something in the source, never a path."""
    endpoint = scope.get("endpoint")
    if endpoint is None:
        return "none"
    return str(getattr(endpoint, "__name__", type(endpoint).__name__)).strip("_")


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
