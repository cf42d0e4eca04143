"""Output and input of a process through API and data plane, against the bare channel of the same machine."""

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
LARGE_MIB = 1024
"""What is moved each way while memory is watched."""
WRITER = """
import os, sys
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


def stream(options: Options) -> list[Metric]:
    """MiB/s of stdout, of stdin and of ten stdouts at once; what our processes grow by while 1 GiB goes each way."""
    out: list[float] = []
    into: list[float] = []
    bare_out: list[float] = []
    bare_in: list[float] = []
    together: list[float] = []
    with Hatchway() as hatchway, bare_port(options.data_dir) as bare, hatchway.sandboxes.create() as sandbox:
        for number in range(1 + ROUNDS):
            options.progress(f"stream {number} of {ROUNDS}")
            floor_out, ours_out = PIECE_MIB / bare.take(PIECE_MIB * MIB), PIECE_MIB / take(sandbox, PIECE_MIB)
            floor_in, ours_in = PIECE_MIB / bare.give(PIECE_MIB * MIB), PIECE_MIB / give(sandbox, PIECE_MIB)
            all_ten = _at_once(sandbox)
            if number > 0:  # the first one fills the emulator's caches
                bare_out.append(floor_out)
                out.append(ours_out)
                bare_in.append(floor_in)
                into.append(ours_in)
                together.append(all_ten)
        options.progress(f"{LARGE_MIB} MiB each way")
        with Growth(options.data_dir) as growth:
            take(sandbox, LARGE_MIB)
            give(sandbox, LARGE_MIB)
    one = statistics.median(out)
    return [
        Metric("stream", "stdout", one, "MiB/s", ROUNDS, statistics.median(bare_out)),
        Metric("stream", "stdin", statistics.median(into), "MiB/s", ROUNDS, statistics.median(bare_in)),
        Metric("stream", f"stdout_{STREAMS}", statistics.median(together), "MiB/s", ROUNDS, one),
        Metric("stream", "rss_growth_mib", growth.mib, "MiB", 1),
    ]


@contextlib.contextmanager
def bare_port(data_dir: Path) -> Iterator[BarePort]:
    """A bare VM that moves octets."""
    with tempfile.TemporaryDirectory(prefix="hatchway-bench-") as work:
        bare = BarePort(find_ground(data_dir), Path(work) / "port")
        try:
            yield bare
        finally:
            bare.end()


def take(sandbox: Sandbox, mib: int) -> float:
    """Reads so much of a process's stdout; returns the seconds from its start to the last octet."""
    with sandbox.start(["/usr/bin/python3", "-c", WRITER, str(mib)], stdin=False) as session:
        next(iter(session))  # it runs
        began = time.perf_counter()
        count = sum(map(len, session.output()))
        took = time.perf_counter() - began
        session.delete()
    if count != mib * MIB:
        raise RuntimeError(f"{count} octets came of {mib * MIB}")
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
    """MiB/s of `STREAMS` stdouts in sum."""
    share = PIECE_MIB // STREAMS
    ready = threading.Barrier(STREAMS)

    def one(_: int) -> float:
        ready.wait()
        return take(sandbox, share)

    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(one, range(STREAMS)))
    return share * STREAMS / (time.perf_counter() - began)
