"""Carries questions up from the nodes and answers down to them, and lets operations wait for consent.

What is asked and answered is stored, so that a control process that dies loses neither: a node says again what it holds to whoever connects, an
answer that it may not have is sent again, and an operation waits in whichever process has it in hand.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine

from hatchway.control.nodes import Nodes
from hatchway.domain.errors import Forbidden, HatchwayError
from hatchway.storage import approvals
from hatchway.storage.approvals import ApprovalRow
from hatchway.storage.database import Database
from hatchway.storage.rows import EventRow
from hatchway.wire.egress import AskAnswer, Asked, AskEnded
from hatchway.wire.node import Empty

SWEEP_EVERY_S = 1.0
LOOK_EVERY_S = 5.0
ANSWER_WITHIN_S = 5.0
MAX_IN_HAND = 1024
"""Questions of nodes that wait for the database; a node says again what is not stored."""

log = logging.getLogger(__name__)


class Approving:
    """See the module. `start` after the nodes' callbacks are set, `close` before the database."""

    def __init__(self, database: Database, nodes: Nodes) -> None:
        self._database = database
        self._nodes = nodes
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._pending = asyncio.Event()
        """Set while something may wait that the clock ends, or an answer that a node does not have."""

    async def start(self) -> None:
        """Begins to look what is over."""
        self._pending.set()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_forever(), name="approvals")

    async def close(self) -> None:
        """Stops; what waits goes on to wait."""
        tasks = [*self._tasks, *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hear(self, event: EventRow) -> None:
        """Takes note of what another control process stored."""
        if event.kind.startswith("approval."):
            self._ring(event.subject)

    def asked(self, node_id: str, asked: Asked) -> None:
        """A gateway holds a request. One that was answered already gets its answer."""
        self._begin(self._store(node_id, asked))

    def ended(self, ended: AskEnded) -> None:
        """A gateway holds it no more."""
        self._begin(self._over(ended))

    async def deliver(self, row: ApprovalRow) -> bool:
        """Lets the node have an answer; tells whether it has it. What it does not have is sent again while it may matter."""
        if row.kind == approvals.OPERATION:
            self._ring(row.id)
            return True
        self._pending.set()
        link = self._nodes.find(row.node_id)
        if link is None or not link.connected:
            return False
        answer = AskAnswer(
            ask_id=row.id,
            sandbox_id=row.sandbox_id,
            generation=row.generation,
            allow=row.state == approvals.ALLOWED,
            scope=row.scope or "once",
            ttl_s=row.ttl_s or 0.0,
            approver=row.approver or "",
        )
        try:
            await link.call("egress.answer", answer, Empty, within=ANSWER_WITHIN_S)
        except (HatchwayError, TimeoutError) as error:
            log.warning("the answer to %s has not reached its node: %s", row.id, error)
            return False
        await self._database.write(approvals.delivered, row.id)
        return True

    async def consent(self, approval_id: str) -> Forbidden | None:
        """Waits until an operation may go on; returns the error where it may not."""
        changed = asyncio.Event()
        self._waiters.setdefault(approval_id, set()).add(changed)
        self._pending.set()
        try:
            while True:
                changed.clear()
                row = await self._database.read(approvals.find, approval_id)
                if row is None or row.state == approvals.ENDED:
                    return _denied("Nobody answered in time." if row is not None else "It is not known any more.")
                if row.state == approvals.ALLOWED:
                    return None
                if row.state == approvals.DENIED:
                    return _denied(f"It was denied by {row.approver}." + (f" {row.note}" if row.note else ""))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await changed.wait()
        finally:
            waiters = self._waiters[approval_id]
            waiters.discard(changed)
            if not waiters:
                del self._waiters[approval_id]

    async def _store(self, node_id: str, asked: Asked) -> None:
        row = await self._database.write(approvals.ask, asked, node_id)
        if row is None:
            log.warning("%s asks about a sandbox that is not there: %s", node_id, asked.sandbox_id)
        elif row.state in (approvals.ALLOWED, approvals.DENIED):
            await self.deliver(row)
        self._pending.set()

    async def _over(self, ended: AskEnded) -> None:
        await self._database.write(approvals.over, ended.ask_id, ended.why, ended.sandbox_id)

    def _ring(self, approval_id: str) -> None:
        for waiter in self._waiters.get(approval_id, ()):
            waiter.set()

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        if len(self._tasks) >= MAX_IN_HAND:
            work.close()
            log.warning("more than %d questions of nodes are in hand; one is left to be said again", MAX_IN_HAND)
            return
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sweep_forever(self) -> None:
        while True:
            await self._pending.wait()
            try:
                if not await self._sweep():
                    self._pending.clear()
            except HatchwayError as error:
                log.warning("approvals not looked after: %s", error)
            except Exception:  # what waits must end whatever went wrong with one
                log.exception("approvals not looked after")
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _sweep(self) -> bool:
        """Ends what is over and sends what was not taken; tells whether anything is left to look after."""
        now = time.time()
        waiting = await self._database.read(approvals.waiting)
        if any(row.expires_at <= now for row in waiting):
            for row in await self._database.write(approvals.expire, now):
                self._ring(row.id)
        unsent = await self._database.read(approvals.undelivered, now)
        for row in unsent:
            await self.deliver(row)
        return bool(waiting or unsent)


async def _quietly(work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except HatchwayError as error:
        log.warning("a question of a node was not taken up, it is said again: %s", error)


def _denied(why: str) -> Forbidden:
    return Forbidden(
        "approval_denied",
        f"The project wants somebody's consent for this. {why}",
        "Ask for it again, and have it allowed: `hatchway approvals watch`.",
    )
