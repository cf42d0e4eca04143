"""What is downloaded to this machine: a trust border, because the sandbox that sends it is hostile.

Everything is written into a place of its own first, through descriptors of folders that were made there and without following
any link, and is put in place with renames when the last octet has come. So a name, a link or a rename meanwhile leads nowhere
else, and what is cut off leaves nothing under its final name.
"""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from .archive import Member, Reader, stays_inside, unsafe
from .errors import TransferFailed, UnsafeArchive
from .models import FileEntry, Transfer
from .sending import Progress, quiet

MAX_ENTRIES = 1_000_000
"""Files, folders and links of one download, unless another number is given."""
RESERVE = 64 * 1024 * 1024
"""Octets of the disk here that a download leaves free."""
_CHECK_EVERY = 16 * 1024 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FIRST_TIME, _LAST_TIME = 0.0, 2.0**33


@dataclass(frozen=True)
class Bounds:
    """How much may come; None is as much as the disk has room for."""

    max_bytes: int | None = None
    max_entries: int = MAX_ENTRIES


class Receiver(Protocol):
    """Takes a download in. As a context manager it leaves nothing behind unless it was finished."""

    def feed(self, piece: bytes) -> None:
        """Takes octets."""

    def finish(self) -> Transfer:
        """All has come: puts it in place."""

    def __enter__(self) -> "Receiver": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def receiver_for(
    entry: FileEntry, local: str | os.PathLike[str], bounds: Bounds, progress: Progress | None
) -> Receiver:
    """Returns what takes `entry` in as `local`."""
    path = os.fspath(local)
    if entry.is_dir:
        return Tree(path, entry.mode, bounds, progress or quiet)
    return File(path, entry.mode, bounds, progress or quiet)


@contextlib.contextmanager
def _said(path: str) -> Iterator[None]:
    """Turns errors of the system into those of the SDK."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path) from None
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        raise TransferFailed(
            "local_write_failed", f"{name} below {path} cannot be written: {error.strerror or error}", ""
        ) from None


def _disk_full(path: str) -> TransferFailed:
    return TransferFailed(
        "local_disk_full", f"There is no room for {path} here.", f"Free some; {RESERVE >> 20} MiB are left free."
    )


class _Room:
    """Counts what comes against the bounds and the disk."""

    def __init__(self, path: str, folder: int, bounds: Bounds) -> None:
        self._path = path
        self._folder = folder
        self._bounds = bounds
        self._unchecked = 0
        self.bytes = 0
        self.entries = 0

    def announced(self, size: int) -> None:
        """So many octets will come."""
        bound = self._bounds.max_bytes
        if bound is not None and self.bytes + size > bound:
            raise UnsafeArchive(
                "download_too_large", f"More than {bound} octets would come.", "Give a larger bound, if you trust it."
            )
        room = os.fstatvfs(self._folder)
        if room.f_bavail * room.f_frsize < size + RESERVE:
            raise _disk_full(self._path)

    def entry(self) -> None:
        """Another file, folder or link comes."""
        self.entries += 1
        if self.entries > self._bounds.max_entries:
            raise UnsafeArchive(
                "download_too_large",
                f"More than {self._bounds.max_entries} files and folders would come.",
                "Give a larger bound, if you trust it.",
            )

    def came(self, count: int) -> None:
        """Octets came."""
        self.bytes += count
        self._unchecked += count
        bound = self._bounds.max_bytes
        if self._unchecked >= _CHECK_EVERY or (bound is not None and self.bytes > bound):
            self._unchecked = 0
            self.announced(0)


def _write(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


class File:
    """One file. It takes the place of a file that is there and keeps its mode; into a pipe or a device it is written as it comes."""

    def __init__(self, path: str, mode: int, bounds: Bounds, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        self._folder = self._file = -1
        self._staged: str | None = None
        self._target = os.path.basename(path)
        with _said(path), contextlib.ExitStack() as undo:
            undo.callback(self._close)
            there = self._there()
            if there is not None and stat.S_ISDIR(there.st_mode):
                raise IsADirectoryError(errno.EISDIR, "it is a folder", path)
            if there is not None and not stat.S_ISREG(there.st_mode):
                self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
                self._folder = os.open("/", _FOLDER)
                self._room = _Room(path, self._folder, bounds)
                undo.pop_all()
                return
            # A link of the user's own is followed, as a shell's `>` does it.
            folder, self._target = os.path.split(os.path.realpath(path))
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._room = _Room(path, self._folder, bounds)
            self._staged = f".hatchway-{secrets.token_hex(8)}"
            self._file = os.open(self._staged, _NEW_FILE, mode & 0o777, dir_fd=self._folder)
            if there is not None:
                os.fchmod(self._file, stat.S_IMODE(there.st_mode) & 0o777)
            undo.pop_all()

    def _there(self) -> os.stat_result | None:
        try:
            return os.stat(self._path)
        except FileNotFoundError:
            return None

    def announced(self, size: int) -> None:
        """So many octets will come."""
        self._room.announced(size)

    def feed(self, piece: bytes) -> None:
        """Takes octets."""
        self._room.came(len(piece))
        with _said(self._path):
            _write(self._file, piece)
        self._progress(self._room.bytes, self._path)

    def finish(self) -> Transfer:
        """All has come: puts it in place."""
        with _said(self._path):
            if self._staged is not None:
                os.fsync(self._file)
                os.replace(self._staged, self._target, src_dir_fd=self._folder, dst_dir_fd=self._folder)
                self._staged = None
        return Transfer(files=1, bytes=self._room.bytes)

    def _close(self) -> None:
        if self._staged is not None and self._folder >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._staged, dir_fd=self._folder)
        for descriptor in (self._file, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._folder = -1

    def __enter__(self) -> "File":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


class Tree:
    """A folder, from an archive. Where a folder is there already, what came is put into it, and files take the place of files.

    Modes are what they were without set-user-id and the like, as far as the umask goes, and folders can be changed by their
    owner; owners are whoever runs this. Symbolic links that lead out of the folder are left out, as are devices.
    """

    def __init__(self, path: str, mode: int, bounds: Bounds, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        self._reader = Reader(self)
        self._base = self._stage = -1
        self._stage_name = ""
        self._open: list[tuple[str, int]] = []
        self._file = -1
        self._member: Member | None = None
        self._dirs = self._files = self._links = self._skipped = 0
        with _said(path), contextlib.ExitStack() as undo:
            undo.callback(self._close)
            whole = os.path.realpath(path)
            self._merging = os.path.isdir(whole)
            folder, self._name = (whole, "") if self._merging else os.path.split(whole)
            self._base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not self._merging:
                with contextlib.suppress(FileNotFoundError):
                    os.stat(self._name, dir_fd=self._base, follow_symlinks=False)
                    raise NotADirectoryError(errno.ENOTDIR, "it is there and no folder", path)
            self._room = _Room(path, self._base, bounds)
            stage = f".hatchway-{secrets.token_hex(8)}"
            os.mkdir(stage, 0o700, dir_fd=self._base)
            self._stage_name = stage
            self._stage = os.open(stage, _FOLDER, dir_fd=self._base)
            os.mkdir("tree", (mode & 0o777) | 0o700, dir_fd=self._stage)
            self._open.append(("", os.open("tree", _FOLDER, dir_fd=self._stage)))
            undo.pop_all()

    def feed(self, piece: bytes) -> None:
        """Takes octets of the archive."""
        with _said(self._path):
            self._reader.feed(piece)
        self._progress(self._room.bytes, "" if self._member is None else self._member.path)

    def finish(self) -> Transfer:
        """All has come: puts it in place. Each file is whole; when it fails in the middle, some of them are there."""
        self._reader.finish()
        with _said(self._path):
            if self._merging:
                self._merge(self._open[0][1], self._base)
            else:
                os.rename("tree", self._name, src_dir_fd=self._stage, dst_dir_fd=self._base)
        return Transfer(
            files=self._files,
            dirs=self._dirs,
            links=self._links,
            bytes=self._room.bytes,
            skipped=self._skipped,
        )

    # What the archive has

    def folder(self, member: Member) -> None:
        """Makes a folder, which its owner can always change."""
        self._room.entry()
        with self._new(member):
            os.mkdir(member.names[-1], member.mode | 0o700, dir_fd=self._parent(member.names))
        self._dirs += 1

    def file(self, member: Member, size: int) -> None:
        """Begins a file."""
        self._room.entry()
        self._room.announced(size)
        with self._new(member):
            self._file = os.open(member.names[-1], _NEW_FILE, member.mode, dir_fd=self._parent(member.names))
        self._member = member

    def data(self, piece: bytes) -> None:
        """Writes octets of the file."""
        self._room.came(len(piece))
        _write(self._file, piece)

    def file_end(self) -> None:
        """The file is whole."""
        assert self._member is not None  # it was begun
        if _FIRST_TIME <= self._member.mtime <= _LAST_TIME:
            os.utime(self._file, (self._member.mtime, self._member.mtime))
        os.close(self._file)
        self._file = -1
        self._files += 1

    def symlink(self, member: Member, target: str) -> None:
        """Makes a symbolic link, unless it leads out of the folder."""
        self._room.entry()
        parent = self._parent(member.names)
        if not stays_inside(len(member.names) - 1, target):
            self._skipped += 1
            return
        with self._new(member):
            os.symlink(target, member.names[-1], dir_fd=parent)
        self._links += 1

    def hardlink(self, member: Member, target: tuple[str, ...]) -> None:
        """Makes another name of a file that came before."""
        self._room.entry()
        if not target:
            raise unsafe(f"{member.path!r} is a second name of nothing")
        source = self._parent(target)
        # Going to the other folder closes this one.
        source = os.dup(source)
        try:
            there = os.stat(target[-1], dir_fd=source, follow_symlinks=False)
            if not stat.S_ISREG(there.st_mode):
                raise unsafe(f"{member.path!r} is a second name of something that is no file")
            with self._new(member):
                os.link(
                    target[-1],
                    member.names[-1],
                    src_dir_fd=source,
                    dst_dir_fd=self._parent(member.names),
                    follow_symlinks=False,
                )
        except FileNotFoundError:
            raise unsafe(f"{member.path!r} is a second name of something that did not come") from None
        finally:
            os.close(source)
        self._files += 1

    def left_out(self, member: Member) -> None:
        """Counts a device or the like."""
        self._room.entry()
        self._skipped += 1

    @contextlib.contextmanager
    def _new(self, member: Member) -> Iterator[None]:
        """All that is made is new: what is there already came twice, or differs by what this file system does not tell apart."""
        try:
            yield
        except FileExistsError:
            raise unsafe(f"{member.path!r} comes twice, or differs from another name by case only") from None

    def _parent(self, names: tuple[str, ...]) -> int:
        """The folder that `names` stands in, as a descriptor that stays valid until the next call."""
        wanted = names[:-1]
        kept = 0
        while kept < len(wanted) and kept + 1 < len(self._open) and self._open[kept + 1][0] == wanted[kept]:
            kept += 1
        while len(self._open) > kept + 1:
            os.close(self._open.pop()[1])
        for name in wanted[kept:]:
            try:
                descriptor = os.open(name, _FOLDER, dir_fd=self._open[-1][1])
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT):
                    raise unsafe(f"{'/'.join(names)!r} is in something that is no folder of the archive") from None
                raise
            self._open.append((name, descriptor))
        return self._open[-1][1]

    # Putting it in place

    def _merge(self, source: int, target: int) -> None:
        for name in sorted(os.listdir(source)):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)
                continue
            try:
                # Takes the place of nothing, or of an empty folder.
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self._merge_folder(name, source, target)

    def _merge_folder(self, name: str, source: int, target: int) -> None:
        inner = os.open(name, _FOLDER, dir_fd=source)
        try:
            # Never through a link: where one stands in the place of a folder, this fails.
            outer = os.open(name, _FOLDER, dir_fd=target)
            try:
                self._merge(inner, outer)
            finally:
                os.close(outer)
        finally:
            os.close(inner)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        for _name, descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
        if self._stage >= 0:
            os.close(self._stage)
        if self._stage_name:
            shutil.rmtree(self._stage_name, ignore_errors=True, dir_fd=self._base)
        if self._base >= 0:
            os.close(self._base)
        self._file = self._stage = self._base = -1
        self._stage_name = ""

    def __enter__(self) -> "Tree":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
