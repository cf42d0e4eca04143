"""The data folder: made, checked, locked."""

import fcntl
import os
import socket
import stat
from pathlib import Path

from hatchway.domain.errors import Conflict, Forbidden, Unavailable
from hatchway.supervisor.settings import Settings
from hatchway.wire.paths import address


def prepare(settings: Settings) -> None:
    """Makes the data folder's rooms. Raises `Forbidden("unsafe_folder")` where others own or can write what is there."""
    check_ancestors(settings.data_dir)
    ids = settings.identity
    rooms = [
        (settings.data_dir, os.geteuid(), 0o755),
        (settings.run, os.geteuid(), 0o755),
        (settings.run / "vm", os.geteuid(), 0o711),
        (settings.images, os.geteuid(), 0o755),
        (settings.control, ids.control, 0o700),
        (settings.node, ids.node, 0o700),
        (settings.audit, ids.audit, 0o700),
        (settings.broker, ids.broker, 0o700),
        (settings.secrets, ids.broker, 0o700),
        *([(settings.e2b_folder, ids.e2b, 0o700)] if settings.e2b else []),
        (settings.log, os.geteuid(), 0o755),
    ]
    for folder, owner, mode in rooms:
        try:
            folder.mkdir(parents=folder in (settings.data_dir, settings.images))
            made = True
        except FileExistsError:
            made = False
        except OSError as error:
            raise Unavailable(
                "data_dir", f"{folder} cannot be made: {error.strerror}.", "Name another one with --data-dir."
            ) from error
        if made:
            os.chown(folder, owner, owner if owner != os.geteuid() else -1)
            folder.chmod(mode)
        check(folder, owner)


def check_ancestors(folder: Path) -> None:
    """Raises `Forbidden("unsafe_folder")` where others could exchange what `folder` is in. A sticky folder such as /tmp is fine."""
    for above in folder.parents:
        try:
            found = above.stat()
        except OSError:
            continue  # it will be made, as ours
        if found.st_uid not in (0, os.geteuid()):
            raise Forbidden(
                "unsafe_folder",
                f"{above}, which {folder.name} lies in, belongs to user {found.st_uid}, who could exchange it.",
                "Name another data folder.",
            )
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise Forbidden(
                "unsafe_folder",
                f"{above}, which {folder.name} lies in, can be written by others (mode {found.st_mode & 0o7777:o}).",
                f"`chmod go-w {above}`, or name another data folder.",
            )


def check(folder: Path, owner: int) -> None:
    """Raises `Forbidden("unsafe_folder")` where `folder` is not ours alone to change."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise Forbidden("unsafe_folder", f"{folder} is not a folder.", "Name another data folder, or remove it.")
    if found.st_uid != owner:
        raise Forbidden(
            "unsafe_folder",
            f"{folder} belongs to user {found.st_uid}, not to {owner}.",
            f"Name another data folder, or `chown {owner} {folder}`.",
        )
    if found.st_mode & 0o022:
        raise Forbidden(
            "unsafe_folder",
            f"{folder} can be written by others (mode {found.st_mode & 0o777:o}).",
            f"`chmod go-w {folder}`.",
        )


class Lock:
    """Only one service per data folder: an flock that the kernel drops with the process."""

    def __init__(self, settings: Settings) -> None:
        self._path = settings.run / "lock"
        self._fd: int | None = None

    def take(self) -> None:
        """Raises `Conflict("already_running")` with the pid of the one that is up."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).decode().strip() or "?"
            os.close(fd)
            raise Conflict(
                "already_running",
                f"Hatchway is already up on this data folder (pid {pid}).",
                "`hatchway down` stops it.",
                pid=pid,
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Lets another process have the folder."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def holder(self) -> int | None:
        """The pid of the service that is up, None where none is."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            text = os.read(fd, 32).decode().strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(fd)


def listen_tcp(host: str, port: int) -> socket.socket:
    """Raises `Unavailable("port_taken")`."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise Unavailable(
            "port_taken",
            f"{host}:{port} cannot be listened on: {error.strerror}.",
            "End what uses it, or choose --api-port, --data-port and --e2b-port (0 = any); --no-e2b does without the last.",
        ) from error
    sock.listen(1024)
    return sock


def listen_unix(path: Path, kind: socket.SocketKind, owner: int, group: int | None = None) -> socket.socket:
    """Listens on a socket that only `owner` may connect to, and who is in `group`; the path may be longer than a socket address."""
    path.unlink(missing_ok=True)
    with address(path) as reached:
        sock = socket.socket(socket.AF_UNIX, kind)
        former = os.umask(0o177)
        try:
            sock.bind(reached)
        finally:
            os.umask(former)
    if owner != os.geteuid() or group is not None:
        os.chown(path, owner, owner if group is None else group)
    if group is not None:
        path.chmod(0o660)
    sock.listen(64)
    return sock
