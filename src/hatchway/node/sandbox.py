"""One sandbox on this node: its record, its VM, its guest link, and the verbs that move it.

One verb runs at a time. A verb is a task of its own, so that a control process that dies while it waits changes nothing; the
same verb asked again joins it; delete cancels whatever runs. Before a verb does anything that a restart would have to know of,
the record says so.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import msgspec

from hatchway.domain.errors import Conflict, HatchwayError, Unavailable
from hatchway.domain.lifecycle import Cause, State, Verb, admits, verbs_from
from hatchway.node import record as records
from hatchway.node.capacity import Holding
from hatchway.node.context import Context
from hatchway.node.endings import ended_by
from hatchway.node.faults import explained
from hatchway.node.greeting import meet
from hatchway.node.guest.link import Setup
from hatchway.node.guest.seam import GuestError, GuestLink, LinkLost
from hatchway.node.images.store import Release
from hatchway.node.record import Record
from hatchway.node.vmm.seam import (
    Baked,
    ExitStatus,
    Vm,
    VmmDied,
    VmmError,
    VmSpec,
)
from hatchway.wire.ballast import FULL
from hatchway.wire.node import Observed, SandboxSpec

SHUTDOWN_WITHIN_S = 5.0
SAVE_AGAIN_S = 5.0
"""A record that a full disk did not take is written after this, again and again."""

SUSPENDED = "suspended"
"""In the sandbox's folder: what a suspended one keeps of its memory."""
IN_HAND = {
    "restoring": State.SUSPENDED,
    "rolling_back": State.STOPPED,
    "creating": State.PENDING,
    "starting": State.STOPPED,
    "stopping": State.RUNNING,
    "deleting": State.FAILED,
}
"""What a record says while a verb is at it, and the state that is shown meanwhile: the one before it, as far as that is known."""

log = logging.getLogger(__name__)


def new_record(spec: SandboxSpec, host_boot_id: str) -> Record:
    """The first record of a sandbox. Its machine id follows from its id, so that no two share one."""
    return Record(
        sandbox_id=spec.sandbox_id,
        project=spec.project,
        generation=spec.generation,
        template_digest=spec.template_digest,
        shape=spec.shape,
        hostname=spec.hostname,
        machine_id=hashlib.sha256(spec.sandbox_id.encode()).hexdigest()[:32],
        env={"HATCHWAY_SANDBOX_ID": spec.sandbox_id, **spec.env},
        state="creating",
        host_boot_id=host_boot_id,
    )


class Sandbox:
    """One sandbox; see the module."""

    def __init__(self, context: Context, folder: Path, record: Record) -> None:
        self.context = context
        self.folder = folder
        self.record = record
        self.link: GuestLink | None = None
        self.vm: Vm | None = None
        """The machine, where there is one to be asked."""
        self._verb: Verb | None = None
        self._task: asyncio.Task[Observed] | None = None
        self._deleting = False
        self._clearing: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self.phases: dict[str, float] = {}
        """How long the phases of the last verb took, in milliseconds."""
        self.failure: HatchwayError | None = None
        """Why the last verb failed; None when it did not."""
        self._chores: set[asyncio.Task[None]] = set()
        self._known_release: Release | None = None
        self._sequence = context.events.next_sequence()
        self.gateway = context.gateways.of(record.sandbox_id, record.project, record.generation, folder)
        """Its way out."""
        self.gateway.on_changed = self._gateway_changed

    # -- what it is

    def observed(self) -> Observed:
        """What the control plane is told; a verb in hand shows as the state before it."""
        record = self.record
        return Observed(
            sandbox_id=record.sandbox_id,
            project=record.project,
            generation=record.generation,
            state=str(self._shown()),
            cause=record.cause,
            reason=record.reason,
            isolation=record.isolation,
            boot_id=record.boot_id,
            phases_ms=self.phases,
            stored_bytes=record.stored_bytes,
            artifact=record.artifact,
            egress=self.gateway.state,
            sequence=self._sequence,
        )

    def holding(self) -> Holding:
        """What it was promised of the host."""
        state, vm = self.record.state, self.vm
        return Holding(
            name=self.record.sandbox_id,
            shape=self.record.shape,
            overhead_mib=self.context.driver.overhead_mib(self.record.shape),
            folder=self.folder,
            pid=0 if vm is None else vm.pid,
            has_memory=vm is not None or state in IN_HAND or state in (State.RUNNING, State.PAUSED),
        )

    @property
    def leaving(self) -> bool:
        """Whether a verb is at it after which it does not run any more."""
        busy = self._task is not None and not self._task.done()
        return busy and self._verb in (Verb.PAUSE, Verb.SUSPEND, Verb.STOP)

    def _shown(self) -> State:
        return IN_HAND.get(self.record.state) or State(self.record.state)

    # -- verbs

    async def stop(self, reason: str, grace_s: float, cause: Cause | None = None) -> Observed:
        """Powers the guest off; kills it after `grace_s` seconds. The disk stays."""
        return await self.do(Verb.STOP, lambda: self._stop(reason, grace_s, cause))

    async def delete(self) -> Observed:
        """Ends and removes everything, whatever is going on. Succeeds from every state."""
        if self._verb is not Verb.DELETE and self._task is not None and not self._task.done():
            self._deleting = True
            self._task.cancel()
            await asyncio.wait([self._task])
        return await self.do(Verb.DELETE, self._delete)

    async def quiet(self) -> None:
        """Waits until nothing is in hand."""
        while (busy := self._busy()) is not None:
            await asyncio.wait([busy])

    # -- before and after this process

    async def before_verbs(self, body: Callable[[], Awaitable[None]]) -> None:
        """Has `body` find out what became of it while no node was there: verbs wait for that, a deletion ends it. What fails is logged."""

        async def whole() -> None:
            await body()
            if self.record.state == "deleting":
                await self._delete()

        self._verb = None
        task = self._task = asyncio.get_running_loop().create_task(
            self._guarded(whole), name=f"adopt {self.record.sandbox_id}"
        )
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: adoption failed: %s", self.record.sandbox_id, error)

    async def release(self) -> None:
        """Lets go of the VM without touching it: this process is about to end."""
        self._forget_late()
        if self._verb is None and self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._watcher is not None:
            self._watcher.cancel()
        if self.link is not None:
            await self.link.close()
        if self.vm is not None:
            await self.vm.close()

    # -- how it is done

    async def do(self, verb: Verb, body: Callable[[], Awaitable[None]]) -> Observed:
        """Has `body` done as the sandbox's one verb, after what is in hand; joins the same verb. Raises `HatchwayError`."""
        while (busy := self._busy()) is not None:
            if busy is self._task and self._verb is verb:
                return await self._joined(self._task)
            await asyncio.wait([busy])
        self._verb = verb
        task = self._task = asyncio.get_running_loop().create_task(
            self._guarded(body), name=f"{verb} {self.record.sandbox_id}"
        )
        return await self._joined(task)

    async def _joined(self, task: "asyncio.Task[Observed]") -> Observed:
        """Waits for a verb, which goes on where its caller goes away. Raises what it raises; `Conflict("preempted")` where a deletion ended it."""
        task.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # heard also when every caller has gone
        await asyncio.wait([task])
        if not task.cancelled():
            return task.result()
        if self._deleting:
            raise Conflict("preempted", "It was given up, because the sandbox is being deleted.", "Create a new one.")
        raise Unavailable("peer_lost", "The node is being restarted.", "Try again in a moment.")

    def _busy(self) -> "asyncio.Task[Observed] | asyncio.Task[None] | None":
        """What has to end before a verb can begin: another one, or the clearing away of a machine that ended by itself."""
        for task in (self._task, self._clearing):
            if task is not None and not task.done():
                return task
        return None

    async def _guarded(self, body: Callable[[], Awaitable[None]]) -> Observed:
        self.failure = None
        try:
            await body()
        except HatchwayError as error:
            self.failure = error
            self._leave_in_hand(error)
            raise
        except Exception as error:
            expected = isinstance(error, (VmmError, LinkLost, GuestError, OSError))
            log.warning(
                "%s: %s failed: %s", self.record.sandbox_id, self._verb, error, exc_info=None if expected else error
            )
            self._leave_in_hand(error)
            self.failure = explained(error)
            raise self.failure from error
        return self.observed()

    def _leave_in_hand(self, error: Exception) -> None:
        """A verb that failed leaves a state from which others go on; a deletion is asked for again."""
        if self.record.state in IN_HAND and self.record.state != "deleting":
            self.ended_as(State.FAILED, Cause.OPERATION_FAILED, explained(error).cause)

    async def _stop(self, reason: str, grace_s: float, cause: Cause | None) -> None:
        if self.record.state == State.STOPPED:
            return
        self.require(Verb.STOP)
        vm = self.vm
        if vm is not None:
            was_paused = self.record.state == State.PAUSED
            self.record.cause, self.record.reason = cause and str(cause), reason
            self._note_in_hand("stopping")
            self.unwatch()
            with contextlib.suppress(VmmError):  # whatever it does not do any more, it is ended below
                if was_paused:
                    await vm.resume()
                    if self.link is not None:
                        self.link.paused(False)
                await self._ask_to_shut_down(grace_s)
                await vm.stop(grace_s)
        self.context.sessions.sandbox_lost(self.record.sandbox_id, reason or "The sandbox was stopped.")
        await self.clear_vm()
        self.record.stored_bytes = self.record.artifact = None
        self.ended_as(State.STOPPED, cause, reason)
        await asyncio.to_thread(self.forget_kept)
        await asyncio.to_thread(shutil.rmtree, self.folder / SUSPENDED, ignore_errors=True)

    async def _ask_to_shut_down(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.1, min(grace_s, SHUTDOWN_WITHIN_S))):
                if self.link is None and self.vm is not None:
                    self.link = await meet(self.vm, within=grace_s)
                if self.link is not None:
                    await self.link.shutdown()
        except (LinkLost, GuestError, TimeoutError) as error:
            log.info("%s: the guest did not accept the shutdown: %s", self.record.sandbox_id, error)

    def require_vm(self) -> Vm:
        """The machine. Raises `VmmDied` where there is none to be asked."""
        if self.vm is None:
            raise VmmDied("The node has no connection to the virtual machine.")
        return self.vm

    @staticmethod
    def check_alive(vm: Vm) -> None:
        """Behind an await: what the watcher has told meanwhile must not be overwritten."""
        if vm.ended.is_set():
            raise VmmDied("The virtual machine ended meanwhile.", vm.exit)

    async def _delete(self) -> None:
        if self.record.state == State.DELETED:
            return
        self.unwatch()
        self._note_in_hand("deleting")
        self.context.sessions.sandbox_lost(self.record.sandbox_id, "The sandbox was deleted.")
        await self.clear_vm(wholly=True)
        await self.context.sessions.sandbox_deleted(self.record.sandbox_id)
        await asyncio.to_thread(self.forget_kept)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        self._forget_late()
        self.record.state, self.record.cause, self.record.reason = State.DELETED, None, ""
        self.publish()
        self.context.gateways.forget(self.record.sandbox_id)
        self.context.drop(self.record.sandbox_id)

    def require(self, verb: Verb) -> None:
        """The control plane guards its transitions; this holds even if it is wrong about what is here."""
        state = self._shown()
        if self.record.state in IN_HAND:  # left by a verb that could not be finished
            raise Conflict(
                "wrong_state", f"The sandbox is {self.record.state}.", "Wait for that, or delete it.", state=str(state)
            )
        if not admits(verb, state):
            raise Conflict(
                "wrong_state",
                f"The sandbox is {state}; {verb} is not possible from there.",
                "Possible are: " + ", ".join(verbs_from(state)) + ".",
                state=str(state),
            )

    def setup(self, *, anew: bool = False, baked: Baked | None = None) -> Setup:
        """What the guest is given before the sandbox is reported as running.

        `anew` is for one that comes from another's memory: a boot id of its own in place of the kernel's, and host keys of its own. Where
        that is a baked one, what it is known not to have is not taken from it: all that a guest does here is translated first.
        """
        record = self.record
        if baked is not None:
            return replace(self.setup(anew=anew), renew_keys=baked.host_keys)
        return Setup(
            entropy=os.urandom(256),
            hostname=record.hostname,
            machine_id=record.machine_id,
            env=record.env,
            time_ns=time.time_ns(),
            boot_id=str(uuid.uuid4()) if anew else None,
            renew_keys=anew,
        )

    async def open_way_out(self, setup: Setup, *, baked: bool = False) -> Setup:
        """Its machine was made: has its gateway served, and adds what the guest needs of it. Raises as `Gateway.open`."""
        trust = await self.gateway.open()
        self.gateway.delivered = trust
        env = {**self.record.env, **trust.env}
        if baked:  # it has no environment and trusts nobody yet
            return replace(setup, env=env or None, ca=trust.certificate or None)
        return replace(setup, env=env, ca=trust.certificate)

    async def deliver_trust(self) -> None:
        """Gives a running guest what it has to trust, and its placeholders, where they have changed. Raises `LinkLost`, `GuestError`."""
        trust, link = self.gateway.trust, self.link
        if link is None or self.record.state != State.RUNNING or trust == self.gateway.delivered:
            return
        await link.setup(env={**self.record.env, **trust.env}, ca=trust.certificate)
        self.gateway.delivered = trust

    def _gateway_changed(self) -> None:
        if self.record.state in IN_HAND:
            return  # the verb in hand tells it
        self.publish()
        self.chore(self.deliver_trust())

    def template(self) -> Release:
        """The release that the sandbox is made of; it never changes, and is looked up once."""
        if self._known_release is None:
            self._known_release = self.context.images.resolve_digest(self.record.template_digest)
        return self._known_release

    def vm_spec(self) -> VmSpec:
        """The machine that the driver is asked for."""
        return VmSpec(
            sandbox_id=self.record.sandbox_id,
            generation=self.record.generation,
            shape=self.record.shape,
            boot=self.template().boot_files(),
            folder=self.folder,
            network=self.context.network,
        )

    def take(self, vm: Vm) -> None:
        """Has a machine of its own from now on, and watches it."""
        self.vm = vm
        self._watcher = asyncio.get_running_loop().create_task(self._watch(vm), name=f"watch {self.record.sandbox_id}")

    def unwatch(self) -> None:
        """From now on the end of the machine is our own doing."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self, vm: Vm) -> None:
        await vm.ended.wait()
        if self.record.state not in IN_HAND:
            self._watcher = None
            self.vm_lost((await vm.info()).exit)

    def vm_lost(self, status: ExitStatus | None, why: str = "") -> None:
        """Tells that the machine is gone, at once; what is left of it is cleared away before the next verb."""
        state, cause, reason = ended_by(status, why)
        log.warning("%s: %s", self.record.sandbox_id, reason)
        self.context.sessions.sandbox_lost(self.record.sandbox_id, reason)
        self.ended_as(state, cause, reason)
        self.clear_behind()

    def clear_behind(self) -> None:
        """Removes what is left of a machine that has ended or is not needed; the next verb waits for that, and nobody else."""
        self._clearing = asyncio.get_running_loop().create_task(
            self._clear_quietly(), name=f"clear {self.record.sandbox_id}"
        )

    async def _clear_quietly(self) -> None:
        try:
            await self.clear_vm()
        except (VmmError, OSError) as error:
            # The next start, stop or deletion clears it; so does the next node.
            log.warning("%s: what is left of its machine could not be removed: %s", self.record.sandbox_id, error)

    async def clear_vm(self, *, wholly: bool = False) -> None:
        """Leaves nothing of the VM but its disk, however far it had come.

        Raises `VmmError` when the VM may still run; with `wholly` also when the launcher holds something of it, such as its slot.
        """
        self.unwatch()
        await self.gateway.close()
        link, self.link = self.link, None
        vm, self.vm = self.vm, None
        if link is not None:
            await link.close()
        if vm is not None:
            with contextlib.suppress(VmmError):
                await vm.kill()
            with contextlib.suppress(VmmError):
                await vm.forget()
            await vm.close()
        try:
            # Also where no Vm object came to be: the launcher may have started one.
            await self.context.launcher.kill_vm(self.record.sandbox_id)
            await self.context.launcher.forget_vm(self.record.sandbox_id)
        except VmmError as error:
            if wholly or vm is None or not vm.ended.is_set():
                raise
            log.warning("%s: what is left of its machine could not be removed: %s", self.record.sandbox_id, error)

    def ended_as(self, state: State, cause: Cause | None, reason: str) -> None:
        """Records and tells what it is now, and why."""
        self.record.cause, self.record.reason = cause and str(cause), reason
        self.save(state)

    def save_in_hand(self, state: str, *, durable: bool = True) -> None:
        """Records what is about to be done (`IN_HAND`). Raises `OSError`."""
        self.record.host_boot_id = self.context.host_boot_id
        self.write(state, durable=durable)

    def _note_in_hand(self, state: str) -> None:
        """Like `save_in_hand`, for what frees what the host lacks: a full disk does not stop it."""
        try:
            self.save_in_hand(state)
        except OSError as error:
            log.warning("%s: the record could not be written: %s", self.record.sandbox_id, error)
            self.record.state = state

    def save(self, state: State) -> None:
        """Records and tells what it is now; on a full disk the record follows when there is room."""
        self.record.host_boot_id = self.context.host_boot_id
        self.record.state = str(state)
        self._record_or_later()
        self.publish()

    def _record_or_later(self) -> None:
        """What was seen is told in any case. The record on disk is older for as long as the disk is full."""
        self._late = None
        try:
            self.write(self.record.state)
        except OSError as error:
            log.error("%s: the record could not be written yet: %s", self.record.sandbox_id, error)
            self._late = asyncio.get_running_loop().call_later(SAVE_AGAIN_S, self._record_or_later)

    def _forget_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def write(self, state: str, *, durable: bool = True) -> None:
        """Records a state. Raises `OSError`; the record and the state are then as before."""
        self._forget_late()
        changed = msgspec.structs.replace(self.record, state=state)
        while True:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                records.write(self.folder, changed, durable=durable)
                break
            except OSError as error:
                # What happened is recorded also on a full disk; a creation would only make it fuller.
                if error.errno in FULL and state != "creating" and self.context.ballast.give():
                    continue
                if state != "creating":
                    # It may be there all the same, and not surely durable: what holds instead is written as soon as can be.
                    self._late = asyncio.get_running_loop().call_later(0.0, self._record_or_later)
                raise
        self.record.state = state

    def forget_kept(self) -> None:
        """What the store of the nodes has of its memory is needed no more. Blocks."""
        if self.context.keeper is not None:
            try:
                self.context.keeper.forget(self.folder / SUSPENDED)
            except OSError as error:
                log.warning("%s: the store keeps what was suspended: %s", self.record.sandbox_id, error)

    def chore(self, work: Coroutine[object, object, None]) -> None:
        """Has something done that nobody waits for; a failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._chores.discard(ended)
            if not ended.cancelled() and (error := ended.exception()) is not None:
                log.warning("%s: %s", self.record.sandbox_id, error)

        task.add_done_callback(done)

    def publish(self) -> None:
        """Tells the control plane what it is."""
        self._sequence = self.context.events.next_sequence()
        self.context.events.observed(self.observed())

    def progress(self, phase: str, fraction: float | None = None) -> None:
        """Tells how far the verb in hand is."""
        self.context.events.progress(self.record.sandbox_id, phase, fraction)
