"""Keeps what leaves sandboxes true: tells nodes the policy of every sandbox that runs and whose node has not said that it holds.

What each has is read from rows alone, at the moment in which it is told. So a change that got lost, with this process, a node or a
gateway, is told again; and two control processes that tell the same do no harm, because a node never goes back to an older revision.
Every node is told by itself, and every sandbox: one that does not answer is waited for by nobody else, and asked more and more seldom.
"""

import asyncio
import logging
import time
from functools import partial

from hatchway.control.nodes import NodeLink, Nodes
from hatchway.domain.errors import HatchwayError
from hatchway.storage import policies
from hatchway.storage.database import Connection, Database
from hatchway.storage.rows import SandboxRow
from hatchway.wire.egress import EgressSpec, EgressState
from hatchway.wire.node import EgressChange, Observed

EVERY_S = 5.0
"""How often it is looked without anybody having said that something changed."""
RETRY_S, RETRY_AT_MOST_S = 2.0, 60.0
"""After this a sandbox is told again whose node could not do it; twice as long each time."""
TELL_WITHIN_S = 10.0
AT_ONCE = 64
"""So many of one node's sandboxes are told at once."""
PAGE = 256

log = logging.getLogger(__name__)


class PolicyKeeper:
    """See the module. `look` says that something changed."""

    def __init__(self, database: Database, nodes: Nodes) -> None:
        self._tellers = tuple(_Teller(database, link) for link in nodes.links)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(one.run(), name=f"policies of {one.link.address}") for one in self._tellers]

    async def close(self) -> None:
        """Ends; what was not told is told by the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """A policy changed, or a sandbox began to run, or a node was connected."""
        for one in self._tellers:
            one.look()


class _Teller:
    """Tells one node."""

    def __init__(self, database: Database, link: NodeLink) -> None:
        self.link = link
        self._database = database
        self._changed = asyncio.Event()
        self._looks = 0
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._telling: dict[str, asyncio.Task[None]] = {}
        """By sandbox: what is told now."""
        self._told: list[tuple[str, int, EgressState]] = []
        """What was answered, and is not stored yet."""
        self._storing = asyncio.Lock()
        self._failed: dict[str, tuple[int, float]] = {}
        """Sandboxes that could not be told: how often in a row, and when they are told again (monotonic)."""
        self._refused: dict[str, int] = {}
        """Of sandboxes whose gateway refuses their policy: the revision; it is told again with the next pass that nobody asked for."""

    def look(self) -> None:
        """Something changed."""
        self._looks += 1
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                asked = self._changed.is_set()
                self._changed.clear()
                if not asked:
                    self._refused.clear()
                try:
                    await self._pass()
                except (HatchwayError, TimeoutError) as error:
                    log.warning("policies not told yet: %s", error)
                except Exception:
                    log.exception("policies not told")
                now = time.monotonic()
                due = [at for _, at in self._failed.values() if at > now]
                try:
                    async with asyncio.timeout(min([EVERY_S, *(max(0.1, at - now) for at in due)])):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            for task in self._telling.values():
                task.cancel()
            await asyncio.gather(*self._telling.values(), return_exceptions=True)

    async def _pass(self) -> None:
        """Begins to tell whoever is due; waits for turns, and for no answer."""
        if self.link.node_id is None or not self.link.connected:
            return
        after, seen = "", set[str]()
        while True:
            page = await self._database.read(_untold, self.link.node_id, after)
            for row, spec in page:
                seen.add(row.id)
                if self._is_due(row):
                    await self._turns.acquire()
                    task = asyncio.get_running_loop().create_task(self._tell(row, spec), name=f"policy of {row.id}")
                    self._telling[row.id] = task
                    task.add_done_callback(partial(self._ended, row.id))
            if len(page) < PAGE:
                break
            after = page[-1][0].id
        # Whoever is not untold any more has been told, or is gone.
        self._failed = {name: failed for name, failed in self._failed.items() if name in seen}

    def _is_due(self, row: SandboxRow) -> bool:
        if row.id in self._telling or self._refused.get(row.id) == row.policy_revision:
            return False
        return self._failed.get(row.id, (0, 0.0))[1] <= time.monotonic()

    def _ended(self, sandbox_id: str, _: asyncio.Task[None]) -> None:
        del self._telling[sandbox_id]
        self._turns.release()

    async def _tell(self, row: SandboxRow, spec: EgressSpec) -> None:
        looks = self._looks
        change = EgressChange(sandbox_id=row.id, generation=row.generation, egress=spec)
        try:
            seen = await self.link.call("sandbox.egress", change, Observed, within=TELL_WITHIN_S)
            self._failed.pop(row.id, None)
            if seen.egress is not None:
                if seen.egress.revision < spec.revision:
                    self._refused[row.id] = spec.revision
                await self._store((row.id, row.generation, seen.egress))
        except (HatchwayError, TimeoutError) as error:
            log.warning("%s was not told revision %d of its policy yet: %s", row.id, spec.revision, error)
            if self.link.connected:  # else it is told when it is connected again
                times, _ = self._failed.get(row.id, (0, 0.0))
                pause = min(RETRY_S * 2.0 ** min(times, 16), RETRY_AT_MOST_S)
                self._failed[row.id] = times + 1, time.monotonic() + pause
        except Exception:
            log.exception("%s was not told revision %d of its policy", row.id, spec.revision)
        if self._looks != looks:  # what changed meanwhile was passed over
            self._changed.set()

    async def _store(self, told: tuple[str, int, EgressState]) -> None:
        """Stores what was answered; together with what others were answered while it waited for its turn."""
        self._told.append(told)
        async with self._storing:
            all_told, self._told = self._told, []
            if all_told:
                await self._database.write(policies.told, all_told)


def _untold(connection: Connection, node_id: str, after: str) -> list[tuple[SandboxRow, EgressSpec]]:
    found = policies.untold(connection, node_id, PAGE, after)
    return [(row, policies.effective_of(connection, row)) for row in found]
