"""What became of a sandbox while no node was there, and how the next node goes on with it."""

import asyncio
import logging
import shutil
import time

from hatchway.domain.errors import HatchwayError
from hatchway.domain.lifecycle import Cause, State
from hatchway.node.faults import explained
from hatchway.node.greeting import BOOT_WITHIN_S, meet
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.node.sandbox import IN_HAND, SUSPENDED, Sandbox
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.seam import Vm, VmInfo, VmmDied, VmmError, VmmTimeout, WrongGeneration

ADOPT_WITHIN_S = 60.0
"""How long a machine that neither answers nor has ended is asked again after a restart, before it is given up."""
ADOPT_AGAIN_S = 1.0

_HALF_ROLLED_BACK = "The rollback did not end: its disk is whole, from before it or after it. Roll it back again."

log = logging.getLogger(__name__)


async def adopt(sandbox: Sandbox, vm_is_known: bool) -> None:
    """Finds out what it is now, and records it; `vm_is_known` says that the launcher has a VM of its id."""
    await sandbox.before_verbs(lambda: _adopt(sandbox, vm_is_known))


async def _adopt(sandbox: Sandbox, vm_is_known: bool) -> None:
    await _find_out(sandbox, vm_is_known)
    await asyncio.to_thread(_clear_leftovers, sandbox)


def _clear_leftovers(sandbox: Sandbox) -> None:
    """Removes what a node left that died between a record and what followed from it: half a capture, or a memory that is not needed any more."""
    left = [*sandbox.folder.glob(f"{SUSPENDED}.*")]
    if sandbox.record.state != State.SUSPENDED:
        sandbox.forget_kept()
        left.append(sandbox.folder / SUSPENDED)
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


async def _find_out(sandbox: Sandbox, vm_is_known: bool) -> None:
    record = sandbox.record
    if record.host_boot_id != sandbox.context.host_boot_id:
        if record.state in (State.RUNNING, State.PAUSED, "stopping", "starting"):
            sandbox.ended_as(State.STOPPED, Cause.HOST_REBOOT, "The host was restarted.")
        elif record.state == "restoring":
            await _not_restored(sandbox)
        elif record.state == "rolling_back":
            sandbox.ended_as(State.FAILED, Cause.OPERATION_FAILED, _HALF_ROLLED_BACK)
        elif record.state == "creating" and _has_disk(sandbox):
            # Perhaps it ran already: with a disk that is durable it is as good as one that did, and only its record is older.
            sandbox.ended_as(State.STOPPED, Cause.HOST_REBOOT, "The host was restarted.")
        elif record.state == "creating":
            sandbox.ended_as(
                State.FAILED, Cause.OPERATION_FAILED, "The host was restarted while the sandbox was being created."
            )
    elif record.state in (State.RUNNING, State.PAUSED):
        await _adopt_vm(sandbox, vm_is_known)
    elif (
        record.state in IN_HAND or vm_is_known
    ):  # a machine beside a stable state: its end was told before it was cleared
        await sandbox.context.launcher.kill_vm(record.sandbox_id)
        await sandbox.context.launcher.forget_vm(record.sandbox_id)
        if record.state == "creating":
            sandbox.ended_as(
                State.FAILED, Cause.OPERATION_FAILED, "The node was restarted while the sandbox was being created."
            )
        elif record.state == "starting":
            sandbox.ended_as(State.STOPPED, None, "The node was restarted while the sandbox was being started.")
        elif record.state == "rolling_back":
            sandbox.ended_as(State.FAILED, Cause.OPERATION_FAILED, _HALF_ROLLED_BACK)
        elif record.state == "restoring":
            await _not_restored(sandbox)
        elif record.state == "stopping":
            sandbox.ended_as(State.STOPPED, Cause(record.cause) if record.cause else None, record.reason)


def _has_disk(sandbox: Sandbox) -> bool:
    try:
        return disks.load(sandbox.folder) is not None
    except VmmError:
        return False


async def _not_restored(sandbox: Sandbox) -> None:
    """Suspended as before. A frozen guest wrote nothing to its disk before the record said `running`; of another there is a copy."""
    suspended = sandbox.folder / SUSPENDED
    if (suspended / disks.RECORD).exists():
        await asyncio.to_thread(captures.copy_disk, suspended, sandbox.folder, durable=True)
    sandbox.ended_as(State.SUSPENDED, None, "")


async def _adopt_vm(sandbox: Sandbox, vm_is_known: bool) -> None:
    try:
        vm, info = await _found_vm(sandbox, vm_is_known)
    except VmmDied as error:
        sandbox.vm_lost(error.status)
        return
    except (HatchwayError, VmmError, OSError) as error:
        sandbox.vm_lost(None, f"The node could not take it over after a restart: {explained(error).cause}")
        return
    if info.status == "ended":
        return  # the watcher tells it
    if info.status == "paused" and not await _let_go_on(sandbox, vm):
        await sandbox.gateway.pause()
        sandbox.save(State.PAUSED)
        return
    await sandbox.gateway.resume()
    try:
        link = sandbox.link = await meet(vm, within=BOOT_WITHIN_S)
        await link.setup(time_ns=time.time_ns())  # it may have been paused when the node died
        await link.thaw()  # or frozen, for a snapshot or a suspension that did not end
    except LinkLost as error:
        if not vm.ended.is_set():
            sandbox.unwatch()
            sandbox.vm_lost(None, f"Its agent did not answer after a restart of the node: {error}")
        return
    except GuestError as error:
        log.warning("%s: its clock could not be set: %s", sandbox.record.sandbox_id, error)
    sandbox.check_alive(vm)
    sandbox.save(State.RUNNING)
    sandbox.chore(sandbox.deliver_trust())
    await sandbox.context.sessions.link_up(sandbox.record.sandbox_id, link)


async def _let_go_on(sandbox: Sandbox, vm: Vm) -> bool:
    """Resumes a machine that nobody asked to be paused: a node that died in the middle of a copy of it left it so. False: it stays."""
    if sandbox.record.state != State.RUNNING:
        return False
    try:
        await vm.resume()
    except VmmError as error:
        log.warning("%s: it is paused and cannot be resumed: %s", sandbox.record.sandbox_id, error)
        return False
    return True


async def _found_vm(sandbox: Sandbox, vm_is_known: bool) -> tuple[Vm, VmInfo]:
    """The VM that runs, taken over, and what it is. A host that is busy is no reason to give it up at once."""
    if not vm_is_known:
        raise VmmDied("The launcher knows no such VM.")
    until = time.monotonic() + ADOPT_WITHIN_S
    while True:
        try:
            if sandbox.vm is None:
                sandbox.take(await sandbox.context.driver.adopt(sandbox.vm_spec()))
            vm = sandbox.require_vm()
            info = await vm.info()
            if info.status == "ended" or "unanswered" not in info.details:
                return vm, info
            raise VmmTimeout(str(info.details["unanswered"]))
        except (VmmDied, WrongGeneration):
            raise
        except VmmError as error:
            if time.monotonic() > until:
                raise
            log.warning("%s: not taken over yet: %s", sandbox.record.sandbox_id, error)
        await asyncio.sleep(ADOPT_AGAIN_S)
