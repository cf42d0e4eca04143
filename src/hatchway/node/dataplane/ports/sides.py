"""The two sides of a relayed exchange: HTTP with the client, and HTTP with the port in the guest."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from http import HTTPStatus

import h11
import msgspec

from hatchway.domain import problems
from hatchway.domain.errors import HatchwayError, HeadTooLarge, InvalidRequest
from hatchway.node.dataplane.ports.dialling import broken
from hatchway.node.dataplane.ports.names import Port
from hatchway.node.guest.seam import GuestStream
from hatchway.wire.http_head import HEAD_WITHIN_S, MAX_HEAD

_READ = 64 * 1024
_MAX_AHEAD = 64 * 1024
"""Octets that a client may send ahead of the answer to its request."""
_LINGER_S = 2.0
_CLOSE_WITHIN_S = 10.0


class Over(Exception):
    """The client's connection must end: the client is gone, or what follows could not be told apart."""


class ClientSide:
    """The connection of a client: requests come, answers go."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.secure = writer.get_extra_info("ssl_object") is not None
        peer = writer.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else "unknown"
        self.idle = False
        """Nothing of a next request has come."""
        self._ends_by_closing = False

    async def next_request(self, idle_s: float) -> h11.Request | None:
        """The next request; None when the client closed. Raises `TimeoutError` when none begins within `idle_s`, or its head does not end
        in time, and `HatchwayError` for what is none."""
        self.idle = not self.http.trailing_data[0]
        try:
            while (event := self._next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(idle_s if self.idle else HEAD_WITHIN_S):
                    data = await self.reader.read(_READ)
                self.idle = False
                self.http.receive_data(data)
        finally:
            self.idle = False
        if not isinstance(event, h11.Request):
            return None
        if size_of(event.headers) + len(event.target) > MAX_HEAD:
            raise _head_too_large()
        return event

    async def next_of_body(self) -> h11.Data | h11.EndOfMessage:
        """The next part of a request's body. Raises `Over` when the client is gone, `HatchwayError` for a body that is none."""
        while (event := self._next_event()) is h11.NEED_DATA:
            data = await self.reader.read(_READ)
            if not data:
                raise Over
            self.http.receive_data(data)
        if not isinstance(event, h11.Data | h11.EndOfMessage):
            raise Over
        return event

    async def departure(self) -> None:
        """Raises `Over` when the client goes away while it waits for its answer; returns when so much was sent ahead that nobody looks."""
        while len(self.http.trailing_data[0]) < _MAX_AHEAD:
            data = await self.reader.read(_READ)
            if not data:
                raise Over
            self.http.receive_data(data)

    async def write(self, event: h11.Event) -> None:
        """Sends a part of an answer; waits while the client takes nothing."""
        if isinstance(event, h11.Response) and (self.http.their_http_version or b"1.1") < b"1.1":
            self._ends_by_closing = all(name != b"content-length" for name, _ in event.headers)
        octets = self.http.send(event)
        if octets:
            self.writer.write(octets)
            await self.writer.drain()

    async def answer(self, status: int, headers: Sequence[tuple[str, str]], body: bytes = b"") -> None:
        """Sends a whole answer of our own."""
        fields = [*headers, ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
        await self.write(h11.Response(status_code=status, headers=fields, reason=HTTPStatus(status).phrase.encode()))
        await self.write(h11.Data(data=body))
        await self.write(h11.EndOfMessage())

    async def refuse(self, error: HatchwayError) -> None:
        """Answers with a problem document, if no answer has begun; the connection must end then."""
        if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):
            headers = {**problems.headers(error), "Connection": "close", "Content-Type": problems.MEDIA_TYPE}
            body = msgspec.json.encode(problems.document(error))
            await self.answer(error.status, list(headers.items()), body)

    async def can_go_on(self) -> bool:
        """Makes ready for the next request; False when there can be none on this connection.

        What little is still to come of a body that the port did not wait for is taken: the client was not told that it must end.
        """
        taken = 0
        try:
            async with asyncio.timeout(_LINGER_S):
                while self.http.our_state is h11.DONE and self.http.their_state is h11.SEND_BODY and taken < _MAX_AHEAD:
                    if self.http.they_are_waiting_for_100_continue:
                        return False
                    part = await self.next_of_body()
                    taken += len(part.data) if isinstance(part, h11.Data) else 0
        except (TimeoutError, Over, HatchwayError):
            return False
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True

    async def close(self) -> None:
        """Ends the connection: what was written goes out, but is not waited for long."""
        try:
            if self._ends_by_closing and self.http.our_state is h11.SEND_BODY:
                self.reset()  # an orderly end would make half a body a whole one
                return
            if self.http.their_state in (h11.SEND_BODY, h11.ERROR):
                await self._linger()
            self.writer.close()
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self.writer.wait_closed()
        except (TimeoutError, OSError):
            self.writer.transport.abort()

    def reset(self) -> None:
        """Breaks the connection so that the client knows it."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def _linger(self) -> None:
        """Takes what the client still sends: a connection that is closed over it is reset, and the answer lost."""
        if self.writer.can_write_eof():
            self.writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await self.reader.read(_READ):
                    pass

    def _next_event(self) -> object:
        try:
            return self.http.next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise _head_too_large() from None
            raise InvalidRequest(
                "malformed_request", f"This is not HTTP/1.1: {error}", "Send a well-formed request."
            ) from None


class GuestSide:
    """A connection to a port, which serves one client."""

    def __init__(self, port: Port, stream: GuestStream, held: contextlib.AsyncExitStack) -> None:
        self.port = port
        self.stream = stream
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self.used = False
        """It has answered a request before."""
        self.heard = False
        """Something came since the last request."""
        self._held = held

    async def write(self, event: h11.Event) -> None:
        """Sends a part of a request. Raises `GuestError` and `LinkLost`."""
        octets = self.http.send(event)
        if octets:
            await self.stream.write(octets)

    async def next_of_answer(self) -> object:
        """The next h11 event. Raises `LinkLost`, and `h11.RemoteProtocolError` for what is no answer."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            data = await self.stream.read()
            self.heard = self.heard or bool(data)
            if not data and (why := await broken(self.stream)):
                raise h11.RemoteProtocolError(f"the connection broke: {why}")
            self.http.receive_data(data)
        return event

    def can_go_on(self) -> bool:
        """Makes ready for the next request; False when there can be none on this connection."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE or self.http.trailing_data[0]:
            return False
        self.http.start_next_cycle()
        self.used, self.heard = True, False
        return True

    async def close(self) -> None:
        """Ends the connection, and gives its place back."""
        await self._held.aclose()


def size_of(headers: h11._headers.Headers) -> int:
    """Octets of the fields of a head."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(
        "head_too_large",
        f"The request line and the headers take more than {MAX_HEAD} octets.",
        "Send less of them.",
        limit=MAX_HEAD,
    )
