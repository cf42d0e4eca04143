"""Ports by host name: a real node process, the real guest agent, real servers behind it."""

import asyncio
import contextlib
import hashlib
import http.server
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dataplane_fixtures import Opener, agent, module_opened, module_plane
from dataplane_harness import WITHIN, Plane
from ports_harness import (
    answering,
    connected,
    echo_heads,
    head_of,
    host_of,
    request,
    serving,
    token_of,
)
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

__all__ = ["agent", "module_opened"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane = module_plane


@pytest.fixture
def files(tmp_path: Path) -> Iterator[int]:
    """Python's own web server; gives its port."""
    (tmp_path / "hello.txt").write_text("hello from the sandbox\n")
    (tmp_path / "large").write_bytes(bytes(range(256)) * 40_000)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, directory=str(tmp_path), **more)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def client_of(plane: Plane, port: int, **headers: str) -> httpx.AsyncClient:
    headers = {"host": f"{host_of(plane, port)}:7071", "hatchway-token": token_of(plane), **headers}
    return httpx.AsyncClient(base_url=plane.url, headers=headers, timeout=WITHIN)


# -- usual use


async def test_a_web_server(plane: Plane, files: int) -> None:
    async with client_of(plane, files) as client:
        assert (await client.get("/hello.txt")).text == "hello from the sandbox\n"
        listing = await client.get("/")
        assert "hello.txt" in listing.text
        head = await client.head("/hello.txt")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, "23", b"")
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/hello.txt", content=b"x")).status_code == 501
        assert (await client.get("/large")).content == bytes(range(256)) * 40_000


async def test_requests_of_one_client_share_a_connection_and_those_of_two_do_not(plane: Plane) -> None:
    connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await echo_heads(reader, writer)

    async with serving(count) as port, connected(plane) as one, connected(plane) as two:
        for client in (one, two, one, two, one):
            await client.send(request(plane, port))
            assert (await client.answer())[0] == 200
        await one.send(request(plane, port) * 3)  # one behind the other, without waiting
        for _ in range(3):
            assert (await one.answer())[0] == 200
    assert connections == 2


async def test_what_the_server_is_told(plane: Plane) -> None:
    token = token_of(plane)
    async with serving(echo_heads) as port, connected(plane) as client:
        await client.send(
            request(
                plane, port, "X-Forwarded-For: 6.6.6.6", "X_Forwarded_Host: evil.example", "Forwarded: for=6.6.6.6",
                "Connection: keep-alive, X-Gone", "X-Gone: 1", "Keep-Alive: 5", "Proxy-Authorization: Basic eA==", "TE: trailers",
                f"Cookie: a=1; hatchway-port={token}; __Host-hatchway-port=x; b=2", "Authorization: Bearer the-apps-own",
                "X-Real-IP: 6.6.6.6", target="/path?q=%20#", token=token,
            )
        )  # fmt: skip
        _, _, body = await client.answer()
    lines = body.decode().split("\r\n")
    assert lines[0] == "GET /path?q=%20# HTTP/1.1"
    host = host_of(plane, port)
    assert sorted(line for line in lines[1:] if line) == [
        "Authorization: Bearer the-apps-own",
        "Cookie: a=1; b=2",
        f"Host: {host}",
        "X-Forwarded-For: 127.0.0.1",
        f"X-Forwarded-Host: {host}",
        "X-Forwarded-Proto: http",
    ]
    assert token not in body.decode()


async def test_bodies_of_both_kinds_and_trailers(plane: Plane) -> None:
    async with serving(echo_heads) as port, connected(plane) as client:
        await client.send(request(plane, port, "Content-Length: 5", method="PUT") + b"hello")
        assert (await client.answer())[2].endswith(b"\r\n\r\nhello")
        await client.send(
            request(plane, port, "Transfer-Encoding: chunked", method="POST")
            + b"3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nX-Sum: 9\r\nContent-Length: 3\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n"
        )
        _, _, body = await client.answer()
        assert body.split(b"\r\n\r\n", 1)[1].endswith(b"0\r\nX-Sum: 9\r\n\r\n")
    chunked = (
        b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n0\r\nX-Sum: 9\r\nSet-Cookie: a=1\r\n\r\n"
    )
    async with serving(answering(chunked)) as port, connected(plane) as client:
        await client.send(request(plane, port, "Connection: close"))
        answer = await client.rest()
    assert answer.lower().count(b"transfer-encoding: chunked") == 1
    assert answer.endswith(b"\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 9\r\n\r\n")


async def test_an_old_client_and_an_old_server(plane: Plane) -> None:
    async with serving(answering(b"HTTP/1.0 200 Fine\r\nX: y\r\n\r\nuntil the end")) as port:
        async with connected(plane) as client:
            await client.send(request(plane, port).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = await client.rest()
            assert answer.startswith(b"HTTP/1.1 200 Fine\r\n")
            assert answer.endswith(b"\r\n\r\nuntil the end")
        async with client_of(plane, port) as modern:
            assert (await modern.get("/")).text == "until the end"


async def test_a_server_that_is_asked_before_it_gets_the_body(plane: Plane) -> None:
    async def asks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"100-continue" in await head_of(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body)
        await head_of(reader)
        writer.write(b"HTTP/1.1 417 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async with serving(asks) as port, connected(plane) as client:
        expecting = request(plane, port, "Content-Length: 5", "Expect: 100-continue", method="POST")
        await client.send(expecting)
        assert await client.head() == (103, {"link": "</a>"})
        assert (await client.head())[0] == 100
        await client.send(b"hello")
        assert (await client.answer())[2] == b"hello"
        await client.send(expecting)  # and one that does not want it
        assert (await client.answer())[0] == 417
        assert await client.is_closed()


async def test_a_server_that_answers_before_it_read_the_body(plane: Plane) -> None:
    refusal = b"HTTP/1.1 413 Too large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!"
    async with serving(answering(refusal)) as port, connected(plane) as client:
        await client.send(request(plane, port, "Content-Length: 100000000", method="POST") + bytes(1000))
        status, _, body = await client.answer()
        assert (status, body) == (413, b"no!")
        assert await client.is_closed()


async def test_large_bodies_go_through_both_ways_at_once(plane: Plane) -> None:
    size = 50_000_000

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        left = size
        while left:
            data = await reader.read(65_536)
            left -= len(data)
            writer.write(data)
            await writer.drain()

    before = await plane.tell("memory")
    sent, came = hashlib.sha256(), hashlib.sha256()
    async with serving(mirror) as port, connected(plane) as client:
        await client.send(request(plane, port, f"Content-Length: {size}", method="POST"))

        async def send() -> None:
            for number in range(size // 100_000):
                piece = number.to_bytes(4, "big") * 25_000
                sent.update(piece)
                await client.send(piece)

        sending = asyncio.ensure_future(send())
        assert (await client.head())[0] == 200
        left = size
        async with asyncio.timeout(120):
            while left:
                data = await client.reader.read(262_144)
                assert data
                left -= len(data)
                came.update(data)
        await sending
    assert came.digest() == sent.digest()
    after = await plane.tell("memory")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < 20_000_000


async def test_who_takes_nothing_is_held_back(plane: Plane) -> None:
    before = await plane.tell("memory")
    given = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal given
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(bytes(100_000))
            await writer.drain()
            given += 100_000

    async with serving(pour) as port, contextlib.AsyncExitStack() as stack:
        stalled = [await stack.enter_async_context(connected(plane)) for _ in range(5)]
        for client in stalled:
            await client.send(request(plane, port))
            assert (await client.head())[0] == 200
        async with client_of(plane, port) as other, other.stream("GET", "/") as answer:
            read = 0
            async for piece in answer.aiter_raw():
                read += len(piece)
                if read > 10_000_000:
                    break
        known = 0
        while known != given:  # until nobody gives any more
            known = given
            await asyncio.sleep(0.3)
        after = await plane.tell("memory")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < 20_000_000
    assert given < 100_000_000


async def test_a_client_that_leaves_ends_the_connection_to_the_server(plane: Plane) -> None:
    ended = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()

    async with serving(wait) as port:
        async with connected(plane) as client:
            await client.send(request(plane, port))
        async with asyncio.timeout(WITHIN):
            await ended.wait()


async def test_a_kept_connection_that_the_server_closed_is_made_anew(plane: Plane) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(head), head))
        await writer.drain()

    async with serving(once) as port, connected(plane) as client:
        for _ in range(5):
            await client.send(request(plane, port))
            assert (await client.answer())[0] == 200


# -- what requests are upgraded to


async def test_websockets_of_the_sandbox(plane: Plane) -> None:
    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async with serve(echo, "127.0.0.1", 0, max_size=None) as server:
        port = server.sockets[0].getsockname()[1]
        url = plane.url.removeprefix("http://").split(":")
        more = {"host": url[0], "port": int(url[1]), "proxy": None, "max_size": None}
        headers = {"hatchway-token": token_of(plane)}
        address = f"ws://{host_of(plane, port)}:7071/socket"
        async with connect(address, additional_headers=headers, **more) as connection:  # type: ignore[arg-type]
            for message in ("text", b"binary", b"x" * 3_000_000, ""):
                await connection.send(message)
                assert await connection.recv() == message
        with pytest.raises(InvalidStatus) as refused:
            await connect(address, **more).__aenter__()  # type: ignore[arg-type]
        assert refused.value.response.status_code == 401


async def test_any_upgrade_with_an_end_of_each_direction(plane: Plane) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await head_of(reader)
        assert b"upgrade: shout" in head.lower()
        assert b"connection: upgrade" in head.lower()
        writer.write(b"HTTP/1.1 101 Go on\r\nConnection: upgrade\r\nUpgrade: shout\r\n\r\nFIRST")
        while data := await reader.read(1000):
            writer.write(data.upper())
        writer.write(b" AND LAST")

    async with serving(shout) as port, connected(plane) as client:
        await client.send(request(plane, port, "Connection: Upgrade", "Upgrade: shout") + b"early ")
        status, fields = await client.head()
        assert (status, fields["upgrade"], fields["connection"].lower()) == (101, "shout", "upgrade")
        await client.send(b"later")
        client.writer.write_eof()
        assert await client.rest() == b"FIRSTEARLY LATER AND LAST"


async def test_an_upgrade_that_the_server_does_not_want(plane: Plane) -> None:
    async with serving(echo_heads) as port, connected(plane) as client:
        await client.send(request(plane, port, "Connection: Upgrade", "Upgrade: h2c"))
        assert (await client.answer())[0] == 200
        await client.send(request(plane, port))
        assert (await client.answer())[0] == 200
        await client.send(request(plane, port, "Upgrade: websocket"))  # not in Connection: no upgrade is asked for
        assert b"upgrade" not in (await client.answer())[2].lower()


# -- browsers


async def test_a_link_sets_a_cookie_of_this_name_only(plane: Plane) -> None:
    token = token_of(plane)
    async with serving(echo_heads) as port, connected(plane) as client:
        await client.send(request(plane, port, target=f"/.hatchway/open?token={token}&to=/app%3Fa=1", token=None))
        status, fields, _ = await client.answer()
        assert (status, fields["location"]) == (303, "/app?a=1")
        assert (fields["cache-control"], fields["referrer-policy"]) == ("no-store", "no-referrer")
        cookie, *attributes = fields["set-cookie"].split("; ")
        assert cookie == f"hatchway-port={token}"
        assert set(attributes[0:1] + attributes[2:]) == {"Path=/", "HttpOnly", "SameSite=Lax"}
        assert 290 <= int(attributes[1].removeprefix("Max-Age=")) <= 300
        await client.send(request(plane, port, f"Cookie: {cookie}", target="/app?a=1", token=None))
        status, _, body = await client.answer()
        assert status == 200
        assert token.encode() not in body
        await client.send(request(plane, port, f"Cookie: hatchway-port=planted; {cookie}", token=None))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "to",
    ["//evil.example", "/\\evil.example", "https://evil.example/", "", "relative", "/%0d%0aSet-Cookie:%20a=1", "/ü"],
)
async def test_a_link_leads_nowhere_else(plane: Plane, to: str) -> None:
    async with connected(plane) as client:
        target = f"/.hatchway/open?token={token_of(plane)}&to={to}"
        await client.send(request(plane, 8000, target="/.hatchway/x", token=None))
        assert await client.problem() == (404, "unknown_path")
    async with connected(plane) as client:
        await client.send(f"GET {target} HTTP/1.1\r\nHost: {host_of(plane, 8000)}\r\n\r\n".encode("latin-1"))
        assert (await client.problem())[0] in (400, 422)


async def test_a_cookie_does_not_let_in_pages_of_elsewhere(plane: Plane) -> None:
    cookie = f"Cookie: hatchway-port={token_of(plane)}"
    neighbour = "http://8000-bbbbbbbbbbbbbbbbbbbb.localhost:7071"

    async with serving(echo_heads) as port:

        async def status(*lines: str, method: str = "GET") -> int:
            async with connected(plane) as client:
                await client.send(request(plane, port, cookie, *lines, method=method, token=None))
                return (await client.answer())[0]

        own = f"Origin: http://{host_of(plane, port)}:7071"
        assert await status() == 200
        assert await status(own, method="POST") == 200
        assert await status(f"Origin: http://3000-{plane.sandbox_id}.localhost:7071") == 200
        assert await status("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate") == 200
        assert await status("Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: no-cors") == 200
        for origin in (
            neighbour,
            "null",
            "https://evil.example",
            f"http://{plane.sandbox_id}.localhost",
            "http://[::1",
        ):
            assert await status(f"Origin: {origin}") == 403
            assert await status(own, f"Origin: {origin}") == 403
        for site in ("cross-site", "same-site"):
            assert await status(f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: no-cors") == 403
            assert await status(f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: websocket", f"Origin: {neighbour}") == 403
        async with connected(plane) as client:  # who has the token itself is who it says
            await client.send(request(plane, port, f"Origin: {neighbour}"))
            assert (await client.answer())[0] == 200


async def test_cookies_of_a_sandbox_stay_its_own(plane: Plane) -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nSet-Cookie: a=1; Domain=localhost; Path=/\r\n"
        b"Set-Cookie: hatchway-port=stolen\r\nSet-Cookie: b=2; domain = .ports.example; HttpOnly\r\n"
        b"Set-Cookie:  __Host-hatchway-port = x; Secure\r\n"
        b"Set-Cookie: =hatchway-port=x\r\nSet-Cookie: =c=3\r\n\r\n"  # browsers send these back without the first sign
    )
    async with serving(answering(answer)) as port, client_of(plane, port) as client:
        got = (await client.get("/")).headers.get_list("set-cookie")
    assert got == ["a=1; Path=/", "b=2; HttpOnly", "=c=3"]


# -- names


async def test_a_name_belongs_to_the_ports_or_to_the_api_and_never_to_both(plane: Plane) -> None:
    async with serving(echo_heads) as port, connected(plane) as client:
        await client.send(request(plane, port))
        assert (await client.answer())[0] == 200
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # on the connection of a port
        assert await client.problem() == (421, "unknown_host")
        async with connected(plane) as api:
            await api.send(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await api.answer())[2] == b"ok\n"
            await api.send(request(plane, port, target="/healthz"))
            status, fields = await api.head()
            assert (status, fields["content-type"]) == (421, "application/problem+json")


@pytest.mark.parametrize(
    "host",
    [
        "x.localhost", "0-{id}.localhost", "65536-{id}.localhost", "080-{id}.localhost", "8000-{id}x.localhost", "8000-.localhost",
        "8000-{id}.localhost.", "8000-{id}.localhost:port", "a.8000-{id}.localhost", "8000-{id}.localhost:7071@evil.example",
    ],
)  # fmt: skip
async def test_names_that_are_none(plane: Plane, host: str) -> None:
    async with connected(plane) as client:
        head = (
            f"GET / HTTP/1.1\r\nHost: {host.format(id=plane.sandbox_id)}\r\nHatchway-Token: {token_of(plane)}\r\n\r\n"
        )
        await client.send(head.encode())
        status, code = await client.problem()
        assert (status, code) in ((421, "unknown_host"), (404, "unknown_path"))


async def test_further_domains(module_opened: Opener) -> None:
    plane = await module_opened(port_domains=["ports.example", "localhost"])
    async with serving(echo_heads) as port, connected(plane) as client:
        for domain in ("ports.example", "localhost", "Ports.EXAMPLE"):
            name = host_of(plane, port, domain)
            await client.send(
                f"GET / HTTP/1.1\r\nHost: {name}:99\r\nHatchway-Token: {token_of(plane)}\r\n\r\n".encode()
            )
            status, _, body = await client.answer()
            assert status == 200
            assert f"Host: {name}:99\r\n".encode() in body


async def test_a_server_on_another_address_of_the_loopback(plane: Plane) -> None:
    if not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    try:
        server = serving(echo_heads, "::1")
        port = await server.__aenter__()
    except OSError:
        pytest.skip("this host has no address ::1")
    try:
        async with connected(plane) as client:
            await client.send(request(plane, port))
            assert (await client.answer())[0] == 200
    finally:
        await server.__aexit__(None, None, None)


# -- raw TCP


@contextlib.asynccontextmanager
async def tunnel(plane: Plane, port: int, **more: Any) -> AsyncIterator[ClientConnection]:
    address = f"{plane.url.replace('http', 'ws')}/v1/sandboxes/{plane.sandbox_id}/ports/{port}/tcp"
    headers = {"authorization": f"Bearer {token_of(plane)}"}
    async with connect(address, additional_headers=headers, proxy=None, **more) as connection:
        yield connection


async def _read_on(connection: ClientConnection) -> None:
    while True:
        await connection.recv()


async def close_of(connection: ClientConnection) -> tuple[int, str]:
    async with asyncio.timeout(WITHIN):
        with pytest.raises(ConnectionClosed) as end:
            await _read_on(connection)
    assert end.value.rcvd is not None
    return end.value.rcvd.code, end.value.rcvd.reason


async def test_raw_tcp_with_an_end_of_each_direction(plane: Plane) -> None:
    async def sum_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = hashlib.sha256()
        while data := await reader.read(65_536):
            whole.update(data)
        writer.write(whole.hexdigest().encode())

    octets = bytes(range(256)) * 20_000
    async with serving(sum_up) as port, tunnel(plane, port) as connection:
        for at in range(0, len(octets), 500_000):
            await connection.send(octets[at : at + 500_000])
        await connection.send(json.dumps({"eof": True}))
        async with asyncio.timeout(WITHIN):
            assert await connection.recv() == hashlib.sha256(octets).hexdigest().encode()
            assert await connection.recv() == '{"eof":true}'
        assert await close_of(connection) == (1000, "end")


async def test_the_servers_end_leaves_the_other_direction_open(plane: Plane) -> None:
    got = asyncio.get_running_loop().create_future()

    async def first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all I have")
        writer.write_eof()
        got.set_result(await reader.read())

    async with serving(first) as port, tunnel(plane, port) as connection:
        async with asyncio.timeout(WITHIN):
            assert await connection.recv() == b"all I have"
            assert await connection.recv() == '{"eof":true}'
            await connection.send(b"still ")
            await connection.send(b"here")
            await connection.send('{"eof":true}')
            assert await got == b"still here"
        assert await close_of(connection) == (1000, "end")


async def test_a_tunnel_that_breaks_says_so(plane: Plane) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with serving(reset) as port, tunnel(plane, port) as connection:
        await connection.send(b"x")
        assert await close_of(connection) == (1011, "broken")
    async with serving(echo_heads) as port:
        for bad in ("{}", "nonsense", '{"eof": true, "x": 1}'):
            async with tunnel(plane, port) as connection:
                await connection.send(bad)
                assert (await close_of(connection))[0] == 1007
        async with tunnel(plane, port) as connection:
            await plane.tell("lose", "The virtual machine ended.")
            assert await close_of(connection) == (1011, "broken")
        await plane.tell("connect", str(plane.agent_socket))


async def test_a_client_that_leaves_ends_the_tunnel(plane: Plane) -> None:
    ended = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()

    async with serving(wait) as port:
        async with tunnel(plane, port):
            pass
        async with asyncio.timeout(WITHIN):
            await ended.wait()


async def test_a_tunnel_to_nothing(plane: Plane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    for number, status in ((port, 502), (0, 422), (70_000, 422)):
        with pytest.raises(InvalidStatus) as refused:
            async with tunnel(plane, number):
                pass
        assert refused.value.response.status_code == status
    async with connected(plane) as client:
        await client.send(request(plane, port))
        assert await client.problem() == (502, "port_closed")
    await plane.tell("state", "paused")
    async with connected(plane) as client:
        await client.send(request(plane, port))
        assert await client.problem() == (409, "sandbox_not_running")
    await plane.tell("state", "running")
