"""Byte streams of flows: TCP on asyncio's protocols with explicit back-pressure, and the relay of two of them.

`TcpStream` is `http.seam.Stream` over a transport; `tls.TlsStream` is the same over a `TcpStream`. Half-close is kept (asyncio's own
streams lose it), an abort is RST, and a close lingers: what was written reaches a peer that is still sending.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

from hatchway.egress.http.seam import Stream, StreamLost

HIGH_WATER = 64 * 1024
"""Octets that may wait in either direction before the side that sends is stopped; fewer where a sandbox has many streams."""
MAX_RECEIVED = 128 * 1024
"""Octets that are taken from the kernel at once, at most."""
CLOSE_WITHIN_S = 10.0
LINGER_S = 2.0
LINGER_BYTES = 1024 * 1024
"""What a closing stream still takes from a peer that has not heard of the close, so that RST does not destroy our last answer."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


_landing = memoryview(bytearray(MAX_RECEIVED))
"""Where the octets of any connection arrive, to be copied at once: a buffer of its own for each read costs more than the read."""


class TcpStream(asyncio.BufferedProtocol):
    """A TCP connection, accepted or dialled. `counted` is called with the octets of each direction as they pass: in, out."""

    def __init__(self, counted: Callable[[int, int], None] | None = None, room: int = 2 * MAX_RECEIVED) -> None:
        """`room`: see `give_room`."""
        self._transport: asyncio.Transport | None = None
        self._counted = counted
        self._water = HIGH_WATER
        self._at_once = MAX_RECEIVED
        self._room = room
        self._chunks: list[bytes] = []
        self._size = 0
        self._ended = False
        self._lost = False
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._full = False
        self._stopped = False
        self._linger: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._relay: _Relay | None = None
        self._on_lost: list[Callable[[], None]] = []
        self._on_ended: list[Callable[[], None]] = []
        self.bytes_in = 0
        self.bytes_out = 0

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.give_room(self._room)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Part of asyncio's protocol."""
        return _landing if self._at_once == MAX_RECEIVED else _landing[: self._at_once]

    def buffer_updated(self, nbytes: int) -> None:
        """Part of asyncio's protocol."""
        data = bytes(_landing[:nbytes])
        self.bytes_in += len(data)
        if self._counted is not None:
            self._counted(len(data), 0)
        if self._linger is not None:
            self._linger -= len(data)
            if self._linger < 0:
                self._finish()
            return
        if self._relay is not None:
            self._relay.forward(self, data)
            return
        self._chunks.append(data)
        self._size += len(data)
        if self._size >= self._water:
            self.stop_reading()
        self._wake_reader()

    def eof_received(self) -> bool:
        """Part of asyncio's protocol."""
        self._ended = True
        self._wake_reader()
        self._tell_ended()
        if self._linger is not None:
            self._finish()
        elif self._relay is not None:
            self._relay.ended(self)
        return True

    def pause_writing(self) -> None:
        """Part of asyncio's protocol."""
        self._full = True
        if self._relay is not None:
            self._relay.peer(self).stop_reading()

    def resume_writing(self) -> None:
        """Part of asyncio's protocol."""
        self._full = False
        if self._relay is not None:
            self._relay.peer(self).go_on_reading()
        self._wake_writers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self._lost = True
        self._error = exc
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_reader()
        self._wake_writers()
        if self._relay is not None:
            self._relay.lost(self)
        called, self._on_lost = self._on_lost, []
        for callback in called:
            callback()
        self._tell_ended()

    # -- Stream

    async def read(self) -> bytes:
        """See `http.seam.Stream`."""
        while True:
            if self._size:
                data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks.clear()
                self._size = 0
                self.go_on_reading()
                return data
            if self._ended:
                return b""
            if self._lost:
                raise StreamLost("the connection was lost") from self._error
            if self._reader is None:
                self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def unread(self, data: bytes) -> None:
        """See `http.seam.Stream`."""
        if data:
            self._chunks.insert(0, data)
            self._size += len(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `http.seam.Stream`."""
        if self._transport is None or self._lost or self._transport.is_closing():
            return
        self.bytes_out += len(data)
        if self._counted is not None:
            self._counted(0, len(data))
        self._transport.write(data)

    async def drain(self) -> None:
        """See `http.seam.Stream`."""
        while self._full and not self._lost:
            future = asyncio.get_running_loop().create_future()
            self._writers.append(future)
            await future
        if self._lost:
            raise StreamLost("the connection was lost") from self._error

    def end(self) -> None:
        """See `http.seam.Stream`."""
        if self._transport is not None and not self._lost and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """See `http.seam.Stream`."""
        if self._transport is None or self._lost or self._linger is not None or self._transport.is_closing():
            return
        self._linger = LINGER_BYTES
        self._chunks.clear()
        self._size = 0
        self.end()
        if self._ended:
            self._finish()
            return
        self.go_on_reading()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._finish)

    def abort(self) -> None:
        """See `http.seam.Stream`."""
        if self._transport is None or self._lost:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    @property
    def lost(self) -> bool:
        """See `http.seam.Stream`."""
        return self._lost

    @property
    def buffered(self) -> int:
        """See `http.seam.Stream`."""
        return self._size

    # -- what the rest of the gateway uses beside

    @property
    def peer_address(self) -> str:
        """The peer's address; empty when it is not known."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    def give_room(self, room: int) -> None:
        """How many octets may be held for one direction of this stream: what waits, and one piece from the kernel."""
        self._room = room
        self._water = min(HIGH_WATER, room // 2)
        self._at_once = min(MAX_RECEIVED, room // 2)
        if self._transport is not None and not self._lost:
            self._transport.set_write_buffer_limits(high=self._water)

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls back once when the transport is gone, at once when it is already."""
        if self._lost:
            callback()
        else:
            self._on_lost.append(callback)

    @property
    def ended(self) -> bool:
        """The peer sends no more, whether it reads still or not."""
        return self._ended or self._lost

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls back once when `ended`, at once when it is already."""
        if self.ended:
            callback()
        else:
            self._on_ended.append(callback)

    def _tell_ended(self) -> None:
        called, self._on_ended = self._on_ended, []
        for callback in called:
            callback()

    def stop_reading(self) -> None:
        """The peer is not read until `go_on_reading`."""
        if not self._stopped and not self._lost and self._transport is not None and not self._ended:
            self._stopped = True
            self._transport.pause_reading()

    def go_on_reading(self) -> None:
        """Undoes `stop_reading`."""
        if self._stopped and not self._lost and self._transport is not None and not self._ended:
            self._stopped = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _finish(self) -> None:
        """Ends a close: what is still queued has some seconds to go."""
        if self._transport is None or self._lost or self._transport.is_closing():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_WITHIN_S, self.abort)

    def _wake_reader(self) -> None:
        future, self._reader = self._reader, None
        if future is not None and not future.done():
            future.set_result(None)

    def _wake_writers(self) -> None:
        futures, self._writers = self._writers, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    # -- relay

    def _enter(self, relay: "_Relay") -> None:
        self._relay = relay
        if self._size:
            data = b"".join(self._chunks)
            self._chunks.clear()
            self._size = 0
            relay.forward(self, data)
        if self._lost:
            relay.lost(self)
        elif self._ended:
            relay.ended(self)
        elif not relay.peer(self)._full:
            self.go_on_reading()


class _Relay:
    """Two streams whose octets go to each other from within the callbacks: no task, no copy but the transport's."""

    def __init__(self, one: TcpStream, other: TcpStream) -> None:
        self._one = one
        self._other = other
        self._open = 2
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def peer(self, stream: TcpStream) -> TcpStream:
        return self._other if stream is self._one else self._one

    def forward(self, stream: TcpStream, data: bytes) -> None:
        self.peer(stream).write(data)

    def ended(self, stream: TcpStream) -> None:
        """One direction is over: the peer hears it after the octets before it; the other direction goes on."""
        self.peer(stream).end()
        self._open -= 1
        if self._open == 0:
            self._finish()

    def lost(self, stream: TcpStream) -> None:
        if not self.done.done() and not (stream._ended and stream._error is None):
            self.peer(stream).abort()
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def relay(one: TcpStream, other: TcpStream) -> None:
    """Joins two streams until both directions ended or one was lost; the other is then aborted. Closes both; cancelled: aborts both."""
    joined = _Relay(one, other)
    try:
        one._enter(joined)
        other._enter(joined)
        await joined.done
    except asyncio.CancelledError:
        one.abort()
        other.abort()
        raise
    one.close()
    other.close()


async def join(one: Stream, other: Stream) -> None:
    """Carries octets both ways between streams of any kind until both ended; closes both, or aborts both when one was lost."""

    async def carry(source: Stream, sink: Stream) -> None:
        while data := await source.read():
            sink.write(data)
            await sink.drain()
        sink.end()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(carry(one, other))
            group.create_task(carry(other, one))
    except* (StreamLost, OSError):
        one.abort()
        other.abort()
    one.close()
    other.close()
