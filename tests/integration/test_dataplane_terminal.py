"""Terminals over WebSockets: a real node process, the real guest agent, a client of the `websockets` library."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dataplane_fixtures import Opener, agent, module_opened, module_plane, own_opened, own_plane
from dataplane_harness import WITHIN, Command, Plane
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

__all__ = ["agent", "module_opened", "module_plane", "own_opened", "own_plane"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane, opened = module_plane, own_opened

SIZE = {"rows": 30, "cols": 100}


class Screen:
    """What a client of a terminal has seen."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.output = b""
        self.events: list[dict[str, Any]] = []

    async def until(self, text: bytes) -> None:
        """Reads until the output has `text`."""
        async with asyncio.timeout(WITHIN):
            while text not in self.output:
                await self.read()

    async def event(self, name: str) -> dict[str, Any]:
        """Reads until an event of this name."""
        async with asyncio.timeout(WITHIN):
            while not (found := [one for one in self.events if one["event"] == name]):
                await self.read()
        return found[-1]

    async def read(self) -> None:
        """Reads one message."""
        message = await self.connection.recv()
        if isinstance(message, bytes):
            self.output += message
        else:
            self.events.append(json.loads(message))

    async def _read_on(self) -> None:
        while True:
            await self.read()

    async def closed(self) -> tuple[int, str]:
        """Reads to the end; code and reason of the close frame."""
        async with asyncio.timeout(WITHIN):
            with pytest.raises(ConnectionClosed) as end:
                await self._read_on()
        assert end.value.rcvd is not None
        return end.value.rcvd.code, end.value.rcvd.reason


def address(command: Command, query: str = "") -> str:
    return command.url("ws").replace("http://", "ws://") + query


@contextlib.asynccontextmanager
async def opening(command: Command, query: str = "", **more: Any) -> AsyncIterator[Screen]:
    headers = {"authorization": command.headers["authorization"]}
    async with connect(address(command, query), additional_headers=headers, proxy=None, **more) as connection:
        yield Screen(connection)


async def test_a_shell(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "stty -echo; stty size; while read l; do echo got $l; done", pty=SIZE)
    async with opening(command) as screen:
        await screen.until(b"30 100\r\n")
        started = await screen.event("started")
        assert started["offset"] == 0
        assert isinstance(started["pid"], int)
        await screen.connection.send(b"one\n")
        await screen.until(b"got one\r\n")
        await screen.connection.send(json.dumps({"eof": True}))
        exit_ = await screen.event("exit")
        assert (exit_["reason"], exit_["code"]) == ("exited", 0)
        assert await screen.closed() == (1000, "end")
        assert screen.events[-1] == {"event": "end", "stdout_bytes": len(screen.output)}


async def test_resize_and_signals(plane: Plane) -> None:
    code = "import signal,os,sys\nfor n in ('WINCH','USR1'): signal.signal(getattr(signal,'SIG'+n), lambda *_: os.write(1, repr(os.get_terminal_size(0)).encode()))\nprint('ready', flush=True)\nwhile True: signal.pause()"
    command = await plane.python(code, pty=SIZE)
    async with opening(command) as screen:
        await screen.until(b"ready")
        await screen.connection.send(json.dumps({"resize": {"rows": 5, "cols": 7}}))
        await screen.until(b"columns=7, lines=5")
        screen.output = b""
        await screen.connection.send(json.dumps({"signal": "USR1", "scope": "leader"}))
        await screen.until(b"columns=7, lines=5")
        await screen.connection.send(json.dumps({"signal": 9}))
        assert (await screen.event("exit"))["signal"] == 9


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nonsense", "invalid_json"),
        ("[]", "invalid_field"),
        ("{}", "body_missing"),
        ('{"eof": true, "signal": 9}', "body_missing"),
        ('{"signal": "NOPE"}', "unknown_signal"),
        ('{"resize": {"rows": 0, "cols": 1}}', "invalid_field"),
        ('{"rezise": {}}', "unknown_field"),
        ('"' + "x" * 70_000 + '"', "body_too_large"),
    ],
)
async def test_a_bad_request_is_said_and_ends_nothing(plane: Plane, text: str, code: str) -> None:
    command = await plane.create("cat", pty=SIZE)
    async with opening(command) as screen:
        await screen.connection.send(text)
        assert (await screen.event("error"))["code"] == code
        await screen.connection.send(b"still here\n")
        await screen.until(b"still here")


async def test_a_client_goes_on_where_it_was(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "stty -echo -onlcr; seq 1 20000; read l; seq 20001 40000", pty=SIZE)
    whole = b"".join(b"%d\n" % n for n in range(1, 40_001))
    async with opening(command) as screen:
        await screen.until(b"\n10000\n")
        seen = screen.output
    async with opening(command, f"?from={len(seen)}") as screen:
        await screen.connection.send(b"\n")
        assert await screen.closed() == (1000, "end")
        assert seen + screen.output == whole
        assert screen.events[0]["offset"] == len(seen)
    async with opening(command, f"?from={len(whole) - 6}") as screen:  # an ended one replays
        assert await screen.closed() == (1000, "end")
        assert screen.output == b"40000\n"
    with pytest.raises(InvalidStatus) as refused:
        async with opening(command, f"?from={len(whole) + 1}"):
            pass
    assert refused.value.response.status_code == 422


async def test_what_is_not_kept_is_said(opened: Opener) -> None:
    plane = await opened(spool={"keep": 65_536, "segment": 4_096, "disk_reserve": 0})
    command = await plane.create("sh", "-c", "stty -onlcr; seq 1 50000", pty=SIZE)
    await command.run_ignoring_gaps()
    whole = b"".join(b"%d\n" % n for n in range(1, 50_001))
    async with opening(command) as screen:
        assert await screen.closed() == (1000, "end")
        (gap,) = [one for one in screen.events if one["event"] == "gap"]
        assert (gap["from"], gap["cause"]) == (0, "bound")
        assert screen.output == whole[gap["to"] :]


async def test_a_browser_offers_its_token_as_a_subprotocol(plane: Plane) -> None:
    command = await plane.create("cat", pty=SIZE)
    token = plane.token(command.id)
    offered: list[Any] = ["hatchway.v1", f"hatchway.token.{token}"]
    async with connect(address(command), subprotocols=offered, proxy=None) as connection:
        assert connection.subprotocol == "hatchway.v1"
        await Screen(connection).event("started")
    for bad, code in (
        (["hatchway.v1"], "token_missing"),
        (["hatchway.v1", "hatchway.token.x"], "token_invalid"),
        (["hatchway.v1", offered[1], offered[1] + "x"], "token_missing"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            await connect(address(command), subprotocols=bad, proxy=None).__aenter__()  # type: ignore[arg-type]
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["code"] == code


async def test_only_a_terminal_has_one(plane: Plane) -> None:
    command = await plane.create("cat")
    with pytest.raises(InvalidStatus) as refused:
        async with opening(command):
            pass
    assert refused.value.response.status_code == 409
    assert json.loads(refused.value.response.body)["code"] == "no_terminal"
    plain = await plane.client.get(command.url("ws"), headers=command.headers)
    assert (plain.status_code, plain.json()["code"]) == (400, "websocket_needed")
    with pytest.raises(InvalidStatus) as nowhere:
        await connect(plane.url.replace("http", "ws") + "/v1/nothing", proxy=None).__aenter__()
    assert nowhere.value.response.status_code == 404


async def test_a_stalled_client_costs_no_memory_and_holds_up_nobody(own_plane: Plane) -> None:
    command = await own_plane.create("sh", "-c", "stty raw; head -c 20000000 /dev/zero", pty=SIZE)
    before = await own_plane.tell("memory")
    async with opening(command, max_queue=1, max_size=None, close_timeout=0.1) as stalled:
        await stalled.read()
        async with opening(command, max_size=None) as other:
            async with asyncio.timeout(WITHIN):
                assert (await other.closed())[0] == 1000
            assert len(other.output) == 20_000_000
        after = await own_plane.tell("memory")
        await stalled.connection.close()
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < 15_000_000


async def test_input_that_nobody_takes_is_held_back_and_a_signal_passes_it(own_plane: Plane) -> None:
    command = await own_plane.create("sh", "-c", "stty raw -echo; echo ready; exec sleep 1000", pty=SIZE)
    before = await own_plane.tell("memory")
    async with opening(command) as screen:
        await screen.until(b"ready")
        await screen.connection.send(bytes(100_000))
        await screen.connection.send(json.dumps({"resize": {"rows": 1, "cols": 1}}))
        await screen.connection.send(json.dumps({"signal": "KILL"}))
        assert (await screen.event("exit"))["signal"] == 9
    flooded = await own_plane.create("sh", "-c", "stty raw -echo; echo ready; exec sleep 1000", pty=SIZE)
    async with opening(flooded) as screen:
        await screen.until(b"ready")

        async def flood() -> None:
            for _ in range(200):
                await screen.connection.send(bytes(500_000))

        flooding = asyncio.ensure_future(flood())
        done, _ = await asyncio.wait({flooding}, timeout=1.0)
        assert not done
        after = await own_plane.tell("memory")
        flooding.cancel()
        answer = await flooded.post("signal", json={"signal": "KILL"})
        assert answer.json() == {"delivered": True}
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < 20_000_000


async def test_a_flood_of_tiny_messages_is_taken_slowly(own_plane: Plane) -> None:
    command = await own_plane.create("sh", "-c", "stty raw -echo; echo ready; exec sleep 1000", pty=SIZE)
    before = await own_plane.tell("memory")
    screens = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            screens.append(await stack.enter_async_context(opening(command, close_timeout=0.1)))
        await screens[0].until(b"ready")
        await screens[0].connection.send(bytes(400_000))  # nobody takes more
        raw = b"".join(b"\x82\x81" + os.urandom(4) + b"x" for _ in range(30_000))
        for screen in screens:
            screen.connection.transport.write(raw * 10)
        await asyncio.sleep(0.5)
        after = await own_plane.tell("memory")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < 20_000_000


async def test_open_terminals_end_with_their_tokens(own_plane: Plane) -> None:
    async def ended(how: Any, claims: dict[str, Any]) -> tuple[int, str]:
        command = await own_plane.create("cat", pty=SIZE)
        token = own_plane.token(command.id, **claims)
        headers = {"authorization": f"Bearer {token}"}
        async with connect(address(command), additional_headers=headers, proxy=None) as connection:
            screen = Screen(connection)
            await screen.event("started")
            await how(token)
            return await screen.closed()

    async def revoke(token: str) -> None:
        import jwt

        token_id = jwt.decode(token, options={"verify_signature": False})["jti"]
        await own_plane.configure(revoked=(token_id,))

    async def wait(_: str) -> None:
        pass

    async def supersede(_: str) -> None:
        await own_plane.tell("generation", 5)

    assert await ended(revoke, {}) == (1008, "revoked")
    assert await ended(wait, {"ttl_s": 2.0}) == (1008, "expired")
    assert await ended(supersede, {}) == (1008, "superseded")


async def test_a_sandbox_that_is_lost_and_a_node_that_ends(own_plane: Plane) -> None:
    command = await own_plane.create("cat", pty=SIZE)
    async with opening(command) as screen:
        await screen.event("started")
        await own_plane.tell("lose", "The virtual machine ended.")
        assert (await screen.event("exit"))["reason"] == "sandbox_lost"
        assert await screen.closed() == (1000, "end")
    other = await own_plane.create("cat", pty=SIZE)
    with pytest.raises(InvalidStatus) as refused:
        async with opening(other):
            pass
    assert json.loads(refused.value.response.body)["code"] == "sandbox_not_running"


async def test_a_node_that_stops_says_so(own_plane: Plane) -> None:
    command = await own_plane.create("cat", pty=SIZE)
    async with opening(command) as screen:
        await screen.event("started")
        stopping = asyncio.ensure_future(own_plane.tell("stop"))
        assert (await screen.closed())[0] == 1012
        await stopping


async def test_a_handshake_that_is_none(plane: Plane) -> None:
    command = await plane.create("cat", pty=SIZE)
    host, port = plane.url.removeprefix("http://").split(":")
    for more in ("Sec-WebSocket-Key: x\r\n", "X: " + "y" * 20_000 + "\r\n", "Sec-WebSocket-Version: 9\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
        head = f"GET /v1/sessions/{command.id}/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write((head + more + "\r\n").encode())
        async with asyncio.timeout(WITHIN):
            answer = await reader.read()
        assert answer.split()[1] in (b"400", b"426"), answer
        writer.close()
