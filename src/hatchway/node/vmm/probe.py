"""Finds out what this host can really do: whether KVM runs a guest kernel, and what else a sandbox needs.

A device node says nothing: on a machine that is itself virtual `/dev/kvm` may open and its guests crawl. So the real guest kernel is
booted under it, for a moment, as a plain child of this process. Needs no launcher: `hatchway doctor` runs before anything is up.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from hatchway.node.vmm import advisories, machines
from hatchway.node.vmm.host import Host
from hatchway.node.vmm.machines import Installed, Machine
from hatchway.node.vmm.seam import VmmError
from hatchway.wire.small_files import replace_file

VERDICTS_FILE = "kvm-verdicts.json"
KVM_WITHIN_S = 2.5
"""A distribution's kernel boots to the search for its root in half a second where KVM works, nested included."""
_MAX_VERDICTS = 16
_MAX_CONSOLE = 1024 * 1024
_FICLONE = 0x40049409

# The kernel is booted without an initramfs and a root: the last thing that it says is that it has none.
_PROGRESS = (b"Unable to mount root fs", b"VFS: Cannot open root device", b"Run /sbin/init", b"Run /init")

Status = Literal["ok", "degraded", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `degraded`: it works without, less well or less safely; `missing`: sandboxes cannot run."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about KVM, for one boot of the host, one VMM binary and one guest kernel."""

    boot_id: str
    vmm_sha256: str
    kernel_sha256: str
    works: bool
    detail: str
    taken_at: float


# -- KVM


async def kvm_works(machine: Machine, folder: Path, kernel: Path | None) -> bool:
    """Tells whether VMs shall use KVM: the verdict that is cached in `folder`, or, when a `kernel` is given, a fresh one.

    Without a verdict and a kernel the answer is False. Raises `VmmMissing` when there is no QEMU.
    """
    verdict = await kvm_verdict(machine, folder, kernel)
    return verdict is not None and verdict.works


async def kvm_verdict(machine: Machine, folder: Path, kernel: Path | None, *, fresh: bool = False) -> Verdict | None:
    """Returns the cached verdict, or takes one with `kernel` and caches it; None when there is neither.

    `fresh` takes it anew. Raises `VmmMissing`, `VmmError`, `OSError` (the folder cannot be written).
    """
    installed = await asyncio.to_thread(machines.find, machine, hardware=True)

    async def attempt(image: Path) -> tuple[bool, str]:
        return await try_kvm(installed, image)

    return await verdict_on(installed.binary, folder, kernel, attempt, fresh=fresh)


async def verdict_on(
    binary: Path,
    folder: Path,
    kernel: Path | None,
    attempt: Callable[[Path], Awaitable[tuple[bool, str]]],
    *,
    fresh: bool = False,
) -> Verdict | None:
    """Returns the verdict on KVM with one VMM that is cached in `folder`, or has `attempt` take it with `kernel`; None when there is neither.

    `attempt` tells whether the kernel came through, and what happened. Raises what it raises, `OSError`.
    """
    boot_id = Host.read().boot_id
    vmm = await asyncio.to_thread(_sha256, binary)
    kernel_digest = await asyncio.to_thread(_sha256, kernel) if kernel is not None else None
    kept = [known for known in _load(folder) if known.boot_id == boot_id]
    if not fresh:
        for known in reversed(kept):
            if known.vmm_sha256 == vmm and kernel_digest in (None, known.kernel_sha256):
                return known
    if kernel is None or kernel_digest is None:
        return None
    works, detail = await attempt(kernel)
    verdict = Verdict(
        boot_id=boot_id,
        vmm_sha256=vmm,
        kernel_sha256=kernel_digest,
        works=works,
        detail=detail,
        taken_at=time.time(),
    )
    await asyncio.to_thread(_store, folder, [*kept, verdict][-_MAX_VERDICTS:])
    return verdict


async def try_kvm(installed: Installed, kernel: Path, within: float = KVM_WITHIN_S) -> tuple[bool, str]:
    """Boots `kernel` under KVM for at most `within` seconds. Returns whether it came through, and what happened, for people."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return False, f"/dev/kvm cannot be opened: {os.strerror(error.errno or 0)}."
    machine = installed.machine
    command = [
        str(installed.binary),
        *("-M", machine.machine, "-accel", "kvm", "-cpu", machine.hardware_cpu, "-m", "256M", "-smp", "1"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-kernel", str(kernel), "-append", f"{machine.cmdline} root=/dev/none"),
    ]
    return await boots(command, "QEMU", within)


async def boots(command: Sequence[str], name: str, within: float = KVM_WITHIN_S) -> tuple[bool, str]:
    """Runs a VMM whose guest has a kernel, a console on standard output and no root, until the kernel misses its root.

    Returns whether it came so far within `within` seconds, and what happened, for people. Raises `OSError`.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    started = time.monotonic()
    console = bytearray()
    try:
        async with asyncio.timeout(within):
            came_through = await _watch(process, console)
    except TimeoutError:
        came_through = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stderr is not None
        words = (await process.stderr.read(65_536)).decode(errors="replace").strip()
        await process.wait()
    took = time.monotonic() - started
    if came_through:
        return True, f"The guest kernel came through under KVM with {name} in {took:.1f} s."
    last = console.decode(errors="replace").strip().splitlines()[-1:] or ["no line at all"]
    if came_through is None:
        return (
            False,
            f"KVM opens, but the guest kernel made no progress with {name} within {within:g} s (last line: {last[0][:120]!r}).",
        )
    return False, f"KVM opens, but {name} ended: {words[-300:] or last[0][:120]!r}."


async def _watch(process: asyncio.subprocess.Process, console: bytearray) -> bool:
    assert process.stdout is not None
    while octets := await process.stdout.read(65_536):
        console += octets
        if any(word in console for word in _PROGRESS):
            return True
        if len(console) > _MAX_CONSOLE:
            return False
    return False


def _load(folder: Path) -> list[Verdict]:
    try:
        return msgspec.json.decode((folder / VERDICTS_FILE).read_bytes(), type=list[Verdict])
    except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
        return []  # a damaged cache is taken anew


def _store(folder: Path, verdicts: list[Verdict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Readable by all: whoever may open /dev/kvm takes the verdict, and the node, which may not, goes by it.
    replace_file(folder / VERDICTS_FILE, msgspec.json.encode(verdicts), mode=0o644)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- everything


async def examine(*, data: Path, verdicts: Path, kernel: Path | None = None, fresh: bool = False) -> list[Finding]:
    """Looks at all that a sandbox needs of this host, in the order in which a reader wants it. Raises nothing that it can report.

    `data` is the folder for disks (or where it will be); `verdicts` and `kernel` as for `kvm_verdict`.
    """
    found = [await asyncio.to_thread(_qemu)]
    found.append(await _kvm(verdicts, kernel, fresh))
    for look in (_tun, _user_namespaces, _cgroups, _yama, _clock):
        found.append(await asyncio.to_thread(look))
    found.append(await asyncio.to_thread(_reflink, data))
    return found


def _qemu() -> Finding:
    try:
        machine = machines.machine_of(Host.read().architecture)
        installed = machines.find(machine, hardware=False)
        behind = advisories.affecting(installed.version)
    except VmmError as error:
        return Finding("qemu", "missing", str(error), "apt-get install --no-install-recommends qemu-system-x86")
    label = f"QEMU {installed.version} at {installed.binary}"
    if tuple(int(part) for part in installed.version.split(".")[:2]) < advisories.MIN_SERIES:
        oldest = ".".join(map(str, advisories.MIN_SERIES))
        return Finding("qemu", "missing", f"{label} is older than {oldest}.", f"Install QEMU {oldest} or newer.")
    if behind:
        names = "; ".join(f"{advisory.name} ({advisory.what})" for advisory in behind)
        return Finding("qemu", "degraded", f"{label} is behind advisories: {names}.", f"Upgrade {machine.package}.")
    return Finding("qemu", "ok", f"{label}; no known advisory.")


async def _kvm(verdicts: Path, kernel: Path | None, fresh: bool) -> Finding:
    remedy = (
        "Sandboxes run under software emulation, labelled `isolation: emulated`: slower, and not a boundary that QEMU's makers "
        "support. Use a host with hardware virtualization (bare metal, or a virtual machine with nested virtualization) for others' code."
    )
    try:
        verdict = await kvm_verdict(machines.machine_of(Host.read().architecture), verdicts, kernel, fresh=fresh)
    except (VmmError, OSError) as error:
        return Finding("kvm", "degraded", f"KVM could not be probed: {error}", remedy)
    if verdict is None:
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return Finding("kvm", "degraded", "/dev/kvm is not there or not open to this user.", remedy)
        return Finding(
            "kvm", "degraded", "KVM was not probed: there is no guest kernel yet.", "Build a template, then ask again."
        )
    if verdict.works:
        return Finding("kvm", "ok", verdict.detail)
    return Finding("kvm", "degraded", verdict.detail, remedy)


def _tun() -> Finding:
    remedy = "Load the module: modprobe tun. Without it sandboxes have no network."
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        return Finding(
            "tun", "degraded", "/dev/net/tun is not open to this user.", "Run as root, or grant access to the device."
        )
    except OSError as error:
        return Finding("tun", "degraded", f"/dev/net/tun: {os.strerror(error.errno or 0)}.", remedy)
    return Finding("tun", "ok", "/dev/net/tun opens.")


def _user_namespaces() -> Finding:
    remedy = (
        "Rootless use needs them: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000 "
        "(Ubuntu also: kernel.apparmor_restrict_unprivileged_userns=0)."
    )
    try:
        # In a program of its own: a process that has threads cannot make one.
        tried = subprocess.run(["unshare", "--user", "true"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("user namespaces", "degraded", f"unshare does not run: {error}", "Install util-linux.")
    if tried.returncode == 0:
        return Finding("user namespaces", "ok", "A user namespace can be made.")
    return Finding("user namespaces", "degraded", f"No user namespace: {tried.stderr.strip()[:200]}.", remedy)


def _cgroups(root: Path = Path("/sys/fs/cgroup")) -> Finding:
    wanted = ("memory", "cpu", "pids")
    try:
        controllers = (root / "cgroup.controllers").read_text().split()
    except OSError:
        there = [name for name in wanted if (root / name / "cgroup.procs").exists()]
        if not there:
            return Finding(
                "cgroups",
                "degraded",
                "No control groups are mounted: limits of VMs are not enforced.",
                "Mount cgroup2.",
            )
        detail = f"Control groups version 1; enforced: {', '.join(there)}."
        lacks = [name for name in wanted if name not in there]
    else:
        lacks = [name for name in wanted if name not in controllers]
        detail = f"Control groups version 2; controllers: {', '.join(name for name in wanted if name not in lacks)}."
    if lacks:
        return Finding(
            "cgroups", "degraded", f"{detail} Not enforced: {', '.join(lacks)}.", "Enable these controllers."
        )
    return Finding("cgroups", "ok", detail)


def _yama() -> Finding:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return Finding("yama", "ok", "Yama is not active.")
    if scope <= 1:
        return Finding("yama", "ok", f"Yama's ptrace scope is {scope}: a shim may read the memory of its VMM.")
    return Finding(
        "yama",
        "degraded",
        f"Yama's ptrace scope is {scope}: the memory of a running sandbox cannot be captured.",
        "sysctl -w kernel.yama.ptrace_scope=1" + (" (after a reboot: 3 cannot be lowered)" if scope > 2 else ""),
    )


def _clock() -> Finding:
    try:
        host = Host.read()
    except VmmError as error:
        return Finding("clock", "degraded", str(error), "Guests under software emulation may fail to boot at times.")
    if not host.tsc_khz:
        return Finding("clock", "ok", f"{host.architecture}: no time-stamp counter to care for.")
    return Finding("clock", "ok", f"The time-stamp counter runs at {host.tsc_khz / 1000:.3f} MHz ({host.cpu_model}).")


def _reflink(data: Path) -> Finding:
    there = next(folder for folder in (data, *data.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free // 2**20
    try:
        with tempfile.TemporaryFile(dir=there) as source, tempfile.TemporaryFile(dir=there) as target:
            source.write(bytes(4096))
            source.flush()
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.EXDEV, errno.ENOSYS):
            return Finding("disks", "degraded", f"{there}: {error.strerror}.", "Give the service's user write access.")
        return Finding(
            "disks",
            "ok",
            f"{free} MiB free; no reflinks on this file system: disks are layered, and copied where a copy is needed.",
            "XFS or Btrfs copies disks at once.",
        )
    return Finding("disks", "ok", f"{free} MiB free; the file system has reflinks.")
