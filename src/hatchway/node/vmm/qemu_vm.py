"""One QEMU with one machine in it, seen through its control socket and its shim.

The shim tells how the VMM ended; the control socket may break without the VM ending (our own process restarted, a late answer) and
is connected again at the next verb. Nothing here waits without a bound, and nothing that QEMU says is believed beyond what the
verb needs: a guest may have taken it over.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from hatchway.node.vmm import disk as disks
from hatchway.node.vmm import manifest, qemu_args
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.qmp import Command, Event, Qmp, command
from hatchway.node.vmm.seam import ExitStatus, VmInfo, VmmDied, VmmError, VmmTimeout, VmSpec, WrongGeneration
from hatchway.node.vmm.shim import ShimClient

ANSWER_WITHIN_S = 10.0
"""Bound of a verb that QEMU answers in milliseconds; a host that swaps or is stopped for a moment is within it."""
KILL_WITHIN_S = 15.0
LOAD_WITHIN_S = 60.0
"""Loading a saved state is milliseconds of work, and page faults on a cold memory file."""
SAVE_WITHIN_S = 120.0
WATCH_AGAIN_S = 0.5
REAPED_WITHIN_S = 2.0
"""The control socket closes a moment before the shim has reaped the VMM."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """What all VMs of one driver have in common."""

    vmm: str
    isolation: str


class QemuVm:
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
        self.spec = spec
        self.agent_socket = run_folder / "agent.sock"
        self.ended = asyncio.Event()
        self.exit: ExitStatus | None = None
        self._run_folder = run_folder
        self._launcher = launcher
        self._kind = kind
        self._bake = bake
        self._memory = memory
        self._qmp: Qmp | None = None
        self._qmp_lock = asyncio.Lock()
        self._shim: ShimClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._shutdown_reason = ""
        self._migrated = asyncio.Event()
        self._migration_status = ""
        self.pid = 0
        self._words = ""
        self._killing = False
        """We end it ourselves."""
        self._io_errors = 0
        self._io_error = ""

    # -- connections

    async def connect(self) -> None:
        """Connects to the shim and begins to watch. Raises `VmmDied` when there is none, `WrongGeneration` when it is another's VM."""
        shim = await ShimClient.connect(self._run_folder / "shim.sock")
        self._shim = shim
        status = await shim.status()
        if (status.sandbox_id, status.generation) != (self.spec.sandbox_id, self.spec.generation):
            raise WrongGeneration(
                f"The VM that runs is {status.sandbox_id} of generation {status.generation}, not {self.spec.sandbox_id} of "
                f"generation {self.spec.generation}."
            )
        self.pid = status.pid
        if status.exit is not None:
            await self._hear_words(shim)
            self._ended_as(status.exit, out_of_memory=await self._ran_out_of_memory(status.exit))
        else:
            self._watcher = asyncio.get_running_loop().create_task(
                self._watch(shim), name=f"vmm {self.spec.sandbox_id}"
            )

    async def _watch(self, shim: ShimClient) -> None:
        while True:
            status: ExitStatus | None = None
            try:
                status = await shim.watch()
            except VmmDied as error:
                # The shim is PID 1 of the VMM's namespace: where it is gone, the VMM is.
                log.warning("%s: the shim is gone: %s", self.spec.sandbox_id, error)
            except VmmError as error:
                # A host that is busy, or a process of ours that lacks descriptors, says nothing about the VMM.
                log.warning("%s: the shim cannot be watched now: %s", self.spec.sandbox_id, error)
                await asyncio.sleep(WATCH_AGAIN_S)
                continue
            break
        if status is not None:
            await self._hear_words(shim)
        self._ended_as(status, out_of_memory=await self._ran_out_of_memory(status))

    async def _ran_out_of_memory(self, status: ExitStatus | None) -> bool:
        """Whether the kernel killed something of the VM for lack of memory: its cgroup counts that, and the launcher reads it."""
        if self._killing or (status is not None and status.signal != SIGKILL):
            return False
        try:
            return (await self._launcher.inspect_vm(self.spec.sandbox_id)).oom_kills > 0
        except VmmError as error:
            log.warning("%s: nobody knows whether it ran out of memory: %s", self.spec.sandbox_id, error)
            return False

    async def _hear_words(self, shim: ShimClient) -> None:
        with contextlib.suppress(VmmError):
            self._words = _readable(await shim.log())

    def _ended_as(self, status: ExitStatus | None, *, out_of_memory: bool = False) -> None:
        code, signal = (status.code, status.signal) if status is not None else (None, None)
        # QEMU ends with 0 of its own accord only when the guest powered off or reset itself: this holds also when nobody was
        # there to hear its event.
        shutdown = signal is None and code == 0 and self._bake is None
        reset = shutdown and self._shutdown_reason == "guest-reset"
        self.exit = ExitStatus(
            code=code,
            signal=signal,
            guest_shutdown=shutdown and not reset,
            guest_reset=reset,
            out_of_memory=out_of_memory,
        )
        self.ended.set()
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
            await self._wait_ended(REAPED_WITHIN_S)
            raise self.died() from None

    async def _wait_ended(self, within: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self.ended.wait()
        return self.ended.is_set()

    def died(self) -> VmmDied:
        """Describes how the VMM ended, with its own last words."""
        status = self.exit
        text = "The VMM ended" if status is not None else "The VMM closed its control socket"
        if status is not None and status.out_of_memory:
            text += ": the host's kernel killed it for lack of memory"
        elif status is not None and status.signal is not None:
            text += f", killed by signal {status.signal}"
        elif status is not None and status.code is not None:
            text += f" with exit code {status.code}"
        return VmmDied(f"{text}: {self._words}" if self._words else f"{text}.", status)

    def _on_event(self, event: Event) -> None:
        data = event.get("data")
        data = data if isinstance(data, dict) else {}
        match event.get("event"):
            case "SHUTDOWN":
                self._shutdown_reason = _readable(str(data.get("reason", "")).encode())[:40]
            case "MIGRATION":
                status = str(data.get("status", ""))[:30]
                if status in ("completed", "failed", "cancelled"):
                    self._migration_status = status
                    self._migrated.set()
            case "BLOCK_IO_ERROR":
                self._io_errors += 1
                self._io_error = _readable(str(data.get("reason", "")).encode())[:200]
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
            await self._wait_ended(REAPED_WITHIN_S)
            raise self.died()

    async def inject(self, diff: int) -> None:
        """Writes captured pages into the memory of a machine that has not been loaded yet. Raises `VmmDied`, `VmmTimeout`, `ShimError`."""
        await self.status()  # once QEMU answers its memory is mapped
        await self._connected_shim().inject(qemu_args.MEMORY_FD, diff)

    async def save_changes(self, diff: int, state: int) -> None:
        """Writes the changed pages and the devices' state of a paused machine to two open files.

        Raises `VmmDied`, `VmmTimeout`, `QmpError`, `ShimError`.
        """
        await self._connected_shim().capture(qemu_args.MEMORY_FD, diff)
        added = await self.run(command("add-fd", opaque="state"), fds=[state])
        fdset = int(added[0]["fdset-id"])
        try:
            # live=true aborts QEMU 7.2 at the second save of a stopped machine.
            await self.run(
                command("xen-save-devices-state", filename=f"/dev/fdset/{fdset}", live=False), within=SAVE_WITHIN_S
            )
        finally:
            with contextlib.suppress(VmmError):
                await self.run(command("remove-fd", fdset_id=fdset))

    def _connected_shim(self) -> ShimClient:
        if self._shim is None:
            raise VmmError("The connection to the shim is closed.")
        return self._shim

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
            if not await self._wait_ended(KILL_WITHIN_S):
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

    async def stop(self, grace_s: float) -> ExitStatus:
        """See `seam.Vm.stop`."""
        if await self._wait_ended(grace_s) and self.exit is not None:
            return self.exit
        return await self.kill()

    async def kill(self) -> ExitStatus:
        """See `seam.Vm.kill`. Where the shim does not answer the launcher kills it, and the VMM with it."""
        if not self.ended.is_set():
            self._killing = True
            try:
                if self._shim is None:
                    raise VmmDied("not connected to the shim")
                async with asyncio.timeout(KILL_WITHIN_S):
                    await self._shim.kill()
                    await self.ended.wait()
            except (VmmError, TimeoutError) as error:
                log.warning("%s: its shim does not kill it (%s); asking the launcher", self.spec.sandbox_id, error)
                await self._launcher.kill_vm(self.spec.sandbox_id)
                if not await self._wait_ended(REAPED_WITHIN_S):
                    self._ended_as(None)
        assert self.exit is not None
        return self.exit

    async def info(self) -> VmInfo:
        """See `seam.Vm.info`. A VMM that lives and does not answer is `running`, with `details.unanswered`."""
        status, details = "running", dict[str, object]()
        if not self.ended.is_set():
            try:
                found = await self.status()
                details["run_state"] = found
                status = "running" if found == "running" else "paused"
            except (VmmError, OSError) as error:
                details["unanswered"] = str(error)
        if self.ended.is_set():
            status = "ended"
            if self._words:
                details["last_words"] = self._words
            if self._shutdown_reason:
                details["shutdown_reason"] = (
                    self._shutdown_reason
                )  # `guest-shutdown`, or `guest-reset`: a reboot or a panic
        if self._io_errors:
            details["disk_errors"] = self._io_errors
            details["disk_error"] = self._io_error
        return VmInfo(
            status=status,
            vmm=self._kind.vmm,
            isolation=self._kind.isolation,
            pid=self.pid,
            exit=self.exit,
            details=details,
        )

    async def console(self) -> bytes:
        """Returns the newest octets of the guest's serial console, at most 64 KiB; what was read is gone from QEMU's ring.

        The guest writes them: show them with control characters escaped.
        """
        read = command("ringbuf-read", device="console", size=qemu_args.CONSOLE_OCTETS, format="base64")
        return base64.b64decode(str((await self.run(read))[0]))

    async def forget(self) -> None:
        """See `seam.Vm.forget`. Raises `VmmError` while the VMM runs."""
        if not self.ended.is_set():
            raise VmmError("The VMM still runs: kill it first.")
        shim, self._shim = self._shim, None
        if shim is not None:
            with contextlib.suppress(VmmError):
                await shim.reap()
            await shim.close()
        await self._launcher.forget_vm(self.spec.sandbox_id)
        await self.close()

    async def close(self) -> None:
        """See `seam.Vm.close`."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        if self._qmp is not None:
            self._qmp.close()
        shim, self._shim = self._shim, None
        if shim is not None:
            await shim.close()


_CAPABILITIES = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]


def _readable(octets: bytes) -> str:
    text = octets.decode(errors="replace").strip().replace("\n", "; ")
    return "".join(character for character in text if character.isprintable())
