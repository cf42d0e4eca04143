"""By which names a request tells a server who asks: of header fields, of parameters of the query, of the protocols that a WebSocket offers.

Gateway and broker both take such things out of requests that get a credential, each by its own reading of the request; the gateway also refuses
them where a policy lets no client bring its own. Names are looked up in lower case, with `_` for `-`: servers hand fields on so.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

COOKIES = frozenset({"cookie", "cookie2"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FIELDS = _names(
    """
    authorization proxy-authorization api-key apikey authentication dpop ocp-apim-subscription-key x-amz-security-token x-apikey x-api-key x-auth
    x-auth-email x-auth-key x-auth-user x-functions-key x-jfrog-art-api x-session x-session-id session-id x-honeycomb-team x-appwrite-key
    x-npm-session x-goog-api-key x-goog-iap-jwt-assertion
    """
)
_IDENTITIES = _names(
    """
    proxy-authentication-info remote-user x-remote-user x-forwarded-user x-forwarded-email x-webauth-user x-goog-authenticated-user-email x-amz-date
    x-client-cert x-ssl-client-cert x-forwarded-client-cert ssl-client-cert
    """
)
"""What proxies say of a client to the servers behind them, and what goes with a signature."""
_FIELD_ENDS = re.compile(
    r"(?:^|-)(?:token|api-?key|apikey|access-?key|accesskey|secret|secret-key|password|passwd|authorization|jwt|bearer|credentials?)$"
)
_FIELD_WORD = re.compile(
    r"(?:^|-)(?:x?auth|authn|authz|authorization|authentication|jwt|bearer|tokens?|secrets?|passwords?|passwd|credentials?|apikey|accesskey|signature"
    r"|(?:api|access|app|application|secret|private|subscription|insert|license|session|signing|client|consumer)-key"
    r"|(?:app|application|private|subscription|insert|license)-id)(?:-|$)"
)
_FOR_FORMS = frozenset({"x-csrf-token", "x-xsrf-token", "csrf-token", "x-csrftoken", "x-xsrftoken"})
"""They say that a form is the server's own, and nothing without the cookie."""

_OWNERS = (
    "access|account|admin|api|app|application|auth|authentication|bearer|bot|client|consumer|deploy|dev|developer|device|git|github|gitlab|gh|hub|id"
    "|identity|integration|job|jwt|license|login|master|npm|o|oauth|oauth2|org|personal|private|project|refresh|sas|secret|security|service"
    "|session|shared|sso|subscription|team|tenant|user|web|write|x"
)
_PARAMETER = re.compile(
    rf"(?:x-)?(?:(?:{_OWNERS})-?){{0,3}}(?:tokens?|keys?|secrets?|passwords?|passwd|credentials?|jwt)"
    r"|(?:x-)?(?:auth|authn|authz|authorization|authentication|bearer|pwd|pass|passphrase|pat|sid|sessid|phpsessid|jsessionid|session-?(?:id)?"
    r"|(?:access|api)-?key-?id|code-verifier|oauth-[a-z-]+|assertion|client-assertion|saml-?(?:response|token))"
)
_PARAMETER_SIGNS = re.compile(
    r"(?:x-)?(?:sig|signature|hmac|awsaccesskeyid|googleaccessid|ossaccesskeyid|skoid|sktid|(?:amz|goog|oss|cos|tos)-.*|key-pair-id|policy)"
)
_LONGEST = 64
_ARRAY = re.compile(r"\[[^\]]*\]?.*$")

_PROTOCOL_WORD = re.compile(
    r"(?:^|[^a-z0-9])(?:tokens?|bearer|jwt|auth|authn|authz|authorization|authentication|apikey|api[-_.]?key|access[-_.]?(?:key|token)|secrets?"
    r"|password|passwd|credentials?|session[-_.]?id)(?:$|[^a-z0-9])"
)
_LONG = 24
"""Octets of a piece that looks like a token where it has digits and letters; registered names of protocols have shorter ones."""


def plain(name: str) -> str:
    """A field's name as servers may look it up; in lower case already."""
    return name.replace("_", "-")


def field_tells(name: str) -> bool:
    """Whether a field of this name, in lower case, tells a server who asks. Cookies are told apart: `COOKIES`."""
    key = plain(name)
    return key in _FIELDS or key in COOKIES or (_FIELD_ENDS.search(key) is not None and key not in _FOR_FORMS)


def field_may_tell(name: str) -> bool:
    """Whether its name only looks as if: it is not refused for that, but does not go on either where nothing may tell."""
    key = plain(name)
    return key in _IDENTITIES or (_FIELD_WORD.search(key) is not None and key not in _FOR_FORMS)


def parameter_tells(name: str) -> bool:
    """Whether a parameter of the query tells a server who asks. `name` as it came: see `parameter_key`."""
    return _PARAMETER.fullmatch(parameter_key(name)) is not None


def parameter_signs(name: str) -> bool:
    """Whether it is part of a signed link, which stands for an account for one request."""
    return _PARAMETER_SIGNS.fullmatch(parameter_key(name)) is not None


def protocol_tells(offered: Iterable[str]) -> str | None:
    """The first of the protocols that a WebSocket offers which tells who asks: browsers can send a token in no other field, so some servers read it there."""
    return next((one for one in offered if _PROTOCOL_WORD.search(one.lower()) or _is_token(one)), None)


def _is_token(protocol: str) -> bool:
    if protocol.startswith("eyJ"):
        return True
    return any(
        len(piece) >= _LONG and any(c.isdigit() for c in piece) and any(c.isalpha() for c in piece)
        for piece in protocol.split(".")
    )


def parameter_key(name: str) -> str:
    """The name of a parameter as it is looked up: decoded as far as some server would, `token[]` as `token`, `-` for whatever divides its words.

    What is longer than any that a server has is none of them, and costs no search. Most are words of letters and digits, in which nothing is coded or
    divided: they are what they are.
    """
    if name.isascii() and name.isalnum():
        return name.lower() if len(name) <= _LONGEST else ""
    return _key_of_any(name)


def _key_of_any(name: str) -> str:
    octets = name.encode("latin-1", "replace").replace(b"+", b" ")
    for _ in range(3):  # a name may be encoded more than once for a server that decodes more than once
        decoded = unquote_to_bytes(octets)
        if decoded == octets:
            break
        octets = decoded
    text = _ARRAY.sub("", octets.decode("latin-1").strip())
    return re.sub(r"[-_. ]+", "-", text.lower()) if len(text) <= _LONGEST else ""
