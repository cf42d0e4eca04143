"""What our own processes cost while nothing happens: proportional memory and processor time, the VMs' own left out."""

import os
import time
from pathlib import Path

from hatchway.bench.memory import own_processes, pss_mib
from hatchway.bench.report import Metric

SECONDS = 20.0


def measure(data_dir: Path) -> list[Metric]:
    """Watches supervisor, roles and parked shims for 20 s. Raises `NotFound("not_up")` when no service runs on this folder."""
    pids = own_processes(data_dir)
    before = sum(_cpu_s(pid) for pid in pids)
    began = time.monotonic()
    time.sleep(SECONDS)
    share = (sum(_cpu_s(pid) for pid in pids) - before) / (time.monotonic() - began)
    return [
        Metric("idle", "idle_pss", sum(pss_mib(pid) for pid in pids), "MiB", 1),
        Metric("idle", "idle_cpu", share * 100, "%", 1),
    ]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
