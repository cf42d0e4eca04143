"""The run folder and the VMs' folders in it. Everything below the run folder is reached by descriptors, never by long paths."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Sequence

from hatchway.domain.ids import is_id
from hatchway.launcher import records
from hatchway.launcher.errors import Unfit

SOCKETS = ("qmp.sock", "agent.sock", "shim.sock")
_TYPES = {"qmp.sock": socket.SOCK_STREAM, "agent.sock": socket.SOCK_STREAM, "shim.sock": socket.SOCK_SEQPACKET}
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def check(path: str) -> None:
    """Makes the run folder if it is missing, and raises `Unfit` if anybody else could exchange what is in it."""
    path = os.path.abspath(path)
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o711)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            raise Unfit(
                f"{path}: {error.strerror}. Make the folder, owned by the user that runs the launcher."
            ) from error
    mine = {0, os.geteuid()}
    at = path
    while True:
        info = os.lstat(at)
        if not stat.S_ISDIR(info.st_mode):
            raise Unfit(f"{at} is not a folder (or a link to one): state may not hang on a link that others can turn.")
        if info.st_uid not in mine:
            raise Unfit(
                f"{at} belongs to uid {info.st_uid}: the run folder must be root's or the invoking user's. Use another, or chown it."
            )
        shared = info.st_mode & 0o022
        if shared and (at == path or not info.st_mode & stat.S_ISVTX):
            raise Unfit(f"{at} can be written by others (mode {info.st_mode & 0o7777:04o}). Do: chmod go-w {at}")
        if at == "/":
            return
        at = os.path.dirname(at)


def _address(folder: int, name: str) -> str:
    # A socket's path has 108 octets at most, whatever the data folder's is.
    return f"/proc/self/fd/{folder}/{name}"


def bind(folder: int, name: str, kind: int, backlog: int, owner: int | None) -> socket.socket:
    """Binds and listens on a socket (0600, of `owner`) in the folder; what had the name before is removed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    listener = socket.socket(socket.AF_UNIX, kind)
    before = os.umask(0o177)
    try:
        listener.bind(_address(folder, name))
        if owner is not None:
            os.chown(name, owner, -1, dir_fd=folder, follow_symlinks=False)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


class RunFolder:
    """The run folder, held by a descriptor."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, _DIR)
        with contextlib.suppress(FileExistsError):
            os.mkdir("vm", 0o711, dir_fd=self.fd)
        self._vms = os.open("vm", _DIR, dir_fd=self.fd)
        info = os.fstat(self.fd)
        self.instance = f"{info.st_dev:x}-{info.st_ino:x}"
        """Names this installation on this host."""

    def ids(self) -> Iterator[str]:
        """The ids that have a folder."""
        return (name for name in os.listdir(self._vms) if is_id(name))

    def create(self, sandbox_id: str) -> int:
        """Makes the VM's folder afresh; returns its descriptor."""
        self.remove(sandbox_id)
        os.mkdir(sandbox_id, 0o711, dir_fd=self._vms)
        return self.open(sandbox_id)

    def open(self, sandbox_id: str) -> int:
        """Returns a descriptor of the VM's folder. Raises `FileNotFoundError`."""
        return os.open(sandbox_id, _DIR, dir_fd=self._vms)

    def remove(self, sandbox_id: str) -> None:
        """Removes the VM's folder and what the launcher put into it; the record goes first. Idempotent."""
        try:
            folder = self.open(sandbox_id)
        except FileNotFoundError:
            return
        try:
            for name in (records.NAME, records.NAME + ".new", *SOCKETS):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        os.rmdir(sandbox_id, dir_fd=self._vms)


def bind_vm(folder: int, owner: int | None, names: Sequence[str] = SOCKETS) -> dict[str, socket.socket]:
    """Binds the sockets of one VM. One client at a time on the VMM's: a second would hang there unseen."""
    bound: dict[str, socket.socket] = {}
    try:
        for name in names:
            bound[name] = bind(folder, name, _TYPES[name], 8 if name == "shim.sock" else 1, owner)
    except OSError:
        for listener in bound.values():
            listener.close()
        raise
    return bound
