"""Real VMs for tests: a launcher of its own, the template that `hatchway.node.images` builds, the agent in it, and a driver.

`HATCHWAY_IMAGES_DIR` names an images folder with a finished template, so that it is not built anew.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.firecracker import binaries
from tests.support.native import built, images

from hatchway.domain.ids import new_id
from hatchway.domain.shapes import MIN_DISK_MIB, Shape
from hatchway.node.guest.link import connect
from hatchway.node.guest.seam import GuestLink, Proc, ProcessState, Setup, Spawn
from hatchway.node.images.seed import build_seed
from hatchway.node.vmm import firecracker_install, firecracker_probe
from hatchway.node.vmm.firecracker import FirecrackerDriver
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.qemu import QemuDriver
from hatchway.node.vmm.seam import Baked, BootFiles, Driver, Vm, VmSpec

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = Shape(vcpus=1, memory_mib=256, disk_mib=MIN_DISK_MIB)
BOOT_WITHIN_S = 180.0
WITHIN_S = 60.0
_turns = itertools.count()


@dataclass(frozen=True)
class Ground:
    """What all tests of a run share: built programs, the template, the driver's jail root, the bakes."""

    top: Path
    shim: Path
    ram_library: Path
    boot: BootFiles

    @classmethod
    def prepare(cls, top: Path) -> "Ground":
        """Builds what is not built yet."""
        built("guest", "agent")
        programs = built("shim", "all")
        release = build_seed(images(), programs / "hatchway-agent", tag="vmm-tests")
        return cls(
            top=top,
            shim=programs / "hatchway-shim",
            ram_library=programs / "hatchway-ram.so",
            boot=release.boot_files(),
        )


class Output:
    """Collects what one process writes, and its end."""

    def __init__(self) -> None:
        self.octets = {1: bytearray(), 2: bytearray()}
        self.closed: asyncio.Future[Proc | None] = asyncio.get_running_loop().create_future()

    def stored(self) -> tuple[int, int]:
        return len(self.octets[1]), len(self.octets[2])

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        assert offset == len(self.octets[fd]), "output with a gap"
        self.octets[fd] += data

    def changed(self, proc: Proc) -> None:
        if proc.state is ProcessState.CLOSED and not self.closed.done():
            self.closed.set_result(proc)

    def gone(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


@dataclass
class Guest:
    """A VM whose agent answers."""

    vm: Vm
    link: GuestLink
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(100))

    async def sh(self, script: str, *, user: str = "root", within: float = WITHIN_S) -> str:
        """Runs a shell script in the guest and returns its output; fails the test when it fails."""
        code, output = await self.try_sh(script, user=user, within=within)
        assert code == 0, f"exit code {code}: {output}"
        return output

    async def try_sh(self, script: str, *, user: str = "root", within: float = WITHIN_S) -> tuple[int | None, str]:
        """The same, returning the exit code too."""
        number, sink = next(self.numbers), Output()
        spawn = Spawn(
            number=number,
            key=new_id(),
            argv=["/bin/sh", "-c", script],
            env={},
            user=user,
            stdin=False,
            merge_stderr=True,
        )
        async with asyncio.timeout(within):
            await self.link.spawn(spawn, sink)
            ended = await sink.closed
        assert ended is not None, "the process was lost"
        await self.link.close_process(number)
        return ended.exit_code, sink.octets[1].decode(errors="replace").strip()


class Stand:
    """One launcher and one driver, and all VMs that a test makes with them."""

    def __init__(self, ground: Ground, driver_name: str) -> None:
        self.ground = ground
        self.driver_name = driver_name
        self.folder = Path(tempfile.mkdtemp(prefix="hatchway-vmm-"))
        self.folder.chmod(0o755)
        self.run_dir = self.folder / "run"
        self.run_dir.mkdir()
        self._uid_base = 1_920_000_000 + (os.getpid() % 60_000) * 4_000 + next(_turns) * 100
        self._log = (self.folder / "launcher.log").open("wb")
        self.launcher_process = self._start_launcher()
        self.launcher = LauncherClient(self.run_dir / "launcher.sock")
        self.driver: Driver
        self._links: list[GuestLink] = []
        self._vms: list[Vm] = []

    def _start_launcher(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-m", "hatchway.launcher", "--run-dir", str(self.run_dir)),
                *("--shim", str(self.ground.shim), "--uid-base", str(self._uid_base), "--stock", "1"),
            ],
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )

    def restart_launcher(self) -> None:
        """Kills the launcher as a crash would, and starts another."""
        self.launcher_process.kill()
        self.launcher_process.wait(WITHIN_S)
        self.launcher_process = self._start_launcher()

    async def make_driver(self) -> Driver:
        """Another driver of the same installation, as a restarted node makes it."""
        return await DRIVERS[self.driver_name](self)

    def spec(self, **changes: object) -> VmSpec:
        """A VM of the smallest shape."""
        sandbox_id = new_id()
        base = VmSpec(
            sandbox_id=sandbox_id,
            generation=1,
            shape=SHAPE,
            boot=self.ground.boot,
            folder=self.folder / "vms" / sandbox_id,
        )
        return replace(base, **changes)  # type: ignore[arg-type]  # the caller's own members

    async def booted(self, spec: VmSpec | None = None, *, bakeable: bool = False) -> Guest:
        """A VM that booted cold."""
        vm = self.keep(await self.driver.start(spec or self.spec(), bakeable=bakeable))
        return await self.linked(vm, fresh=False, within=BOOT_WITHIN_S)

    async def restored(self, baked: Baked, spec: VmSpec | None = None) -> Guest:
        """A VM restored from a baked snapshot."""
        return await self.linked(self.keep(await self.driver.restore(baked, spec or self.spec())), fresh=True)

    def keep(self, vm: Vm) -> Vm:
        """Has a VM ended with the stand."""
        self._vms.append(vm)
        return vm

    async def linked(self, vm: Vm, *, fresh: bool, within: float = WITHIN_S) -> Guest:
        """Connects to a VM's agent and sets its clock."""
        setup = Setup(time_ns=time.time_ns(), entropy=os.urandom(64), hostname="guest", machine_id=os.urandom(16).hex())
        try:
            link = await connect(vm.agent_socket, fresh=fresh, vm_ended=vm.ended, setup=setup, within=within)
        except BaseException:
            with contextlib.suppress(Exception):
                print((await vm.console()).decode(errors="replace"))
            raise
        self._links.append(link)
        return Guest(vm, link)

    async def bake(self, key: str) -> Baked:
        """Boots a VM, runs a first job in it and bakes it below the ground's folder."""
        guest = await self.booted(bakeable=True)
        await guest.sh("true")
        await guest.link.sync()
        await guest.link.close()
        folder = self.ground.top / "baked" / key
        await guest.vm.snapshot(folder)
        return Baked(key=key, folder=folder, shape=SHAPE)

    async def left(self) -> list[str]:
        """The VMs that the launcher knows."""
        return [record.sandbox_id for record in await self.launcher.list_vms()]

    async def clean_up(self) -> None:
        """Ends everything."""
        try:
            for link in self._links:
                await link.close()
            for vm in self._vms:
                await vm.close()
            if self.launcher_process.poll() is not None:
                self.restart_launcher()
            for record in await self.launcher.list_vms():
                await self.launcher.kill_vm(record.sandbox_id)
                await self.launcher.forget_vm(record.sandbox_id)
            await self.launcher.close()
        finally:
            self.launcher_process.terminate()
            self.launcher_process.wait(WITHIN_S)
            self._log.close()
            shutil.rmtree(self.folder)


async def _qemu(stand: Stand) -> Driver:
    return await QemuDriver.create(
        launcher=stand.launcher,
        run_dir=stand.run_dir,
        folder=stand.ground.top / "vmm",
        ram_library=stand.ground.ram_library,
        verdicts=stand.ground.top,
        kernel=stand.ground.boot.kernel,
    )


async def _firecracker(stand: Stand) -> Driver:
    return await FirecrackerDriver.create(
        launcher=stand.launcher,
        run_dir=stand.run_dir,
        folder=stand.ground.top / "vmm",
        binary=binaries() / "firecracker",
    )


DRIVERS = {"firecracker": _firecracker, "qemu": _qemu}
"""Every driver that must pass the conformance suite: name → how a node makes it."""


async def lack_of_guests(ground: Ground, driver_name: str) -> str | None:
    """Why no guest comes up with a driver on this host, as the probe finds; None where they do."""
    if driver_name != "firecracker":
        return None
    installed = firecracker_install.find(binaries() / "firecracker")
    verdict = await firecracker_probe.verdict(installed, ground.top, ground.boot.kernel)
    assert verdict is not None
    return None if verdict.works else verdict.detail


@contextlib.asynccontextmanager
async def standing(ground: Ground, driver_name: str) -> AsyncIterator[Stand]:
    """A stand, and nothing of it left behind."""
    stand = Stand(ground, driver_name)
    try:
        stand.driver = await stand.make_driver()
        yield stand
    finally:
        await stand.clean_up()
