"""Keeps pools full: makes members behind the claims, and lets go of those that are not what is wanted any more.

Whatever it does is decided anew in the transaction that does it, from rows alone; several control processes make no member too many.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable

import msgspec

from hatchway.control.engine import Engine
from hatchway.control.nodes import NodeLink, Nodes
from hatchway.domain.errors import HatchwayError, NotFound
from hatchway.domain.lifecycle import State, Verb
from hatchway.storage import pools
from hatchway.storage.database import Database
from hatchway.storage.rows import PoolRow
from hatchway.wire.node import NodeInfo, ResolveTemplate, TemplateRelease

EVERY_S = 1.0
RESOLVE_EVERY_S = 15.0
RESOLVE_WITHIN_S = 10.0
RETRY_S = 15.0
"""After this it is tried again to make a member where the last one could not be made."""
YIELD_AT_MOST_S = 5.0
"""For so long at most the refill waits for creations that users wait for."""
MAX_DROPPED = 16

log = logging.getLogger(__name__)


def pool_key(digest: str, info: NodeInfo) -> str:
    """What a machine was made of: release, machine monitor and node; another one means that members have to be made anew."""
    return f"{digest}/{info.vmm}/{info.version}"[:160]


class PoolKeeper:
    """See the module."""

    def __init__(self, database: Database, nodes: Nodes, engine: Engine) -> None:
        self._database = database
        self._nodes = nodes
        self._engine = engine
        self._changed = asyncio.Event()
        self._resolved_at: dict[tuple[str, str], float] = {}
        self._yielding_since: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="pools")

    async def close(self) -> None:
        """Ends; what is lacking is made by the next process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """A member was claimed, or a pool changed: looks at once."""
        self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                found = await self._database.read(pools.list_all)
            except HatchwayError as error:
                log.warning("pools not read: %s", error)
                found = []
            for row in found:
                await self._step(row, self._keep(row))
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _step(self, row: PoolRow, work: Awaitable[None]) -> None:
        try:
            await work
        except (HatchwayError, TimeoutError) as error:
            condition = error.cause if isinstance(error, HatchwayError) else "Its node did not answer in time."
            log.warning("pool %s of %s: %s", row.name, row.project, condition)
            try:
                await self._database.write(pools.note, row, condition, time.time() + RETRY_S)
            except HatchwayError as second:
                log.warning("pool %s of %s: %s", row.name, row.project, second)
        except Exception:  # one pool must not keep the others empty
            log.exception("pool %s of %s failed", row.name, row.project)

    async def _keep(self, row: PoolRow) -> None:
        row = await self._resolve(row)
        await self._drop(row)
        if row.state == pools.DRAINING:
            await self._database.write(pools.forget, row)
            return
        if self._in_the_way():
            return
        accepted = await self._database.write(pools.refill, row.project, row.name, time.time())
        if accepted is not None:
            self._engine.submit(accepted.operation, accepted.sandbox)
            task = asyncio.get_running_loop().create_task(self._look_after(accepted.operation.id))
            task.add_done_callback(lambda _: self.look())

    async def _look_after(self, operation_id: str) -> None:
        await self._engine.wait(operation_id, 3600.0)

    async def _resolve(self, row: PoolRow) -> PoolRow:
        """Looks now and then what the template names; at once where the node is another one than before."""
        link = self._link(row)
        if link is None or link.info is None or row.state == pools.DRAINING:
            return row
        mark = (row.project, row.name)
        key = pool_key(row.template_digest, link.info)
        due = self._resolved_at.get(mark, 0.0) + RESOLVE_EVERY_S <= time.monotonic()
        if key == row.pool_key and link.info.node_id == row.node_id and not due:
            return row
        self._resolved_at[mark] = time.monotonic()
        release = await resolve(link, row.template)
        key = pool_key(release.digest, link.info)
        await self._database.write(pools.resolved, row, release.digest, key, link.info.node_id)
        return msgspec.structs.replace(row, template_digest=release.digest, pool_key=key, node_id=link.info.node_id)

    def _link(self, row: PoolRow) -> NodeLink | None:
        """The pool's node, or another one where that is no more."""
        ready = self._nodes.ready()
        return next((link for link in ready if link.node_id == row.node_id), ready[0] if ready else None)

    async def _drop(self, row: PoolRow) -> None:
        failed = ""
        for member in await self._database.read(pools.spare, row, MAX_DROPPED):
            accepted = await self._database.write(pools.drop, member)
            if accepted is None:
                continue
            if member.state is State.FAILED:
                failed = member.reason or "A member could not be made."
            self._engine.submit(accepted.operation, accepted.sandbox, accepted.preempted)
        if failed:
            await self._database.write(pools.note, row, failed, time.time() + RETRY_S)
        elif row.condition and (row.retry_at is None or row.retry_at <= time.time()):
            await self._database.write(pools.note, row, "", None)

    def _in_the_way(self) -> bool:
        """Whether users wait for creations: the refill lets them go first, for a while."""
        busy = any(
            live.operation.kind is Verb.CREATE and pools.POOL not in live.operation.arguments
            for live in self._engine.live.values()
        )
        now = time.monotonic()
        if not busy:
            self._yielding_since = None
            return False
        self._yielding_since = self._yielding_since or now
        return now - self._yielding_since < YIELD_AT_MOST_S


async def resolve(link: NodeLink, reference: str) -> TemplateRelease:
    """The release behind a reference on a node. Raises `NotFound("unknown_template")`, `TimeoutError`, `Unavailable`."""
    try:
        return await link.call(
            "template.resolve", ResolveTemplate(reference=reference), TemplateRelease, within=RESOLVE_WITHIN_S
        )
    except NotFound as error:
        raise NotFound("unknown_template", error.cause, error.remedy) from None
