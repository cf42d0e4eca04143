"""From octets to checked values, and from what the decoder says of wrong ones to errors that name the field and what is allowed.

Both HTTP services read their bodies and parameters with it, so that a mistake gets the same answer on either.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, InvalidRequest, TooLarge, Unprocessable, UnsupportedMedia

T = TypeVar("T", bound=msgspec.Struct)

# A field's name is the caller's text; of the places that may stand behind it, only ours begin with `$`.
_PLACE = r" - at `(?:key in )?(?P<at>\$[^`]*)`"
_UNKNOWN = re.compile(rf"Object contains unknown field `(?P<field>.*?)`(?:{_PLACE})?", re.DOTALL)
_MISSING = re.compile(rf"Object missing required field `(?P<field>.*?)`(?:{_PLACE})?", re.DOTALL)
_AT = re.compile(rf"(?P<what>.*?){_PLACE}", re.DOTALL)
_INDEX = re.compile(r"\[[^]]*\]")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")


def require_json(content_type: str | None) -> None:
    """Raises `UnsupportedMedia` for a body that says it is anything but JSON; one that says nothing is taken for JSON."""
    if content_type is not None and content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMedia(
            "unsupported_media_type",
            f"The body is {content_type[:80]!r}, not JSON.",
            "Send JSON with `Content-Type: application/json`.",
            allowed=["application/json"],
        )


def decode(body: bytes, kind: type[T]) -> T:
    """Decodes a JSON object; raises `invalid_json`, `unknown_field`, `missing_field` or `invalid_field`."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise invalid_json(_detail(str(error), body)) from None
    except UnicodeDecodeError as error:
        raise invalid_json(f"it is not UTF-8 at octet {error.start}") from None
    except RecursionError:
        raise invalid_json("it is nested too deeply") from None


def explain(message: str, kind: type[Any]) -> HatchwayError:
    """Turns what msgspec says into an error with field and allowed values."""
    if match := _UNKNOWN.fullmatch(message):
        field = _path(match["at"], match["field"])
        known = list(_properties_at(kind, _path(match["at"], None)))
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
    """What the schema of `kind` admits in a field; `a.b` is the field `b` of what is in `a`."""
    above, _, name = _INDEX.sub("", field).rpartition(".")
    allowed = dict(_properties_at(kind, above).get(name, {}))
    allowed.pop("default", None)
    return allowed


def _properties_at(kind: type[Any], path: str) -> Mapping[str, Any]:
    """The fields of the object at a path: name and schema. Empty where there is no object with fields of its own."""
    schema = msgspec.json.schema(kind, ref_template="#/$defs/{name}")
    named: Mapping[str, Any] = schema.get("$defs", {})
    found = _object_of(schema, named)
    for name in filter(None, _INDEX.sub("", path).split(".")):
        found = _object_of(found.get(name, {}), named)
    return found


def _object_of(schema: Mapping[str, Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    for option in (schema, *schema.get("anyOf", ())):
        resolved = named.get(str(option.get("$ref", "")).rpartition("/")[2], option)
        if "properties" in resolved:
            properties: Mapping[str, Any] = resolved["properties"]
            return properties
    return {}


def _detail(message: str, body: bytes) -> str:
    """What msgspec says of a body that it cannot read; it calls one truncated that has half of a character."""
    if "truncated" in message and _HIGH_SURROGATE.search(body) and body.rstrip().endswith(b"}"):
        return "it has one half of a surrogate pair (`\\ud800` to `\\udfff`), which is no character"
    return message.removesuffix(".")


def _in_words(allowed: Any) -> str:
    if not isinstance(allowed, Mapping):
        return ", ".join(map(str, allowed)) if isinstance(allowed, list | tuple) else str(allowed)
    if "anyOf" in allowed:
        return " or ".join(_in_words(option) for option in allowed["anyOf"])
    if "$ref" in allowed:
        return "object"
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
    return InvalidRequest("invalid_json", f"The body is not valid JSON: {detail}.", "Send one JSON object in UTF-8.")


def too_large(limit: int) -> HatchwayError:
    """The body has more octets than the bound."""
    return TooLarge(
        "body_too_large", f"The body is larger than {limit} octets.", f"Send at most {limit} octets.", limit=limit
    )
