"""The timer of the control plane: does what deadlines, schedules of snapshots and the ages of projects ask for.

It keeps nothing in memory. What is due is found in the database, and every step looks once more in the transaction that takes it,
so that a restart forgets nothing, and several control processes beside each other do nothing twice.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hatchway.control.engine import Engine
from hatchway.control.nodes import Nodes, quietly
from hatchway.domain import lifetimes as rules
from hatchway.domain.errors import HatchwayError
from hatchway.domain.lifetimes import Why
from hatchway.storage import automatic, exports, lifetimes
from hatchway.storage.accepting import Accepted
from hatchway.storage.database import Database
from hatchway.storage.rows import SandboxRow
from hatchway.wire.node import Activities, ActivityRequest, Empty, ExportRef

EVERY_S = 0.5
SWEEP_EVERY_S = 20.0
MAX_DUE = 200
"""Sandboxes that are looked at in one turn."""
ASK_WITHIN_S = 5.0
LOOK_AGAIN_S = 5.0
"""After this it is looked again whether a sandbox is idle whose node did not say so."""

log = logging.getLogger(__name__)


class Lifetimes:
    """See the module. `now` is the clock: Unix seconds."""

    def __init__(
        self, database: Database, nodes: Nodes, engine: Engine, *, now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._nodes = nodes
        self._engine = engine
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._swept_at = 0.0

    def start(self) -> None:
        """Begins."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="lifetimes")

    async def close(self) -> None:
        """Ends; what is due stays due."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._step("deadlines", self.turn())
            if self._now() - self._swept_at >= SWEEP_EVERY_S:
                self._swept_at = self._now()
                await self._step("retention", self.sweep())
            await asyncio.sleep(EVERY_S)

    async def _step(self, what: str, work: Awaitable[None]) -> None:
        try:
            await work
        except (HatchwayError, TimeoutError) as error:
            log.warning("%s not finished: %s", what, error)
        except Exception:  # a timer that ended would let every sandbox run for good
            log.exception("%s failed", what)

    async def turn(self) -> None:
        """Does what is due now."""
        now = self._now()
        due = await self._database.read(lifetimes.due, now, MAX_DUE)
        why = {row.id: rules.why_due(lifetimes.of(row), now) for row in due}
        asked = await self._used_since([row for row in due if why[row.id] is Why.IDLE])
        for row in due:
            reason = why[row.id]
            if reason is Why.IDLE:
                if row.id not in asked:
                    await self._database.write(lifetimes.look_again, row.id, now + LOOK_AGAIN_S)
                    continue
                if asked[row.id] > (row.active_at or 0.0):
                    await self._database.write(lifetimes.note_used, row.id, asked[row.id])
            if reason is not None:
                await self._step(f"the timeout of {row.id}", self._take(automatic.expire, row.id, now))
            else:
                await self._snapshot(row.id, now)

    async def _snapshot(self, sandbox_id: str, now: float) -> None:
        try:
            await self._database.require_room()
            await self._take(automatic.snapshot, sandbox_id, now)
        except HatchwayError as error:
            await self._database.write(automatic.put_off, sandbox_id, now, msgspec.to_builtins(error.as_dict()))

    async def _used_since(self, rows: list[SandboxRow]) -> dict[str, float]:
        """When these were last used, as far as their nodes can be asked. One that is in use now is used until now."""
        used: dict[str, float] = {}
        for node_id in {row.node_id for row in rows}:
            link = self._nodes.find(node_id)
            if link is None:
                continue
            ids = tuple(row.id for row in rows if row.node_id == node_id)
            try:
                answer = await link.call(
                    "sandbox.activity", ActivityRequest(sandbox_ids=ids), Activities, within=ASK_WITHIN_S
                )
            except (HatchwayError, TimeoutError) as error:
                log.warning("node %s does not say what is idle: %s", node_id, error)
                continue
            now = self._now()
            used.update({one.sandbox_id: now if one.busy else now - one.idle_s for one in answer.activities})
        return used

    async def _take(self, step: Callable[..., Accepted | None], *arguments: Any) -> None:
        accepted = await self._database.write(step, *arguments)
        if accepted is not None:
            self._engine.submit(accepted.operation, accepted.sandbox, accepted.preempted)

    async def sweep(self) -> None:
        """Thins the snapshots of schedules, and deletes what is older than its project allows."""
        now = self._now()
        for sandbox_id in await self._database.read(automatic.scheduled):
            await self._database.write(automatic.thin, sandbox_id, now)
        for name, bounds in (await self._database.read(automatic.all_bounds)).items():
            if bounds.suspended_s is not None:
                before = now - bounds.suspended_s
                for one in await self._database.read(automatic.too_old_suspended, name, before, MAX_DUE):
                    await self._take(automatic.delete_suspended, one, before)
            if bounds.snapshot_s is not None:
                while await self._database.write(automatic.delete_snapshots, name, now - bounds.snapshot_s, MAX_DUE):
                    continue
            if bounds.export_s is not None:
                await self._delete_exports(name, now - bounds.export_s)

    async def _delete_exports(self, project: str, before: float) -> None:
        while gone := await self._database.write(exports.delete_older, project, before, MAX_DUE):
            for one in gone:
                link = self._nodes.find(one.node_id)
                if link is not None and link.connected:  # else it removes what is over by itself
                    ref = ExportRef(export_id=one.id)
                    await quietly(link.call("export.delete", ref, Empty, within=ASK_WITHIN_S))
