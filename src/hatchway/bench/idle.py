"""What our own processes cost while nothing happens: proportional memory and processor time, the VMs' own left out."""

import json
import os
import time
from pathlib import Path

from hatchway.bench.report import Metric
from hatchway.domain.errors import NotFound

SECONDS = 20.0


def measure(data_dir: Path) -> list[Metric]:
    """Watches supervisor, roles and parked shims for 20 s. Raises `NotFound("not_up")` when no service runs on this folder."""
    try:
        roles = json.loads((data_dir / "run" / "roles.json").read_bytes())
        supervisor = json.loads((data_dir / "endpoint.json").read_bytes())["pid"]
    except FileNotFoundError:
        raise NotFound("not_up", f"No service runs on {data_dir}.", "Start it: hatchway up.") from None
    pids = [supervisor, *roles.values(), *_children(roles["launcher"])]
    before = sum(_cpu_s(pid) for pid in pids)
    began = time.monotonic()
    time.sleep(SECONDS)
    share = (sum(_cpu_s(pid) for pid in pids) - before) / (time.monotonic() - began)
    return [
        Metric("idle", "idle_pss", sum(_pss_mib(pid) for pid in pids), "MiB", 1),
        Metric("idle", "idle_cpu", share * 100, "%", 1),
    ]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0
