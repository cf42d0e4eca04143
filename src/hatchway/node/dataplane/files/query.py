"""The parameters of a request for file work. Paths are octets, not text: a name in a sandbox may be any."""

import base64
import binascii
import re
from collections.abc import Collection
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import HatchwayError, InvalidRequest, Unprocessable

MAX_PATH = 4095
MAX_CURSOR = 16_384
MAX_ATTRIBUTES = 8_192
BESIDE = ("owner", "links", "attributes_of")
USER = r"^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,10})$"
_MODE = re.compile(r"[0-7]{1,5}", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_ATTRIBUTES_RULE = f"lines NAME=VALUE of text, {MAX_ATTRIBUTES} octets in all, beside `attributes_of`"
_PATH_RULE = f"1 to {MAX_PATH} octets without NUL"


def path_of(octets: bytes, field: str) -> bytes:
    """Checks a path. Raises `invalid_field`."""
    if not 1 <= len(octets) <= MAX_PATH or 0 in octets:
        raise invalid_field(field, f"it has {len(octets)} octets, or a NUL.", _PATH_RULE)
    return octets


def from_base64(text: str, field: str) -> bytes:
    """Reads octets that are given in base64. Raises `invalid_field`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(field, "it is not base64.", "base64 as of RFC 4648, with padding") from None


def mode_of(text: str, field: str = "mode") -> str:
    """Checks a mode in octal digits. Raises `invalid_field`."""
    if not _MODE.fullmatch(text) or int(text, 8) > 0o7777:
        raise invalid_field(field, f"it is {text[:40]!r}.", "octal digits up to 7777, for example 644")
    return text


def user_of(text: str | None, field: str = "user") -> str | None:
    """Checks the name or number of a user. Raises `invalid_field`."""
    if text is not None and not re.match(USER, text):
        raise invalid_field(field, f"it is {text[:40]!r}.", f"matches {USER}")
    return text


def beside(
    user: str | None, owner: str | None, links: bool, attributes_of: str | None
) -> list[tuple[str, bytes | str | int | None]]:
    """What several operations take beside their own. Raises `invalid_field`."""
    if owner is not None and user not in ("root", "0"):
        raise invalid_field("owner", "only root works on behalf of an owner.", "with `user=root`")
    if attributes_of is not None and not _PREFIX.fullmatch(attributes_of):
        raise invalid_field("attributes_of", f"it is {attributes_of[:40]!r}.", f"matches {_PREFIX.pattern}")
    return [
        ("owner", user_of(owner, "owner")),
        ("links", int(links) or None),
        ("attributes_of", attributes_of),
    ]


def encode_cursor(after: bytes) -> str:
    """The cursor of the page behind an entry."""
    return base64.urlsafe_b64encode(after).decode()


def _decode_cursor(text: str) -> bytes:
    try:
        if len(text) > MAX_CURSOR:
            raise ValueError
        after = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        after = b""
    if not after or 0 in after:
        raise InvalidRequest("invalid_cursor", "The cursor is none that a list has answered.", "Begin without one.")
    return after


class Query:
    """The query of a request; what is not `known`, or given twice, is refused."""

    def __init__(self, scope: Scope, known: Collection[str]) -> None:
        self._values: dict[str, bytes] = {}
        for part in scope["query_string"].split(b"&"):
            if not part:
                continue
            raw_name, _, raw_value = part.replace(b"+", b" ").partition(b"=")
            name = unquote_to_bytes(raw_name).decode(errors="replace")
            if name not in known:
                raise _unknown(name, known)
            if name in self._values:
                raise InvalidRequest("invalid_field", f"`{name}` is given twice.", "Give it once.", field=name)
            self._values[name] = unquote_to_bytes(raw_value)

    def shown(self) -> dict[str, str]:
        """What it says of path and user, for a record; octets that are no text become marks."""
        names = ("path", "path_base64", "user")
        return {name: self._values[name].decode(errors="replace") for name in names if name in self._values}

    def path(self) -> bytes:
        """`path`, or `path_base64`."""
        value, encoded = self._values.get("path"), self.text("path_base64")
        if (value is None) == (encoded is None):
            raise invalid_field("path", "exactly one of `path` and `path_base64` must be given.", _PATH_RULE)
        return path_of(from_base64(encoded, "path_base64") if encoded is not None else value or b"", "path")

    def text(self, name: str) -> str | None:
        """A parameter that is text, if it is given."""
        value = self._values.get(name)
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            raise invalid_field(name, "it is not UTF-8.", {"type": "string"}) from None

    def one_of(self, name: str, allowed: Collection[str]) -> str | None:
        """A parameter that is one of some words, if it is given."""
        value = self.text(name)
        if value is not None and value not in allowed:
            raise invalid_field(name, f"it is {value[:40]!r}.", list(allowed))
        return value

    def flag(self, name: str) -> bool:
        """A parameter that is 0 or 1; 0 when it is not given."""
        return self.one_of(name, ("0", "1")) == "1"

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """A number within bounds."""
        value = self.text(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdecimal() and len(value) <= 19 and least <= int(value) <= most):
            raise invalid_field(name, f"it is {value[:40]!r}.", {"type": "integer", "minimum": least, "maximum": most})
        return int(value)

    def user(self) -> str | None:
        """`user`, if it is given."""
        return user_of(self.text("user"))

    def mode(self) -> str | None:
        """`mode`, if it is given."""
        value = self.text("mode")
        return None if value is None else mode_of(value)

    def beside(self) -> list[tuple[str, bytes | str | int | None]]:
        """The arguments of the guest's program that `BESIDE` names."""
        return beside(self.user(), self.text("owner"), self.flag("links"), self.text("attributes_of"))

    def attributes(self) -> bytes | None:
        """`attributes`, if it is given: lines NAME=VALUE."""
        value = self.text("attributes")
        if value is None:
            return None
        if self.text("attributes_of") is None or len(value.encode()) > MAX_ATTRIBUTES or "\0" in value:
            raise invalid_field("attributes", "it is too long, or stands without `attributes_of`.", _ATTRIBUTES_RULE)
        return value.encode()

    def cursor(self) -> bytes | None:
        """`cursor`, if it is given."""
        value = self.text("cursor")
        return None if value is None else _decode_cursor(value)


def _unknown(name: str, known: Collection[str]) -> HatchwayError:
    return Unprocessable(
        "unknown_field",
        f"There is no parameter `{name[:80]}` here.",
        f"Leave it out. Known are: {', '.join(known)}.",
        field=name[:80],
        allowed=list(known),
    )
