"""Creations at once: how long each takes, and how many fail."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from hatchway.bench.floor import make_floor
from hatchway.bench.options import Options
from hatchway.bench.report import Metric, percentile
from hatchway.client import Hatchway, HatchwayError, Sandbox

LEVELS = (1, 5, 10, 20)
ROUNDS = 3
LEAST = 10
"""Creations of a level at least, so that its percentiles say something."""


def concurrency(options: Options) -> list[Metric]:
    """Percentiles of the time from POST to `running` at each level, its failures, and when the last one of a round ran."""
    metrics: list[Metric] = []
    with Hatchway() as hatchway, make_floor(options.data_dir) as floor:
        _round(hatchway, 1)
        for level in LEVELS:
            times: list[float] = []
            lasts: list[float] = []
            floors: list[float] = []
            rounds = max(ROUNDS, LEAST // level)
            for number in range(rounds):
                options.progress(f"{level} at once, round {number + 1} of {rounds}")
                floors.append(floor.restore())
                took, last = _round(hatchway, level)
                times += took
                lasts.append(last)
            base = statistics.median(floors)
            failed = rounds * level - len(times)
            name = f"create_{level}"
            if times:
                metrics += [
                    Metric("concurrency", f"{name}_p{percent}", percentile(times, percent), "ms", len(times), base)
                    for percent in (50, 95, 99)
                ]
            metrics += [
                Metric("concurrency", f"{name}_last", statistics.median(lasts), "ms", rounds, base),
                Metric("concurrency", f"{name}_failed", float(failed), "", rounds * level),
            ]
    return metrics


def _round(hatchway: Hatchway, count: int) -> tuple[list[float], float]:
    """Creates so many at once; returns the milliseconds of those that ran, and until the last one did."""
    began = time.perf_counter()

    def one(_: int) -> tuple[float, Sandbox] | None:
        try:
            sandbox = hatchway.sandboxes.create()
        except HatchwayError:
            return None
        return (time.perf_counter() - began) * 1e3, sandbox

    with ThreadPoolExecutor(count) as pool:
        made = [done for done in pool.map(one, range(count)) if done is not None]
        last = (time.perf_counter() - began) * 1e3
        list(pool.map(lambda done: done[1].delete(), made))
    return [took for took, _ in made], last
