"""What is used up on this host while a guest floods: what all share, and what is the service's."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NEIGHBOURS = 100
MOST_MIB = 128
"""How much memory the service's processes, and how much disk its logs and journal, may take more while one guest floods."""


@dataclass(frozen=True)
class Use:
    """`neighbours`: entries of the kernel's table of neighbours, which all namespaces share."""

    neighbours: int
    memory_mib: int = 0
    disk_mib: int = 0

    def grown(self, now: "Use") -> str:
        """What has become more than one guest may make it; "" when nothing."""
        if now.neighbours - self.neighbours > NEIGHBOURS:
            return f"this host's table of neighbours: {now.neighbours - self.neighbours} more"
        if now.memory_mib - self.memory_mib > MOST_MIB:
            return f"the service's memory: {now.memory_mib - self.memory_mib} MiB more"
        if now.disk_mib - self.disk_mib > MOST_MIB:
            return f"this host's disk: {now.disk_mib - self.disk_mib} MiB more"
        return ""


def neighbours() -> int:
    """Entries that the kernel has, in all namespaces."""
    lines = Path("/proc/net/stat/arp_cache").read_text().splitlines()
    return int(lines[1].split()[0], 16)


def memory_mib(pids: Iterable[int]) -> int:
    """What processes have in memory, all together."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    found += int(line.split()[1]) // 1024
    return found


def disk_mib(folders: Iterable[Path]) -> int:
    """What is in folders."""
    found = 0
    for folder in folders:
        for around, _, files in os.walk(folder):
            for name in files:
                with contextlib.suppress(OSError):
                    found += Path(around, name).lstat().st_blocks * 512
    return found >> 20
