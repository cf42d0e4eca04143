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
from pathlib import Path

import msgspec

from hatchway.domain.errors import Conflict, Gone, HatchwayError, Unavailable
from hatchway.domain.lifecycle import Cause, State, Verb, admits, verbs_from
from hatchway.node import metrics
from hatchway.node import record as records
from hatchway.node.capacity import Holding
from hatchway.node.context import Context
from hatchway.node.endings import ended_by
from hatchway.node.faults import explained
from hatchway.node.guest.link import Link, Setup, connect
from hatchway.node.guest.seam import GuestError, GuestLink, LinkLost
from hatchway.node.images.store import Release
from hatchway.node.record import Record
from hatchway.node.vmm.seam import (
    Baked,
    ExitStatus,
    SnapshotMismatch,
    Vm,
    VmInfo,
    VmmDied,
    VmmError,
    VmmTimeout,
    VmSpec,
    WrongGeneration,
)
from hatchway.wire.ballast import FULL
from hatchway.wire.node import Observed, SandboxSpec

BOOT_WITHIN_S = 60.0
"""A cold boot's agent answers within this (measured: 2–5 s on two slow cores)."""
RESTORE_WITHIN_S = 20.0
SHUTDOWN_WITHIN_S = 5.0
RESIZE_WITHIN_S = 60.0
ADOPT_WITHIN_S = 60.0
"""How long a machine that neither answers nor has ended is asked again after a restart, before it is given up."""
ADOPT_AGAIN_S = 1.0
END_SEEN_WITHIN_S = 2.0
"""How long after the loss of its agent the end of a machine is waited for, to tell the one from the other."""
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

_HALF_ROLLED_BACK = "The rollback did not end: its disk is whole, from before it or after it. Roll it back again."

log = logging.getLogger(__name__)


class Phases:
    """Stopwatch of one verb; `ms` maps each phase's name to its milliseconds."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """Ends a phase."""
        now = time.perf_counter()
        metrics.PHASES.labels(name).observe(now - self._last)
        self.ms[name] = round((now - self._last) * 1e3, 2)
        self._last = now


def new_boot_id() -> str:
    """What a sandbox that came from another machine's memory shows as the id of its boot."""
    return str(uuid.uuid4())


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


class Greeting:
    """The first words to a sandbox's agent: said as soon as its socket is there, so that they wait for the machine and not it for them."""

    def __init__(self, setup: Setup, *, fresh: bool, within: float) -> None:
        self.setup = setup
        self._fresh = fresh
        self._within = within
        self._task: asyncio.Task[Link] | None = None

    @property
    def begun(self) -> bool:
        """Whether there was a machine to greet."""
        return self._task is not None

    def begin(self, vm: Vm) -> None:
        """Connects, greets and gives the guest its set-up."""
        self._task = asyncio.get_running_loop().create_task(
            connect(vm.agent_socket, fresh=self._fresh, vm_ended=vm.ended, setup=self.setup, within=self._within)
        )

    async def answered(self) -> GuestLink:
        """Waits for the answer. Raises what `connect` raises."""
        assert self._task is not None
        try:
            return await self._task
        except asyncio.CancelledError:
            await self.give_up()
            raise

    async def give_up(self) -> None:
        """Leaves no connection behind where the machine did not come to be."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LinkLost, GuestError, OSError):
                await (await self._task).close()


class Sandbox:
    """One sandbox; see the module."""

    def __init__(self, context: Context, folder: Path, record: Record) -> None:
        self.context = context
        self.folder = folder
        self.record = record
        self.link: GuestLink | None = None
        self._vm: Vm | None = None
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
            sequence=self._sequence,
        )

    def holding(self) -> Holding:
        """What it was promised of the host."""
        state, vm = self.record.state, self._vm
        return Holding(
            name=self.record.sandbox_id,
            shape=self.record.shape,
            overhead_mib=self.context.driver.overhead_mib(self.record.shape),
            folder=self.folder,
            pid=0 if vm is None else vm.pid,
            has_memory=vm is not None or state in IN_HAND or state in (State.RUNNING, State.PAUSED),
        )

    def _shown(self) -> State:
        return IN_HAND.get(self.record.state) or State(self.record.state)

    # -- verbs

    async def create(self) -> Observed:
        """Restores the template's baked snapshot and gives it its identity. Raises `HatchwayError`; the record then is `failed`."""
        if self.record.state == State.RUNNING:
            return self.observed()
        return await self.do(Verb.CREATE, self._create)

    async def start(self) -> Observed:
        """Cold boot on the kept disk."""
        return await self.do(Verb.START, self._start)

    async def stop(self, reason: str, grace_s: float, cause: Cause | None = None) -> Observed:
        """Powers the guest off; kills it after `grace_s` seconds. The disk stays."""
        return await self.do(Verb.STOP, lambda: self._stop(reason, grace_s, cause))

    async def pause(self) -> Observed:
        """Stops the virtual CPUs."""
        return await self.do(Verb.PAUSE, self._pause)

    async def resume(self) -> Observed:
        """Lets the virtual CPUs go on, with the clock set."""
        return await self.do(Verb.RESUME, self._resume)

    async def delete(self) -> Observed:
        """Ends and removes everything, whatever is going on. Succeeds from every state."""
        if self._verb is not Verb.DELETE and self._task is not None and not self._task.done():
            self._deleting = True
            self._task.cancel()
            await asyncio.wait([self._task])
        return await self.do(Verb.DELETE, self._delete)

    # -- after a restart of the node

    async def adopt(self, vm_is_known: bool) -> None:
        """Finds out what became of the sandbox while no node was there, and goes on with it. Verbs wait for it, a deletion ends it."""
        self._verb = None
        task = self._task = asyncio.get_running_loop().create_task(
            self._guarded(lambda: self._adopt(vm_is_known)), name=f"adopt {self.record.sandbox_id}"
        )
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: adoption failed: %s", self.record.sandbox_id, error)

    async def _adopt(self, vm_is_known: bool) -> None:
        record = self.record
        if record.host_boot_id != self.context.host_boot_id:
            if record.state in (State.RUNNING, State.PAUSED, "stopping", "starting"):
                self.ended_as(State.STOPPED, Cause.HOST_REBOOT, "The host was restarted.")
            elif record.state == "restoring":
                self.ended_as(State.SUSPENDED, None, "")
            elif record.state == "rolling_back":
                self.ended_as(State.FAILED, Cause.OPERATION_FAILED, _HALF_ROLLED_BACK)
            elif record.state == "creating":
                self.ended_as(
                    State.FAILED, Cause.OPERATION_FAILED, "The host was restarted while the sandbox was being created."
                )
        elif record.state in (State.RUNNING, State.PAUSED):
            await self._adopt_vm(vm_is_known)
        elif (
            record.state in IN_HAND or vm_is_known
        ):  # a machine beside a stable state: its end was told before it was cleared
            await self.context.launcher.kill_vm(record.sandbox_id)
            await self.context.launcher.forget_vm(record.sandbox_id)
            if record.state == "creating":
                self.ended_as(
                    State.FAILED, Cause.OPERATION_FAILED, "The node was restarted while the sandbox was being created."
                )
            elif record.state == "starting":
                self.ended_as(State.STOPPED, None, "The node was restarted while the sandbox was being started.")
            elif record.state == "rolling_back":
                self.ended_as(State.FAILED, Cause.OPERATION_FAILED, _HALF_ROLLED_BACK)
            elif record.state == "restoring":  # nothing was written to its disk before the record said `running`
                self.ended_as(State.SUSPENDED, None, "")
            elif record.state == "stopping":
                self.ended_as(State.STOPPED, Cause(record.cause) if record.cause else None, record.reason)
        if record.state == "deleting":
            await self._delete()

    async def _adopt_vm(self, vm_is_known: bool) -> None:
        try:
            vm, info = await self._found_vm(vm_is_known)
        except VmmDied as error:
            self._vm_lost(error.status)
            return
        except (HatchwayError, VmmError, OSError) as error:
            self._vm_lost(None, f"The node could not take it over after a restart: {explained(error).cause}")
            return
        if info.status == "ended":
            return  # the watcher tells it
        if info.status == "paused" and not await self._let_go_on(vm):
            self._save(State.PAUSED)
            return
        try:
            link = self.link = await connect(vm.agent_socket, fresh=False, vm_ended=vm.ended, within=BOOT_WITHIN_S)
            await link.setup(time_ns=time.time_ns())  # it may have been paused when the node died
            await link.thaw()  # or frozen, for a snapshot or a suspension that did not end
        except LinkLost as error:
            if not vm.ended.is_set():
                self.unwatch()
                self._vm_lost(None, f"Its agent did not answer after a restart of the node: {error}")
            return
        except GuestError as error:
            log.warning("%s: its clock could not be set: %s", self.record.sandbox_id, error)
        self.check_alive(vm)
        self._save(State.RUNNING)
        await self.context.sessions.link_up(self.record.sandbox_id, link)

    async def _let_go_on(self, vm: Vm) -> bool:
        """Resumes a machine that nobody asked to be paused: a node that died in the middle of a copy of it left it so. False: it stays."""
        if self.record.state != State.RUNNING:
            return False
        try:
            await vm.resume()
        except VmmError as error:
            log.warning("%s: it is paused and cannot be resumed: %s", self.record.sandbox_id, error)
            return False
        return True

    async def _found_vm(self, vm_is_known: bool) -> tuple[Vm, VmInfo]:
        """The VM that runs, taken over, and what it is. A host that is busy is no reason to give it up at once."""
        if not vm_is_known:
            raise VmmDied("The launcher knows no such VM.")
        until = time.monotonic() + ADOPT_WITHIN_S
        while True:
            try:
                if self._vm is None:
                    self.take(await self.context.driver.adopt(self.vm_spec()))
                assert self._vm is not None
                info = await self._vm.info()
                if info.status == "ended" or "unanswered" not in info.details:
                    return self._vm, info
                raise VmmTimeout(str(info.details["unanswered"]))
            except (VmmDied, WrongGeneration):
                raise
            except VmmError as error:
                if time.monotonic() > until:
                    raise
                log.warning("%s: not taken over yet: %s", self.record.sandbox_id, error)
            await asyncio.sleep(ADOPT_AGAIN_S)

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
        if self._vm is not None:
            await self._vm.close()

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

    async def cause_of(self, error: BaseException) -> Cause:
        """Why a machine did not come up: it died on the way, which its agent's silence may tell before its end is seen."""
        vm, status = self._vm, None
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

    async def _create(self) -> None:
        if self.record.state == State.DELETED:
            raise Gone("sandbox_deleted", "The sandbox was deleted meanwhile.", "Create a new one.")
        phases = Phases()
        try:
            baked = await self.context.baker.baked(self._release(), self.record.shape, self.progress)
            phases.done("bake")
            async with self.context.starts.turn():
                phases.done("turn")
                await self._restore(baked, phases)
        except BaseException as error:
            cause = await self.cause_of(error)
            await self.clear_vm()
            if not isinstance(error, asyncio.CancelledError):
                self.ended_as(State.FAILED, cause, explained(error).cause)
            raise
        self.phases = phases.ms

    async def _restore(self, baked: Baked | None, phases: Phases) -> None:
        """The machine of a bake, or a cold boot where there is none that can be used."""
        self.save_in_hand("creating", durable=False)
        phases.done("record")
        if baked is None:
            await self._boot_cold(phases)
            return
        boot_id = new_boot_id()
        greeting = Greeting(self.setup(boot_id), fresh=True, within=RESTORE_WITHIN_S)
        try:
            vm = await self.context.driver.restore(baked, self.vm_spec(), greeting.begin)
        except SnapshotMismatch as error:
            await greeting.give_up()
            log.warning("%s: %s; booting cold instead", self.record.sandbox_id, error)
            await self.context.baker.discard(baked)
            await self.context.launcher.kill_vm(self.record.sandbox_id)
            await self.context.launcher.forget_vm(self.record.sandbox_id)
            await self._boot_cold(phases)
            return
        except BaseException:
            await greeting.give_up()
            raise
        self.take(vm)
        phases.done("restore")
        await self.bring_up(vm, phases, greeting, grow_from=baked.shape.disk_mib, boot_id=boot_id)

    async def _boot_cold(self, phases: Phases) -> None:
        vm = await self.context.driver.start(self.vm_spec())
        self.take(vm)
        phases.done("start")
        await self.bring_up(vm, phases, grow_from=0)

    async def _start(self) -> None:
        if self.record.state == State.RUNNING:
            return
        self.require(Verb.START)
        await self.boot("starting")

    async def boot(self, in_hand: str) -> None:
        """Cold boot on the disk that is there; `in_hand` is what the record says meanwhile. Part of a verb; what fails leaves it `failed`."""
        phases = Phases()
        async with self.context.starts.turn():
            self.save_in_hand(in_hand)
            try:
                await self._boot_cold(phases)
            except BaseException as error:
                cause = await self.cause_of(error)
                await self.clear_vm()
                if isinstance(error, asyncio.CancelledError):
                    self._save(State.STOPPED)
                else:
                    self.ended_as(State.FAILED, cause, explained(error).cause)
                raise
        self.phases = phases.ms

    async def bring_up(
        self,
        vm: Vm,
        phases: Phases,
        greeting: "Greeting | None" = None,
        *,
        grow_from: int | None = None,
        thaw: bool = False,
        boot_id: str | None = None,
    ) -> None:
        """From a machine that runs to a sandbox that is ready; only then the record says `running`.

        `grow_from` is the size in MiB of the file system that the guest began with, 0 where it is not known, None where it fits.
        With `thaw` the guest's file system may be frozen, and is let go on once the record is written. `boot_id` is what the guest was given
        in place of its kernel's.
        """
        record = self.record
        if greeting is None:
            greeting = Greeting(self.setup(), fresh=False, within=BOOT_WITHIN_S)
            greeting.begin(vm)
        elif not greeting.begun:  # the machine of an attempt before this one, which the driver found running
            greeting.begin(vm)
        link = self.link = await greeting.answered()
        phases.done("agent")
        if grow_from is not None and record.shape.disk_mib > grow_from:
            async with asyncio.timeout(RESIZE_WITHIN_S):
                if grow_from:
                    await vm.resize_disk(record.shape.disk_mib)
                await link.resize_disk()
            phases.done("disk")
        await link.setup(time_ns=time.time_ns())
        record.boot_id = boot_id or link.hello.boot_id
        record.isolation = self.context.driver.isolation
        record.cause, record.reason = None, ""
        self.check_alive(vm)  # the watcher left it to us; no await between here and the record
        self.write(str(State.RUNNING))  # what cannot be recorded would not outlive the next start of the node
        if thaw:
            # Nobody waits for it: what is asked of the guest from now on comes behind it, and it would thaw by itself.
            self.chore(link.thaw())
        self.publish()
        phases.done("ready")
        await self.context.sessions.link_up(record.sandbox_id, link)

    async def _stop(self, reason: str, grace_s: float, cause: Cause | None) -> None:
        if self.record.state == State.STOPPED:
            return
        self.require(Verb.STOP)
        vm = self._vm
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
        self.record.stored_bytes = None
        self.ended_as(State.STOPPED, cause, reason)
        await asyncio.to_thread(shutil.rmtree, self.folder / SUSPENDED, ignore_errors=True)

    async def _ask_to_shut_down(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.1, min(grace_s, SHUTDOWN_WITHIN_S))):
                if self.link is None and self._vm is not None:
                    self.link = await connect(
                        self._vm.agent_socket, fresh=False, vm_ended=self._vm.ended, within=grace_s
                    )
                if self.link is not None:
                    await self.link.shutdown()
        except (LinkLost, GuestError, TimeoutError) as error:
            log.info("%s: the guest did not accept the shutdown: %s", self.record.sandbox_id, error)

    async def _pause(self) -> None:
        if self.record.state == State.PAUSED:
            return
        self.require(Verb.PAUSE)
        vm = self.require_vm()
        try:
            await vm.pause()
            self.check_alive(vm)
        except VmmError:
            await self.settle(vm)
            raise
        if self.link is not None:
            self.link.paused(True)
        self._save(State.PAUSED)

    async def _resume(self) -> None:
        if self.record.state == State.RUNNING:
            return
        self.require(Verb.RESUME)
        vm = self.require_vm()
        try:
            await vm.resume()
            await self.wake_agent(vm)
            self.check_alive(vm)
        except (VmmError, LinkLost, GuestError, OSError, TimeoutError):
            with contextlib.suppress(VmmError):
                await vm.pause()  # it is not ready: it stays what it was
            await self.settle(vm)
            link, self.link = self.link, None
            if link is not None:
                await link.close()  # the next attempt makes it anew
            raise
        self._save(State.RUNNING)

    async def wake_agent(self, vm: Vm) -> None:
        """After the virtual CPUs were let go on: the agent is asked again, and gets clock and entropy. Raises `LinkLost`, `GuestError`."""
        link = self.link
        if link is None:
            link = self.link = await connect(vm.agent_socket, fresh=False, vm_ended=vm.ended, within=RESTORE_WITHIN_S)
            await self.context.sessions.link_up(self.record.sandbox_id, link)
        else:
            link.paused(False)
        await link.setup(time_ns=time.time_ns(), entropy=os.urandom(256))

    async def settle(self, vm: Vm) -> None:
        """After a pause or resume that failed: the state is what the machine says, not what was wanted."""
        info = await vm.info()
        if info.status == "ended" or vm.ended.is_set() or "unanswered" in info.details:
            return  # the watcher tells it; or nobody knows, and what was seen last stays
        if self.link is not None:
            self.link.paused(info.status == "paused")
        state = State.PAUSED if info.status == "paused" else State.RUNNING
        if self.record.state != state:
            self._save(state)

    def require_vm(self) -> Vm:
        """The machine. Raises `VmmDied` where there is none to be asked."""
        if self._vm is None:
            raise VmmDied("The node has no connection to the virtual machine.")
        return self._vm

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
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
        self._forget_late()
        self.record.state, self.record.cause, self.record.reason = State.DELETED, None, ""
        self.publish()
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

    def setup(self, boot_id: str | None = None) -> Setup:
        """What the guest is given before the sandbox is reported as running.

        `boot_id` is for one that came from another's memory: its own in place of the kernel's, and host keys of its own.
        """
        record = self.record
        return Setup(
            entropy=os.urandom(256),
            hostname=record.hostname,
            machine_id=record.machine_id,
            env=record.env,
            time_ns=time.time_ns(),
            boot_id=boot_id,
            renew_keys=boot_id is not None,
        )

    def _release(self) -> Release:
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
            boot=self._release().boot_files(),
            folder=self.folder,
            network=self.context.network,
        )

    def take(self, vm: Vm) -> None:
        """Has a machine of its own from now on, and watches it."""
        self._vm = vm
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
            self._vm_lost((await vm.info()).exit)

    def _vm_lost(self, status: ExitStatus | None, why: str = "") -> None:
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
        link, self.link = self.link, None
        vm, self._vm = self._vm, None
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
        self._save(state)

    def save_in_hand(self, state: str, *, durable: bool = True) -> None:
        """Records what is about to be done (`IN_HAND`). Raises `OSError`."""
        self.record.host_boot_id = self.context.host_boot_id
        self.write(state, durable=durable)

    def _note_in_hand(self, state: str) -> None:
        """Like `_save_in_hand`, for what frees what the host lacks: a full disk does not stop it."""
        try:
            self.save_in_hand(state)
        except OSError as error:
            log.warning("%s: the record could not be written: %s", self.record.sandbox_id, error)
            self.record.state = state

    def _save(self, state: State) -> None:
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
                if error.errno not in FULL or state == "creating" or not self.context.ballast.give():
                    raise
        self.record.state = state

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
