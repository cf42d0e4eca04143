"""WebSockets through the gateway (H25): only where a rule is for them, both handshakes checked, every message looked at before it leaves."""

import asyncio
import base64
import hashlib
from typing import Any

import pytest
from tests.support.http_flow import ALL, HOST, Played, PlayedFlow, PlayedStream, policy_of, rule
from wsproto.frame_protocol import CloseReason, FrameProtocol, Opcode

from hatchway.egress.http import websocket
from hatchway.egress.http.seam import FlowError

KEY = base64.b64encode(bytes(16)).decode()
SOCKET = rule("ws", protocol="websocket", http={"allow": [{"methods": ["GET"], "paths": ["/ws"]}]})
PLACEHOLDER = "hwp_0123456789abcdef0123456789abcdef"


def accept(key: str) -> str:
    return base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()


def ask(*lines: str, path: str = "/ws", key: str = KEY, version: str = "13", method: str = "GET") -> bytes:
    named = [
        f"{method} {path} HTTP/1.1",
        f"Host: {HOST}",
        "Connection: keep-alive, Upgrade",
        "Upgrade: WebSocket",
        f"Sec-WebSocket-Key: {key}",
        f"Sec-WebSocket-Version: {version}",
    ]
    return "\r\n".join([*named, *lines, "", ""]).encode()


class Server:
    """Answers the handshake, and notes the messages that it gets."""

    def __init__(
        self, *lines: str, status: str = "101 Switching Protocols", sums: str | None = None, after: bytes = b""
    ) -> None:
        self._lines, self._status, self._sums, self._after = lines, status, sums, after
        self.messages: list[str | bytes] = []
        self.closed: object = None
        self.frames = FrameProtocol(client=False, extensions=[])
        self.line: PlayedStream | None = None

    async def play(self, line: PlayedStream) -> None:
        self.line = line
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        head, _, _ = bytes(line.written).partition(b"\r\n\r\n")
        fields = dict(one.split(": ", 1) for one in head.decode().split("\r\n")[1:])
        said = [
            f"HTTP/1.1 {self._status}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {self._sums or accept(fields.get('sec-websocket-key', ''))}",
        ]
        line.feed("\r\n".join([*said, *self._lines, "", ""]).encode() + self._after)
        at = len(head) + 4
        while True:
            await line.until(lambda one, at=at: len(one.written) > at or one.over)  # type: ignore[misc]
            data, at = bytes(line.written[at:]), len(line.written)
            self.frames.receive_bytes(data)
            for frame in self.frames.received_frames():
                if frame.opcode is Opcode.CLOSE:
                    self.closed = frame.payload
                    line.feed(bytes(self.frames.close(1000)))
                    line.feed_end()
                else:
                    self.messages.append(frame.payload)
            if line.over:
                return


def opened(server: Server, *rules: dict[str, Any], asked: bytes | None = None) -> Played:
    played = Played(PlayedFlow(policy_of(*(rules or (SOCKET,))), server.play))
    played.client.feed(asked or ask())
    return played


async def until_open(played: Played) -> FrameProtocol:
    await played.client.until(lambda client: b"\r\n\r\n" in client.written)
    assert played.client.written.startswith(b"HTTP/1.1 101 "), played.client.written
    return FrameProtocol(client=True, extensions=[])


def close_code(played: Played) -> int:
    frames = FrameProtocol(client=True, extensions=[])
    frames.receive_bytes(bytes(played.client.written).partition(b"\r\n\r\n")[2])
    last = list(frames.received_frames())[-1]
    assert last.opcode is Opcode.CLOSE
    return int(last.payload[0])


async def test_messages_pass_and_both_handshakes_are_the_gateways() -> None:
    server = Server("Sec-WebSocket-Protocol: b", "X-Kept: 1", after=b"\x81\x02hi")
    played = opened(
        server, asked=ask("Sec-WebSocket-Protocol: a, b", "Sec-WebSocket-Extensions: permessage-deflate", "Cookie: a=b")
    )
    client = await until_open(played)
    assert f"sec-websocket-accept: {accept(KEY)}".encode() in played.client.written
    assert b"sec-websocket-protocol: b\r\n" in played.client.written
    sent = played.flow.arrived.lower()
    assert b"extensions" not in sent
    assert b"cookie" not in sent
    assert KEY.encode() not in played.flow.arrived
    played.client.feed(bytes(client.send_data("hel", fin=False)))
    played.client.feed(bytes(client.ping(b"p")))
    played.client.feed(bytes(client.send_data("lo", fin=True)) + bytes(client.send_data(b"\x00\x01")))
    played.client.feed(bytes(client.close(1000, "bye")))
    await played.ended()
    assert server.messages == [b"p", "hello", b"\x00\x01"]
    assert server.closed == (CloseReason.NORMAL_CLOSURE, "bye")
    assert b"\x81\x02hi" in played.client.written
    assert not played.flow.exchanges
    await played.over()


@pytest.mark.parametrize(
    ("rules", "asked", "status", "reason"),
    [
        ((ALL,), ask(), 403, "websocket_not_allowed"),
        ((SOCKET,), ask(path="/other"), 403, "path_not_allowed"),
        ((SOCKET,), ask(version="8"), 400, "malformed_request"),
        ((SOCKET,), ask(key="short"), 400, "malformed_request"),
        ((SOCKET,), ask("Sec-WebSocket-Key: " + KEY), 400, "malformed_request"),
        ((SOCKET,), ask("Sec-WebSocket-Protocol: a b"), 400, "malformed_request"),
        ((SOCKET,), ask("Content-Length: 3"), 400, "malformed_request"),
        ((SOCKET,), ask("Authorization: Bearer mine"), 403, "client_auth_forbidden"),
        ((SOCKET,), ask(method="POST"), 400, "malformed_request"),
    ],
)
async def test_h25_a_websocket_needs_a_rule_and_a_proper_handshake(
    rules: tuple[dict[str, Any], ...], asked: bytes, status: int, reason: str
) -> None:
    played = opened(Server(), *rules, asked=asked)
    await played.client.until(lambda client: b"\r\n\r\n" in client.written)
    assert played.client.written.startswith(f"HTTP/1.1 {status} ".encode())
    assert reason.encode() in played.client.written
    assert not played.flow.lines
    assert played.flow.reasons("denied")[-1:] == [reason]
    await played.over()


@pytest.mark.parametrize(
    "server",
    [
        Server(sums="bad"),
        Server("Sec-WebSocket-Extensions: permessage-deflate"),
        Server("Sec-WebSocket-Protocol: x"),
        Server("Upgrade: other"),
    ],
    ids=["accept", "extension", "protocol", "upgrade"],
)
async def test_h25_an_answer_that_is_not_for_this_handshake_opens_nothing(server: Server) -> None:
    played = opened(server)
    played.client.feed(bytes(FrameProtocol(client=True, extensions=[]).send_data("data")))
    await played.client.until(lambda client: b"\r\n\r\n" in client.written)
    assert played.client.written.startswith(b"HTTP/1.1 502 ")
    await played.ended()
    assert not server.messages
    assert played.flow.lines[0].aborted
    await played.over()


async def test_a_refusal_of_the_server_is_passed_on() -> None:
    async def refusing(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")

    played = Played(PlayedFlow(policy_of(SOCKET), refusing))
    played.client.feed(ask())
    await played.ended()
    assert played.client.written.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert played.client.written.endswith(b"\r\n\r\nno")
    await played.over()


MASKED = b"\x00" * 4
BROKEN = [
    (b"\x81\x02hi", CloseReason.PROTOCOL_ERROR),  # not masked
    (b"\xc1\x82" + MASKED + b"hi", CloseReason.PROTOCOL_ERROR),  # a bit of an extension
    (b"\x83\x80" + MASKED, CloseReason.PROTOCOL_ERROR),  # unknown opcode
    (b"\x80\x81" + MASKED + b"x", CloseReason.PROTOCOL_ERROR),  # continues nothing
    (b"\x09\x80" + MASKED, CloseReason.PROTOCOL_ERROR),  # a control frame in pieces
    (b"\x89\xfe\x00\x80" + MASKED + b"x" * 128, CloseReason.PROTOCOL_ERROR),  # a control frame too long
    (b"\x81\x82" + MASKED + b"\xff\xfe", CloseReason.INVALID_FRAME_PAYLOAD_DATA),
    (b"\x81\xfe\x00\x05" + MASKED + b"hello", CloseReason.PROTOCOL_ERROR),  # length not in its shortest form
]


@pytest.mark.parametrize(("frame", "code"), BROKEN, ids=range(len(BROKEN)))
async def test_h25_frames_are_parsed_before_they_leave(frame: bytes, code: int) -> None:
    server = Server()
    played = opened(server)
    await until_open(played)
    played.client.feed(frame)
    await played.ended()
    assert close_code(played) == code
    assert not server.messages
    await played.over()


async def test_h25_messages_are_bounded_in_size_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**SOCKET, "websocket": {"max_frame": 10}}
    for parts in ([b"x" * 11], [b"x" * 6, b"x" * 6]):
        server = Server()
        played = opened(server, small)
        client = await until_open(played)
        for at, part in enumerate(parts):
            played.client.feed(bytes(client.send_data(part, fin=at == len(parts) - 1)))
        await played.ended()
        assert close_code(played) == CloseReason.MESSAGE_TOO_BIG
        assert not server.messages
        await played.over()
    monkeypatch.setattr(websocket, "FRAMES_PER_S", 5)
    played = opened(Server())
    client = await until_open(played)
    played.client.feed(b"".join(bytes(client.send_data(b"x")) for _ in range(100)))
    await played.ended()
    assert close_code(played) == CloseReason.POLICY_VIOLATION
    await played.over()


async def test_h25_a_rule_may_let_text_alone_pass() -> None:
    server = Server()
    played = opened(server, {**SOCKET, "websocket": {"text_only": True}})
    client = await until_open(played)
    played.client.feed(bytes(client.send_data("fine")) + bytes(client.send_data(b"raw")))
    await played.ended()
    assert close_code(played) == CloseReason.UNSUPPORTED_DATA
    assert server.messages == ["fine"]
    await played.over()


@pytest.mark.parametrize("how", ["text", "pieces", "binary", "ping", "close"])
async def test_c02_no_placeholder_leaves_in_a_message(how: str) -> None:
    server = Server()
    played = opened(server)
    played.flow.placeholders = {PLACEHOLDER: "gh"}
    client = await until_open(played)
    sent = {
        "text": lambda: client.send_data(f"x {PLACEHOLDER}"),
        "pieces": lambda: client.send_data(PLACEHOLDER[:9], fin=False) + client.send_data(PLACEHOLDER[9:]),
        "binary": lambda: client.send_data(PLACEHOLDER.encode()),
        "ping": lambda: client.ping(PLACEHOLDER.encode()),
        "close": lambda: client.close(1000, PLACEHOLDER),
    }[how]()
    played.client.feed(bytes(sent))
    await played.ended()
    assert close_code(played) == CloseReason.POLICY_VIOLATION
    assert not server.messages
    assert played.flow.reasons("denied") == ["placeholder_misplaced"]
    await played.over()


async def test_a_budget_that_is_used_up_ends_the_socket() -> None:
    server = Server()
    played = opened(server)
    client = await until_open(played)
    played.flow.budget = played.flow.out + 4
    played.client.feed(bytes(client.send_data("four")) + bytes(client.send_data("more")))
    await played.ended()
    assert close_code(played) == CloseReason.POLICY_VIOLATION
    assert server.messages == ["four"]
    await played.over()


async def test_g03_an_open_socket_is_cut_when_the_policy_narrows() -> None:
    server = Server()
    played = opened(server)
    await until_open(played)
    for exchange in list(played.flow.exchanges):
        exchange.cut("policy_changed")
    await played.ended()
    assert played.client.aborted
    assert played.flow.lines[0].aborted
    await played.over()


async def test_a_socket_that_cannot_be_recorded_is_not_opened() -> None:
    played = Played(PlayedFlow(policy_of(SOCKET), Server().play))
    played.flow.record_error = FlowError("audit_full", "no record can be taken", 503)
    played.client.feed(ask())
    await played.ended()
    assert played.client.written.startswith(b"HTTP/1.1 503 ")
    assert not played.flow.lines
    await played.over()


async def test_what_the_client_sends_ahead_waits_for_the_decision() -> None:
    """Frames behind the head of a request that is refused are no request, and go nowhere."""
    played = opened(Server(), ALL, asked=ask() + b"GET /a HTTP/1.1\r\nHost: index.example\r\n\r\n")
    await played.ended()
    assert played.client.written.count(b"HTTP/1.1 ") == 1
    assert not played.flow.lines
    await asyncio.sleep(0)
    await played.over()
