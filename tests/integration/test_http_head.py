"""The head of a request is bounded on both HTTP services' protocol, also where it never ends."""

import asyncio
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
