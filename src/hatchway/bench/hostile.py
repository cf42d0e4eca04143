"""Hostile guests and neighbours: whether a sandbox still answers while its own user attacks it, and whether others notice."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hatchway.bench.attacks import ATTACKS, Attack, begin, is_over, wait_for
from hatchway.bench.report import Metric, percentile
from hatchway.client import Hatchway, Sandbox

SHAPE: dict[str, Any] = {"vcpus": 1, "memory_mib": 256, "disk_mib": 512}
ANSWER_WITHIN_S = 60.0
SPIN = "import time\nn = 0\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end:\n    n += 1\nprint(n)"
FAIR_S = 10.0
BURN = ["/bin/sh", "-c", "while :; do :; done"]


def answers(hatchway: Hatchway, attack: Attack, user: str = "user") -> dict[str, float]:
    """Seconds until a sandbox under attack carries out an exec, a signal to another session, and its deletion."""
    sandbox = hatchway.sandboxes.create(**SHAPE)
    try:
        other = sandbox.start(["sleep", "100000"], stdin=False)
        other.close()
        begin(sandbox, attack, user)
        took = {"exec": _timed(lambda: sandbox.run(["true"]).check())}
        began = time.monotonic()
        other.kill()
        wait_for("the end of a session that was killed", lambda: is_over(other), ANSWER_WITHIN_S)
        took["signal"] = time.monotonic() - began
    finally:
        gone = _timed(sandbox.delete)
    return {**took, "delete": gone}


def _timed(body: Callable[[], object]) -> float:
    began = time.monotonic()
    body()
    return time.monotonic() - began


def hostile(progress: Callable[[str], None]) -> list[Metric]:
    """How long a sandbox takes to answer while its own user attacks it from within: seconds for exec, signal and delete."""
    found: list[Metric] = []
    with Hatchway() as hatchway:
        for attack in ATTACKS:
            progress(attack.name)
            user = "root" if attack.of_root else "user"
            for what, seconds in answers(hatchway, attack, user).items():
                found.append(Metric("hostile", f"{attack.name}_{what}", seconds, "s", 1))
    return found


@contextlib.contextmanager
def burning(hatchway: Hatchway, count: int) -> Iterator[list[Sandbox]]:
    """So many sandboxes of one virtual CPU, each with a loop that takes all of it."""
    with contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(hatchway.sandboxes.create(**SHAPE)) for _ in range(count)]
        for box in boxes:
            box.start(BURN, stdin=False).close()
        yield boxes


def neighbour(runs: int) -> list[Metric]:
    """What an exec in a quiet sandbox takes beside a hog of one virtual CPU, against what it takes alone."""
    with Hatchway() as hatchway, hatchway.sandboxes.create(**SHAPE) as quiet:
        _execs(quiet, 3)
        alone = _execs(quiet, runs)
        with burning(hatchway, 1):
            beside = _execs(quiet, runs)
    return [
        Metric("neighbour", "exec_true", statistics.median(beside), "ms", runs, statistics.median(alone)),
        Metric("neighbour", "exec_true_p95", percentile(beside, 95), "ms", runs, percentile(alone, 95)),
    ]


def _execs(sandbox: Sandbox, count: int) -> list[float]:
    return [_timed(lambda: sandbox.run(["/bin/true"]).check()) * 1e3 for _ in range(count)]


def fair() -> list[Metric]:
    """What each of several hogs gets, when there are more than cores: the least and the most, against the mean."""
    hogs = 2 * (os.cpu_count() or 1)
    program = ["/usr/bin/python3", "-c", SPIN.format(seconds=FAIR_S)]
    with Hatchway() as hatchway, contextlib.ExitStack() as stack, ThreadPoolExecutor(hogs) as pool:
        boxes = [stack.enter_context(hatchway.sandboxes.create(**SHAPE)) for _ in range(hogs)]
        for box in boxes:
            box.run(["/usr/bin/python3", "-c", "pass"]).check()  # translated once
        counts = [int(result.check().stdout) for result in pool.map(lambda box: box.run(program), boxes)]
    mean = statistics.mean(counts)
    return [
        Metric("fair", "least_share", min(counts), "rounds", hogs, mean),
        Metric("fair", "most_share", max(counts), "rounds", hogs, mean),
    ]
