"""The layers of a sandbox's disk, flattened to what differs from the template's empty file system, and made from that again.

The topmost layer was written by a machine monitor that may have been taken over: its tables are read within bounds, and what
they may name is octets of the file itself and nothing else. The format is QEMU's docs/interop/qcow2.txt.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from hatchway.node.artifacts.extents import GRAIN, Extent, grains, write_all
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm import qcow2
from hatchway.node.vmm.seam import VmmError

CLUSTER = qcow2.CLUSTER
_ENTRIES = CLUSTER // 8
_SPAN = CLUSTER * _ENTRIES
"""Octets of the disk that one level-2 table covers: 512 MiB."""
_OFFSET = 0x00FF_FFFF_FFFF_FE00
_COPIED, _COMPRESSED, _ZERO = 1 << 63, 1 << 62, 1
_HEAD = struct.Struct(">4sIQIIQIIQ")
_INCOMPATIBLE_AT = 72
_TABLE = struct.Struct(f">{_ENTRIES}Q")
MAX_SIZE = 8 * 1024**4
"""Octets of a disk: one cluster of reference counts' table covers twice as much."""

assert CLUSTER == GRAIN


def flattened(disk: disks.Disk) -> Iterator[Extent]:
    """Yields what a disk has that the template's empty file system, which the archive does not carry, has not.

    Constant memory. Raises `VmmError` for a layer that is damaged, `OSError`.
    """
    with ExitStack() as opened:
        fds: list[int] = []
        for layer in disk.layers:
            fd = os.open(disk.folder / layer.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            opened.callback(os.close, fd)
            fds.append(fd)
        formats = [layer.format for layer in disk.layers]
        if formats[0] != "raw" or any(kind != "qcow2" for kind in formats[1:]) or len(formats) < 2:
            raise VmmError("The layers of the disk are not in an order that is known.")
        yield from _merged([_Qcow2(fd, layer.name) for fd, layer in zip(fds[1:], disk.layers[1:], strict=True)], fds[0])


def flattened_raw(top: Path, lowest: Path) -> Iterator[Extent]:
    """The same for a disk of one raw file, made from the empty file system `lowest`."""
    with top.open("rb", buffering=0) as whole, lowest.open("rb", buffering=0) as below:
        size = os.fstat(whole.fileno()).st_size
        for start, end in _windows(size, whole.fileno(), below.fileno()):
            data = _padded(whole.fileno(), start, end - start)
            under = _padded(below.fileno(), start, end - start)
            for offset in range(0, len(data), GRAIN):
                piece = data[offset : offset + GRAIN]
                if piece != under[offset : offset + GRAIN]:
                    yield from grains(start + offset, piece, zeros=True)


def write_layer(path: Path, size: int, extents: Iterable[Extent]) -> None:
    """Makes a layer over the template's empty file system from what differs from it; durable. Raises `OSError` (ENOSPC), `ValueError`."""
    if not 0 < size <= MAX_SIZE or size % CLUSTER:
        raise ValueError(f"{size} octets is no size of a disk")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _Writer(fd, size).write(extents)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_raw(path: Path, lowest: Path, size: int, extents: Iterable[Extent]) -> None:
    """Makes the whole disk as one raw file from a copy of the empty file system; durable. Raises `OSError` (ENOSPC)."""
    disks.copy_sparse(lowest, path, durable=False)
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        for extent in extents:
            if extent.data is not None:
                write_all(fd, extent.data, extent.offset)
                continue
            for start in range(0, extent.length, GRAIN):
                length = min(GRAIN, extent.length - start)
                if any(os.pread(fd, length, extent.offset + start)):
                    write_all(fd, bytes(length), extent.offset + start)
        os.fsync(fd)
    finally:
        os.close(fd)


class _Qcow2:
    """One layer, of which only the tables that are needed are in memory."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self._name = name
        try:
            self.size = qcow2.virtual_size(fd)
        except ValueError as error:
            raise VmmError(f"The disk's layer {name} is damaged: {error}.") from error
        head = os.pread(fd, _INCOMPATIBLE_AT + 8, 0)
        _, version, _, _, bits, _, crypt, entries, self._l1 = _HEAD.unpack_from(head)
        needed = -(-self.size // _SPAN)
        incompatible = struct.unpack_from(">Q", head, _INCOMPATIBLE_AT)[0] if len(head) >= _INCOMPATIBLE_AT + 8 else 1
        if version != 3 or bits != 16 or crypt or incompatible or entries < needed or self.size > MAX_SIZE:
            raise VmmError(f"The disk's layer {name} is of a form that this version does not read.")
        self._file = os.fstat(fd).st_size
        if self._l1 + needed * 8 > self._file:  # also what is no offset of a file at all
            raise self._damaged()

    def table(self, number: int) -> tuple[int, ...] | None:
        """The level-2 table of the span `number`; None where the layer has nothing there. Raises `VmmError`."""
        if number * _SPAN >= self.size:
            return None
        raw = os.pread(self.fd, 8, self._l1 + number * 8)
        if len(raw) != 8:
            raise self._damaged()
        at = int.from_bytes(raw, "big") & _OFFSET
        if at == 0:
            return None
        table = os.pread(self.fd, CLUSTER, at) if at % CLUSTER == 0 and at < self._file else b""
        if len(table) != CLUSTER:
            raise self._damaged()
        return _TABLE.unpack(table)

    def cluster(self, entry: int) -> bytes:
        """The octets behind an entry of a level-2 table. Raises `VmmError`."""
        at = entry & _OFFSET
        if entry & _COMPRESSED or at % CLUSTER or at >= self._file:
            raise self._damaged()
        return _padded(self.fd, at, CLUSTER)

    def _damaged(self) -> VmmError:
        return VmmError(f"The tables of the disk's layer {self._name} are damaged.")


def _merged(layers: list[_Qcow2], lowest: int) -> Iterator[Extent]:
    size = layers[-1].size
    below = os.fstat(lowest).st_size
    for number in range(-(-size // _SPAN)):
        tables = [(layer, table) for layer in reversed(layers) if (table := layer.table(number)) is not None]
        if not tables:
            continue
        for index in range(_ENTRIES):
            offset = number * _SPAN + index * CLUSTER
            if offset >= size:
                return
            for layer, table in tables:
                entry = table[index]
                if not entry & (_OFFSET | _COMPRESSED | _ZERO) or offset >= layer.size:
                    continue
                length = min(CLUSTER, size - offset)
                zeros = offset < below
                if entry & _ZERO:
                    if zeros:
                        yield Extent(offset, length, None)
                else:
                    yield from grains(offset, layer.cluster(entry)[:length], zeros=zeros)
                break


class _Writer:
    """Writes an image from front to back: data and level-2 tables as they come, reference counts at the end."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size
        self._l1 = [0] * -(-size // _SPAN)
        self._next = 3 * CLUSTER + -(-len(self._l1) * 8 // CLUSTER) * CLUSTER
        self._span = -1
        self._table: list[int] = []

    def write(self, extents: Iterable[Extent]) -> None:
        """Writes it all."""
        for extent in extents:
            for start in range(0, extent.length, CLUSTER):
                entry = self._enter(extent.offset + start)
                if extent.data is None:
                    self._table[entry] = _ZERO
                else:
                    self._table[entry] = _COPIED | self._append(extent.data[start : start + CLUSTER])
        self._leave()
        self._finish()

    def _enter(self, offset: int) -> int:
        span = offset // _SPAN
        if span != self._span:
            self._leave()
            self._span, self._table = span, [0] * _ENTRIES
        return (offset % _SPAN) // CLUSTER

    def _leave(self) -> None:
        if self._span >= 0:
            self._l1[self._span] = _COPIED | self._append(_TABLE.pack(*self._table))

    def _append(self, data: bytes) -> int:
        at = self._next
        write_all(self._fd, data, at)
        self._next += CLUSTER
        return at

    def _finish(self) -> None:
        first = qcow2.empty_image(self._size, disks.LOWEST, "raw")[:CLUSTER]
        used = self._next // CLUSTER
        per_block = CLUSTER // 2
        blocks = 1
        while blocks * per_block < used + blocks - 1:  # the first one has a place of its own, the others are appended
            blocks += 1
        counted = used + blocks - 1
        places = [2 * CLUSTER, *(self._next + number * CLUSTER for number in range(blocks - 1))]
        for number, at in enumerate(places):
            here = min(per_block, counted - number * per_block)
            write_all(self._fd, struct.pack(">H", 1) * here, at)
        os.ftruncate(self._fd, counted * CLUSTER)
        write_all(self._fd, struct.pack(f">{len(places)}Q", *places), CLUSTER)
        write_all(self._fd, struct.pack(f">{len(self._l1)}Q", *self._l1), 3 * CLUSTER)
        write_all(self._fd, first, 0)


def _padded(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    while 0 < len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data + bytes(length - len(data))


def _windows(size: int, *fds: int) -> Iterator[tuple[int, int]]:
    """Ranges of up to 1 MiB, aligned, in which any of the files has data."""
    offset = 0
    while offset < size:
        starts = []
        for fd in fds:
            try:
                starts.append(os.lseek(fd, offset, os.SEEK_DATA))
            except OSError:
                continue
        if not starts:
            return
        offset = max(offset, min(starts) // GRAIN * GRAIN)
        end = min(offset + (1 << 20), size)
        if offset < end:
            yield offset, end
        offset = end
