"""The official jailer of Firecracker: its arguments, checked, and what it leaves behind, removed.

Not the way of the product (docs/decisions/0007-firecracker-in-our-own-jail.md); the tests hold our own jail against it.
"""

import os
import re
import shutil
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hatchway.node.vmm import firecracker_install
from hatchway.node.vmm.firecracker_install import Installed

_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True)
class Jail:
    """What the jailer is to make."""

    name: str
    uid: int
    gid: int
    base: Path
    """Folder of the chroots: root's, and nobody else's to write."""
    cgroup_version: int
    cgroups: tuple[str, ...]
    """For example `pids.max=64`."""
    parent: str
    netns: Path
    no_file: int = 256

    @property
    def root(self) -> Path:
        """The chroot."""
        return self.base / "firecracker" / self.name / "root"


def arguments(jailer: Installed, firecracker: Installed, jail: Jail, allowed: Collection[str] = ()) -> tuple[str, ...]:
    """Returns argv. Raises `FirecrackerRefused` for a release with a known hole, `ValueError` for a jail that would be none."""
    firecracker_install.check(jailer, allowed, program="jailer")
    firecracker_install.check(firecracker, allowed)
    if not _ID.fullmatch(jail.name):
        raise ValueError(f"{jail.name!r} is no id of a jail")
    if jail.uid <= 0 or jail.gid <= 0:
        raise ValueError("a jail is not root's")
    if jail.cgroup_version not in (1, 2) or not re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)*", jail.parent):
        raise ValueError("no such cgroup")
    if not all(re.fullmatch(r"[a-z]+\.[a-z.]+=[0-9 ]+", limit) for limit in jail.cgroups):
        raise ValueError("no such limit")
    # Releases up to 1.13.1 and 1.14.0 follow links in this folder: it and all above must be root's alone.
    at = jail.base
    while True:
        info = os.lstat(at)
        shared = info.st_mode & 0o022 and not (info.st_mode & stat.S_ISVTX and at != jail.base)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != 0 or shared:
            raise ValueError(f"{at} is not root's alone")
        if at == at.parent:
            break
        at = at.parent
    if jail.root.parent.exists():
        raise ValueError(f"{jail.root.parent} is there already")
    limits = [word for limit in jail.cgroups for word in ("--cgroup", limit)]
    return (
        *(str(jailer.binary), "--id", jail.name, "--exec-file", str(firecracker.binary)),
        *("--uid", str(jail.uid), "--gid", str(jail.gid), "--chroot-base-dir", str(jail.base)),
        *("--cgroup-version", str(jail.cgroup_version), "--parent-cgroup", jail.parent, *limits),
        *("--netns", str(jail.netns), "--resource-limit", f"no-file={jail.no_file}"),
        *("--", "--api-sock", "/api.sock"),
    )


def clean(jail: Jail, cgroups: Collection[Path]) -> None:
    """Removes the chroot and the cgroups of a jail whose process ended. Follows no link. Idempotent."""
    shutil.rmtree(jail.root.parent, ignore_errors=not jail.root.parent.exists())
    for folder in cgroups:
        if folder.is_dir():
            folder.rmdir()
