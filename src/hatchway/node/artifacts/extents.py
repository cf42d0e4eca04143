"""Sparse octets as a stream: what of a disk or a memory differs from what lies below it, in ascending order.

```
record := offset (u64, big-endian) | length (u32) | kind (u8) | octets (`length` of them, of kind DATA only)
```
A stream ends with one record of kind END, whose offset is the size of the whole. What no record names is as below: zero in a
memory, the template's empty file system in a disk. Records neither overlap nor go back, and begin and end at multiples of `GRAIN`.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

DATA, ZERO, END = 1, 2, 3
GRAIN = 65_536
"""Octets: the cluster of a disk's layer, and the step in which zeros are looked for."""
MAX_DATA = 1 << 20
"""Octets of one record."""
MAX_ZERO = 1 << 30
HEAD = struct.Struct(">QIB")


class ExtentError(ValueError):
    """The stream is not what it should be; the text says where."""


@dataclass(frozen=True)
class Extent:
    """Octets at an offset; `data` is None where they are zero."""

    offset: int
    length: int
    data: bytes | None


class Source(Protocol):
    """What octets are read from."""

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` octets, b"" at the end."""


def encode(extents: Iterable[Extent], size: int) -> Iterator[bytes]:
    """Yields the stream of `extents`, of a whole of `size` octets."""
    for extent in extents:
        if extent.data is None:
            done = 0
            while done < extent.length:
                step = min(MAX_ZERO, extent.length - done)
                yield HEAD.pack(extent.offset + done, step, ZERO)
                done += step
        else:
            yield HEAD.pack(extent.offset, extent.length, DATA)
            yield extent.data
    yield HEAD.pack(size, 0, END)


def decode(source: Source, size: int, data_bound: int) -> Iterator[Extent]:
    """Yields what a stream says, of a whole that must have `size` octets, with at most `data_bound` octets of data.

    Raises `ExtentError`, at the first octet that is not as it should be.
    """
    reached = data = 0
    while True:
        offset, length, kind = HEAD.unpack(_exactly(source, HEAD.size))
        if kind == END:
            if (offset, length) != (size, 0):
                raise ExtentError(f"the stream ends at {offset} of {size} octets")
            if source.read(1):
                raise ExtentError("there is more behind the end of the stream")
            return
        if kind not in (DATA, ZERO) or not 0 < length <= (MAX_DATA if kind == DATA else MAX_ZERO):
            raise ExtentError(f"a record of kind {kind} and {length} octets")
        if offset < reached or offset % GRAIN or offset + length > size:
            raise ExtentError(f"a record at {offset}, where {reached} to {size} is left")
        reached = offset + length
        if reached % GRAIN and reached != size:
            raise ExtentError(f"a record that ends at {reached}")
        octets = None
        if kind == DATA:
            data += length
            if data > data_bound:
                raise ExtentError(f"more than the {data_bound} octets of data that were announced")
            octets = _exactly(source, length)
        yield Extent(offset, length, octets)


def write_sparse(fd: int, extents: Iterable[Extent]) -> None:
    """Writes extents to a file that is a hole everywhere, which it stays where they are zero. Raises `OSError` (ENOSPC)."""
    for extent in extents:
        if extent.data is not None:
            write_all(fd, extent.data, extent.offset)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`. Raises `OSError`."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def grains(offset: int, data: bytes, *, zeros: bool) -> Iterator[Extent]:
    """Cuts octets at `offset`, a multiple of `GRAIN`, into what is zero and what is not; with `zeros` the former is told too."""
    start = 0
    while start < len(data):
        zero = _is_zero(data, start)
        end = start + GRAIN
        while end < len(data) and end - start < MAX_DATA and _is_zero(data, end) is zero:
            end += GRAIN
        end = min(end, len(data))
        if not zero:
            yield Extent(offset + start, end - start, data[start:end])
        elif zeros:
            yield Extent(offset + start, end - start, None)
        start = end


_ZEROS = bytes(GRAIN)


def _is_zero(data: bytes, start: int) -> bool:
    piece = data[start : start + GRAIN]
    return piece == _ZEROS if len(piece) == GRAIN else not any(piece)


def _exactly(source: Source, size: int) -> bytes:
    data = source.read(size)
    while 0 < len(data) < size:
        more = source.read(size - len(data))
        if not more:
            break
        data += more
    if len(data) != size:
        raise ExtentError("the stream is cut off")
    return data
