"""WebSockets of the data plane: the protocol under them with its bounds, and one socket as the endpoints use it.

A browser can send no `Authorization` header with a WebSocket: it offers the subprotocols `hatchway.v1` and
`hatchway.token.TOKEN`, and `hatchway.v1` is chosen.
"""

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from hatchway.domain import problems
from hatchway.domain.errors import HatchwayError, InvalidRequest
from hatchway.node.dataplane.requests import SUBPROTOCOL, ClientGone
from hatchway.wire.http_head import answer_octets

MAX_MESSAGE = 1024 * 1024
"""Octets of one message of a client; a larger one ends the connection with code 1009."""
PING_S = 20.0
"""Keeps what stands between from forgetting an idle connection. That a client does not answer ends nothing: it may be stalled."""
MAX_FRAGMENTS = 4_096
"""Pieces of one message; more of them end the connection with code 1009."""
_SLICE = 16 * 1024
_MAX_UNSENT = 256 * 1024
"""Octets that a client does not take, answers to its pings, from where on no more of it is parsed. What is sent to it besides waits earlier."""
_CLOSE_WITHIN_S = 5.0
_GONE_WITHIN_S = 15.0

WHY_CLOSED = {
    "shutdown": CloseCode.SERVICE_RESTART,
    "revoked": CloseCode.POLICY_VIOLATION,
    "superseded": CloseCode.POLICY_VIOLATION,
    "expired": CloseCode.POLICY_VIOLATION,
}
"""Close codes for what ends a stream from outside; the word is the close frame's reason."""

_encode = msgspec.json.Encoder().encode


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol with the bounds that it lacks.

    By itself it queues every message of what one read from the network gave, however small they are, keeps every piece of a message,
    empty ones too, and answers pings of a client that takes no answer. And what came in one read, it parses in one go, which for
    many small frames takes a second, in which nobody else is served.
    """

    _held = b""
    _turn: asyncio.Handle | None = None

    def data_received(self, data: bytes) -> None:
        """Takes octets; parses on only when the application took the messages before, and the client the answers to its pings."""
        self._held += data
        if self._turn is None:
            self._feed()

    def resume_writing(self) -> None:
        """The client takes octets again."""
        super().resume_writing()
        self._go_on()

    async def receive(self) -> Any:
        """Gives the application its next message."""
        message = await super().receive()
        self._go_on()
        return message

    async def run_asgi(self) -> None:
        """Runs the application; what its client has not taken a while after its end is not waited for."""
        await super().run_asgi()
        self.loop.call_later(_GONE_WITHIN_S, self.transport.abort)

    def handle_cont(self, event: Frame) -> None:
        """Takes a further piece of a message."""
        if self.close_sent:
            return
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    @property
    def _free(self) -> bool:
        """Whether a further frame would find room."""
        if self.transport.get_write_buffer_size() > _MAX_UNSENT:
            return False
        return self.queue.empty() or self.close_sent

    def _feed(self) -> None:
        """Parses one piece; the next one has to wait for its turn among all connections."""
        self._turn = None
        if self._held and self._free and not self.transport.is_closing():
            piece, self._held = self._held[:_SLICE], self._held[_SLICE:]
            super().data_received(piece)
            if not self.handshake_initiated and self.conn.handshake_exc is not None:
                self._held = b""
                error = InvalidRequest(
                    "malformed_request", f"This is no WebSocket handshake: {self.conn.handshake_exc}", "Send another."
                )
                self.transport.write(answer_octets(error))
                self.transport.close()
        self._go_on()

    def _go_on(self) -> None:
        """Sees to it that what is held is parsed in time, and that no more is read meanwhile."""
        if self.transport.is_closing():
            self._held = b""
        elif self._held:
            self.transport.pause_reading()
            if self._turn is None and self._free:
                self._turn = self.loop.call_soon(self._feed)
        elif not self.read_paused:
            self.transport.resume_reading()


class Socket:
    """One WebSocket of a client, from its handshake on."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send

    async def accept(self) -> None:
        """Answers the handshake. Raises `ClientGone`."""
        if (await self._receive())["type"] != "websocket.connect":
            raise ClientGone
        chosen = SUBPROTOCOL if SUBPROTOCOL in self._scope["subprotocols"] else None
        await self._give({"type": "websocket.accept", "subprotocol": chosen, "headers": []})

    async def receive(self) -> bytes | str:
        """The next message of the client. Raises `ClientGone`."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        text: str | None = message.get("text")
        octets: bytes = message.get("bytes") or b""
        return octets if text is None else text

    async def send(self, octets: bytes) -> None:
        """Sends a binary message; waits while the client takes nothing. Raises `ClientGone`."""
        await self._give({"type": "websocket.send", "bytes": octets})

    async def tell(self, **event: object) -> None:
        """Sends a JSON object. Raises `ClientGone`."""
        await self._give({"type": "websocket.send", "text": _encode(event).decode()})

    async def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Ends it; a client that takes nothing is not waited for long."""
        with contextlib.suppress(ClientGone, TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self._give({"type": "websocket.close", "code": int(code), "reason": reason[:120]})

    async def close_because(self, why: str) -> None:
        """Ends it for a reason that came from outside."""
        await self.close(WHY_CLOSED.get(why, CloseCode.GOING_AWAY), why)

    async def _give(self, message: dict[str, object]) -> None:
        try:
            await self._send(message)
        except ClientDisconnected:
            raise ClientGone from None


async def reject(error: HatchwayError, send: Send) -> None:
    """Answers a handshake with a problem document."""
    headers = [(b"content-type", problems.MEDIA_TYPE.encode())]
    headers += [(name.encode(), value.encode()) for name, value in problems.headers(error).items()]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": _encode(problems.document(error))})
