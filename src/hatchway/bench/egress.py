"""`hatchway bench egress`: what the gateway costs, against no gateway and against mitmproxy where it is installed, in turn in one run.

Beside any service, in a network namespace of its own (`egress_ground`); it needs root for that.
"""

import json
import os
import shutil
import subprocess
import sys

from hatchway.bench.options import Options
from hatchway.bench.report import Metric
from hatchway.domain.errors import Unavailable

IDLE = 200
MAX_RUNS = 10
"""Each run takes some ten seconds."""
WITHIN_S = 900


def egress(options: Options) -> list[Metric]:
    """Kept-alive requests and handshakes through interception, latency, octets of a relay, memory, and what a flood does to a neighbour."""
    if os.geteuid() != 0:
        raise Unavailable("not_allowed", "The bench `egress` makes a network namespace.", "Run it as root.")
    proxy = shutil.which("mitmdump") or ""
    if not proxy:
        options.progress("there is no mitmdump on PATH: nothing is compared with it")
    runs = min(options.runs, MAX_RUNS)
    options.progress(f"egress, {runs} runs")
    return measured(runs, proxy)


def measured(runs: int, proxy: str, *, idle: int = IDLE, seconds: float = 1.0) -> list[Metric]:
    """The figures, each rate taken for so many seconds. Raises `Unavailable`."""
    ground = [sys.executable, "-m", "hatchway.bench.egress_ground", str(runs), proxy, str(idle), str(seconds)]
    command = ["unshare", "--net", *ground]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise Unavailable(
            "not_allowed", f"The bench's processes did not run: {last[:300]}", "It needs root and iproute2."
        )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [Metric("egress", one["metric"], one["value"], one["unit"], one["runs"], one["floor"]) for one in lines]
