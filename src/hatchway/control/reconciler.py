"""Keeps what is stored true: compares it with what nodes see, when they are connected, when they say that something changed, and
now and then as a backstop.

What an operation is about to change is the engine's; the reconciler touches a sandbox only between operations.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from hatchway.control.auth import Authenticator
from hatchway.control.claims import MAINTENANCE, Claims, of_node
from hatchway.control.engine import Engine, lost
from hatchway.control.nodes import NodeLink, Nodes, quietly
from hatchway.domain.errors import HatchwayError
from hatchway.domain.lifecycle import State
from hatchway.storage import ending, operations, outbox, retention, sandboxes, sessions, settings, snapshots, subjects
from hatchway.storage.database import Connection, Database
from hatchway.storage.rows import OperationRow, SandboxRow, SessionRow
from hatchway.wire.egress import Asked, AskEnded
from hatchway.wire.node import (
    Empty,
    Event,
    Observed,
    SandboxList,
    SandboxRef,
    SandboxSessions,
    SessionList,
    SessionStatus,
    SnapshotRef,
    Subscribe,
)

LIST_WITHIN_S = 30.0
DELETE_WITHIN_S = 120.0
GATHER_S = 0.02
"""Events that come within this are written in one transaction; of one session the last state only."""
TAKE_UP_AFTER_S = 5.0
"""A younger operation may just be on its way from the request that was accepted to the engine."""
MAX_QUEUED = 20_000
MAX_REMEMBERED = 10_000

log = logging.getLogger(__name__)


class Reconciler:
    """See the module. `start` after the engine, `close` before it."""

    def __init__(
        self,
        database: Database,
        nodes: Nodes,
        engine: Engine,
        auth: Authenticator,
        claims: Claims,
        *,
        every_s: float,
        deleted_kept_s: float,
    ) -> None:
        self._database = database
        self._nodes = nodes
        self._engine = engine
        self._auth = auth
        self._claims = claims
        self._every_s = every_s
        self._deleted_kept_s = deleted_kept_s
        self._queue: asyncio.Queue[Observed | SessionStatus] = asyncio.Queue(MAX_QUEUED)
        self._deferred: dict[str, Observed] = {}
        self._warned: set[tuple[str, str, int]] = set()
        self._comparing: dict[str, asyncio.Lock] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._foreign: dict[str, set[str]] = {}
        self._begun: set[asyncio.Task[bool]] = set()
        self.on_wake: Callable[[NodeLink, str], None] = lambda link, sandbox_id: None
        """Called when a node has traffic for a sandbox that does not run."""
        self.on_compared: Callable[[], None] = lambda: None
        """Called when a node was connected, and what it has is written down."""
        self.on_asked: Callable[[str, Asked], None] = lambda node_id, asked: None
        """Called when a gateway of a node holds a request until somebody decides."""
        self.on_ask_ended: Callable[[AskEnded], None] = lambda ended: None
        self._missed = False
        """Something that nodes said was not written: sessions are compared again too."""

    async def start(self) -> None:
        """Takes up what an earlier process left unfinished, then listens to the nodes."""
        self._nodes.on_connected = self._node_connected
        self._nodes.on_lost = self._node_lost
        self._nodes.on_event = self._node_event
        self._engine.on_released = self.released
        self._claims.on_gained.append(self._gained)
        self._claims.on_regained = self._regained
        await self.take_up()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._write_forever(), name="node events"),
            loop.create_task(self._pass_forever(), name="reconciliation"),
        ]

    async def close(self) -> None:
        """Stops listening."""
        tasks = [*self._tasks, *self._begun]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_foreign(self, row: SandboxRow) -> bool:
        """Whether the sandbox's node holds it under a newer generation than ours: somebody else owns it now."""
        return row.id in self._foreign.get(row.node_id, ())

    async def take_up(self, older_than_s: float = 0.0) -> None:
        """Submits every operation that has not ended, that the engine does not know and that is at least so many seconds old."""
        accepted_by = time.time() - older_than_s
        for operation, _ in await self._database.read(_unfinished):
            if self._claims.shared and operation.controller_id != self._claims.controller:
                continue  # another process's, or to be claimed
            if operation.created_at > accepted_by or operation.id in self._engine.live:
                continue
            # The engine lets go of an operation after its end is written: what is open now, and not the engine's, is nobody's.
            for unfinished, sandbox in await self._database.read(_unfinished, operation.id):
                self._engine.submit(unfinished, sandbox)

    # -- what nodes say

    def _node_event(self, link: NodeLink, event: Event) -> None:
        if event.progress is not None:
            self._engine.progress(event.progress)
        elif link.node_id is None or not self._claims.leads(of_node(link.node_id)):
            return  # another process writes down what this node says
        elif event.observed is not None:
            self._observed(event.observed)
        elif event.session is not None:
            self._enqueue(event.session)
        elif event.wake is not None:
            self.on_wake(link, event.wake.sandbox_id)
        elif event.asked is not None:
            self.on_asked(link.node_id, event.asked)
        elif event.ask_ended is not None:
            self.on_ask_ended(event.ask_ended)

    def _gained(self, name: str) -> None:
        """What a node said to a process that led before may not have been written down."""
        for link in self._nodes.ready():
            if link.node_id is not None and name == of_node(link.node_id):
                self._begin(self._step(f"comparison with {link.node_id}", self._compare_all(link, True)))

    def _regained(self) -> None:
        """What was given up when this process's lease lapsed, and nobody took over, waits for no pass."""
        self._begin(self._step("taking up of operations", self.take_up()))

    def _begin(self, work: Coroutine[Any, Any, bool]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)

    def _observed(self, seen: Observed) -> None:
        if self._engine.busy(seen.sandbox_id):
            self._deferred[seen.sandbox_id] = seen
        else:
            self._enqueue(seen)

    def released(self, sandbox_id: str) -> None:
        """Takes up again what was seen of a sandbox while its operation was in hand, here or in another process."""
        seen = self._deferred.pop(sandbox_id, None)
        if seen is not None:
            # What the operation itself ended with is newer, or the same, and then this changes nothing.
            self._enqueue(seen)

    def _enqueue(self, item: Observed | SessionStatus) -> None:
        try:
            self._queue.put_nowait(item)
        except asyncio.QueueFull:
            self._missed = True
            log.warning("more than %d events of nodes wait; the next comparison makes up for it", MAX_QUEUED)

    async def _write_forever(self) -> None:
        while True:
            seen: dict[str, Observed] = {}
            heard: dict[str, SessionStatus] = {}
            self._collect(await self._queue.get(), seen, heard)
            await asyncio.sleep(GATHER_S)
            while not self._queue.empty():
                self._collect(self._queue.get_nowait(), seen, heard)
            try:
                for busy in await self._database.write(_write_events, list(seen.values()), tuple(heard.values())):
                    self._defer(busy)
            except Exception as error:  # noqa: BLE001  # a task that ended would leave every state as it is for good
                self._missed = True
                log.error("events of nodes not written; the next comparison makes up for it: %s", error)

    def _defer(self, seen: Observed) -> None:
        """Keeps what was seen of a sandbox until its operation has ended, in whichever process."""
        if len(self._deferred) < MAX_REMEMBERED:
            self._deferred[seen.sandbox_id] = seen
        else:
            self._missed = True

    @staticmethod
    def _collect(item: Observed | SessionStatus, seen: dict[str, Observed], heard: dict[str, SessionStatus]) -> None:
        if isinstance(item, SessionStatus):
            heard[item.session_id] = item
        else:
            seen[item.sandbox_id] = item

    # -- connections

    async def _node_connected(self, link: NodeLink) -> None:
        assert link.info is not None
        data = msgspec.to_builtins(link.info)
        if not await self._claims.lead(of_node(link.info.node_id)):
            # Its progress is heard all the same, and what it says from the moment on in which this process leads.
            listing = await link.call("sandbox.list", Empty(), SandboxList, within=LIST_WITHIN_S)
            await link.call("events.subscribe", Subscribe(sequence=listing.sequence), Empty, within=LIST_WITHIN_S)
            return
        await self._database.write(_note_connected, link.info.node_id, str(link.address), data)
        sequence = await self.compare(link)
        self.on_compared()
        await link.call("events.subscribe", Subscribe(sequence=sequence), Empty, within=LIST_WITHIN_S)
        await self._compare_sessions(link)
        await self._remove_snapshots(link)

    async def _node_lost(self, link: NodeLink) -> None:
        if link.node_id is not None and not self._claims.leads(of_node(link.node_id)):
            return
        with contextlib.suppress(HatchwayError):
            await self._database.write(
                outbox.append,
                outbox.INSTALLATION,
                "node.unreachable",
                link.node_id or str(link.address),
                {"address": str(link.address)},
            )

    # -- comparing

    async def _pass_forever(self) -> None:
        while True:
            await self._step("maintenance", self._maintain())
            missed, self._missed = self._missed, False
            # Each by itself: one node that does not answer must not keep the others from the truth.
            compared = await asyncio.gather(
                *(
                    self._step(f"comparison with {link.node_id}", self._compare_all(link, missed))
                    for link in self._nodes.ready()
                    if link.node_id is not None and self._claims.leads(of_node(link.node_id))
                )
            )
            self._missed = self._missed or (missed and not all(compared))
            await self._step("taking up of operations", self.take_up(TAKE_UP_AFTER_S))
            await asyncio.sleep(self._every_s)

    async def _step(self, what: str, work: Awaitable[object]) -> bool:
        """Does one part of the pass; tells whether it could be done. The next pass tries again."""
        try:
            await work
        except (HatchwayError, TimeoutError) as error:
            log.warning("%s not finished: %s", what, error)
        except Exception:
            log.exception("%s failed", what)
        else:
            return True
        return False

    async def _compare_all(self, link: NodeLink, with_sessions: bool) -> None:
        try:
            await self.compare(link)
        except TimeoutError:
            # No stream says that a peer was stopped, or that a network no longer carries anything: this does.
            await link.drop()
            raise
        if with_sessions:
            await self._compare_sessions(link)
        await self._remove_snapshots(link)

    async def _remove_snapshots(self, link: NodeLink) -> None:
        """What a node keeps of snapshots that are being deleted, or were never finished."""
        assert link.node_id is not None
        for row in await self._database.read(snapshots.unwanted, link.node_id):
            if row.operation_id in self._engine.live:
                continue
            ref = SnapshotRef(snapshot_id=row.id)
            await link.call("snapshot.delete", ref, Empty, within=DELETE_WITHIN_S)
            if row.state == "deleting":
                await self._database.write(snapshots.deleted, row.id)

    async def _maintain(self) -> None:
        await self._auth.flush()
        await self._nodes.configure_all()  # keys that have expired, and what another process revoked
        if not self._claims.leads(MAINTENANCE):
            return
        purged = retention.BATCH
        while purged == retention.BATCH:
            purged = await self._database.write(retention.sweep, deleted_sandbox_s=self._deleted_kept_s)

    async def compare(self, link: NodeLink) -> int:
        """Compares what is stored with what the node lists; returns the sequence that the list stands for.

        What is stored is read before the node is asked, and a row that changed meanwhile is left alone: its change is newer.
        """
        assert link.node_id is not None
        async with self._comparing.setdefault(link.node_id, asyncio.Lock()):
            stored = {row.id: row for row in await self._database.read(sandboxes.of_node, link.node_id)}
            listing = await link.call("sandbox.list", Empty(), SandboxList, within=LIST_WITHIN_S)
            listed = {seen.sandbox_id: seen for seen in listing.sandboxes}
            settled = {
                name: row for name, row in stored.items() if row.operation_id is None and not self._engine.busy(name)
            }
            changes: list[tuple[Observed, int]] = []
            for name, row in settled.items():
                seen = listed.get(name)
                if row.state is State.DELETED:
                    if seen is not None and seen.generation <= row.generation:
                        ref = SandboxRef(sandbox_id=name, generation=row.generation)
                        log.warning("the deleted sandbox %s is still on its node; deleting it again", name)
                        await quietly(link.call("sandbox.delete", ref, Observed, within=DELETE_WITHIN_S))
                elif seen is None and row.boot_id is None and row.state in (State.FAILED, State.STOPPED):
                    continue  # it never ran: there is nothing that its node could have lost
                elif seen is None:
                    changes.append((lost(row), row.version))
                else:
                    changes.append((seen, row.version))
            if changes:
                await self._database.write(_take_over, changes)
            await self._warn(link, stored, listed)
            return listing.sequence

    async def _warn(self, link: NodeLink, stored: dict[str, SandboxRow], listed: dict[str, Observed]) -> None:
        """Tells of machines that are none of ours. They are left alone: an empty or old database is no reason to kill."""
        node_id = link.node_id
        assert node_id is not None
        foreign = {
            name for name, seen in listed.items() if name in stored and seen.generation > stored[name].generation
        }
        self._foreign[node_id] = foreign
        self._warned = {mark for mark in self._warned if mark[0] != node_id or mark[1] in listed}
        for name, seen in listed.items():
            mark = (node_id, name, seen.generation)
            if (name in stored and name not in foreign) or mark in self._warned or len(self._warned) >= MAX_REMEMBERED:
                continue
            row = await self._database.read(sandboxes.find, name)
            if row is not None and row.node_id != node_id and row.generation > seen.generation:
                # It went on at another node while this one was away.
                ref = SandboxRef(sandbox_id=name, generation=seen.generation)
                await quietly(link.call("sandbox.delete", ref, Observed, within=DELETE_WITHIN_S))
                continue
            if row is not None and name not in foreign:
                continue  # it was made while the node was asked
            self._warned.add(mark)
            why = "a newer generation than the database's" if name in foreign else "unknown to the database"
            log.warning("node %s holds the sandbox %s, %s; it is left alone", node_id, name, why)
            await self._database.write(
                outbox.append,
                outbox.INSTALLATION,
                "node.quarantine",
                name,
                {"node": node_id, "generation": seen.generation, "state": seen.state, "reason": f"It is {why}."},
            )

    async def _compare_sessions(self, link: NodeLink) -> None:
        """After a reconnection: what became of the sessions meanwhile."""
        assert link.node_id is not None
        asked_at = time.time()
        stored: dict[str, list[SessionRow]] = {}
        for row in await self._database.read(sessions.unfinished, link.node_id):
            stored.setdefault(row.sandbox_id, []).append(row)
        for sandbox_id, rows in stored.items():
            answer = await link.call(
                "session.list", SandboxSessions(sandbox_id=sandbox_id), SessionList, within=LIST_WITHIN_S
            )
            known = {status.session_id for status in answer.sessions}
            gone = [row.id for row in rows if row.id not in known and row.created_at < asked_at - 1.0]
            await self._database.write(_write_sessions, answer.sessions, gone)


def _unfinished(connection: Connection, only: str | None = None) -> list[tuple[OperationRow, SandboxRow]]:
    found: list[tuple[OperationRow, SandboxRow]] = []
    for operation in operations.unfinished(connection, only):
        sandbox = subjects.of(connection, operation)
        if sandbox is not None:
            found.append((operation, sandbox))
    return found


def _note_connected(connection: Connection, node_id: str, address: str, info: dict[str, object]) -> None:
    settings.note_node(connection, node_id, address, info)
    outbox.append(connection, outbox.INSTALLATION, "node.connected", node_id, {"address": address})


def _write_events(connection: Connection, seen: list[Observed], heard: tuple[SessionStatus, ...]) -> list[Observed]:
    """Returns what could not be taken over because an operation is in flight."""
    busy: list[Observed] = []
    for one in seen:
        if ending.observe(connection, one) is None:
            row = sandboxes.find(connection, one.sandbox_id)
            if row is not None and row.operation_id is not None:
                busy.append(one)
    sessions.heard(connection, heard)
    return busy


def _take_over(connection: Connection, changes: list[tuple[Observed, int]]) -> None:
    for seen, version in changes:
        ending.observe(connection, seen, version=version)


def _write_sessions(connection: Connection, heard: tuple[SessionStatus, ...], gone: list[str]) -> None:
    sessions.heard(connection, heard)
    for session_id in gone:
        sessions.close(connection, session_id, "lost")
