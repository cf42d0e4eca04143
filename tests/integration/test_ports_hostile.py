"""Clients and servers that do what they must not: what one request is, how long it is, and who waits for whom."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from dataplane_fixtures import Opener, agent, module_opened, module_plane
from dataplane_harness import WITHIN, Plane
from ports_harness import answering, connected, echo_heads, head_of, host_of, request, serving, token_of

__all__ = ["agent", "module_opened"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane = module_plane

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


class Recorder:
    """A server that keeps every octet it gets, and answers each of what it takes for a request."""

    def __init__(self) -> None:
        self.got = b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            self.got += data
            for _ in range(data.count(b"HTTP/1.1\r\n")):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


# -- requests that can be read in two ways


def framed(*lines: str, version: str = "1.1", body: bytes = b"") -> Callable[[str, str], bytes]:
    def make(host: str, token: str) -> bytes:
        head = [f"POST /first HTTP/{version}", f"Host: {host}", f"Hatchway-Token: {token}", *lines, "", ""]
        return "\r\n".join(head).encode("latin-1") + body

    return make


AMBIGUOUS: dict[str, Callable[[str, str], bytes]] = {
    "both lengths": framed("Content-Length: 4", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "both lengths, other order": framed("Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\n"),
    "two lengths": framed("Content-Length: 4", "Content-Length: 5", body=b"abcd"),
    "two lengths in one": framed("Content-Length: 4, 5", body=b"abcd"),
    "a signed length": framed("Content-Length: +4", body=b"abcd"),
    "a negative length": framed("Content-Length: -4", body=b"abcd"),
    "a length in hexadecimal": framed("Content-Length: 0x4", body=b"abcd"),
    "a length with underscores": framed("Content-Length: 1_0", body=b"abcd"),
    "a length without end": framed("Content-Length: " + "9" * 40, body=b"abcd"),
    "an empty length": framed("Content-Length: ", body=b"abcd"),
    "another encoding": framed("Transfer-Encoding: gzip", body=b"0\r\n\r\n"),
    "two encodings": framed("Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "two encodings apart": framed("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "an encoding like chunked": framed("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "an encoding with a vertical tab": framed("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "a space before the colon": framed("Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "a field without a colon": framed("Transfer-Encoding", body=b""),
    "a name with a NUL": framed("Content\0-Length: 4", body=b"abcd"),
    "a value with a NUL": framed("X: a\0b", body=b""),
    "a value with a carriage return": framed("X: a\rTransfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunked in HTTP/1.0": framed("Transfer-Encoding: chunked", version="1.0", body=b"0\r\n\r\n"),
    "a version that is none": framed("Content-Length: 0", version="1.1 x"),
    "a first line that is folded": lambda host, token: b"POST\r\n /first HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n",
    "two hosts": framed("Host: other.example"),
    "two hosts that are the same": lambda host, token: framed(f"Host: {host}")(host, token),
    "a fragment of another request as target": lambda host, token: (
        b"GET /a HTTP/1.1\r\nX: / HTTP/1.1\r\nHost: " + host.encode() + b"\r\nHost: b\r\n\r\n"
    ),
    "a target that names a host": lambda host, token: (
        f"GET http://{host}/first HTTP/1.1\r\nHost: {host}\r\nHatchway-Token: {token}\r\n\r\n".encode()
    ),
    "two tokens": lambda host, token: framed(f"Hatchway-Token: {token}")(host, token),
    "a tunnel": lambda host, token: (
        f"CONNECT {host}:80 HTTP/1.1\r\nHost: {host}\r\nHatchway-Token: {token}\r\n\r\n".encode()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_a_request_that_can_be_read_in_two_ways_reaches_nobody(plane: Plane, name: str) -> None:
    recorder = Recorder()
    async with serving(recorder) as port, connected(plane) as client:
        await client.send(AMBIGUOUS[name](host_of(plane, port), token_of(plane)) + SMUGGLED)
        status, code = await client.problem()
        assert (status, code) in {
            (400, "malformed_request"), (401, "token_invalid"), (405, "method_not_allowed"), (421, "unknown_host")
        }  # fmt: skip
        assert await client.is_closed()  # what follows is not looked at
    assert recorder.got == b""


CHUNKS = {
    "no size": b"\r\nabc\r\n0\r\n\r\n",
    "a size in octal": b"0o3\r\nabc\r\n0\r\n\r\n",
    "a size with 0x": b"0x3\r\nabc\r\n0\r\n\r\n",
    "a signed size": b"+3\r\nabc\r\n0\r\n\r\n",
    "a negative size": b"-1\r\nabc\r\n0\r\n\r\n",
    "a space before the size": b" 3\r\nabc\r\n0\r\n\r\n",
    "a size without measure": b"f" * 30 + b"\r\nabc",
    "octets behind a chunk": b"3\r\nabcXX0\r\n\r\n",
    "a chunk that is longer than it says": b"3\r\nabcdef\r\n0\r\n\r\n",
    "a head without end": b"3;" + b"x" * 200_000,
}


@pytest.mark.parametrize("name", CHUNKS)
async def test_a_chunk_that_is_none_ends_the_request(plane: Plane, name: str) -> None:
    recorder = Recorder()
    async with serving(recorder) as port, connected(plane) as client:
        await client.send(request(plane, port, "Transfer-Encoding: chunked", method="POST") + CHUNKS[name] + SMUGGLED)
        answer = await client.rest()
    # The server may have answered the head before the body was seen to be none; then the connection just ends.
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 200", b"HTTP/1.1 502")), answer
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"smuggled" not in recorder.got
    assert not recorder.got.endswith(b"0\r\n\r\n")


async def test_what_follows_a_request_is_one_of_its_own(plane: Plane) -> None:
    recorder = Recorder()
    async with serving(recorder) as port, connected(plane) as client:
        body = b"x" * 10
        await client.send(request(plane, port, "Content-Length: 10", method="POST") + body + SMUGGLED)
        assert (await client.answer())[0] == 200
        assert await client.problem() == (421, "unknown_host")
    assert recorder.got.endswith(b"\r\n\r\n" + body)


async def test_fields_that_are_folded_or_end_in_a_line_feed_come_to_the_server_in_one_way(plane: Plane) -> None:
    async with serving(echo_heads) as port, connected(plane) as client:
        await client.send(request(plane, port, "X: a", " Folded: y").replace(b"\r\n", b"\n"))
        _, _, body = await client.answer()
    assert b"\r\nX: a Folded: y\r\n" in body
    assert body.count(b"\n") == body.count(b"\r\n")


async def test_a_head_without_measure(plane: Plane) -> None:
    for more in ([f"X: {'a' * 70_000}"], [f"X-{n}: {n}" for n in range(10_000)]):
        async with connected(plane) as client:
            await client.send(request(plane, 8000, *more))
            assert (await client.problem())[0] == 431
    async with serving(echo_heads) as port, connected(plane) as client:  # and not in the first request either
        await client.send(request(plane, port))
        assert (await client.answer())[0] == 200
        await client.send(request(plane, port, f"X: {'a' * 70_000}"))
        assert await client.problem() == (431, "head_too_large")


# -- answers that are none

BAD_ANSWERS = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "octets": bytes(range(256)) * 100,
    "another version": b"HTTP/2 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
    "another encoding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
    "chunked in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a value with a NUL": b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
    "a head without measure": b"HTTP/1.1 200 OK\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    "fields without measure": b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 30_000 + b"\r\n",
    "interim answers without end": b"HTTP/1.1 102 Wait\r\n\r\n" * 100,
    "an upgrade that nobody asked for": b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_an_answer_that_is_none_is_a_problem(plane: Plane, name: str) -> None:
    async with serving(answering(BAD_ANSWERS[name])) as port, connected(plane) as client:
        await client.send(request(plane, port))
        status, fields = await client.head()
        while status < 200:
            status, fields = await client.head()
        assert status == 502
        assert json.loads(await client.reader.readexactly(int(fields["content-length"])))["code"] == "port_bad_answer"
        assert await client.is_closed()


BROKEN = {
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
    "chunks without an end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    "a body that is too short": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_is_cut_off(plane: Plane, name: str) -> None:
    async with serving(answering(BROKEN[name])) as port, connected(plane) as client:
        await client.send(request(plane, port))
        answer = await client.rest()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"abc" in answer
    assert not answer.endswith(b"0\r\n\r\n")


async def test_a_body_that_ends_with_its_connection_is_not_whole_when_that_breaks(plane: Plane) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf of")
        await writer.drain()
        await reader.read(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    for version in (b"HTTP/1.1", b"HTTP/1.0"):
        async with serving(reset) as port, connected(plane) as client:
            head = request(plane, port, "Content-Length: 1", method="POST").replace(b"HTTP/1.1", version)
            await client.send(head)
            async with asyncio.timeout(WITHIN):
                await client.reader.readuntil(b"half of")
            await client.send(b"x")
            try:
                assert not (await client.rest()).endswith(b"0\r\n\r\n")
                assert version == b"HTTP/1.1"
            except ConnectionError:
                assert version == b"HTTP/1.0"  # nothing else can tell an old client


async def test_octets_behind_an_answer_are_nobodys(plane: Plane) -> None:
    planted = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    async with serving(answering(planted)) as port, connected(plane) as client:
        for _ in range(3):
            await client.send(request(plane, port))
            assert (await client.answer())[2] == b"ok"


# -- who waits for whom


async def test_a_server_that_answers_nothing(module_opened: Opener) -> None:
    plane = await module_opened(plane={"port_answer_s": 0.3})

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with serving(silent) as port, connected(plane) as client:
        await client.send(request(plane, port))
        assert await client.problem() == (502, "port_no_answer")
    async with serving(deaf) as port, connected(plane) as client:
        await client.send(request(plane, port, "Content-Length: 100000000", method="POST"))

        async def pour() -> None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                while True:
                    await client.send(bytes(100_000))

        pouring = asyncio.ensure_future(pour())
        assert await client.problem() == (502, "port_no_answer")
        pouring.cancel()


async def test_connections_are_bounded_and_given_back(module_opened: Opener) -> None:
    plane = await module_opened(plane={"port_connections_per_sandbox": 3, "port_spare_s": 0.2})

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with serving(hold) as port:
        for _ in range(3):
            async with contextlib.AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(connected(plane)) for _ in range(4)]
                for client in clients[:3]:
                    await client.send(request(plane, port))
                    assert (await client.answer())[0] == 200
                statuses = set()
                async with asyncio.timeout(WITHIN):
                    while 200 not in statuses:  # kept connections that nobody uses are given back
                        async with connected(plane) as late:
                            await late.send(request(plane, port))
                            status, _, body = await late.answer()
                            statuses.add(status)
                            assert status == 200 or json.loads(body)["code"] == "too_many_port_connections"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                client = await stack.enter_async_context(connected(plane))
                await client.send(request(plane, port, "Connection: Upgrade", "Upgrade: x"))
        async with asyncio.timeout(WITHIN):
            status = 429
            while status == 429:  # those of clients that left are
                async with connected(plane) as client:
                    await client.send(request(plane, port))
                    status = (await client.answer())[0]
        assert status == 200


async def test_what_is_open_ends_with_its_token(module_opened: Opener) -> None:
    plane = await module_opened()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await head_of(reader)
        if b"upgrade" in head.lower():
            writer.write(b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        await reader.read()

    async def cut(token: str, how: Any, *lines: str) -> None:
        async with serving(drip) as port, connected(plane) as client:
            await client.send(request(plane, port, *lines, token=token))
            await client.head()
            await how(token)
            assert await client.is_closed()

    async def revoke(token: str) -> None:
        token_id = jwt.decode(token, options={"verify_signature": False})["jti"]
        await plane.configure(revoked=(token_id,))

    async def wait(_: str) -> None:
        pass

    async def supersede(_: str) -> None:
        await plane.tell("generation", 5)

    for lines in ((), ("Connection: Upgrade", "Upgrade: x")):
        await cut(token_of(plane), revoke, *lines)
        await cut(token_of(plane, ttl_s=2.0), wait, *lines)
        await cut(token_of(plane, generation=4), supersede, *lines)
        await plane.tell("generation", 1)


async def test_what_is_open_ends_with_the_node_and_with_the_sandbox(module_opened: Opener) -> None:
    plane = await module_opened()

    asked = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        asked.set()
        await reader.read()

    async with serving(hold) as port:
        async with connected(plane) as client:
            await client.send(request(plane, port))
            await asyncio.wait_for(asked.wait(), WITHIN)
            await plane.tell("lose", "The virtual machine ended.")
            assert await client.problem() == (503, "sandbox_unreachable")
        await plane.tell("connect", str(plane.agent_socket))
        async with connected(plane) as client, connected(plane) as idle:
            asked.clear()
            await client.send(request(plane, port))
            await asyncio.wait_for(asked.wait(), WITHIN)
            stopping = asyncio.ensure_future(plane.tell("stop"))
            assert await client.is_closed()
            assert await idle.is_closed()
            async with asyncio.timeout(WITHIN):
                await stopping
