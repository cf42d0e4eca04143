"""A node that is a process of its own: the real core, service, sessions, records and artifacts, over machines that are played.

A machine is a process of the played launcher. It is paused by SIGSTOP, so that its state outlives everybody as a VM's does. Its memory
is one file in its run folder, which goes with it; its disk is the topmost layer in the sandbox's folder. What the guest has in
either is a short text (`write_guest`, `read_guest`), so that a test can tell what was lost.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.played_launcher import alive, is_stopped, read_record

from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.node import greeting
from hatchway.node.artifacts import layers
from hatchway.node.artifacts.extents import GRAIN, Extent
from hatchway.node.artifacts.spool import Spool
from hatchway.node.context import Context
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.egress.gateways import Gateways
from hatchway.node.events import Events
from hatchway.node.exports import Exports
from hatchway.node.guest.seam import AgentHello, GuestError, LinkLost
from hatchway.node.imports import Imports
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.service import NodeService
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.snapshots import Snapshots
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.seam import ExitStatus, Taking, VmInfo, VmmDied, VmmError, VmSpec, WrongGeneration
from hatchway.wire import fault_points
from hatchway.wire.ballast import Ballast
from hatchway.wire.fault_points import reached
from hatchway.wire.launcher import StartVm, VmRecord
from hatchway.wire.node import TemplateRelease

DIGEST = "sha256:" + "5eed" * 16
PAGE = 4096
MEMORY = "memory"
SHUT_DOWN = "shut-down"
"""In a machine's run folder: its guest powered it off."""
BUSY = "busy"
"""In the node's folder: a text that the next guest that is let go on writes to its disk at once; then it is taken away."""


def _text(octets: bytes) -> str:
    return octets.rstrip(b"\0").decode()


def read_disk(folder: Path) -> str:
    """What a guest wrote to a disk."""
    disk = disks.load(folder)
    if disk is None:
        return ""
    return next((_text(bytes(one.data[:PAGE])) for one in layers.flattened(disk) if one.data), "")


def write_disk(folder: Path, text: str) -> None:
    """Writes as the guest."""
    disk = disks.load(folder)
    assert disk is not None
    new = disk.top.with_name(".written")
    new.unlink(missing_ok=True)
    layers.write_layer(new, disk.size(), [Extent(0, GRAIN, text.encode().ljust(GRAIN, b"\0"))])
    new.rename(disk.top)


def read_memory(run_folder: Path) -> str:
    """What a guest has in its memory."""
    return _text((run_folder / MEMORY).read_bytes())


def read_kept_memory(capture: Path) -> str:
    """What a guest had in its memory when it was captured."""
    octets = (capture / captures.DIFF).read_bytes()
    # Of what was imported all of the memory is the base, which nothing was changed of.
    return _text(octets[-PAGE:] if len(octets) > PAGE else (capture / captures.BASE).read_bytes()[:PAGE])


def write_memory(run_folder: Path, text: str) -> None:
    """Writes as the guest."""
    (run_folder / MEMORY).write_bytes(text.encode().ljust(PAGE, b"\0"))


class PlayedVm:
    """`seam.Vm` of a process."""

    def __init__(self, spec: VmSpec, run_dir: Path, launcher: LauncherClient, record: VmRecord) -> None:
        self.spec = spec
        self.pid = record.shim_pid
        self.ended = asyncio.Event()
        self.exit: ExitStatus | None = None
        self.agent_socket = run_dir / "vm" / spec.sandbox_id
        self._record = record
        self._launcher = launcher
        self._fd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._fd = os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(self._fd, self._look)
        self._look()

    def _look(self) -> None:
        if not alive(self._record) and not self.ended.is_set():
            off = (self.agent_socket / SHUT_DOWN).exists()
            self.exit = ExitStatus(code=0, guest_shutdown=True) if off else ExitStatus(signal=9)
            self.ended.set()
        if self.ended.is_set() and self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _signal(self, number: int) -> None:
        self._look()
        if self.ended.is_set():
            raise VmmDied("The VMM ended.", self.exit)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def pause(self) -> None:
        reached("vm", "pause")
        self._signal(signal.SIGSTOP)
        while not is_stopped(self.pid):
            if not alive(self._record):
                raise VmmDied("The VMM ended.", self.exit)
            await asyncio.sleep(0)
        reached("vm-did", "pause")

    async def resume(self) -> None:
        reached("vm", "resume")
        self._signal(signal.SIGCONT)
        busy = self.spec.folder.parent.parent / BUSY
        if busy.exists():
            write_disk(self.spec.folder, busy.read_text())
            busy.unlink()
        reached("vm-did", "resume")

    async def resize_disk(self, disk_mib: int) -> None:
        pass

    async def stop(self, grace_s: float) -> ExitStatus:
        return await self.kill()

    async def kill(self) -> ExitStatus:
        await self._launcher.kill_vm(self.spec.sandbox_id)
        self._look()
        return self.exit or ExitStatus(signal=9)

    async def info(self) -> VmInfo:
        self._look()
        status = "ended" if self.ended.is_set() else "paused" if is_stopped(self.pid) else "running"
        return VmInfo(status=status, vmm="played 1", isolation="emulated", pid=self.pid, exit=self.exit)

    async def forget(self) -> None:
        await self._launcher.forget_vm(self.spec.sandbox_id)

    async def close(self) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class PlayedDriver:
    """`seam.Driver` over played machines: real disks and captures, and as much of a memory as a text needs."""

    name, version, isolation, build, disk_format = "played", "1", "emulated", "build", "qcow2"

    def __init__(self, launcher: LauncherClient, run_dir: Path, folder: Path) -> None:
        self._launcher = launcher
        self._run_dir = run_dir
        self.lowest, self.memory = folder / "empty.raw", folder / "memory"
        for path, size in ((self.lowest, 64 * PAGE), (self.memory, PAGE)):
            if not path.exists():
                new = path.with_suffix(".new")
                new.write_bytes(bytes(size))
                new.rename(path)

    def _manifest(self, shape: Shape, network: bool = True) -> Manifest:
        return Manifest(
            vmm="played 1",
            build=self.build,
            arguments=1,
            isolation=self.isolation,
            cpu="cpu",
            tsc_khz=1,
            network=network,
            shape=Shape(vcpus=shape.vcpus, memory_mib=shape.memory_mib, disk_mib=0),
        )

    async def start(self, spec: VmSpec, *, bakeable: bool = False) -> PlayedVm:
        if (running := await self._running(spec)) is not None:
            return running
        disk = await asyncio.to_thread(disks.prepare, spec.folder, self.lowest, None, spec.shape.disk_mib << 20)
        await asyncio.to_thread(disks.make_durable, disk)
        captures.keep_base(spec.folder, self.memory)
        return await self._launch(spec, "", paused=False)

    async def restore(self, baked: Any, spec: VmSpec, launched: Callable[[Any], None] | None = None) -> PlayedVm:
        if (running := await self._running(spec)) is not None:
            return running
        await asyncio.to_thread(disks.prepare, spec.folder, self.lowest, None, spec.shape.disk_mib << 20)
        captures.keep_base(spec.folder, self.memory)
        return await self._launch(spec, "", paused=False, launched=launched)

    async def adopt(self, spec: VmSpec) -> PlayedVm:
        record = read_record(self._run_dir / "vm" / spec.sandbox_id)
        if record is None:
            raise VmmDied("It is not there.")
        if record.generation != spec.generation:
            raise WrongGeneration("It is another's.")
        vm = PlayedVm(spec, self._run_dir, self._launcher, record)
        if vm.ended.is_set():
            await vm.close()
            raise VmmDied("It has ended.", vm.exit)
        return vm

    async def capture(self, vm: PlayedVm, folder: Path, *, disk: bool = True) -> Callable[..., None]:
        if not is_stopped(vm.pid):
            raise VmmError("Only a paused VM can be captured.")
        memory = (vm.agent_socket / MEMORY).read_bytes()
        diff = struct.pack("<8sQQQ", b"HWCAP1\0\0", PAGE, PAGE, 1) + struct.pack("<QQ", 0, 1) + memory
        for name, octets in ((captures.DIFF, diff), (captures.STATE, b"devices")):
            fd = await asyncio.to_thread(captures.create, folder, name)
            try:
                os.write(fd, octets)
            finally:
                os.close(fd)
        await asyncio.to_thread(captures.take, folder, vm.spec.folder, disk=disk)
        return functools.partial(captures.seal, folder, self._manifest(vm.spec.shape, vm.spec.network))

    def conditions(self, shape: Shape, *, network: bool = True) -> Manifest:
        return self._manifest(shape, network)

    def verify(self, folder: Path, spec: VmSpec) -> None:
        captures.verify(folder, self._manifest(spec.shape, spec.network))

    async def revive(
        self,
        folder: Path,
        spec: VmSpec,
        launched: Callable[[Any], None] | None = None,
        *,
        shared: bool = False,
        taking: Taking | None = None,
    ) -> PlayedVm:
        if (running := await self._running(spec)) is not None:
            return running
        if taking is not None and not shared:
            return await self._revive_beside(folder, spec, launched, taking)
        if taking is not None:
            await taking.wait()
        await asyncio.to_thread(self.verify, folder, spec)
        memory = folder / captures.BASE
        if shared:
            memory = await asyncio.to_thread(captures.merged_memory, folder)
        if disks.load(spec.folder) is None:
            await asyncio.to_thread(captures.copy_disk, folder, spec.folder)
        await asyncio.to_thread(captures.keep_base, spec.folder, memory)
        text = _text(memory.read_bytes()[:PAGE]) if shared else read_kept_memory(folder)
        return await self._launch(spec, text, paused=True, launched=launched)

    async def _revive_beside(
        self, folder: Path, spec: VmSpec, launched: Callable[[Any], None] | None, taking: Taking
    ) -> PlayedVm:
        """As QEMU: the machine is there before its memory and its disk are."""
        if taking.done.done():
            await taking.wait()
        disk = await asyncio.to_thread(captures.stand_in, taking.source, spec.folder)
        await asyncio.to_thread(captures.keep_base, spec.folder, taking.source / captures.BASE)
        vm = await self._launch(spec, "", paused=True, launched=launched)
        try:
            await taking.wait()
            reached("vm", "awaited")
            await asyncio.to_thread(self.verify, folder, spec)
            await asyncio.to_thread(captures.filled, folder, disk)
            await asyncio.to_thread(captures.recorded, disk)
            write_memory(vm.agent_socket, read_kept_memory(folder))
        except BaseException:
            await vm.close()
            with contextlib.suppress(VmmError):
                await self._launcher.kill_vm(spec.sandbox_id)
                await self._launcher.forget_vm(spec.sandbox_id)
            raise
        return vm

    def overhead_mib(self, shape: Shape) -> int:
        return 0

    async def _running(self, spec: VmSpec) -> PlayedVm | None:
        with contextlib.suppress(VmmDied):
            return await self.adopt(spec)
        await self._launcher.forget_vm(spec.sandbox_id)
        return None

    async def _launch(
        self, spec: VmSpec, memory: str, *, paused: bool, launched: Callable[[Any], None] | None = None
    ) -> PlayedVm:
        request = StartVm(sandbox_id=spec.sandbox_id, generation=spec.generation, argv=())
        asked = asyncio.ensure_future(self._launcher.start_vm(request, ()))
        try:
            record = await asyncio.shield(asked)
            reached("vm", "launched")
        except BaseException:
            with contextlib.suppress(VmmError):
                await asked
            with contextlib.suppress(VmmError):
                await self._launcher.kill_vm(spec.sandbox_id)
                await self._launcher.forget_vm(spec.sandbox_id)
            raise
        vm = PlayedVm(spec, self._run_dir, self._launcher, record)
        write_memory(vm.agent_socket, memory)
        if paused:
            await vm.pause()
        if launched is not None:
            launched(vm)
        return vm


class PlayedAgent:
    """`GuestLink` as far as the node's core needs it: it answers for as long as its machine runs."""

    def __init__(self, ended: asyncio.Event, boot_id: str) -> None:
        self.hello = AgentHello(boot_id, "played", 0, ())
        self._ended = ended

    def _answer(self) -> None:
        if self._ended.is_set():
            raise LinkLost("the machine ended")

    async def setup(self, **_: Any) -> None:
        reached("agent", "setup")
        self._answer()

    async def freeze(self, within_ms: int) -> None:
        try:
            reached("agent", "freeze")
        except OSError as error:
            raise GuestError(error.errno or errno.EIO, "it does not freeze") from error
        self._answer()

    async def thaw(self) -> None:
        reached("agent", "thaw")
        self._answer()

    async def resize_disk(self, device_mib: int) -> int:
        self._answer()
        return 0

    async def shutdown(self) -> None:
        self._answer()

    def paused(self, stopped: bool) -> None:
        pass

    async def close(self) -> None:
        pass


async def _connect(path: Path, *, vm_ended: asyncio.Event, **_: Any) -> PlayedAgent:
    if vm_ended.is_set():
        raise LinkLost("the machine ended")
    return PlayedAgent(vm_ended, new_id())


class _Room:
    def check_create(self, shape: Shape, overhead_mib: int, holdings: Any) -> None:
        pass

    def check_start(self, shape: Shape, overhead_mib: int, holdings: Any) -> None:
        pass

    def check_import(self, shape: Shape, memory: bool, overhead_mib: int, holdings: Any) -> None:
        pass


class _Baker:
    async def baked(self, release: Any, shape: Shape, progress: Any = None) -> Any:
        return SimpleNamespace(shape=shape, host_keys=False)

    async def discard(self, baked: Any) -> None:
        pass

    async def recover(self) -> None:
        pass


class _Images:
    release = TemplateRelease(name="seed", tag="latest", digest=DIGEST, size_bytes=1, created_at=1.0)
    manifest = SimpleNamespace(name="seed", tag="latest", parts={})
    digest = DIGEST

    def __init__(self, upper: Path) -> None:
        self._upper = upper

    def part(self, name: str) -> Path:
        assert name == "upper"
        return self._upper

    def resolve(self, reference: str) -> Any:
        return self

    def resolve_digest(self, digest: str) -> Any:
        return self

    def boot_files(self) -> None:
        return None

    def list(self) -> tuple[TemplateRelease, ...]:
        return (self.release,)


async def _serve(listening: socket.socket, folder: Path, ready: Callable[[], None]) -> None:
    root, run_dir = folder / "sandboxes", folder / "run"
    root.mkdir(exist_ok=True)
    launcher = LauncherClient(run_dir / "launcher.sock")
    events, driver = Events(), PlayedDriver(launcher, run_dir, folder)
    sessions = Sessions(folder / "sessions", on_status=events.session)
    sessions.load()
    context = Context(
        root=root,
        host_boot_id="boot",
        driver=driver,  # type: ignore[arg-type]
        launcher=launcher,
        images=_Images(driver.lowest),  # type: ignore[arg-type]
        baker=_Baker(),  # type: ignore[arg-type]
        sessions=sessions,
        events=events,
        capacity=_Room(),  # type: ignore[arg-type]
        ballast=Ballast(folder / "ballast", 1 << 20),
        gateways=Gateways(run_dir, 0, launcher),
        drop=lambda sandbox_id: sandboxes.drop(sandbox_id),
    )
    sandboxes = Sandboxes(context, Snapshots(folder / "snapshots"))
    exports = Exports(context, sandboxes.snapshots, Spool(folder / "exports"))
    imports = Imports(context, sandboxes, Spool(folder / "uploads"))
    exports.spool.load()
    imports.uploads.load()
    await sandboxes.adopt_all()
    service = NodeService(
        context, sandboxes, TokenChecker(), "played", "http://127.0.0.1:1", exports=exports, imports=imports
    )
    await service.serve_unix(listening, frozenset({os.getuid()}))
    ready()
    await asyncio.Event().wait()


def run(listening: socket.socket, folder: Path, faults: Path, ready: Callable[[], None]) -> None:
    """The process."""
    fault_points.listen(faults)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(filename=folder / "node.log", level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    setattr(greeting, "connect", _connect)  # noqa: B010  # typed for a link that does more
    asyncio.run(_serve(listening, folder, ready))
