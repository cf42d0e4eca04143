"""One guest agent as the node's end of the channel sees it: dials, resynchronises, hands out what comes, for as long as the VM lives.

One task dials; everything else happens in callbacks of the event loop, so that between a received octet and the caller who
waits for it stands one wake-up. An idle peer costs nothing: no timer runs unless something waits for the guest.
"""

import asyncio
import contextlib
import logging
import secrets

from hatchway.node import metrics
from hatchway.node.guest.connection import Connection, reach
from hatchway.node.guest.processes import Process, decode_proc
from hatchway.node.guest.requests import Request, Requests
from hatchway.node.guest.seam import AgentHello, GuestError, LinkLost, Proc
from hatchway.node.vmm.seam import AgentSocket
from hatchway.wire import channel
from hatchway.wire.channel import Frame, FrameReader, FrameType, Lost
from hatchway.wire.channel_fields import Fields, Tag

ACK_AT = 128_000
"""Octets of one process that are acknowledged at once; fewer wait for company. A quarter of what the agent keeps of a stream: each
acknowledgement interrupts the guest, and it goes on writing meanwhile."""
ACK_DELAY_S = 0.05
TICK_S = 1.0
PROBE_AFTER = 3
"""Seconds of silence, while something waits for the guest, after which it is pinged."""
SILENT_FOR = 15
"""Seconds of silence, while something waits for the guest, after which the connection is given up and made anew."""
REQUEST_WITHIN = 90
"""Seconds in which a request is answered, over however many connections, or fails with `LinkLost`."""
BACKOFF_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""Delays before dialling again; the first after a connection that stood for `STEADY_S`, the last for ever."""
STEADY_S = 5.0
STRIKES = 5
"""Broken connections after which a guest is given up, unless one stood for `FORGIVE_S` in between."""
FORGIVE_S = 60.0
STRAYS = 1024
"""Frames of one connection that belong to nothing (any more) and are dropped before it counts as broken."""
BOOT_ID_LENGTH = 64
AGENT_LENGTH = 256

log = logging.getLogger(__name__)


class Peer:
    """The agent of one VM. `Link` puts requests and processes into its tables; `start` makes it dial."""

    def __init__(self, agent: AgentSocket, *, fresh: bool, vm_ended: asyncio.Event) -> None:
        self.hello = AgentHello("", "", 0, ())
        self.trouble = "it was never reached"
        """What was the matter with the last connection that ended."""
        self.requests = Requests()
        self.processes: dict[int, Process] = {}
        self.up = False
        """Whether both sides know where they are: requests and stdin may be sent."""
        self.generation = 0
        """Counts resynchronisations."""
        self.vm_ended = vm_ended
        self._agent = agent
        self._fresh = fresh
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._connection: Connection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._end: LinkLost | None = None
        self._epoch = 0
        self._nonce = b""
        self._acknowledged: Fields | None = None
        self._listed: dict[int, Proc] = {}
        self._unacked: set[Process] = set()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._silence = 0
        self._probe: int | None = None
        self._paused = False
        self._ran = 0.0
        self._runs_since = self._loop.time()
        self._strays = 0

    async def start(self) -> None:
        """Dials until the agent answered for the first time; what is in `requests` by then travels with the greeting. Called once."""
        self._tasks.append(self._loop.create_task(self._watch()))
        self._tasks.append(self._loop.create_task(self._run()))
        await self._first

    async def stop(self) -> None:
        """Hangs up for ever. What waits for an answer fails with `LinkLost`."""
        self._finish(LinkLost("the link was closed"))
        for task in self._tasks:
            if task is not asyncio.current_task():
                await asyncio.gather(task, return_exceptions=True)

    def check(self) -> None:
        """Raises `LinkLost` when nothing can come of it any more."""
        if self._end is not None:
            raise LinkLost(str(self._end))

    def send(self, request: Request) -> None:
        """Sends a request as soon as there is a connection and room. Raises `LinkLost`, or `GuestError(EAGAIN)` when too many wait."""
        self.check()
        self.requests.add(request)
        self._send_due()

    @property
    def writable(self) -> bool:
        """Whether data may be written now."""
        return self.up and self._connection is not None and self._connection.writable

    def write(self, octets: bytes) -> None:
        """Writes whole frames, if there is a connection."""
        if octets and self._connection is not None:
            self._connection.write(octets)

    def pause(self, stopped: bool) -> None:
        """Says whether the guest stands still."""
        self._ran, self._runs_since = self.ran(), self._loop.time()
        self._paused = stopped
        self._silence = 0
        if not stopped:
            self.arm()

    def ran(self) -> float:
        """Seconds that the guest ran since this object was made."""
        return self._ran if self._paused else self._ran + self._loop.time() - self._runs_since

    def arm(self, *, waiting: bool = False) -> None:
        """Starts the ticking when something waits for the guest; it stops by itself."""
        if self._tick_timer is None and self._end is None and not self._paused and (waiting or self._waits()):
            self._silence = 0
            self._tick_timer = self._loop.call_later(TICK_S, self._tick)

    def consumed(self, process: Process, octets: int) -> None:
        """So many octets of a process's output were read: makes room for more of it, much at once or little soon."""
        process.unacked += octets
        self._unacked.add(process)
        self.on_batch()

    def _send_due(self) -> None:
        if self.up:
            self.write(b"".join([request.encode() for request in self.requests.due()]))
        self.arm()

    # -- the connection

    async def _watch(self) -> None:
        await self.vm_ended.wait()
        self._finish(LinkLost("the virtual machine ended"))

    async def _run(self) -> None:
        """Dials for as long as the VM lives."""
        attempt, strikes = 0, 0
        while self._end is None:
            began = self._loop.time()
            broken = False
            try:
                broken = await self._connect_once(resync=not (self._fresh and self._epoch == 0))
            except OSError as error:
                self.trouble = f"the guest channel: {error}"
            stood = self._loop.time() - began
            if stood > STEADY_S:
                attempt = 0
            delay = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            attempt += 1
            if broken:
                metrics.BROKEN.inc()
                strikes = 1 if stood > FORGIVE_S else strikes + 1
                if strikes >= STRIKES:
                    self._finish(LinkLost(f"the guest agent breaks the protocol: {self.trouble}"))
                    return
                delay = max(delay, 0.1 * 2**strikes)
            await asyncio.sleep(delay)

    async def _connect_once(self, *, resync: bool) -> bool:
        """Connects and waits until the connection ended; says whether the guest broke the protocol. Raises `OSError`."""
        sock = await reach(self._agent)
        connection = Connection(self, self._reader, self._greet(resync=resync))
        self._connection = connection
        self._strays = self._silence = 0
        self.arm()
        try:
            await self._loop.create_unix_connection(lambda: connection, sock=sock)
            await connection.closed.wait()
        finally:
            connection.drop("the link gave it up")
        return connection.broken

    def _greet(self, *, resync: bool) -> bytes:
        """Begins the handshake anew; returns the octets to send."""
        self.up = False
        self._acknowledged = None
        self._listed = {}
        self._epoch += 1
        self._nonce = secrets.token_bytes(channel.NONCE_SIZE)
        self._reader.hunt(self._nonce)
        parts = [channel.RESYNC] if resync else []
        parts.append(channel.encode_hello(self._nonce, self._epoch))
        if self.generation == 0:
            # Nothing runs yet that has to be told first: what waits goes along, and is answered in the same round trip.
            self.requests.connection_lost()
            parts.extend(request.encode() for request in self.requests.due())
        return b"".join(parts)

    def on_frame(self, frame: Frame) -> None:
        """See `connection.Receiver`."""
        self._silence = 0
        if frame.flags:
            raise Lost("reserved frame flags are set")
        kind, _, number, payload = frame
        if not self.up:
            self._handshake(kind, number, payload)
        elif kind == FrameType.OUTPUT:
            process = self.processes.get(number)
            if process is None:
                raise Lost("OUTPUT of a process that nobody asked for")
            process.take_output(channel.decode_data(payload))
            if not process.by_consumption:
                self._unacked.add(process)
        elif kind == FrameType.RESPONSE:
            self._response(number, Fields(payload))
        elif kind == FrameType.PROC:
            proc = decode_proc(number, payload)
            process = self.processes.get(number)
            if process is None:
                self._stray("PROC")
            else:
                process.take_proc(proc)
        elif kind == FrameType.INPUT_ACK:
            process = self.processes.get(number)
            if process is None:
                self._stray("INPUT_ACK")
            else:
                process.take_input_ack(Fields(payload))
        else:
            raise Lost(f"a frame of type {kind} in the middle of a connection")

    def on_batch(self) -> None:
        """See `connection.Receiver`. Acknowledges what was stored: much of it at once, little of it soon."""
        if not self._unacked:
            return
        if any(process.unacked >= ACK_AT for process in self._unacked):
            self._send_acks()
        elif self._ack_timer is None:
            self._ack_timer = self._loop.call_later(ACK_DELAY_S, self._send_acks)

    def on_writable(self) -> None:
        """See `connection.Receiver`."""
        self._send_acks()
        for process in self.processes.values():
            process.wake()

    def on_lost(self, connection: Connection, reason: str) -> None:
        """See `connection.Receiver`."""
        if connection is not self._connection:
            return
        self._connection = None
        self.up = False
        self.trouble = reason
        if connection.broken:
            log.warning("%s: the guest agent broke the protocol: %s", self._agent, reason)
        self._probe = None
        self._unacked.clear()
        self.requests.connection_lost()
        for process in self.processes.values():
            process.reset()

    def _send_acks(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self.up and self._connection is not None and self._connection.writable:
            acks = b"".join([process.ack() for process in self._unacked])
            self._unacked.clear()
            self.write(acks)

    def _stray(self, what: str) -> None:
        self._strays += 1
        if self._strays == 1:
            log.info("%s: the guest agent sent %s for nothing that is known here", self._agent, what)
        if self._strays > STRAYS:
            raise Lost(f"more than {STRAYS} frames for nothing that is known here")

    def _response(self, number: int, fields: Fields) -> None:
        if number == self._probe:
            self._probe = None
        elif not self.requests.answered(number, fields):
            self._stray("RESPONSE")
        elif self.requests:
            self._send_due()

    # -- handshake and resynchronisation

    def _handshake(self, kind: int, number: int, payload: memoryview) -> None:
        if self._acknowledged is None:
            # The reader found the nonce at its place, in a frame of the right type.
            fields = Fields(payload)
            if fields.get_octets(Tag.NONCE) != self._nonce:
                raise Lost("HELLO_ACK with two nonces")
            version = fields.number(Tag.VERSION)
            if version != channel.VERSION:
                self._finish(LinkLost(f"the guest agent speaks version {version}, this node version {channel.VERSION}"))
                return
            if fields.number(Tag.EPOCH) != self._epoch:
                raise Lost("HELLO_ACK with another epoch")
            self._acknowledged = fields
        elif kind == FrameType.PROC:
            if number in self._listed or len(self._listed) >= channel.MAX_LISTED:
                raise Lost("a list of processes that repeats itself or does not end")
            self._listed[number] = decode_proc(number, payload)
        elif kind == FrameType.READY:
            self._resynchronise(self._acknowledged)
        else:
            raise Lost(f"a frame of type {kind} before READY")

    def _resynchronise(self, answer: Fields) -> None:
        """Both sides know where they are: goes on with every stream and request where it stood."""
        boot_id = answer.text(Tag.BOOT_ID, BOOT_ID_LENGTH)
        rebooted = self.generation > 0 and boot_id != self.hello.boot_id
        self.hello = AgentHello(
            boot_id,
            answer.text(Tag.AGENT, AGENT_LENGTH),
            answer.number(Tag.UPTIME_NS),
            tuple(self._listed.values()),
        )
        self._lose_unlisted(rebooted)
        self.up = True
        if self.generation:
            metrics.RESYNCS.inc()
        self.generation += 1
        parts = []
        for number, proc in self._listed.items():
            process = self.processes.get(number)
            if process is None and number >= channel.FIRST_OWN_NUMBER:
                self._close_unknown(number)
                continue
            if process is None:
                process = self.processes[number] = Process(number, proc.key)
            process.take_proc(proc)
            parts.append(process.ack())
        for process in self.processes.values():
            if process.eof_at is not None and process.number in self._listed:
                parts.append(channel.encode_input(process.number, process.eof_at, b"", eof=True))
            process.wake()
        self._listed = {}
        parts.extend(request.encode() for request in self.requests.due())
        self.write(b"".join(parts))
        if not self._first.done():
            self._first.set_result(None)

    def _close_unknown(self, number: int) -> None:
        """A stream of a node process that ended, or of the sandbox that this one was forked from: nobody will read it."""
        request = self.requests.number()
        octets = channel.encode_request(FrameType.CLOSE, request, ((Tag.SIZE, number),))
        # When too many requests wait, the next time the link comes up is soon enough.
        with contextlib.suppress(GuestError):
            self.requests.add(Request(request, "CLOSE", lambda: octets))

    def _lose_unlisted(self, rebooted: bool) -> None:
        for process in list(self.processes.values()):
            listed = self._listed.get(process.number)
            if process.starting and (listed is None or listed.key == process.key):
                continue
            if rebooted or listed is None or listed.key != process.key:
                del self.processes[process.number]
                process.lose(
                    "the guest was started anew" if rebooted else "the guest agent does not know the process any more"
                )

    # -- time

    def _waits(self) -> bool:
        return (
            bool(self.requests)
            or (self._connection is not None and not self.up)
            or any(process.input_waits for process in self.processes.values())
        )

    def _tick(self) -> None:
        self._tick_timer = None
        if self._paused or not self._waits():
            return
        self._silence += 1
        if (
            self.generation
        ):  # until then a guest may be booting, which takes what it takes: whoever connects has a bound of his own
            self.requests.grow_older(REQUEST_WITHIN)
        connection = self._connection
        if connection is not None:
            if self._silence >= SILENT_FOR:
                connection.drop(f"the guest agent was silent for {SILENT_FOR} s")
            elif not self.up and self._epoch == 1 and self._fresh:
                # Restored, and yet not between two frames: what a guest was baked with must not matter.
                connection.write(self._greet(resync=True))
            elif self.up and self._silence >= PROBE_AFTER and self._probe is None and connection.writable:
                self._probe = self.requests.number()
                connection.write(channel.encode_request(FrameType.PING, self._probe))
        self._tick_timer = self._loop.call_later(TICK_S, self._tick)

    def _finish(self, error: LinkLost) -> None:
        """The link is at its end: everyone who waits hears why."""
        if self._end is not None:
            return
        self._end = error
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        for timer in (self._ack_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.drop(str(error))
        if not self._first.done():
            self._first.set_exception(LinkLost(str(error)))
            self._first.exception()  # `start` may have been cancelled: nobody else would ask
        self.requests.fail(error)
        processes = list(self.processes.values())
        self.processes.clear()
        for process in processes:
            process.lose(str(error))
