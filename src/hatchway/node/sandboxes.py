"""All sandboxes of this node: found again after a restart, made, and looked up."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hatchway.domain.errors import Conflict, HatchwayError, NotFound, Unprocessable
from hatchway.domain.lifecycle import Cause, SnapshotKind, State, Verb
from hatchway.node import adoption, branching, creation, suspension
from hatchway.node import record as records
from hatchway.node import snapshots as snapshotting
from hatchway.node.capacity import Holding
from hatchway.node.context import Context
from hatchway.node.faults import explained
from hatchway.node.guest.seam import GuestLink
from hatchway.node.record import Record
from hatchway.node.sandbox import Sandbox, new_record
from hatchway.node.snapshots import Snapshots
from hatchway.node.waking import ASLEEP
from hatchway.wire.node import Branch, BranchOutcome, EgressSpec, ForkAnswer, Observed, SandboxSpec

ADOPT_WITHIN_S = 5.0
"""How long the node's start waits for what it finds; a guest that does not answer is waited for while the others are served."""

FORKS = ".forks"
"""Below the sandboxes' folder: captures that branches are being made from."""

log = logging.getLogger(__name__)


class Sandboxes:
    """The node's sandboxes by id."""

    def __init__(self, context: Context, snapshots: Snapshots) -> None:
        self.snapshots = snapshots
        self._context = context
        self._sandboxes: dict[str, Sandbox] = {}
        self._starting: dict[str, int] = {}
        """How many wait for the start of a sandbox, by id."""
        self._adopting: set[asyncio.Task[None]] = set()
        self.quarantined: tuple[str, ...] = ()
        """Ids of VMs that run here and of which this node has no record: shown, never killed."""

    async def adopt_all(self) -> None:
        """Finds every sandbox of this node's folder again; called once, before anything else.

        Those whose guests do not answer at once show their last state, and their verbs wait until more is known.
        """
        await self._context.baker.recover()
        await asyncio.to_thread(shutil.rmtree, self._context.root / FORKS, ignore_errors=True)
        await asyncio.to_thread(self.snapshots.load)
        vms = {vm.sandbox_id: vm for vm in await self._context.launcher.list_vms()}
        for folder, record in records.read_all(self._context.root):
            if record is None and folder.name in vms:  # what runs is never taken for nothing
                log.error("%s: it has a VM and no record", folder)
                continue
            if record is None:  # a creation that had done nothing yet
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                continue
            sandbox = self._sandboxes[record.sandbox_id] = Sandbox(self._context, folder, record)
            sandbox.gateway.recall(
                running=record.state in (State.RUNNING, State.PAUSED), paused=record.state == State.PAUSED
            )
            vm = vms.pop(record.sandbox_id, None)
            task = asyncio.get_running_loop().create_task(self._adopt(sandbox, vm is not None))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)
        self._context.gateways.start()
        if self._adopting:
            await asyncio.wait(self._adopting, timeout=ADOPT_WITHIN_S)
        self.quarantined = tuple(sorted(vm.sandbox_id for vm in vms.values() if vm.alive))
        for sandbox_id in self.quarantined:
            log.warning("%s: a VM runs of which there is no record; it is left alone", sandbox_id)
        for sandbox_id in self._context.sessions.sandboxes() - self._sandboxes.keys() - vms.keys():
            await self._context.sessions.sandbox_deleted(sandbox_id)
        for dead in vms.values():
            if not dead.alive:
                await self._context.launcher.forget_vm(dead.sandbox_id)

    async def _adopt(self, sandbox: Sandbox, vm_is_known: bool) -> None:
        await adoption.adopt(sandbox, vm_is_known)
        record = sandbox.record
        if record.state not in (State.RUNNING, State.PAUSED, State.SUSPENDED):
            # What ran in it ended while nobody was there to say so.
            self._context.sessions.sandbox_lost(record.sandbox_id, record.reason or "The sandbox was stopped.")

    def warnings(self) -> tuple[str, ...]:
        """What whoever operates this node should know: what its host lacks, and VMs that are nobody's."""
        strangers = (f"VM {name} runs here without a record; it is left alone" for name in self.quarantined)
        return (*self._context.host_warnings, *strangers)

    def all(self) -> list[Sandbox]:
        """Every sandbox, in no order."""
        return list(self._sandboxes.values())

    def get(self, sandbox_id: str, generation: int | None = None) -> Sandbox:
        """Raises `NotFound("unknown_sandbox")`, and `Conflict("stale_generation")` for an older generation than is here."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise NotFound("unknown_sandbox", "This node has no such sandbox.", "List the sandboxes.")
        if generation is not None and generation < sandbox.record.generation:
            raise Conflict(
                "stale_generation",
                "A newer owner has taken this sandbox over.",
                "Stop the control process that sent this.",
                generation=generation,
            )
        return sandbox

    def link_of(self, sandbox_id: str) -> GuestLink | None:
        """The guest link of a sandbox that is running here, else None."""
        sandbox = self._sandboxes.get(sandbox_id)
        return sandbox.link if sandbox is not None and sandbox.record.state == State.RUNNING else None

    def state_of(self, sandbox_id: str) -> str | None:
        """The state of a sandbox that is here, else None."""
        sandbox = self._sandboxes.get(sandbox_id)
        return None if sandbox is None else sandbox.observed().state

    def project_of(self, sandbox_id: str) -> str | None:
        """The project of a sandbox that is here, else None."""
        sandbox = self._sandboxes.get(sandbox_id)
        return None if sandbox is None else sandbox.record.project

    def is_awake(self, sandbox_id: str) -> bool:
        """Whether it runs, and is about to go on doing so."""
        sandbox = self._sandboxes.get(sandbox_id)
        return sandbox is not None and sandbox.record.state == State.RUNNING and not sandbox.leaving

    def is_asleep(self, sandbox_id: str) -> bool:
        """Whether it does not run, or soon will not, and could be woken."""
        sandbox = self._sandboxes.get(sandbox_id)
        return sandbox is not None and (sandbox.leaving or sandbox.observed().state in ASLEEP)

    async def create(self, spec: SandboxSpec, *, pooled: bool = False) -> Observed:
        """Makes a sandbox; asked again it joins or answers what became of it, and tries again what failed."""
        sandbox = self._sandboxes.get(spec.sandbox_id)
        while sandbox is not None:
            self.get(spec.sandbox_id, spec.generation)
            if sandbox.record.state not in (State.FAILED, State.STOPPED) or sandbox.record.boot_id is not None:
                break
            # It never was, for anybody: nothing of it can be kept. Its disk least, on which a guest may have written what the memory
            # of a baked one knows nothing of.
            await sandbox.delete()
            sandbox = self._sandboxes.get(spec.sandbox_id)  # another one who asked may have begun it anew
        if sandbox is None:
            self._admit(spec)
            record = new_record(spec, self._context.host_boot_id)
            record.pooled = pooled
            sandbox = Sandbox(self._context, self._context.root / spec.sandbox_id, record)
            sandbox.gateway.say(spec.egress)
            self._sandboxes[spec.sandbox_id] = sandbox
        if sandbox.record.boot_id is not None and sandbox.record.state in set(State):
            return sandbox.observed()  # it was made: a creation would take its disk from it
        if spec.snapshot_id is not None:
            return await snapshotting.create(sandbox, self.snapshots, spec.snapshot_id)
        return await creation.create(sandbox)

    def adopt_imported(self, folder: Path, record: Record, egress: EgressSpec | None) -> Sandbox:
        """Knows a sandbox that was imported, from now on."""
        sandbox = self._sandboxes[record.sandbox_id] = Sandbox(self._context, folder, record)
        sandbox.gateway.say(egress)
        sandbox.publish()
        return sandbox

    async def start(self, sandbox: Sandbox) -> Observed:
        """Cold boot. Raises `HostExhausted` where the host has no room for it now."""
        return await self._admitted(sandbox, lambda: creation.start(sandbox))

    async def restore(self, sandbox: Sandbox) -> Observed:
        """Brings a suspended sandbox back, where the host has room for its memory."""
        return await self._admitted(sandbox, lambda: suspension.restore(sandbox))

    async def rollback(self, sandbox: Sandbox, snapshot_id: str) -> Observed:
        """Goes back to a snapshot, where the host has room for what it needs."""
        kept = self.snapshots.get(snapshot_id)
        if kept.kind == SnapshotKind.DISK:
            return await snapshotting.rollback(sandbox, self.snapshots, snapshot_id)
        return await self._admitted(sandbox, lambda: snapshotting.rollback(sandbox, self.snapshots, snapshot_id))

    async def _admitted(self, sandbox: Sandbox, verb: Callable[[], Awaitable[Observed]]) -> Observed:
        name = sandbox.record.sandbox_id
        if not sandbox.holding().has_memory and name not in self._starting:
            self._admit_start(sandbox)
        self._starting[name] = self._starting.get(name, 0) + 1
        try:
            return await verb()
        finally:
            self._starting[name] -= 1
            if not self._starting[name]:
                del self._starting[name]

    async def fork(self, source: Sandbox, wanted: Sequence[Branch]) -> ForkAnswer:
        """Makes branches of a sandbox; asked again, those that are there are answered as they are.

        Raises what kept the source from being captured; what is wrong with single branches is in the answer.
        """
        refused: dict[str, HatchwayError] = {}
        if all(one.sandbox_id in self._sandboxes for one in wanted):
            # Asked again by a control process that does not know how far it is: what is in hand is waited for.
            await source.do(Verb.FORK, _nothing)
            there = (self._sandboxes.get(one.sandbox_id) for one in wanted)
            await asyncio.gather(*(sandbox.quiet() for sandbox in there if sandbox is not None))
        while new := [one for one in wanted if one.sandbox_id not in self._sandboxes and one.sandbox_id not in refused]:
            made: list[Sandbox] = []
            stopped: list[float] = []

            async def body(
                new: Sequence[Branch] = new, made: list[Sandbox] = made, stopped: list[float] = stopped
            ) -> None:
                made += self._begin_branches(source, new, refused)
                if made:
                    stopped.append(await branching.fork(source, made, self._context.root / FORKS))

            await source.do(Verb.FORK, body)
            if made or all(one.sandbox_id in refused for one in new):
                return self._forked(source, wanted, refused, sum(stopped))
        return self._forked(source, wanted, refused, 0.0)

    def _begin_branches(
        self, source: Sandbox, wanted: Sequence[Branch], refused: dict[str, HatchwayError]
    ) -> list[Sandbox]:
        """The branches that this host has room for, known from now on: a deletion finds them."""
        made: list[Sandbox] = []
        for branch in wanted:
            spec = branching.spec_of(source, branch)
            try:
                self._admit(spec)
                sandbox = Sandbox(
                    self._context, self._context.root / spec.sandbox_id, new_record(spec, self._context.host_boot_id)
                )
                sandbox.gateway.say(spec.egress)
                sandbox.save_in_hand("creating", durable=False)
            except (HatchwayError, OSError) as error:
                refused[branch.sandbox_id] = explained(error)
                # Made for a record that was not written, or not surely.
                shutil.rmtree(self._context.root / spec.sandbox_id, ignore_errors=True)
                continue
            self._sandboxes[spec.sandbox_id] = sandbox
            made.append(sandbox)
        return made

    def _forked(
        self, source: Sandbox, wanted: Sequence[Branch], refused: dict[str, HatchwayError], stopped_ms: float
    ) -> ForkAnswer:
        outcomes: list[BranchOutcome] = []
        for branch in wanted:
            sandbox = self._sandboxes.get(branch.sandbox_id)
            error = refused.get(branch.sandbox_id) or (sandbox.failure if sandbox is not None else None)
            if sandbox is not None and sandbox.record.state in set(State) - {State.FAILED}:
                outcomes.append(
                    BranchOutcome(
                        sandbox_id=branch.sandbox_id,
                        observed=sandbox.observed(),
                        sessions=self._context.sessions.branched(branch.sandbox_id),
                    )
                )
            elif error is not None:
                details = {"code": error.code, "cause": error.cause, "remedy": error.remedy}
                outcomes.append(BranchOutcome(sandbox_id=branch.sandbox_id, error=details))
            else:
                cause = "It was deleted meanwhile." if sandbox is None else sandbox.record.reason or "It was not made."
                details = {"code": "branch_failed", "cause": cause, "remedy": "Fork again."}
                outcomes.append(BranchOutcome(sandbox_id=branch.sandbox_id, error=details))
        return ForkAnswer(source=source.observed(), branches=tuple(outcomes), source_stopped_ms=round(stopped_ms, 2))

    def holdings(self) -> list[Holding]:
        """What every sandbox was promised; one whose start waits has its memory already."""
        found = [sandbox.holding() for sandbox in self._sandboxes.values()]
        return [replace(held, has_memory=True) if held.name in self._starting else held for held in found]

    def _admit_start(self, sandbox: Sandbox) -> None:
        shape = sandbox.record.shape
        try:
            self._context.capacity.check_start(shape, self._context.driver.overhead_mib(shape), self.holdings())
        except OSError as error:
            raise explained(error) from error

    def _admit(self, spec: SandboxSpec) -> None:
        isolation = self._context.driver.isolation
        if spec.require_isolation is not None and spec.require_isolation != isolation:
            raise Unprocessable(
                "isolation_unavailable",
                f"This host offers {isolation} isolation, not {spec.require_isolation}.",
                "Leave require_isolation out, or use a host where `hatchway doctor` shows working KVM.",
            )
        try:
            self._context.images.resolve_digest(spec.template_digest)
            overhead = self._context.driver.overhead_mib(spec.shape)
            self._context.capacity.check_create(spec.shape, overhead, self.holdings())
        except OSError as error:
            raise explained(error) from error

    async def drain(self) -> None:
        """Powers every guest off, because the service is about to go down; the disks stay. What waits to be started is not started."""
        reason = "The service was taken down."
        self._context.starts.close()
        results = await asyncio.gather(
            *(
                s.stop(reason, 10.0, Cause.SERVICE_DOWN)
                for s in self.all()
                if s.record.state in (State.RUNNING, State.PAUSED, "creating", "starting")
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(
                result, Conflict
            ):  # a creation that failed or was not begun
                log.error("a sandbox could not be stopped: %s", result)

    async def release(self) -> None:
        """Lets go of every VM without touching it."""
        for task in self._adopting:
            task.cancel()
        await asyncio.gather(*(sandbox.release() for sandbox in self.all()), return_exceptions=True)

    def drop(self, sandbox_id: str) -> None:
        """Forgets a deleted sandbox."""
        self._sandboxes.pop(sandbox_id, None)


async def _nothing() -> None:
    """What is left to do of a verb that is only waited for."""
