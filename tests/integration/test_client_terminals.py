"""The SDK's terminals and forwarded ports against a node whose connections break where a test says.

Every case of a terminal runs with the blocking client and with the asyncio one.
"""

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from place_double import SANDBOX, double
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection

from hatchway.client import (
    AsyncHatchway,
    BadAnswer,
    Conflict,
    Exit,
    Gap,
    Hatchway,
    HatchwayError,
    InvalidRequest,
    Output,
    StreamLost,
    TransferFailed,
    streams,
)

Watched = tuple[list[Any], Any]
Watch = Callable[[str, Sequence[bytes]], Watched]


def blocking(url: str, typed: Sequence[bytes] = ()) -> Watched:
    with Hatchway(url, "hw_x") as client, client.sandboxes.get(SANDBOX).terminal(["sh"]) as terminal:
        for piece in typed:
            terminal.send(piece)
        return list(terminal), terminal.wait()


def with_asyncio(url: str, typed: Sequence[bytes] = ()) -> Watched:
    async def body() -> Watched:
        async with (
            AsyncHatchway(url, "hw_x") as client,
            await (await client.sandboxes.get(SANDBOX)).terminal(["sh"]) as terminal,
        ):
            for piece in typed:
                await terminal.send(piece)
            return [event async for event in terminal], await terminal.wait()

    return asyncio.run(body())


@pytest.fixture(params=[blocking, with_asyncio], ids=["blocking", "async"])
def watch(request: pytest.FixtureRequest) -> Watch:
    return request.param  # type: ignore[no-any-return]  # one of the two above


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BACKOFF_S", (0.001, 0.002, 0.003))


CONTENT = bytes(range(256)) * 20


def from_(wire: ServerConnection) -> int:
    assert wire.request is not None
    found = re.search(r"from=(\d+)", wire.request.path)
    assert found is not None
    return int(found[1])


def begin(wire: ServerConnection) -> int:
    at = from_(wire)
    wire.send(json.dumps({"event": "started", "pid": 7, "epoch": 1, "offset": at}))
    return at


def finish(wire: ServerConnection) -> None:
    wire.send(json.dumps({"event": "exit", "reason": "exited", "code": 3}))
    wire.send(json.dumps({"event": "end", "stdout_bytes": len(CONTENT)}))


def shown(events: list[Any]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Output))


def test_a_terminal_goes_on_where_it_was(watch: Watch) -> None:
    def wire(connection: ServerConnection) -> None:
        at = begin(connection)
        connection.send(CONTENT[at : at + 1000])
        if at + 1000 < len(CONTENT):
            connection.socket.shutdown(socket.SHUT_RDWR)
        else:
            finish(connection)

    with double(wire=wire) as node:
        events, ended = watch(node.url, ())
        assert shown(events) == CONTENT
        assert ended == Exit(reason="exited", code=3)
        assert [type(event).__name__ for event in events if not isinstance(event, Output)] == ["Started", "Exit", "End"]
        assert len(node.paths) == 6


def test_a_token_that_ended_is_renewed(watch: Watch) -> None:
    def wire(connection: ServerConnection) -> None:
        at = begin(connection)
        if at == 0:
            connection.send(CONTENT[:10])
            node.first_good = node.tokens + 1
            connection.close(1008, "expired")
        else:
            connection.send(CONTENT[10:])
            finish(connection)

    with double(wire=wire) as node:
        assert shown(watch(node.url, ())[0]) == CONTENT
        assert node.tokens == 2
    with double(wire=wire) as node:
        node.first_good = 2  # the first handshake is refused
        assert shown(watch(node.url, ())[0]) == CONTENT
    with double(wire=wire) as node:
        node.first_good = 99
        with pytest.raises(HatchwayError) as caught:
            watch(node.url, ())
        assert caught.value.code == "token_expired"


def test_what_is_missing_is_said(watch: Watch) -> None:
    def wire(connection: ServerConnection) -> None:
        at = begin(connection)
        if at == 0:
            connection.send(json.dumps({"event": "gap", "from": 0, "to": 100, "cause": "bound"}))
            connection.send(CONTENT[100:200])
            connection.close(1012)
        else:
            connection.send(CONTENT[200:])
            finish(connection)

    with double(wire=wire) as node:
        events, _ = watch(node.url, ())
        assert Gap(stream="stdout", from_=0, to=100) in events
        assert shown(events) == CONTENT[100:]
        assert "from=200" in node.paths[-1]


def test_a_node_that_stays_away_is_not_waited_for_without_end(watch: Watch) -> None:
    def wire(connection: ServerConnection) -> None:
        connection.socket.shutdown(socket.SHUT_RDWR)

    with double(wire=wire) as node, pytest.raises(StreamLost, match=f"hatchway shell {SANDBOX} --attach"):
        watch(node.url, ())


def test_what_is_none_of_the_protocol(watch: Watch) -> None:
    for message in (
        "no json",
        json.dumps([1]),
        json.dumps({"event": "started"}),
        json.dumps({"event": "gap", "from": "x"}),
    ):

        def wire(connection: ServerConnection, message: str = message) -> None:
            connection.send(message)

        with double(wire=wire) as node, pytest.raises(BadAnswer):
            watch(node.url, ())

    def silent(connection: ServerConnection) -> None:
        connection.send(json.dumps({"event": "end"}))

    with double(wire=silent) as node, pytest.raises(BadAnswer, match="without telling how"):
        watch(node.url, ())

    def refuses(connection: ServerConnection) -> None:
        connection.send(json.dumps({"event": "error", "code": "unknown_signal", "cause": "c", "remedy": "r"}))

    with double(wire=refuses) as node, pytest.raises(InvalidRequest, match="unknown_signal"):
        watch(node.url, ())


def test_input_goes_there_in_pieces_and_ends_with_the_command(watch: Watch) -> None:
    got = b""

    def wire(connection: ServerConnection) -> None:
        nonlocal got
        begin(connection)
        while len(got) < 100_000 + 2:
            message = connection.recv()
            assert isinstance(message, bytes)
            assert len(message) <= 32 * 1024
            got += message
        finish(connection)

    with double(wire=wire) as node:
        _, ended = watch(node.url, (b"ls", b"x" * 100_000))
        assert ended.status == 3
    assert got == b"ls" + b"x" * 100_000


def test_requests_and_the_end_of_the_command() -> None:
    asked: list[Any] = []

    def wire(connection: ServerConnection) -> None:
        begin(connection)
        asked.extend(json.loads(connection.recv()) for _ in range(3))
        finish(connection)

    with double(wire=wire) as node, Hatchway(node.url, "hw_x") as client:
        terminal = client.sandboxes.get(SANDBOX).terminal()
        terminal.resize(5, 9)
        terminal.send_signal("INT", scope="leader")
        terminal.send_eof()
        assert terminal.wait().code == 3
        with pytest.raises(Conflict, match="process_ended"):
            terminal.send(b"x")
        terminal.close()
        assert list(terminal) == []
    assert asked == [{"resize": {"rows": 5, "cols": 9}}, {"signal": "INT", "scope": "leader"}, {"eof": True}]


# Ports


def echo(connection: ServerConnection) -> None:
    """What came, backwards, when the client's direction is over."""
    got = b""
    for message in connection:
        if isinstance(message, str):
            assert json.loads(message) == {"eof": True}
            break
        got += message
    for at in range(0, len(got), 60_000):
        connection.send(got[::-1][at : at + 60_000])
    connection.send('{"eof":true}')
    connection.close(1000, "end")


@contextlib.contextmanager
def forwarded(wire: Callable[[ServerConnection], None], kind: str, errors: list[HatchwayError]) -> Iterator[Any]:
    """The port here, by either client, and the double."""
    with double(wire=wire) as node:
        if kind == "blocking":
            with (
                Hatchway(node.url, "hw_x") as client,
                client.sandboxes.get(SANDBOX).forward(0, 80, on_error=errors.append) as forward,
            ):
                yield forward.port, node
            return
        ready, over = threading.Event(), asyncio.Event()
        found: list[Any] = []

        async def serve() -> None:
            found.append(asyncio.get_running_loop())
            async with AsyncHatchway(node.url, "hw_x") as client:
                sandbox = await client.sandboxes.get(SANDBOX)
                async with await sandbox.forward(0, 80, on_error=errors.append) as forward:
                    found.append(forward.port)
                    ready.set()
                    await over.wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert ready.wait(30)
        try:
            yield found[1], node
        finally:
            found[0].call_soon_threadsafe(over.set)
            thread.join(30)


KINDS = pytest.mark.parametrize("kind", ["blocking", "async"])


def through(port: int, data: bytes) -> bytes:
    """Sends, ends our direction, and reads the other one to its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        got = b""
        while piece := connection.recv(65536):
            got += piece
        sender.join(60)
    return got


@KINDS
def test_a_port_with_an_end_of_each_direction(kind: str) -> None:
    errors: list[HatchwayError] = []
    data = CONTENT * 300
    with forwarded(echo, kind, errors) as (port, node):
        node.first_good = 2  # the first token is not taken: another one is asked for
        assert through(port, data) == data[::-1]
        assert through(port, b"") == b""
        results: list[bytes] = []
        threads = [threading.Thread(target=lambda: results.append(through(port, b"abc"))) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [b"cba"] * 10
    assert errors == []


@KINDS
def test_a_connection_that_breaks_is_reset_and_said(kind: str) -> None:
    def broken(connection: ServerConnection) -> None:
        connection.send(b"half")
        connection.close(1011, "broken")

    def odd(connection: ServerConnection) -> None:
        connection.send('{"what": 1}')
        with contextlib.suppress(ConnectionClosed):
            connection.recv()

    for wire, code in ((broken, "port_broken"), (odd, "bad_answer")):
        errors: list[HatchwayError] = []
        with forwarded(wire, kind, errors) as (port, _node), pytest.raises(ConnectionResetError):
            through(port, b"")
        assert [error.code for error in errors] == [code]


@KINDS
def test_a_client_that_goes_away_ends_its_connection_there(kind: str) -> None:
    gone = threading.Event()

    def wire(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                connection.send(bytes(60_000))
        gone.set()

    with forwarded(wire, kind, []) as (port, _node):
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        assert connection.recv(1000)
        connection.close()
        assert gone.wait(60)


def test_what_cannot_be_listened_on() -> None:
    with double() as node, Hatchway(node.url, "hw_x") as client:
        sandbox = client.sandboxes.get(SANDBOX)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            with pytest.raises(TransferFailed) as caught:
                sandbox.forward(taken.getsockname()[1], 80)
            assert caught.value.code == "local_port_taken"
        for bad in (0, 65_536, -1):
            with pytest.raises(InvalidRequest):
                sandbox.forward(0, bad)
            with pytest.raises(InvalidRequest):
                sandbox.port_url(bad)
        with pytest.raises(TransferFailed):
            sandbox.forward(70_000, 80)


def test_addresses_of_ports() -> None:
    with double() as node, Hatchway(node.url, "hw_x") as client:
        sandbox = client.sandboxes.get(SANDBOX)
        assert sandbox.port_url(80) == "http://80-x.localhost:1/"
        link = sandbox.port_link(8000, path="a b?c=d&e#f")
        assert link == "http://8000-x.localhost:1/.hatchway/open?token=token-2&to=/a%20b%3Fc%3Dd%26e%23f"
        assert sandbox.token(["files"], ttl=5).token == "token-3"
