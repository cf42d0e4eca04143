"""What the frames of a client of HTTP/2 cost, before the library sees them: cut into pieces of one turn each, counted, and bounded.

Pure. The library tells of what a frame means, and of many frames nothing at all (acknowledgements, frames of streams that are over, pieces of
a head): so they are counted by what is on the wire.
"""

import time
from collections.abc import Callable, Iterator

import hpack
import hpack.exceptions

from hatchway.egress.http import heads
from hatchway.egress.shares import Shares, allowance

AT_ONCE = 16
"""Frames in one turn. One that opens a stream is a turn of its own."""
OCTETS_AT_ONCE = 32 * 1024
MAX_CONTROL, MAX_RESETS, MAX_SMALL = 2_000, 100, 20_000
"""Of one connection, in `shares.WITHIN_S`: frames that ask for nothing; streams given up; frames with next to nothing of a body."""
SMALL = 256
"""A piece of a body with fewer octets is one of those, unless it is the last."""
CREDIT = 512
"""Octets that were sent, and may be acknowledged by one frame that makes room for more."""
MAX_CREDIT = 64 * 1024 * 1024
MAX_BLOCK = heads.MAX_HEAD + 4 * 1024
"""Octets of a head as it is packed, in all its frames."""
MAX_SETTINGS = 64
"""Settings in one frame."""
MAX_UNPACKED = 2 * heads.MAX_FIELDS
"""Fields of a head that are unpacked. One that has more than may be is refused by what it is for, one with more than this with its connection."""
MAX_RESIZES = 2
"""Of the table of fields, in one head: more than two say nothing that two could not (RFC 7541, 4.2)."""

_PREFACE = 24
_HEAD = 9
_DATA, _HEADERS, _RESET, _SETTINGS, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 8, 9
_END_STREAM, _PADDED = 1, 8


class TooMuch(Exception):
    """More than a client may send: the connection ends. Its text says of what."""


class Frames:
    """The frames of one connection."""

    def __init__(self, shares: Shares, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = shares
        self._preface = _PREFACE
        self._head = bytearray()
        self._left = 0
        self._block = 0
        self._credit = 0
        self._control = allowance(MAX_CONTROL, clock)
        self._resets = allowance(MAX_RESETS, clock)
        self._small = allowance(MAX_SMALL, clock)

    def sent(self, octets: int) -> None:
        """So many octets of answers went to the client, which may say that it took them."""
        self._credit = min(MAX_CREDIT, self._credit + octets)

    def turns(self, data: bytes) -> Iterator[bytes]:
        """Cuts what came into pieces of one turn each. Raises `TooMuch`."""
        begin = weight = 0
        at = min(self._preface, len(data))
        self._preface -= at
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
            else:
                step = min(_HEAD - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                at += step
                if len(self._head) == _HEAD:
                    self._left = int.from_bytes(self._head[:3], "big")
                    weight += self._take(self._left, self._head[3], self._head[4])
                    self._head.clear()
            if weight >= AT_ONCE or at - begin >= OCTETS_AT_ONCE:
                yield data[begin:at]
                begin, weight = at, 0
        if begin < at:
            yield data[begin:at]

    def _take(self, length: int, kind: int, flags: int) -> int:
        """Counts a frame; returns how much of a turn it takes."""
        if kind == _DATA:
            octets = length - 256 if flags & _PADDED else length
            if octets < SMALL and not flags & _END_STREAM:
                self._use("small", self._small.take() and self._shares.small.take())
        elif kind == _HEADERS:
            self._begin_block(length)
            return AT_ONCE
        elif kind == _RESET:
            self._use("resets", self._resets.take() and self._shares.resets.take())
        elif kind == _WINDOW and self._credit >= CREDIT:
            self._credit -= CREDIT
        else:
            if kind == _CONTINUATION:
                self._begin_block(self._block + length)
            elif kind == _SETTINGS and length > 6 * MAX_SETTINGS:
                raise TooMuch(f"more than {MAX_SETTINGS} settings at once")
            self._use("control", self._control.take() and self._shares.control.take())
        return 1

    def _begin_block(self, octets: int) -> None:
        self._block = octets
        if octets > MAX_BLOCK:
            raise TooMuch(f"a head that takes more than {MAX_BLOCK} octets as it is packed")

    def _use(self, what: str, let: bool) -> None:
        if not let:
            raise TooMuch(_TOO_MANY[what])


_TOO_MANY = {
    "control": "too many frames that ask for nothing",
    "resets": "too many streams that are given up",
    "small": "too many frames with next to nothing of a body",
}


class Unpacker(hpack.Decoder):
    """The library's, with bounds for what costs time and not octets: fields of nearly nothing, and a table that is resized again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.max_header_list_size = heads.MAX_HEAD + 32 * heads.MAX_FIELDS
        self._fields = self._resizes = 0

    def decode(self, data: bytes, raw: bool = False) -> "list[tuple[bytes, bytes]]":  # type: ignore[override]  # as it is for `raw`
        """See `hpack.Decoder`."""
        self._fields = self._resizes = 0
        return super().decode(data, raw)  # type: ignore[return-value]

    def _update_encoding_context(self, data: "bytes | memoryview") -> int:
        self._resizes += 1
        if self._resizes > MAX_RESIZES:
            raise hpack.exceptions.OversizedHeaderListError("the table of fields is resized again and again")
        return super()._update_encoding_context(data)

    def _decode_indexed(self, data: "bytes | memoryview") -> "tuple[hpack.HeaderTuple, int]":
        self._count()
        return super()._decode_indexed(data)

    def _decode_literal(self, data: "bytes | memoryview", should_index: bool) -> "tuple[hpack.HeaderTuple, int]":
        self._count()
        return super()._decode_literal(data, should_index)

    def _count(self) -> None:
        self._fields += 1
        if self._fields > MAX_UNPACKED:
            raise hpack.exceptions.OversizedHeaderListError(f"there are more than {MAX_UNPACKED} fields")
