"""What a network slot costs: a VM's jail with one that was prepared ahead, against one whose slot is made when it is asked for.

Two launchers of their own, in folders of their own, beside any service; the VMM is a program that ends at once.
"""

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hatchway.bench.options import Options
from hatchway.bench.report import Metric
from hatchway.domain.errors import Unavailable
from hatchway.domain.ids import new_id
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.supervisor.settings import libexec
from hatchway.wire.launcher import StartVm

PREPARED_WITHIN_S = 30.0
WARM_UP = 2


def slots(options: Options) -> list[Metric]:
    """Starts VMs in turn on a launcher that prepares a slot ahead and on one that does not. Needs root and a network for VMs."""
    if os.geteuid() != 0:
        raise Unavailable("not_allowed", "The bench `slots` starts a launcher of its own.", "Run it as root.")
    return asyncio.run(_measure(options))


async def _measure(options: Options) -> list[Metric]:
    prepared: list[float] = []
    made: list[float] = []
    with ExitStack() as stack:
        ahead, at_once = stack.enter_context(_launcher(1)), stack.enter_context(_launcher(0))
        if not (await ahead.client.hello()).network:
            why = " ".join((await ahead.client.hello()).warnings)
            raise Unavailable("not_allowed", "Sandboxes can have no network here.", why)
        for number in range(WARM_UP + options.runs):
            options.progress(f"slots {number + 1} of {WARM_UP + options.runs}")
            await ahead.wait_until_prepared()
            for launcher, times in ((ahead, prepared), (at_once, made)):
                took = await launcher.start()
                if number >= WARM_UP:
                    times.append(took)
        for launcher in (ahead, at_once):
            await launcher.client.close()
    base = statistics.median(made)
    return [
        Metric("slots", "slot_made", base, "ms", options.runs),
        Metric("slots", "slot_claimed", statistics.median(prepared), "ms", options.runs, base),
    ]


class _Launcher:
    """A launcher in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.client = LauncherClient(folder / "run" / "launcher.sock")

    async def wait_until_prepared(self) -> None:
        """Returns when a slot waits for its VM, and nothing else is being done."""
        async with asyncio.timeout(PREPARED_WITHIN_S):
            while (await self.client.counts()).slots_prepared < 1:  # noqa: ASYNC110 - another process is waited for
                await asyncio.sleep(0.02)

    async def start(self) -> float:
        """Starts a VM and removes it; how long the start took, in milliseconds."""
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY)
        try:
            request = StartVm(sandbox_id=new_id(), generation=1, argv=("/vmm",))
            began = time.perf_counter()
            vm = await self.client.start_vm(request, [root])
            took = (time.perf_counter() - began) * 1e3
        finally:
            os.close(root)
        await self.client.kill_vm(vm.sandbox_id)
        await self.client.forget_vm(vm.sandbox_id)
        return took


@contextmanager
def _launcher(stock: int) -> Iterator[_Launcher]:
    folder = Path(tempfile.mkdtemp(prefix="hatchway-bench-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        for name in ("run", "root", "root/dev", "root/tmp"):
            (folder / name).mkdir()
        shim = libexec("hatchway-shim")
        shutil.copy(shim, folder / "root" / "vmm")  # any static program will do
        (folder / "root" / "vmm").chmod(0o755)
        folder.chmod(0o755)
        command = [sys.executable, "-I", "-m", "hatchway.launcher", "--run-dir", str(folder / "run")]
        command += ["--shim", str(shim), "--stock", str(stock), "--slots", "4"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield _Launcher(folder)
    finally:
        if process is not None:
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
