"""What one sandbox uses: as its guest says, and as the host counts."""

import asyncio
import logging
import os
import stat
import time
from pathlib import Path

from hatchway.domain.lifecycle import State
from hatchway.node.capacity import Holding, private_memory_mib
from hatchway.node.guest.seam import GuestError, GuestLink, GuestMetrics, LinkLost
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import VmmError
from hatchway.wire.launcher import VmUsage
from hatchway.wire.node import GuestUsage, HostUsage, SandboxMetrics

GUEST_WITHIN_S = 3.0
"""How long a guest may take to say what it uses: whoever asks has a table of others to show."""

log = logging.getLogger(__name__)


async def of(held: Holding, state: str, link: GuestLink | None, launcher: LauncherClient) -> SandboxMetrics:
    """Asks guest and host at once. What cannot be had is left out, and never an error: the one is no reason to hide the other."""
    observed_at = time.time()
    (guest, why), host = await asyncio.gather(_guest(state, link), _host(held, launcher))
    return SandboxMetrics(
        sandbox_id=held.name, state=state, observed_at=observed_at, guest=guest, guest_error=why, host=host
    )


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads, in seconds; 0 where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field is the program's name, which may hold anything; utime and stime are the 14th and 15th.
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def disk_bytes(folder: Path) -> int:
    """What the files of a sandbox take on the host, in octets, beside those that it has in common with others (links)."""
    found = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    found += status.st_blocks * 512
    except OSError:  # it is just being made, or removed
        return found
    return found


async def _guest(state: str, link: GuestLink | None) -> tuple[GuestUsage | None, str]:
    if state != State.RUNNING or link is None:
        return None, f"The sandbox is {state}."
    try:
        async with asyncio.timeout(GUEST_WITHIN_S):
            return _told(await link.metrics()), ""
    except TimeoutError:
        return None, f"The guest did not answer within {GUEST_WITHIN_S:g} seconds."
    except (GuestError, LinkLost) as error:
        return None, f"The guest did not say it: {error}"


def _told(metrics: GuestMetrics) -> GuestUsage:
    return GuestUsage(
        uptime_s=metrics.uptime_ns / 1e9,
        cpus=metrics.cpus,
        cpu_user_s=metrics.utime_us / 1e6,
        cpu_system_s=metrics.stime_us / 1e6,
        load1=metrics.load1_milli / 1e3,
        processes=metrics.processes,
        memory_total_bytes=metrics.memory_total_kib << 10,
        memory_available_bytes=metrics.memory_available_kib << 10,
        memory_cached_bytes=metrics.memory_cached_kib << 10,
        disk_total_bytes=metrics.disk_total,
        disk_free_bytes=metrics.disk_free,
    )


async def _host(held: Holding, launcher: LauncherClient) -> HostUsage:
    disk = await asyncio.to_thread(disk_bytes, held.folder)
    if not held.pid:
        return HostUsage(disk_bytes=disk)
    counted = VmUsage()
    try:
        counted = await launcher.inspect_vm(held.name)
    except VmmError as error:
        log.warning("%s: its cgroup could not be looked at: %s", held.name, error)
    return HostUsage(
        cpu_s=cpu_s(held.pid),
        memory_bytes=counted.memory_bytes,
        memory_private_bytes=private_memory_mib(held.pid) << 20,
        memory_peak_bytes=counted.memory_peak_bytes,
        memory_limit_bytes=counted.memory_limit_bytes,
        processes=counted.processes,
        oom_kills=counted.oom_kills,
        disk_bytes=disk,
    )
