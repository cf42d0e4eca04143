"""Ends projects: deletes what they hold, in the ordinary ways, until nothing is left, then forgets them.

That a project shall go is stored (`deleting`), so that a process that dies loses nothing by it: the next one goes on. Several
processes may work on the same project: every step is one that changes nothing the second time.
"""

import asyncio
import logging

from hatchway.control.broker import BrokerLink
from hatchway.control.engine import Engine
from hatchway.control.nodes import Nodes, quietly
from hatchway.domain.errors import HatchwayError
from hatchway.domain.lifecycle import State, Verb
from hatchway.storage import accepting, approvals, credentials, exports, operations, projects, sandboxes, snapshots
from hatchway.storage.accepting import Accepted
from hatchway.storage.database import Connection, Database
from hatchway.storage.exports import ExportRow
from hatchway.storage.rows import SandboxRow, SnapshotRow
from hatchway.wire.broker import SourceRef
from hatchway.wire.node import Empty, ExportRef, SnapshotRef

BATCH = 100
"""Sandboxes whose deletion is accepted in one transaction."""
AGAIN_S: tuple[float, ...] = (0.05, 0.2, 1.0, 5.0)
SNAPSHOT_WITHIN_S = EXPORT_WITHIN_S = 30.0

log = logging.getLogger(__name__)


class Removal:
    """See the module. `start` after the engine, `close` before it."""

    def __init__(self, database: Database, nodes: Nodes, engine: Engine, broker: BrokerLink) -> None:
        self._database = database
        self._nodes = nodes
        self._engine = engine
        self._broker = broker
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Takes up what an earlier process left unfinished."""
        for name in await self._database.read(projects.being_deleted):
            if name not in self._tasks:
                self._begin(name)

    async def close(self) -> None:
        """Gives up what is in hand; the next process goes on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def remove(self, name: str) -> bool:
        """Tries once, and goes on in the background; tells whether the project is gone already."""
        if name not in self._tasks:
            if await self._step(name):
                return True
            self._begin(name)
        return False

    def _begin(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._until_gone(name), name=f"removal of {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _until_gone(self, name: str) -> None:
        attempt = 0
        while True:
            try:
                if await self._step(name):
                    log.info("the project %s is gone", name)
                    return
            except HatchwayError as error:
                log.warning("removal of the project %s: %s", name, error)
            except Exception:  # it must not stay half deleted because of one mistake
                log.exception("removal of the project %s failed", name)
            await asyncio.sleep(AGAIN_S[min(attempt, len(AGAIN_S) - 1)])
            attempt += 1

    async def _step(self, name: str) -> bool:
        """Has everything deleted that can be now; True when nothing was left."""
        if await self._database.write(projects.purge, name):
            return True
        accepted = await self._database.write(_delete_sandboxes, name)
        for one in accepted:
            if one.run:
                self._engine.submit(one.operation, one.sandbox, one.preempted)
        for row in await self._database.write(_delete_snapshots, name):
            await quietly(self._remove(row))
        for export in await self._database.write(_delete_exports, name):
            link = self._nodes.find(export.node_id)
            if link is not None:  # one that is away removes it when its time is over
                await quietly(link.call("export.delete", ExportRef(export_id=export.id), Empty, within=EXPORT_WITHIN_S))
        if await self._database.read(credentials.any_of, name):
            await quietly(self._forget_credentials(name))
        return False

    async def _forget_credentials(self, name: str) -> None:
        await self._broker.call("source.delete", SourceRef(project=name), Empty)
        await self._database.write(credentials.forget_all, name)

    async def _remove(self, row: SnapshotRow) -> None:
        link = await self._nodes.wait(row.node_id, within=0.0)
        await link.call("snapshot.delete", SnapshotRef(snapshot_id=row.id), Empty, within=SNAPSHOT_WITHIN_S)
        await self._database.write(snapshots.deleted, row.id)


def _delete_sandboxes(connection: Connection, name: str) -> list[Accepted]:
    rows = sandboxes.list_page(connection, name, sandboxes.Filter(states=_ALIVE), limit=BATCH)
    return [
        accepting.accept_verb(connection, name, row.id, Verb.DELETE, None)
        for row in rows
        if row.desired is not State.DELETED or _waits(connection, row)
    ]


def _waits(connection: Connection, row: SandboxRow) -> bool:
    """Whether somebody asked for the deletion, and it waits for consent: what ends the project needs none."""
    operation = None if row.operation_id is None else operations.find(connection, row.operation_id)
    return operation is not None and approvals.waits(operation)


def _delete_snapshots(connection: Connection, name: str) -> list[SnapshotRow]:
    rows = snapshots.list_page(connection, name, limit=BATCH)
    # One that is being made ends with its sandbox.
    return [snapshots.begin_delete(connection, name, row.id) for row in rows if row.state != "pending"]


def _delete_exports(connection: Connection, name: str) -> list[ExportRow]:
    return [exports.delete(connection, name, row.id) for row in exports.list_page(connection, name, limit=BATCH)]


_ALIVE = tuple(str(state) for state in State if state is not State.DELETED)
