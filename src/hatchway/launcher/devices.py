"""The disks of the host that a VM's files lie on: what its bounds of input and output are set for."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

MAX_DEVICES = 8


def disks_below(fds: Iterable[int]) -> tuple[str, ...]:
    """Returns the disks (`MAJOR:MINOR`) that the regular files among `fds` lie on, each once, at most `MAX_DEVICES`."""
    found: dict[str, None] = {}
    for fd in fds:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode) and (disk := disk_of(info.st_dev)):
            found[disk] = None
    return tuple(found)[:MAX_DEVICES]


def disk_of(device: int, sys: Path = Path("/sys"), mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the whole disk (`MAJOR:MINOR`) that a file's `st_dev` leads to; empty where the file system has none of its own.

    tmpfs, overlays and network file systems have none; of btrfs, whose files show a device of their own, it is found only by
    the mount's source.
    """
    numbers = f"{os.major(device)}:{os.minor(device)}"
    if os.major(device) == 0:
        numbers = _source(numbers, mountinfo)
    block = sys / "dev" / "block" / numbers
    try:
        if not numbers or not block.exists():
            return ""
        if (block / "partition").exists():
            return (block.resolve().parent / "dev").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return numbers


def _source(numbers: str, mountinfo: Path) -> str:
    """The block device behind a mount whose files show an anonymous device, where its source is one."""
    for line in mountinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[2:3] != [numbers]:
            continue
        source = right.split(" ")[1]
        try:
            found = os.stat(source)
        except OSError:
            return ""
        return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}" if stat.S_ISBLK(found.st_mode) else ""
    return ""
