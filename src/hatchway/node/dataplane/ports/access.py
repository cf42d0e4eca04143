"""Who may use a port: a token in a header, or in the cookie that a link has set in a browser.

A program sends `Hatchway-Token: TOKEN`. A browser is sent to `/.hatchway/open?token=TOKEN&to=/PATH`, which puts the token into a
cookie of that one host name. What a browser sends by itself is no proof of what its user wants: with the cookie alone, a request
is refused that a page of elsewhere made, other than by leading the browser here.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from hatchway.domain import checking
from hatchway.domain.errors import Forbidden, HatchwayError, MethodNotAllowed, Misdirected, NotFound, Unauthenticated
from hatchway.node.dataplane import tokens
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.ports.names import Port, PortNames
from hatchway.wire.tokens import Claims

SCOPE = "ports"
RESERVED = "/.hatchway/"
"""Paths below it are ours on every port."""
OPEN = "/.hatchway/open"
HEADER = b"hatchway-token"
COOKIE, SECURE_COOKIE = "hatchway-port", "__Host-hatchway-port"
"""The second one over TLS: browsers let no page of a neighbouring name set it."""
HOW = f"`Hatchway-Token: TOKEN`, or open {OPEN}?token=TOKEN in a browser"

_MAX_COOKIES = 4
_MAX_TARGET = 2_048
_TARGET = re.compile(r"/(?![/\\])[!-~]*", re.ASCII)
_ELSEWHERE = ("same-site", "cross-site")

Headers = Iterable[tuple[bytes, bytes]]


def cookie_name(*, secure: bool) -> str:
    """The name of our cookie on a connection with or without TLS."""
    return SECURE_COOKIE if secure else COOKIE


def may_use_port(plane: Plane, claims: Claims, sandbox_id: str) -> None:
    """Checks that a token is for the ports of this sandbox. Raises `Forbidden` (`wrong_sandbox wrong_scope`)."""
    tokens.may_use_sandbox(claims, sandbox_id, plane.guests.project_of(sandbox_id))
    tokens.may_use_scope(claims, SCOPE)


def admit(plane: Plane, names: PortNames, port: Port, headers: Headers, *, secure: bool) -> Claims:
    """Returns the right by which a request comes. Raises `Unauthenticated`, and `Forbidden` (`wrong_sandbox wrong_scope wrong_origin`)."""
    given = [value for name, value in headers if name == HEADER]
    if given:
        if len(given) > 1:
            raise Unauthenticated("token_invalid", "The request carries several tokens.", "Send one.")
        claims = plane.tokens.check_token(_text(given[0]), HOW)
        may_use_port(plane, claims, port.sandbox_id)
        return claims
    claims = _by_cookie(plane, port, _cookies(headers, cookie_name(secure=secure)))
    _refuse_other_origins(names, port, headers)
    return claims


def _by_cookie(plane: Plane, port: Port, values: list[str]) -> Claims:
    """The first cookie that is good: a neighbouring name may have planted others beside ours."""
    error: HatchwayError | None = None
    for value in values[:_MAX_COOKIES]:
        try:
            claims = plane.tokens.check_token(value, HOW)
            may_use_port(plane, claims, port.sandbox_id)
        except HatchwayError as failed:
            error = error or failed
        else:
            return claims
    if error is not None:
        raise error
    raise Unauthenticated("token_missing", "The request carries no token.", f"Send {HOW}; {tokens.RENEW}")


def _cookies(headers: Headers, wanted: str) -> list[str]:
    found = []
    for name, value in headers:
        if name == b"cookie":
            for pair in _text(value).split(";"):
                key, _, text = pair.partition("=")
                if key.strip() == wanted:
                    found.append(text.strip())
    return found


def _refuse_other_origins(names: PortNames, port: Port, headers: Headers) -> None:
    origins = [_text(value) for name, value in headers if name == b"origin"]
    fetch = {name: _text(value) for name, value in headers if name.startswith(b"sec-fetch-")}
    if origins:
        allowed = all(_is_of_sandbox(names, port, origin) for origin in origins)
    else:  # what a page loads into itself has no Origin
        leads_here = fetch.get(b"sec-fetch-mode") == "navigate"
        allowed = leads_here or fetch.get(b"sec-fetch-site", "") not in _ELSEWHERE
    if not allowed:
        raise Forbidden(
            "wrong_origin",
            "A page of another origin made this request, and nothing but a cookie lets it in.",
            "Send the token in the header `Hatchway-Token`, or make the request from a page of the same sandbox.",
        )


def _is_of_sandbox(names: PortNames, port: Port, origin: str) -> bool:
    try:
        authority = urlsplit(origin).netloc
        return names.parse(authority).sandbox_id == port.sandbox_id
    except (ValueError, Misdirected):
        return False


@dataclass(frozen=True, slots=True)
class Opening:
    """The answer to a link: a cookie, and where to go."""

    cookie: str
    to: str


def open_link(plane: Plane, port: Port, method: bytes, target: str, *, secure: bool) -> Opening:
    """Answers a path that is ours. Raises `NotFound`, `MethodNotAllowed`, `invalid_field`, and what `admit` does."""
    path, _, query = target.partition("?")
    if path != OPEN:
        raise NotFound("unknown_path", f"There is nothing at {path[:200]}.", f"Only {OPEN} is ours on a port.")
    if method != b"GET":
        raise MethodNotAllowed("method_not_allowed", "Only GET is possible here.", "Use GET.", allow=["GET"])
    fields = parse_qs(query, keep_blank_values=True, max_num_fields=8)
    for name in fields:
        if name not in ("token", "to") or len(fields[name]) > 1:
            raise checking.invalid_field(name[:40], "it is not known here, or given twice.", ["token", "to"])
    to = fields.get("to", ["/"])[0]
    if len(to) > _MAX_TARGET or not _TARGET.fullmatch(to):
        raise checking.invalid_field("to", "it is no path of this port.", "a path that begins with one slash")
    token = fields.get("token", [""])[0]
    claims = plane.tokens.check_token(token, HOW)
    may_use_port(plane, claims, port.sandbox_id)
    life = max(0, int(claims.expires_at - time.time()))
    attributes = f"Path=/; Max-Age={life}; HttpOnly; SameSite=Lax" + ("; Secure" if secure else "")
    return Opening(f"{cookie_name(secure=secure)}={token}; {attributes}", to)


def _text(value: bytes) -> str:
    return value.decode("latin-1")
