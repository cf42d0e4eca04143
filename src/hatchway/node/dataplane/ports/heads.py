"""What of a request's head goes to the guest, and what of an answer's head to the client. Pure functions.

Both heads are written anew: hop-by-hop fields end here, there is one way to tell the length of a body, the client's token and
API keys stay with us, and what the guest is told about the client comes from us alone.
"""

from hatchway.domain.errors import InvalidRequest
from hatchway.domain.key_forms import is_key
from hatchway.node.dataplane.ports.access import COOKIE, HEADER, SECURE_COOKIE
from hatchway.wire.relayed_heads import (
    ABOUT_THE_CLIENT,
    END_TO_END,
    HOP_BY_HOP,
    Fields,
    listed,
    nominated,
    of_the_client,
    without_domain,
)

_OURS = ABOUT_THE_CLIENT | {HEADER}
_NOT_TAKEN = HOP_BY_HOP | _OURS
"""Not taken from a client, however it writes them: servers take `_` for `-`."""
_COOKIES = (COOKIE.encode(), SECURE_COOKIE.encode())


class AmbiguousAnswer(Exception):
    """The guest's answer can be read in two ways."""


def request_fields(
    raw: Fields, *, http_version: bytes, peer: str, host: bytes, secure: bool
) -> list[tuple[bytes, bytes]]:
    """The fields of the request to the guest.

    `raw` are the client's with their names as they were written. Raises `InvalidRequest("malformed_request")` where the length
    of the body can be read in two ways.
    """
    lower = [(name.lower(), value) for name, value in raw]
    chunked = any(name == b"transfer-encoding" for name, _ in lower)
    measured = any(name == b"content-length" for name, _ in lower)
    if chunked and (measured or http_version < b"1.1"):
        raise InvalidRequest(
            "malformed_request",
            "The length of the body can be read in two ways: Content-Length, and Transfer-Encoding or HTTP/1.0.",
            "Send one of them.",
        )
    about_connection = nominated(lower)
    kept = []
    for name, value in raw:
        key = name.lower()
        if key.replace(b"_", b"-") in _NOT_TAKEN or key in about_connection or is_key(value):
            continue
        if key == b"cookie":
            value = _without_our_cookies(value)
            if not value:
                continue
        kept.append((name, value))
    if chunked:
        kept.append((b"Transfer-Encoding", b"chunked"))
    upgrade = [value for name, value in lower if name == b"upgrade"]
    if upgrade and b"upgrade" in listed(lower, b"connection") and not chunked and not measured:
        kept += [(b"Connection", b"Upgrade"), (b"Upgrade", b", ".join(upgrade))]
    kept += of_the_client(peer, host, secure=secure)
    return kept


def answer_fields(raw: Fields, *, http_version: bytes, upgraded: bool = False) -> list[tuple[bytes, bytes]]:
    """The fields of the answer to the client; how long a body without Content-Length is, the writer says. Raises `AmbiguousAnswer`."""
    lower = [(name.lower(), value) for name, value in raw]
    chunked = any(name == b"transfer-encoding" for name, _ in lower)
    measured = any(name == b"content-length" for name, _ in lower)
    if chunked and (measured or http_version < b"1.1"):
        raise AmbiguousAnswer("the length of its body can be read in two ways")
    about_connection = nominated(lower)
    kept = []
    for name, value in raw:
        key = name.lower()
        if key in HOP_BY_HOP or key in about_connection:
            continue
        if key == b"set-cookie":
            cookie = _host_only(value)
            if cookie is None:
                continue
            value = cookie
        kept.append((name, value))
    if upgraded:
        kept += [(b"Connection", b"Upgrade")]
        kept += [(b"Upgrade", value) for name, value in lower if name == b"upgrade"]
    return kept


def trailer_fields(raw: Fields) -> list[tuple[bytes, bytes]]:
    """What may come behind a body."""
    unfit = _NOT_TAKEN | END_TO_END | {b"authorization", b"trailer"}
    return [(name, value) for name, value in raw if name.lower().replace(b"_", b"-") not in unfit and not is_key(value)]


def _without_our_cookies(value: bytes) -> bytes:
    pairs = [pair.strip() for pair in value.split(b";")]
    return b"; ".join(pair for pair in pairs if pair and pair.partition(b"=")[0].strip() not in _COOKIES)


def _host_only(value: bytes) -> bytes | None:
    """A cookie for the port's own name only, whatever domain the guest asks for; None for one that would take the place of ours."""
    name, _, content = value.partition(b";")[0].partition(b"=")
    # A cookie without a name comes back as its content alone: `=ours=x` as `ours=x`.
    if (name.strip() or content.partition(b"=")[0].strip()) in _COOKIES:
        return None
    return without_domain(value)
