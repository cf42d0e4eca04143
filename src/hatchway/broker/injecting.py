"""How a credential gets into a request: everything that could be another one out of it first, then the secret where the binding says. Pure."""

import base64
import re
from collections.abc import Sequence
from urllib.parse import quote

from hatchway.broker.http1 import Fields, RequestHead
from hatchway.domain import auth_names
from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.wire.broker import Injection


def _names(text: str) -> frozenset[bytes]:
    return frozenset(text.encode().split())


WHERES = ("header", "basic", "query")

NOT_FOR_INJECTION = frozenset(
    (
        *(
            "host",
            "content-length",
            "content-type",
            "content-encoding",
            "transfer-encoding",
            "connection",
            "keep-alive",
        ),
        *("te", "trailer", "upgrade", "expect", "range", "if-range", "accept-encoding", "proxy-connection"),
    )
)
OVERRIDES = _names(
    "x-http-method-override x-http-method x-method-override x-forwarded-host x-forwarded-server x-forwarded-proto x-forwarded-port "
    "x-forwarded-for forwarded x-original-url x-original-host x-rewrite-url x-host via early-data"
)
"""Fields by which a request could be taken for another one than was checked."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_PARAMETER = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FORMAT = re.compile(r"[\x20-\x7e]{2,256}")
_USER = re.compile(r"[\x20-\x39\x3b-\x7e]{0,256}")


def check(injection: Injection) -> None:
    """Raises `Unprocessable("credential_injection")` for a place that no secret may be put into."""
    if injection.where == "header":
        if not _NAME.fullmatch(injection.name) or injection.name.lower() in NOT_FOR_INJECTION:
            raise _invalid(f"{injection.name[:64]!r} is no header for a credential", "Name one like `authorization`.")
        if not _FORMAT.fullmatch(injection.format) or injection.format.count("{}") != 1:
            raise _invalid("the format has not exactly one `{}`, or is no line of text", "Give one like `Bearer {}`.")
    elif injection.where == "basic":
        if not _USER.fullmatch(injection.name):
            raise _invalid("the user's name has a colon or is no line of text", "Give the user's name.")
    elif injection.where == "query":
        if not _PARAMETER.fullmatch(injection.name):
            raise _invalid(f"{injection.name[:64]!r} is no parameter of a query", "Name one like `access_token`.")
    else:
        raise _invalid(f"{injection.where[:32]!r} is no place", f"Possible are: {', '.join(WHERES)}.")


def stripped(head: RequestHead, injections: Sequence[Injection]) -> tuple[bytes, Fields]:
    """Target and fields without anything that says who asks, and without what the injection will set."""
    ours = {one.name.lower().encode() for one in injections if one.where == "header"}
    fields = tuple(
        (name, value)
        for name, value in head.end_to_end
        if name not in ours
        and not bears_auth(name)
        and not _tells_by_protocol(name, value)
        and name not in OVERRIDES
        and name != b"expect"
    )
    parameters = {auth_names.parameter_key(one.name) for one in injections if one.where == "query"}
    path, mark, query = head.target.partition(b"?")
    if not mark:
        return path, fields
    # Some servers take `;` for `&`: what would be hidden behind it must not pass for a part of a value.
    kept = [part for part in re.split(rb"[&;]", query) if not _is_auth(part, parameters)]
    return (path + b"?" + b"&".join(kept) if kept else path), fields


def bears_auth(name: bytes) -> bool:
    """Whether a field, its name in lower case, says who asks. On a route with a credential, none of the client's own goes upstream."""
    text = name.decode("latin-1")
    return auth_names.field_tells(text) or auth_names.field_may_tell(text)


def injected(target: bytes, fields: Fields, injections: Sequence[Injection], secret: bytes) -> tuple[bytes, Fields]:
    """Target and fields with the secret in each of its places."""
    more: list[tuple[bytes, bytes]] = []
    for one in injections:
        if one.where == "header":
            more.append((one.name.lower().encode(), one.format.encode().replace(b"{}", secret)))
        elif one.where == "basic":
            more.append((b"authorization", b"Basic " + base64.b64encode(one.name.encode() + b":" + secret)))
        else:
            parameter = one.name.encode() + b"=" + quote(secret, safe="").encode()
            target += (b"&" if b"?" in target else b"?") + parameter
    return target, (*fields, *more)


def _is_auth(part: bytes, ours: set[str]) -> bool:
    name = part.partition(b"=")[0].decode("latin-1")
    tells = auth_names.parameter_tells(name) or auth_names.parameter_signs(name)
    return tells or auth_names.parameter_key(name) in ours


def _tells_by_protocol(name: bytes, value: bytes) -> bool:
    """Whether it is the field in which browsers send a token for a WebSocket, and there is one in it."""
    offered = value.decode("latin-1").split(",")
    return name.replace(b"_", b"-") == b"sec-websocket-protocol" and auth_names.protocol_tells(offered) is not None


def _invalid(cause: str, remedy: str) -> HatchwayError:
    return Unprocessable("credential_injection", f"The credential cannot be put there: {cause}.", remedy)
