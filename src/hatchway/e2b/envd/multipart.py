"""Forms (`multipart/form-data`) as they come: parts with their names and octets, in constant memory. No I/O."""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from hatchway.e2b.errors import E2bError

MAX_HEADER = 8 * 1024
"""Octets of one header of a part: a name may have 4,095, each of which may be escaped."""
_PARAMETER = re.compile(rb';\s*([A-Za-z0-9*_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s"]*))', re.DOTALL)
_ESCAPED = re.compile(rb'\\([()<>@,;:\\"/\[\]?=])')


@dataclass(frozen=True, slots=True)
class Begin:
    """A part begins."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class End:
    """It is whole."""


Event = Begin | bytes | End


class Form:
    """Events out of the octets of a form."""

    def __init__(self, content_type: str) -> None:
        """Raises `E2bError` 400 for what is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise _malformed("it has no boundary")
        self._found: deque[Event] = deque()
        self._headers: dict[bytes, bytes] = {}
        self._field = self._value = b""
        self._over = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._headers.clear,
                    "on_part_data": self._data,
                    "on_part_end": lambda: self._found.append(End()),
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._begin,
                    "on_end": self._end,
                },
                max_header_size=MAX_HEADER,
            )
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def feed(self, octets: bytes) -> Iterator[Event]:
        """Yields what is known by now. Raises `E2bError` 400."""
        try:
            self._parser.write(octets)
        except FormParserError as error:
            raise _malformed(str(error)) from None
        while self._found:
            yield self._found.popleft()

    def finish(self) -> None:
        """Nothing more will come. Raises `E2bError` 400 when it was cut off."""
        if not self._over:
            raise _malformed("unexpected EOF")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if end > start:
            self._found.append(data[start:end])

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _begin(self) -> None:
        found = {
            match[1].lower(): _ESCAPED.sub(rb"\1", match[2]) if match[2] is not None else match[3]
            for match in _PARAMETER.finditer(self._headers.get(b"content-disposition", b""))
        }
        try:
            name, filename = found.get(b"name", b"").decode(), found.get(b"filename")
            self._found.append(Begin(name, None if filename is None else filename.decode()))
        except UnicodeDecodeError:
            raise _malformed("the name of a part is not UTF-8") from None

    def _end(self) -> None:
        self._over = True


def _malformed(what: str) -> E2bError:
    return E2bError(400, f"error parsing multipart form: {what[:200]}")
