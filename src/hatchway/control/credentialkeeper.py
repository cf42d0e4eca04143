"""Ends what became of a change of a credential that nobody heard the end of: as far as the broker can say what it was."""

import asyncio
import logging
import time

from hatchway.control.broker import BrokerLink
from hatchway.domain.errors import HatchwayError
from hatchway.storage import credentials
from hatchway.storage.database import Database
from hatchway.storage.rows import CredentialRow
from hatchway.wire.broker import SourceCheck, SourceRef
from hatchway.wire.message import Empty

EVERY_S = 15.0
AFTER_S = 60.0
"""So long it is left to whoever wanted the change, to put it again or to delete it."""

log = logging.getLogger(__name__)


class CredentialKeeper:
    """See the module. Several control processes may do so at once: each change is one of its own, with a number."""

    def __init__(self, database: Database, broker: BrokerLink) -> None:
        self._database = database
        self._broker = broker
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="credentials")

    async def close(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                for row in await self._database.read(credentials.incomplete, time.time() - AFTER_S):
                    await self._settle(row)
            except HatchwayError as error:
                log.warning("a change of a credential has not come to its end yet: %s", error)
            except Exception:
                log.exception("changes of credentials are not looked at")
            await asyncio.sleep(EVERY_S)

    async def _settle(self, row: CredentialRow) -> None:
        ref = SourceRef(project=row.project, name=row.name)
        if row.version:
            found = await self._broker.call("source.check", ref, SourceCheck)
            if found.version == row.version:  # it never came to the change
                await self._database.write(credentials.give_up, row.project, row.name, row.changing_version)
            if found.version:
                return  # a later one: only whoever put it knows which hosts it is for
        # It was never made, or is deleted already: nothing is left to be kept.
        version = await self._database.write(credentials.begin_delete, row.project, row.name)
        try:
            await self._broker.call("source.delete", ref, Empty)
        except HatchwayError:
            await self._database.write(credentials.leave, row.project, row.name, version)
            raise
        await self._database.write(credentials.finish_delete, row.project, row.name, version)
        log.info("the credential %s of %s, whose change did not come to its end, is gone", row.name, row.project)
