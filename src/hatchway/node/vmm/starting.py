"""What every driver does around a start: descriptors that are not forgotten, a verb asked twice, nothing left behind by a failure."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import LaunchRefused, VmmDied, VmmError, VmSpec, WrongGeneration
from hatchway.node.vmm.shim_vm import ShimVm
from hatchway.wire.launcher import StartVm

log = logging.getLogger(__name__)

_T = TypeVar("_T", bound=ShimVm)


class Descriptors:
    """Descriptors for one VMM with their numbers there; closed here in any case, the VMM has its own by then."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add(self, target: int, fd: int) -> None:
        """Takes over `fd`."""
        self._pairs.append((target, fd))

    def add_file(self, target: int, path: Path) -> None:
        """Opens a file read-only and no link. Raises `OSError`."""
        self.add(target, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))

    @property
    def targets(self) -> tuple[int, ...]:
        """The numbers in the VMM, in the order of `numbers`."""
        return tuple(target for target, _ in self._pairs)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in this process."""
        return tuple(fd for _, fd in self._pairs)

    def __enter__(self) -> "Descriptors":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.numbers:
            os.close(fd)


class undone_on_failure:
    """Leaves no VM behind where its start failed or was cancelled."""

    def __init__(self, vm: ShimVm, launcher: LauncherClient) -> None:
        self._vm = vm
        self._launcher = launcher

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        await self._vm.close()
        try:
            await asyncio.shield(self._clear())
        except VmmError as error:
            log.warning("%s: what is left of its start could not be removed: %s", self._vm.spec.sandbox_id, error)

    async def _clear(self) -> None:
        await self._launcher.kill_vm(self._vm.spec.sandbox_id)
        await self._launcher.forget_vm(self._vm.spec.sandbox_id)


async def ask_to_start(launcher: LauncherClient, request: StartVm, fds: Sequence[int]) -> None:
    """Asks the launcher. A request that was sent is carried out also when nobody waits for it any more: its VM is then ended."""
    asked = asyncio.ensure_future(launcher.start_vm(request, fds))
    try:
        await asyncio.shield(asked)
    except asyncio.CancelledError:
        with contextlib.suppress(VmmError):
            await asked
            await launcher.kill_vm(request.sandbox_id)
            await launcher.forget_vm(request.sandbox_id)
        raise


async def adopted(vm: _T) -> _T:
    """Connects to a VM that runs since before this process did. Raises `VmmDied`, `WrongGeneration`."""
    try:
        await vm.connect()
        if vm.ended.is_set():
            raise vm.died()
        await vm.status()
    except BaseException:
        await vm.close()
        raise
    return vm


async def running_already(
    launcher: LauncherClient, run_dir: Path, spec: VmSpec, made: Callable[[VmSpec], _T]
) -> _T | None:
    """A verb asked again, also by a process that took over from one that died: the machine that runs is the answer."""
    if not (run_dir / "vm" / spec.sandbox_id / "shim.sock").exists():
        return None
    vm: _T | None
    try:
        vm = await adopted(made(spec))
    except WrongGeneration as error:
        raise LaunchRefused("exists", str(error), "Stop the VM of the other generation first.") from error
    except VmmDied:
        vm = None
    if vm is not None:
        with contextlib.suppress(VmmError):
            if await vm.status() in ("running", "paused"):
                return vm
        await vm.close()
    # It ended, or whoever began to make it did not live to finish.
    await launcher.kill_vm(spec.sandbox_id)
    await launcher.forget_vm(spec.sandbox_id)
    return None
