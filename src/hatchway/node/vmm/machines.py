"""What QEMU is called and needs per processor architecture: the one table to extend for another one."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hatchway.node.vmm.seam import VmmError, VmmMissing


@dataclass(frozen=True)
class Machine:
    """How one architecture's machine is made with QEMU."""

    architecture: str
    binary: str
    """Name of the emulator that has software emulation."""
    kvm_binary: str
    """A smaller emulator that has KVM only; used instead where it is installed and KVM works."""
    package: str
    """Debian package that brings them."""
    machine: str
    """Value of `-M`, without accelerator and memory backend."""
    bus: str
    """Suffix of the virtio devices' names."""
    emulated_cpu: str
    hardware_cpu: str
    cmdline: str
    """Kernel arguments that every guest of this machine needs."""
    emulated_cmdline: str
    """Further ones under software emulation; `{tsc_khz}` is filled in."""
    firmware: tuple[str, ...]
    """The first one is needed, the others are taken where this build of QEMU has them."""
    modules: tuple[str, ...]
    """Shared objects that QEMU loads by itself, where this build has them."""


MACHINES: dict[str, Machine] = {
    "x86_64": Machine(
        architecture="x86_64",
        binary="qemu-system-x86_64",
        kvm_binary="qemu-system-x86_64-microvm",
        package="qemu-system-x86",
        # Distribution kernels find the virtio devices through ACPI only; the old timers and the clock are what they boot with.
        machine="microvm,acpi=on,pit=on,pic=on,rtc=on,dump-guest-core=off",
        bus="device",
        # A guest that believes in fast string instructions copies with `rep movsb`, which is emulated octet by octet: without the flag
        # it moves eight at a time, and pipes, files and new pages are four times as fast.
        emulated_cpu="max,erms=off",
        hardware_cpu="host",
        cmdline="console=ttyS0 reboot=t panic=-1 pci=off",
        # Calibration of the time-stamp counter against the emulated timer fails at random on a busy host and the boot then
        # hangs: the counter is the host's own, so its frequency is known. The timer interrupt check and the clock watchdog fail the same way.
        emulated_cmdline="tsc_early_khz={tsc_khz} tsc=reliable no_timer_check",
        firmware=("bios-microvm.bin", "qboot.rom", "pvh.bin", "linuxboot_dma.bin", "linuxboot.bin"),
        modules=("accel-tcg-x86_64.so",),
    ),
}


@dataclass(frozen=True)
class Installed:
    """A QEMU that is installed on this host."""

    machine: Machine
    binary: Path
    version: str
    """For example `7.2.22`."""
    firmware: tuple[Path, ...]
    modules: tuple[Path, ...]


def machine_of(architecture: str) -> Machine:
    """Returns the table's row. Raises `VmmMissing` for an architecture that is not in it."""
    try:
        return MACHINES[architecture]
    except KeyError:
        raise VmmMissing(
            f"There is no QEMU machine for {architecture} here; supported: {', '.join(sorted(MACHINES))}."
        ) from None


def find(machine: Machine, *, hardware: bool, path: str | None = None) -> Installed:
    """Finds QEMU on `path` (default: the environment's). Raises `VmmMissing` naming the package, `VmmError` when it does not run."""
    names = (machine.kvm_binary, machine.binary) if hardware else (machine.binary,)
    for name in names:
        found = shutil.which(name, path=path)
        if found is not None:
            return _look_at(machine, Path(found).resolve())
    raise VmmMissing(
        f"{machine.binary} is not installed. Install it: apt-get install --no-install-recommends {machine.package}"
    )


def _look_at(machine: Machine, binary: Path) -> Installed:
    version = re.search(r"version (\d+(?:\.\d+)+)", _output(binary, "--version"))
    if version is None:
        raise VmmError(f"{binary} does not say its version")
    folders = [Path(line.strip()) for line in _output(binary, "-L", "help").splitlines() if line.startswith("/")]
    firmware = [_first(folders, name) for name in machine.firmware]
    if firmware[0] is None:
        raise VmmMissing(
            f"The firmware {machine.firmware[0]} of {binary} is not there (looked in {', '.join(map(str, folders))}). "
            f"Install {machine.package} again, or the package seabios."
        )
    return Installed(
        machine=machine,
        binary=binary,
        version=version[1],
        firmware=tuple(path for path in firmware if path is not None),
        modules=tuple(path for name in machine.modules if (path := _first(_module_folders(binary), name)) is not None),
    )


def _output(binary: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise VmmError(f"{binary} does not run: {error}") from error
    return done.stdout


def _module_folders(binary: Path) -> list[Path]:
    prefix = binary.parent.parent
    folders = [prefix / "lib64" / "qemu", prefix / "lib" / "qemu", *sorted((prefix / "lib").glob("*-linux-*/qemu"))]
    override = os.environ.get("QEMU_MODULE_DIR")
    return [Path(override), *folders] if override else folders


def _first(folders: list[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
