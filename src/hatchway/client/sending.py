"""What is uploaded from this machine: a file as it is, a folder as a tar stream that is made as it goes.

Regular files, folders and symbolic links as such are sent; no link inside a folder is followed, so nothing from outside of it
gets in. Sockets, devices and the like are left out and counted.
"""

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .bodies import PIECE, Body, read_failed
from .errors import InvalidRequest, TransferFailed

Progress: TypeAlias = Callable[[int, str], None]
"""Called on the way with the octets so far and the name of the file in hand."""

_BLOCK = 512
_END = bytes(20 * _BLOCK)


def quiet(_done: int, _name: str) -> None:
    """The progress that nobody watches."""


@dataclass
class Source:
    """A file or folder here. `mode` are the permission bits of a file."""

    path: str
    is_dir: bool
    mode: int
    body: Body
    skipped: int = 0


def source_of(local: str | os.PathLike[str], progress: Progress | None) -> Source:
    """Returns the file or folder `local` as something to send.

    Raises `InvalidRequest("no_such_local_file")` when there is none, or when it is neither file nor folder.
    """
    path = os.fspath(local)
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(
            "no_such_local_file", f"{path} cannot be read: {reason}", "Give a file or folder."
        ) from None
    told = progress or quiet
    if stat.S_ISDIR(status.st_mode):
        source = Source(path, True, 0o755, Body(tuple, None, again=True))
        source.body = Body(lambda: _folder(source, told), None, again=True)
        return source
    if not stat.S_ISREG(status.st_mode):
        raise InvalidRequest(
            "no_such_local_file", f"{path} is neither a file nor a folder.", "Open it and give it as content."
        )
    return Source(path, False, status.st_mode & 0o777, Body(lambda: _file(path, told), status.st_size, again=True))


def _file(path: str, progress: Progress) -> Iterator[bytes]:
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE):
                done += len(piece)
                yield piece
                progress(done, path)
    except OSError as error:
        raise read_failed(error, path) from None


def _folder(source: Source, progress: Progress) -> Iterator[bytes]:
    source.skipped = 0
    done = 0
    try:
        for member, path in _members(source):
            # Only what is read tells how large a file is: its header comes with its first piece.
            if not member.isreg():
                yield _header(member)
                continue
            yield from _content(member, path)
            done += member.size
            progress(done, member.name)
    except OSError as error:
        raise read_failed(error, source.path) from None
    yield _END


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _members(source: Source) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Yields what is to be sent, folders before what is in them, in a stable order."""
    waiting = [("", source.path)]
    while waiting:
        inside, path = waiting.pop()
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        folders = []
        for entry in found:
            name = f"{inside}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            member = tarfile.TarInfo(name)
            member.mode = stat.S_IMODE(status.st_mode) & 0o777
            member.mtime = max(int(status.st_mtime), 0)
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
                folders.append((f"{name}/", entry.path))
            elif stat.S_ISLNK(status.st_mode):
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(entry.path)
            elif not stat.S_ISREG(status.st_mode):
                source.skipped += 1
                continue
            yield member, entry.path
        waiting.extend(reversed(folders))


def _content(member: tarfile.TarInfo, path: str) -> Iterator[bytes]:
    # The file may have become something else since it was listed: never follow a link, never wait for a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _changed(path, "became something else")
        member.size = status.st_size
        yield _header(member)
        left = member.size
        while left:
            piece = file.read(min(left, PIECE))
            if not piece:
                raise _changed(path, "became shorter")
            left -= len(piece)
            yield piece
        if member.size % _BLOCK:
            yield bytes(_BLOCK - member.size % _BLOCK)


def _changed(path: str, how: str) -> TransferFailed:
    return TransferFailed("source_changed", f"{path} {how} while it was sent.", "Is somebody else writing there?")
