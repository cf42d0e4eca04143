"""What one client of a WebSocket can take of the node: its memory, and its time."""

import asyncio
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from hatchway.node.dataplane.websocket import MAX_FRAGMENTS, MAX_MESSAGE, BoundedWebSocket

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: node.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
BEGIN = b"\x02\x81\0\0\0\0a"
EMPTY = b"\x00\x80\0\0\0\0"
END = b"\x80\x81\0\0\0\0z"
PING = b"\x89\x80\0\0\0\0"
LONG_PING = b"\x89\xfd\0\0\0\0" + bytes(125)
ONE_READ = 256 * 1024
"""Octets that the event loop hands over at once."""


class Client(asyncio.Transport):
    """A client as its protocol sees it; with `takes` false it takes nothing."""

    def __init__(self, *, takes: bool = True) -> None:
        super().__init__()
        self.got = bytearray()
        self.takes = takes
        self.reading = True
        self.closed = False

    def write(self, data: Any) -> None:
        self.got += data

    def get_write_buffer_size(self) -> int:
        return 0 if self.takes else len(self.got)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


async def opened(client: Client) -> tuple[BoundedWebSocket, list[Any]]:
    """A protocol behind its handshake, and the messages that its application gets."""
    messages: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            messages.append(message)

    config = uvicorn.Config(
        app, ws=BoundedWebSocket, ws_max_size=MAX_MESSAGE, ws_per_message_deflate=False, lifespan="off", log_config=None
    )
    protocol = BoundedWebSocket(config, ServerState(), {})
    protocol.connection_made(client)
    protocol.data_received(HANDSHAKE)
    while b"\r\n\r\n" not in client.got:
        await asyncio.sleep(0)
    client.got.clear()
    return protocol, messages


async def settle(client: Client, protocol: BoundedWebSocket) -> None:
    """Lets the loop turn until nothing of what came is waiting any more."""
    while not client.closed and not client.reading:
        await asyncio.sleep(0)


async def test_the_pieces_of_a_message_are_bounded_also_where_they_are_empty() -> None:
    client = Client()
    protocol, messages = await opened(client)
    protocol.data_received(BEGIN + EMPTY * (MAX_FRAGMENTS - 1))
    await settle(client, protocol)
    assert not client.closed
    protocol.data_received(EMPTY * 100)
    await settle(client, protocol)
    assert client.closed
    assert client.got[:4] == b"\x88" + bytes([len(client.got) - 2]) + (1009).to_bytes(2, "big")
    protocol.connection_lost(None)
    assert messages == []


async def test_a_message_in_many_pieces_is_one() -> None:
    client = Client()
    protocol, messages = await opened(client)
    protocol.data_received(BEGIN + EMPTY * (MAX_FRAGMENTS - 2) + END)
    while not messages:
        await asyncio.sleep(0)
    assert messages == [{"type": "websocket.receive", "bytes": b"az"}]
    protocol.connection_lost(None)


async def test_many_small_frames_of_one_client_take_turns_with_all_others() -> None:
    client = Client()
    protocol, _ = await opened(client)
    pings = ONE_READ // len(PING)
    protocol.data_received(PING * pings)
    answered = [len(client.got)]
    while not client.reading:
        await asyncio.sleep(0)
        answered.append(len(client.got))
    assert answered[-1] == 2 * pings
    assert max(after - before for before, after in zip([0, *answered], answered, strict=False)) < answered[-1] / 10
    protocol.connection_lost(None)


async def test_a_client_that_takes_no_answers_to_its_pings_is_held_back() -> None:
    client = Client(takes=False)
    protocol, _ = await opened(client)
    sent = 0
    while client.reading:
        protocol.data_received(LONG_PING * 1_000)
        sent += 1_000
        for _ in range(20):
            await asyncio.sleep(0)
        assert sent < 10_000
    assert len(client.got) <= ONE_READ + 32 * 1024
    client.takes = True
    protocol.resume_writing()
    await settle(client, protocol)
    assert len(client.got) == sent * 127
    protocol.connection_lost(None)
