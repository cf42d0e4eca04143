"""`python -m hatchway.node.vmm.verdicts FOLDER KERNEL POLICY`: takes the verdicts on KVM where FOLDER has none for this boot, and says them.

Run by the supervisor, before the roles that may not open /dev/kvm themselves. POLICY is the settings' table `vmm` as JSON.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hatchway.domain.vmm_policy import VmmPolicy
from hatchway.node.vmm import firecracker_install, firecracker_probe, machines, probe
from hatchway.node.vmm.host import Host
from hatchway.node.vmm.seam import VmmError


async def take(folder: Path, kernel: Path, policy: VmmPolicy) -> list[str]:
    """Takes the verdict with each VMM that may be used; returns what was found, for people. Raises `VmmError`, `OSError` for QEMU's."""
    said = []
    if policy.driver != "firecracker":
        found = await probe.kvm_verdict(machines.machine_of(Host.read().architecture), folder, kernel)
        said.append(found.detail if found is not None else "no verdict")
    if policy.driver != "qemu":
        try:
            configured = None if policy.firecracker is None else Path(policy.firecracker)
            installed = firecracker_install.find(configured)
            firecracker_install.check(installed, policy.allow_advisories)
            found = await firecracker_probe.verdict(installed, folder, kernel)
            said.append(found.detail if found is not None else "no verdict")
        except (VmmError, OSError) as error:
            said.append(str(error))
    return said


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    folder, kernel, policy = arguments
    try:
        said = asyncio.run(take(Path(folder), Path(kernel), msgspec.json.decode(policy, type=VmmPolicy)))
    except (VmmError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
