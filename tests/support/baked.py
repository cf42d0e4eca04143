"""Baked snapshots that all services of the tests share: the first that needs one makes it, the others get it under another name.

A key says what a baked snapshot was made of, and nothing ever writes to one: its files are hard links of each other where one user has them.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.native import cache

from hatchway.node.images import files

MOST = 24
"""Baked snapshots that are kept: releases of long ago make room."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While one makes what all need, the others wait instead of making the same."""
    with open(_kept() / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lend(data_dir: Path) -> None:
    """Gives the service of this data folder, which has come up before, what there is."""
    for made in _whole(_kept()):
        _link(made, data_dir / "node" / "baked", owned=True)


def keep(data_dir: Path) -> None:
    """Keeps for others what this service has made. A service is not asked to be still for it: what it has under a key is finished."""
    baked = data_dir / "node" / "baked"
    for made in _whole(baked) if baked.is_dir() else ():
        _link(made, _kept())
    for old in sorted(_whole(_kept()), key=lambda folder: folder.stat().st_mtime)[:-MOST]:
        shutil.rmtree(old, ignore_errors=True)


def _kept() -> Path:
    folder = cache() / "baked"
    folder.mkdir(exist_ok=True)
    return folder


def _whole(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".") and (path / "bake.json").exists()]


def _place(source: Path, target: Path, owner: os.stat_result) -> None:
    """Another name where the file has that owner, else a copy: a node gives what a machine's memory was mapped from other names of its own, and
    the kernel lets nobody do that with files of others (`fs.protected_hardlinks`). Without it the machine could not be captured."""
    if source.stat().st_uid == owner.st_uid or os.geteuid() != 0:
        files.place(source, target)
        return
    files.sparse_copy(source, target)
    os.chown(target, owner.st_uid, owner.st_gid)
    target.chmod(0o444)


def _link(made: Path, folder: Path, *, owned: bool = False) -> None:
    if (folder / made.name).exists():
        return
    owner = folder.stat()
    linking = folder / f".linking-{uuid.uuid4().hex}"
    linking.mkdir()
    try:
        with contextlib.suppress(FileNotFoundError):  # its service removed it meanwhile
            for path in made.iterdir():
                _place(path, linking / path.name, owner if owned else path.stat())
            os.chown(linking, owner.st_uid, owner.st_gid)
            linking.chmod(0o755)
            with contextlib.suppress(OSError):  # another one was faster
                linking.rename(folder / made.name)
    finally:
        shutil.rmtree(linking, ignore_errors=True)
