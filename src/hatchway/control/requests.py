"""From octets to checked values: bodies, query parameters, headers. Whatever is wrong says which field, and what is allowed."""

import asyncio
import base64
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from hatchway.control import problems
from hatchway.domain.errors import HatchwayError, InvalidRequest, Unprocessable
from hatchway.domain.ids import is_id

T = TypeVar("T", bound=msgspec.Struct)

MAX_BODY = 1024 * 1024
MAX_DRAINED = 16 * MAX_BODY
BODY_WITHIN_S = 30.0
MAX_WAIT_S = 60
DEFAULT_LIMIT = 50
MAX_LIMIT = 500

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`(?: - at `(?P<at>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`(?: - at `(?P<at>.*)`)?")
_AT = re.compile(r"(?P<what>.*) - at `(?:key in )?(?P<at>.*)`")


async def read_body(request: Request) -> bytes:
    """Reads the body, however its length is announced. Raises `TooLarge` when it is longer than `MAX_BODY`.

    What is too long is read on, up to `MAX_DRAINED`, and thrown away: a client that is still sending when the connection closes
    would not see the answer.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    parts.append(part)
                elif parts:
                    parts.clear()
                if size > MAX_DRAINED:
                    break
    except ClientDisconnect:
        raise InvalidRequest("body_cut_off", "The connection ended in the middle of the body.", "Try again.") from None
    except TimeoutError:
        cause = f"The body did not come within {BODY_WITHIN_S:g} seconds."
        raise InvalidRequest("body_too_slow", cause, "Try again over a faster connection.") from None
    if size > MAX_BODY:
        raise problems.too_large(MAX_BODY)
    return b"".join(parts)


def decode(body: bytes, kind: type[T]) -> T:
    """Decodes a JSON object; raises `invalid_json`, `unknown_field`, `missing_field` or `invalid_field`."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise problems.invalid_json(str(error)) from None
    except UnicodeDecodeError as error:
        raise problems.invalid_json(f"it is not UTF-8 at octet {error.start}") from None
    except RecursionError:
        raise problems.invalid_json("it is nested too deeply") from None


def query(request: Request, kind: type[T], *, prefixes: tuple[str, ...] = ()) -> T:
    """Decodes the query string; parameters that begin with one of `prefixes` are the caller's. A repeated one is a list."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(prefixes) and prefixes:
            continue
        if name in values:
            raise InvalidRequest(
                "invalid_field", f"The parameter `{name}` is given twice.", "Give it once.", field=name
            )
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind) from None


def explain(message: str, kind: type[Any]) -> HatchwayError:
    """Turns what msgspec says into an error with field and allowed values."""
    if match := _UNKNOWN.fullmatch(message):
        field = _path(match["at"], match["field"])
        known = list(kind.__struct_fields__) if not match["at"] else []
        return Unprocessable(
            "unknown_field",
            f"There is no field `{field}` here.",
            "Leave it out." + (f" Known are: {', '.join(known)}." if known else ""),
            field=field,
            allowed=known,
        )
    if match := _MISSING.fullmatch(message):
        field = _path(match["at"], match["field"])
        return Unprocessable(
            "missing_field", f"The field `{field}` is missing.", "Add it.", field=field, allowed=allowed_of(kind, field)
        )
    if match := _AT.fullmatch(message):
        field = _path(match["at"], None)
        return invalid_field(field, match["what"] + ".", allowed_of(kind, field))
    return Unprocessable("invalid_field", f"{message}.", "Send one JSON object.", field="", allowed={"type": "object"})


def invalid_field(field: str, cause: str, allowed: Any) -> HatchwayError:
    """A value that is not admitted: which field, why, and what is."""
    return Unprocessable(
        "invalid_field", f"`{field}`: {cause}", f"Allowed: {_in_words(allowed)}.", field=field, allowed=allowed
    )


def allowed_of(kind: type[Any], field: str) -> Any:
    """What the schema of `kind` admits in a field."""
    top = re.split(r"[.\[]", field, maxsplit=1)[0]
    schema = msgspec.json.schema(kind, ref_template="#/$defs/{name}")
    name = kind.__name__
    properties = schema.get("$defs", {}).get(name, {}).get("properties", {})
    allowed = dict(properties.get(top, {}))
    allowed.pop("default", None)
    return allowed


def _in_words(allowed: Any) -> str:
    if not isinstance(allowed, Mapping):
        return ", ".join(map(str, allowed)) if isinstance(allowed, list | tuple) else str(allowed)
    if "anyOf" in allowed:
        return " or ".join(_in_words(option) for option in allowed["anyOf"])
    if "enum" in allowed:
        return ", ".join(map(str, allowed["enum"]))
    words = [str(allowed.get("type", "any value"))]
    low, high = allowed.get("minimum"), allowed.get("maximum")
    if low is not None and high is not None:
        words.append(f"from {low} to {high}")
    elif low is not None:
        words.append(f"from {low} up")
    if allowed.get("exclusiveMinimum") is not None:
        words.append(f"above {allowed['exclusiveMinimum']}")
    if "maxLength" in allowed:
        words.append(f"of at most {allowed['maxLength']} characters")
    if "pattern" in allowed:
        words.append(f"that matches {allowed['pattern']}")
    return " ".join(words)


def _path(at: str | None, field: str | None) -> str:
    where = (at or "").removeprefix("$").removeprefix(".")
    return ".".join(part for part in (where, field) if part)


def check_id(value: str, what: str, error: type[HatchwayError]) -> str:
    """Raises the error of an unknown thing for what cannot be an id: nothing is there by that name either."""
    if not is_id(value):
        raise error(f"unknown_{what}", f"There is no {what} {value[:64]!r}.", "An id is 20 characters of a-z and 0-9.")
    return value


def prefer_wait(request: Request) -> int | None:
    """Seconds of `Prefer: wait=N` (RFC 7240), at most `MAX_WAIT_S`; None without one, or when it cannot be read: it is a preference."""
    for header in request.headers.getlist("prefer"):
        for part in header.split(","):
            name, _, value = part.split(";")[0].strip().partition("=")
            value = value.strip().strip('"')
            if name.strip().lower() == "wait" and value.isascii() and value.isdigit() and len(value) < 10:
                return min(int(value), MAX_WAIT_S)
    return None


def encode_cursor(created_at: float, row_id: str) -> str:
    """A cursor is the place of the last row in the order of the list."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode((created_at, row_id))).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> tuple[float, str] | None:
    """Raises `InvalidRequest("invalid_cursor")` for what is none of ours."""
    if cursor is None:
        return None
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(raw, type=tuple[float, str])
    except (ValueError, msgspec.MsgspecError):
        raise InvalidRequest(
            "invalid_cursor",
            "The cursor is none that a list has answered.",
            "Pass `next_cursor` of the previous page.",
            field="cursor",
        ) from None
