"""Keeps what leaves sandboxes true: tells nodes the policy of every sandbox that runs and whose node has not said that it holds.

What each has is read from rows alone, at the moment in which it is told. So a change that got lost, with this process, a node or a
gateway, is told again; and two control processes that tell the same do no harm, because a node never goes back to an older revision.
"""

import asyncio
import logging
import time

from hatchway.control.nodes import NodeLink, Nodes
from hatchway.domain.errors import HatchwayError
from hatchway.storage import policies
from hatchway.storage.database import Connection, Database
from hatchway.storage.rows import SandboxRow
from hatchway.wire.egress import EgressSpec, EgressState
from hatchway.wire.node import EgressChange, Observed

EVERY_S = 5.0
"""How often it is looked without anybody having said that something changed."""
RETRY_S = 2.0
"""After this a sandbox is told again whose node could not do it."""
TELL_WITHIN_S = 10.0
AT_ONCE = 16
PAGE = 256

log = logging.getLogger(__name__)


class PolicyKeeper:
    """See the module. `look` says that something changed."""

    def __init__(self, database: Database, nodes: Nodes) -> None:
        self._database = database
        self._nodes = nodes
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._retry_at: dict[str, float] = {}
        """Of sandboxes that could not be told: when they are told again (monotonic)."""
        self._refused: dict[str, int] = {}
        """Of sandboxes whose gateway refuses their policy: the revision; it is told again with the next pass that nobody asked for."""

    def start(self) -> None:
        """Begins."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="policies")

    async def close(self) -> None:
        """Ends; what was not told is told by the next process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """A policy changed, or a sandbox began to run, or a node was connected."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            asked = self._changed.is_set()
            self._changed.clear()
            if not asked:
                self._refused.clear()
            for result in await asyncio.gather(
                *(self._tell_node(link) for link in self._nodes.ready()), return_exceptions=True
            ):
                if isinstance(result, HatchwayError | TimeoutError):
                    log.warning("policies not told yet: %s", result)
                elif isinstance(result, Exception):
                    log.error("policies not told", exc_info=result)
            now = time.monotonic()
            # One that was due and is not there any more has been told, or is gone.
            self._retry_at = {name: at for name, at in self._retry_at.items() if at > now}
            wait = min([EVERY_S, *(max(0.1, at - now) for at in self._retry_at.values())])
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _tell_node(self, link: NodeLink) -> None:
        if link.node_id is None:
            return
        after = ""
        while True:
            page = await self._database.read(_untold, link.node_id, after)
            await self._tell(link, page)
            if len(page) < PAGE:
                return
            after = page[-1][0].id

    async def _tell(self, link: NodeLink, page: list[tuple[SandboxRow, EgressSpec]]) -> None:
        now = time.monotonic()
        due = [one for one in page if self._is_due(one[0], now)]
        if not due:
            return
        turns = asyncio.Semaphore(AT_ONCE)

        async def tell(row: SandboxRow, spec: EgressSpec) -> tuple[str, int, EgressState] | None:
            async with turns:
                return await self._tell_one(link, row, spec)

        answers = await asyncio.gather(*(tell(row, spec) for row, spec in due))
        told = [one for one in answers if one is not None]
        if told:
            await self._database.write(policies.told, told)

    def _is_due(self, row: SandboxRow, now: float) -> bool:
        if self._refused.get(row.id) == row.policy_revision:
            return False
        return self._retry_at.get(row.id, 0.0) <= now

    async def _tell_one(self, link: NodeLink, row: SandboxRow, spec: EgressSpec) -> tuple[str, int, EgressState] | None:
        change = EgressChange(sandbox_id=row.id, generation=row.generation, egress=spec)
        self._retry_at.pop(row.id, None)
        try:
            seen = await link.call("sandbox.egress", change, Observed, within=TELL_WITHIN_S)
        except (HatchwayError, TimeoutError) as error:
            log.warning("%s was not told revision %d of its policy yet: %s", row.id, spec.revision, error)
            if link.connected:  # else it is told when it is connected again
                self._retry_at[row.id] = time.monotonic() + RETRY_S
            return None
        if seen.egress is None:
            return None
        if seen.egress.revision < spec.revision:
            self._refused[row.id] = spec.revision
        return row.id, row.generation, seen.egress


def _untold(connection: Connection, node_id: str, after: str) -> list[tuple[SandboxRow, EgressSpec]]:
    found = policies.untold(connection, node_id, PAGE, after)
    return [(row, policies.effective_of(connection, row)) for row in found]
