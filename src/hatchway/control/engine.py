"""Executes operations: each is a task that calls the node, and writes how it ended.

The row of an operation is written when it is accepted and when it ends; in between, how far it is lives in memory (`live`) and is
written now and then. A control process that dies loses nothing by that: an operation that has not ended is executed again, and
every verb of a node is idempotent.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hatchway.control import metrics
from hatchway.control.claims import Claims
from hatchway.control.nodes import LOST_CODES, NodeLink, Nodes, quietly
from hatchway.control.verbs import LOOK_WITHIN_S, carry_out
from hatchway.domain.errors import Conflict, HatchwayError, Internal, NotFound, Unavailable, Unprocessable
from hatchway.domain.lifecycle import Cause, State, Verb
from hatchway.storage import approvals, ending, operations, projects, sandboxes, snapshots
from hatchway.storage.database import Database
from hatchway.storage.ending import Finished
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.wire import tracing
from hatchway.wire.node import Empty, Observed, Progress, SandboxRef, SnapshotRef

FLUSH_EVERY_S = 0.25
RETRY_S: tuple[float, ...] = (0.02, 0.1, 0.5, 2.0, 5.0)
DELETE_RETRY_S: tuple[float, ...] = (0.2, 1.0, 5.0, 30.0)
HANDOVER_S = 2.0
"""How long an operation waits here for a node that another control process may reach."""
MOVE_AFTER_S = 5.0
"""How long the node of a suspended sandbox is waited for before another one goes on with it."""
WAITING = "waiting for the node"

log = logging.getLogger(__name__)


@dataclass
class Live:
    """An operation in execution."""

    operation: OperationRow
    phase: str = "accepted"
    progress: float | None = None
    started_at: float | None = None
    due_from: float | None = None
    """From when on its bound counts: its acceptance, or the consent that it waited for."""
    dirty: bool = False
    task: asyncio.Task[None] | None = None
    done: asyncio.Future[Finished | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Turn:
    """One of the places among the operations that call nodes at once; not kept while there is nobody to call."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._held = False

    async def take(self) -> None:
        """Waits for a place, unless it has one."""
        if not self._held:
            await self._places.acquire()
            self._held = True

    def give_back(self) -> None:
        """Lets another operation have it. Idempotent."""
        if self._held:
            self._held = False
            self._places.release()


class Engine:
    """Takes accepted operations. One sandbox has at most one task; `concurrency` tasks call nodes at once."""

    def __init__(self, database: Database, nodes: Nodes, claims: Claims, *, concurrency: int, bound_s: float) -> None:
        self._database = database
        self._nodes = nodes
        self._claims = claims
        self._bound_s = bound_s
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._flusher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._elsewhere: dict[str, set[asyncio.Event]] = {}
        self.live: dict[str, Live] = {}
        self.consent: Callable[[str], Awaitable[HatchwayError | None]] = _no_consent
        """Waits until an operation may go on, given the id of its approval; returns the error where it may not."""
        self.on_released: Callable[[str], None] = lambda sandbox_id: None
        """Called with a sandbox's id when its operation ended."""
        self.on_behind: Callable[[], None] = lambda: None
        """Called when an operation ended whose sandbox has not the newest revision of its policy in force."""

    def submit(self, operation: OperationRow, sandbox: SandboxRow, preempted: str | None = None) -> None:
        """Starts to execute an accepted operation; known ones are left alone. A pre-empted one is given up first."""
        if operation.id in self.live or self._closed:
            return
        previous = self._tasks.get(sandbox.id)
        if preempted is not None and previous is not None:
            previous.cancel()
        live = Live(operation)
        self.live[operation.id] = live
        task = asyncio.get_running_loop().create_task(
            self._execute(live, sandbox, previous), name=f"{operation.kind} {sandbox.id}"
        )
        live.task = self._tasks[sandbox.id] = task
        task.add_done_callback(lambda done: self._forget(sandbox.id, live, done))

    def busy(self, sandbox_id: str) -> bool:
        """Whether an operation of the sandbox is in execution: what is seen of it meanwhile says nothing of how it ends."""
        return sandbox_id in self._tasks

    async def wait(self, operation_id: str, within: float) -> Finished | None:
        """Waits up to `within` seconds for an operation's end, wherever it is executed.

        None when it has not ended by then, was pre-empted, or ended in another process: the database says which.
        """
        live = self.live.get(operation_id)
        try:
            async with asyncio.timeout(within):
                finished = None if live is None else await asyncio.shield(live.done)
                if finished is None and self._claims.shared:
                    await self._wait_elsewhere(operation_id)
                return finished
        except TimeoutError:
            return None

    def ended(self, operation_id: str) -> None:
        """Takes note that an operation ended, perhaps in another process."""
        for waiter in self._elsewhere.get(operation_id, ()):
            waiter.set()

    def drop(self, operation_id: str) -> None:
        """Gives up an operation that another process ended, or may have taken over; what was sent to the node is sent."""
        live = self.live.get(operation_id)
        if live is not None and live.task is not None:
            live.task.cancel()

    def drop_all(self) -> None:
        """Gives up everything in hand: others may have taken it over."""
        for operation_id in list(self.live):
            self.drop(operation_id)

    async def _wait_elsewhere(self, operation_id: str) -> None:
        ended = asyncio.Event()
        self._elsewhere.setdefault(operation_id, set()).add(ended)
        try:
            # After the waiter is there: an end is either seen here or told later.
            operation = await self._database.read(operations.find, operation_id)
            if operation is not None and operation.finished_at is None:
                await ended.wait()
        finally:
            waiters = self._elsewhere[operation_id]
            waiters.discard(ended)
            if not waiters:
                del self._elsewhere[operation_id]

    async def cancel(self, project: str, operation_id: str) -> Finished:
        """Ends an operation that has not begun. Raises `NotFound`, `Conflict("not_cancellable")`."""
        live = self.live.get(operation_id)
        if live is None and await self._claims.elsewhere(operation_id):
            await self._database.read(operations.get, project, operation_id)
            raise Conflict(
                "not_cancellable",
                "Another control process has the operation in hand.",
                "Wait for its end, or delete the sandbox: that pre-empts it.",
            )
        if live is not None and live.operation.project == project:
            if live.started_at is not None:
                await self._write_progress([live])
            else:
                # It waits for its turn. Should the write below fail, the next reconciliation takes it up again.
                assert live.task is not None
                live.task.cancel()
        finished = await self._database.write(ending.cancel, project, operation_id)
        note_end(finished.operation)
        if live is not None:
            _resolve(live, finished)
        return finished

    def progress(self, event: Progress) -> None:
        """Takes over how far a node is."""
        for live in self.live.values():
            if live.operation.target == event.sandbox_id and live.started_at is not None:
                live.progress = event.fraction
                self._note(live, event.phase[:64])

    def start(self) -> None:
        """Begins to write progress."""
        self._flusher = asyncio.get_running_loop().create_task(self._flush_forever(), name="operation progress")

    async def close(self) -> None:
        """Gives up what is in hand; it is executed again by the next process."""
        self._closed = True
        tasks = [*self._tasks.values(), *([self._flusher] if self._flusher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, sandbox_id: str, live: Live, task: asyncio.Task[None]) -> None:
        self.live.pop(live.operation.id, None)
        _resolve(live, None)
        if self._tasks.get(sandbox_id) is task:
            del self._tasks[sandbox_id]
            self.on_released(sandbox_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The row stays unfinished, so that the next reconciliation takes it up again.
            log.error("operation %s was not executed", live.operation.id, exc_info=error)

    async def _execute(self, live: Live, sandbox: SandboxRow, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        turn = _Turn(self._slots)
        try:
            refused = await self._refused(live)
            if refused is not None:
                ended = await self._database.write(ending.fail, live.operation, refused.as_dict(), None, None)
                _finish(live, ended)
                return
            await turn.take()
            live.started_at = time.time()
            self._note(live, "running")
            tracing.bind(operation_id=live.operation.id, sandbox_id=sandbox.id, project=sandbox.project)
            finished = await self._drive(live, sandbox, turn)
        finally:
            turn.give_back()
        if finished is not None and finished.sandbox.policy_applied != finished.sandbox.policy_revision:
            self.on_behind()  # its policy changed while the node was at it
        _finish(live, finished)

    async def _refused(self, live: Live) -> HatchwayError | None:
        """Waits for somebody's consent where that is needed; until then the operation has not begun, and can be cancelled."""
        approval = live.operation.arguments.get(approvals.ARGUMENT)
        if approval is None:
            return None
        live.phase = approvals.ARGUMENT
        refused = await self.consent(str(approval))
        live.due_from = time.time()
        return refused

    async def _drive(self, live: Live, sandbox: SandboxRow, turn: _Turn) -> Finished | None:
        """Repeats the verb until the node has said how it ended."""
        operation = live.operation
        attempt = 0
        while True:
            if (attempt or not self._claims.valid) and not await self._claims.holds(operation.id):
                return None  # it was ended meanwhile, or is another process's now: nothing more may be sent
            try:
                return await self._attempt(live, sandbox, turn)
            except _GivenBack:
                return None
            except _Again as again:
                turn.give_back()
                if operation.kind is Verb.DELETE and again.error.code not in LOST_CODES:
                    log.warning("delete of %s: %s", sandbox.id, again.error)
                    self._note(live, f"retrying after {again.error.code}"[:64])
                    pauses = DELETE_RETRY_S
                else:
                    pauses = RETRY_S
                await asyncio.sleep(pauses[min(attempt, len(pauses) - 1)])
            attempt += 1

    async def _attempt(self, live: Live, sandbox: SandboxRow, turn: _Turn) -> Finished | None:
        """One call of the node and what follows from it; raises `_Again` where nothing is decided by it."""
        operation = live.operation
        try:
            sandbox = await self._moved(live, sandbox)
            link = await self._connected(live, sandbox, turn)
        except Unavailable as error:
            if error.code in LOST_CODES:
                raise _Again(error) from error
            return await self._database.write(ending.fail, operation, error.as_dict(), None, live.started_at)
        failure: HatchwayError
        try:
            await self._check_isolation(link, operation.kind, sandbox)
            end = await carry_out(link, self._database, operation, sandbox)
        except HatchwayError as error:
            if isinstance(error, Unavailable) and error.code in LOST_CODES:
                raise _Again(error) from error
            failure = error
        except TimeoutError:
            cause = f"The node did not finish the {operation.kind} in time."
            failure = Unavailable("node_timeout", cause, "Try again when it is less busy.")
        else:
            return await self._database.write(end, live.started_at or time.time())
        if operation.kind is Verb.DELETE:
            # A delete cannot fail for good: whatever is in its way, it goes on until nothing is left.
            raise _Again(failure)
        return await self._failed(link, live, sandbox, failure)

    async def _moved(self, live: Live, sandbox: SandboxRow) -> SandboxRow:
        """A suspended sandbox whose node is away goes on elsewhere, where the store has it and another node reaches that."""
        operation = live.operation
        wakes = operation.kind in (Verb.RESTORE, Verb.WAKE) and sandbox.state is State.SUSPENDED
        if not wakes or sandbox.artifact is None or self._nodes.is_connected(sandbox.node_id):
            return sandbox
        now = await self._database.read(sandboxes.find, sandbox.id)
        if now is not None and now.node_id != sandbox.node_id:
            return now  # an attempt before this one moved it
        away = self._nodes.find(sandbox.node_id)
        store = "" if away is None or away.info is None else away.info.store
        with contextlib.suppress(Unavailable):
            await self._nodes.wait(sandbox.node_id, within=MOVE_AFTER_S)
            return sandbox
        for link in self._nodes.ready():
            if link.info is not None and link.info.store and store in ("", link.info.store):
                assert link.node_id is not None
                moved = await self._database.write(ending.move, operation, link.node_id)
                if moved is not None:
                    log.info("%s goes on at the node %s", sandbox.id, link.node_id)
                    return moved
        return sandbox

    async def _connected(self, live: Live, sandbox: SandboxRow, turn: _Turn) -> NodeLink:
        """The sandbox's node, and a turn to call it; waits for it until the operation's bound, a delete for as long as it takes."""
        if not self._nodes.is_connected(sandbox.node_id):
            # Operations of a node that is away must not keep those of the others from theirs.
            turn.give_back()
            self._note(live, WAITING)
            await self._hand_over(live, sandbox)
        left = (live.due_from or live.operation.created_at) + self._bound_s - time.time()
        if live.operation.kind is Verb.DELETE:
            link = await self._nodes.wait(sandbox.node_id, within=self._bound_s)
            await turn.take()
            return link
        try:
            link = await self._nodes.wait(sandbox.node_id, within=max(left, 0.0))
        except Unavailable:
            left = 0.0
        if left <= 0.0:
            raise Unavailable(
                "operation_bound",
                f"The operation did not end within {self._bound_s:g} seconds: the node {sandbox.node_id} was not there.",
                "Ask for it again when the node is back.",
            )
        await turn.take()
        live.phase = "running"
        return link

    async def _hand_over(self, live: Live, sandbox: SandboxRow) -> None:
        """Lets a process have the operation that reaches the node, where there are others. Raises `_GivenBack`.

        Not after its bound: then it ends here.
        """
        operation = live.operation
        expired = operation.kind is not Verb.DELETE and time.time() > operation.created_at + self._bound_s
        if not self._claims.shared or self._claims.alone or expired:
            return
        try:
            await self._nodes.wait(sandbox.node_id, within=HANDOVER_S)
        except Unavailable:
            live.dirty = False
            await self._claims.give_back(operation.id, WAITING)
            raise _GivenBack from None

    async def _check_isolation(self, link: NodeLink, verb: Verb, sandbox: SandboxRow) -> None:
        """Holds every start to what sandbox and project require: node and project may have changed since the creation.

        A creation was placed by it just now, and its node checks it once more.
        """
        if (
            verb not in (Verb.START, Verb.WAKE, Verb.RESTORE, Verb.ROLLBACK, Verb.FORK)
            or sandbox.state is State.PAUSED
            or link.info is None
        ):
            return
        of_project = await self._database.read(projects.required_isolation, sandbox.project)
        for required, who in ((sandbox.require_isolation, "the sandbox"), (of_project, "its project")):
            if required not in (None, link.info.isolation):
                raise Unprocessable(
                    "isolation_unavailable",
                    f"The node gives {link.info.isolation} isolation; {who} requires {required}.",
                    "`hatchway doctor` on the node says why; or change what is required.",
                )

    async def _failed(self, link: NodeLink, live: Live, sandbox: SandboxRow, error: HatchwayError) -> Finished | None:
        """Looks what became of the sandbox, then writes the failure with it. Of a snapshot that was to be imported nothing stays."""
        details: dict[str, Any] = msgspec.to_builtins(error.as_dict(), str_keys=True)
        if live.operation.of_snapshot:
            failed = await self._database.write(ending.fail, live.operation, details, None, live.started_at)
            await quietly(self._drop_snapshot(link, live.operation.target))
            return failed
        seen: Observed | None = None
        try:
            ref = SandboxRef(sandbox_id=sandbox.id, generation=sandbox.generation)
            seen = await link.call("sandbox.get", ref, Observed, within=LOOK_WITHIN_S)
        except NotFound:
            # A sandbox that never ran leaves no trace where its creation failed: that failure is what there is to say.
            seen = None if sandbox.boot_id is None else lost(sandbox)
        except (HatchwayError, TimeoutError) as second:
            log.warning("state of %s after a failed %s: %s", sandbox.id, live.operation.kind, second)
        return await self._database.write(ending.fail, live.operation, details, seen, live.started_at)

    async def _drop_snapshot(self, link: NodeLink, snapshot_id: str) -> None:
        await link.call("snapshot.delete", SnapshotRef(snapshot_id=snapshot_id), Empty, within=LOOK_WITHIN_S)
        await self._database.write(snapshots.deleted, snapshot_id)

    def _note(self, live: Live, phase: str) -> None:
        live.phase, live.dirty = phase, True
        self._changed.set()

    async def _flush_forever(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(FLUSH_EVERY_S)
            self._changed.clear()
            dirty = [live for live in self.live.values() if live.dirty]
            try:
                await self._write_progress(dirty)
            except HatchwayError as error:
                log.warning("progress not written: %s", error)

    async def _write_progress(self, changed: list[Live]) -> None:
        notes = [(live.operation.id, live.phase, live.progress, live.started_at or time.time()) for live in changed]
        for live in changed:
            live.dirty = False
        if notes:
            await self._database.write(operations.note_all_progress, notes)


class _GivenBack(Exception):
    """Another process is to execute the operation."""


class _Again(Exception):
    """The verb has to be sent again: the node was lost, or a delete did not succeed yet."""

    def __init__(self, error: HatchwayError) -> None:
        super().__init__()
        self.error = error


def note_end(operation: OperationRow) -> None:
    """Counts an operation that ended, and writes it down."""
    seconds = (operation.finished_at or time.time()) - operation.created_at
    metrics.operation(str(operation.kind), str(operation.status), seconds)
    code = "" if operation.error is None else f": {operation.error.get('code')}: {operation.error.get('cause')}"
    log.info("%s %s after %.3f s%s", operation.kind, operation.status, seconds, code)


def _finish(live: Live, finished: Finished | None) -> None:
    if finished is not None:
        note_end(finished.operation)
    _resolve(live, finished)


async def _no_consent(approval_id: str) -> HatchwayError | None:
    return Internal("internal", f"Nobody is asked for the approval {approval_id}.", "Try again.")


def _resolve(live: Live, finished: Finished | None) -> None:
    if not live.done.done():
        live.done.set_result(finished)


def lost(sandbox: SandboxRow) -> Observed:
    """What is to be said of a sandbox that its node knows nothing of."""
    return Observed(
        sandbox_id=sandbox.id,
        project=sandbox.project,
        generation=sandbox.generation,
        state=State.FAILED,
        cause=Cause.DISK_LOST,
        reason="The node has no trace of the sandbox; its disk is gone.",
        isolation=sandbox.isolation or "emulated",
        boot_id=sandbox.boot_id,
        sequence=sandbox.observed_sequence,
    )
