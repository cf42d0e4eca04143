"""Writes an empty qcow2 image, so that a sandbox's disk layer costs microseconds and no `qemu-img` process.

The format is QEMU's docs/interop/qcow2.txt, version 3: big-endian; here the header, one refcount table cluster, one refcount
block and the level-1 table, all clusters 64 KiB, no level-2 table and no data.
"""

import os
import struct
from pathlib import Path

CLUSTER = 65_536
_L2_ENTRIES = CLUSTER // 8
_BLOCK_REFCOUNTS = CLUSTER // 2
MAX_SIZE = 64 * 1024**4
"""Octets: with 64 KiB clusters the level-1 table of 64 TiB is 1 MiB, far below the format's own bound of 32 MiB."""

_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII8s")
_EXTENSION_BACKING_FORMAT = 0xE2792ACA
_EXTENSION_END = 0


def empty_image(size: int, backing_name: str = "", backing_format: str = "") -> bytes:
    """Returns the octets of an image of `size` octets (a multiple of 512) without any data of its own.

    `backing_name` is what tools show and look for; QEMU here gets the chain as explicit nodes and ignores it. Raises `ValueError`.
    """
    name = backing_name.encode()
    if not 0 < size <= MAX_SIZE or size % 512:
        raise ValueError(f"{size} octets is no size for a disk image")
    if len(name) > 1023:
        raise ValueError("the backing file's name is longer than 1023 octets")
    l1_entries = -(-size // (CLUSTER * _L2_ENTRIES))
    l1_clusters = -(-(l1_entries * 8) // CLUSTER)
    clusters = 3 + l1_clusters
    if clusters > _BLOCK_REFCOUNTS:
        raise ValueError("the level-1 table does not fit the first refcount block")
    extensions = b""
    if name and backing_format:
        kind = backing_format.encode()
        extensions += struct.pack(">II", _EXTENSION_BACKING_FORMAT, len(kind)) + kind + bytes(-len(kind) % 8)
    extensions += struct.pack(">II", _EXTENSION_END, 0)
    name_offset = _HEADER.size + len(extensions) if name else 0
    header = _HEADER.pack(
        b"QFI\xfb",
        3,
        name_offset,
        len(name),
        16,  # cluster bits
        size,
        0,  # no encryption
        l1_entries,
        3 * CLUSTER,  # level-1 table
        1 * CLUSTER,  # refcount table
        1,  # its clusters
        0,  # snapshots
        0,
        0,  # incompatible features
        0,  # compatible
        0,  # autoclear
        4,  # 16-bit refcounts
        _HEADER.size,
        bytes(8),  # compression type (zlib) and padding
    )
    first = header + extensions + name
    refcount_table = struct.pack(">Q", 2 * CLUSTER)
    refcounts = struct.pack(">H", 1) * clusters
    return b"".join(
        part.ljust(length, b"\0")
        for part, length in (
            (first, CLUSTER),
            (refcount_table, CLUSTER),
            (refcounts, CLUSTER),
            (b"", l1_clusters * CLUSTER),
        )
    )


def virtual_size(fd: int) -> int:
    """Returns the size in octets that an image's header states.

    The header may have been written by a hostile VMM: nothing else of it is believed. Raises `ValueError` when it is no qcow2.
    """
    head = os.pread(fd, _HEADER.size, 0)
    if len(head) < _HEADER.size or head[:4] != b"QFI\xfb":
        raise ValueError("not a qcow2 image")
    size = _HEADER.unpack(head)[5]
    if not isinstance(size, int) or not 0 < size <= MAX_SIZE:
        raise ValueError("the image states an impossible size")
    return size


def create(path: Path, size: int, backing_name: str = "", backing_format: str = "") -> None:
    """Makes an image file (mode 0600) under a temporary name, and renames it. Not durable: the caller flushes it.

    Sparse where the image is zero. Does nothing when `path` exists. Raises `OSError` (ENOSPC), `ValueError`.
    """
    if path.exists():
        return
    octets = empty_image(size, backing_name, backing_format)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.ftruncate(fd, len(octets))
            for offset in range(0, len(octets), CLUSTER):
                piece = octets[offset : offset + CLUSTER].rstrip(b"\0")
                if piece:
                    os.pwrite(fd, piece, offset)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
