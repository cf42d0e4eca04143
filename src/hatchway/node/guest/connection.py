"""One connection to one guest agent: octets in, frames out, nothing remembered beyond it.

Received octets land in the reader's own buffer and frames are handed on from there without a copy. A peer that floods is
read more slowly, one that breaks the protocol is hung up on.
"""

import asyncio
import socket
from pathlib import Path
from typing import Protocol, cast

from hatchway.node.vmm.seam import AgentSocket
from hatchway.wire.channel import Frame, FrameReader, Lost
from hatchway.wire.channel_fields import Malformed
from hatchway.wire.paths import address

FLOOD_WINDOW_S = 0.1
FLOOD_FRAMES = 2000
"""More frames than this in a window and the peer is not read for the rest of it: full frames would be 1.2 GiB/s, so that only
small ones are ever slowed down."""
WRITE_HIGH = 256 * 1024
"""Octets waiting for a peer that does not read, from where on nothing optional is sent."""


class Receiver(Protocol):
    """Who hears what a connection receives; all calls come from the event loop."""

    def on_frame(self, frame: Frame) -> None:
        """One frame; its payload is valid during the call. Raises `Lost` or `Malformed` when the protocol does not allow it."""

    def on_batch(self) -> None:
        """All frames that came together were given: the time to answer them together."""

    def on_writable(self) -> None:
        """What waited to be sent is gone: optional things may be sent again."""

    def on_lost(self, connection: "Connection", reason: str) -> None:
        """The connection ended. The last call."""


def dial(path: Path) -> socket.socket:
    """Connects to a Unix stream socket whose path may be longer than an address can hold (108 octets). Never waits.

    Raises `OSError`: no such socket, nobody listening, or (`BlockingIOError`) its backlog is full.
    """
    with address(path) as reached:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(reached)
        except BaseException:
            sock.close()
            raise
        return sock


async def reach(agent: AgentSocket) -> socket.socket:
    """Connects to an agent: at a path without waiting, else as the VM's driver does it. Raises `OSError`."""
    return dial(agent) if isinstance(agent, Path) else await agent()


class Connection(asyncio.BufferedProtocol):
    """Feeds a reader from a socket. `greeting` is sent first; `reader` hunts for its answer from the beginning."""

    def __init__(self, receiver: Receiver, reader: FrameReader, greeting: bytes) -> None:
        self.reader = reader
        self.closed = asyncio.Event()
        self.writable = True
        """False while more than `WRITE_HIGH` octets wait for the peer."""
        self._receiver = receiver
        self._greeting = greeting
        self._transport: asyncio.Transport | None = None
        self._reason = "the peer closed the connection"
        self.broken = False
        """Whether it ended because the guest did not keep to the protocol."""
        self._frames = 0
        self._window_ends = 0.0
        self._resume: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        """Sends; what the socket does not take at once waits in memory, so callers bound what they send."""
        if self._transport is not None and not self.closed.is_set():
            self._transport.write(data)

    def drop(self, reason: str) -> None:
        """Ends the connection; what was not sent or read is gone."""
        self._fail(reason, broken=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)
        if self.closed.is_set():
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH)
        self._transport.write(self._greeting)
        self._greeting = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if exc is not None and not self.broken:
            self._reason = str(exc) or type(exc).__name__
        if self._resume is not None:
            self._resume.cancel()
        if not self.closed.is_set():
            self.closed.set()
            self._receiver.on_lost(self, self._reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Called by the loop: where to receive into."""
        return self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Called by the loop: so many octets were received."""
        count = 0
        try:
            for frame in self.reader.received(nbytes):
                count += 1
                self._receiver.on_frame(frame)
                if self.closed.is_set():
                    return
            self._receiver.on_batch()
        except (Lost, Malformed) as error:
            self._fail(str(error), broken=True)
            return
        self._slow_down(count)

    def pause_writing(self) -> None:
        """Called by the loop: the peer does not read."""
        self.writable = False

    def resume_writing(self) -> None:
        """Called by the loop: the peer reads again."""
        self.writable = True
        if not self.closed.is_set():
            self._receiver.on_writable()

    def _slow_down(self, frames: int) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self._window_ends:
            self._window_ends = now + FLOOD_WINDOW_S
            self._frames = 0
        self._frames += frames
        if self._frames > FLOOD_FRAMES and self._transport is not None and self._resume is None:
            self._transport.pause_reading()
            self._resume = loop.call_at(self._window_ends, self._read_on)

    def _read_on(self) -> None:
        self._resume = None
        if self._transport is not None and not self.closed.is_set():
            self._transport.resume_reading()

    def _fail(self, reason: str, *, broken: bool) -> None:
        if self.closed.is_set():
            return
        self._reason = reason
        self.broken = broken
        if self._transport is not None:
            self._transport.abort()
        self.closed.set()
        self._receiver.on_lost(self, reason)
