"""What this host can hold: checked before a sandbox is made or started, with the numbers in the refusal.

Nothing is counted up and down, so nothing can be counted wrong: what is promised follows from the sandboxes that are there, those in
the making included, each time that another one wants in. docs/limits.md has the rules for those who operate a host.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hatchway.domain.errors import HostExhausted, Unprocessable
from hatchway.domain.host_limits import HostLimits
from hatchway.domain.shapes import Shape
from hatchway.node.vmm.seam import UPPER_NAMES

READ_AGAIN_S = 1.0
"""How old a reading of what sandboxes really use may be."""


@dataclass(frozen=True)
class Holding:
    """What one sandbox was promised. `folder` has its disk; `pid` is its monitor, 0 where none runs yet."""

    name: str
    shape: Shape
    overhead_mib: int
    """What the monitor needs beside the guest's memory."""
    folder: Path
    pid: int = 0
    has_memory: bool = True
    """It runs, is paused, or is being started."""


@dataclass(frozen=True)
class Use:
    """What the host has and the sandboxes were promised of it, in MiB."""

    memory_limit: int
    """For all sandboxes together."""
    memory_promised: int
    disk_free: int
    disk_promised: int
    """What disks and kept output may still grow by, as the policy counts it."""


def total_memory_mib() -> int:
    """The host's memory in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def available_memory_mib() -> int:
    """What the kernel thinks can be had without swapping, in MiB."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return total_memory_mib()


def max_vcpus() -> int:
    """More than the host has are allowed up to 8, so that a laptop can try a larger shape; they share its cores."""
    return max(8, os.cpu_count() or 1)


def private_memory_mib(pid: int) -> int:
    """Memory that a process has for itself, in MiB; 0 where it cannot be read."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1]) // 1024 for line in file if line.startswith("RssAnon:")), 0)
    except (OSError, ValueError):
        return 0


def disk_use_mib(folder: Path) -> int:
    """What the disk of a sandbox takes on the host, in MiB; 0 where there is none yet."""
    for name in UPPER_NAMES:
        with contextlib.suppress(OSError):
            return (folder / name).stat().st_blocks * 512 // 2**20
    return 0


class Capacity:
    """Admission on one node. `root` lies on the file system of the disks; `baked_mib` says what baked snapshots keep in the page cache."""

    def __init__(self, limits: HostLimits, root: Path, baked_mib: Callable[[], int] = lambda: 0) -> None:
        self.limits = limits
        self._root = root
        self._baked_mib = baked_mib
        self._read: dict[str, tuple[float, int, int]] = {}

    def check_create(self, shape: Shape, overhead_mib: int, holdings: Iterable[Holding]) -> None:
        """Refuses a sandbox that this host can never hold (`Unprocessable`) or cannot hold now (`HostExhausted`)."""
        use = self.use(holdings)
        self._check_possible(shape, overhead_mib)
        self._check_memory(shape, overhead_mib, use)
        needed = self._disk_share(shape)
        self._check_disk(needed, use)

    def check_import(self, shape: Shape, memory: bool, overhead_mib: int, holdings: Iterable[Holding]) -> None:
        """The same for one that comes from elsewhere and does not run yet, with its memory as a file or without."""
        use = self.use(holdings)
        self._check_possible(shape, overhead_mib)
        self._check_disk(self._disk_share(shape) + (shape.memory_mib if memory else 0), use)

    def check_start(self, shape: Shape, overhead_mib: int, holdings: Iterable[Holding]) -> None:
        """The same for one whose disk is there already. `holdings` has its disk and not its memory."""
        use = self.use(holdings)
        self._check_possible(shape, overhead_mib)
        self._check_memory(shape, overhead_mib, use)
        if use.disk_free < self.limits.disk_reserve_mib:
            self._check_disk(0, use)

    def use(self, holdings: Iterable[Holding]) -> Use:
        """What there is and what was promised of it."""
        now = time.monotonic()
        total = total_memory_mib()
        promised = resident = growth = 0
        seen: dict[str, tuple[float, int, int]] = {}
        for held in holdings:
            read = self._read.get(held.name)
            if read is None or now - read[0] > READ_AGAIN_S:
                read = (now, private_memory_mib(held.pid) if held.pid else 0, disk_use_mib(held.folder))
            seen[held.name] = read
            if held.has_memory:
                share = self._memory_share(held.shape, held.overhead_mib)
                promised += share
                resident += min(share, read[1])
            growth += max(0, self._disk_share(held.shape) - read[2])
        self._read = seen
        reserve = self.limits.memory_reserve(total) + self._baked_mib()
        # Two bounds: what the host has at all, and what programs that are none of ours leave of it just now.
        limit = min(total, available_memory_mib() + resident) - reserve
        free = shutil.disk_usage(self._root).free // 2**20
        return Use(max(0, limit), promised, free, growth)

    def _memory_share(self, shape: Shape, overhead_mib: int) -> int:
        return round(shape.memory_mib / self.limits.memory_overcommit) + overhead_mib

    def _disk_share(self, shape: Shape) -> int:
        return round((shape.disk_mib + self.limits.kept_output_mib) / self.limits.disk_overcommit)

    def _check_possible(self, shape: Shape, overhead_mib: int) -> None:
        total = total_memory_mib()
        if shape.vcpus > max_vcpus():
            raise Unprocessable(
                "vcpus_out_of_range", f"This host gives a sandbox at most {max_vcpus()} vcpus.", "Ask for fewer vcpus."
            )
        most = self.limits.for_sandboxes(total)
        if shape.memory_mib + overhead_mib > most:
            raise Unprocessable(
                "memory_out_of_range",
                f"{shape.memory_mib} MiB and the monitor's {overhead_mib} MiB exceed the {most} MiB that this host "
                f"(of {total} MiB) gives its sandboxes.",
                f"Ask for at most {max(0, most - overhead_mib)} memory_mib.",
            )
        disk = shutil.disk_usage(self._root).total // 2**20
        if shape.disk_mib > disk:
            raise Unprocessable(
                "disk_out_of_range",
                f"{shape.disk_mib} MiB exceed the file system of the data folder ({disk} MiB).",
                "Ask for less disk_mib.",
            )

    def _check_memory(self, shape: Shape, overhead_mib: int, use: Use) -> None:
        needed = self._memory_share(shape, overhead_mib)
        if use.memory_promised + needed > use.memory_limit:
            raise HostExhausted(
                "host_memory_full",
                f"The sandbox needs {needed} MiB of memory with its monitor; {use.memory_promised} of {use.memory_limit} MiB "
                "for sandboxes are promised to others.",
                "Stop or delete sandboxes, or ask for less memory_mib, then try again.",
                needed_mib=needed,
                promised_mib=use.memory_promised,
                limit_mib=use.memory_limit,
            )

    def _check_disk(self, needed: int, use: Use) -> None:
        reserve = self.limits.disk_reserve_mib
        if use.disk_free - use.disk_promised - needed < reserve:
            raise HostExhausted(
                "host_disk_full",
                f"The sandbox needs {needed} MiB of disk; {use.disk_free} MiB are free in the data folder, of which "
                f"{use.disk_promised} MiB are promised to other sandboxes and {reserve} MiB stay free.",
                "Free space there, delete sandboxes, or ask for less disk_mib, then try again.",
                needed_mib=needed,
                promised_mib=use.disk_promised,
                free_mib=use.disk_free,
            )
