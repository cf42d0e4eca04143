"""Sandboxes made from the machine of another: the branches of a fork, and what is created from a full snapshot.

A branch begins where its source stood, with an identity, entropy, a clock and sessions of its own before it is said to run.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hatchway.domain.errors import HatchwayError
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import State, Verb
from hatchway.node import record as records
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
from hatchway.node.vmm.seam import SnapshotMismatch, Taking, Vm, VmmError
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


@dataclass(frozen=True)
class Capture:
    """The machine of a sandbox as it stood at one instant, in a folder of its own."""

    standing: tuple[Standing, ...]
    """The sessions whose processes are in it."""
    stopped_ms: float = 0.0
    """How long the source's virtual CPUs stood still for it."""


async def capture(source: Sandbox, folder: Path, *, durable: bool) -> Capture:
    """Takes the machine of a source that runs, is paused or suspended; it is then as before. Part of one of its verbs.

    Raises `VmmError`, `OSError`, `LinkLost` and `GuestError`; nothing of the capture is left then.
    """
    clocks: list[asyncio.Task[None]] = []
    try:
        taken = await _capture(source, folder, clocks, durable=durable)
        for clock in clocks:
            await clock
    except BaseException:
        await asyncio.gather(*clocks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    return taken


async def _capture(source: Sandbox, folder: Path, clocks: list[asyncio.Task[None]], *, durable: bool) -> Capture:
    """As `capture`, but that the source that goes on may not have its clock yet (`clocks`), and that what fails leaves something in `folder`."""
    if source.record.state == State.SUSPENDED:
        await asyncio.to_thread(_copy_suspended, source.folder, folder)
        return Capture(source.context.sessions.standing(source.record.sandbox_id))
    vm, stopped_ms = source.require_vm(), 0.0
    if source.record.state == State.PAUSED:
        standing = source.context.sessions.standing(source.record.sandbox_id)
        sealing = await source.context.driver.capture(vm, folder)
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
            clocks.append(asyncio.get_running_loop().create_task(_set_clock(source, vm)))
    await asyncio.to_thread(sealing, durable=durable)
    return Capture(standing, stopped_ms)


async def _go_on(source: Sandbox, vm: Vm, began: float) -> float:
    """The source runs again; returns how long it stood still, in milliseconds."""
    try:
        await vm.resume()
    except VmmError as error:
        log.warning("%s: it did not go on as it should: %s", source.record.sandbox_id, error)
        await settle(source, vm)
        raise
    stopped_ms = (time.perf_counter() - began) * 1e3
    if source.link is not None:
        source.link.paused(False)
    return stopped_ms


async def _set_clock(source: Sandbox, vm: Vm) -> None:
    """A source that went on has the time again, and other random numbers than what was made of it."""
    try:
        if source.link is not None:
            await source.link.setup(time_ns=time.time_ns(), entropy=os.urandom(256))
    except (LinkLost, GuestError) as error:
        log.warning("%s: it did not go on as it should: %s", source.record.sandbox_id, error)
        await settle(source, vm)
        raise


def _copy_suspended(source: Path, target: Path) -> None:
    """A suspended sandbox's capture with its disk: hard links, and a copy of the disk's topmost layer."""
    suspended = source / SUSPENDED
    target.mkdir(parents=True, mode=0o700)
    captures.copy_disk(source, target)
    for path in suspended.iterdir():
        if not (target / path.name).exists():
            os.link(path, target / path.name, follow_symlinks=False)


async def revive(
    sandbox: Sandbox,
    folder: Path,
    standing: Callable[[], Sequence[Standing]],
    *,
    shared: bool,
    grow_from: int | None = None,
    taking: Taking | None = None,
) -> None:
    """Brings a new sandbox up from a capture; what fails leaves it `failed`, with the reason. The body of its creation.

    `standing` tells the sessions in it, once it is loaded. `shared`: more of them come from the same capture, which with `taking` is not
    there yet. `grow_from` as with `Sandbox.bring_up`. Raises as `Sandbox.create`.
    """
    phases = Phases()
    saving: asyncio.Future[None] | None = None
    greeting = Greeting(sandbox.setup(anew=True), fresh=True, within=RESTORE_WITHIN_S, complete=sandbox.open_way_out)
    try:
        async with sandbox.context.starts.turn():
            sandbox.save_in_hand("creating", durable=False)
            vm = await sandbox.context.driver.revive(
                folder, sandbox.vm_spec(), greeting.begin, shared=shared, taking=taking
            )
            sandbox.take(vm)
            phases.done("load")
            # As with a creation: its disk is durable, and with this that there is a sandbox.
            saving = asyncio.ensure_future(asyncio.to_thread(records.flush, sandbox.folder))
            await vm.resume()
            # While its agent comes to itself: nothing that the processes in it write is taken before `bring_up` ends.
            await sandbox.context.sessions.branch(sandbox.record.sandbox_id, sandbox.record.project, standing())
            await bring_up(sandbox, vm, phases, greeting, grow_from=grow_from, thaw=True, saving=saving)
    except BaseException as error:
        if saving is not None:
            await asyncio.gather(saving, return_exceptions=True)
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

    What goes wrong with one branch is its own matter: it is `failed` and says why. Raises where nothing could be captured; so are all then.
    """
    source.require(Verb.FORK)
    place, shared = folder / new_id(), len(branches) > 1
    clocks: list[asyncio.Task[None]] = []
    taken = asyncio.get_running_loop().create_task(_take(source, place, clocks, merged=shared))
    suspended = source.record.state == State.SUSPENDED
    taking = Taking(place if suspended else source.folder, taken)

    async def make(one: Sandbox) -> None:
        try:
            await one.do(
                Verb.CREATE,
                lambda: revive(one, place, lambda: taken.result().standing, shared=shared, taking=taking),
            )
        except HatchwayError as error:
            log.warning("%s: the branch was not made: %s", one.record.sandbox_id, error)

    try:
        if suspended:  # it is a matter of links, and tells where everything is
            await asyncio.wait([taken])
        await asyncio.gather(*map(make, branches))
        await asyncio.wait(clocks or [taken])  # what came of it, the log and the source's state say
        return (await taken).stopped_ms
    finally:
        taken.cancel()
        await asyncio.gather(taken, *clocks, return_exceptions=True)
        # Machines that were made from it keep what they need.
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


async def _take(source: Sandbox, place: Path, clocks: list[asyncio.Task[None]], *, merged: bool) -> Capture:
    if not merged or source.record.state == State.SUSPENDED:
        taken = await _capture(source, place, clocks, durable=False)
    else:
        # The base is most of it, and does not change: it is copied while the source is captured.
        copied = asyncio.ensure_future(asyncio.to_thread(captures.begin_merged, source.folder, place))
        try:
            taken = await _capture(source, place, clocks, durable=False)
        finally:
            await asyncio.wait([copied])
            failed = copied.exception()
        if failed is not None:
            raise failed
    if merged:
        # Once for all; nothing of it is needed after a crash.
        await asyncio.to_thread(captures.merged_memory, place, durable=False)
    return taken
