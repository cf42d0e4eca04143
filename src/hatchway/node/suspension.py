"""Suspend and restore: memory and disk are kept, the machine is gone, and comes back where it stood.

The guest's file system is frozen before the machine is captured, and thawed only when the record says `running` again. So a restore
that fails, or a node that dies in the middle of one, leaves memory and disk of the same instant: it can be tried again.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from pathlib import Path

import msgspec

from hatchway.domain.errors import Conflict
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import Cause, State, Verb
from hatchway.node.artifacts.keeper import owner_of
from hatchway.node.creation import bring_up
from hatchway.node.greeting import RESTORE_WITHIN_S, Greeting
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.node.pausing import settle, wake_agent
from hatchway.node.phases import Phases
from hatchway.node.sandbox import SUSPENDED, Sandbox
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.seam import Sealing, SnapshotMismatch, Vm, VmmError
from hatchway.wire.node import Observed
from hatchway.wire.small_files import sync_folder

FREEZE_MS = 60_000
"""How long a frozen guest waits, in its own time, before it thaws by itself: longer than a restore may take."""
FREEZE_WITHIN_S = 10.0

log = logging.getLogger(__name__)


async def suspend(sandbox: Sandbox) -> Observed:
    """Keeps memory and disk and ends the machine. Raises `HatchwayError`; the sandbox is then as it was."""
    return await sandbox.do(Verb.SUSPEND, lambda: _suspend(sandbox))


async def restore(sandbox: Sandbox) -> Observed:
    """Brings a suspended machine back.

    Raises `Conflict("memory_lost")` where its memory cannot be loaded any more. Whatever is raised, the sandbox is suspended as before.
    """
    return await sandbox.do(Verb.RESTORE, lambda: _restore(sandbox))


async def drop(sandbox: Sandbox) -> None:
    """Removes what a suspended sandbox kept of its memory."""
    await asyncio.to_thread(_remove, sandbox)
    sandbox.record.stored_bytes = sandbox.record.artifact = None


async def _suspend(sandbox: Sandbox) -> None:
    record = sandbox.record
    if record.state == State.SUSPENDED:
        return
    sandbox.require(Verb.SUSPEND)
    vm, before, phases = sandbox.require_vm(), State(record.state), Phases()
    new = sandbox.folder / f"{SUSPENDED}.new"
    try:
        frozen = await _freeze(sandbox, vm)
        phases.done("freeze")
        await vm.pause()
        if sandbox.link is not None:
            sandbox.link.paused(True)
        await asyncio.to_thread(shutil.rmtree, new, ignore_errors=True)
        sealing = await sandbox.context.driver.capture(vm, new, disk=not frozen)
        phases.done("capture")
        record.stored_bytes = await asyncio.to_thread(_keep, sandbox, new, sealing)
        phases.done("store")
        record.artifact = await _keep_elsewhere(sandbox)
        phases.done("upload")
        sandbox.check_alive(vm)
        sandbox.write(str(State.SUSPENDED))  # from here on the machine is not needed any more
    except BaseException:
        record.stored_bytes = record.artifact = None
        await asyncio.shield(_go_back(sandbox, vm, before))
        await asyncio.to_thread(shutil.rmtree, new, ignore_errors=True)
        await asyncio.to_thread(_remove, sandbox)
        raise
    record.cause, record.reason = None, ""
    sandbox.unwatch()
    await sandbox.gateway.close()
    sandbox.context.sessions.link_down(record.sandbox_id)
    sandbox.phases = phases.ms
    sandbox.publish()
    sandbox.clear_behind()  # a machine that stands still changes nothing any more


async def _keep_elsewhere(sandbox: Sandbox) -> str | None:
    """Where nodes share a store, it is suspended only when all of it is there. Raises `Unavailable("store_unavailable")`."""
    keeper, record = sandbox.context.keeper, sandbox.record
    if keeper is None:
        return None
    standing = msgspec.json.encode(sandbox.context.sessions.standing(record.sandbox_id))
    owner = owner_of(record.sandbox_id, record.generation)
    return await keeper.keep(owner, sandbox.folder, SUSPENDED, record.boot_id or "", standing)


async def _freeze(sandbox: Sandbox, vm: Vm) -> bool:
    """Lets the guest write everything and nothing more; False where it does not do so in time."""
    if sandbox.record.state == State.PAUSED:
        await vm.resume()  # for a moment: to be frozen it has to run
        await wake_agent(sandbox, vm)
    try:
        async with asyncio.timeout(FREEZE_WITHIN_S):
            if sandbox.link is None:
                return False
            await sandbox.link.freeze(FREEZE_MS)
    except (GuestError, LinkLost, TimeoutError) as error:
        log.warning("%s: its file system could not be frozen: %s", sandbox.record.sandbox_id, error)
        return False
    return True


async def _go_back(sandbox: Sandbox, vm: Vm, before: State) -> None:
    """After a suspension that failed: the machine goes on, and is paused again where it was."""
    with contextlib.suppress(VmmError, LinkLost, GuestError, OSError, TimeoutError):
        await vm.resume()
        await wake_agent(sandbox, vm)
        if sandbox.link is not None:
            await sandbox.link.thaw()
        if before is State.PAUSED:
            await vm.pause()
            if sandbox.link is not None:
                sandbox.link.paused(True)
    if not vm.ended.is_set():
        await settle(sandbox, vm)


def _keep(sandbox: Sandbox, new: Path, sealing: Sealing) -> int:
    """Makes the capture whole and durable, in its place; returns what it takes, in octets."""
    folder = sandbox.folder
    sealing()
    disk = disks.load(folder)
    if disk is not None:
        fd = os.open(disk.top, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    _remove(sandbox)
    os.rename(new, folder / SUSPENDED)
    sync_folder(folder)
    return captures.size_of(folder / SUSPENDED)[0]


def _remove(sandbox: Sandbox) -> None:
    shutil.rmtree(_out_of_sight(sandbox), ignore_errors=True)


def _out_of_sight(sandbox: Sandbox) -> Path:
    """In one step, so that a half-removed one is never taken for whole; returns what is to be removed. Raises `OSError`."""
    sandbox.forget_kept()
    gone = sandbox.folder / f"{SUSPENDED}.{new_id()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(sandbox.folder / SUSPENDED, gone)
    return gone


async def _restore(sandbox: Sandbox) -> None:
    record = sandbox.record
    if record.state == State.RUNNING:
        return
    sandbox.require(Verb.RESTORE)
    folder, phases = sandbox.folder / SUSPENDED, Phases()
    # Most often it stood between two frames; where it did not, the link finds out and begins anew.
    greeting = Greeting(sandbox.setup(), fresh=True, within=RESTORE_WITHIN_S, complete=sandbox.open_way_out)
    try:
        async with sandbox.context.starts.turn():
            await _bring_back(sandbox, folder, greeting, phases)
    except BaseException as error:
        await asyncio.shield(_give_up(sandbox, greeting, folder, error))
        if isinstance(error, SnapshotMismatch):
            raise memory_lost(str(error)) from error
        raise
    record.stored_bytes = record.artifact = None
    sandbox.phases = phases.ms
    sandbox.publish()
    try:
        gone = _out_of_sight(sandbox)  # before another verb begins: the next suspension has the same place
    except OSError as error:
        log.warning("%s: what it kept while it was suspended stays: %s", record.sandbox_id, error)
    else:
        sandbox.chore(asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True))  # in its own time


async def _bring_back(sandbox: Sandbox, folder: Path, greeting: Greeting, phases: Phases) -> None:
    sandbox.save_in_hand("restoring", durable=False)
    vm = await sandbox.context.driver.revive(folder, sandbox.vm_spec(), greeting.begin)
    sandbox.take(vm)
    phases.done("load")
    await vm.resume()
    await bring_up(sandbox, vm, phases, greeting, thaw=True, boot_id=sandbox.record.boot_id)


async def _give_up(sandbox: Sandbox, greeting: Greeting, folder: Path, error: BaseException) -> None:
    """Suspended as before, whatever of the machine had come to be."""
    await greeting.give_up()
    await sandbox.clear_vm()
    if (folder / disks.RECORD).exists():  # it was not frozen, and may have written since
        await asyncio.to_thread(captures.copy_disk, folder, sandbox.folder, durable=True)
    lost = isinstance(error, SnapshotMismatch)
    sandbox.ended_as(State.SUSPENDED, Cause.MEMORY_LOST if lost else None, str(error) if lost else "")


def memory_lost(why: str) -> Conflict:
    """The error of a suspended sandbox whose memory cannot be loaded."""
    return Conflict(
        "memory_lost",
        f"The sandbox's memory cannot be restored: {why}",
        "Its disk is whole: stop it, which drops the memory, and start it.",
        state=str(State.SUSPENDED),
        verbs=[str(Verb.STOP), str(Verb.DELETE)],
    )
