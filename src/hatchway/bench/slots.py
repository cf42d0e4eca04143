"""What a network slot costs: a VM's jail with one that was prepared ahead, against one whose slot is made when it is asked for; and its
memory in the kernel, against that of an empty namespace.

Two launchers of their own, in folders of their own, beside any service; the VMM is a program that ends at once.
"""

import asyncio
import os
import re
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
MANY = 64
MEMORY_RUNS = 3
OF_OTHERS = re.compile(
    "dentry|ext4_|buffer_head|radix_tree|xfs_|inode_cache|extent_status|shmem_inode|proc_inode|filp|fsnotify|kmalloc-rcl|bio|skbuff|"
    "task_|mm_|vm_area|vmap_area|anon_vma|signal|sighand|files_cache|cred|pid|maple|kvm_|page_table"
)
"""Beginnings of the names of what processes and files take, on this host as well as for a slot."""


def slots(options: Options) -> list[Metric]:
    """Starts VMs in turn on a launcher that prepares a slot ahead and on one that does not. Needs root and a network for VMs."""
    if os.geteuid() != 0:
        raise Unavailable("not_allowed", "The bench `slots` starts a launcher of its own.", "Run it as root.")
    return [*asyncio.run(_measure(options)), asyncio.run(_measure_memory(options))]


async def _measure_memory(options: Options) -> Metric:
    """KiB of the kernel for a slot that waits for its VM, without the process that holds it; the floor is a namespace that has nothing."""
    slots: list[float] = []
    bare: list[float] = []
    for number in range(MEMORY_RUNS):
        options.progress(f"memory of slots {number + 1} of {MEMORY_RUNS}")
        before = await _settled()
        with _launcher(MANY, slots=MANY) as launcher:
            await launcher.wait_until_prepared(MANY)
            slots.append((_kernel_kib() - before) / MANY)
            await launcher.client.close()
        before = await _settled()
        with _bare():
            bare.append((_kernel_kib() - before) / MANY)
    return Metric("slots", "slot_kernel", statistics.median(slots), "KiB", MEMORY_RUNS, statistics.median(bare))


def _kernel_kib() -> float:
    """KiB of objects of the kernel that are in use, and of its memory for each processor, without those of files and processes."""
    found = 0.0
    for line in Path("/proc/slabinfo").read_text().splitlines()[2:]:
        name, objects, _, size = line.split()[:4]
        if not OF_OTHERS.match(name):
            found += int(objects) * int(size) / 1024
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Percpu:"):
            found += int(line.split()[1])
    return found


async def _settled() -> float:
    """`_kernel_kib`, once namespaces that ended are gone, which the kernel does in the background."""
    before, until = -1, time.monotonic() + PREPARED_WITHIN_S
    while (now := _namespaces()) != before and time.monotonic() < until:
        before = now
        await asyncio.sleep(2)
    return _kernel_kib()


def _namespaces() -> int:
    found = [line.split()[1] for line in Path("/proc/slabinfo").read_text().splitlines() if line.startswith("net_name")]
    return int(found[0])


@contextmanager
def _bare() -> Iterator[None]:
    """Processes in namespaces that have nothing, until the block is left."""
    with ExitStack() as stack:
        ready = []
        for _ in range(MANY):
            command = ["unshare", "--net", "sh", "-c", "echo; exec sleep 600"]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ready.append(process.stdout)
        for told in ready:
            assert told is not None
            stack.enter_context(told).readline()
        yield


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

    async def wait_until_prepared(self, slots: int = 1) -> None:
        """Returns when so many slots wait for their VMs, and nothing else is being done."""
        async with asyncio.timeout(PREPARED_WITHIN_S):
            while (await self.client.counts()).slots_prepared < slots:  # noqa: ASYNC110 - another process is waited for
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
def _launcher(stock: int, slots: int = 4) -> Iterator[_Launcher]:
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
        command += ["--shim", str(shim), "--stock", str(stock), "--slots", str(slots)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield _Launcher(folder)
    finally:
        if process is not None:
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
