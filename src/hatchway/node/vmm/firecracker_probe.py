"""Finds out whether Firecracker can be used on this host: which one is there, and whether KVM runs a guest kernel with it."""

import asyncio
import json
import os
import tempfile
from pathlib import Path

from hatchway.domain.vmm_policy import VmmPolicy
from hatchway.node.vmm import firecracker_args, firecracker_install, kernel_elf, probe
from hatchway.node.vmm.firecracker_install import FirecrackerRefused, Installed
from hatchway.node.vmm.probe import Finding, Verdict
from hatchway.node.vmm.seam import VmmError, VmmMissing


async def verdict(installed: Installed, folder: Path, kernel: Path | None, *, fresh: bool = False) -> Verdict | None:
    """Returns the verdict on KVM with this Firecracker: cached in `folder`, or taken with `kernel`; None when there is neither.

    Raises `VmmError` for a kernel that cannot be unpacked, `OSError`.
    """

    async def attempt(image: Path) -> tuple[bool, str]:
        return await try_kvm(installed, image)

    return await probe.verdict_on(installed.binary, folder, kernel, attempt, fresh=fresh)


async def try_kvm(installed: Installed, kernel: Path, within: float = probe.KVM_WITHIN_S) -> tuple[bool, str]:
    """Boots `kernel` for at most `within` seconds. Returns whether it came through, and what happened, for people."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return False, f"/dev/kvm cannot be opened: {os.strerror(error.errno or 0)}."
    with tempfile.TemporaryDirectory(prefix="hatchway-probe-") as folder:
        elf = await asyncio.to_thread(kernel_elf.Kernels(Path(folder)).elf, kernel)
        settings = {
            "boot-source": {"kernel_image_path": str(elf), "boot_args": f"{firecracker_args.CMDLINE} root=/dev/none"},
            "machine-config": {"vcpu_count": 1, "mem_size_mib": 256},
            "drives": [],
        }
        config = Path(folder) / "machine.json"
        config.write_text(json.dumps(settings))
        command = [str(installed.binary), "--no-api", "--config-file", str(config), "--level", "Error"]
        return await probe.boots(command, "Firecracker", within)


async def look(policy: VmmPolicy, verdicts: Path, kernel: Path | None) -> Finding:
    """What `hatchway doctor` says of Firecracker. Raises nothing that it can report."""
    configured = None if policy.firecracker is None else Path(policy.firecracker)
    wanted = policy.driver == "firecracker" or configured is not None
    try:
        installed = await asyncio.to_thread(firecracker_install.find, configured)
        firecracker_install.check(installed, policy.allow_advisories)
        found = await verdict(installed, verdicts, kernel)
    except VmmMissing as error:
        # Nobody needs it where QEMU is.
        return Finding(
            "firecracker", "missing" if wanted else "ok", str(error), "docs/installation.md shows how to bring it."
        )
    except FirecrackerRefused as error:
        return Finding("firecracker", "degraded", str(error), "Install another release.")
    except (VmmError, OSError) as error:
        return Finding(
            "firecracker", "degraded", f"It cannot be used: {error}", "docs/installation.md shows how to bring it."
        )
    label = f"Firecracker {installed.version} at {installed.binary}"
    if found is None:
        return Finding("firecracker", "ok", f"{label}; KVM was not probed with it yet.")
    return Finding(
        "firecracker",
        "ok" if found.works else "degraded",
        f"{label}. {found.detail}",
        "" if found.works else "It needs a host with hardware virtualization.",
    )
