"""Ports of sandboxes through the E2B wrapper: the relay of HTTP and WebSockets, who is let in, and what is answered otherwise."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dataplane_fixtures import agent, module_opened, module_plane, own_opened, own_plane
from dataplane_harness import WITHIN, Plane
from e2b_ground import Ground, body_of, opening
from ports_harness import answering, echo_heads, head_of, serving
from tests.support.certificates import Authority
from websockets.asyncio.client import connect as websocket
from websockets.asyncio.server import serve as serve_websockets

from hatchway.e2b.connections import Room

__all__ = ["agent", "module_opened", "own_opened", "own_plane"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane = module_plane

CLOSED = 9
BROWSER = ("Accept: text/html,application/xhtml+xml", "Sec-Fetch-Mode: navigate", "User-Agent: Mozilla/5.0")


@pytest_asyncio.fixture(loop_scope="module")
async def ground(plane: Plane, tmp_path: Path) -> AsyncIterator[Ground]:
    """A wrapper of the test's own, before a sandbox that all share."""
    async with opening(plane, tmp_path) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(own_plane: Plane, tmp_path: Path) -> AsyncIterator[Ground]:
    """The same with a sandbox of its own, which may die."""
    async with opening(own_plane, tmp_path) as made:
        yield made


# -- HTTP


async def test_a_request_reaches_the_port_and_is_told_what_it_has_to_know(ground: Ground):
    async with serving(echo_heads) as port:
        lines = ("X-Mine: 1", "X-Access-Token: abc", "X-Forwarded-For: 6.6.6.6", "X_Forwarded_Host: evil", "Connection: X-Hop", "X-Hop: 1", "E2B-Traffic-Access-Token: t")  # fmt: skip
        status, _, seen = await ground.ask(ground.head(port, *lines, target="/a%20b?q=%2F"))
    assert status == 200
    head = seen.decode().lower().split("\r\n")
    assert head[0] == "get /a%20b?q=%2f http/1.1"
    for line in ("host: localhost:7080", "x-mine: 1", "x-access-token: abc", "x-forwarded-for: 127.0.0.1", "x-forwarded-host: localhost:7080", "x-forwarded-proto: http"):  # fmt: skip
        assert head.count(line) == 1, line
    names = [line.partition(":")[0] for line in head]
    for name in ("e2b-sandbox-id", "e2b-sandbox-port", "e2b-traffic-access-token", "x-hop", "x_forwarded_host"):
        assert name not in names
    assert names.count("x-forwarded-for") == 1


async def test_no_api_key_reaches_the_guest(ground: Ground):
    """SDKs send theirs with whatever goes to the same URL; and what else has the form of one. A user's own values pass."""
    keys = ("X-API-KEY: e2b_" + "0f" * 24, "Authorization: Bearer hw_" + "a1" * 20, "X-Other: e2b_" + "0" * 40)
    async with serving(echo_heads) as port:
        status, _, seen = await ground.ask(ground.head(port, *keys, "Authorization: Basic dTpw", "X_Api_Key: mine"))
    assert status == 200
    head = seen.decode().lower()
    assert "e2b_" not in head
    assert "hw_" not in head
    assert "authorization: basic dtpw" in head
    assert "x_api_key: mine" in head


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_go_both_ways(ground: Ground, chunked: bool):
    body = bytes(range(256)) * 400
    async with serving(echo_heads) as port, ground.connected() as client:
        if chunked:
            await client.send(ground.head(port, "Transfer-Encoding: chunked", method="POST"))
            for at in range(0, len(body), 10_000):
                piece = body[at : at + 10_000]
                await client.send(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await client.send(b"0\r\n\r\n")
        else:
            await client.send(ground.head(port, f"Content-Length: {len(body)}", method="POST") + body)
        status, fields = await client.head()
        echoed = await body_of(client, fields)
        assert status == 200
        again = echoed.split(b"\r\n\r\n", 1)[1]
        assert (len(again) >= len(body)) if chunked else again == body
        await client.send(ground.head(port))
        assert (await client.head())[0] == 200, "the client's connection goes on"


async def test_parts_of_an_answer_come_as_they_are_made(ground: Ground):
    go_on = asyncio.Event()

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
        await writer.drain()

    async with serving(slowly) as port, ground.connected() as client:
        await client.send(ground.head(port))
        await client.head()
        async with asyncio.timeout(WITHIN):
            assert (await client.reader.readuntil(b"first\r\n")).endswith(b"first\r\n")
        go_on.set()
        async with asyncio.timeout(WITHIN):
            assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"second\r\n0\r\n\r\n")


async def test_parts_of_a_request_come_as_they_are_sent(ground: Ground):
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        for _ in range(2):
            seen.put_nowait(await reader.readexactly(5))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()

    async with serving(reading) as port, ground.connected() as client:
        await client.send(ground.head(port, "Content-Length: 10", method="PUT") + b"first")
        async with asyncio.timeout(WITHIN):
            assert await seen.get() == b"first"
        await client.send(b"again")
        async with asyncio.timeout(WITHIN):
            assert await seen.get() == b"again"
        assert (await client.head())[0] == 204


async def test_who_takes_nothing_holds_the_port_back(ground: Ground):
    """What is on its way stays within bounds, however much the port has to give."""
    written = 0
    stuck = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
        piece = bytes(65_536)
        while True:
            try:
                async with asyncio.timeout(2.0):
                    writer.write(piece)
                    await writer.drain()
            except TimeoutError:
                stuck.set()
                return
            written += len(piece)

    async with serving(endless) as port, ground.connected() as client:
        await client.send(ground.head(port))
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport that reads
        async with asyncio.timeout(WITHIN):
            await stuck.wait()
    assert written < 64 * 1024 * 1024


async def test_a_client_that_leaves_is_left(ground: Ground):
    gone = asyncio.Event()

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            await reader.read()
        finally:
            gone.set()

    async with serving(waiting) as port:
        async with ground.connected() as client:
            await client.send(ground.head(port))
            await client.head()
        async with asyncio.timeout(WITHIN):
            await gone.wait()


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_answers_without_a_body(ground: Ground, method: str):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" if method == "HEAD" else b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"  # fmt: skip
    async with serving(answering(answer)) as port, ground.connected() as client:
        await client.send(ground.head(port, method=method))
        status, fields = await client.head()
        assert (status, fields.get("content-length")) in ((200, "1000"), (304, None))


async def test_a_body_that_ends_with_the_connection(ground: Ground):
    async with serving(answering(b"HTTP/1.0 200 OK\r\n\r\nall of it")) as port:
        assert (await ground.ask(ground.head(port)))[2] == b"all of it"


async def test_a_cookie_is_for_its_own_name_alone(ground: Ground):
    answer = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b; Domain=sbx.example; Path=/\r\nContent-Length: 0\r\n\r\n"
    async with serving(answering(answer)) as port:
        _, fields, _ = await ground.ask(ground.head(port))
    assert fields["set-cookie"] == "a=b; Path=/"


async def test_an_answer_that_breaks_off_is_broken_off_here(ground: Ground):
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this"
    async with serving(answering(cut)) as port, ground.connected() as client:
        await client.send(ground.head(port))
        await client.head()
        async with asyncio.timeout(WITHIN):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.reader.readexactly(1000)


async def test_when_the_sandbox_dies_its_answers_break_off(mortal: Ground):
    ground = mortal

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await reader.read()

    async with serving(endless) as port, ground.connected() as client:
        await client.send(ground.head(port))
        await client.head()
        await client.reader.readuntil(b"ok\r\n")
        ground.control.state = "deleted"
        await ground.plane.tell("lose", "The virtual machine ended.")
        async with asyncio.timeout(WITHIN):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.reader.readexactly(1)


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n", b"", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"])  # fmt: skip
async def test_what_is_no_answer_is_said(ground: Ground, answer: bytes):
    async with serving(answering(answer)) as port:
        status, body = await ground.refusal(ground.head(port))
    assert (status, body["code"], body["port"], body["sandboxId"]) == (502, 502, port, ground.id)


# -- WebSockets


@pytest.mark.parametrize("by", ["headers", "host"])
async def test_a_websocket_passes_whatever_its_frames_are(ground: Ground, by: str):
    async def echo(connection: Any) -> None:
        async for message in connection:
            await connection.send(message)

    async with serve_websockets(echo, "127.0.0.1", 0, subprotocols=["chat"], max_size=None) as server:  # type: ignore[list-item]
        port = next(iter(server.sockets)).getsockname()[1]
        own = {"E2b-Sandbox-Id": ground.id, "E2b-Sandbox-Port": str(port)} if by == "headers" else {}
        host = "localhost" if by == "headers" else f"{port}-{ground.id}.localhost"
        url = f"ws://{host}:{ground.port}/path"
        async with websocket(
            url, host="127.0.0.1", additional_headers=own, subprotocols=["chat"], max_size=None
        ) as client:  # type: ignore[list-item]
            assert client.subprotocol == "chat"
            assert client.protocol.extensions, "compression is between the two of them"
            big = bytes(range(256)) * 8192
            for message in ("text", big, ""):
                await client.send(message)
                async with asyncio.timeout(WITHIN):
                    assert await client.recv() == message
        assert client.close_code == 1000


async def test_a_websocket_is_cut_when_the_sandbox_dies(mortal: Ground):
    ground = mortal

    async def hold(connection: Any) -> None:
        await connection.wait_closed()

    async with serve_websockets(hold, "127.0.0.1", 0, close_timeout=0.1) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with websocket(f"ws://{port}-{ground.id}.localhost:{ground.port}/", host="127.0.0.1") as client:
            await ground.plane.tell("lose", "The virtual machine ended.")
            async with asyncio.timeout(WITHIN):
                await client.wait_closed()
            assert client.close_code == 1006


async def test_a_websocket_keeps_its_place_among_the_connections(plane: Plane, tmp_path: Path):
    """Though nothing is asked over it any more: who comes is refused, and finds room once it has ended."""

    async def hold(connection: Any) -> None:
        await connection.wait_closed()

    room = Room(most=1)
    async with opening(plane, tmp_path, room=room) as ground, serve_websockets(hold, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        async with websocket(f"ws://{port}-{ground.id}.localhost:{ground.port}/", host="127.0.0.1") as client:
            status, told = await ground.refusal(head)
            assert (status, told["code"]) == (503, 503)
            await client.ping()
        async with asyncio.timeout(WITHIN):
            while (await ground.ask(head))[0] != 204:
                await asyncio.sleep(0.01)


async def test_a_handshake_that_is_refused_by_the_port_says_so(ground: Ground):
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\nX-Why: no\r\n\r\nnot me"
    async with serving(answering(refusal)) as port, ground.connected() as client:
        await client.send(ground.head(port, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"))
        status, fields = await client.head()
        assert (status, fields["x-why"], fields["connection"]) == (403, "no", "close")
        assert await client.rest() == b"not me"


async def test_refusals_of_websockets_are_answers(ground: Ground):
    ask = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")
    assert await ground.refusal(ground.head(CLOSED, *ask)) == (
        502,
        {"sandboxId": ground.id, "port": CLOSED, "code": 502, "message": "The sandbox is running but port is not open"},
    )
    head = b"GET /x HTTP/1.1\r\nHost: localhost\r\n" + "\r\n".join([*ask, "", ""]).encode()
    assert (await ground.refusal(head))[0] == 404


# -- who is let in, and what is answered otherwise


async def test_a_closed_port(ground: Ground):
    status, body = await ground.refusal(ground.head(CLOSED))
    assert (status, body) == (
        502,
        {"sandboxId": ground.id, "message": "The sandbox is running but port is not open", "port": CLOSED, "code": 502},
    )


async def test_a_port_that_opens_within_a_second_is_waited_for(ground: Ground):
    async with serving(echo_heads) as port:
        pass
    asking = asyncio.create_task(ground.ask(ground.head(port)))
    await asyncio.sleep(0)
    server = await asyncio.start_server(echo_heads, "127.0.0.1", port)
    try:
        assert (await asking)[0] == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    "how", ["unknown", "not ours", "spoilt", "deleted", "failed", "paused", "suspended", "stopped"]
)
async def test_a_sandbox_that_is_not_there(ground: Ground, how: str):
    wanted = ground.head(8000)
    name = ground.id
    if how == "unknown":
        name = "abc"
        wanted = wanted.replace(ground.id.encode(), b"abc")
    elif how == "not ours":
        ground.control.settings = None
    elif how == "spoilt":
        ground.control.settings = {"template": 5}
    else:
        ground.control.state = how
    assert await ground.refusal(wanted) == (
        502,
        {"sandboxId": name, "message": "The sandbox was not found", "code": 502},
    )


async def test_pages_are_for_people_alone(ground: Ground):
    ground.control.state = "deleted"
    status, fields, page = await ground.ask(ground.head(CLOSED, *BROWSER))
    assert (status, fields["content-type"]) == (502, "text/html; charset=utf-8")
    assert b"was not found" in page
    for lines in (BROWSER[:1], (*BROWSER[:1], "Sec-Fetch-Mode: cors", BROWSER[2]), ("Accept: */*", BROWSER[2])):
        assert (await ground.refusal(ground.head(CLOSED, *lines)))[0] == 502
    posted = ground.head(CLOSED, *BROWSER, "Content-Length: 0", method="POST")
    assert (await ground.refusal(posted))[0] == 502


async def test_private_ports_need_the_traffic_token(ground: Ground):
    ground.control.settings = {"template": "base", "network": {"allowPublicTraffic": False}}
    token = ground.identity.traffic_token(ground.id)
    async with serving(echo_heads) as port:
        for lines in ((), ("E2B-Traffic-Access-Token: wrong",), (f"X-Access-Token: {token}",)):
            status, body = await ground.refusal(ground.head(port, *lines))
            assert (status, body["code"]) == (403, 403)
        status, _, seen = await ground.ask(ground.head(port, f"e2b-traffic-access-token: {token}"))
    assert status == 200
    assert token.encode() not in seen, "the guest does not learn it"


async def test_the_host_can_be_masked(ground: Ground):
    ground.control.settings = {"template": "base", "network": {"maskRequestHost": "${PORT}-app.example"}}
    async with serving(echo_heads) as port:
        _, _, seen = await ground.ask(ground.head(port, host=f"{port}-{ground.id}.sbx.example"))
    head = seen.decode().lower()
    assert f"\r\nhost: {port}-app.example\r\n" in head
    assert f"\r\nx-forwarded-host: {port}-{ground.id}.sbx.example\r\n" in head


async def test_a_port_that_speaks_tls_itself(ground: Ground, tmp_path: Path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path / "ca", "nobody's").issue("whatever.example"))
    body = bytes(range(256)) * 2000
    server = await asyncio.start_server(echo_heads, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        ground.control.settings = {"template": "base", "network": {"httpsPorts": [port]}}
        sent = ground.head(port, f"Content-Length: {len(body)}", method="POST") + body
        status, _, seen = await ground.ask(sent)
        assert status == 200
        assert seen.split(b"\r\n\r\n", 1)[1] == body
    finally:
        server.close()
    async with serving(speaking_at_once) as plain:
        ground.control.settings = {"template": "base", "network": {"httpsPorts": [plain]}}
        looks = ground.control.looks
        while ground.control.looks == looks:  # until then the wrapper goes by what it saw a moment ago
            await ground.refusal(ground.head(port))  # nobody listens there any more
        status, body = await ground.refusal(ground.head(plain))
        assert (status, "no TLS" in body["message"]) == (502, True)


async def speaking_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 this is no TLS\r\n")
    await reader.read()


# -- resuming


@pytest.mark.parametrize("state", ["paused", "suspended"])
async def test_traffic_resumes_where_that_was_asked_for_and_gives_time(ground: Ground, state: str):
    ground.control.settings = {"template": "base", "autoResume": True}
    ground.control.state = state
    async with serving(echo_heads) as port:
        answers = await asyncio.gather(*(ground.ask(ground.head(port)) for _ in range(5)))
    assert [status for status, _, _ in answers] == [200] * 5
    assert len(ground.control.woken) == 1, "once, however many want it"
    assert ground.control.woken == [300.0]


async def test_a_longer_time_of_the_sandbox_is_kept(ground: Ground):
    ground.control.settings = {"template": "base", "autoResume": True}
    ground.control.state, ground.control.timeout_s = "suspended", 3600.0
    async with serving(echo_heads) as port:
        await ground.ask(ground.head(port))
    assert ground.control.woken == [3600.0]


async def test_without_memory_only_an_explicit_connect_resumes(ground: Ground):
    ground.control.settings = {"template": "base", "autoResume": True}
    ground.control.state = "stopped"
    assert (await ground.refusal(ground.head(8000)))[1]["message"] == "The sandbox was not found"
    assert not ground.control.woken


async def test_who_has_no_right_resumes_nothing(ground: Ground):
    ground.control.settings = {"template": "base", "autoResume": True, "network": {"allowPublicTraffic": False}}
    ground.control.state = "suspended"
    assert (await ground.refusal(ground.head(8000)))[0] == 403
    assert (await ground.refusal(ground.head(49983, target="/health")))[0] == 403
    assert (await ground.refusal(ground.head(49983, "X-Access-Token: wrong", target="/health")))[0] == 403
    assert not ground.control.woken
    token = ground.identity.envd_token(ground.id)
    await ground.ask(ground.head(49983, f"X-Access-Token: {token}", target="/health"))
    assert len(ground.control.woken) == 1


async def test_what_is_in_the_middle_of_something_is_waited_for(ground: Ground):
    ground.control.settings = {"template": "base", "autoResume": True}
    ground.control.operation = {"id": "o", "kind": "suspend", "status": "running"}
    async with serving(echo_heads) as port:
        asking = asyncio.create_task(ground.ask(ground.head(port)))
        async with asyncio.timeout(WITHIN):
            while ground.control.looks < 3:
                await asyncio.sleep(0.01)
        assert not asking.done()
        ground.control.state, ground.control.operation = "suspended", None
        assert (await asking)[0] == 200
    assert len(ground.control.woken) == 1


@pytest.mark.parametrize("kind", ["snapshot", "fork"])
async def test_what_runs_on_meanwhile_is_not_waited_for(ground: Ground, kind: str):
    ground.control.operation = {"id": "o", "kind": kind, "status": "running"}
    async with serving(echo_heads) as port:
        assert (await ground.ask(ground.head(port)))[0] == 200


async def test_a_sandbox_that_runs_is_not_asked_about_again_and_again(ground: Ground):
    async with serving(echo_heads) as port:
        for _ in range(5):
            await ground.ask(ground.head(port))
    assert ground.control.looks < 5


# -- commands and files


@pytest.mark.parametrize(("secure", "status"), [(True, 401), (False, 404)])
async def test_a_sandbox_that_was_made_without_a_token_takes_everybody(ground: Ground, secure: bool, status: int):
    ground.control.settings = {"template": "base", "secure": secure}
    assert (await ground.refusal(ground.head(49983, target="/nothing-here")))[0] == status


# -- by host name, over TLS


async def test_a_domain_of_ours_over_tls(plane: Plane, tmp_path: Path):
    authority = Authority(tmp_path / "ca", "local")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*authority.issue("*.sbx.example"))
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    async with opening(plane, tmp_path, domain="sbx.example:8443", tls=served, client_tls=trusting) as ground:
        async with serving(echo_heads) as port:
            name = f"{port}-{ground.id}.sbx.example"
            async with ground.connected(name) as client:
                await client.send(f"GET /x HTTP/1.1\r\nHost: {name}:8443\r\nE2b-Sandbox-Id: other\r\nE2b-Sandbox-Port: 1\r\n\r\n".encode())  # fmt: skip
                status, fields = await client.head()
                seen = (await body_of(client, fields)).decode().lower()
            assert status == 200
            assert f"\r\nhost: {name}:8443\r\n" in seen
            assert "x-forwarded-proto: https" in seen
        for host, wanted in (("api.sbx.example", 204), ("other.sbx.example", 400), ("sandbox.sbx.example", 400)):
            async with ground.connected(host) as client:
                await client.send(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert (await client.head())[0] == wanted


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["Host: localhost", "E2b-Sandbox-Id: abc"], "missing header"),
        (["Host: localhost", "E2b-Sandbox-Port: 8000"], "missing header"),
        (["Host: localhost", "E2b-Sandbox-Id: a_b", "E2b-Sandbox-Port: 8000"], "Invalid sandbox ID"),
        (["Host: localhost", "E2b-Sandbox-Id: abc", "E2b-Sandbox-Port: 0"], "Invalid sandbox port"),
        (["Host: 99999-abc.sbx.example"], "Invalid sandbox port"),
    ],
)
async def test_what_names_no_sandbox_is_refused(ground: Ground, lines: list[str], said: str):
    status, body = await ground.refusal("\r\n".join(["GET / HTTP/1.1", *lines, "", ""]).encode())
    assert (status, body["code"]) == (400, 400)
    assert said in body["message"]
    assert json.dumps(body)


async def test_a_key_tells_the_api_from_commands_and_files_and_from_no_other_port(ground: Ground):
    asked = ground.head(49983, "X-API-KEY: e2b_00", target="/sandboxes/none")
    assert (await ground.refusal(asked))[0] in (401, 404), "the API's own answer"
    async with serving(echo_heads) as port:
        status, _, seen = await ground.ask(ground.head(port, "X-API-KEY: of the program in the sandbox"))
    assert (status, b"of the program in the sandbox" in seen) == (200, True)
