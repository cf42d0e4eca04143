"""Wakes sandboxes for traffic: a node says that a client's request waits, and is told when it waits in vain."""

import asyncio
import logging

from hatchway.control.engine import Engine
from hatchway.control.nodes import NodeLink, quietly
from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.domain.lifecycle import VERBS, State, Verb
from hatchway.storage import automatic, operations, sandboxes
from hatchway.storage.database import Database
from hatchway.storage.rows import OperationRow
from hatchway.wire.node import Empty, StayRequest

WAKE_WITHIN_S = 120.0
LOOK_AGAIN_S = 0.2
"""An operation that another control process executes is not waited for but looked at."""
STAY_WITHIN_S = 5.0
MAX_WAKES = 1_000

log = logging.getLogger(__name__)


class Wakes:
    """At most one wake per sandbox, however many requests and nodes ask for it."""

    def __init__(self, database: Database, engine: Engine) -> None:
        self._database = database
        self._engine = engine
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def wanted(self, link: NodeLink, sandbox_id: str) -> None:
        """A node has traffic for a sandbox that does not run."""
        if sandbox_id in self._tasks or len(self._tasks) >= MAX_WAKES:
            return  # the node asks again for as long as a request waits
        task = asyncio.get_running_loop().create_task(self._wake(link, sandbox_id), name=f"wake {sandbox_id}")
        self._tasks[sandbox_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(sandbox_id, None))

    async def close(self) -> None:
        """Leaves it to the next process."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wake(self, link: NodeLink, sandbox_id: str) -> None:
        error: dict[str, str] | None = None
        try:
            async with asyncio.timeout(WAKE_WITHIN_S):
                woken, error = await self._until_decided(link, sandbox_id)
        except (Unavailable, TimeoutError) as failed:
            log.warning("%s was not woken: %s", sandbox_id, failed)
            return  # nothing is decided by that: the node asks again
        except HatchwayError as refused:
            woken, error = False, {"code": refused.code, "cause": refused.cause, "remedy": refused.remedy}
        if not woken:
            request = StayRequest(sandbox_id=sandbox_id, error=error)
            await quietly(link.call("sandbox.stay", request, Empty, within=STAY_WITHIN_S))

    async def _until_decided(self, link: NodeLink, sandbox_id: str) -> tuple[bool, dict[str, str] | None]:
        """Whether it runs; and where its wake failed, why."""
        mine: str | None = None
        while True:
            row = await self._database.read(sandboxes.find, sandbox_id)
            if row is None or row.node_id != link.node_id or not row.auto_wake:
                return False, None
            if row.operation_id is not None:
                if await self._engine.wait(row.operation_id, WAKE_WITHIN_S) is None:
                    await asyncio.sleep(LOOK_AGAIN_S)
                continue
            if row.state is State.RUNNING:
                return True, None
            if mine is not None:
                ended = await self._database.read(operations.find, mine)
                return False, _said(ended)
            if row.state not in VERBS[Verb.WAKE].sources:
                return False, None
            accepted = await self._database.write(automatic.wake, sandbox_id)
            if accepted is not None:
                mine = accepted.operation.id
                self._engine.submit(accepted.operation, accepted.sandbox, accepted.preempted)


def _said(operation: OperationRow | None) -> dict[str, str] | None:
    if operation is None or operation.error is None:
        return None
    return {name: str(operation.error.get(name, "")) for name in ("code", "cause", "remedy")}
