"""What this host can hold: checked before a sandbox is made, with the reason in the refusal."""

import os
import shutil
from pathlib import Path

from hatchway.domain.errors import HostExhausted, Unprocessable
from hatchway.domain.shapes import Shape

DISK_RESERVE_MIB = 512
"""Free space that creation leaves: records, spools and databases go on where sandboxes do not."""
MEMORY_RESERVE_MIB = 256


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


def check(shape: Shape, folder: Path, overhead_mib: int) -> None:
    """Refuses a shape that this host can never hold (`Unprocessable`) or cannot hold now (`HostExhausted`).

    `overhead_mib` is what the VMM needs beside the guest's memory.
    """
    total, usage = total_memory_mib(), shutil.disk_usage(folder)
    if shape.vcpus > max_vcpus():
        raise Unprocessable(
            "vcpus_out_of_range", f"This host gives a sandbox at most {max_vcpus()} vcpus.", "Ask for fewer vcpus."
        )
    if shape.memory_mib + overhead_mib > total:
        raise Unprocessable(
            "memory_out_of_range",
            f"{shape.memory_mib} MiB and the VMM's {overhead_mib} MiB exceed the host's {total} MiB.",
            "Ask for less memory_mib.",
        )
    if shape.disk_mib > usage.total // 2**20:
        raise Unprocessable(
            "disk_out_of_range",
            f"{shape.disk_mib} MiB exceed the file system of the data folder ({usage.total // 2**20} MiB).",
            "Ask for less disk_mib.",
        )
    if usage.free // 2**20 < DISK_RESERVE_MIB:
        raise HostExhausted(
            "host_disk_full",
            f"Less than {DISK_RESERVE_MIB} MiB are free on the file system of the data folder.",
            "Free space there, or delete sandboxes, then try again.",
        )
    if available_memory_mib() < MEMORY_RESERVE_MIB + overhead_mib:
        raise HostExhausted(
            "host_memory_full",
            "The host has too little memory left.",
            "Delete or stop other sandboxes, then try again.",
        )
