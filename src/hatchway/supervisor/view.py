"""Lets an unprivileged role reach its own files where they lie below a folder that is closed to it.

Root's home is 0700 on most systems, and a checkout or a Python may lie there. Instead of opening that folder to the
world, the role gets a mount namespace of its own in which each closed ancestor is an empty folder that holds nothing but the
paths named here. Called in the forked child, as root, before it drops its privileges; the namespace ends with the role.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def closed_ancestor(path: Path) -> Path | None:
    """The topmost ancestor of `path` that others may not enter, or None."""
    for ancestor in reversed(path.parents):
        if not ancestor.stat().st_mode & stat.S_IXOTH:
            return ancestor
    return None


def open_to_role(paths: Iterable[Path]) -> None:
    """Makes `paths` reachable for this process whatever it becomes. Does nothing where nothing is closed. Raises `OSError`."""
    wanted: dict[Path, list[Path]] = {}
    for path in sorted({path.resolve() for path in paths}):
        closed = closed_ancestor(path)
        if closed is not None:
            wanted.setdefault(closed, []).append(path)
    if not wanted:
        return
    _check(_libc.unshare(CLONE_NEWNS))
    _mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    # Opened in the new namespace: a mount of another one cannot be bound. Opened before anything covers them.
    opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for inside in wanted.values() for path in inside}
    for closed, inside in wanted.items():
        _mount("tmpfs", str(closed), "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
        for path in inside:
            if not path.exists():  # a path inside another one is there already
                if stat.S_ISDIR(os.fstat(opened[path]).st_mode):
                    path.mkdir(parents=True, mode=0o755)
                else:
                    path.parent.mkdir(parents=True, mode=0o755, exist_ok=True)
                    path.touch()
                _mount(f"/proc/self/fd/{opened[path]}", str(path), None, MS_BIND | MS_REC, None)
            os.close(opened[path])


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
