"""What a sandbox costs in memory beside many others, against bare VMs that are made in turn with them."""

import contextlib
import json
from pathlib import Path

from hatchway.bench.floor import make_floor
from hatchway.bench.memory import children, pss_mib
from hatchway.bench.options import Options
from hatchway.bench.report import Metric
from hatchway.client import Hatchway
from hatchway.domain.shapes import Shape

SANDBOXES = 30
MEMORY_MIB = 256


def density(options: Options) -> list[Metric]:
    """Mean proportional memory of the VMMs of `SANDBOXES` sandboxes, and of what stands beside each of them on the host."""
    launcher = json.loads((options.data_dir / "run" / "roles.json").read_bytes())["launcher"]
    before = set(machines(launcher))
    with Hatchway() as hatchway, contextlib.ExitStack() as stack:
        # The first one of its shape makes the baked snapshot that all the others, and the bare ones, are restored from.
        hatchway.sandboxes.create(memory_mib=MEMORY_MIB).delete()
        floor = stack.enter_context(make_floor(options.data_dir, Shape(memory_mib=MEMORY_MIB)))
        bare = []
        for number in range(SANDBOXES):
            options.progress(f"sandbox {number + 1} of {SANDBOXES}")
            stack.enter_context(hatchway.sandboxes.create(memory_mib=MEMORY_MIB))
            bare.append(stack.enter_context(floor.vm())[0].pid)
        ours = {vmm: shim for vmm, shim in machines(launcher).items() if vmm not in before}
        if len(ours) != SANDBOXES:
            raise RuntimeError(f"{len(ours)} machines run, not {SANDBOXES}")
        vmm = sum(map(pss_mib, ours)) / SANDBOXES
        shim = sum(map(pss_mib, ours.values())) / SANDBOXES
        floor_mib = sum(map(pss_mib, bare)) / SANDBOXES
    return [
        Metric("density", "vmm_pss", vmm, "MiB", SANDBOXES, floor_mib),
        Metric("density", "shim_pss", shim, "MiB", SANDBOXES),
        Metric("density", "pss_over_bare", vmm + shim - floor_mib, "MiB", SANDBOXES),
    ]


def machines(launcher: int) -> dict[int, int]:
    """The VMMs below a launcher, each with its shim. A shim is the first process of a namespace: its VMM may stand below a further one."""
    found: dict[int, int] = {}
    for shim in children(launcher):
        below = [shim]
        while below:
            pid = below.pop()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/vmm\0"):
                    found[pid] = shim
                else:
                    below += children(pid)
    return found
