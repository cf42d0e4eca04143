"""Messages as JSON has them (protobuf's mapping): read with what it admits, and nothing that it does not.

A field stands under its name in camelCase or as the schema has it; null, and a field that is not there, are its default; unknown ones are
passed over. Octets are base64 of either alphabet, 64-bit numbers may be text.
"""

import base64
import binascii
import math
import re
from collections.abc import Mapping
from typing import Any

from hatchway.e2b.envd.connect import ConnectError, read

MAX_TEXT = 1024 * 1024
MAX_ENTRIES = 4096
MAX_VALUES = 20_000
"""Values in one message, whatever they are: small ones take many times their octets in memory."""
LARGE = 2 * 1024 * 1024
"""Octets beyond which a message is looked at before it is read: what it has may be long, but not many."""
_UNDERSCORE = re.compile(r"_([a-z0-9])")
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def of(octets: bytes) -> "Message":
    """The message that JSON stands for; nothing stands for an empty one. Raises `ConnectError`."""
    if len(octets) > LARGE and octets.count(b",") + octets.count(b"[") + octets.count(b"{") > MAX_VALUES:
        raise _too_many()
    value = read(octets) if octets.strip() else {}
    waiting, seen = [value], 0
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            inner = inner.values()
        elif not isinstance(inner, list):
            continue
        seen += len(inner)
        if seen > MAX_VALUES:
            raise _too_many()
        waiting.extend(inner)
    return Message(value, "")


class Message:
    """Reads the fields of one message. All raise `ConnectError("invalid_argument")` for a value that its type does not have."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(where or "message", "an object", value)
        self._fields: Mapping[str, Any] = value
        self._where = where

    def has(self, name: str) -> bool:
        """Whether a field is there."""
        return self._value(name) is not None

    def message(self, name: str) -> "Message | None":
        """A message, if it is there."""
        value = self._value(name)
        return None if value is None else Message(value, self._path(name))

    def required(self, name: str) -> "Message":
        """A message that must be there."""
        found = self.message(name)
        if found is None:
            raise ConnectError("invalid_argument", f"{self._path(name)} is required")
        return found

    def text(self, name: str) -> str | None:
        """Text, if it is there."""
        value = self._value(name)
        if value is None:
            return None
        return self._text(value, self._path(name))

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        value = self._value(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > MAX_ENTRIES:
            raise _wrong(self._path(name), f"a list of at most {MAX_ENTRIES} texts", value)
        return [self._text(one, self._path(name)) for one in value]

    def text_map(self, name: str) -> dict[str, str]:
        """A map of texts."""
        value = self._value(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
            raise _wrong(self._path(name), f"an object of at most {MAX_ENTRIES} texts", value)
        return {key: self._text(one, f"{self._path(name)}.{key[:64]}") for key, one in value.items()}

    def flag(self, name: str) -> bool | None:
        """True or false, if it is there."""
        value = self._value(name)
        if value is None or isinstance(value, bool):
            return value
        raise _wrong(self._path(name), "true or false", value)

    def unsigned(self, name: str, bits: int = 32) -> int | None:
        """A number from 0, if it is there; as a number without fraction, or as text."""
        value = self._value(name)
        if value is None:
            return None
        number = _integer(value)
        if number is None or not 0 <= number < 2**bits:
            raise _wrong(self._path(name), f"a number of {bits} bits", value)
        return number

    def octets(self, name: str) -> bytes | None:
        """Octets, if they are there."""
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, str):
            plain = value.rstrip("=").replace("-", "+").replace("_", "/")
            try:
                return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
            except (binascii.Error, ValueError):
                pass
        raise _wrong(self._path(name), "base64", value)

    def choice(self, name: str, numbers: Mapping[str, int]) -> str | None:
        """The name of one of several, which its number may stand for, if it is there."""
        value = self._value(name)
        if value is None or (isinstance(value, str) and value in numbers):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            for one, number in numbers.items():
                if number == value:
                    return one
        raise _wrong(self._path(name), "one of " + ", ".join(numbers), value)

    def one_of(self, *names: str) -> str | None:
        """Which of several fields is there, of which one may be."""
        found = [name for name in names if self.has(name)]
        if len(found) > 1:
            raise ConnectError("invalid_argument", f"{self._path(found[0])} and {found[1]} exclude each other")
        return found[0] if found else None

    def _value(self, name: str) -> Any:
        camel = _UNDERSCORE.sub(lambda match: match[1].upper(), name)
        if camel != name and camel in self._fields and name in self._fields:
            raise ConnectError("invalid_argument", f"duplicate field {self._path(name)}")
        return self._fields.get(camel, self._fields.get(name))

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    @staticmethod
    def _text(value: object, path: str) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise _wrong(path, f"text of at most {MAX_TEXT} characters", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _wrong(path, "text of whole characters", value) from None
        return value


def encoded(octets: bytes) -> str:
    """Octets as JSON has them."""
    return base64.b64encode(octets).decode()


def _integer(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _too_many() -> ConnectError:
    return ConnectError("invalid_argument", f"the message has more than {MAX_VALUES} values")


def _wrong(path: str, wanted: str, value: object) -> ConnectError:
    return ConnectError("invalid_argument", f"invalid value for {path}: {repr(value)[:80]} is not {wanted}")
