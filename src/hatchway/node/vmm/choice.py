"""Which driver a node uses, and why: what the operator asked for, what this host can do, what the sandboxes were made with."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hatchway.domain.host_limits import DEFAULTS, HostLimits
from hatchway.domain.vmm_policy import VmmPolicy
from hatchway.node.vmm import firecracker_install, firecracker_probe
from hatchway.node.vmm.firecracker import FirecrackerDriver
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.qemu import QemuDriver
from hatchway.node.vmm.seam import Driver, VmmError
from hatchway.wire.small_files import replace_file

MARK = "vmm.json"
"""File in the node's folder that says what its sandboxes were made with."""

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """A driver's name, and the reason for people."""

    driver: str
    why: str


def used_before(folder: Path) -> str | None:
    """The driver that the sandboxes in a node's folder were made with; None when there are none."""
    if not any((folder / "sandboxes").glob("*")):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
        return str(msgspec.json.decode((folder / MARK).read_bytes())["driver"])
    return "qemu"  # before there was a choice


async def choose(policy: VmmPolicy, folder: Path, verdicts: Path, kernel: Path | None = None) -> Choice:
    """Decides for the node in `folder`; `verdicts` and `kernel` as for `firecracker_probe.verdict`.

    Raises `VmmError` with the way out where what was asked for by name cannot be, or the sandboxes were made with something else.
    """
    before = await asyncio.to_thread(used_before, folder)
    if policy.driver != "auto" and before is not None and before != policy.driver:
        raise VmmError(
            f"The sandboxes of this node were made with {before}, whose disks and memory {policy.driver} cannot use. "
            f'Delete or export them first, or set `driver = "{before}"` (or "auto") in [vmm] of hatchway.toml.'
        )
    if policy.driver == "qemu" or before == "qemu":
        why = "it was asked for by name" if policy.driver == "qemu" else "the sandboxes here were made with it"
        return Choice("qemu", why)
    lack = await _lack_of_firecracker(policy, verdicts, kernel)
    if lack is None:
        asked = policy.driver == "firecracker"
        return Choice("firecracker", "it was asked for by name" if asked else "it is installed, and KVM runs guests")
    if policy.driver == "firecracker" or before == "firecracker":
        raise VmmError(f"Firecracker cannot be used here: {lack}")
    return Choice("qemu", f"Firecracker is not used: {lack}")


async def _lack_of_firecracker(policy: VmmPolicy, verdicts: Path, kernel: Path | None) -> str | None:
    """Says what is in the way of Firecracker; None when nothing is."""
    scope = _ptrace_scope()
    if scope > 1:
        return f"Yama's ptrace scope is {scope}: its shim could not read which files it opens. sysctl -w kernel.yama.ptrace_scope=1"
    try:
        configured = None if policy.firecracker is None else Path(policy.firecracker)
        installed = await asyncio.to_thread(firecracker_install.find, configured)
        firecracker_install.check(installed, policy.allow_advisories)
        verdict = await firecracker_probe.verdict(installed, verdicts, kernel)
    except (VmmError, OSError) as error:
        return str(error)
    if verdict is None:
        return "KVM was not probed with it yet."
    return None if verdict.works else verdict.detail


def _ptrace_scope() -> int:
    try:
        return int(YAMA.read_text())
    except (OSError, ValueError):
        return 0  # most kernels have no Yama


async def make(
    policy: VmmPolicy,
    *,
    launcher: LauncherClient,
    run_dir: Path,
    folder: Path,
    ram_library: Path,
    limits: HostLimits = DEFAULTS,
) -> Driver:
    """Makes the driver of the node in `folder` and notes which one it is. Raises `VmmMissing`, `VmmError`, `OSError`."""
    choice = await choose(policy, folder, run_dir)
    log.info("%s runs the sandboxes: %s", choice.driver, choice.why)
    driver: Driver
    if choice.driver == "firecracker":
        driver = await FirecrackerDriver.create(
            launcher=launcher,
            run_dir=run_dir,
            folder=folder / "vmm",
            binary=None if policy.firecracker is None else Path(policy.firecracker),
            allowed=policy.allow_advisories,
            limits=limits,
        )
    else:
        driver = await QemuDriver.create(
            launcher=launcher,
            run_dir=run_dir,
            folder=folder / "vmm",
            ram_library=ram_library,
            verdicts=run_dir,
            limits=limits,
        )
    await asyncio.to_thread(replace_file, folder / MARK, msgspec.json.encode({"driver": driver.name}))
    return driver
