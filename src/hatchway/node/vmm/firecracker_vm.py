"""One Firecracker with one machine in it, seen through its control socket and its shim."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from hatchway.node.vmm import captures, firecracker_args, manifest
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.firecracker_api import Api
from hatchway.node.vmm.firecracker_args import Request
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.seam import ExitStatus, VmmDied, VmmError, VmmTimeout, VmSpec
from hatchway.node.vmm.shim import AGENT, API, ShimError
from hatchway.node.vmm.shim_vm import ANSWER_WITHIN_S, REAPED_WITHIN_S, Kind, ShimVm

LISTENS_WITHIN_S = 5.0
"""Firecracker listens a millisecond or two after its start."""
SAVE_WITHIN_S = 120.0
"""Writing all of a large memory to a slow disk."""
ONE_MAPPING_MIB = 3072
"""Memory up to here is one mapping; beyond, Firecracker leaves a gap for devices below 4 GiB and maps the rest above it."""
AGENT_ANSWERS_WITHIN_S = 5.0
_DIAL_AGAIN_S = 0.002
_AGENT_AGAIN_S = 0.02
_MAX_HELLO = 32
_STATUS: Request = ("GET", "/", {})


class FirecrackerVm(ShimVm):
    """See the module. Made by `FirecrackerDriver` only; the verbs are those of `seam.Vm`."""

    def __init__(
        self,
        spec: VmSpec,
        run_folder: Path,
        launcher: LauncherClient,
        kind: Kind,
        *,
        bake: Manifest | None = None,
    ) -> None:
        super().__init__(spec, run_folder, launcher, kind)
        self.agent_socket = self._dial_agent
        self._bake = bake
        self._api = Api(self._dial_api)

    def __repr__(self) -> str:
        return f"VM {self.spec.sandbox_id}"

    def describe_end(self, code: int | None, signal: int | None, *, out_of_memory: bool) -> ExitStatus:
        """See `ShimVm.describe_end`."""
        # It ends with 0 of its own accord only when the guest reset itself, which is also how a guest powers off here.
        shutdown = signal is None and code == 0 and not self._killing
        return ExitStatus(code=code, signal=signal, guest_shutdown=shutdown, out_of_memory=out_of_memory)

    def hang_up(self) -> None:
        """See `ShimVm.hang_up`."""
        self._api.close()

    # -- connections

    async def ask(self, request: Request, *, within: float = ANSWER_WITHIN_S) -> dict[str, object]:
        """Sends one request to Firecracker. Raises `VmmDied`, `VmmTimeout`, `FirecrackerError`."""
        if self.ended.is_set():
            raise self.died()
        try:
            return dict(await self._api.ask(request, within=within))
        except VmmDied:  # how, the shim says a moment later
            await self.wait_ended(REAPED_WITHIN_S)
            raise self.died() from None

    async def _dial_api(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        until = loop.time() + LISTENS_WITHIN_S
        while True:
            try:
                return await self.connected_shim().dial(API)
            except ShimError as error:
                if error.code not in ("refused", "busy") or self.ended.is_set():
                    raise VmmDied(f"Firecracker's control socket: {error}") from error
                if loop.time() >= until:
                    raise VmmTimeout(f"Firecracker did not listen within {LISTENS_WITHIN_S:g} s.") from error
            await asyncio.sleep(_DIAL_AGAIN_S)

    async def _dial_agent(self) -> socket.socket:
        """Connects to the agent's vsock port, waiting for as long as the guest takes to listen there. Raises `OSError` when the VM ended."""
        while not self.ended.is_set():
            try:
                async with asyncio.timeout(AGENT_ANSWERS_WITHIN_S):
                    sock = await self._try_agent()
            except TimeoutError:
                sock = None
            except ShimError as error:
                if error.code not in ("refused", "busy"):
                    raise ConnectionError(str(error)) from error
                sock = None
            except VmmError as error:
                raise ConnectionError(str(error)) from error
            if sock is not None:
                return sock
            await asyncio.sleep(_AGENT_AGAIN_S)
        raise ConnectionError("the VMM ended")

    async def _try_agent(self) -> socket.socket | None:
        loop = asyncio.get_running_loop()
        sock = await self.connected_shim().dial(AGENT)
        try:
            await loop.sock_sendall(sock, b"CONNECT %d\n" % firecracker_args.AGENT_PORT)
            said = bytearray()
            # An octet at a time: what comes behind the line belongs to the channel.
            while not said.endswith(b"\n") and len(said) < _MAX_HELLO:
                octet = await loop.sock_recv(sock, 1)
                if not octet:
                    break
                said += octet
        except OSError:
            said = bytearray()
        except BaseException:
            sock.close()
            raise
        if said.startswith(b"OK ") and said.endswith(b"\n"):
            return sock
        sock.close()
        return None

    # -- for the driver

    async def make(self, requests: list[Request]) -> None:
        """Sends requests one after another. Raises as `ask`."""
        for request in requests:
            await self.ask(request)

    async def status(self) -> str:
        """`running`, `paused` or `not started`."""
        return str((await self.ask(_STATUS)).get("state", "")).lower()[:20]

    async def version(self) -> str:
        """The release that runs."""
        return str((await self.ask(_STATUS)).get("vmm_version", ""))[:40]

    async def save_changes(self, folder: Path) -> bool:
        """Writes the devices' state of a paused machine, and what it changed in the memory that it was loaded with, into `folder`.

        Returns False where all of the memory was written instead, as the base of further changes: a machine that booted has no memory
        file below it. Raises `VmmDied`, `VmmTimeout`, `FirecrackerError`, `ShimError`, `OSError`.
        """
        based = (self.spec.folder / captures.BASE).exists()
        sparse = based and self.spec.shape.memory_mib <= ONE_MAPPING_MIB
        state = await asyncio.to_thread(captures.create, folder, captures.STATE)
        try:
            if not sparse:
                await self._save_whole(state, folder)
                return False
            # What Firecracker itself knows of changes is forgotten whenever it was asked, also when nothing came of it. So the changes
            # are taken from the pages, and its own list goes to a file without a name.
            scratch = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                await self._save(state, scratch, whole=False)
            finally:
                os.close(scratch)
            # After the state: to make it, Firecracker writes to the guest's memory (it resets the guest channel).
            diff = await asyncio.to_thread(captures.create, folder, captures.DIFF)
            try:
                await self.connected_shim().capture(firecracker_args.MEMORY_FD, diff)
            finally:
                os.close(diff)
            return True
        finally:
            os.close(state)

    async def _save_whole(self, state: int, folder: Path) -> None:
        base = folder / captures.BASE
        base.unlink(missing_ok=True)
        memory = await asyncio.to_thread(captures.create, folder, captures.BASE)
        try:
            await self._save(state, memory, whole=True)
        finally:
            os.close(memory)
        await asyncio.to_thread(disks.without_zeros, base)
        diff = await asyncio.to_thread(captures.create, folder, captures.DIFF)
        try:
            os.write(diff, captures.no_changes(self.spec.shape.memory_mib * 2**20))
        finally:
            os.close(diff)

    async def _save(self, state: int, memory: int, *, whole: bool) -> None:
        shim = self.connected_shim()
        offers = ((firecracker_args.SAVED_STATE, state), (firecracker_args.SAVED_MEMORY, memory))
        try:
            for number, fd in offers:
                await shim.offer(number, fd)
            await self.ask(firecracker_args.save(whole=whole), within=SAVE_WITHIN_S)
        finally:
            for number, _ in offers:
                with contextlib.suppress(VmmError):
                    await shim.withdraw(number)

    # -- verbs of the seam

    async def pause(self) -> None:
        """See `seam.Vm.pause`."""
        await self.ask(firecracker_args.state("Paused"))

    async def resume(self) -> None:
        """See `seam.Vm.resume`."""
        await self.ask(firecracker_args.state("Resumed"))

    async def resize_disk(self, disk_mib: int) -> None:
        """See `seam.Vm.resize_disk`. Also tells the guest a size that the disk had before the guest knew it."""
        disk = disks.load(self.spec.folder)
        if disk is None:
            raise VmmError("The sandbox has no disk.")
        size = disk_mib * 2**20
        if size < disk.size():
            raise ValueError(f"The disk has {disk.size() // 2**20} MiB and cannot shrink to {disk_mib} MiB.")
        await asyncio.to_thread(os.truncate, disk.top, size)
        await self.ask(firecracker_args.reopen_disk())

    async def snapshot(self, folder: Path) -> None:
        """See `seam.Vm.snapshot`: a bake. The VM is ended by it."""
        if self._bake is None:
            raise VmmError("Only a VM that was started as bakeable can be baked; others are captured.")
        disk = disks.load(self.spec.folder)
        if disk is None:
            raise VmmError("The sandbox has no disk.")
        await self.pause()
        state = await asyncio.to_thread(manifest.create_state, folder)
        try:
            memory = await asyncio.to_thread(captures.create, folder, "memory")
            try:
                await self._save(state, memory, whole=True)
            finally:
                os.close(memory)
            await self.kill()
            await asyncio.to_thread(disks.without_zeros, folder / "memory")
            await asyncio.to_thread(manifest.seal_bake, folder, self._bake, state, folder / "memory", disk)
        finally:
            manifest.close(state)

    async def console(self) -> bytes:
        """Returns the newest octets of the guest's serial console, at most 64 KiB, Firecracker's own errors among them.

        The guest writes them: show them with control characters escaped.
        """
        return await self.connected_shim().console()
