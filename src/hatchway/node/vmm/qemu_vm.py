"""One QEMU with one machine in it, seen through its control socket and its shim.

The control socket may break without the VM ending (our own process restarted, a late answer) and is connected again at the next verb.
"""

import asyncio
import base64
import contextlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchway.node.vmm import disk as disks
from hatchway.node.vmm import manifest, qemu_args
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.qmp import Command, Event, Qmp, command
from hatchway.node.vmm.seam import ExitStatus, VmmDied, VmmError, VmmTimeout, VmSpec
from hatchway.node.vmm.shim_vm import ANSWER_WITHIN_S, KILL_WITHIN_S, REAPED_WITHIN_S, Kind, ShimVm, readable

LOAD_WITHIN_S = 60.0
"""Loading a saved state is milliseconds of work, and page faults on a cold memory file."""
SAVE_WITHIN_S = 120.0
FIRST_FDSET = 2**20
"""Numbers below it are those of the descriptors that a VMM is started with."""

log = logging.getLogger(__name__)


class QemuVm(ShimVm):
    """See the module. Made by `QemuDriver` only; the verbs are those of `seam.Vm`."""

    def __init__(
        self,
        spec: VmSpec,
        run_folder: Path,
        launcher: LauncherClient,
        kind: Kind,
        *,
        bake: "manifest.Manifest | None" = None,
        memory: Path | None = None,
    ) -> None:
        super().__init__(spec, run_folder, launcher, kind)
        self.agent_socket = run_folder / "agent.sock"
        self._bake = bake
        self._memory = memory
        self._qmp: Qmp | None = None
        self._qmp_lock = asyncio.Lock()
        self._shutdown_reason = ""
        self._migrated = asyncio.Event()
        self._migration_status = ""
        self._io_errors = 0
        self._io_error = ""

    # -- connections

    def describe_end(self, code: int | None, signal: int | None, *, out_of_memory: bool) -> ExitStatus:
        """See `ShimVm.describe_end`."""
        # QEMU ends with 0 of its own accord only when the guest powered off or reset itself: this holds also when nobody was
        # there to hear its event.
        shutdown = signal is None and code == 0 and self._bake is None
        reset = shutdown and self._shutdown_reason == "guest-reset"
        return ExitStatus(
            code=code,
            signal=signal,
            guest_shutdown=shutdown and not reset,
            guest_reset=reset,
            out_of_memory=out_of_memory,
        )

    def hang_up(self) -> None:
        """See `ShimVm.hang_up`."""
        self._migrated.set()
        if self._qmp is not None:
            self._qmp.close()

    async def run(self, *commands: Command, within: float = ANSWER_WITHIN_S, fds: Sequence[int] = ()) -> list[Any]:
        """Runs QMP commands, over a new connection where the former one broke. Raises `VmmDied`, `VmmTimeout`, `QmpError`."""
        if self.ended.is_set():
            raise self.died()
        try:
            async with self._qmp_lock:
                if self._qmp is None or self._qmp.closed:
                    self._qmp = await Qmp.connect(self._run_folder / "qmp.sock", self._on_event)
                qmp = self._qmp
            return await qmp.run(*commands, within=within, fds=fds)
        except VmmDied:  # how, the shim says a moment later
            await self.wait_ended(REAPED_WITHIN_S)
            raise self.died() from None

    def _on_event(self, event: Event) -> None:
        data = event.get("data")
        data = data if isinstance(data, dict) else {}
        match event.get("event"):
            case "SHUTDOWN":
                self._shutdown_reason = readable(str(data.get("reason", "")).encode())[:40]
            case "MIGRATION":
                status = str(data.get("status", ""))[:30]
                if status in ("completed", "failed", "cancelled"):
                    self._migration_status = status
                    self._migrated.set()
            case "BLOCK_IO_ERROR":
                self._io_errors += 1
                self._io_error = readable(str(data.get("reason", "")).encode())[:200]
                if self._io_errors in (1, 100, 10_000):
                    log.warning(
                        "%s: error on the host's side of its disk (%d so far): %s",
                        self.spec.sandbox_id,
                        self._io_errors,
                        self._io_error,
                    )

    # -- start and load, for the driver

    async def running(self, *further: Command) -> None:
        """Waits for the first answer of a machine that boots. Raises `VmmDied` with QEMU's words when it cannot."""
        await self.run(*further, command("query-status"))

    async def load(self, fd: int) -> None:
        """Loads the state behind descriptor `fd` of the VMM; the machine then goes on by itself. Raises `VmmDied`, `VmmTimeout`, `QmpError`."""
        await self.run(
            command("migrate-set-capabilities", capabilities=_CAPABILITIES),
            command("migrate-incoming", uri=f"fd:{fd}"),
        )
        try:
            async with asyncio.timeout(LOAD_WITHIN_S):
                await self._migrated.wait()
        except TimeoutError:
            raise VmmTimeout(f"QEMU did not load the saved state within {LOAD_WITHIN_S:g} s.") from None
        if self._migration_status != "completed":
            await self.wait_ended(REAPED_WITHIN_S)
            raise self.died()

    async def inject(self, diff: int) -> None:
        """Writes captured pages into the memory of a machine that has not been loaded yet. Raises `VmmDied`, `VmmTimeout`, `ShimError`."""
        await self.status()  # once QEMU answers its memory is mapped
        await self.connected_shim().inject(qemu_args.MEMORY_FD, diff)

    async def save_changes(self, diff: int, state: int) -> None:
        """Writes the changed pages and the devices' state of a paused machine to two open files.

        Raises `VmmDied`, `VmmTimeout`, `QmpError`, `ShimError`.
        """
        # A number that nobody has: what was left of a save that nobody lived to end must not be written to.
        fdset = FIRST_FDSET + secrets.randbelow(2**30)
        # Nothing runs in the machine, so that its memory and its devices can be written at once.
        saving = asyncio.ensure_future(self._save_devices(fdset, state))
        try:
            await self.connected_shim().capture(qemu_args.MEMORY_FD, diff)
        finally:
            await asyncio.wait([saving])
        saving.result()

    async def _save_devices(self, fdset: int, state: int) -> None:
        remove = command("remove-fd", fdset_id=fdset)
        # live=true aborts QEMU 7.2 at the second save of a stopped machine.
        save = command("xen-save-devices-state", filename=f"/dev/fdset/{fdset}", live=False)
        try:
            await self.run(
                command("add-fd", fdset_id=fdset, opaque="state"), save, remove, within=SAVE_WITHIN_S, fds=[state]
            )
        except VmmError:
            with contextlib.suppress(VmmError):  # where the save itself failed, the monitor still has the descriptor
                await self.run(remove)
            raise

    async def status(self) -> str:
        """QEMU's own word for the run state: `running`, `paused`, `inmigrate`…"""
        return str((await self.run(command("query-status")))[0].get("status", ""))

    # -- verbs of the seam

    async def pause(self) -> None:
        """See `seam.Vm.pause`."""
        await self.run(command("stop"))

    async def resume(self) -> None:
        """See `seam.Vm.resume`."""
        await self.run(command("cont"))

    async def resize_disk(self, disk_mib: int) -> None:
        """See `seam.Vm.resize_disk`. Also tells the guest a size that the disk had before the guest knew it."""
        disk = disks.load(self.spec.folder)
        if disk is None:
            raise VmmError("The sandbox has no disk.")
        size = disk_mib * 2**20
        if size < disk.size():
            raise ValueError(f"The disk has {disk.size() // 2**20} MiB and cannot shrink to {disk_mib} MiB.")
        await self.run(command("block_resize", node_name=qemu_args.DISK_NODE, size=size))

    async def snapshot(self, folder: Path) -> None:
        """See `seam.Vm.snapshot`: a bake. The VM is ended by it."""
        if self._bake is None or self._memory is None:
            raise VmmError("Only a VM that was started as bakeable can be baked; others are captured.")
        disk = disks.load(self.spec.folder)
        if disk is None:
            raise VmmError("The sandbox has no disk.")
        state = await asyncio.to_thread(manifest.create_state, folder)
        try:
            await self._save(state)
            await self.run(command("quit"))
            if not await self.wait_ended(KILL_WITHIN_S):
                await self.kill()
            await asyncio.to_thread(manifest.seal_bake, folder, self._bake, state, self._memory, disk)
        finally:
            manifest.close(state)

    async def _save(self, state: int) -> None:
        self._migrated.clear()
        await self.run(
            command("migrate-set-capabilities", capabilities=_CAPABILITIES),
            command("getfd", fdname="state"),
            command("migrate", uri="fd:state"),
            fds=[state],
        )
        try:
            async with asyncio.timeout(SAVE_WITHIN_S):
                await self._migrated.wait()
        except TimeoutError:
            raise VmmTimeout(f"QEMU did not save the machine within {SAVE_WITHIN_S:g} s.") from None
        if self.ended.is_set():
            raise self.died()
        if self._migration_status != "completed":
            why = (await self.run(command("query-migrate")))[0].get("error-desc", self._migration_status)
            raise VmmError(f"QEMU could not save the machine: {str(why)[:500]}")

    def noted(self) -> dict[str, object]:
        """Why the guest went down (`guest-shutdown`, or `guest-reset`: a reboot or a panic), and what its disk could not do."""
        details: dict[str, object] = {}
        if self.ended.is_set() and self._shutdown_reason:
            details["shutdown_reason"] = self._shutdown_reason
        if self._io_errors:
            details |= {"disk_errors": self._io_errors, "disk_error": self._io_error}
        return details

    async def console(self) -> bytes:
        """Returns the newest octets of the guest's serial console, at most 64 KiB; what was read is gone from QEMU's ring.

        The guest writes them: show them with control characters escaped.
        """
        read = command("ringbuf-read", device="console", size=qemu_args.CONSOLE_OCTETS, format="base64")
        return base64.b64decode(str((await self.run(read))[0]))


_CAPABILITIES = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
