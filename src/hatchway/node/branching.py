"""Sandboxes made from the machine of another: the branches of a fork, and what is created from a full snapshot.

A branch begins where its source stood, with an identity, entropy, a clock and sessions of its own before it is said to run.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from hatchway.domain.errors import HatchwayError
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import Cause, State, Verb
from hatchway.node import suspension
from hatchway.node.creation import bring_up, cause_of
from hatchway.node.faults import explained
from hatchway.node.greeting import RESTORE_WITHIN_S, Greeting
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.node.pausing import settle
from hatchway.node.phases import Phases
from hatchway.node.sandbox import SUSPENDED, Sandbox
from hatchway.node.sessions.seam import Standing
from hatchway.node.vmm import captures
from hatchway.node.vmm.seam import SnapshotMismatch, Vm, VmmError
from hatchway.wire.node import Branch, SandboxSpec

log = logging.getLogger(__name__)


def spec_of(source: Sandbox, branch: Branch) -> SandboxSpec:
    """What a branch is made as: its source's template and shape, its own name."""
    record = source.record
    return SandboxSpec(
        sandbox_id=branch.sandbox_id,
        project=record.project,
        generation=branch.generation,
        template_digest=record.template_digest,
        shape=record.shape,
        hostname=branch.hostname,
        env=branch.env,
        egress=branch.egress,
    )


class Capture:
    """The machine of a sandbox as it stood at one instant, in a folder of its own."""

    def __init__(self, folder: Path, standing: Sequence[Standing], stopped_ms: float) -> None:
        self.folder = folder
        self.standing = tuple(standing)
        """The sessions whose processes are in it."""
        self.stopped_ms = stopped_ms
        """How long the source's virtual CPUs stood still for it."""

    async def remove(self) -> None:
        """Gives its space back; machines that were made from it keep what they need."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


async def capture(source: Sandbox, folder: Path, *, durable: bool) -> Capture:
    """Takes the machine of a source that runs, is paused or suspended; it is then as before. Part of one of its verbs.

    Raises `VmmError`, `OSError`, `LinkLost` and `GuestError`; nothing of the capture is left then.
    """
    try:
        if source.record.state == State.SUSPENDED:
            await asyncio.to_thread(_copy_suspended, source.folder, folder)
            return Capture(folder, source.context.sessions.standing(source.record.sandbox_id), 0.0)
        vm = source.require_vm()
        if source.record.state == State.PAUSED:
            standing = source.context.sessions.standing(source.record.sandbox_id)
            sealing = await source.context.driver.capture(vm, folder)
            stopped_ms = 0.0
        else:
            began = time.perf_counter()
            await vm.pause()
            try:
                if source.link is not None:
                    source.link.paused(True)
                standing = source.context.sessions.standing(source.record.sandbox_id)
                sealing = await source.context.driver.capture(vm, folder)
            finally:
                stopped_ms = await asyncio.shield(_go_on(source, vm, began))
        await asyncio.to_thread(sealing, durable=durable)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    return Capture(folder, standing, stopped_ms)


async def _go_on(source: Sandbox, vm: Vm, began: float) -> float:
    """The source runs again, with its clock set; returns how long it stood still, in milliseconds."""
    try:
        await vm.resume()
        stopped_ms = (time.perf_counter() - began) * 1e3
        if source.link is not None:
            source.link.paused(False)
            await source.link.setup(time_ns=time.time_ns(), entropy=os.urandom(256))
    except (VmmError, LinkLost, GuestError) as error:
        log.warning("%s: it did not go on as it should: %s", source.record.sandbox_id, error)
        await settle(source, vm)
        raise
    return stopped_ms


def _copy_suspended(source: Path, target: Path) -> None:
    """A suspended sandbox's capture with its disk: hard links, and a copy of the disk's topmost layer."""
    suspended = source / SUSPENDED
    target.mkdir(parents=True, mode=0o700)
    captures.copy_disk(source, target)
    for path in suspended.iterdir():
        if not (target / path.name).exists():
            os.link(path, target / path.name, follow_symlinks=False)


async def revive(
    sandbox: Sandbox, folder: Path, standing: Sequence[Standing], *, shared: bool, grow_from: int | None = None
) -> None:
    """Brings a new sandbox up from a capture; what fails leaves it `failed`, with the reason. The body of its creation.

    `shared`: more of them come from the same capture. `grow_from` as with `Sandbox.bring_up`. Raises as `Sandbox.create`.
    """
    phases = Phases()
    greeting = Greeting(sandbox.setup(anew=True), fresh=True, within=RESTORE_WITHIN_S, complete=sandbox.open_way_out)
    try:
        async with sandbox.context.starts.turn():
            sandbox.save_in_hand("creating", durable=False)
            vm = await sandbox.context.driver.revive(folder, sandbox.vm_spec(), greeting.begin, shared=shared)
            sandbox.take(vm)
            phases.done("load")
            await sandbox.context.sessions.branch(sandbox.record.sandbox_id, sandbox.record.project, standing)
            await vm.resume()
            await bring_up(sandbox, vm, phases, greeting, grow_from=grow_from, thaw=True)
    except BaseException as error:
        await greeting.give_up()
        cause = await cause_of(sandbox, error)
        await sandbox.clear_vm()
        if not isinstance(error, asyncio.CancelledError):
            sandbox.ended_as(State.FAILED, cause, explained(error).cause)
        if isinstance(error, SnapshotMismatch):
            raise suspension.memory_lost(str(error)) from error
        raise
    sandbox.phases = phases.ms


async def fork(source: Sandbox, branches: Sequence[Sandbox], folder: Path) -> float:
    """Makes all the branches from one capture of the source. The body of the source's verb; returns how long it stood still, in milliseconds.

    What goes wrong with one branch is its own matter: it is `failed` and says why. Raises where nothing could be captured.
    """
    source.require(Verb.FORK)
    try:
        taken = await capture(source, folder / new_id(), durable=False)
    except BaseException as error:
        for branch in branches:
            branch.ended_as(State.FAILED, Cause.OPERATION_FAILED, explained(error).cause)
        raise
    try:
        if len(branches) > 1:
            # Once for all; nothing of it is needed after a crash.
            await asyncio.to_thread(captures.merged_memory, taken.folder, durable=False)
        await asyncio.gather(*(_branch(one, taken, shared=len(branches) > 1) for one in branches))
    finally:
        await taken.remove()
    return taken.stopped_ms


async def _branch(sandbox: Sandbox, taken: Capture, *, shared: bool) -> None:
    try:
        await sandbox.do(Verb.CREATE, lambda: revive(sandbox, taken.folder, taken.standing, shared=shared))
    except HatchwayError as error:
        log.warning("%s: the branch was not made: %s", sandbox.record.sandbox_id, error)
