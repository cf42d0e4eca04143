"""Pause and resume: the virtual CPUs stand still, and everything stays where it is."""

import contextlib
import os
import time

from hatchway.domain.lifecycle import State, Verb
from hatchway.node.greeting import RESTORE_WITHIN_S, meet
from hatchway.node.guest.seam import GuestError, GuestLink, LinkLost
from hatchway.node.sandbox import Sandbox
from hatchway.node.vmm.seam import Vm, VmmError
from hatchway.wire.node import Observed


async def pause(sandbox: Sandbox, *, only_pooled: bool = False) -> Observed:
    """Stops the virtual CPUs; with `only_pooled` unless it was claimed from its pool meanwhile."""
    return await sandbox.do(Verb.PAUSE, lambda: _pause(sandbox, only_pooled))


async def resume(sandbox: Sandbox) -> Observed:
    """Lets the virtual CPUs go on, with the clock set."""
    return await sandbox.do(Verb.RESUME, lambda: _resume(sandbox))


async def _pause(sandbox: Sandbox, only_pooled: bool) -> None:
    if sandbox.record.state == State.PAUSED or (only_pooled and not sandbox.record.pooled):
        return
    sandbox.require(Verb.PAUSE)
    vm = sandbox.require_vm()
    try:
        await vm.pause()
        sandbox.check_alive(vm)
    except VmmError:
        await settle(sandbox, vm)
        raise
    if sandbox.link is not None:
        sandbox.link.paused(True)
    if not sandbox.record.pooled:  # one that nobody has yet has no flows
        await sandbox.gateway.pause()
    sandbox.save(State.PAUSED)


async def _resume(sandbox: Sandbox) -> None:
    if sandbox.record.state == State.RUNNING:
        return
    sandbox.require(Verb.RESUME)
    vm = sandbox.require_vm()
    try:
        await sandbox.gateway.resume()
        await vm.resume()
        await wake_agent(sandbox, vm)
        sandbox.check_alive(vm)
    except (VmmError, LinkLost, GuestError, OSError, TimeoutError):
        await pause_again(sandbox, vm)
        raise
    sandbox.save(State.RUNNING)


async def pause_again(sandbox: Sandbox, vm: Vm) -> None:
    """After a resume that failed: it is not ready, and stays what it was."""
    with contextlib.suppress(VmmError):
        await vm.pause()
    await sandbox.gateway.pause()
    await settle(sandbox, vm)
    link, sandbox.link = sandbox.link, None
    if link is not None:
        await link.close()  # the next attempt makes it anew


async def wake_agent(sandbox: Sandbox, vm: Vm) -> None:
    """After the virtual CPUs were let go on: the agent is asked again, and gets clock and entropy. Raises `LinkLost`, `GuestError`."""
    link = await reach_agent(sandbox, vm)
    trust = sandbox.gateway.trust
    if trust == sandbox.gateway.delivered:
        await link.setup(time_ns=time.time_ns(), entropy=os.urandom(256))
        return
    await link.setup(
        time_ns=time.time_ns(),
        entropy=os.urandom(256),
        env={**sandbox.record.env, **trust.env},
        ca=trust.certificate,
    )
    sandbox.gateway.delivered = trust


async def reach_agent(sandbox: Sandbox, vm: Vm) -> GuestLink:
    """The agent of a machine that goes on. Raises `LinkLost`."""
    link = sandbox.link
    if link is None:
        link = sandbox.link = await meet(vm, within=RESTORE_WITHIN_S)
        await sandbox.context.sessions.link_up(sandbox.record.sandbox_id, link)
    else:
        link.paused(False)
    return link


async def settle(sandbox: Sandbox, vm: Vm) -> None:
    """After a pause or resume that failed: the state is what the machine says, not what was wanted."""
    info = await vm.info()
    if info.status == "ended" or vm.ended.is_set() or "unanswered" in info.details:
        return  # the watcher tells it; or nobody knows, and what was seen last stays
    if sandbox.link is not None:
        sandbox.link.paused(info.status == "paused")
    state = State.PAUSED if info.status == "paused" else State.RUNNING
    await (sandbox.gateway.pause() if state == State.PAUSED else sandbox.gateway.resume())
    if sandbox.record.state != state:
        sandbox.save(state)
