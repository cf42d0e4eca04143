"""Small files that one process of ours leaves for another, or for its own next life: there is the old content or the new, never a part."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from hatchway.wire.fault_points import reached


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Replaces what is at `path` at once. Raises `OSError` (ENOSPC among them), leaving the former content.

    What is `durable` is also there after a crash of the host, and costs two flushes. Writers of one file exclude each other by their
    own means.
    """

    def fill(fd: int) -> None:
        rest = memoryview(content)
        while rest:  # a disk that becomes full takes a part first
            rest = rest[os.write(fd, rest) :]

    _replace(path, fill, mode, durable)


def copy_file(source: Path, path: Path, *, mode: int = 0o600, durable: bool = True) -> None:
    """Like `replace_file`, with what another file has; none of it comes into this process. Raises `OSError`, also where the source is a link."""
    given = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def fill(fd: int) -> None:
        offset = 0
        while sent := os.sendfile(fd, given, offset, 1 << 20):
            offset += sent

    try:
        _replace(path, fill, mode, durable)
    finally:
        os.close(given)


def _replace(path: Path, fill: Callable[[int], None], mode: int, durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, mode)
            reached("file", path.name)
            fill(fd)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    reached("replaced", path.name)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's names, so that what was renamed in it stays so after a crash of the host. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
