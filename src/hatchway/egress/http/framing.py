"""Bodies of HTTP/1.1 messages: where they end. Octets in, octets of the body out; no input or output.

A body that came in chunks goes on in chunks of our own making; its extensions and trailers end here.
"""

import re
from typing import Protocol

from hatchway.egress.http.heads import Unclear

MAX_TRAILERS = 8 * 1024
LAST_CHUNK = b"0\r\n\r\n"

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})", re.ASCII)
_SIZE_AND_MORE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~]*)?", re.ASCII)
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*")
_MAX_SIZE_LINE = 17
_MAX_EXTENSION = 256
_MANY = 512
"""Chunks that are taken in one go: others have their turn between."""


class Body(Protocol):
    """A body that is coming in. `take` says what of the octets that came belongs to it; the rest is the next message's."""

    done: bool
    ready: bool
    """There is more to `take` out of what came already."""

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns octets of the body and, once it is `done`, what came behind it. Raises `Unclear`."""
        ...


class Measured:
    """A body of so many octets."""

    ready = False

    def __init__(self, length: int) -> None:
        self.left = length
        self.done = not length

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """See `Body`."""
        if len(data) < self.left:
            self.left -= len(data)
            return data, b""
        piece, rest = data[: self.left], data[self.left :]
        self.left, self.done = 0, True
        return piece, rest


class ToEnd:
    """A body that ends with its connection: nobody can tell whether it is whole. `done` is set by who sees the end."""

    done = False
    ready = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """See `Body`."""
        return data, b""


class Chunked:
    """A body in chunks. `strict`: chunk extensions, which nobody needs and parsers disagree about, are refused."""

    def __init__(self, *, strict: bool) -> None:
        self.done = False
        self.ready = False
        self._held = b""
        self._left = 0
        self._state = "size"
        self._trailers = 0
        self._size = _SIZE if strict else _SIZE_AND_MORE
        self._max_line = _MAX_SIZE_LINE if strict else _MAX_EXTENSION

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """See `Body`."""
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        at, self.ready = 0, False
        for _ in range(_MANY):
            before = at, self._state
            at = self._step(data, at, pieces)
            if self.done:
                return b"".join(pieces), data[at:]
            if before == (at, self._state):  # it needs more
                break
        else:
            self.ready = True
        self._held = data[at:]
        return b"".join(pieces), b""

    def _step(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """One step of the grammar at `at`; returns where the next one begins."""
        if self._state == "data":
            piece = data[at : at + self._left]
            if piece:
                pieces.append(piece)
                self._left -= len(piece)
            if not self._left:
                self._state = "data end"
            return at + len(piece)
        if self._state == "data end":
            end = data[at : at + 2]
            if not b"\r\n".startswith(end):
                raise Unclear("a chunk is longer than it says")
            if len(end) == 2:
                self._state = "size"
                return at + 2
            return at
        if self._state == "size":
            line, behind = self._line(data, at, self._max_line)
            if line is None:
                return at
            size = self._size.fullmatch(line)
            if size is None:
                raise Unclear("the size of a chunk is not 1 to 15 hexadecimal digits")
            self._left = int(size[1], 16)
            self._state = "data" if self._left else "trailers"
            return behind
        line, behind = self._line(data, at, MAX_TRAILERS - self._trailers)
        if line is None:
            return at
        if not line:
            self.done = True
        elif not _TRAILER.fullmatch(line):
            raise Unclear("a trailer is no header")
        self._trailers += behind - at
        return behind

    @staticmethod
    def _line(data: bytes, at: int, limit: int) -> tuple[bytes | None, int]:
        """The line at `at` without its CRLF, and where the next begins; None: it has not come yet."""
        end = data.find(b"\n", at, at + limit + 2)
        if end < 0:
            if len(data) - at > limit:
                raise Unclear("a line between chunks, or the trailers, are too long")
            return None, at
        if end == at or data[end - 1] != 0x0D:
            raise Unclear("a line between chunks ends in a bare LF")
        return data[at : end - 1], end + 1


def of_request(length: int | None) -> Body:
    """The body of a request whose head says so (`RequestHead.length`)."""
    return Chunked(strict=True) if length is None else Measured(length)


def of_answer(length: int | None, *, chunked: bool) -> Body:
    """The body of an answer whose head says so (`AnswerHead`)."""
    if length is not None:
        return Measured(length)
    return Chunked(strict=False) if chunked else ToEnd()


def chunk(piece: bytes) -> bytes:
    """Octets of a body as one chunk; not for none, which would end it."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)
