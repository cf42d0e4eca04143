"""The driver for Firecracker, which needs hardware virtualization."""

import asyncio
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from hatchway.domain.host_limits import BURST, DEFAULTS, HostLimits
from hatchway.domain.shapes import Shape
from hatchway.node.vmm import captures, firecracker_args, firecracker_install, kernel_elf, manifest, tree
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.firecracker_api import FirecrackerError
from hatchway.node.vmm.firecracker_install import Installed
from hatchway.node.vmm.firecracker_vm import FirecrackerVm
from hatchway.node.vmm.host import Host
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.seam import Baked, Sealing, SnapshotMismatch, Taking, Vm, VmmDied, VmmError, VmSpec
from hatchway.node.vmm.shim_vm import Kind
from hatchway.node.vmm.starting import Descriptors, adopted, ask_to_start, running_already, undone_on_failure
from hatchway.wire.launcher import StartVm

VMM_OVERHEAD_MIB = 32
"""Firecracker itself: 5 MiB of private memory, device queues, and what it holds while it writes a snapshot."""
LOAD_WITHIN_S = 60.0
"""Loading a saved state is milliseconds of work, and page faults on a cold memory file."""
START_WITHIN_S = 30.0

log = logging.getLogger(__name__)


class FirecrackerDriver:
    """See `seam.Driver`. Made with `create`.

    It maps the memory of a baked snapshot privately from a file that was opened read-only. A disk is one raw file: Firecracker knows no
    layers, so that a new one is a sparse copy, or a clone where the file system can.
    """

    name = "firecracker"
    disk_format = "raw"
    isolation = "hardware"

    def __init__(
        self,
        *,
        launcher: LauncherClient,
        run_dir: Path,
        folder: Path,
        installed: Installed,
        root: tree.Tree,
        host: Host,
        limits: HostLimits = DEFAULTS,
    ) -> None:
        self.version = installed.version
        self.build = root.digest
        self.host = host
        self._launcher = launcher
        self._run_dir = run_dir
        self._folder = folder
        self._numbers = installed.numbers
        self._root = root
        self._limits = limits
        self._kernels = kernel_elf.Kernels(folder / "kernels")
        self._kind = Kind(vmm=f"{self.name} {self.version}", isolation=self.isolation)

    @classmethod
    async def create(
        cls,
        *,
        launcher: LauncherClient,
        run_dir: Path,
        folder: Path,
        binary: Path | None = None,
        allowed: Collection[str] = (),
        limits: HostLimits = DEFAULTS,
    ) -> "FirecrackerDriver":
        """Finds Firecracker (`binary`, else on PATH) and builds its jail root below `folder`; `allowed` are advisories that are accepted.

        Raises `VmmMissing`, `FirecrackerRefused`, `VmmError`, `OSError`. Does not look whether KVM works: that is the probe's.
        """
        installed = await asyncio.to_thread(firecracker_install.find, binary)
        firecracker_install.check(installed, allowed)
        files = await asyncio.to_thread(tree.gather, installed.binary)
        root = await asyncio.to_thread(tree.build, folder / "roots", files)
        return cls(
            launcher=launcher,
            run_dir=run_dir,
            folder=folder,
            installed=installed,
            root=root,
            host=Host.read(),
            limits=limits,
        )

    def overhead_mib(self, shape: Shape) -> int:
        """Memory in MiB that a VM needs beside the guest's: for admission, and in the bound of its cgroup."""
        return VMM_OVERHEAD_MIB + shape.memory_mib // 64

    def baked_key(self, template_digest: str, shape: Shape, *, network: bool = True) -> str:
        """See `seam.Driver.baked_key`: 40 hexadecimal digits."""
        conditions = self.conditions(shape, network=network).conditions()
        text = "\n".join([template_digest, *(f"{name}={value}" for name, value in sorted(conditions.items()))])
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    async def start(self, spec: VmSpec, *, bakeable: bool = False) -> Vm:
        """See `seam.Driver.start`."""
        if (running := await running_already(self._launcher, self._run_dir, spec, self._vm)) is not None:
            return running
        with Descriptors() as fds:
            disk = await asyncio.to_thread(disks.prepare_raw, spec.folder, spec.boot.upper, spec.shape.disk_mib * 2**20)
            # Memory of its own, from no file: what an earlier machine of this sandbox was loaded from is not its base.
            (spec.folder / captures.BASE).unlink(missing_ok=True)
            fds.add_file(firecracker_args.KERNEL_FD, await asyncio.to_thread(self._kernels.elf, spec.boot.kernel))
            fds.add_file(firecracker_args.INITRD_FD, spec.boot.initrd)
            self._add_disks(fds, spec, disk)
            await self._launch(spec, fds)
        vm = self._vm(spec, bake=self.conditions(spec.shape, network=spec.network) if bakeable else None)
        async with undone_on_failure(vm, self._launcher):
            await vm.connect()
            machine = firecracker_args.Machine(spec.shape, spec.network, spec.boot.cmdline, self._limits)
            try:
                async with asyncio.timeout(START_WITHIN_S):
                    await vm.make(firecracker_args.boot(machine))
            except FirecrackerError as error:
                raise VmmDied(f"The machine could not be made: {error}") from error
        return vm

    async def restore(self, baked: Baked, spec: VmSpec, launched: Callable[[Vm], None] | None = None) -> Vm:
        """See `seam.Driver.restore`. The guest learns of a disk larger than the baked one by `Vm.resize_disk`."""
        if (running := await running_already(self._launcher, self._run_dir, spec, self._vm)) is not None:
            return running
        if (spec.shape.vcpus, spec.shape.memory_mib) != (baked.shape.vcpus, baked.shape.memory_mib):
            raise SnapshotMismatch(f"The snapshot {baked.key} has another shape than the sandbox.")
        await asyncio.to_thread(manifest.verify, baked, self.conditions(spec.shape, network=spec.network))
        with Descriptors() as fds:
            disk = await asyncio.to_thread(disks.prepare_raw, spec.folder, baked.upper, spec.shape.disk_mib * 2**20)
            await asyncio.to_thread(captures.keep_base, spec.folder, baked.memory)
            self._add_state(fds, baked.memory, baked.state)
            self._add_disks(fds, spec, disk)
            await self._launch(spec, fds)
        vm = self._vm(spec)
        async with undone_on_failure(vm, self._launcher):
            await vm.connect()
            if launched is not None:
                launched(vm)
            await self._load(vm, f"snapshot {baked.key}", resume=True)
        return vm

    async def adopt(self, spec: VmSpec) -> Vm:
        """See `seam.Driver.adopt`. Raises `WrongGeneration` when the VM that runs is of another one."""
        return await adopted(self._vm(spec))

    async def capture(self, vm: Vm, folder: Path, *, disk: bool = True) -> Sealing:
        """See `seam.Driver.capture`.

        Of a machine that booted, or has more than 3 GiB, all of the memory is written; of others what they changed.
        """
        if not isinstance(vm, FirecrackerVm):
            raise VmmError("This is no VM of this driver.")
        if await vm.status() != "paused":
            raise VmmError("Only a paused VM can be captured.")
        sparse = await vm.save_changes(folder)
        await asyncio.to_thread(captures.take, folder, vm.spec.folder, disk=disk, whole=not sparse)
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
        """See `seam.Driver.revive`. The first one merges base and changes into one file, which all of them map, `shared` or not."""
        if (running := await running_already(self._launcher, self._run_dir, spec, self._vm)) is not None:
            return running
        if taking is not None:
            await taking.wait()
        await asyncio.to_thread(self.verify, folder, spec)
        with Descriptors() as fds:
            disk = disks.load(spec.folder)
            if disk is None:
                disk = await asyncio.to_thread(captures.copy_disk, folder, spec.folder)
            memory = await asyncio.to_thread(captures.merged_memory, folder)
            await asyncio.to_thread(captures.keep_base, spec.folder, memory)
            self._add_state(fds, memory, folder / captures.STATE)
            self._add_disks(fds, spec, disk)
            await self._launch(spec, fds)
        vm = self._vm(spec)
        async with undone_on_failure(vm, self._launcher):
            if launched is not None:
                launched(vm)
            await vm.connect()
            await self._load(vm, f"capture {folder.name}", resume=False)
        return vm

    # -- parts

    def _vm(self, spec: VmSpec, *, bake: Manifest | None = None) -> FirecrackerVm:
        return FirecrackerVm(spec, self._run_dir / "vm" / spec.sandbox_id, self._launcher, self._kind, bake=bake)

    async def _load(self, vm: FirecrackerVm, what: str, *, resume: bool) -> None:
        try:
            await vm.ask(firecracker_args.load(self._numbers, resume=resume), within=LOAD_WITHIN_S)
        except FirecrackerError as error:
            raise SnapshotMismatch(f"Firecracker could not load the {what}: {error.description}") from error
        except VmmDied as error:
            # It ends by itself where a state makes no sense to it; who killed it is another matter.
            if error.status is None or error.status.signal is not None:
                raise
            raise SnapshotMismatch(f"Firecracker could not load the {what}: {error}") from error

    async def _launch(self, spec: VmSpec, fds: Descriptors) -> None:
        request = StartVm(
            sandbox_id=spec.sandbox_id,
            generation=spec.generation,
            argv=firecracker_args.arguments(),
            env={},
            pass_as=fds.targets,
            network=spec.network,
            kvm=True,
            paths=True,
            vcpus=spec.shape.vcpus,
            memory_limit_mib=spec.shape.memory_mib + self.overhead_mib(spec.shape),
            # Firecracker keeps to the bound itself, bursts included; this holds one that was taken over.
            io_bps=(self._limits.disk_mib_s << 20) * BURST,
            io_iops=self._limits.disk_ops_s * BURST,
        )
        root = self._root.open()
        try:
            await ask_to_start(self._launcher, request, [root, *fds.numbers])
        finally:
            os.close(root)

    def _add_disks(self, fds: Descriptors, spec: VmSpec, disk: disks.Disk) -> None:
        fds.add_file(firecracker_args.BASE_FD, spec.boot.base)
        fds.add(firecracker_args.UPPER_FD, disk.open()[0])

    def _add_state(self, fds: Descriptors, memory: Path, state: Path) -> None:
        # Read-only: no VM can change the memory that its neighbours are made from.
        fds.add_file(firecracker_args.MEMORY_FD, memory)
        fds.add_file(firecracker_args.STATE_FD, state)

    def conditions(self, shape: Shape, *, network: bool = True) -> Manifest:
        """See `seam.Driver.conditions`."""
        return Manifest(
            vmm=f"{self.name} {self.version}",
            build=self.build,
            arguments=firecracker_args.ARGS_VERSION,
            isolation=self.isolation,
            cpu=self.host.cpu_digest,
            tsc_khz=self.host.tsc_khz,
            network=network,
            shape=Shape(vcpus=shape.vcpus, memory_mib=shape.memory_mib, disk_mib=0),
        )
