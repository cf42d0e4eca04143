"""HTTP/1.1, as strictly as it is written: heads in, heads out, and how long a body is. No I/O.

Both sides are read by the same rules, and written anew: what was checked is what is sent. The gateway has its own parser; that this is
another one is the point, since a mistake of one alone lets nothing through.
"""

import http
import re

import msgspec

MAX_HEAD = 32 * 1024
MAX_RESPONSE_HEAD = 64 * 1024
MAX_LINE = 8 * 1024
MAX_FIELDS = 100

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_METHOD = re.compile(rb"[A-Z][A-Z0-9_-]{0,31}")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)

Fields = tuple[tuple[bytes, bytes], ...]
"""Names in lower case and values, in the order in which they came."""


class Malformed(Exception):
    """What came is not what HTTP/1.1 may be. The text is for people, and has no value of a field in it."""


class Head(msgspec.Struct, frozen=True):
    """The fields of a message, with what they say of its body and of the connection."""

    fields: Fields
    length: int | None
    """Octets of the body by `Content-Length`."""
    chunked: bool
    close: bool
    """The sender closes the connection behind this message."""

    def get(self, name: bytes) -> bytes | None:
        """The value of the field, the first one where there are several."""
        return next((value for one, value in self.fields if one == name), None)

    def without(self, *names: bytes) -> Fields:
        """The fields but those."""
        return tuple(field for field in self.fields if field[0] not in names)

    @property
    def end_to_end(self) -> Fields:
        """The fields that are for the other end: without those of the connection, and those that `Connection` nominates."""
        nominated = {
            option.strip().lower()
            for name, value in self.fields
            if name == b"connection"
            for option in value.split(b",")
        }
        return tuple(field for field in self.fields if field[0] not in HOP_BY_HOP and field[0] not in nominated)


class RequestHead(Head, frozen=True):
    """A request line and its fields."""

    method: bytes = b""
    target: bytes = b""

    @property
    def websocket(self) -> bool:
        """It asks to become a WebSocket."""
        return (self.get(b"upgrade") or b"").strip().lower() == b"websocket"


class ResponseHead(Head, frozen=True):
    """A status and its fields."""

    status: int = 0


def parse_request(head: bytes) -> RequestHead:
    """Reads a request's head, up to and with its empty line. Raises `Malformed`."""
    line, fields = _lines(head)
    parts = line.split(b" ")
    if len(parts) != 3 or parts[2] != b"HTTP/1.1":
        raise Malformed("the request line is not that of HTTP/1.1")
    method, target, _ = parts
    if not _METHOD.fullmatch(method) or method in (b"TRACE", b"TRACK", b"CONNECT"):
        raise Malformed("this method is not possible")
    if not _TARGET.fullmatch(target) or b"#" in target:
        raise Malformed("the target has characters that none may have")
    if not target.startswith(b"/") and (method, target) != (b"OPTIONS", b"*"):
        raise Malformed("the target is not a path")
    if sum(1 for name, _ in fields if name == b"host") != 1:
        raise Malformed("there is not exactly one Host")
    length, chunked = _framing(fields)
    return RequestHead(fields, length, chunked, _closes(fields), method, target)


def parse_response(head: bytes) -> ResponseHead:
    """Reads a response's head, up to and with its empty line. Raises `Malformed`."""
    line, fields = _lines(head)
    match = _STATUS.fullmatch(line)
    if match is None:
        raise Malformed("the status line is not that of HTTP/1")
    length, chunked = _framing(fields)
    old = match[1] == b"0"
    if old and chunked:
        raise Malformed("HTTP/1.0 has no chunks")
    return ResponseHead(fields, length, chunked, old or _closes(fields), int(match[2]))


def write_request(method: bytes, target: bytes, fields: Fields) -> bytes:
    """A request's head."""
    return b"%s %s HTTP/1.1\r\n%s\r\n" % (method, target, _write(fields))


def write_response(status: int, fields: Fields) -> bytes:
    """A response's head, with the phrase that belongs to the status: what the upstream wrote there is left out."""
    try:
        phrase = http.HTTPStatus(status).phrase.encode()
    except ValueError:
        phrase = b""
    return b"HTTP/1.1 %d %s\r\n%s\r\n" % (status, phrase, _write(fields))


def chunk_size(line: bytes) -> int:
    """The size that a chunk's first line announces, without its line end. Raises `Malformed`."""
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise Malformed("a chunk does not begin with its size")
    return int(match[1], 16)


def has_body(method: bytes, status: int) -> bool:
    """Whether a response to a request of this method has a body at all."""
    return method != b"HEAD" and status >= 200 and status not in (204, 304)


def _lines(head: bytes) -> tuple[bytes, Fields]:
    if not head.endswith(b"\r\n\r\n"):
        raise Malformed("the head does not end")
    first, *rest = head[:-4].split(b"\r\n")
    if len(rest) > MAX_FIELDS:
        raise Malformed(f"there are more than {MAX_FIELDS} fields")
    fields: list[tuple[bytes, bytes]] = []
    for line in (first, *rest):
        if len(line) > MAX_LINE:
            raise Malformed(f"a line has more than {MAX_LINE} octets")
        if b"\r" in line or b"\n" in line or b"\0" in line:
            raise Malformed("a line has a control character in it")
    for line in rest:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise Malformed("a field has no proper name")
        value = value.strip(b" \t")
        if not _VALUE.fullmatch(value):
            raise Malformed("a field has a control character in it")
        fields.append((name.lower(), value))
    return first, tuple(fields)


def _framing(fields: Fields) -> tuple[int | None, bool]:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    if lengths and codings:
        raise Malformed("it has both Content-Length and Transfer-Encoding")
    if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
        raise Malformed("Content-Length is not one number")
    if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
        raise Malformed("its Transfer-Encoding is not `chunked`")
    return (int(lengths[0]) if lengths else None), bool(codings)


def _closes(fields: Fields) -> bool:
    return any(
        option.strip().lower() == b"close"
        for name, value in fields
        if name == b"connection"
        for option in value.split(b",")
    )


def _write(fields: Fields) -> bytes:
    return b"".join(b"%s: %s\r\n" % field for field in fields)
