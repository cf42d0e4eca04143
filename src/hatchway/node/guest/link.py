"""The link to one sandbox's agent: the verbs that the rest of the node calls, over a `Peer` that keeps the connection."""

import asyncio
import errno
import time
from collections.abc import Iterator, Mapping, Sequence

from hatchway.node.guest.peer import Peer
from hatchway.node.guest.processes import Process
from hatchway.node.guest.requests import Request
from hatchway.node.guest.seam import (
    AgentHello,
    GuestError,
    GuestMetrics,
    LinkLost,
    Proc,
    ProcessLimits,
    ProcessSink,
    ProcessState,
    Setup,
    Spawn,
)
from hatchway.node.guest.streams import Stream, Streams
from hatchway.node.vmm.seam import AgentSocket
from hatchway.wire import channel
from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Fields, Tag, Value

__all__ = ["Link", "Setup", "connect"]


async def connect(
    agent: AgentSocket,
    *,
    fresh: bool,
    vm_ended: asyncio.Event,
    setup: Setup | None = None,
    within: float = 20.0,
) -> "Link":
    """Returns the link to the agent behind `agent`, up, and with `setup` done when one is given.

    `fresh` says that the guest was just restored from a baked snapshot, whose parser stands between two frames. `setup`
    travels with the greeting: one round trip does both (to a guest that still boots it may be seconds on its way: set the clock
    again then). The socket must listen; the VMM behind it may accept later. Raises `LinkLost` when
    the agent does not answer within `within` seconds, breaks the protocol or the VM ends, `GuestError` when it refuses
    the set-up, `ValueError` for a set-up that the protocol cannot carry.
    """
    link = Link(agent, fresh=fresh, vm_ended=vm_ended)
    try:
        async with asyncio.timeout(within):
            await link.open(setup)
    except TimeoutError:
        await link.close()
        raise LinkLost(f"the guest agent did not answer within {within:g} s ({link.trouble})") from None
    except BaseException:
        await link.close()
        raise
    return link


DIALS_AT_ONCE = 16
"""Of the requests that the agent takes at once: a port whose listener answers nobody must not hold up the rest for the time of a DIAL."""


class Link:
    """One sandbox's agent; made by `connect`. What it promises is in `seam.GuestLink`."""

    def __init__(self, agent: AgentSocket, *, fresh: bool, vm_ended: asyncio.Event) -> None:
        self._peer = Peer(agent, fresh=fresh, vm_ended=vm_ended)
        self._streams = Streams(self._peer, self)
        self._dials = asyncio.Semaphore(DIALS_AT_ONCE)

    @property
    def streams(self) -> int:
        """How many streams (`open_builtin`, `dial`) there are, those that are being closed included."""
        return len(self._streams)

    @property
    def hello(self) -> AgentHello:
        """What the agent said when the link last came up."""
        return self._peer.hello

    @property
    def trouble(self) -> str:
        """What was the matter with the last connection that ended."""
        return self._peer.trouble

    # -- the verbs

    async def open(self, setup: Setup | None) -> None:
        """Brings the link up for the first time. Called once, by `connect`."""
        request = None
        if setup is not None:
            request = self._setup_request(setup)
            self._peer.requests.add(request)
        await self._peer.start()
        if request is not None:
            await request.answer

    async def setup(
        self,
        *,
        time_ns: int | None = None,
        entropy: bytes = b"",
        hostname: str | None = None,
        machine_id: str | None = None,
        env: Mapping[str, str] | None = None,
        ca: str | None = None,
    ) -> None:
        """See `GuestLink`. The clock is set to `time_ns` plus what passes between this call and the sending."""
        await self._ask(self._setup_request(Setup(time_ns, entropy, hostname, machine_id, env, ca=ca)))

    async def ping(self) -> int:
        """See `GuestLink`."""
        return (await self._request(FrameType.PING)).number(Tag.TIME_NS)

    async def spawn(self, spawn: Spawn, sink: ProcessSink) -> int | None:
        """See `GuestLink`."""
        process = self._peer.processes.get(spawn.number)
        if process is not None and process.key != spawn.key:
            raise ValueError(f"process {spawn.number} is another one already")
        if process is None:
            process = Process(spawn.number, spawn.key, starting=True)
            process.has_stdin = spawn.stdin or spawn.pty is not None
        return await self._spawn(spawn, process, sink)

    async def _spawn(self, spawn: Spawn, process: Process, sink: ProcessSink) -> int | None:
        number = self._peer.requests.number()
        frames = channel.encode_spawn(
            number,
            number=spawn.number,
            key=spawn.key,
            argv=spawn.argv,
            env=spawn.env,
            cwd=spawn.cwd,
            user=spawn.user,
            stdin=spawn.stdin,
            pty=spawn.pty,
            merge_stderr=spawn.merge_stderr,
            timeout_ms=spawn.timeout_ms,
            timeout_leader=spawn.timeout_leader,
            builtin=spawn.builtin,
            limits=_limit_fields(spawn.limits),
        )
        process.connect(sink)
        process.tell()  # the agent says nothing new of one that it started before
        # The agent answers SPAWN before it reads on, so that the credit behind it finds the process there.
        request = Request(number, "SPAWN", lambda: frames + process.ack())
        pid = (await self._begin(process, request)).get_number(Tag.PID) or None
        if pid is not None and process.proc is None:
            process.proc = Proc(spawn.number, spawn.key, ProcessState.RUNNING, pid)
        return pid

    async def _begin(self, process: Process, request: Request) -> Fields:
        """Asks for something that is listed as a process from then on."""
        self._peer.processes[process.number] = process
        try:
            self._peer.send(request)
            return await request.answer
        except GuestError:
            if process.proc is None:
                self._peer.processes.pop(process.number, None)
            raise
        finally:
            process.starting = False

    async def open_builtin(
        self, argv: Sequence[str | bytes], *, user: str | None = None, cwd: str | None = None, stdin: bool = False
    ) -> Stream:
        """See `GuestLink`."""

        async def begin(stream: Stream) -> None:
            stream.process.has_stdin = stdin
            spawn = Spawn(stream.number, stream.key, argv, {}, cwd, user, stdin, builtin=True)
            if await self._spawn(spawn, stream.process, stream) is None:
                message = await stream.refusal()
                await stream.close()
                raise GuestError(errno.ENOEXEC, message)

        return await self._streams.open(begin, builtin=True)

    async def dial(self, port: int, host: str | None = None) -> Stream:
        """See `GuestLink`."""

        async def begin(stream: Stream) -> None:
            number = self._peer.requests.number()
            octets = channel.encode_dial(number, number=stream.number, key=stream.key, port=port, host=host)
            async with self._dials:
                await self._begin(stream.process, Request(number, "DIAL", lambda: octets))
            if self._peer.up:  # else the credit goes along when the link comes up
                self._peer.write(stream.process.ack())

        return await self._streams.open(begin, builtin=False)

    async def metrics(self) -> GuestMetrics:
        """See `GuestLink`."""
        fields = await self._request(FrameType.METRICS)

        def number(tag: Tag) -> int:
            return fields.get_number(tag) or 0

        return GuestMetrics(
            uptime_ns=number(Tag.UPTIME_NS),
            cpus=number(Tag.CPUS),
            utime_us=number(Tag.UTIME_US),
            stime_us=number(Tag.STIME_US),
            load1_milli=number(Tag.LOAD1_MILLI),
            processes=number(Tag.PROCESSES),
            memory_total_kib=number(Tag.MEM_TOTAL_KIB),
            memory_available_kib=number(Tag.MEM_AVAILABLE_KIB),
            memory_cached_kib=number(Tag.MEM_CACHED_KIB),
            disk_total=number(Tag.DISK_TOTAL),
            disk_free=number(Tag.DISK_FREE),
        )

    def attach(self, number: int, sink: ProcessSink) -> bool:
        """See `GuestLink`."""
        process = self._peer.processes.get(number)
        if process is None:
            return False
        process.connect(sink)
        process.tell()
        if self._peer.up:
            self._peer.write(process.ack())
        return True

    async def send_input(self, number: int, offset: int, data: bytes, *, eof: bool = False) -> int:
        """See `GuestLink`."""
        process = self._peer.processes.get(number)
        if process is None:
            self._peer.check()
            raise GuestError(errno.ESRCH, f"the sandbox has no process {number}")
        if not process.has_stdin:
            raise GuestError(errno.EBADF, f"process {number} has no stdin")
        async with process.input_lock:
            expected = max(process.taken, process.sent)
            if offset > expected:
                raise GuestError(errno.EINVAL, f"stdin goes on at {expected}, not at {offset}")
            return await self._feed(process, offset, data, eof=eof)

    async def signal(self, number: int, signal: int, *, leader_only: bool = False) -> None:
        """See `GuestLink`."""
        scope = channel.SignalScope.LEADER if leader_only else channel.SignalScope.TREE
        await self._request(FrameType.SIGNAL, (Tag.SIZE, number), (Tag.SIGNAL, signal), (Tag.SCOPE, int(scope)))

    async def resize(self, number: int, rows: int, cols: int) -> None:
        """See `GuestLink`."""
        await self._request(FrameType.RESIZE, (Tag.SIZE, number), (Tag.ROWS, rows), (Tag.COLS, cols))

    async def close_process(self, number: int, *, if_over: bool = False) -> None:
        """See `GuestLink`. The sink is not called any more once this returned."""
        flags = channel.CloseFlag.IF_OVER if if_over else channel.CloseFlag(0)
        try:
            await self._request(FrameType.CLOSE, (Tag.SIZE, number), (Tag.FLAGS, int(flags)))
        except GuestError as error:
            if error.errno not in (errno.ESRCH, errno.ENOENT):
                raise
        process = self._peer.processes.pop(number, None)
        if process is not None:
            process.sink = None
            process.forgotten = True
            process.wake()

    async def sync(self) -> None:
        """See `GuestLink`."""
        await self._request(FrameType.SYNC)

    async def freeze(self, within_ms: int) -> None:
        """See `GuestLink`."""
        await self._request(FrameType.FREEZE, (Tag.TIMEOUT_MS, within_ms))

    async def thaw(self) -> None:
        """See `GuestLink`."""
        await self._request(FrameType.THAW)

    async def resize_disk(self, device_mib: int) -> int:
        """See `GuestLink`."""
        return (await self._request(FrameType.RESIZE_DISK, (Tag.SIZE, device_mib * 2**20))).number(Tag.SIZE)

    async def shutdown(self) -> None:
        """See `GuestLink`. A VM that ends before it answered has done what it was asked."""
        try:
            await self._request(FrameType.SHUTDOWN)
        except LinkLost:
            if not self._peer.vm_ended.is_set():
                raise

    def paused(self, stopped: bool) -> None:
        """See `GuestLink`."""
        self._peer.pause(stopped)

    def ran(self) -> float:
        """See `GuestLink`."""
        return self._peer.ran()

    async def close(self) -> None:
        """See `GuestLink`. What waits for an answer or reads a stream fails with `LinkLost`; other sinks hear nothing."""
        self._streams.lose("the link was closed")
        for process in self._peer.processes.values():
            process.sink = None
        await self._peer.stop()

    # -- asking

    def _setup_request(self, setup: Setup) -> Request:
        number = self._peer.requests.number()
        since = time.monotonic_ns()

        def encode() -> bytes:
            now = None if setup.time_ns is None else setup.time_ns + time.monotonic_ns() - since
            fields = channel.setup_fields(
                time_ns=now,
                entropy=setup.entropy,
                hostname=setup.hostname,
                machine_id=setup.machine_id,
                boot_id=setup.boot_id,
                renew_keys=setup.renew_keys,
                ca=setup.ca,
                env=setup.env,
            )
            return channel.encode_request(FrameType.SETUP, number, fields)

        encode()  # what cannot be encoded is the caller's mistake and raised to him, not in a callback
        return Request(number, "SETUP", encode)

    async def _request(self, kind: FrameType, *fields: tuple[Tag, Value]) -> Fields:
        number = self._peer.requests.number()
        octets = channel.encode_request(kind, number, fields)
        return await self._ask(Request(number, kind.name, lambda: octets))

    async def _ask(self, request: Request) -> Fields:
        self._peer.send(request)
        return await request.answer

    async def _feed(self, process: Process, offset: int, data: bytes, *, eof: bool) -> int:
        """Sends stdin as credit allows; after each resynchronisation again from where the process is."""
        end = offset + len(data)
        view = memoryview(data)
        generation, position = -1, offset
        ended = with_data = False
        while True:
            self._peer.check()
            if process.forgotten:
                raise GuestError(errno.ESRCH, f"process {process.number} is gone")
            if process.state is ProcessState.CLOSED:
                return end
            if self._peer.writable and process.input_open:
                if generation != self._peer.generation:
                    generation = self._peer.generation
                    position = min(max(offset, process.taken), end)
                    ended = False
                while not ended:
                    size = max(0, min(channel.MAX_DATA, end - position, process.input_end - position))
                    ended = eof and position + size == end
                    if size == 0 and not ended:
                        break
                    with_data = size > 0
                    chunk = view[position - offset : position - offset + size]
                    self._peer.write(channel.encode_input(process.number, position, chunk, eof=ended))
                    position += size
                    process.sent = max(process.sent, position)
                    if ended:
                        process.eof_at = end
                if process.taken >= end and ended == eof:
                    if eof and not with_data:
                        # Nothing acknowledges an end of file alone, but an answer to what came behind it does.
                        await self._request(FrameType.PING)
                    return end
            self._peer.arm(waiting=True)
            await process.input_change()


def _limit_fields(limits: ProcessLimits | None) -> Iterator[tuple[Tag, int]]:
    if limits is None:
        return
    for tag, value in (
        (Tag.LIMIT_MEMORY, limits.memory_bytes),
        (Tag.LIMIT_CPU_MS, limits.cpu_ms),
        (Tag.LIMIT_NOFILE, limits.nofile),
        (Tag.LIMIT_PIDS, limits.pids),
        (Tag.LIMIT_FSIZE, limits.fsize_bytes),
    ):
        if value is not None:
            yield tag, value
