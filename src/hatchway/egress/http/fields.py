"""Which fields of a request go upstream, and which of an answer to the client. Pure.

A field is looked up by its name in lower case with `_` taken for `-`, because servers that hand fields on as variables do so.
"""

from collections.abc import Collection, Iterable

from hatchway.domain.auth_names import COOKIES, field_may_tell, field_tells, plain
from hatchway.egress.http.heads import Fields
from hatchway.wire.broker import LEG_ERROR

HOP = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Fields of one connection: written by us for the next one, or not at all (RFC 9110, 7.6.1)."""

OVERRIDE = frozenset(
    {
        "alt-used",
        "base-url",
        "early-data",
        "forwarded",
        "front-end-https",
        "http-host-override",
        "http-url",
        "proxy-host",
        "request-uri",
        "true-client-ip",
        "x-client-ip",
        "x-forward-for",
        "x-forwarded",
        "x-forwarded-by",
        "x-forwarded-client-ip",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-path",
        "x-forwarded-port",
        "x-forwarded-prefix",
        "x-forwarded-proto",
        "x-forwarded-protocol",
        "x-forwarded-scheme",
        "x-forwarded-server",
        "x-forwarded-ssl",
        "x-forwarded-uri",
        "x-forwarded-url",
        "x-host",
        "x-http-destinationurl",
        "x-http-host-override",
        "x-http-method",
        "x-http-method-override",
        "x-http-path-override",
        "x-method",
        "x-method-override",
        "x-original-host",
        "x-original-method",
        "x-original-uri",
        "x-original-url",
        "x-proxy-url",
        "x-real-ip",
        "x-request-uri",
        "x-rewrite-method",
        "x-rewrite-uri",
        "x-rewrite-url",
        "x-url-scheme",
    }
)
"""With these a request could mean another host, path or method to the upstream than the one that was decided on."""

_ANSWER_DROPPED = HOP | {"alt-svc", "alternate-protocol", LEG_ERROR}
"""Two of these send a client to other ports, and to protocols that are not let through; the last is the broker's to us."""

_kinds: dict[str, int] = {}
_MAX_KINDS = 1_024
_DROPPED, _CREDENTIAL, _COOKIE, _WEBSOCKET, _SUSPECT = 1, 2, 4, 8, 16


def kind_of(name: str) -> int:
    """What a field of a request is, as a sum of the constants above; 0 for most."""
    kind = _kinds.get(name)
    if kind is None:
        key = plain(name)
        kind = _DROPPED if key in HOP or key in OVERRIDE else 0
        if key in COOKIES:
            kind |= _COOKIE
        elif field_tells(key):
            kind |= _CREDENTIAL
        elif field_may_tell(key):
            kind |= _SUSPECT
        if key.startswith("sec-websocket-"):
            kind |= _WEBSOCKET
        if len(_kinds) < _MAX_KINDS and len(name) <= 64:
            _kinds[name] = kind
    return kind


def auth_fields(fields: Fields) -> list[tuple[str, str, bool]]:
    """The fields that tell who asks: name, value, and whether it is a cookie."""
    return [
        (name, value, bool(kind & _COOKIE))
        for name, value in fields
        if (kind := kind_of(name)) & (_CREDENTIAL | _COOKIE)
    ]


def for_upstream(
    fields: Fields,
    *,
    nominated: Collection[str] = (),
    without_auth: bool = False,
    strip: Collection[str] = (),
    only: Collection[str] | None = None,
    put: Iterable[tuple[str, str]] = (),
) -> Fields:
    """The fields of a request as they go on: without those of the connection, those that would override, and what a rule takes away."""
    off = _DROPPED | _WEBSOCKET | (_CREDENTIAL | _COOKIE | _SUSPECT if without_auth else 0)
    put = list(put)
    taken = {plain(name) for name in strip}
    taken.update(plain(name) for name, _ in put)
    taken.update(plain(name) for name in nominated)
    kept = [
        field
        for field in fields
        if not kind_of(field[0]) & off
        and (not taken or plain(field[0]) not in taken)
        and (only is None or field[0] in only)
    ]
    kept += put
    return kept


def offered_protocols(fields: Fields) -> list[str]:
    """The protocols that a WebSocket's handshake offers, in the form in which they go on."""
    values = [value for name, value in fields if plain(name) == "sec-websocket-protocol"]
    return [one.strip(" \t") for value in values for one in value.split(",")]


def for_client(fields: Fields, *, nominated: Collection[str] = (), strip: Collection[str] = ()) -> Fields:
    """The fields of an answer as they go on. How long the body is, the writer says."""
    return [
        field
        for field in fields
        if field[0] not in _ANSWER_DROPPED and field[0] not in nominated and field[0] not in strip
    ]
