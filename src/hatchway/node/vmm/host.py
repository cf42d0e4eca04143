"""What memory images depend on in a host: its boot id, its CPU and the frequency of its time-stamp counter."""

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from hatchway.node.vmm.seam import VmmError

_STABLE_CPU_KEYS = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU part",
    "Features",
)


@dataclass(frozen=True)
class Host:
    """One host, as far as snapshots care."""

    architecture: str
    boot_id: str
    cpu_model: str
    cpu_digest: str
    """SHA-256 over vendor, family, model, stepping and flags, in hex."""
    tsc_khz: int
    """Frequency of the time-stamp counter; 0 on a CPU that has none."""
    cpus: int

    @classmethod
    def read(cls, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> "Host":
        """Reads the host that this process runs on. Raises `VmmError` when the counter's frequency cannot be learned."""
        cpu = _first_cpu((proc / "cpuinfo").read_text())
        stable = "\n".join(f"{key}={cpu[key]}" for key in _STABLE_CPU_KEYS if key in cpu)
        architecture = platform.machine()
        return cls(
            architecture=architecture,
            boot_id=(proc / "sys/kernel/random/boot_id").read_text().strip(),
            cpu_model=cpu.get("model name", cpu.get("CPU part", "unknown")),
            cpu_digest=hashlib.sha256(stable.encode()).hexdigest(),
            tsc_khz=_tsc_khz(cpu, sys) if architecture in ("x86_64", "i686") else 0,
            cpus=os.cpu_count() or 1,
        )


def _first_cpu(cpuinfo: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for line in cpuinfo.split("\n\n", 1)[0].splitlines():
        key, colon, value = line.partition(":")
        if colon:
            pairs[key.strip()] = value.strip()
    return pairs


def _tsc_khz(cpu: dict[str, str], sys: Path) -> int:
    """The kernel's own figure where it shows one; else from BogoMIPS, which on x86 is the counter's MHz times two, in full
    digits when "cpu MHz" agrees with it (it does where the CPU has no frequency scaling, as in a virtual machine).
    """
    shown = sys / "devices/system/cpu/cpu0/tsc_freq_khz"
    try:
        return int(shown.read_text())
    except (OSError, ValueError):
        pass
    try:
        bogo_khz = round(float(cpu["bogomips"]) * 500)
    except (KeyError, ValueError):
        raise VmmError(
            "The frequency of the CPU's time-stamp counter cannot be read from /proc/cpuinfo (no bogomips line)."
        ) from None
    if re.fullmatch(r"\d+\.\d+", cpu.get("cpu MHz", "")):
        mhz_khz = round(float(cpu["cpu MHz"]) * 1000)
        if abs(mhz_khz - bogo_khz) <= 5:
            return mhz_khz
    return bogo_khz
