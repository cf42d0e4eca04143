"""How a credential gets into a request: everything that could be another one out of it first, then the secret where the binding says. Pure."""

import base64
import re
from collections.abc import Sequence
from urllib.parse import quote, unquote_to_bytes

from hatchway.broker.http1 import Fields, RequestHead
from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.wire.broker import Injection


def _names(text: str) -> frozenset[bytes]:
    return frozenset(text.encode().split())


WHERES = ("header", "basic", "query")

AUTH_FIELDS = _names(
    "proxy-authentication-info cookie cookie2 remote-user x-remote-user x-forwarded-user x-forwarded-email x-webauth-user "
    "x-goog-authenticated-user-email x-honeycomb-team x-appwrite-key x-jfrog-art-api x-session-id x-npm-session x-amz-date"
)
"""Fields that say who asks, and whose names do not show it. On a route with a credential, none of the client's own goes upstream."""

_AUTH_WORD = re.compile(
    rb"(?:.*-)?(?:x?auth|authn|authz|authorization|authentication|tokens?|jwt|bearer|secrets?|password|passwd|credentials?"
    rb"|apikey|accesskey|signature|(?:api|access|app|application|secret|private|subscription|insert|license)-key)(?:-.*)?"
)
"""Names that show it."""

AUTH_PARAMETERS = _names(
    "access_token accesstoken access-token api_key api-key apikey api_token apitoken appkey app_key auth auth_key auth_token authtoken "
    "authorization bearer bearer_token client_secret code_verifier credential credentials id_token jwt job_token key oauth_consumer_key oauth_signature "
    "oauth_token passwd password private_token pwd refresh_token secret secret_key session session_id sessionid sid sig signature subscription-key "
    "subscription_key token user_token awsaccesskeyid googleaccessid x-api-key"
)
"""Parameters of the query that say who asks."""

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
        if name not in ours and not bears_auth(name) and name not in OVERRIDES and name != b"expect"
    )
    parameters = {one.name.lower().encode() for one in injections if one.where == "query"}
    path, mark, query = head.target.partition(b"?")
    if not mark:
        return path, fields
    # Some servers take `;` for `&`: what would be hidden behind it must not pass for a part of a value.
    kept = [part for part in re.split(rb"[&;]", query) if not _is_auth(part, parameters)]
    return (path + b"?" + b"&".join(kept) if kept else path), fields


def bears_auth(name: bytes) -> bool:
    """Whether a field, its name in lower case, says who asks."""
    plain = name.replace(b"_", b"-")  # many servers take the one for the other
    return plain in AUTH_FIELDS or _AUTH_WORD.fullmatch(plain) is not None


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


def _is_auth(part: bytes, ours: set[bytes]) -> bool:
    name = part.partition(b"=")[0].replace(b"+", b" ")
    for _ in range(3):  # a name may be encoded more than once for a server that decodes more than once
        decoded = unquote_to_bytes(name)
        if decoded == name:
            break
        name = decoded
    name = name.strip().lower()
    # Arrays of some frameworks: `token[]`, `token[0]`.
    name = name.partition(b"[")[0]
    return name in ours or name in AUTH_PARAMETERS or name.startswith((b"x-amz-", b"x-goog-", b"x-oss-"))


def _invalid(cause: str, remedy: str) -> HatchwayError:
    return Unprocessable("credential_injection", f"The credential cannot be put there: {cause}.", remedy)
