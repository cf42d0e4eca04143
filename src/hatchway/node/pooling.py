"""Members of pools: made ahead, warmed and paused; then claimed, which gives one its own identity and lets it go on.

A member's record says that it is one (`pooled`) until the claim is recorded, so that a request that comes late, or again, can
never pause what a user has got.
"""

import asyncio
import logging
import os
import time

from hatchway.domain.errors import Conflict
from hatchway.domain.lifecycle import State, Verb
from hatchway.node import pausing
from hatchway.node import record as records
from hatchway.node.greeting import RESTORE_WITHIN_S
from hatchway.node.guest.seam import GuestError, GuestLink, LinkLost, Proc, ProcessState, Spawn
from hatchway.node.phases import Phases
from hatchway.node.sandbox import Sandbox
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.vmm.seam import VmmError
from hatchway.wire.node import Observed, SandboxSpec

WARM_NUMBER = 2**30 - 1
"""Number of the process that warms: the last one that a user's could have."""
WARM = ("/bin/sh", "-c", "/usr/bin/python3 -c 0 2>/dev/null; exit 0")
"""What a first job does most often: a machine that has just been restored does everything a first time, and slowly."""
WARM_WITHIN_S = 20.0

log = logging.getLogger(__name__)


async def prepare(sandboxes: Sandboxes, spec: SandboxSpec) -> Observed:
    """Makes a member and pauses it; asked again it goes on where it was. Raises what `Sandboxes.create` and a pause raise."""
    observed = await sandboxes.create(spec, pooled=True)
    sandbox = sandboxes.get(spec.sandbox_id, spec.generation)
    if observed.state != State.RUNNING or not sandbox.record.pooled:
        return observed
    if sandbox.link is not None:
        await _warm(sandbox.link, spec.sandbox_id)
    return await pausing.pause(sandbox, only_pooled=True)


async def claim(sandbox: Sandbox, spec: SandboxSpec) -> Observed:
    """Gives a paused member its name, environment and a fresh identity, and lets it go on. Asked again it answers what became of it.

    Raises `HatchwayError`; the member is then paused as before, or has ended.
    """
    return await sandbox.do(Verb.RESUME, lambda: _claim(sandbox, spec))


async def _claim(sandbox: Sandbox, spec: SandboxSpec) -> None:
    record = sandbox.record
    env = {"HATCHWAY_SANDBOX_ID": spec.sandbox_id, **spec.env}
    begun = not record.pooled and (record.hostname, record.env) == (spec.hostname, env)
    if begun and record.state == State.RUNNING:
        return
    if not record.pooled and not begun:
        raise Conflict("wrong_state", f"The sandbox is {record.state} and no member of a pool.", "Create a new one.")
    if record.state != State.RUNNING:  # a member whose pause was not reached runs
        sandbox.require(Verb.RESUME)
    phases, vm = Phases(), sandbox.require_vm()
    await sandbox.gateway.begin(spec.egress)
    trust = sandbox.gateway.trust
    record.hostname, record.env, record.pooled = spec.hostname, env, False
    sandbox.write(record.state, durable=False)
    # It is made durable while the machine is brought to go on: the disk takes longer.
    saving = asyncio.ensure_future(asyncio.to_thread(records.flush, sandbox.folder))
    try:
        await sandbox.gateway.resume()  # an attempt that failed before paused it
        await vm.resume()
        phases.done("resume")
        link = await pausing.reach_agent(sandbox, vm)
        await link.setup(
            time_ns=time.time_ns(),
            entropy=os.urandom(256),
            hostname=spec.hostname,
            machine_id=record.machine_id,
            env={**env, **trust.env},
            ca=None if trust.certificate == sandbox.gateway.delivered.certificate else trust.certificate,
        )
        sandbox.gateway.delivered = trust
        phases.done("identity")
        await saving
        sandbox.check_alive(vm)
    except (VmmError, LinkLost, GuestError, OSError, TimeoutError):
        await asyncio.gather(saving, return_exceptions=True)
        await pausing.pause_again(sandbox, vm)
        raise
    sandbox.write(str(State.RUNNING), durable=False)
    sandbox.publish()
    phases.done("record")
    sandbox.phases = phases.ms


async def _warm(link: GuestLink, sandbox_id: str) -> None:
    """Runs a first job; a guest in which it does not run is as good as before."""
    sink = _Nothing()
    spawn = Spawn(number=WARM_NUMBER, key=f"warm-{sandbox_id}", argv=WARM, env={}, user="root", stdin=False)
    try:
        async with asyncio.timeout(WARM_WITHIN_S):
            await link.spawn(spawn, sink)
            await sink.over.wait()
    except (GuestError, LinkLost, TimeoutError) as error:
        log.warning("%s: it was not warmed: %s", sandbox_id, error)
    try:
        async with asyncio.timeout(RESTORE_WITHIN_S):
            await link.close_process(WARM_NUMBER)
    except (GuestError, LinkLost, TimeoutError) as error:
        log.info("%s: what warmed it: %s", sandbox_id, error)


class _Nothing:
    """Takes what a process writes, and keeps none of it."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._taken = [0, 0]

    def stored(self) -> tuple[int, int]:
        """See `ProcessSink`."""
        return self._taken[0], self._taken[1]

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        """See `ProcessSink`."""
        if fd in (1, 2):
            self._taken[fd - 1] = offset + len(data)

    def changed(self, proc: Proc) -> None:
        """See `ProcessSink`."""
        if proc.state is not ProcessState.RUNNING:
            self.over.set()

    def gone(self, reason: str) -> None:
        """See `ProcessSink`."""
        self.over.set()
