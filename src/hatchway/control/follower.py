"""Follows the outbox on a database that several control processes share, so that what one did holds in all of them.

It reads from where it stands and misses nothing: a notification only tells that it is time to look, and so does a clock.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from hatchway.domain.errors import HatchwayError
from hatchway.storage import outbox
from hatchway.storage.database import Database
from hatchway.storage.rows import EventRow

LOOK_EVERY_S = 1.0
BATCH = 500

log = logging.getLogger(__name__)


class Follower:
    """Hands every event on, in order, to all of `listeners`. Does nothing where no other process can write."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._position = 0
        self._looked_at = float("-inf")
        self._bell = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.listeners: list[Callable[[EventRow], None]] = []

    async def start(self) -> None:
        """Begins with what comes from now on."""
        if self._database.shared:
            self._position = (await self._database.read(outbox.bounds))[1]
            self._looked_at = time.monotonic()
            self._database.on_commit.add(self._bell.set)
            self._task = asyncio.get_running_loop().create_task(self._follow(), name="outbox")

    async def close(self) -> None:
        """Stops."""
        self._database.on_commit.discard(self._bell.set)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def is_current(self, within_s: float) -> bool:
        """Whether everything that was committed so many seconds ago is known here."""
        return not self._database.shared or time.monotonic() - self._looked_at < within_s

    async def _follow(self) -> None:
        while True:
            self._bell.clear()
            began = time.monotonic()
            try:
                events = await self._database.read(outbox.after_any, self._position, BATCH)
            except HatchwayError as error:
                log.warning("the outbox cannot be read: %s", error)
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            for event in events:
                self._position = event.sequence
                self._tell(event)
            if len(events) == BATCH:
                continue
            self._looked_at = began
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._bell.wait()
            except TimeoutError:
                continue

    def _tell(self, event: EventRow) -> None:
        for listener in list(self.listeners):
            try:
                listener(event)
            except Exception:  # the others must hear of it all the same
                log.exception("a listener to %s failed", event.kind)
