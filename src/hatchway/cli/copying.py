"""Copies a local folder into a sandbox: a tar stream, made as it goes, into `tar` inside.

Regular files, folders and symbolic links as such are copied; no link is followed, so nothing from outside of the folder
gets in. Sockets, devices and the like are left out and named.
"""

import io
import os
import stat
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from hatchway.client import HatchwayError, InvalidRequest, Output

from .front import note

if TYPE_CHECKING:
    from hatchway.client import Sandbox, Session

PIECE = 1024 * 1024
_SCRIPT = 'mkdir -p -- "$1" && exec tar --extract --no-same-owner --file=- --directory="$1"'
_MAX_COMPLAINT = 4000


class CopyFailed(HatchwayError):
    """The folder could not be copied as a whole."""


def copy_folder(sandbox: "Sandbox", folder: Path, target: str) -> int:
    """Copies the content of `folder` into the folder `target` of the sandbox, which is made where it is missing.

    Returns the number of octets of the files. Raises `InvalidRequest` when `folder` is none, `CopyFailed` when a file
    cannot be read or the sandbox cannot take it.
    """
    if not folder.is_dir():
        raise InvalidRequest("no_folder", f"{folder} is not a folder.", "Give --copy the folder to copy.")
    session = sandbox.start(["/bin/sh", "-c", _SCRIPT, "sh", target], stdin=True)
    complaint = b""
    try:
        sink = _Sink(session)
        if session.exit is None:
            with tarfile.open(
                mode="w|",
                fileobj=cast(IO[bytes], sink),
                format=tarfile.GNU_FORMAT,
                bufsize=PIECE,
                errors="surrogateescape",
            ) as archive:
                for member, path in _members(folder):
                    sink.progress(member.name)
                    _add(archive, member, path)
                    sink.payload += member.size
            sink.finish()
        for event in session:
            if isinstance(event, Output):
                complaint = (complaint + event.data)[-_MAX_COMPLAINT:]
        ended = session.wait()
    except OSError as error:
        session.kill()
        raise CopyFailed("copy_failed", f"{error.filename or folder}: {error.strerror or error}", "") from None
    except BaseException:
        session.kill()
        raise
    finally:
        session.close()
    if ended.status != 0:
        text = complaint.decode("utf-8", "replace").strip() or ended.message or ended.reason
        raise CopyFailed(
            "copy_failed",
            f"The sandbox could not unpack into {target}: {text}",
            "Is there space, and may the user write there?",
        )
    return sink.payload


class _Sink:
    """The writing end of the stream: hands full pieces to the session's standard input."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._buffer = io.BytesIO()
        self._tty = sys.stderr.isatty()
        self._shown = 0.0
        self.payload = 0

    def write(self, data: bytes) -> int:
        self._buffer.write(data)
        if self._buffer.tell() >= PIECE:
            self._flush(eof=False)
        return len(data)

    def finish(self) -> None:
        self._flush(eof=True)
        if self._shown:
            sys.stderr.write("\r\x1b[K")

    def progress(self, name: str) -> None:
        if self._tty and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            shown = name.encode("ascii", "replace").decode()[:50]
            sys.stderr.write(f"\rcopying: {self.payload / 2**20:.1f} MiB  {shown}\x1b[K")
            sys.stderr.flush()

    def _flush(self, *, eof: bool) -> None:
        data = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        if data or eof:
            self._session.write_stdin(data, eof=eof)


def _members(folder: Path) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Yields what is to be copied, folders before what is in them, in a stable order."""
    waiting = [("", str(folder))]
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
            member.mtime = int(status.st_mtime)
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
                folders.append((f"{name}/", entry.path))
            elif stat.S_ISLNK(status.st_mode):
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(entry.path)
            elif not stat.S_ISREG(status.st_mode):
                note(f"left out (neither file, folder nor link): {entry.path!r}")
                continue
            yield member, entry.path
        waiting.extend(reversed(folders))


def _add(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    if not member.isreg():
        archive.addfile(member)
        return
    # The file may have become something else since it was listed: never follow a link, never wait for a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "changed while it was copied", path)
        member.size = status.st_size
        try:
            archive.addfile(member, file)
        except OSError as error:
            raise OSError(error.errno or 0, error.strerror or "became shorter while it was copied", path) from None
