"""Create and start: from nothing, or a kept disk, to a machine whose agent has its identity. Only then it is said to run."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from functools import partial

from hatchway.domain.errors import Gone
from hatchway.domain.lifecycle import Cause, State, Verb
from hatchway.node import record as records
from hatchway.node.endings import ended_by
from hatchway.node.faults import explained
from hatchway.node.greeting import BOOT_WITHIN_S, RESTORE_WITHIN_S, Greeting
from hatchway.node.guest.seam import LinkLost
from hatchway.node.phases import Phases
from hatchway.node.sandbox import Sandbox
from hatchway.node.vmm.seam import Baked, SnapshotMismatch, Vm, VmmDied
from hatchway.wire.node import Observed

RESIZE_WITHIN_S = 60.0
END_SEEN_WITHIN_S = 2.0
"""How long after the loss of its agent the end of a machine is waited for, to tell the one from the other."""

log = logging.getLogger(__name__)


async def create(sandbox: Sandbox) -> Observed:
    """Restores the template's baked snapshot and gives it its identity. Raises `HatchwayError`; the record then is `failed`."""
    if sandbox.record.state == State.RUNNING:
        return sandbox.observed()
    return await sandbox.do(Verb.CREATE, lambda: _create(sandbox))


async def start(sandbox: Sandbox) -> Observed:
    """Cold boot on the kept disk."""
    return await sandbox.do(Verb.START, lambda: _start(sandbox))


async def cause_of(sandbox: Sandbox, error: BaseException) -> Cause:
    """Why a machine did not come up: it died on the way, which its agent's silence may tell before its end is seen."""
    vm, status = sandbox.vm, None
    if isinstance(error, LinkLost) and vm is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SEEN_WITHIN_S):
                await vm.ended.wait()
        if vm.ended.is_set():
            status = (await vm.info()).exit
    elif isinstance(error, VmmDied):
        status = error.status
    if status is None:
        return Cause.VMM_DIED if isinstance(error, VmmDied) else Cause.OPERATION_FAILED
    state, cause, _ = ended_by(status)
    return cause if state is State.FAILED else Cause.OPERATION_FAILED


async def _create(sandbox: Sandbox) -> None:
    if sandbox.record.state == State.DELETED:
        raise Gone("sandbox_deleted", "The sandbox was deleted meanwhile.", "Create a new one.")
    phases = Phases()
    try:
        baked = await sandbox.context.baker.baked(sandbox.template(), sandbox.record.shape, sandbox.progress)
        phases.done("bake")
        async with sandbox.context.starts.turn():
            phases.done("turn")
            await _restore(sandbox, baked, phases)
    except BaseException as error:
        cause = await cause_of(sandbox, error)
        await sandbox.clear_vm()
        if not isinstance(error, asyncio.CancelledError):
            sandbox.ended_as(State.FAILED, cause, explained(error).cause)
        raise
    sandbox.phases = phases.ms


async def _restore(sandbox: Sandbox, baked: Baked | None, phases: Phases) -> None:
    """The machine of a bake, or a cold boot where there is none that can be used."""
    sandbox.save_in_hand("creating", durable=False)
    phases.done("record")
    if baked is None:
        await _boot_cold(sandbox, phases)
        return
    greeting = Greeting(
        sandbox.setup(anew=True, baked=baked),
        fresh=True,
        within=RESTORE_WITHIN_S,
        complete=partial(sandbox.open_way_out, baked=True),
    )
    try:
        vm = await sandbox.context.driver.restore(baked, sandbox.vm_spec(), greeting.begin)
    except SnapshotMismatch as error:
        await greeting.give_up()
        log.warning("%s: %s; booting cold instead", sandbox.record.sandbox_id, error)
        await sandbox.context.baker.discard(baked)
        await sandbox.context.launcher.kill_vm(sandbox.record.sandbox_id)
        await sandbox.context.launcher.forget_vm(sandbox.record.sandbox_id)
        await _boot_cold(sandbox, phases)
        return
    except BaseException:
        await greeting.give_up()
        raise
    sandbox.take(vm)
    phases.done("restore")
    # The disk is durable, and with this that there is a sandbox: a host that fails from now on finds it stopped. It takes no time, the
    # guest takes longer.
    saving = asyncio.ensure_future(asyncio.to_thread(records.flush, sandbox.folder))
    try:
        await bring_up(sandbox, vm, phases, greeting, grow_from=baked.shape.disk_mib, saving=saving)
    finally:
        await asyncio.gather(saving, return_exceptions=True)


async def _boot_cold(sandbox: Sandbox, phases: Phases) -> None:
    vm = await sandbox.context.driver.start(sandbox.vm_spec())
    sandbox.take(vm)
    phases.done("start")
    await bring_up(sandbox, vm, phases, grow_from=0)


async def _start(sandbox: Sandbox) -> None:
    if sandbox.record.state == State.RUNNING:
        return
    sandbox.require(Verb.START)
    await boot(sandbox, "starting")


async def boot(sandbox: Sandbox, in_hand: str) -> None:
    """Cold boot on the disk that is there; `in_hand` is what the record says meanwhile. Part of a verb; what fails leaves it `failed`."""
    phases = Phases()
    async with sandbox.context.starts.turn():
        sandbox.save_in_hand(in_hand)
        try:
            await _boot_cold(sandbox, phases)
        except BaseException as error:
            cause = await cause_of(sandbox, error)
            await sandbox.clear_vm()
            if isinstance(error, asyncio.CancelledError):
                sandbox.save(State.STOPPED)
            else:
                sandbox.ended_as(State.FAILED, cause, explained(error).cause)
            raise
    sandbox.phases = phases.ms


async def bring_up(
    sandbox: Sandbox,
    vm: Vm,
    phases: Phases,
    greeting: Greeting | None = None,
    *,
    grow_from: int | None = None,
    thaw: bool = False,
    boot_id: str | None = None,
    saving: Awaitable[None] | None = None,
) -> None:
    """From a machine that runs to a sandbox that is ready; only then the record says `running`.

    `grow_from` is the size in MiB of the file system that the guest began with, 0 where it is not known, None where it fits.
    With `thaw` the guest's file system may be frozen, and is let go on once the record is written. `boot_id` is what its
    programs see as the boot's where that is neither new nor the kernel's. `saving` makes durable what is to be found after a crash
    of the host; the record of the running machine, which is none then, need not be.
    """
    record = sandbox.record
    if greeting is None:
        greeting = Greeting(sandbox.setup(), fresh=False, within=BOOT_WITHIN_S, complete=sandbox.open_way_out)
        greeting.begin(vm)
    elif not greeting.begun:  # the machine of an attempt before this one, which the driver found running
        greeting.begin(vm)
    link = sandbox.link = await greeting.answered()
    phases.done("agent")
    if grow_from is not None and record.shape.disk_mib > grow_from:
        async with asyncio.timeout(RESIZE_WITHIN_S):
            if thaw:
                await link.thaw()  # what is frozen does not grow
            if grow_from:
                await vm.resize_disk(record.shape.disk_mib)
            await link.resize_disk(record.shape.disk_mib)
        phases.done("disk")
    record.boot_id = greeting.setup.boot_id or boot_id or link.hello.boot_id
    record.isolation = sandbox.context.driver.isolation
    record.cause, record.reason = None, ""
    if saving is not None:
        await saving
    sandbox.check_alive(vm)  # the watcher left it to us; no await between here and the record
    # What cannot be recorded would not outlive the next start of the node.
    sandbox.write(str(State.RUNNING), durable=saving is None)
    # Nobody waits for these: what is asked of the guest from now on comes behind them. The greeting may have been on its way for as
    # long as the machine needed; the clock is right again before anything is started.
    sandbox.chore(link.setup(time_ns=time.time_ns()))
    if thaw:
        sandbox.chore(link.thaw())  # it would thaw by itself
    sandbox.publish()
    phases.done("ready")
    await sandbox.context.sessions.link_up(record.sandbox_id, link)
