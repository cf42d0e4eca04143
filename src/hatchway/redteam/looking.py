"""What a guest may have left on this host: beside a copy, within it, and anywhere else that it has no business to be."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

ANYWHERE = ("/", "/tmp", "/var/tmp", "/run", "/root", "/home", "/etc", "/dev", "/dev/shm", "/etc/cron.d")
MOST = 1 << 20
LOG = "log"


def _below(folder: Path) -> Iterator[Path]:
    for around, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(around) / name


def _content(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            return path.read_bytes()[:MOST]
    return b""


def beside(around: Path, mark: str) -> list[str]:
    """Files with a marker that are in the folder `around` a copy, but not in the copy."""
    for path in _below(around):
        if around / "here" not in (path, *path.parents) and (mark in path.name or mark.encode() in _content(path)):
            return ["a file of this host, beside the copy"]
    return []


def in_the_copy(copy: Path, token: str) -> list[str]:
    """What no copy of a guest's may have in it: links that lead out, devices, other users' rights, files of this host."""
    found = []
    for path in _below(copy):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            if copy.resolve() not in path.resolve().parents:
                found.append("a link out of the copy")
        elif stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
            found.append("a device of this host")
        elif stat.S_ISREG(mode):
            if mode & 0o6000:
                found.append("a program with another user's rights")
            if token.encode() in _content(path):
                found.append("another name of a file of this host")
    return found


def on_this_host(folders: Sequence[Path], mark: str) -> list[str]:
    """Names with a marker where all may look, or in folders of the service; and lines of its logs that begin with one."""
    for place in ANYWHERE:
        with contextlib.suppress(OSError):
            if any(mark in name for name in os.listdir(place)):
                return [f"a file in {place} of this host"]
    for folder in folders:
        for path in _below(folder):
            if mark in path.name:
                return ["a file of the service"]
            if path.parent.name == LOG and _begins(path, mark):
                return ["a line of its own in a log"]
    return []


def _begins(path: Path, mark: str) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return any(line.lstrip().startswith(mark.encode()) for line in file)
    return False
