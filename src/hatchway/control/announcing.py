"""Feeds the webhook from the outbox: every `approval.…` event is told, by one of the control processes.

What waits when a process begins to lead is told again: the one before may have died with it.
"""

import asyncio
import contextlib
import logging

from hatchway.control.approval_view import show
from hatchway.control.claims import Claims
from hatchway.control.webhooks import Webhook
from hatchway.domain.errors import HatchwayError
from hatchway.storage import approvals, outbox
from hatchway.storage.database import Database

LEASE = "webhook"
BATCH = 500
GATHER_S = 0.3
LOOK_EVERY_S = 5.0

log = logging.getLogger(__name__)


class Announcing:
    """See the module. Without a webhook it does nothing."""

    def __init__(self, database: Database, claims: Claims, webhook: Webhook | None) -> None:
        self._database = database
        self._claims = claims
        self._webhook = webhook
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins with what waits, and what comes."""
        if self._webhook is not None:
            self._database.on_commit.add(self._bell.set)
            self._task = asyncio.get_running_loop().create_task(self._follow(self._webhook), name="webhook")

    async def close(self) -> None:
        """Stops."""
        self._database.on_commit.discard(self._bell.set)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._webhook is not None:
            await self._webhook.close()

    async def _follow(self, webhook: Webhook) -> None:
        position: int | None = None
        while True:
            self._bell.clear()
            try:
                if not self._claims.shared or await self._claims.lead(LEASE):
                    position = await self._tell(webhook, position)
                else:
                    position = None
            except HatchwayError as error:
                log.warning("the webhook is not told: %s", error)
            except Exception:  # nobody would be asked any more
                log.exception("the webhook is not told")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._bell.wait()
            await asyncio.sleep(GATHER_S)

    async def _tell(self, webhook: Webhook, position: int | None) -> int:
        if position is None:
            position = (await self._database.read(outbox.bounds))[1]
            for row in await self._database.read(approvals.waiting):
                webhook.tell("approval.asked", show(row))
        while True:
            events = await self._database.read(outbox.after_any, position, BATCH)
            for event in events:
                position = event.sequence
                if event.kind.startswith("approval."):
                    found = await self._database.read(approvals.find, event.subject)
                    if found is not None:
                        webhook.tell(event.kind, show(found))
            if len(events) < BATCH:
                return position
