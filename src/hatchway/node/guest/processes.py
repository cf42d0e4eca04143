"""What a link knows of one process in the guest, and what the guest may say of it.

The guest is hostile: offsets that go back, credit that was not given, totals that contradict what came before are `Lost`,
which ends the connection. Nothing here does I/O.
"""

import asyncio
import logging
from collections.abc import Callable

from hatchway.node.guest.requests import readable
from hatchway.node.guest.seam import ExitReason, Proc, ProcessSink, ProcessState
from hatchway.wire.channel import MAX_KEY, MAX_PROCESS_NUMBER, Data, Lost, encode_output_ack
from hatchway.wire.channel_fields import Fields, Malformed, Tag

OUTPUT_WINDOW = 1024 * 1024
"""Octets of each output stream that the agent may send past what was acknowledged."""
MAX_INPUT_LIMIT = 1024 * 1024
"""More credit than this is not used."""
MAX_OFFSET = 2**62
"""A guest that claims more octets is lying."""
MAX_PROC_FRAMES = 64
"""PROC frames of one process in one connection: its states are three."""

log = logging.getLogger(__name__)


def decode_proc(number: int, payload: memoryview) -> Proc:
    """Returns what a PROC frame says. Raises `Malformed`."""
    if not 1 <= number <= MAX_PROCESS_NUMBER:
        raise Malformed(f"a process with the number {number}")
    fields = Fields(payload)
    try:
        state = ProcessState(fields.number(Tag.STATE))
        code = fields.get_number(Tag.REASON)
        reason = None if code is None else ExitReason(code)
    except ValueError as error:
        raise Malformed(f"PROC: {error}") from None
    if state is not ProcessState.RUNNING and reason is None:
        raise Malformed("PROC: an ended process without a reason")
    key = fields.text(Tag.KEY, MAX_KEY)
    totals = [fields.get_number(tag) or 0 for tag in (Tag.STDOUT_TOTAL, Tag.STDERR_TOTAL, Tag.STDIN_OFFSET)]
    if max(totals) > MAX_OFFSET:
        raise Malformed("PROC: a total beyond all measure")
    return Proc(
        number=number,
        key=key,
        state=state,
        pid=fields.get_number(Tag.PID) or None,
        exit_code=fields.get_number(Tag.EXIT_CODE),
        exit_signal=fields.get_number(Tag.EXIT_SIGNAL),
        reason=reason,
        message=readable(fields.get_text(Tag.MESSAGE)),
        utime_us=fields.get_number(Tag.UTIME_US) or 0,
        stime_us=fields.get_number(Tag.STIME_US) or 0,
        wall_us=fields.get_number(Tag.WALL_US) or 0,
        max_rss_kib=fields.get_number(Tag.MAXRSS_KIB) or 0,
        stdout_total=totals[0],
        stderr_total=totals[1],
        stdin_offset=totals[2],
    )


class Process:
    """One process of a link: its sink, how far its streams are, what was acknowledged, what credit there is."""

    def __init__(
        self,
        number: int,
        key: str,
        sink: ProcessSink | None = None,
        *,
        starting: bool = False,
        window: int = OUTPUT_WINDOW,
        by_consumption: bool = False,
    ) -> None:
        """`by_consumption`: its sink says itself (`Peer.consumed`) when octets may be acknowledged."""
        self.window = window
        self.by_consumption = by_consumption
        self.number = number
        self.key = key
        self.sink = sink
        self.starting = starting
        """Its SPAWN is not answered: the agent may not know it yet."""
        self.proc: Proc | None = None
        self.forgotten = False
        """The agent knows nothing of it any more."""
        self.unacked = 0
        """Octets of output taken since the last OUTPUT_ACK."""
        self.taken = 0
        """Octets of stdin that the process took."""
        self.sent = 0
        """Octets of stdin that were ever sent."""
        self._inherited = 0
        self.eof_at: int | None = None
        self.has_stdin = True
        self.input_lock = asyncio.Lock()
        self._waiter: asyncio.Future[None] | None = None
        self._muted = False
        self.reset()

    def reset(self) -> None:
        """A connection ended, and all credit with it."""
        self._credited = False
        self._procs = 0
        self._begun = [False, False]
        self._next = [0, 0]
        self._limit = [0, 0]
        self.unacked = 0
        self.input_end = 0
        """Offset of stdin up to which octets may be sent; there is credit only after an INPUT_ACK of this connection."""
        self.input_open = False

    @property
    def state(self) -> ProcessState:
        """The last known state."""
        return ProcessState.RUNNING if self.proc is None else self.proc.state

    @property
    def complete(self) -> bool:
        """Whether it ended and all of its output was stored: nothing is left to come."""
        if self.proc is None or self.proc.state is not ProcessState.CLOSED or self.sink is None:
            return False
        stdout, stderr = self.sink.stored()
        return stdout >= self.proc.stdout_total and stderr >= self.proc.stderr_total

    def connect(self, sink: ProcessSink) -> None:
        """Gives its output to `sink` from now on. A sink that takes over in mid-connection stored what the one before it did."""
        self.sink = sink
        self._muted = False

    def ack(self) -> bytes:
        """Returns an OUTPUT_ACK for all that the sink stored; the first one of a connection opens the window."""
        if self.sink is None or self._muted:
            return b""
        stored = self.sink.stored()
        for stream in (0, 1):
            if not self._begun[stream]:
                self._next[stream] = stored[stream]
            self._limit[stream] = max(self._limit[stream], stored[stream] + self.window)
        self._credited = True
        self.unacked = 0
        return encode_output_ack(self.number, stored[0], stored[1], self.window)

    def take_output(self, output: Data) -> None:
        """Checks an OUTPUT and gives it to the sink. Raises `Lost`."""
        descriptor, offset, data = output
        if descriptor not in (1, 2) or not data or not self._credited:
            raise Lost(f"OUTPUT of {len(data)} octets on descriptor {descriptor} that nobody asked for")
        stream = descriptor - 1
        if not self._begun[stream]:
            self._begun[stream] = True
            if offset > self._next[stream]:
                # The agent freed what we had acknowledged and lost again: it goes on with the oldest octet it has.
                self._next[stream] = offset
                self._limit[stream] = max(self._limit[stream], offset + self.window)
        end = offset + len(data)
        if offset != self._next[stream]:
            raise Lost(f"OUTPUT at {offset} where {self._next[stream]} comes next")
        if end > self._limit[stream] or end > MAX_OFFSET:
            raise Lost(f"OUTPUT up to {end} with credit up to {self._limit[stream]}")
        proc = self.proc
        if (
            proc is not None
            and proc.state is ProcessState.CLOSED
            and end > (proc.stdout_total, proc.stderr_total)[stream]
        ):
            raise Lost("OUTPUT beyond the total of a closed process")
        self._next[stream] = end
        if not self.by_consumption:
            self.unacked += len(data)
        if self.sink is not None:
            self._call(self.sink.output, descriptor, offset, data)

    def take_proc(self, proc: Proc) -> None:
        """Checks a PROC against what is known and tells the sink. Raises `Lost`."""
        self._procs += 1
        if self._procs > MAX_PROC_FRAMES:
            raise Lost(f"more than {MAX_PROC_FRAMES} PROC frames of one process")
        if proc.key != self.key:
            raise Lost("PROC with the key of another process")
        before = self.proc
        if before is not None and (
            proc.state < before.state
            or proc.stdout_total < before.stdout_total
            or proc.stderr_total < before.stderr_total
            or proc.stdin_offset < before.stdin_offset
        ):
            raise Lost("PROC goes back behind what was said before")
        if self._credited and (proc.stdout_total < self._next[0] or proc.stderr_total < self._next[1]):
            raise Lost("PROC counts less output than was sent")
        if before is None and not self.starting:
            # Found, not started by this link: the agent may hold octets from before that the process has still to take.
            self._inherited = proc.stdin_offset + MAX_INPUT_LIMIT
        if proc.stdin_offset > max(self.sent, self._inherited):
            raise Lost("PROC counts more stdin than was sent")
        self.proc = proc
        self.starting = False
        self.taken = max(self.taken, proc.stdin_offset)
        self.tell()
        self.wake()

    def tell(self) -> None:
        """Tells the sink the present state."""
        if self.sink is not None and self.proc is not None:
            self._call(self.sink.changed, self.proc)

    def take_input_ack(self, fields: Fields) -> None:
        """Takes credit for stdin. Raises `Lost` or `Malformed`."""
        offset = fields.number(Tag.STDIN_OFFSET)
        if offset > max(self.sent, self._inherited):
            raise Lost(f"INPUT_ACK for {offset} octets where {self.sent} were sent")
        if offset < self.taken:
            raise Lost("INPUT_ACK goes back")
        self.taken = offset
        self.input_open = True
        self.input_end = max(self.input_end, offset + min(fields.number(Tag.LIMIT), MAX_INPUT_LIMIT))
        self.wake()

    async def input_change(self) -> None:
        """Waits until anything changed that a sender of stdin waits for. One waiter at a time (`input_lock`)."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Something changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def input_waits(self) -> bool:
        """Whether a sender of stdin waits for credit."""
        return self._waiter is not None

    def lose(self, reason: str) -> None:
        """It is gone with its guest: the sink hears so, unless there was nothing left to come."""
        self.forgotten = True
        if self.sink is not None:
            self._call(self._say_gone, self.sink, reason)
        self.sink = None
        self.wake()

    def _say_gone(self, sink: ProcessSink, reason: str) -> None:
        if not self.complete:
            sink.gone(reason)

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        """A sink that fails is our own mistake or a full disk; it must not take the link down with it."""
        if self._muted:
            return
        try:
            call(*arguments)
        except Exception:
            log.exception("the sink of process %d failed; it is not called again", self.number)
            self._muted = True
