"""Files that survive a crash: written under a temporary name, flushed, then renamed into place.

Also what is needed beside it: digests, sparse copies, and the true size of a folder on disk.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hatchway.wire.small_files import sync_folder

_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a whole file in hex. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yields the (start, end) octets of a sparse file that may hold data; holes are left out."""
    size = os.fstat(descriptor).st_size
    position = 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole from here on
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end
        position = end


def sha256_sparse(path: Path) -> str:
    """Returns a digest of a sparse file's content in hex, without reading its holes.

    It covers the size and every 64 KiB block that is not all zero, with its offset: where the file system put holes makes no
    difference. It is not the plain SHA-256 of the file.
    """
    block = 1 << 16
    digest = hashlib.sha256()
    zeros = bytes(block)
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        digest.update(os.fstat(descriptor).st_size.to_bytes(8, "little"))
        done = 0
        for start, end in data_ranges(descriptor):
            for offset in range(max(done, start - start % block), end, block):
                data = os.pread(descriptor, block, offset)
                if data != zeros[: len(data)]:
                    digest.update(offset.to_bytes(8, "little"))
                    digest.update(data)
                done = offset + block
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Flushes a file's data and attributes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(temporary: Path, final: Path, *, file_mode: int, folder_mode: int = 0o755) -> None:
    """Makes a finished flat folder visible under its final name.

    Sets modes, flushes every file, then renames. A `final` that exists already stays as it is and the temporary folder is
    removed: a name says what its content is.
    """
    for path in temporary.iterdir():
        path.chmod(file_mode)
        sync_file(path)
    temporary.chmod(folder_mode)
    sync_folder(temporary)
    try:
        temporary.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        remove_tree(temporary)
        return
    sync_folder(final.parent)


def place(source: Path, target: Path) -> None:
    """Makes `target` another name of the finished file `source`; a sparse copy where they are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        sparse_copy(source, target)


def sparse_copy(source: Path, target: Path) -> None:
    """Copies a file and keeps its holes. Raises `OSError`."""
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        incoming, outgoing = reader.fileno(), writer.fileno()
        os.ftruncate(outgoing, os.fstat(incoming).st_size)
        for start, end in data_ranges(incoming):
            os.lseek(outgoing, start, os.SEEK_SET)
            while start < end:
                data = os.pread(incoming, min(_CHUNK, end - start), start)
                if not data:
                    break
                start += writer.write(data)


def size_on_disk(path: Path) -> int:
    """Returns the octets that a file, or a folder and all in it, takes on disk. What vanishes meanwhile counts nothing."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        total += path.lstat().st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            for child in path.iterdir():
                total += size_on_disk(child)
    return total


def remove_tree(folder: Path) -> None:
    """Removes a folder and all in it; nothing there is fine. Raises `OSError` when it cannot."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
