"""The real template, built once per checkout, and guests that boot it in real jails."""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.native import built, cache

from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.node.guest.link import Link, connect
from hatchway.node.guest.seam import Proc, ProcessState, Setup, Spawn
from hatchway.node.images.store import Images, Release
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.qemu import QemuDriver
from hatchway.node.vmm.seam import Baked, Vm, VmSpec

WITHIN = 600.0
"""Generous: the machine may be busy with other tests, and QEMU emulates."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def native() -> Path:
    """Agent, shim and preload library; returns their folder."""
    built("guest", "agent")
    return built("shim", "all")


def build(folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    """Runs the build as the supervisor does."""
    command = [sys.executable, "-m", "hatchway.node.images.build", "--folder", str(folder), "--progress", "json"]
    command += ["--agent", str(native() / "hatchway-agent"), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)


def seed() -> Release:
    """The template `seed:latest` with this checkout's agent; the first call of a checkout takes a minute."""
    folder = cache() / "images"
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return Images(folder).resolve("seed:latest")


@dataclass
class Result:
    """How a command in a guest ended."""

    code: int | None
    out: str
    err: str
    seconds: float


class _Sink:
    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.kept = {1: b"", 2: b""}
        self.proc: Proc | None = None

    def stored(self) -> tuple[int, int]:
        return len(self.kept[1]), len(self.kept[2])

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        self.kept[fd] += bytes(data)

    def changed(self, proc: Proc) -> None:
        self.proc = proc
        if proc.state is ProcessState.CLOSED:
            self.closed.set()

    def gone(self, reason: str) -> None:
        self.kept[2] += reason.encode()
        self.closed.set()


class Guest:
    """A machine that runs, and its agent."""

    def __init__(self, vm: Vm, link: Link) -> None:
        self.vm = vm
        self.link = link
        self._number = 1000

    async def run(self, command: str, user: str = "user") -> Result:
        """Runs a command in a login shell."""
        self._number += 1
        sink = _Sink()
        home = "/root" if user == "root" else f"/home/{user}"
        env = {"PATH": PATH, "HOME": home, "USER": user, "LANG": "C.UTF-8"}
        argv = ["bash", "-lc", command]
        started = time.monotonic()
        await self.link.spawn(
            Spawn(self._number, f"test-{self._number}", argv, env, cwd=home, user=user, stdin=False), sink
        )
        async with asyncio.timeout(WITHIN):
            await sink.closed.wait()
        await self.link.close_process(self._number)
        code = None if sink.proc is None else sink.proc.exit_code
        return Result(code, sink.kept[1].decode(), sink.kept[2].decode(), time.monotonic() - started)


class Site:
    """A launcher, a driver, and the guests of one test. Use `site()`."""

    def __init__(self, folder: Path, launcher: LauncherClient, driver: QemuDriver) -> None:
        self.folder = folder
        self.launcher = launcher
        self.driver = driver

    @contextlib.asynccontextmanager
    async def guest(self, release: Release, shape: Shape, baked: Baked | None = None) -> AsyncIterator[Guest]:
        """A guest that booted, or was restored from `baked`; gone at the end."""
        spec = VmSpec(new_id(), 1, shape, release.boot_files(), self.folder / new_id())
        vm = await (self.driver.start(spec) if baked is None else self.driver.restore(baked, spec))
        try:
            setup = Setup(
                time_ns=time.time_ns(),
                entropy=os.urandom(64),
                hostname="box-7",
                machine_id=secrets.token_hex(16),
                env={},
            )
            link = await connect(vm.agent_socket, fresh=baked is not None, vm_ended=vm.ended, setup=setup, within=120)
            try:
                yield Guest(vm, link)
            finally:
                await link.close()
        finally:
            await vm.kill()
            await vm.forget()


@contextlib.asynccontextmanager
async def site(options: Sequence[str] = ()) -> AsyncIterator[Site]:
    """A launcher process and a driver with software emulation, all ended and removed at the end."""
    libexec = native()
    with tempfile.TemporaryDirectory(prefix="hatchway-images-") as name:
        folder = Path(name)
        run = folder / "run"
        run.mkdir(mode=0o755)
        command = [sys.executable, "-I", "-m", "hatchway.launcher", "--run-dir", str(run)]
        command += ["--shim", str(libexec / "hatchway-shim"), "--uid-base", str(1_700_000_000 + os.getpid() * 16)]
        process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL)
        launcher = LauncherClient(run / "launcher.sock")
        try:
            driver = await QemuDriver.create(
                launcher=launcher,
                run_dir=run,
                folder=folder / "vmm",
                ram_library=libexec / "hatchway-ram.so",
                verdicts=folder,
                hardware=False,
            )
            yield Site(folder, launcher, driver)
            for left in await launcher.list_vms():
                await launcher.kill_vm(left.sandbox_id)
                await launcher.forget_vm(left.sandbox_id)
        finally:
            await launcher.close()
            process.terminate()
            process.wait(30)
