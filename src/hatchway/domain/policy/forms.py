"""Readers of the texts that stand for something: a name, a network, a duration. Each gives the canonical form or says what is wrong."""

import base64
import binascii
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hatchway.domain.policy.addresses import parse_address, parse_network
from hatchway.domain.policy.names import HostPattern, NameRefused, canonical_host, require_one_script
from hatchway.domain.policy.paths import PathPattern, PathRefused

NEVER_METHODS = frozenset({"TRACE", "TRACK", "CONNECT"})
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(ms|s|m|h|d)?")
_SIZE = re.compile(r"(\d{1,15})\s*(B|KB|MB|GB|KiB|MiB|GiB)?")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_DURATIONS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"B": 1, "KB": 1000, "MB": 10**6, "GB": 10**9, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----\s*")


class FormRefused(ValueError):
    """The value does not have its form."""

    def __init__(self, cause: str, remedy: str, code: str = "invalid_value") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.code = code


def text_of(value: Any) -> str:
    """The value if it is text."""
    if not isinstance(value, str):
        raise FormRefused(f"it is {kind_of(value)}, not text.", "Write it in quotes.", "wrong_type")
    return value


def kind_of(value: Any) -> str:
    """What kind a plain value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}.get(
        type(value), "something else"
    )


def host(value: Any) -> str:
    """A host pattern."""
    text = text_of(value)
    try:
        return str(HostPattern.parse(text))
    except NameRefused as error:
        code = "mixed_script" if "mixes scripts" in error.cause else "invalid_host"
        raise FormRefused(f"{_shown(text)} is no host: {error.cause}.", error.remedy, code) from None


def name(value: Any) -> str:
    """A host name."""
    text = text_of(value)
    try:
        canonical = canonical_host(text)
        require_one_script(canonical)
    except NameRefused as error:
        raise FormRefused(f"{_shown(text)} is no host name: {error.cause}.", error.remedy, "invalid_host") from None
    return canonical


def cidr(value: Any) -> str:
    """A network."""
    text = text_of(value)
    try:
        return str(parse_network(text))
    except ValueError as error:
        raise FormRefused(
            f"{_shown(text)} is no network: {error}.", "Write it as address/length.", "invalid_cidr"
        ) from None


def address(value: Any) -> str:
    """An address."""
    text = text_of(value)
    try:
        return str(parse_address(text))
    except ValueError:
        raise FormRefused(f"{_shown(text)} is no address.", "Write one plain address.", "invalid_address") from None


def port(value: Any) -> int | str:
    """A port, or a range `from-to`."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise FormRefused(
            f"it is {kind_of(value)}, no port.", "Write a number, or a range such as 8000-8099.", "invalid_port"
        )
    match = _RANGE.fullmatch(str(value))
    if match is None:
        raise FormRefused(
            f"{_shown(str(value))} is no port.", "Write a number, or a range such as 8000-8099.", "invalid_port"
        )
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high <= 65535:
        raise FormRefused(f"{value} is outside of 1 to 65535.", "Write a port that there is.", "invalid_port")
    return low if low == high else f"{low}-{high}"


def path(value: Any) -> str:
    """A path pattern."""
    text = text_of(value)
    try:
        return str(PathPattern.parse(text))
    except PathRefused as error:
        raise FormRefused(
            f"{_shown(text)} is no path: {error.cause}.",
            "Write it as it goes over the wire, `*` for characters of one segment, `**` for any number of segments.",
            "invalid_path",
        ) from None


def method(value: Any) -> str:
    """An HTTP method."""
    text = text_of(value)
    if not _TOKEN.fullmatch(text) or text != text.upper():
        raise FormRefused(
            f"{_shown(text)} is no method.", "Write it in capitals, such as GET, or `*`.", "invalid_method"
        )
    if text in NEVER_METHODS:
        raise FormRefused(f"{text} never passes.", "Leave it out.", "invalid_method")
    return text


def header(value: Any) -> str:
    """The name of a header."""
    text = text_of(value)
    if not _TOKEN.fullmatch(text):
        raise FormRefused(f"{_shown(text)} is no name of a header.", "Write its bare name.", "invalid_header")
    return text.lower()


def header_value(value: Any) -> str:
    """The value of a header."""
    text = text_of(value)
    if any(not "\x20" <= letter <= "\x7e" for letter in text) or text != text.strip():
        raise FormRefused("it has characters that a header cannot have.", "Use printable ASCII.", "invalid_header")
    return text


def value_pattern(value: Any) -> str:
    """A pattern for a query's or header's value; `*` stands for any characters."""
    text = text_of(value)
    if not text.isprintable():
        raise FormRefused("it has characters that cannot be shown.", "Use printable characters.")
    return text


def values(value: Any) -> tuple[str, ...]:
    """One pattern, or a list of them."""
    if isinstance(value, list):
        if not value:
            raise FormRefused("it is empty.", "Say what it may be, `*` for anything.", "empty")
        return tuple(map(value_pattern, value))
    return (value_pattern(value),)


def duration(value: Any) -> float:
    """Seconds, or text such as `90s`, `15m`, `1h`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise FormRefused(
            f"{_shown(str(value))} is no duration.", "Write seconds, or text such as 90s, 15m, 1h.", "invalid_duration"
        )
    return float(match[1]) * _DURATIONS[match[2] or "s"]


def size(value: Any) -> int:
    """Octets, or text such as `64KiB`, `1MiB`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise FormRefused(
            f"{_shown(str(value))} is no size.", "Write octets, or text such as 64KiB, 1MiB.", "invalid_size"
        )
    return int(match[1]) * _SIZES[match[2] or "B"]


def date(value: Any) -> str:
    """A date, or date and time with its zone; a date ends with its day, in UTC."""
    text = text_of(value)
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            moment = datetime.fromisoformat(text + "T23:59:59+00:00")
        else:
            moment = datetime.fromisoformat(text)
    except ValueError:
        raise FormRefused(
            f"{_shown(text)} is no date.", "Write it as 2031-12-31, or 2031-12-31T18:00:00Z.", "invalid_date"
        ) from None
    if moment.tzinfo is None:
        raise FormRefused(f"{text} has no zone.", f"Write {text}Z for UTC.", "invalid_date")
    try:
        return moment.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
    except OverflowError:
        raise FormRefused(f"{text} is out of range.", "Write a date that will come.", "invalid_date") from None


def seconds_of(canonical: str) -> float:
    """Unix seconds of a canonical date."""
    return datetime.fromisoformat(canonical).timestamp()


def pem(value: Any) -> str:
    """One certificate."""
    text = text_of(value)
    match = _PEM.fullmatch(text.strip() + "\n")
    try:
        octets = base64.b64decode("".join(match[1].split()), validate=True) if match else b""
    except binascii.Error:
        octets = b""
    if not octets.startswith(b"\x30"):
        raise FormRefused(
            "it is no certificate in PEM.", "Put one `BEGIN CERTIFICATE` block here.", "invalid_certificate"
        )
    lines = base64.b64encode(octets).decode()
    body = "\n".join(lines[at : at + 64] for at in range(0, len(lines), 64))
    return f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"


def spki(value: Any) -> str:
    """A SHA-256 in base64."""
    text = text_of(value)
    try:
        octets = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        octets = b""
    if len(octets) != 32:
        raise FormRefused(f"{_shown(text)} is no SHA-256 in base64.", "Write the 44 characters of the key's digest.")
    return base64.b64encode(octets).decode()


def placeholder_format(value: Any) -> str:
    """Text with one `{}`."""
    text = text_of(value)
    if text.count("{}") != 1 or any(letter in "\r\0" for letter in text):
        raise FormRefused("it has not one `{}`, where the secret goes.", "Write it such as `Bearer {}`.")
    return text


def plain_text(value: Any) -> str:
    """Text for people, of one line."""
    text = text_of(value)
    if not text.isprintable():
        raise FormRefused("it has characters that cannot be shown.", "Write one line of text.")
    return text


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


FORMS: dict[str, Callable[[Any], Any]] = {
    "host": host,
    "name": name,
    "cidr": cidr,
    "address": address,
    "port": port,
    "path": path,
    "method": method,
    "header": header,
    "header_value": header_value,
    "value": value_pattern,
    "values": values,
    "duration": duration,
    "size": size,
    "date": date,
    "pem": pem,
    "spki": spki,
    "format": placeholder_format,
    "text": plain_text,
    "id": text_of,
}
"""By the name that the schema gives."""
