"""The paths of E2B's API, both generations, and who answers them."""

import asyncio
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hatchway.e2b.control import creation, forks, listing, metrics, networks, sandboxes, snapshots, templates
from hatchway.e2b.control.calls import WITHIN_S, Call, Handler
from hatchway.e2b.control.templates import unsupported
from hatchway.e2b.errors import E2bError, answer
from hatchway.e2b.wrapper import Wrapper


def _absent(what: str, instead: str) -> Handler:
    async def refuse(_: Call) -> Response:
        raise unsupported(what, instead)

    return refuse


_BUILDS = _absent(
    "Building and changing templates over this API is", "Keep a sandbox as a template instead: create_snapshot(name=…)."
)
_TAGS = _absent("Tagging templates over this API is", "Keep a snapshot under another name instead.")
_VOLUMES = _absent("Volumes are", "Files are kept by snapshots, and by a pause.")
_SECRETS = _absent("Secrets are", "Credentials keep them out of sandboxes: `hatchway credentials`.")
_LOGS = _absent("Reading logs over this API is", "`hatchway logs` shows what commands wrote.")
_ADMIN = _absent("Administration over this API is", "`hatchway --help` shows the commands for it.")

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v2/sandboxes", creation.create),
    ("POST", "/sandboxes", creation.create_v1),
    ("GET", "/v2/sandboxes", listing.list_),
    ("GET", "/sandboxes", listing.list_v1),
    ("GET", "/sandboxes/metrics", metrics.of_many),
    ("GET", "/sandboxes/{id}", sandboxes.get),
    ("DELETE", "/sandboxes/{id}", sandboxes.kill),
    ("POST", "/v2/sandboxes/{id}/connect", sandboxes.connect),
    ("POST", "/sandboxes/{id}/connect", sandboxes.connect_v1),
    ("POST", "/sandboxes/{id}/resume", sandboxes.resume),
    ("POST", "/sandboxes/{id}/pause", sandboxes.pause),
    ("POST", "/sandboxes/{id}/timeout", sandboxes.timeout),
    ("POST", "/sandboxes/{id}/refreshes", sandboxes.refresh),
    ("POST", "/sandboxes/{id}/fork", forks.fork),
    ("POST", "/sandboxes/{id}/snapshots", snapshots.make),
    ("GET", "/sandboxes/{id}/metrics", metrics.of_sandbox),
    ("PUT", "/sandboxes/{id}/network", networks.put),
    ("GET", "/sandboxes/{id}/logs", _LOGS),
    ("GET", "/v2/sandboxes/{id}/logs", _LOGS),
    ("GET", "/snapshots", snapshots.list_),
    ("GET", "/teams/{team}/metrics", metrics.of_team),
    ("GET", "/templates", templates.list_),
    ("GET", "/v2/templates", templates.list_),
    ("GET", "/templates/aliases/{alias}", templates.alias),
    ("GET", "/templates/{template}/tags", templates.tags),
    ("GET", "/templates/{template}", templates.get),
    ("DELETE", "/templates/{template}", templates.delete),
    ("POST", "/templates/tags", _TAGS),
    ("DELETE", "/templates/tags", _TAGS),
    ("POST", "/templates", _BUILDS),
    ("POST", "/v2/templates", _BUILDS),
    ("POST", "/v3/templates", _BUILDS),
    ("POST", "/templates/{template}", _BUILDS),
    ("PATCH", "/templates/{template}", _BUILDS),
    ("PATCH", "/v2/templates/{template}", _BUILDS),
    ("GET", "/templates/{template}/files/{hash}", _BUILDS),
    ("POST", "/templates/{template}/builds/{build}", _BUILDS),
    ("POST", "/v2/templates/{template}/builds/{build}", _BUILDS),
    ("GET", "/templates/{template}/builds/{build}/status", _BUILDS),
    ("GET", "/templates/{template}/builds/{build}/logs", _BUILDS),
    *((method, "/volumes", _VOLUMES) for method in ("GET", "POST")),
    *((method, "/volumes/{id}", _VOLUMES) for method in ("GET", "DELETE")),
    *((method, "/secrets", _SECRETS) for method in ("GET", "POST")),
    *((method, "/secrets/{id}", _SECRETS) for method in ("GET", "POST", "DELETE")),
    *(
        (method, path, _ADMIN)
        for path in ("/teams", "/nodes", "/access-tokens", "/api-keys")
        for method in ("GET", "POST")
    ),
)


class _Node:
    """A place in the tree of paths: what may come next, and who answers here."""

    def __init__(self) -> None:
        self.next: dict[str, _Node] = {}
        self.any: tuple[str, _Node] | None = None
        self.handlers: dict[str, Handler] = {}

    def add(self, method: str, segments: list[str], handler: Handler) -> None:
        if not segments:
            self.handlers[method] = handler
            return
        head, *rest = segments
        if head.startswith("{"):
            name = head.strip("{}")
            if self.any is None:
                self.any = (name, _Node())
            assert self.any[0] == name, f"{head} has another name beside it"
            self.any[1].add(method, rest, handler)
        else:
            self.next.setdefault(head, _Node()).add(method, rest, handler)

    def find(self, segments: list[str]) -> "tuple[_Node, dict[str, str]] | None":
        """Segments that are named go before any other; a place without handlers is none."""
        if not segments:
            return (self, {}) if self.handlers else None
        head, *rest = segments
        if head in self.next and (found := self.next[head].find(rest)) is not None:
            return found
        if self.any is not None and head and (found := self.any[1].find(rest)) is not None:
            return found[0], {self.any[0]: head, **found[1]}
        return None


def make_api(wrapper: Wrapper) -> ASGIApp:
    """The API as an application; raises `E2bError` for what is not there, and the client's errors."""
    root = _Node()
    for method, path, handler in ROUTES:
        root.add(method, path.strip("/").split("/"), handler)

    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise E2bError(404, "There are no WebSockets here.")
        request = Request(scope, receive)
        if scope["path"] == "/health":
            await Response(None, 204)(scope, receive, send)
            return
        # An id may hold a slash that was encoded: segments are told apart before they are decoded.
        raw = scope.get("raw_path") or scope["path"].encode()
        segments = [
            unquote(segment) for segment in raw.decode("latin-1").partition("?")[0].removeprefix("/").split("/")
        ]
        found = root.find(segments)
        if found is None:
            raise E2bError(404, f"There is nothing at {scope['path'][:200]}.")
        node, path = found
        handler = node.handlers.get(request.method)
        if handler is None:
            allowed = ", ".join(sorted(node.handlers))
            error = E2bError(405, f"{request.method} is not possible here, but {allowed}.")
            await answer(error, {"allow": allowed})(scope, receive, send)
            return
        until = asyncio.get_running_loop().time() + WITHIN_S
        call = Call(wrapper, request, path, wrapper.reaching.with_key(_key(request)), until)
        response = await handler(call)
        await response(scope, receive, send)

    return api


def _key(request: Request) -> str:
    """The caller's API key. Raises `E2bError` 401."""
    key = request.headers.get("x-api-key")
    if key is None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = ""
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise E2bError(
            401, "The request has no API key: send it as X-API-KEY. `hatchway keys create NAME --e2b` makes one."
        )
    return key
