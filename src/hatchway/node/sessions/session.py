"""One command session: the sink of its process in the guest, its states, and who follows it."""

import asyncio
import contextlib
import errno
import logging
import signal
from pathlib import Path
from typing import Any

from hatchway.domain.errors import Conflict, Exhausted, HatchwayError, HostExhausted, Unprocessable
from hatchway.node.guest.seam import ExitReason, GuestError, GuestLink, LinkLost, Proc, ProcessState
from hatchway.node.sessions import process
from hatchway.node.sessions import record as records
from hatchway.node.sessions.deadline import Deadline, GivingUp, Timer
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.record import Record
from hatchway.node.sessions.seam import Standing
from hatchway.node.sessions.spool import STDERR, STDOUT, Cursor, Spool
from hatchway.node.sessions.surroundings import Surroundings
from hatchway.wire.node import Exit, SessionStatus, Usage

log = logging.getLogger(__name__)

_PATIENCE = 15
_GIVEN_UP = "The agent in the sandbox did not tell in time what became of the process; whether it still runs there is not known."
_REASONS = {
    ExitReason.EXITED: "exited",
    ExitReason.SIGNALED: "signaled",
    ExitReason.TIMEOUT: "timeout",
    ExitReason.OOM: "oom",
    ExitReason.SPAWN_FAILED: "spawn_failed",
}


class Session:
    """States: created → (starting) → running → exited → ended.

    It ends when both streams are closed and stored, or a linger after the leader's end. A background child that outlives
    the leader does not keep the session from ending: it goes on running, and what it writes from then on to streams that it
    holds open is taken from it and dropped, so that it never blocks on a full pipe. Deleting the session kills it.

    It is the agent in the guest that keeps the timeout. One that is silent, or another program in its place, does not keep a session
    from ending: the host has deadlines of its own, for the start, for the timeout and for what is owed after the end.
    """

    def __init__(self, folder: Path, record: Record, spool: Spool, around: Surroundings) -> None:
        self.folder = folder
        self.record = record
        self.spool = spool
        self.stdin_turn = asyncio.Lock()
        """Held by the request that feeds stdin."""
        self.unsaved = False
        self._around = around
        self._followers: set[Follower] = set()
        self._link: GuestLink | None = None
        self._starting: asyncio.Task[None] | None = None
        self._linger: Timer | None = None
        self._checking: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[int] | None = None
        self._patience = _PATIENCE
        self._deadline = Deadline(around.later, self._late)
        self._agent = GivingUp()
        self._asked_at = 0.0
        self._killing: asyncio.Task[None] | None = None
        self._owed = (0, 0)
        self._streams_closed = False
        self._outlived = False
        self._dropped = [0, 0]
        self._announced = False
        self._disposed = False

    # -- what others see

    @property
    def id(self) -> str:
        """The session's id."""
        return self.record.spec.session_id

    @property
    def ended(self) -> bool:
        """Both streams are over: nothing will be added."""
        return self.record.state == "ended"

    @property
    def started(self) -> bool:
        """The process was started, or could not be started."""
        return self.record.state not in ("created", "starting")

    @property
    def followed(self) -> bool:
        """A client reads it now."""
        return bool(self._followers)

    @property
    def living(self) -> bool:
        """Something of the process may live in the guest."""
        return self.record.agent_open and (self._outlived or not self._streams_closed)

    def status(self) -> SessionStatus:
        """What the control plane is told."""
        record = self.record
        stdout, stderr = self.ends()
        return SessionStatus(
            session_id=self.id,
            sandbox_id=record.spec.sandbox_id,
            state="created" if record.state == "starting" else record.state,
            pid=record.pid,
            exit=record.exit,
            stdout_bytes=stdout,
            stderr_bytes=stderr,
            started_at=record.started_at if self.started else None,
            ended_at=record.ended_at,
            retain_until=record.retain_until,
        )

    def standing(self) -> Standing:
        """What another session goes on from when the machine is copied as it stands."""
        record = self.record
        stdout, stderr = self.spool.stored()
        return Standing(
            spec=record.spec,
            state=record.state,
            boot_id=record.boot_id,
            pid=record.pid,
            started_at=record.started_at,
            stdout=stdout,
            stderr=stderr,
            stdin=record.stdin_offset,
            stdin_eof=record.stdin_eof,
        )

    def ends(self) -> tuple[int, int]:
        """Offsets behind the last octets of stdout and stderr so far."""
        return self.spool.stored()

    def follow(self, stdout: int = 0, stderr: int = 0) -> Follower:
        """Adds a client that goes on at these offsets.

        Raises `Unprocessable("offset_beyond_end")` and `Exhausted("too_many_followers")`.
        """
        for name, offset, end in zip(("stdout", "stderr"), (stdout, stderr), self.ends(), strict=True):
            if offset > end:
                raise Unprocessable(
                    "offset_beyond_end",
                    f"{name} has {end} octets so far; offset {offset} is not there.",
                    "Use an offset that this session gave you.",
                    stream=name,
                    end=end,
                )
        if len(self._followers) >= self._around.limits.followers:
            raise Exhausted(
                "too_many_followers",
                f"{len(self._followers)} clients follow this session already.",
                "Close one of them.",
            )
        streams = self.spool.streams
        cursors = {STDOUT: Cursor(streams[STDOUT], stdout), STDERR: Cursor(streams[STDERR], stderr)}
        follower = Follower(cursors, self._left)
        self._followers.add(follower)
        return follower

    # -- what clients ask

    async def start(self, link: GuestLink) -> None:
        """Starts the process unless it was started; any number of callers may do so at once, it starts one time.

        Raises `Exhausted("too_many_processes")`, `Unprocessable("spawn_refused")`, `HostExhausted`, and
        `Unavailable("sandbox_unreachable")` when the sandbox ended or does not answer. A caller that goes away does not stop the start.
        """
        if self.started:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.get_running_loop().create_task(self._spawn(link))
            self._starting.add_done_callback(_retrieve)
        await asyncio.shield(self._starting)

    def feeding(self, link: GuestLink, offset: int, data: bytes, *, eof: bool = False) -> "asyncio.Task[int]":
        """`feed` as a task that goes on although its client goes away; one at a time."""
        self._feeding = asyncio.get_running_loop().create_task(self.feed(link, offset, data, eof=eof))
        self._feeding.add_done_callback(_retrieve)
        return self._feeding

    async def feed(self, link: GuestLink, offset: int, data: bytes, *, eof: bool = False) -> int:
        """Gives stdin octets at `offset`; the caller holds `stdin_turn`. Returns the next offset; waits for the process to take them.

        Octets below the next offset were taken before and are skipped. Raises `Conflict` (`stdin_closed`, `stdin_offset`),
        `Conflict("process_ended")` when its agent is given up on meanwhile, `Unavailable("sandbox_unreachable")`.
        """
        record = self.record
        if offset > record.stdin_offset:
            raise Conflict(
                "stdin_offset",
                f"The next octet of stdin is {record.stdin_offset}, not {offset}.",
                "Send from the offset that the last answer gave.",
                next=record.stdin_offset,
            )
        data = data[record.stdin_offset - offset :]
        if record.stdin_eof:
            if data:
                raise Conflict("stdin_closed", "The end of stdin was sent before.", "Start another session.")
            return record.stdin_offset
        try:
            async with self._agent.waiting():
                taken = await process.give_input(link, record.spec.process_id, record.stdin_offset, data, eof=eof)
        except TimeoutError:
            raise Conflict("process_ended", _GIVEN_UP, "Look at the session's exit.") from None
        record.stdin_offset = max(record.stdin_offset, taken)
        if eof and not record.stdin_eof:
            record.stdin_eof = True
            self.save()  # the offset need not be: the agent says it
        return record.stdin_offset

    async def signal(self, link: GuestLink, number: int, *, leader_only: bool) -> bool:
        """Signals the process tree or its leader; tells whether there was anything to signal."""
        if not self.living:
            return False
        return await process.send_signal(link, self.record.spec.process_id, number, leader_only=leader_only)

    async def resize(self, link: GuestLink, rows: int, cols: int) -> None:
        """Resizes the terminal. Raises `Conflict("no_terminal")`."""
        if self.record.spec.pty is None:
            raise Conflict("no_terminal", "The session has no terminal.", "Create it with `pty`.")
        await process.resize(link, self.record.spec.process_id, rows, cols)

    # -- the process's sink

    def stored(self) -> tuple[int, int]:
        """See `ProcessSink`."""
        if self.ended:
            return self._dropped[0], self._dropped[1]
        return self.spool.stored()

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        """See `ProcessSink`."""
        if fd not in (STDOUT, STDERR):
            return
        if self.ended:
            self._dropped[fd - 1] = max(self._dropped[fd - 1], offset + len(data))
            return
        self.spool.append(fd, offset, data)
        if self.spool.over_budget:
            self._around.crowded(self)
        if self._streams_closed:
            self._end_when_stored()
        self._wake()

    def changed(self, proc: Proc) -> None:
        """See `ProcessSink`."""
        record = self.record
        record.stdin_offset = max(record.stdin_offset, proc.stdin_offset)
        self._streams_closed = self._streams_closed or proc.state is ProcessState.CLOSED
        if self.ended:
            self._forget_process()
            return
        if not self.started:
            self._running(proc.pid)
        if proc.state is ProcessState.RUNNING:
            return
        self._owed = (proc.stdout_total, proc.stderr_total)
        if record.exit is None:
            self._exited(proc)
        elif self._linger is None:  # the node that saw it end is another process by now
            self._linger_on(first=True)
        if proc.reason is ExitReason.SPAWN_FAILED:
            self._streams_closed = True
        if self._streams_closed:
            self._end_when_stored()

    def gone(self, reason: str, how: str = "sandbox_lost") -> None:
        """See `ProcessSink`; also called by the host when the sandbox is lost, or rolled back (`how`)."""
        self._link = None
        self._deadline.clear()
        self._streams_closed = True
        self.record.agent_open = False
        if self.record.state == "created" or self.ended:
            if self.record.hidden:
                self._announce()
            return
        if self.record.exit is None:
            self.record.exit = Exit(reason=how, message=reason)
        self._end()

    # -- what the host does with it

    def connect(self, link: GuestLink) -> None:
        """The agent is there: goes on with the process that it knows, or learns that it is lost. Idempotent."""
        record = self.record
        if self._link is link or record.state == "created" or not record.agent_open:
            return
        if self._closing is not None:  # a close that waits for a link that is no more
            self._closing.cancel()
            self._closing = None
        self._link = link
        if link.attach(record.spec.process_id, self):
            self._go_on(link)
            if record.hidden == "deleted":
                self.forgetting()
        elif record.state == "starting" and record.boot_id == link.hello.boot_id:
            record.state, record.agent_open = "created", False  # SPAWN never got there: the next attach starts it
            self._link = None
            self._deadline.clear()
            self.save()
        else:
            self.gone("The sandbox was started anew, and the process did not survive that.")

    def stands_by(self) -> None:
        """The sandbox is suspended: no deadline comes nearer until `connect`."""
        self._deadline.hold()

    def end_deleted(self) -> None:
        """Ends the session for its followers because it is being deleted."""
        if not self.ended and self.record.state != "created":
            self.record.exit = self.record.exit or Exit(reason="signaled", signal=9, message="The session was deleted.")
            self._end()

    def stop_followers(self, why: str) -> None:
        """Ends all clients' streams where they are."""
        for follower in self._followers:
            follower.stop(why)

    def resume_closing(self) -> None:
        """The record could be written at last: the agent may forget the process now."""
        if self.ended:
            self._forget_process()

    def forgetting(self) -> asyncio.Task[None] | None:
        """Starts to kill and forget what is left of the process in the guest; None when nothing is, or nobody can be asked."""
        self._streams_closed = True
        self._forget_process()
        return self._closing

    def save(self) -> bool:
        """Writes the record; on failure it is tried again by the host's sweep."""
        try:
            records.save(self.folder, self.record)
        except OSError as error:
            if not self.unsaved:
                log.error("session %s cannot be recorded: %s", self.id, error)
            self.unsaved = True
        else:
            self.unsaved = False
        return not self.unsaved

    def dispose(self) -> None:
        """Gives timers, tasks and files back; the object is not used any more."""
        self._disposed = True
        if self._linger is not None:
            self._linger.cancel()
        self._deadline.clear()
        tasks: tuple[asyncio.Task[Any] | None, ...] = (
            *(self._checking, self._closing, self._starting, self._feeding, self._killing),
        )
        for task in tasks:
            if task is not None:
                task.cancel()
        self.spool.seal()

    # -- inside

    async def _spawn(self, link: GuestLink) -> None:
        record, spec = self.record, self.record.spec
        record.state, record.agent_open = "starting", True
        record.boot_id = link.hello.boot_id
        record.started_at = self._around.now()
        if not self.save():
            record.state, record.agent_open = "created", False
            raise HostExhausted(
                "host_disk_full", "The session cannot be recorded: the host's disk is full.", "Free disk space."
            )
        self._link = link
        limits = self._around.limits
        self._asked_at = link.ran()
        self._deadline.set(min(limits.start_s, spec.timeout_s or limits.start_s) + limits.grace_s, link)
        try:
            async with self._agent.waiting():
                pid = await process.spawn(link, spec, self)
        except TimeoutError:
            return
        except (Exhausted, Unprocessable):
            if record.state == "starting":
                record.state, record.agent_open = "created", False
                self._link = None
                self._deadline.clear()
                self.save()
            raise
        if pid is not None and record.state == "starting":
            self._running(pid)

    def _running(self, pid: int | None) -> None:
        self.record.state, self.record.pid = "running", pid
        self._announce(save=True)
        timeout, link = self.record.spec.timeout_s, self._link
        if timeout is None or link is None:
            self._deadline.clear()
        else:
            self._deadline.set(timeout + self._around.limits.grace_s - (link.ran() - self._asked_at), link)

    def _go_on(self, link: GuestLink) -> None:
        """With another link. A node that has only just started does not know how long the process ran: its time begins anew."""
        if self._deadline.is_set:
            self._deadline.go_on(link)
        elif self.record.state == "running":
            self._asked_at = link.ran()
            self._running(self.record.pid)

    def _late(self) -> None:
        """The agent had the time that it may take, and did not say what it should have said by then."""
        link, limits = self._link, self._around.limits
        if self.ended:
            return
        if self.record.exit is not None:
            self._end()  # what it owes is a gap
        elif self.started and link is not None and self._killing is None:
            # One that is only slow has still to end what it should have ended.
            self._killing = asyncio.get_running_loop().create_task(self._kill(link))
            self._deadline.set(limits.grace_s, link)
        else:
            self._give_up()

    async def _kill(self, link: GuestLink) -> None:
        leader_only = self.record.spec.timeout_scope == "leader"
        with contextlib.suppress(HatchwayError):
            await process.send_signal(link, self.record.spec.process_id, signal.SIGKILL, leader_only=leader_only)

    def _give_up(self) -> None:
        """Ends the session for its followers; whatever is left of the process in the guest is to be killed, by whoever answers there."""
        log.warning("session %s: %s", self.id, _GIVEN_UP)
        self._streams_closed = True
        self.record.exit = Exit(reason="agent_unresponsive", message=_GIVEN_UP)
        self._end()
        self._agent.give_up()

    def _exited(self, proc: Proc) -> None:
        stdout, stderr = self._owed
        reason = _REASONS.get(proc.reason, "exited") if proc.reason is not None else "exited"
        if self._killing is not None and proc.reason is ExitReason.SIGNALED:
            reason = "timeout"  # it was we who killed it, in place of the agent
        self.record.state = "exited"
        self.record.exit = Exit(
            reason=reason,
            code=proc.exit_code if proc.exit_signal is None else None,
            signal=proc.exit_signal,
            message=proc.message,
            usage=Usage(
                user_s=proc.utime_us / 1e6,
                system_s=proc.stime_us / 1e6,
                wall_s=proc.wall_us / 1e6,
                max_rss_kib=proc.max_rss_kib,
            ),
            stdout_bytes=stdout,
            stderr_bytes=stderr,
        )
        self._linger_on(first=True)
        self._announce(save=True)

    def _linger_on(self, *, first: bool = False) -> None:
        usual, wanted = self._around.limits.linger_s, self.record.spec.linger_s
        now = wanted if first and wanted is not None else usual
        self._linger = self._around.later(now, self._lingered)
        if first and self._link is not None:
            self._deadline.set(now + _PATIENCE * usual + self._around.limits.grace_s, self._link)

    def _all_stored(self) -> bool:
        stdout, stderr = self.spool.stored()
        return stdout >= self._owed[0] and stderr >= self._owed[1]

    def _end_when_stored(self) -> None:
        if self._all_stored():
            self._end()

    def _lingered(self) -> None:
        self._checking = asyncio.get_running_loop().create_task(self._check_linger())

    async def _check_linger(self) -> None:
        """Ends the session unless the guest stands still (it is paused) or owes output that it had read before."""
        link = self._around.link_of(self.record.spec.sandbox_id)
        try:
            if link is not None:
                await link.ping()
        except (LinkLost, GuestError):
            link = None
        if self.ended:
            return
        if link is not None:
            self._patience -= 1
            if self._all_stored() or self._patience <= 0:
                self._end()
                return
        self._linger_on()

    def _end(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._deadline.clear()
        record = self.record
        self._dropped = list(self.spool.stored())
        for fd, owed in zip((STDOUT, STDERR), self._owed, strict=True):
            self.spool.streams[fd].advance(owed, "lost")
        record.state = "ended"
        record.ended_at = self._around.now()
        record.retain_until = record.ended_at + record.spec.retain_s
        record.stdout_end, record.stderr_end = self.spool.stored()
        if record.exit is not None:
            record.exit = process.with_totals(record.exit, record.stdout_end, record.stderr_end)
        if not self._followers:
            self.spool.seal()
        self._announce(save=True)

    def _announce(self, *, save: bool = False) -> None:
        """Tells followers at once, the disk and the control plane at the end of this turn of the loop, once for all changes in it."""
        self.unsaved = self.unsaved or save
        self._wake()
        if not self._announced:
            self._announced = True
            self._around.soon(self._publish)

    def _publish(self) -> None:
        self._announced = False
        if self._disposed:
            return
        if self.unsaved:
            self.save()
        if self.ended:
            self._forget_process()
        self._around.published(self)

    def _forget_process(self) -> None:
        """Once its streams are closed, lets the agent forget the process; a background child that lives is left alone, and looked for again at each sweep."""
        if not (self.record.agent_open and self._streams_closed) or self._closing is not None:
            return
        link = self._link or self._around.link_of(self.record.spec.sandbox_id)
        if link is not None and not self.unsaved:
            self._closing = asyncio.get_running_loop().create_task(self._close_process(link))

    async def _close_process(self, link: GuestLink) -> None:
        deleting = self.record.hidden == "deleted" or self._agent.given_up
        try:
            await link.close_process(self.record.spec.process_id, if_over=not deleting)
        except GuestError as error:
            if error.errno == errno.EBUSY:
                self._outlived, self._closing = True, None
                if not deleting and self.record.hidden == "deleted":  # meanwhile
                    self._forget_process()
                return
            log.debug("closing the process of %s: %s", self.id, error)
        except LinkLost:
            self._closing = None  # the host says what became of the sandbox: lost, or up again
            return
        self.record.agent_open = False
        self.unsaved = True  # the sweep writes it: nothing is lost if nobody does
        self._link = None
        self._closing = None
        if self.record.hidden:
            self._around.published(self)

    def _wake(self) -> None:
        for follower in self._followers:
            follower.wake()

    def _left(self, follower: Follower) -> None:
        self._followers.discard(follower)
        if self.ended and not self._followers:
            self.spool.seal()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
