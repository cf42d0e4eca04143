"""Output and input of a process through API and data plane, against the bare channel of the same machine."""

import contextlib
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hatchway.bench.bare import find_ground
from hatchway.bench.memory import Growth
from hatchway.bench.options import Options
from hatchway.bench.port import BarePort
from hatchway.bench.report import Metric
from hatchway.client import Hatchway, Sandbox

MIB = 2**20
ROUNDS = 5
PIECE_MIB = 64
"""What is moved in one counted run."""
STREAMS = 10
SHARE_MIB = 16
"""What each of several streams moves."""
LARGE_MIB = 1024
"""What is moved each way while memory is watched."""
PLAIN_CPU = "max"
"""What a script gives QEMU that has no reason to give it anything else."""
WRITER = """
import os, sys
os.write(1, b".")
os.read(0, 1)
piece = b"x" * 65535 + b"\\n"
for _ in range(int(sys.argv[1]) * 16):
    done = 0
    while done < len(piece):
        done += os.write(1, piece[done:] if done else piece)
"""
READER = """
import os
piece, count = bytearray(262144), 0
while got := os.readv(0, [piece]):
    count += got
print(count)
"""


@dataclass
class Rates:
    """MiB/s of the counted rounds, by what was measured."""

    found: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.found[name])


def stream(options: Options) -> list[Metric]:
    """MiB/s of stdout, of stdin and of ten stdouts at once; what our processes grow by while 1 GiB goes each way."""
    with Hatchway() as hatchway, bare_ports(options.data_dir) as floors, hatchway.sandboxes.create() as sandbox:
        moves = {
            **floors,
            "stdout": lambda: PIECE_MIB / take(sandbox, PIECE_MIB),
            "stdin": lambda: PIECE_MIB / give(sandbox, PIECE_MIB),
            f"stdout_{STREAMS}": lambda: _at_once(sandbox),
        }
        rates = in_turn(moves, options.progress)
        options.progress(f"{LARGE_MIB} MiB each way")
        with Growth(options.data_dir) as growth:
            take(sandbox, LARGE_MIB)
            give(sandbox, LARGE_MIB)
    one = rates.median("stdout")
    return [
        *against_floors("stream", rates, {"stdout": "out", "stdin": "in"}),
        Metric("stream", f"stdout_{STREAMS}", rates.median(f"stdout_{STREAMS}"), "MiB/s", ROUNDS, one),
        Metric("stream", "rss_growth_mib", growth.mib, "MiB", 1),
    ]


def in_turn(moves: Mapping[str, Callable[[], float]], progress: Callable[[str], None]) -> Rates:
    """Measures everything once in each round; the first round, which fills the emulator's caches, does not count."""
    rates = Rates()
    for number in range(1 + ROUNDS):
        for name, move in moves.items():
            progress(f"round {number} of {ROUNDS}: {name}")
            rate = move()
            if number > 0:
                rates.found[name].append(rate)
    return rates


def against_floors(bench: str, rates: Rates, names: Mapping[str, str]) -> list[Metric]:
    """Each rate against the bare channel in its direction, `out` or `in`: of QEMU as it comes, and of a machine that is tuned as ours is."""
    return [
        Metric(bench, name + suffix, rates.median(name), "MiB/s", ROUNDS, rates.median(kind + direction))
        for name, direction in names.items()
        for suffix, kind in (("", "bare_"), ("_tuned_floor", "tuned_"))
    ]


@contextlib.contextmanager
def bare_ports(data_dir: Path) -> Iterator[dict[str, Callable[[], float]]]:
    """Two bare VMs that move octets, as four measurements: the processor of one is QEMU's own `max`, of the other that of our sandboxes."""
    ground = find_ground(data_dir)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hatchway-bench-")))
        moves: dict[str, Callable[[], float]] = {}
        for name, cpu in (("bare_", PLAIN_CPU), ("tuned_", None)):
            port = BarePort(ground, work / name, cpu)
            stack.callback(port.end)
            moves[name + "out"] = partial(_rate, port.take)
            moves[name + "in"] = partial(_rate, port.give)
        yield moves


def _rate(move: Callable[[int], float]) -> float:
    return PIECE_MIB / move(PIECE_MIB * MIB)


def take(sandbox: Sandbox, mib: int, ready: Callable[[], object] = lambda: None) -> float:
    """Reads so much of a process's stdout; returns the seconds from when it may write, after `ready`, to the last octet."""
    with sandbox.start(["/usr/bin/python3", "-c", WRITER, str(mib)]) as session:
        pieces = session.output()
        count = len(next(pieces))  # it runs, and waits for a word
        ready()
        began = time.perf_counter()
        session.close_stdin()
        count += sum(map(len, pieces))
        took = time.perf_counter() - began
        session.delete()
    if count != mib * MIB + 1:
        raise RuntimeError(f"{count} octets came of {mib * MIB + 1}")
    return took


def give(sandbox: Sandbox, mib: int) -> float:
    """Writes so much to a process's stdin; returns the seconds until the process had all of it."""
    piece = bytes(PIECE_MIB * MIB)
    with sandbox.start(["/usr/bin/python3", "-c", READER]) as session:
        next(iter(session))
        began = time.perf_counter()
        for _ in range(mib // PIECE_MIB):
            session.write_stdin(piece)
        session.close_stdin()
        session.wait()
        took = time.perf_counter() - began
        count = int(b"".join(session.output()))
        session.delete()
    if count != mib * MIB:
        raise RuntimeError(f"the process read {count} octets of {mib * MIB}")
    return took


def _at_once(sandbox: Sandbox) -> float:
    """MiB/s of `STREAMS` stdouts in sum, from when the first one may write to the last octet of the last one."""
    ready = threading.Barrier(STREAMS)
    with ThreadPoolExecutor(STREAMS) as pool:
        slowest = max(pool.map(lambda _: take(sandbox, SHARE_MIB, ready.wait), range(STREAMS)))
    return SHARE_MIB * STREAMS / slowest
