"""From octets to checked values, and from what the decoder says of wrong ones to errors that name the field and what is allowed.

Both HTTP services read their bodies and parameters with it, so that a mistake gets the same answer on either.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, InvalidRequest, TooLarge, Unprocessable

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`(?: - at `(?P<at>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`(?: - at `(?P<at>.*)`)?")
_AT = re.compile(r"(?P<what>.*) - at `(?:key in )?(?P<at>.*)`")


def decode(body: bytes, kind: type[T]) -> T:
    """Decodes a JSON object; raises `invalid_json`, `unknown_field`, `missing_field` or `invalid_field`."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise invalid_json(str(error)) from None
    except UnicodeDecodeError as error:
        raise invalid_json(f"it is not UTF-8 at octet {error.start}") from None
    except RecursionError:
        raise invalid_json("it is nested too deeply") from None


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


def invalid_json(detail: str) -> HatchwayError:
    """The body cannot be read as JSON at all."""
    return InvalidRequest("invalid_json", f"The body is not valid JSON: {detail}", "Send one JSON object in UTF-8.")


def too_large(limit: int) -> HatchwayError:
    """The body has more octets than the bound."""
    return TooLarge(
        "body_too_large", f"The body is larger than {limit} octets.", f"Send at most {limit} octets.", limit=limit
    )
