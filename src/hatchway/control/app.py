"""The ASGI application: routing, keys, bodies, errors. What a request means is in the handlers' modules."""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hatchway.control import (
    approvals,
    archives,
    audit,
    behalf,
    credentials,
    events,
    health,
    idempotency,
    keys,
    metrics,
    openapi,
    operations,
    policies,
    pools,
    projects,
    requests,
    sandboxes,
    sessions,
    snapshots,
    templates,
    tokens,
    usage,
)
from hatchway.control.endpoints import Call, Endpoint, NoBody, problem
from hatchway.control.plane import Plane, give_back
from hatchway.control.scrape import Metrics
from hatchway.domain import problems
from hatchway.domain.checking import decode, require_json
from hatchway.domain.errors import (
    Exhausted,
    Forbidden,
    HatchwayError,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from hatchway.storage import idempotency as kept_answers
from hatchway.storage.idempotency import Answered
from hatchway.storage.rows import KeyRow
from hatchway.wire import tracing
from hatchway.wire.audit import Entry
from hatchway.wire.tracing import Traced

ENDPOINTS: tuple[Endpoint, ...] = (
    *sandboxes.ENDPOINTS,
    *snapshots.ENDPOINTS,
    *archives.ENDPOINTS,
    *sessions.ENDPOINTS,
    *tokens.ENDPOINTS,
    *usage.ENDPOINTS,
    *operations.ENDPOINTS,
    *events.ENDPOINTS,
    *templates.ENDPOINTS,
    *pools.ENDPOINTS,
    *credentials.ENDPOINTS,
    *policies.ENDPOINTS,
    *keys.ENDPOINTS,
    *projects.ENDPOINTS,
    *approvals.ENDPOINTS,
    *audit.ENDPOINTS,
    *health.ENDPOINTS,
)

log = logging.getLogger(__name__)

_PROJECT = "hatchway.project"
"""In the state of a request: the project among whose requests it is counted."""

_NOBODY = KeyRow(
    id="",
    project="",
    name="",
    prefix="",
    scopes=(),
    created_at=0.0,
    expires_at=None,
    last_used_at=None,
    revoked_at=None,
    development=False,
)


def make_app(plane: Plane, *, on_behalf: bool = False) -> ASGIApp:
    """The API of a control plane that is open. `on_behalf`: for the E2B wrapper, which may ask on behalf of a sandbox."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    # A reference of a template may have slashes, and the name of a credential.
    routes = [
        Route(re.sub(r"\{(reference|credential)\}", r"{\1:path}", path), _Path(plane, path, methods, on_behalf))
        for path, methods in by_path.items()
    ]
    routes.append(Route("/openapi.json", _Document()))
    routes.append(Route("/metrics", _Refusing(Metrics(plane))))
    return Traced(Router(routes, redirect_slashes=False, default=_no_route))


class _Path:
    """All methods of one path."""

    def __init__(self, plane: Plane, route: str, methods: Mapping[str, Endpoint], on_behalf: bool) -> None:
        self._on_behalf = on_behalf
        self._plane = plane
        self._route = route
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        request = Request(scope, receive)
        self._plane.requests += 1
        try:
            await self._serve(request, scope, receive, send)
        finally:
            self._plane.requests -= 1
            project = scope["state"].get(_PROJECT)
            if project is not None:
                give_back(self._plane.requests_of, project)

    async def _serve(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        try:
            response = await self._respond(request)
        except HatchwayError as error:
            if isinstance(error, Unauthenticated | Forbidden):
                metrics.REFUSED.labels(error.code).inc()
                self._record_refusal(request, error)
            response = _refuse(error)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with one request must not end the others
            response = _refuse(_unexpected(request, error))
        self._note(request, response.status_code, time.perf_counter() - began)
        await response(scope, receive, send)

    def _record_refusal(self, request: Request, error: HatchwayError) -> None:
        """A key that was refused, or lacked a scope; what is alike is counted, whatever is asked for how often."""
        origin = tracing.current()
        peer = "" if request.client is None else request.client.host
        self._plane.audit.record(
            Entry(
                kind="key.refused",
                time=time.time(),
                project=origin.get("project", ""),
                actor=origin.get("key_id", ""),
                request_id=origin.get("request_id", ""),
                decision="denied",
                reason=error.code,
                data={
                    "method": request.method if request.method in self._methods else "other",
                    "path": self._route,
                    "peer": peer,
                },
            )
        )

    def _note(self, request: Request, status: int, seconds: float) -> None:
        """Counts a request; what changes something, or failed by our fault, is written down too."""
        method = request.method if request.method in self._methods else "other"
        metrics.REQUESTS.labels(method, self._route, str(status)).inc()
        metrics.REQUEST_SECONDS.labels(method, self._route).observe(seconds)
        if method != "GET" or status >= 500:
            more = {"method": method, "path": request.url.path[:200], "status": status, "ms": round(seconds * 1e3, 1)}
            log.info("request", extra=more)

    async def _respond(self, request: Request) -> Response:
        endpoint = self._methods.get(request.method)
        if endpoint is None:
            allowed = ", ".join(sorted(self._methods))
            raise MethodNotAllowed(
                "method_not_allowed",
                f"{request.method} is not possible here.",
                f"Possible are: {allowed}.",
                allow=sorted(self._methods),
            )
        key = _NOBODY
        spoken_for = await behalf.key_of(self._plane, request, endpoint, admitted=self._on_behalf)
        if spoken_for is not None:
            key = spoken_for
        elif endpoint.scope is not None:
            key = await self._plane.auth.key_of(request, endpoint.scope)
        if endpoint.scope is not None:
            request.scope["state"][_PROJECT] = key.project
            self._plane.requests_of[key.project] += 1
        self._require_place(key.project)
        if request.method != "GET":
            self._plane.audit.require_room(deleting=request.method == "DELETE")
        if self._plane.ending.is_set():
            raise Unavailable("closing", "The service is being stopped.", "Try again in a moment.")
        raw = await requests.read_body(request) if endpoint.body is not None else b""
        if not raw and endpoint.body is not None and not issubclass(endpoint.body, NoBody):
            raise InvalidRequest("body_missing", "The request has no body.", "Send one JSON object.")
        if raw:
            require_json(request.headers.get("content-type"))
        call: Call[Any] = Call(
            plane=self._plane,
            request=request,
            key=key,
            path=request.path_params,
            body=decode(raw, endpoint.body or NoBody),
            query=requests.query(request, endpoint.query, prefixes=endpoint.query_prefixes),
            idempotency=idempotency.key_of(request, raw) if endpoint.idempotent else None,
        )
        return await self._handle(endpoint, call)

    async def _handle(self, endpoint: Endpoint, call: Call[Any]) -> Response:
        """A repetition is looked for before anything else that the request needs: that may have changed since the first."""
        if endpoint.repeated is None:
            return await endpoint.handler(call)
        try:
            if call.idempotency is not None:
                await self._plane.database.read(kept_answers.look, call.project, call.idempotency)
            return await endpoint.handler(call)
        except Answered as earlier:  # also from a handler: the first may have been accepted meanwhile
            return await endpoint.repeated(call, earlier)

    def _require_place(self, project: str) -> None:
        config = self._plane.config
        for used, most, whose in (
            (self._plane.requests, config.max_requests, ""),
            (self._plane.requests_of[project], config.max_requests_per_project, " of the project"),
        ):
            if used > most:
                raise Exhausted(
                    "too_many_requests", f"{most} requests{whose} are in hand.", "Try again in a moment.", limit=most
                )


class _Refusing:
    """Answers what the inner endpoint raises."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._inner(scope, receive, send)
        except HatchwayError as error:
            await _refuse(error)(scope, receive, send)


class _Document:
    """/openapi.json, made when it is first asked for."""

    def __init__(self) -> None:
        self._made: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            response = _refuse(
                MethodNotAllowed("method_not_allowed", "Only GET is possible here.", "Use GET.", allow=["GET"])
            )
        else:
            if self._made is None:
                self._made = msgspec.json.encode(openapi.document(ENDPOINTS))
            response = Response(self._made, media_type="application/json")
        await response(scope, receive, send)


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    metrics.REQUESTS.labels("other", "none", "404").inc()
    error = NotFound("unknown_path", f"There is nothing at {scope['path'][:200]}.", "/openapi.json lists the paths.")
    await _refuse(error)(scope, receive, send)


def _refuse(error: HatchwayError) -> Response:
    return problem(msgspec.json.encode(problems.document(error)), error.status, problems.headers(error))


def _unexpected(request: Request, error: Exception) -> HatchwayError:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return Internal("internal", "Something went wrong here.", "The log of the control process says what.")
