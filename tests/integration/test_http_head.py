"""What a connection may ask is bounded on both HTTP services' protocol: a head that never ends, and requests ahead of their answers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from hatchway.wire.http_head import MAX_HEAD, BoundedHead

ANSWERED = b"HTTP/1.1 200 OK"
REFUSED = b"HTTP/1.1 431 "


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedHead, ws="none", lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve([sock]))
        yield sock.getsockname()[1]
        server.should_exit = True
        await serving


async def ask(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(15), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_usual_head_is_taken(port: int) -> None:
    assert (await ask(port, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 8_000 + b"\r\n\r\n")).startswith(ANSWERED)


async def test_a_body_is_not_counted(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n"
    assert (await ask(port, head, b"b" * 300_000)).startswith(ANSWERED)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * (MAX_HEAD + 1) + b"\r\n\r\n",),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * 12_000 + b"\r\n",),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", *([b"a" * 16_384] * 5)),
    ],
    ids=["one header", "many headers", "no end"],
)
async def test_a_head_without_measure_is_refused(port: int, pieces: tuple[bytes, ...]) -> None:
    assert (await ask(port, *pieces)).startswith(REFUSED)


async def test_what_is_not_http_is_answered_with_a_problem_document(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer
    assert b'"code":"malformed_request"' in answer


SHORT = b"GET / HTTP/1.1\r\n\r\n"
AHEAD = 20_000
"""Requests of one client that does not wait for answers: more than one read from the network gives."""


@contextlib.asynccontextmanager
async def protocol_of(
    application: object,
) -> AsyncIterator[tuple[BoundedHead, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection as its protocol on the server's side, and as its client has it."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(application, http=BoundedHead, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]  # an ASGI application
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([sock]))
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        try:
            while not server.server_state.connections:
                await asyncio.sleep(0.001)
            yield next(iter(server.server_state.connections)), reader, writer  # type: ignore[misc]  # ours, as configured
        finally:
            writer.close()
            server.should_exit = True
            await serving


async def test_requests_ahead_of_their_answers_are_bounded_and_all_answered() -> None:
    answer = asyncio.Event()
    served, most = 0, 0

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal served, most
        await answer.wait()
        served, most = served + 1, max(most, len(protocol.pipeline))
        await app(scope, receive, send)

    async with protocol_of(patient) as (protocol, reader, writer):
        sending = asyncio.ensure_future(send_all(writer, SHORT * AHEAD))
        while protocol.transport.is_reading():
            await asyncio.sleep(0.001)
        assert 0 < len(protocol.pipeline) < 1_000
        answer.set()
        async with asyncio.timeout(60):
            for _ in range(AHEAD):
                await reader.readuntil(b"\r\n\r\n")
            await sending
        assert served == AHEAD
        assert most < 1_000


async def test_what_follows_a_body_is_a_request() -> None:
    """Whatever the pieces that it comes in: a body, a body in chunks and a request without one, all ahead of their answers."""
    bodies: list[int] = []

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        bodies.append(size)
        await app(scope, receive, send)

    chunks = b"".join(b"1\r\na\r\n" for _ in range(30_000))
    requests = (
        b"POST / HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + bytes(200_000),
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        SHORT,
    )
    async with protocol_of(counting) as (_, reader, writer):
        sending = asyncio.ensure_future(send_all(writer, b"".join(requests) * 3))
        async with asyncio.timeout(60):
            for _ in range(9):
                await reader.readuntil(b"\r\n\r\n")
            await sending
    assert bodies == [200_000, 30_000, 0] * 3


async def send_all(writer: asyncio.StreamWriter, octets: bytes) -> None:
    writer.write(octets)
    await writer.drain()
