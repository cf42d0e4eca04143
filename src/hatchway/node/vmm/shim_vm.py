"""One machine monitor as its shim tells of it: what every driver of ours has in common.

The shim tells how the VMM ended, whatever became of the VMM's own control socket. Nothing here waits without a bound, and nothing that the
VMM says is believed beyond what the verb needs: a guest may have taken it over.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import ExitStatus, VmInfo, VmmDied, VmmError, VmSpec, WrongGeneration
from hatchway.node.vmm.shim import ShimClient

ANSWER_WITHIN_S = 10.0
"""Bound of a verb that a VMM answers in milliseconds; a host that swaps or is stopped for a moment is within it."""
KILL_WITHIN_S = 15.0
WATCH_AGAIN_S = 0.5
REAPED_WITHIN_S = 2.0
"""A VMM's control socket closes a moment before the shim has reaped it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """What all VMs of one driver have in common."""

    vmm: str
    isolation: str


class ShimVm(ABC):
    """The part of `seam.Vm` that needs the shim and the launcher only."""

    def __init__(self, spec: VmSpec, run_folder: Path, launcher: LauncherClient, kind: Kind) -> None:
        self.spec = spec
        self.ended = asyncio.Event()
        self.exit: ExitStatus | None = None
        self.pid = 0
        self._run_folder = run_folder
        self._launcher = launcher
        self._kind = kind
        self._shim: ShimClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._words = ""
        self._killing = False
        """We end it ourselves."""

    @abstractmethod
    def describe_end(self, code: int | None, signal: int | None, *, out_of_memory: bool) -> ExitStatus:
        """Says what an exit code (or the signal) of this VMM means; both are None where nobody knows how it ended."""

    @abstractmethod
    async def status(self) -> str:
        """The VMM's own word for the run state, `running` and `paused` among them. Raises `VmmDied`, `VmmTimeout`."""

    @abstractmethod
    def hang_up(self) -> None:
        """Closes the connections to the VMM itself and wakes who waits for it. Idempotent."""

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
            self._words = readable(await shim.log())

    def _ended_as(self, status: ExitStatus | None, *, out_of_memory: bool = False) -> None:
        code, signal = (status.code, status.signal) if status is not None else (None, None)
        self.exit = self.describe_end(code, signal, out_of_memory=out_of_memory)
        self.ended.set()
        self.hang_up()

    async def wait_ended(self, within: float) -> bool:
        """Waits at most `within` seconds for the end; tells whether it came."""
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

    def connected_shim(self) -> ShimClient:
        """Returns the connection to the shim. Raises `VmmError` after `close`."""
        if self._shim is None:
            raise VmmError("The connection to the shim is closed.")
        return self._shim

    def noted(self) -> dict[str, object]:
        """What this VMM told unasked, for `VmInfo.details`."""
        return {}

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
        details |= self.noted()
        if self.ended.is_set():  # perhaps meanwhile
            status = "ended"
            if self._words:
                details["last_words"] = self._words
        return VmInfo(
            status=status,
            vmm=self._kind.vmm,
            isolation=self._kind.isolation,
            pid=self.pid,
            exit=self.exit,
            details=details,
        )

    async def stop(self, grace_s: float) -> ExitStatus:
        """See `seam.Vm.stop`."""
        if await self.wait_ended(grace_s) and self.exit is not None:
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
                if not await self.wait_ended(REAPED_WITHIN_S):
                    self._ended_as(None)
        assert self.exit is not None
        return self.exit

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
        self.hang_up()
        shim, self._shim = self._shim, None
        if shim is not None:
            await shim.close()


def readable(octets: bytes) -> str:
    """Makes one line for people out of what a program that is not trusted wrote."""
    text = octets.decode(errors="replace").strip().replace("\n", "; ")
    return "".join(character for character in text if character.isprintable())
