"""The benches, and those of them that are about time: `floor`, `create`, `exec`. Each measures the service and the bare floor in turn, in the same run."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hatchway import client
from hatchway.bench.concurrency import concurrency
from hatchway.bench.density import density
from hatchway.bench.e2b import e2b
from hatchway.bench.egress import egress
from hatchway.bench.files import files
from hatchway.bench.floor import make_floor
from hatchway.bench.hostile import fair, hostile, neighbour
from hatchway.bench.idle import measure
from hatchway.bench.lifecycle import fork, lifecycle
from hatchway.bench.options import Options
from hatchway.bench.policy import policy
from hatchway.bench.pools import pools
from hatchway.bench.recovery import recovery
from hatchway.bench.report import Metric, percentile, show
from hatchway.bench.slots import slots
from hatchway.bench.stream import stream
from hatchway.client import Hatchway, Sandbox
from hatchway.domain.errors import InvalidRequest, Unavailable

SIMULTANEOUS = 10
ROUNDS = 5
WARM_UP = 2


def floor(options: Options) -> list[Metric]:
    """What the bare VMM can do here: restore to the agent's answer, `true` and a Python in the VM."""
    with make_floor(options.data_dir) as bare:
        restores = [bare.restore() for _ in range(options.runs)]
        with bare.vm() as (vm, _):
            trues = [vm.execute(["/bin/true"]) for _ in range(options.runs)]
            pythons = [vm.execute(["/usr/bin/python3", "-c", "print(6*7)"]) for _ in range(5)]
    return [
        Metric("floor", "restore", statistics.median(restores), "ms", options.runs),
        Metric("floor", "restore_p95", percentile(restores, 95), "ms", options.runs),
        Metric("floor", "exec_true_first", trues[0], "ms", 1),
        Metric("floor", "exec_true", statistics.median(trues[1:]), "ms", options.runs - 1),
        Metric("floor", "exec_python", statistics.median(pythons[1:]), "ms", 4),
    ]


def create(options: Options) -> list[Metric]:
    """create→running through the API, against a bare restore; one at a time in turn with the floor, then ten at once."""
    ours: list[float] = []
    floors: list[float] = []
    with Hatchway() as hatchway, make_floor(options.data_dir) as bare:
        for number in range(WARM_UP + options.runs):
            options.progress(f"create {number + 1} of {WARM_UP + options.runs}")
            took, sandbox = _create(hatchway)
            sandbox.delete()
            took_bare = bare.restore()
            if number >= WARM_UP:
                ours.append(took)
                floors.append(took_bare)
        rounds = []
        for number in range(ROUNDS):
            options.progress(f"{SIMULTANEOUS} creates at once, round {number + 1} of {ROUNDS}")
            rounds.append(_at_once(hatchway))
    failed = sum(failures for _, failures in rounds)
    base = statistics.median(floors)
    return [
        Metric("create", "create_running", statistics.median(ours), "ms", options.runs, base),
        Metric("create", "create_running_p95", percentile(ours, 95), "ms", options.runs, base),
        Metric("create", "create_10_last", statistics.median(last for last, _ in rounds), "ms", ROUNDS, base),
        Metric("create", "create_10_failed", float(failed), "", ROUNDS * SIMULTANEOUS),
    ]


def _create(hatchway: Hatchway) -> tuple[float, Sandbox]:
    began = time.perf_counter()
    sandbox = hatchway.sandboxes.create()
    took = (time.perf_counter() - began) * 1e3
    if sandbox.state != "running":
        raise RuntimeError(f"the sandbox is {sandbox.state}")
    return took, sandbox


def _at_once(hatchway: Hatchway) -> tuple[float, int]:
    began = time.perf_counter()
    with ThreadPoolExecutor(SIMULTANEOUS) as pool:
        futures = [pool.submit(_create, hatchway) for _ in range(SIMULTANEOUS)]
        sandboxes = [future.result()[1] for future in futures if future.exception() is None]
        last = (time.perf_counter() - began) * 1e3
        for sandbox in sandboxes:
            sandbox.delete()
    return last, SIMULTANEOUS - len(sandboxes)


def execute(options: Options) -> list[Metric]:
    """`true` and a Python through API and data plane, against the same in a bare VM, in turn, once both are warm."""
    ours: dict[str, list[float]] = {"exec_true": [], "exec_python": []}
    bare_times: dict[str, list[float]] = {"exec_true": [], "exec_python": []}
    commands = {"exec_true": ["/bin/true"], "exec_python": ["/usr/bin/python3", "-c", "print(6*7)"]}
    with (
        Hatchway() as hatchway,
        make_floor(options.data_dir) as bare,
        bare.vm() as (vm, _),
        hatchway.sandboxes.create() as sandbox,
    ):
        for name, argv in commands.items():
            for number in range(WARM_UP + options.runs):
                options.progress(f"{name} {number + 1} of {WARM_UP + options.runs}")
                began = time.perf_counter()
                result = sandbox.run(argv)
                took = (time.perf_counter() - began) * 1e3
                if result.exit_code != 0:
                    raise RuntimeError(f"{argv} ended with {result.exit_code}")
                took_bare = vm.execute(argv, "user")
                if number >= WARM_UP:
                    ours[name].append(took)
                    bare_times[name].append(took_bare)
    return [
        Metric("exec", name, statistics.median(times), "ms", options.runs, statistics.median(bare_times[name]))
        for name, times in ours.items()
    ]


def idle(options: Options) -> list[Metric]:
    """What our processes cost while nothing happens."""
    options.progress("watching the idle service")
    return measure(options.data_dir)


BENCHES: dict[str, Callable[[Options], list[Metric]]] = {
    "floor": floor,
    "create": create,
    "pools": pools,
    "exec": execute,
    "idle": idle,
    "stream": stream,
    "files": files,
    "slots": slots,
    "density": density,
    "lifecycle": lifecycle,
    "fork": fork,
    "concurrency": concurrency,
    "hostile": lambda options: hostile(options.progress),
    "neighbour": lambda options: neighbour(options.runs),
    "fair": lambda _: fair(),
    "policy": lambda options: policy(options.runs),
    "egress": egress,
    "recovery": recovery,
    "e2b": e2b,
}


def run(names: Sequence[str], data_dir: Path, *, runs: int, as_json: bool) -> int:
    """Runs the named benches (all for none) and prints their metrics; returns the exit status. Raises `HatchwayError`."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise InvalidRequest("unknown_bench", f"There is no bench {unknown[0]!r}.", f"There are: {', '.join(BENCHES)}.")
    # The SDK finds the service of the same data folder.
    os.environ["HATCHWAY_DATA_DIR"] = str(data_dir)
    for name in names or BENCHES:
        try:
            metrics = BENCHES[name](Options(data_dir, runs, _progress))
        except client.HatchwayError as error:
            raise Unavailable(error.code, error.cause, error.remedy) from error
        finally:
            _progress("")
        show(metrics, as_json=as_json)
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
