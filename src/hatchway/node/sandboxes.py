"""All sandboxes of this node: found again after a restart, made, and looked up."""

import asyncio
import logging
import shutil
from dataclasses import replace

from hatchway.domain.errors import Conflict, NotFound, Unprocessable
from hatchway.domain.lifecycle import Cause, State
from hatchway.node import record as records
from hatchway.node.capacity import Holding
from hatchway.node.context import Context
from hatchway.node.faults import explained
from hatchway.node.guest.seam import GuestLink
from hatchway.node.sandbox import Sandbox, new_record
from hatchway.wire.node import Observed, SandboxSpec

ADOPT_WITHIN_S = 5.0
"""How long the node's start waits for what it finds; a guest that does not answer is waited for while the others are served."""

log = logging.getLogger(__name__)


class Sandboxes:
    """The node's sandboxes by id."""

    def __init__(self, context: Context) -> None:
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
        vms = {vm.sandbox_id: vm for vm in await self._context.launcher.list_vms()}
        for folder, record in records.read_all(self._context.root):
            if record is None and folder.name in vms:  # what runs is never taken for nothing
                log.error("%s: it has a VM and no record", folder)
                continue
            if record is None:  # a creation that had done nothing yet
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                continue
            sandbox = self._sandboxes[record.sandbox_id] = Sandbox(self._context, folder, record)
            vm = vms.pop(record.sandbox_id, None)
            task = asyncio.get_running_loop().create_task(self._adopt(sandbox, vm is not None))
            self._adopting.add(task)
            task.add_done_callback(self._adopting.discard)
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
        await sandbox.adopt(vm_is_known)
        record = sandbox.record
        if record.state not in (State.RUNNING, State.PAUSED):
            # What ran in it ended while nobody was there to say so.
            self._context.sessions.sandbox_lost(record.sandbox_id, record.reason or "The sandbox was stopped.")

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

    async def create(self, spec: SandboxSpec) -> Observed:
        """Makes a sandbox; asked again it joins or answers what became of it, and tries again what failed."""
        sandbox = self._sandboxes.get(spec.sandbox_id)
        while sandbox is not None:
            self.get(spec.sandbox_id, spec.generation)
            if not (sandbox.record.state == State.FAILED and sandbox.record.boot_id is None):
                break
            await sandbox.delete()  # it never was: nothing of it can be kept
            sandbox = self._sandboxes.get(spec.sandbox_id)  # another one who asked may have begun it anew
        if sandbox is None:
            self._admit(spec)
            record = new_record(spec, self._context.host_boot_id)
            sandbox = Sandbox(self._context, self._context.root / spec.sandbox_id, record)
            self._sandboxes[spec.sandbox_id] = sandbox
        if sandbox.record.boot_id is not None and sandbox.record.state in set(State):
            return sandbox.observed()  # it was made: a creation would take its disk from it
        return await sandbox.create()

    async def start(self, sandbox: Sandbox) -> Observed:
        """Cold boot. Raises `HostExhausted` where the host has no room for it now."""
        name = sandbox.record.sandbox_id
        if not sandbox.holding().has_memory and name not in self._starting:
            self._admit_start(sandbox)
        self._starting[name] = self._starting.get(name, 0) + 1
        try:
            return await sandbox.start()
        finally:
            self._starting[name] -= 1
            if not self._starting[name]:
                del self._starting[name]

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
