"""The driver for QEMU's microvm, with hardware virtualization where the probe found that it works, else software emulation."""

import asyncio
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hatchway.domain.host_limits import BURST, DEFAULTS, HostLimits
from hatchway.domain.shapes import MAX_MEMORY_MIB, Shape
from hatchway.node.vmm import captures, machines, manifest, probe, qemu_args, tree
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.host import Host
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.machines import Installed
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.qemu_vm import QemuVm
from hatchway.node.vmm.qmp import QmpError, command
from hatchway.node.vmm.seam import (
    Baked,
    Sealing,
    SnapshotMismatch,
    Taking,
    Vm,
    VmmDied,
    VmmError,
    VmmMissing,
    VmSpec,
)
from hatchway.node.vmm.shim_vm import Kind
from hatchway.node.vmm.starting import Descriptors, adopted, ask_to_start, running_already, undone_on_failure
from hatchway.wire.launcher import StartVm

VMM_OVERHEAD_MIB = 96
"""QEMU itself: 25 MiB of private memory when idle, device queues, and the block layer's tables of a large disk."""

log = logging.getLogger(__name__)

_Identity = tuple[Path, int, int, int, int]
"""Path, device, inode, size and time of change: what tells one file from its successor without reading it."""


class QemuDriver:
    """See `seam.Driver`. Made with `create`."""

    name = "qemu"
    disk_format = "qcow2"

    def __init__(
        self,
        *,
        launcher: LauncherClient,
        run_dir: Path,
        folder: Path,
        installed: Installed,
        root: tree.Tree,
        host: Host,
        hardware: bool,
        limits: HostLimits = DEFAULTS,
    ) -> None:
        self.version = installed.version
        self.isolation = "hardware" if hardware else "emulated"
        self.build = root.digest
        self.host = host
        self._launcher = launcher
        self._run_dir = run_dir
        self._folder = folder
        self._machine = installed.machine
        self._root = root
        self._hardware = hardware
        self._limits = limits
        self._boot_roots: dict[tuple[_Identity, _Identity], tree.Tree] = {}
        self._kind = Kind(vmm=f"{self.name} {self.version}", isolation=self.isolation)

    @classmethod
    async def create(
        cls,
        *,
        launcher: LauncherClient,
        run_dir: Path,
        folder: Path,
        ram_library: Path,
        verdicts: Path,
        kernel: Path | None = None,
        hardware: bool | None = None,
        limits: HostLimits = DEFAULTS,
    ) -> "QemuDriver":
        """Finds QEMU, builds its jail root below `folder` and takes the probe's verdict on KVM.

        `verdicts` is the folder that holds the probe's cached verdict; with a guest `kernel` the probe is run when there is none for this
        host boot and QEMU, without one software emulation is taken then. `hardware` overrides the verdict. Raises `VmmMissing`,
        `VmmError`, `OSError`.
        """
        host = Host.read()
        machine = machines.machine_of(host.architecture)
        if hardware is None:
            hardware = await probe.kvm_works(machine, verdicts, kernel)
        installed, root = await asyncio.to_thread(_make_root, machine, hardware, folder, ram_library)
        return cls(
            launcher=launcher,
            run_dir=run_dir,
            folder=folder,
            installed=installed,
            root=root,
            host=host,
            hardware=hardware,
            limits=limits,
        )

    def overhead_mib(self, shape: Shape) -> int:
        """Memory in MiB that a VM needs beside the guest's: for admission, and in the bound of its cgroup."""
        cache = 0 if self._hardware else qemu_args.translation_cache_mib(shape)
        return VMM_OVERHEAD_MIB + cache + shape.memory_mib // 64

    def baked_key(self, template_digest: str, shape: Shape, *, network: bool = True) -> str:
        """See `seam.Driver.baked_key`: 40 hexadecimal digits."""
        conditions = self.conditions(shape, network=network).conditions()
        text = "\n".join([template_digest, *(f"{name}={value}" for name, value in sorted(conditions.items()))])
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    async def start(self, spec: VmSpec, *, bakeable: bool = False) -> Vm:
        """See `seam.Driver.start`."""
        if (running := await running_already(self._launcher, self._run_dir, spec, self._vm)) is not None:
            return running
        size = spec.shape.disk_mib * 2**20
        with Descriptors() as fds:
            disk = await asyncio.to_thread(self._prepare_start, spec)
            root = await asyncio.to_thread(self._boot_root, spec.boot.kernel, spec.boot.initrd)
            memory = None
            if bakeable:
                memory = spec.folder / "memory"
                fds.add(qemu_args.MEMORY_FD, _new_memory(memory, spec.shape.memory_mib * 2**20))
            else:
                empty = self._empty_memory()
                await asyncio.to_thread(captures.keep_base, spec.folder, empty)
                fds.add_file(qemu_args.MEMORY_FD, empty)
            self._add_disks(fds, spec, disk)
            parts = replace(
                self._parts(spec, disk),
                share_memory=bakeable,
                cmdline=qemu_args.kernel_command_line(
                    self._machine, spec.boot.cmdline, hardware=self._hardware, tsc_khz=self.host.tsc_khz
                ),
            )
            await self._launch(spec, root, parts, fds)
        bake = self.conditions(spec.shape, network=spec.network) if bakeable else None
        vm = self._vm(spec, bake=bake, memory=memory)
        async with undone_on_failure(vm, self._launcher):
            await vm.connect()
            grow = disk.size() < size
            await vm.running(*([command("block_resize", node_name=qemu_args.DISK_NODE, size=size)] if grow else []))
        return vm

    async def restore(self, baked: Baked, spec: VmSpec, launched: Callable[[Vm], None] | None = None) -> Vm:
        """See `seam.Driver.restore`. The guest learns of a disk larger than the baked one by `Vm.resize_disk`."""
        if (running := await running_already(self._launcher, self._run_dir, spec, self._vm)) is not None:
            return running
        if (spec.shape.vcpus, spec.shape.memory_mib) != (baked.shape.vcpus, baked.shape.memory_mib):
            raise SnapshotMismatch(f"The snapshot {baked.key} has another shape than the sandbox.")
        with Descriptors() as fds:
            disk = await asyncio.to_thread(self._prepare_restore, spec, baked)
            # Read-only: no VM can change the memory that its neighbours are made from.
            fds.add_file(qemu_args.MEMORY_FD, baked.memory)
            fds.add_file(qemu_args.STATE_FD, baked.state)
            self._add_disks(fds, spec, disk)
            parts = replace(self._parts(spec, disk), incoming=True)
            # The disk is flushed while the VMM starts, which takes longer.
            flushed = asyncio.ensure_future(asyncio.to_thread(disks.make_durable, disk))
            try:
                await self._launch(spec, self._root, parts, fds)
            except BaseException:
                flushed.cancel()
                raise
        vm = self._vm(spec)
        async with undone_on_failure(vm, self._launcher):
            if launched is not None:
                launched(vm)
            await self._loaded(vm, f"snapshot {baked.key}")
            await flushed
        return vm

    async def adopt(self, spec: VmSpec) -> Vm:
        """See `seam.Driver.adopt`. Raises `WrongGeneration` when the VM that runs is of another one."""
        return await adopted(self._vm(spec))

    async def capture(self, vm: Vm, folder: Path, *, disk: bool = True) -> Sealing:
        """See `seam.Driver.capture`."""
        if not isinstance(vm, QemuVm):
            raise VmmError("This is no VM of this driver.")
        if await vm.status() != "paused":
            raise VmmError("Only a paused VM can be captured.")
        diff, state = await asyncio.to_thread(
            lambda: [captures.create(folder, n) for n in (captures.DIFF, captures.STATE)]
        )
        taken = asyncio.ensure_future(asyncio.to_thread(captures.take, folder, vm.spec.folder, disk=disk))
        try:
            await vm.save_changes(diff, state)
        finally:
            os.close(diff)
            os.close(state)
            await asyncio.wait([taken])  # a thread cannot be called back: nothing is written any more when this returns
        taken.result()
        return functools.partial(captures.seal, folder, self.conditions(vm.spec.shape, network=vm.spec.network))

    def verify(self, folder: Path, spec: VmSpec) -> None:
        """See `seam.Driver.verify`."""
        captures.verify(folder, self.conditions(spec.shape, network=spec.network))

    async def revive(
        self,
        folder: Path,
        spec: VmSpec,
        launched: Callable[[Vm], None] | None = None,
        *,
        shared: bool = False,
        taking: Taking | None = None,
    ) -> Vm:
        """See `seam.Driver.revive`.

        QEMU takes longer to start than a capture to be taken or verified: it is started first, and loads nothing before that is done.
        """
        if (running := await running_already(self._launcher, self._run_dir, spec, self._vm)) is not None:
            return running
        if taking is not None and shared:
            await taking.wait()  # what they share is in it
            taking = None
        whole = asyncio.ensure_future(self._whole(folder, spec, taking))
        try:
            return await self._revive(folder, spec, launched, whole, shared=shared, taking=taking)
        finally:
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)

    async def _whole(self, folder: Path, spec: VmSpec, taking: Taking | None) -> None:
        """The capture is there, and what it says it is."""
        if taking is not None:
            await taking.wait()
        await asyncio.to_thread(self.verify, folder, spec)

    async def _revive(
        self,
        folder: Path,
        spec: VmSpec,
        launched: Callable[[Vm], None] | None,
        whole: "asyncio.Future[None]",
        *,
        shared: bool,
        taking: Taking | None,
    ) -> Vm:
        new = disks.load(spec.folder) is None
        with Descriptors() as fds:
            try:
                disk = await asyncio.to_thread(self._prepare_revive, fds, folder, spec, shared=shared, taking=taking)
            except (OSError, VmmError):
                await whole  # what is wrong with a capture it says better
                raise
            parts = replace(self._parts(spec, disk), incoming=True, devices_only=True)
            await self._launch(spec, self._root, parts, fds)
        vm = self._vm(spec)
        async with undone_on_failure(vm, self._launcher):
            if launched is not None:
                launched(vm)
            await asyncio.shield(whole)
            recorded = None
            if new:
                await asyncio.to_thread(captures.filled, folder, disk)
                # Flushed while the machine is loaded, which takes longer.
                recorded = asyncio.ensure_future(asyncio.to_thread(captures.recorded, disk))
            try:
                with Descriptors() as own:
                    diff = None
                    if not shared:
                        diff = os.open(folder / captures.DIFF, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                        own.add(0, diff)
                    await self._loaded(vm, f"capture {folder.name}", diff)
            finally:
                if recorded is not None:
                    await asyncio.wait([recorded])
            if recorded is not None:
                recorded.result()
        return vm

    def _prepare_revive(
        self, fds: Descriptors, folder: Path, spec: VmSpec, *, shared: bool, taking: Taking | None
    ) -> disks.Disk:
        """Opens what the VMM of a capture gets; its disk is a stand-in where it has none yet. Raises `OSError`, `VmmError`."""
        parent = folder if taking is None else taking.source
        disk = disks.load(spec.folder) or captures.stand_in(parent, spec.folder)
        memory = captures.merged_memory(folder) if shared else parent / captures.BASE
        captures.keep_base(spec.folder, memory)
        fds.add_file(qemu_args.MEMORY_FD, memory)
        if taking is None:
            fds.add_file(qemu_args.STATE_FD, folder / captures.STATE)
        else:
            fds.add(qemu_args.STATE_FD, captures.expected(folder, captures.STATE))
        self._add_disks(fds, spec, disk)
        return disk

    # -- parts

    def _prepare_start(self, spec: VmSpec) -> disks.Disk:
        lowest = disks.own(spec.boot.upper, self._folder / "disks")
        disk = disks.prepare(spec.folder, lowest, None, spec.shape.disk_mib * 2**20)
        disks.make_durable(disk)
        return disk

    def _prepare_restore(self, spec: VmSpec, baked: Baked) -> disks.Disk:
        manifest.verify(baked, self.conditions(spec.shape, network=spec.network))
        lowest = disks.own(spec.boot.upper, self._folder / "disks")
        disk = disks.prepare(spec.folder, lowest, baked.upper, spec.shape.disk_mib * 2**20)
        captures.keep_base(spec.folder, baked.memory)
        return disk

    def _vm(self, spec: VmSpec, *, bake: Manifest | None = None, memory: Path | None = None) -> QemuVm:
        return QemuVm(
            spec, self._run_dir / "vm" / spec.sandbox_id, self._launcher, self._kind, bake=bake, memory=memory
        )

    def _parts(self, spec: VmSpec, disk: disks.Disk) -> qemu_args.Parts:
        """What the arguments of every start are made of."""
        return qemu_args.Parts(
            machine=self._machine,
            hardware=self._hardware,
            shape=spec.shape,
            layers=tuple(qemu_args.Layer(layer.format) for layer in disk.layers),
            network=spec.network,
            limits=self._limits,
        )

    async def _loaded(self, vm: QemuVm, what: str, diff: int | None = None) -> None:
        try:
            await vm.connect()
            if diff is not None:
                await vm.inject(diff)
            await vm.load(qemu_args.STATE_FD)
        except (VmmDied, QmpError) as error:
            if isinstance(error, VmmDied) and (error.status is None or error.status.signal is not None):
                raise
            raise SnapshotMismatch(f"QEMU could not load the {what}: {error}") from error

    async def _launch(self, spec: VmSpec, root: tree.Tree, parts: qemu_args.Parts, fds: Descriptors) -> None:
        environment = {
            "LD_LIBRARY_PATH": tree.LIBRARIES_PATH,
            "LD_PRELOAD": tree.PRELOAD_PATH,
            "QEMU_MODULE_DIR": tree.MODULES_PATH,
            "HATCHWAY_RAM_FD": str(qemu_args.MEMORY_FD),
        }
        request = StartVm(
            sandbox_id=spec.sandbox_id,
            generation=spec.generation,
            argv=qemu_args.arguments(parts),
            env=environment,
            pass_as=fds.targets,
            network=spec.network,
            kvm=self._hardware,
            vcpus=spec.shape.vcpus,
            memory_limit_mib=spec.shape.memory_mib + self.overhead_mib(spec.shape),
            # The monitor keeps to the bound itself, bursts included; this holds one that was taken over.
            io_bps=(self._limits.disk_mib_s << 20) * BURST,
            io_iops=self._limits.disk_ops_s * BURST,
        )
        root_fd = root.open()
        try:
            await ask_to_start(self._launcher, request, [root_fd, *fds.numbers])
        finally:
            os.close(root_fd)

    def _add_disks(self, fds: Descriptors, spec: VmSpec, disk: disks.Disk) -> None:
        fds.add_file(qemu_args.BASE_FD, spec.boot.base)
        for number, fd in enumerate(disk.open()):
            fds.add(qemu_args.DISK_FDS + number, fd)

    def conditions(self, shape: Shape, *, network: bool = True) -> Manifest:
        """See `seam.Driver.conditions`."""
        return Manifest(
            vmm=f"{self.name} {self.version}",
            build=self.build,
            arguments=qemu_args.ARGS_VERSION,
            isolation=self.isolation,
            cpu=self.host.cpu_digest,
            tsc_khz=self.host.tsc_khz,
            network=network,
            shape=Shape(vcpus=shape.vcpus, memory_mib=shape.memory_mib, disk_mib=0),
        )

    def _boot_root(self, kernel: Path, initrd: Path) -> tree.Tree:
        """The jail root of a cold boot: QEMU takes kernel and initramfs by path only."""
        key = (_identity(kernel), _identity(initrd))
        found = self._boot_roots.get(key)
        if found is None or not found.folder.is_dir():
            files = {tree.KERNEL_PATH: kernel, tree.INITRD_PATH: initrd}
            found = tree.build(self._folder / "roots", files, like=self._root)
            self._boot_roots[key] = found
        return found

    def _empty_memory(self) -> Path:
        """A file of nothing but a hole, which VMs that boot cold map privately.

        With it their changed pages can be told from the others in the same way as a restored VM's, so that both can be captured.
        """
        path = self._folder / "empty-memory"
        size = MAX_MEMORY_MIB * 2**20
        if not path.exists() or path.stat().st_size != size:
            fd = os.open(
                path.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o444
            )
            try:
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
            os.rename(path.with_suffix(".new"), path)
        return path


def _identity(path: Path) -> _Identity:
    found = path.stat()
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _make_root(
    machine: machines.Machine, hardware: bool, folder: Path, ram_library: Path
) -> tuple[Installed, tree.Tree]:
    installed = machines.find(machine, hardware=hardware)
    if not ram_library.is_file():
        raise VmmMissing(f"The preload library {ram_library} is not built: run make, or install the package again.")
    files = tree.gather(installed.binary, firmware=installed.firmware, modules=installed.modules, preload=ram_library)
    return installed, tree.build(folder / "roots", files)


def _new_memory(path: Path, size: int) -> int:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
