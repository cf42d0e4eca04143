"""What it costs to keep a machine, to bring it back and to branch it, against bare restores in the same run.

The costs follow what was touched: the curves are over what the guest changed in memory since the baked snapshot, and over what it wrote to its disk.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hatchway.bench.density import machines
from hatchway.bench.floor import Floor, make_floor
from hatchway.bench.memory import private_mib, pss_mib
from hatchway.bench.options import Options
from hatchway.bench.report import Metric
from hatchway.client import Hatchway, Sandbox
from hatchway.domain.shapes import Shape

SMALL = Shape(memory_mib=256)
LARGE = Shape(memory_mib=2048, disk_mib=8192)
DIRTY_MIB = (13, 128, 512)
WRITTEN_MIB = (0, 1024)
CURVE_RUNS = 3
BRANCHES = 10
CHAIN = 50
_FILL = "head -c {mib}M /dev/urandom > /dev/shm/dirty"
_WRITE = "head -c {mib}M /dev/urandom > written && sync"


def lifecycle(options: Options) -> list[Metric]:
    """Suspend and restore: an idle sandbox, then the curves."""
    suspends: list[float] = []
    restores: list[float] = []
    stored: list[float] = []
    floors: list[float] = []
    with Hatchway() as hatchway, _stand(hatchway, options, SMALL) as (sandbox, floor):
        for number in range(options.runs + 1):
            options.progress(f"suspend and restore {number + 1} of {options.runs + 1}")
            suspended, restored = _timed(sandbox.suspend), sandbox.refresh().stored_bytes
            again = _timed(sandbox.restore)
            bare = floor.restore()
            if number:
                suspends.append(suspended)
                restores.append(again)
                stored.append((restored or 0) / 2**20)
                floors.append(bare)
    base = statistics.median(floors)
    metrics = [
        Metric("lifecycle", "suspend_idle", statistics.median(suspends), "ms", options.runs, base),
        Metric("lifecycle", "restore_idle", statistics.median(restores), "ms", options.runs, base),
        Metric("lifecycle", "stored_idle", max(stored), "MiB", options.runs),
    ]
    for name, fill in _loads():
        metrics += _curve(options, name, fill)
    return metrics


def _curve(options: Options, name: str, fill: str) -> list[Metric]:
    times: dict[str, list[float]] = {"suspend": [], "restore": [], "stored": []}
    floors: list[float] = []
    with Hatchway() as hatchway, _stand(hatchway, options, LARGE) as (sandbox, floor):
        sandbox.run(fill).check()
        for number in range(CURVE_RUNS):
            options.progress(f"{name}, run {number + 1} of {CURVE_RUNS}")
            times["suspend"].append(_timed(sandbox.suspend))
            times["stored"].append((sandbox.refresh().stored_bytes or 0) / 2**20)
            times["restore"].append(_timed(sandbox.restore))
            floors.append(floor.restore())
    base = statistics.median(floors)
    return [
        Metric("lifecycle", f"suspend_{name}", statistics.median(times["suspend"]), "ms", CURVE_RUNS, base),
        Metric("lifecycle", f"restore_{name}", statistics.median(times["restore"]), "ms", CURVE_RUNS, base),
        Metric("lifecycle", f"stored_{name}", max(times["stored"]), "MiB", CURVE_RUNS),
    ]


def fork(options: Options) -> list[Metric]:
    """One branch, ten at once, the memory of the family, a chain of fifty, and the curves."""
    metrics: list[Metric] = []
    with Hatchway() as hatchway, _stand(hatchway, options, SMALL) as (source, floor):
        source.run(_FILL.format(mib=DIRTY_MIB[0])).check()
        metrics += _one_branch(options, source, floor)
        metrics += _ten_branches(options, source, floor)
        metrics += _chain(options, hatchway)
    for name, fill in _loads():
        with Hatchway() as hatchway, _stand(hatchway, options, LARGE) as (source, floor):
            source.run(fill).check()
            stopped, took, floors = _branches(options, source, floor, 1, CURVE_RUNS, name)
            base = statistics.median(floors)
            metrics += [
                Metric("fork", f"source_stopped_{name}", statistics.median(stopped), "ms", CURVE_RUNS, base),
                Metric("fork", f"child_running_{name}", statistics.median(took), "ms", CURVE_RUNS, base),
            ]
    return metrics


def _one_branch(options: Options, source: Sandbox, floor: Floor) -> list[Metric]:
    stopped, took, floors = _branches(options, source, floor, 1, options.runs, "one branch")
    base = statistics.median(floors)
    return [
        Metric("fork", "fork_source_stopped", statistics.median(stopped), "ms", options.runs, base),
        Metric("fork", "fork_child_running", statistics.median(took), "ms", options.runs, base),
    ]


def _branches(
    options: Options, source: Sandbox, floor: Floor, count: int, runs: int, what: str
) -> tuple[list[float], list[float], list[float]]:
    """How long the source stood still, and how long it took until all ran, in milliseconds; and bare restores in turn."""
    stopped: list[float] = []
    took: list[float] = []
    floors: list[float] = []
    for number in range(runs + 1):
        options.progress(f"{what}, run {number + 1} of {runs + 1}")
        made, milliseconds = _forked(source, count)
        for one in made:
            one.delete()
        bare = floor.restore()
        if number:  # the first one warms up
            stopped.append(_result(source)["source_stopped_ms"])
            took.append(milliseconds)
            floors.append(bare)
    return stopped, took, floors


def _ten_branches(options: Options, source: Sandbox, floor: Floor) -> list[Metric]:
    rounds = max(3, options.runs // 4)
    _, took, floors = _branches(options, source, floor, BRANCHES, rounds, "ten branches")
    launcher = json.loads((options.data_dir / "run" / "roles.json").read_bytes())["launcher"]
    before = set(machines(launcher))
    made = source.fork(BRANCHES)
    with ExitStack() as stack:
        for one in made:
            stack.enter_context(one)
        bare = [stack.enter_context(floor.vm())[0].pid for _ in range(BRANCHES)]
        family = set(machines(launcher))
        children = family - before
        private = statistics.mean(map(private_mib, children))
        bare_private = statistics.mean(map(private_mib, bare))
        total = sum(map(pss_mib, family))
    base = statistics.median(floors)
    return [
        Metric("fork", "fork_10_all_running", statistics.median(took), "ms", rounds, base),
        Metric("fork", "fork_10_private_per_child", private, "MiB", BRANCHES, bare_private),
        Metric("fork", "fork_10_private_over_bare", private - bare_private, "MiB", BRANCHES),
        Metric("fork", "fork_10_family_pss", total, "MiB", BRANCHES + 1),
    ]


def _chain(options: Options, hatchway: Hatchway) -> list[Metric]:
    """Each forked from the one before it; the last ones against the first ones."""
    times: list[float] = []
    with ExitStack() as stack:
        link = stack.enter_context(hatchway.sandboxes.create(memory_mib=SMALL.memory_mib))
        for number in range(CHAIN):
            options.progress(f"chain, fork {number + 1} of {CHAIN}")
            made, took = _forked(link, 1)
            times.append(took)
            link.delete()
            link = stack.enter_context(made[0])
    first, last = statistics.median(times[:5]), statistics.median(times[-5:])
    return [Metric("fork", "fork_chain_50th", last, "ms", CHAIN, first)]


def _loads() -> Iterator[tuple[str, str]]:
    for mib in DIRTY_MIB:
        yield f"{mib}_mib_dirty", _FILL.format(mib=mib)
    for mib in WRITTEN_MIB:
        yield f"{mib}_mib_written", _WRITE.format(mib=mib) if mib else "true"


@contextmanager
def _stand(hatchway: Hatchway, options: Options, shape: Shape) -> Iterator[tuple[Sandbox, Floor]]:
    """A sandbox of this shape that ran a command, and the floor of the small one."""
    for one in (SMALL, shape):  # baked by the first of its shape
        hatchway.sandboxes.create(memory_mib=one.memory_mib, disk_mib=one.disk_mib, timeout=600).delete()
    with (
        hatchway.sandboxes.create(memory_mib=shape.memory_mib, disk_mib=shape.disk_mib) as sandbox,
        make_floor(options.data_dir, SMALL) as floor,
    ):
        sandbox.run("true").check()
        yield sandbox, floor


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _forked(source: Sandbox, count: int) -> tuple[list[Sandbox], float]:
    """The branches, and the milliseconds until all of them ran."""
    began = time.perf_counter()
    made = source.fork(count)
    took = (time.perf_counter() - began) * 1e3
    if len(made) != count:
        raise RuntimeError(f"not every branch runs: {_result(source)}")
    return made, took


def _result(sandbox: Sandbox) -> dict[str, Any]:
    assert sandbox.operation is not None
    result: dict[str, Any] = sandbox.operation.result
    return result
