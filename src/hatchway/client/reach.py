"""How to reach a sandbox on its node: tokens of its own, asked for when they are first needed and renewed before they expire."""

import time
from collections.abc import Callable
from typing import Literal, TypeAlias
from urllib.parse import quote

from .calls import decode, exchange
from .errors import InvalidRequest, Unauthenticated
from .models import SandboxToken
from .steps import Flow, Reply, Request

Scope: TypeAlias = Literal["files", "ports", "sessions"]

LIFE_S = 12 * 3600.0
"""How long tokens that the client keeps are asked for. Half of it is always left, which is as long as a transfer may take."""


class Reach:
    """The tokens of one sandbox, one for each scope so that none can more than it must. Shared by all that uses the sandbox."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self._kept: dict[Scope, tuple[SandboxToken, float]] = {}

    def ready(self, scope: Scope) -> Flow[SandboxToken]:
        """Returns a token that is good for hours, asking for one when there is none."""
        kept = self._kept.get(scope)
        if kept is not None and time.monotonic() < kept[1]:
            return kept[0]
        token = yield from make_token(self.sandbox_id, [scope], LIFE_S)
        self._kept[scope] = (token, time.monotonic() + LIFE_S / 2)
        return token

    def forget(self, scope: Scope, token: SandboxToken) -> None:
        """The token is not taken any more: another one is asked for next time."""
        kept = self._kept.get(scope)
        if kept is not None and kept[0].token == token.token:
            del self._kept[scope]

    def call(self, scope: Scope, build: Callable[[SandboxToken], Request]) -> Flow[Reply]:
        """Does the request that `build` makes; once more with a fresh token when the one at hand is not taken any more."""
        token = yield from self.ready(scope)
        request = build(token)
        try:
            return (yield from exchange(request))
        except Unauthenticated:
            self.forget(scope, token)
            if not request.repeatable:
                raise
            token = yield from self.ready(scope)
            return (yield from exchange(build(token)))


def make_token(sandbox_id: str, scopes: list[Scope], ttl_s: float) -> Flow[SandboxToken]:
    """Asks for a token of a sandbox."""
    body = {"scopes": scopes, "ttl_s": ttl_s}
    reply = yield from exchange(Request("POST", f"/v1/sandboxes/{quote(sandbox_id, safe='')}/tokens", json=body))
    return decode(reply.body, SandboxToken)


def port_url(token: SandboxToken, port: int) -> str:
    """The address of a port. Raises `InvalidRequest("bad_port")`."""
    check_port(port)
    return token.port_url.replace("{port}", str(port)).rstrip("/") + "/"


def port_link(token: SandboxToken, port: int, path: str) -> str:
    """The address that lets a browser in and leads it to `path`."""
    to = path if path.startswith("/") else f"/{path}"
    return f"{port_url(token, port)}.hatchway/open?token={quote(token.token, safe='')}&to={quote(to, safe='/')}"


def check_port(port: int) -> int:
    """Returns the number of a port. Raises `InvalidRequest("bad_port")`."""
    if not 1 <= port <= 65_535:
        raise InvalidRequest("bad_port", f"{port} is no port.", "Give a number from 1 to 65535.")
    return port
