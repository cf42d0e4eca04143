"""Makes baked snapshots: a guest that booted, ran a first job and was saved, from which sandboxes are restored in milliseconds.

A bake is made of a release, never of anybody's sandbox; once, however many ask; and only a whole one is ever seen.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

from hatchway.domain.errors import HostExhausted, Internal
from hatchway.domain.ids import is_id, new_id
from hatchway.domain.shapes import DEFAULT_DISK_MIB, MIN_DISK_MIB, Shape
from hatchway.node import metrics
from hatchway.node.guest.link import connect
from hatchway.node.guest.seam import GuestError, LinkLost, Setup
from hatchway.node.images import files
from hatchway.node.images.bakes import DEFAULT_BUDGET, Bakes, disk_is_full, warm_page_cache
from hatchway.node.images.store import Release
from hatchway.node.images.warm import FirstJobFailed, run_first_jobs
from hatchway.node.vmm.seam import Baked, Driver, LauncherUnavailable, LaunchRefused, Vm, VmmError, VmmMissing, VmSpec

BOOT_WITHIN_S = 120.0
"""A cold boot takes 2 to 5 s on an idle host with software emulation."""
FAILED_PAUSE_S, USELESS_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0, 600.0
"""How long no bake is tried after one that failed, or after two that were useless; doubled each time, up to the last."""
TROUBLE_FORGOTTEN_S = 3600.0
_TAIL = 2_000
"""Octets of the guest's console in an error."""
_DEVICE_STATE = 64 << 20
"""Octets that a bake takes besides the guest's memory, at most."""

Progress = Callable[[str, float | None], None]

log = logging.getLogger(__name__)


class VmEnder(Protocol):
    """What ends the VM of a bake whose node died: the launcher."""

    async def kill_vm(self, sandbox_id: str) -> object:
        """Ends the VM. Idempotent."""

    async def forget_vm(self, sandbox_id: str) -> object:
        """Removes what is left of it. Idempotent."""


class _InFlight:
    """One bake that any number of callers wait for."""

    def __init__(self) -> None:
        self.watchers: list[Progress] = []
        self.step: tuple[str, float | None] = ("bake", None)
        self.task: asyncio.Task[Baked] | None = None

    def report(self, phase: str, fraction: float | None = None) -> None:
        self.step = (phase, fraction)
        for watcher in list(self.watchers):
            watcher(phase, fraction)


class _Trouble:
    """Bakes of one key that failed, or that no machine could be restored from."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0
        self.until = 0.0
        """Until when none is made (monotonic)."""
        self.error: Internal | None = None
        """Why the last one failed; None: it was made, and was useless."""

    def pause(self, first_s: float) -> None:
        self.until = monotonic() + min(first_s * 2**self.count, LONGEST_PAUSE_S)


def _again(error: Internal) -> Internal:
    """The error of a bake that failed a moment ago, for one who would only make it fail again."""
    return Internal(error.code, error.cause, error.remedy, **error.extra)


class Baker:
    """Gives the baked snapshot that fits a release, a shape and this host; makes it where there is none.

    `folder` is this node's alone, and kept within `budget` octets: a sandbox links what it was restored from, so that no bake has to
    stay for it. One bake runs at a time.
    """

    def __init__(
        self,
        driver: Driver,
        launcher: VmEnder,
        folder: Path,
        *,
        budget: int = DEFAULT_BUDGET,
        network: bool = True,
    ) -> None:
        self._driver = driver
        self._launcher = launcher
        self._bakes = Bakes(folder, budget)
        self._network = network
        self._known: dict[str, Baked] = {}
        self._sizes: dict[str, int] = {}
        """What the files of a known bake take, in octets."""
        self._flights: dict[str, _InFlight] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._one = asyncio.Lock()
        self._recovered = False

    async def baked(self, release: Release, shape: Shape, progress: Progress | None = None) -> Baked | None:
        """Returns the baked snapshot for this release and shape, at once when there is one; None where they turned out useless of late.

        Its disk is as large as the sandbox's or smaller (`Baked.shape`): sandboxes of all sizes between two steps share one, and grow.

        `progress` hears the phases (`waiting boot first_job save`). A caller that is cancelled leaves the bake running for
        others. Raises `HostExhausted("host_disk_full")`, `Internal("bake_failed")` with the end of the guest's console, and the driver's
        `VmmMissing`, `LaunchRefused`, `LauncherUnavailable`.
        """
        disk = _disk_step(shape)
        key = f"{self._driver.baked_key(release.digest, shape)}-d{disk}" + ("" if self._network else "-no-network")
        known = self._known.get(key)
        if known is not None and known.memory.exists():
            self._bakes.touch(key)
            return known
        trouble = self._troubles.get(key)
        if trouble is not None and monotonic() < trouble.until:
            if trouble.error is not None:
                raise _again(trouble.error)
            return None
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _InFlight()
            flight.task = asyncio.get_running_loop().create_task(self._fly(key, release, shape, flight))
            # Its failure is known also when every caller has gone meanwhile.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        assert flight.task is not None
        if progress is not None:
            flight.watchers.append(progress)
            progress(*flight.step)
        try:
            return await asyncio.shield(flight.task)
        finally:
            if progress is not None:
                flight.watchers.remove(progress)

    def page_cache_mib(self) -> int:
        """What the bakes in use want of the host's page cache, in MiB, for admission: restores are fast as long as they are in it."""
        return sum(self._sizes.get(key, 0) for key in self._known) >> 20

    async def discard(self, baked: Baked) -> None:
        """Removes a bake that turned out to be useless; the next caller gets a new one.

        One that was made anew meanwhile stays. Where the new ones turn out the same, none is made for a while.
        """
        if self._known.get(baked.key) is not baked:
            return
        del self._known[baked.key]
        trouble = self._troubles.setdefault(baked.key, _Trouble())
        if trouble.error is not None or monotonic() - trouble.last > TROUBLE_FORGOTTEN_S:
            trouble.error, trouble.count = None, 0
        if trouble.count:  # the first may have been an old one
            trouble.pause(USELESS_PAUSE_S)
        trouble.count += 1
        trouble.last = monotonic()
        await asyncio.to_thread(self._bakes.remove, baked.key)

    async def recover(self) -> None:
        """Ends what a node that died in the middle of a bake left: its VM and its files. Done before the first bake in any case."""
        if self._recovered:
            return
        for name in await asyncio.to_thread(self._bakes.prepare):
            if is_id(name):
                await self._end_vm(name)
            await asyncio.to_thread(files.remove_tree, self._bakes.work / name)
        self._recovered = True

    def baking(self) -> frozenset[str]:
        """Returns the ids of the VMs that are bakes, in progress or interrupted: nobody else's to judge."""
        return frozenset(name for name in self._bakes.prepare() if is_id(name))

    async def close(self) -> None:
        """Cancels bakes in progress, and waits until their VMs are gone."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fly(self, key: str, release: Release, shape: Shape, flight: _InFlight) -> Baked:
        try:
            flight.report("waiting")
            async with self._one:
                if not self._recovered:
                    await self.recover()
                baked = await asyncio.to_thread(self._bakes.find, key)
                if baked is None:
                    with metrics.timed(metrics.BAKES):
                        baked = await self._bake(key, release, shape, flight.report)
                else:
                    await asyncio.to_thread(warm_page_cache, baked)
            if (trouble := self._troubles.get(key)) is not None and trouble.error is not None:
                del self._troubles[key]
            self._sizes[key] = await asyncio.to_thread(files.size_on_disk, baked.folder)
            self._known[key] = baked
            self._bakes.touch(key)
            return baked
        except Internal as error:
            trouble = self._troubles.setdefault(key, _Trouble())
            trouble.error = error
            trouble.pause(FAILED_PAUSE_S)
            trouble.count += 1
            trouble.last = monotonic()
            raise
        except OSError as error:
            if disk_is_full(error):
                raise HostExhausted(
                    "host_disk_full",
                    f"The disk became full while a snapshot was baked: {error}.",
                    "Free disk space, then try again.",
                ) from error
            raise
        finally:
            self._flights.pop(key, None)

    async def _bake(self, key: str, release: Release, shape: Shape, report: Callable[..., None]) -> Baked:
        await asyncio.to_thread(self._bakes.make_room, (shape.memory_mib << 20) + _DEVICE_STATE, set(self._flights))
        started = monotonic()
        vm_id = new_id()
        work = self._bakes.work / vm_id
        made = work / "made"
        spec = VmSpec(
            sandbox_id=vm_id,
            generation=1,
            shape=Shape(vcpus=shape.vcpus, memory_mib=shape.memory_mib, disk_mib=_disk_step(shape)),
            boot=release.boot_files(),
            folder=work / "vm",
            network=self._network,
        )
        vm: Vm | None = None
        try:
            await asyncio.to_thread(_make_folders, spec.folder, made)
            report("boot")
            vm = await self._driver.start(spec, bakeable=True)
            host_keys = await self._first_jobs(vm, report)
            report("save")
            await vm.snapshot(made)
            baked = await asyncio.to_thread(
                lambda: self._bakes.publish(
                    key,
                    made,
                    template=release.digest,
                    vmm=f"{self._driver.name} {self._driver.version}",
                    shape=spec.shape,
                    host_keys=host_keys,
                )
            )
        except (VmmMissing, LaunchRefused, LauncherUnavailable):
            raise
        except (VmmError, LinkLost, GuestError, FirstJobFailed, TimeoutError) as error:
            raise await self._failed(release, vm, error) from error
        finally:
            await asyncio.shield(self._clear(vm, vm_id, work))
        log.info("baked %s in %.1f s", key, monotonic() - started)
        return baked

    async def _first_jobs(self, vm: Vm, report: Callable[..., None]) -> bool:
        """Runs them; returns whether the template has host keys of ssh."""
        setup = Setup(
            time_ns=time.time_ns(),
            entropy=os.urandom(256),
            hostname=new_id(),  # of the usual length: another one then changes no file's size
            machine_id=secrets.token_hex(16),
            env={},
            # As for every sandbox that is made of it: what that walks through is in the baked memory then, not on the disk.
            boot_id=str(uuid.uuid4()),
            renew_keys=True,
        )
        link = await connect(vm.agent_socket, fresh=False, vm_ended=vm.ended, setup=setup, within=BOOT_WITHIN_S)
        try:
            report("first_job")
            if vm.spec.shape.disk_mib > MIN_DISK_MIB:
                await link.resize_disk(vm.spec.shape.disk_mib)
            host_keys = await run_first_jobs(link)
            await link.sync()
            return host_keys
        finally:
            await link.close()

    async def _failed(self, release: Release, vm: Vm | None, error: Exception) -> Internal:
        console = ""
        if vm is not None:
            with contextlib.suppress(VmmError, OSError):
                console = _printable((await vm.console())[-_TAIL:])
        name = f"{release.manifest.name}:{release.manifest.tag}"
        cause = f"A snapshot of {name} could not be baked: {error}."
        if console:
            cause += f" The end of the guest's console:\n{console}"
        return Internal("bake_failed", cause, "Try again; if it stays so, build the template again.", console=console)

    async def _clear(self, vm: Vm | None, vm_id: str, work: Path) -> None:
        if vm is not None:
            with contextlib.suppress(VmmError):
                await vm.kill()
                await vm.forget()
        await self._end_vm(vm_id)
        await asyncio.to_thread(files.remove_tree, work)

    async def _end_vm(self, vm_id: str) -> None:
        try:
            await self._launcher.kill_vm(vm_id)
            await self._launcher.forget_vm(vm_id)
        except VmmError as error:
            log.warning("the VM of the bake %s could not be removed: %s", vm_id, error)


def _disk_step(shape: Shape) -> int:
    """How large a disk is baked for a sandbox: growing costs a tenth of a second under emulation, so that the default size is a bake of its own."""
    return DEFAULT_DISK_MIB if shape.disk_mib >= DEFAULT_DISK_MIB else MIN_DISK_MIB


def _printable(console: bytes) -> str:
    """The guest wrote it: no control characters."""
    text = console.decode(errors="replace").replace("\r", "")
    return "".join(character for character in text if character.isprintable() or character == "\n").strip()


def _make_folders(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, mode=0o700)
