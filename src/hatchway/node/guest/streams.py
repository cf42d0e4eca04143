"""The node's own streams with a guest: programs inside the agent and TCP connections there.

The octets are not stored anywhere: what was received and not read waits here, within `WINDOW`, and only what was read is
acknowledged. A reader that is slow or gone therefore holds up its own program or peer, at a bounded price. What is written waits
here until the guest took it.
"""

import asyncio
import contextlib
import errno
import secrets
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Protocol

from hatchway.node.guest.peer import Peer
from hatchway.node.guest.processes import Process
from hatchway.node.guest.seam import GuestError, LinkLost, Proc, ProcessState
from hatchway.wire.channel import FIRST_OWN_NUMBER, MAX_DATA, encode_input

WINDOW = 256 * 1024
"""Octets of each output of a stream that wait on the host at most; what the agent keeps of one on its side."""
AHEAD = 512 * 1024
"""Octets of the input that the agent has not taken yet, at most: what it takes ahead of its program (INPUT_BYTES of guest/proto.h)."""
MAX_STREAMS = 256
"""Streams of one sandbox at one time, those that are being closed included."""

REFUSAL_WITHIN_S = 10.0
_APART, _JOINED = 64, 4 * 1024
"""Where so many pieces of output wait, the next one is joined with the one before, if that has fewer octets."""


class Verbs(Protocol):
    """What a stream asks of its link."""

    async def close_process(self, number: int) -> None:
        """See `GuestLink`."""

    async def signal(self, number: int, signal: int, *, leader_only: bool = False) -> None:
        """See `GuestLink`."""


class Stream:
    """One builtin or connection; see `seam.GuestStream`. It is also the sink of its process."""

    def __init__(self, number: int, key: str, peer: Peer, streams: "Streams", *, builtin: bool) -> None:
        self.number = number
        self.key = key
        self.process = Process(number, key, starting=True, window=WINDOW, by_consumption=True)
        self._peer = peer
        self._streams = streams
        # The end of a connection's output leaves the way to the peer open; a program that ended may have left output in its pipe.
        self._output_ends = ProcessState.CLOSED if builtin else ProcessState.EXITED
        self._input_ends = ProcessState.EXITED if builtin else ProcessState.CLOSED
        self._waiting: tuple[deque[bytearray], deque[bytearray]] = (deque(), deque())
        self._received = [0, 0]
        self._consumed = [0, 0]
        self._outbox = bytearray()
        """What was written and not taken; it begins at the offset `_base`."""
        self._base = 0
        self._eof = False
        self._feeding: asyncio.Task[None] | None = None
        self._proc: Proc | None = None
        self._lost: str | None = None
        self._closed = False
        self._waiters: set[asyncio.Future[None]] = set()
        self.process.connect(self)

    # -- what its user calls

    async def read(self) -> bytes:
        """See `GuestStream`."""
        return await self._read(0)

    async def read_error(self) -> bytes:
        """See `GuestStream`."""
        return await self._read(1)

    async def write(self, data: bytes) -> None:
        """See `GuestStream`."""
        self._check()
        if not self.process.has_stdin:
            raise GuestError(errno.EBADF, "the program has no stdin")
        if self._input_over() or self._eof:
            raise GuestError(errno.EPIPE, "nobody reads from the stream any more")
        if data:
            self._outbox += data
            self._give()
            await self._taken(AHEAD)

    async def write_eof(self) -> None:
        """See `GuestStream`. That nobody reads any more is no error here."""
        self._check()
        self._eof = True
        self._give()
        await self._taken(0)

    async def wait(self) -> Proc:
        """See `GuestStream`."""
        while self._proc is None or self._proc.state is not ProcessState.CLOSED:
            await self._change()
        return self._proc

    async def terminate(self) -> None:
        """See `GuestStream`."""
        self._check()
        if not self._input_over():
            with contextlib.suppress(GuestError):
                await self._streams.verbs.signal(self.number, signal.SIGTERM, leader_only=True)

    async def close(self) -> None:
        """See `GuestStream`."""
        if self._closed:
            return
        self._closed = True
        for waiting in self._waiting:
            waiting.clear()
        self._outbox.clear()
        if self._feeding is not None:
            self._feeding.cancel()
        self._wake()
        self._streams.forget(self)

    async def refusal(self) -> str:
        """Why the program could not be started: what the guest says behind the answer to its SPAWN."""
        try:
            async with asyncio.timeout(REFUSAL_WITHIN_S):
                return (await self.wait()).message or "the program could not be started"
        except TimeoutError:
            return "the program could not be started, and the guest does not say why"

    # -- the process's sink

    def stored(self) -> tuple[int, int]:
        """See `ProcessSink`: what was read. After a resynchronisation the rest comes again."""
        return self._consumed[0], self._consumed[1]

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        """See `ProcessSink`."""
        stream = fd - 1
        known = self._received[stream]
        if offset > known:  # the agent forgot what was never acknowledged
            self.gone("the guest agent lost octets of the stream")
            return
        fresh = data[known - offset :]
        if fresh and not self._closed:
            waiting = self._waiting[stream]
            # Many are joined, since a piece of one octet takes as much memory as one of fifty.
            if len(waiting) >= _APART and len(waiting[-1]) < _JOINED:
                waiting[-1] += fresh
            else:
                waiting.append(bytearray(fresh))
        self._received[stream] = max(known, offset + len(data))
        self._wake()

    def changed(self, proc: Proc) -> None:
        """See `ProcessSink`."""
        self._proc = proc
        self._wake()

    def gone(self, reason: str) -> None:
        """See `ProcessSink`. What was received before can still be read."""
        if self._lost is None and not (
            self._proc is not None and self._proc.state is ProcessState.CLOSED and self._has_all()
        ):
            self._lost = reason
        self._wake()

    # -- inside

    async def _read(self, stream: int) -> bytes:
        waiting = self._waiting[stream]
        if self._closed:
            self._check()
        while not waiting:
            if self._at_end(stream):
                return b""
            await self._change()
        chunk = bytes(waiting.popleft())
        self._consumed[stream] += len(chunk)
        if not self.process.forgotten:
            self._peer.consumed(self.process, len(chunk))
        return chunk

    def _at_end(self, stream: int) -> bool:
        proc = self._proc
        if proc is None or proc.state < self._output_ends:
            return False
        return self._received[stream] >= (proc.stdout_total, proc.stderr_total)[stream]

    def _has_all(self) -> bool:
        return self._at_end(0) and self._at_end(1)

    # -- what is written

    def _input_over(self) -> bool:
        return self._proc is not None and self._proc.state >= self._input_ends

    def _give(self) -> None:
        if self._feeding is None or self._feeding.done():
            self._feeding = asyncio.get_running_loop().create_task(self._feed())

    async def _taken(self, ahead: int) -> None:
        """Waits until at most `ahead` octets are not taken."""
        while len(self._outbox) > ahead and not self._input_over():
            await self._change()

    async def _feed(self) -> None:
        """Sends what is in the outbox as credit allows, and keeps it until it was taken; after each resynchronisation again from there."""
        process, peer = self.process, self._peer
        generation = position = -1
        with contextlib.suppress(LinkLost):
            while not (process.forgotten or self._closed or self._input_over()):
                peer.check()
                taken = process.taken - self._base
                if taken > 0:
                    del self._outbox[:taken]
                    self._base = process.taken
                    self._wake()
                end = self._base + len(self._outbox)
                if peer.writable and process.input_open:
                    if generation != peer.generation:
                        generation, position = peer.generation, self._base
                    position = self._send(position, end)
                if not self._outbox and (not self._eof or process.eof_at is not None):
                    return
                peer.arm(waiting=True)
                await process.input_change()
        self._wake()

    def _send(self, position: int, end: int) -> int:
        process = self.process
        while True:
            size = max(0, min(MAX_DATA, end - position, process.input_end - position))
            last = self._eof and position + size == end
            if size == 0 and not (last and process.eof_at is None):
                return position
            at = position - self._base
            self._peer.write(encode_input(self.number, position, bytes(self._outbox[at : at + size]), eof=last))
            position += size
            process.sent = max(process.sent, position)
            if last:
                process.eof_at = end
                return position

    def _check(self) -> None:
        if self._closed:
            raise LinkLost("the stream was closed")
        if self._lost is not None:
            raise LinkLost(self._lost)

    async def _change(self) -> None:
        """Waits until anything changed; raises `LinkLost` when nothing will."""
        self._check()
        self._peer.check()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class Streams:
    """The streams of one link."""

    def __init__(self, peer: Peer, verbs: Verbs) -> None:
        self.verbs = verbs
        self._peer = peer
        self._open: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A random beginning: what a node process before this one left in the guest has other numbers while it is being closed.
        self._next = FIRST_OWN_NUMBER + secrets.randbelow(FIRST_OWN_NUMBER // 2)

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, begin: Callable[[Stream], Coroutine[None, None, None]], *, builtin: bool) -> Stream:
        """Makes a stream and has `begin` start it in the guest; when that fails or is cancelled nothing is left of it.

        Raises `GuestError(EAGAIN)` when `MAX_STREAMS` are open, and what `begin` does.
        """
        self._peer.check()
        if len(self._open) >= MAX_STREAMS:
            raise GuestError(errno.EAGAIN, f"{MAX_STREAMS} streams with the sandbox are open already")
        number = self._next
        self._next = FIRST_OWN_NUMBER + (number + 1) % FIRST_OWN_NUMBER
        stream = Stream(number, f"node-{secrets.token_hex(12)}", self._peer, self, builtin=builtin)
        self._open[number] = stream
        # A task of its own: what was asked for in the guest is known to be there or not before it is closed.
        beginning = asyncio.get_running_loop().create_task(begin(stream))
        try:
            await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self._later(self._undo(stream, beginning))
            raise
        except BaseException:
            self._open.pop(number, None)
            raise
        return stream

    def forget(self, stream: Stream) -> None:
        """Has the guest close a stream, in the background."""
        self._later(self._close(stream))

    def lose(self, reason: str) -> None:
        """Nothing will come for any of them."""
        for stream in list(self._open.values()):
            stream.gone(reason)
        for task in self._tasks:
            task.cancel()

    async def _undo(self, stream: Stream, beginning: "asyncio.Task[None]") -> None:
        try:
            await beginning
        except (GuestError, LinkLost, ValueError):
            self._open.pop(stream.number, None)
        else:
            await stream.close()

    async def _close(self, stream: Stream) -> None:
        try:
            await self.verbs.close_process(stream.number)
        except (GuestError, LinkLost):
            # It is closed as unknown when the link comes up the next time.
            self._peer.processes.pop(stream.number, None)
        finally:
            self._open.pop(stream.number, None)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
