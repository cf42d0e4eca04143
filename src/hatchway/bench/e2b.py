"""`hatchway bench e2b`: what E2B's SDK gets of the wrapper, against the same through our own SDK, in turn, in the same run.

The SDK has an environment of its own, and is driven as a process there: `e2b_program`.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchway.bench.memory import Growth, own_processes, role_processes
from hatchway.bench.options import Options
from hatchway.bench.report import Metric, percentile
from hatchway.client import AsyncHatchway, Hatchway, Sandbox
from hatchway.domain.errors import Unavailable

PYTHON = "HATCHWAY_E2B_PYTHON"
"""Names an interpreter that has the SDK."""
INSTALLED = Path(__file__).parents[3] / "build" / "e2b-sdks" / "python-newest" / "bin" / "python"
"""Where `scripts/setup-e2b-sdks` puts one."""
WARM_UP = 2
MIB, LARGE_MIB, SMALL_MIB = 1024 * 1024, 100, 4
FILE_RUNS = 3
MANY, MANY_ROUNDS = 20, 3
COMMAND = ["/bin/bash", "-l", "-c"]
"""As E2B's SDK runs one."""
PATH = "/home/user/bench"


def e2b(options: Options) -> list[Metric]:
    """Milliseconds from nothing to the end of a sandbox's first command; MiB/s of a large file each way, and what wrapper and node grow by
    meanwhile; sandboxes at once by the asynchronous SDK, each of which is used. Raises `Unavailable("no_e2b_sdk")`, `"no_e2b"`."""
    python = _python()
    own_processes(options.data_dir)  # that a service is there at all
    with Hatchway() as hatchway, _program(python, options.data_dir, hatchway) as program:
        return [
            *_first_commands(options, hatchway, program),
            *_files(options, hatchway, program),
            *_at_once(options, program),
        ]


class _Program:
    """The SDK's user."""

    def __init__(self, process: "subprocess.Popen[str]", said: Path) -> None:
        self._process = process
        self._said = said

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        """Has something done; returns what came of it. Raises `Unavailable("e2b_failed")`."""
        assert self._process.stdin is not None  # it was made so
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": what, **more}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._said.read_text()[-1000:]}
        if "error" in answer:
            raise Unavailable(
                "e2b_failed", f"E2B's SDK failed: {answer['error']}", "The log of the role e2b says more."
            )
        return answer


def _python() -> Path:
    """The interpreter that has the SDK."""
    named = os.environ.get(PYTHON)
    python = INSTALLED if named is None else Path(named)
    if not python.exists():
        raise Unavailable(
            "no_e2b_sdk",
            f"E2B's SDK is measured as it is published, and there is none: {python} does not exist.",
            f"In the repository: scripts/setup-e2b-sdks python-newest. Or name an interpreter that has it: {PYTHON}.",
        )
    return python


@contextlib.contextmanager
def _program(python: Path, data_dir: Path, hatchway: Hatchway) -> Iterator[_Program]:
    url = json.loads((data_dir / "endpoint.json").read_bytes()).get("e2b")
    if url is None:
        raise Unavailable("no_e2b", "This service does not serve E2B's API.", "Start it without --no-e2b.")
    key = hatchway.keys.create(f"bench-{os.getpid()}", e2b=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    environ |= {"E2B_API_KEY": key.key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
    try:
        with tempfile.NamedTemporaryFile() as said:
            process = subprocess.Popen(
                [
                    str(python),
                    "-I",
                    str(Path(__file__).with_name("e2b_program.py")),
                ],  # not beside the modules of this folder
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
            with process:
                yield _Program(process, Path(said.name))
    finally:
        hatchway.keys.delete(key.id)


def _first_commands(options: Options, hatchway: Hatchway, program: _Program) -> list[Metric]:
    theirs: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    for number in range(WARM_UP + options.runs):
        options.progress(f"first command {number + 1} of {WARM_UP + options.runs}")
        told = program.do("first_command")
        own = _own_first_command(hatchway)
        if number >= WARM_UP:
            theirs.append((told["create"], told["both"]))
            ours.append(own)
    metrics = []
    for which, name in enumerate(("create", "first_command")):
        times, base = [one[which] for one in theirs], statistics.median(one[which] for one in ours)
        metrics.append(Metric("e2b", name, statistics.median(times), "ms", options.runs, base))
        metrics.append(Metric("e2b", f"{name}_p95", percentile(times, 95), "ms", options.runs, base))
    return metrics


def _own_first_command(hatchway: Hatchway) -> tuple[float, float]:
    began = time.perf_counter()
    with hatchway.sandboxes.create() as sandbox:
        created = time.perf_counter()
        sandbox.run([*COMMAND, "true"]).check()
        ended = time.perf_counter()
    return (created - began) * 1e3, (ended - began) * 1e3


def _files(options: Options, hatchway: Hatchway, program: _Program) -> list[Metric]:
    roles = role_processes(options.data_dir)
    rates: dict[str, list[float]] = {"upload": [], "download": [], "own_upload": [], "own_download": []}
    grown: dict[str, list[float]] = {}
    program.do("begin")
    with hatchway.sandboxes.create() as sandbox:
        # What is loaded with the first file is not what a file costs.
        program.do("upload", mib=SMALL_MIB)
        program.do("download")
        for number in range(FILE_RUNS):
            options.progress(f"{LARGE_MIB} MiB each way, {number + 1} of {FILE_RUNS}")
            for way in ("upload", "download"):
                with contextlib.ExitStack() as stack:
                    growths = {
                        role: stack.enter_context(Growth(options.data_dir, [roles[role]])) for role in ("e2b", "node")
                    }
                    told = program.do(way, mib=LARGE_MIB)
                for role, growth in growths.items():
                    grown.setdefault(f"{way}_growth_{role}", []).append(growth.mib)
                if told.get("octets", LARGE_MIB * MIB) != LARGE_MIB * MIB:
                    raise Unavailable("e2b_failed", f"The file came back with {told['octets']} octets.", "Report it.")
                rates[way].append(LARGE_MIB / told["ms"] * 1e3)
            rates["own_upload"].append(_own_upload(sandbox))
            rates["own_download"].append(_own_download(sandbox))
    program.do("end")
    metrics = [
        Metric("e2b", way, statistics.median(rates[way]), "MiB/s", FILE_RUNS, statistics.median(rates[f"own_{way}"]))
        for way in ("upload", "download")
    ]
    return metrics + [Metric("e2b", name, max(values), "MiB", FILE_RUNS) for name, values in grown.items()]


def _own_upload(sandbox: Sandbox) -> float:
    piece = bytes(256 * 1024)
    began = time.perf_counter()
    sandbox.files.write(PATH, (piece for _ in range(LARGE_MIB * MIB // len(piece))))
    return LARGE_MIB / (time.perf_counter() - began)


def _own_download(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    count = sum(map(len, sandbox.files.stream(PATH)))
    assert count == LARGE_MIB * MIB  # the SDK has compared it
    return LARGE_MIB / (time.perf_counter() - began)


def _at_once(options: Options, program: _Program) -> list[Metric]:
    theirs: list[float] = []
    ours: list[float] = []
    failed = 0
    for number in range(MANY_ROUNDS):
        options.progress(f"{MANY} at once, round {number + 1} of {MANY_ROUNDS}")
        told = program.do("many", count=MANY)
        if told["failed"] == MANY:
            raise Unavailable("e2b_failed", f"No sandbox could be used: {told['why']}", "The log of the role e2b says more.")  # fmt: skip
        if told["failed"]:
            options.progress("")
            print(f"{told['failed']} of {MANY} failed: {told['why']}", file=sys.stderr, flush=True)
        failed += told["failed"]
        theirs.append(told["last"])
        ours.append(asyncio.run(_own_many()))
    base = statistics.median(ours)
    return [
        Metric("e2b", f"used_{MANY}_last", statistics.median(theirs), "ms", MANY_ROUNDS, base),
        Metric("e2b", f"used_{MANY}_failed", float(failed), "", MANY * MANY_ROUNDS),
    ]


async def _own_many() -> float:
    began = time.perf_counter()

    async def one(number: int) -> float:
        async with await hatchway.sandboxes.create() as sandbox:
            (await sandbox.run([*COMMAND, f"echo {number}"])).check()
            return (time.perf_counter() - began) * 1e3

    async with AsyncHatchway() as hatchway:
        return max(await asyncio.gather(*map(one, range(MANY))))
