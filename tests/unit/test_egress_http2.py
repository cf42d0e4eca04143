"""HTTP/2 through the gateway: every stream is decided by itself, and what the library lets through but servers read differently is refused."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.http_flow import ALL, HOST, OK, Played, PlayedFlow, PlayedStream, answering, policy_of, rule

from hatchway.domain.errors import HatchwayError
from hatchway.egress.http import frames, http2
from hatchway.egress.http.http2 import parse_head
from hatchway.egress.shares import AT_ONCE, allowance

Headers = list[tuple[str, str]]


def plain(
    path: str = "/a", method: str = "GET", *more: tuple[str, str], authority: str = HOST, scheme: str = "https"
) -> Headers:
    return [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path), *more]


class Client:
    """A client whose library checks nothing of what it is told to send."""

    def __init__(self, flow: PlayedFlow) -> None:
        self.played = Played(flow)
        self.flow = flow
        self.stream: PlayedStream = self.played.client
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding="utf-8",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.answers: dict[int, dict[str, str]] = {}
        self.raw: dict[int, list[Any]] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goaway: int | None = None
        self._read = 0
        self.flush()

    def flush(self) -> None:
        self.stream.feed(self.h2.data_to_send())

    def ask(self, headers: Headers, body: bytes | None = None, *, end: bool = True) -> int:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, headers, end_stream=end and body is None)
        if body is not None:
            self.h2.send_data(number, body, end_stream=end)
        self.flush()
        return number

    def _look(self) -> None:
        data = bytes(self.stream.written[self._read :])
        self._read += len(data)
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.raw[event.stream_id] = list(event.headers)
                self.answers[event.stream_id] = {str(k): str(v) for k, v in event.headers}
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.resets[event.stream_id] = int(event.error_code)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.goaway = int(event.error_code or 0)
        self.flush()

    async def until(self, condition: Callable[["Client"], bool]) -> None:
        def seen(_: PlayedStream) -> bool:
            self._look()
            return condition(self)

        await self.stream.until(seen)

    async def answer(self, number: int) -> tuple[int, bytes]:
        await self.until(lambda client: number in client.ended or number in client.resets or client.goaway is not None)
        assert number in self.ended, (self.resets, self.goaway)
        return int(self.answers[number][":status"]), self.bodies.get(number, b"")

    async def answer_raw(self, number: int) -> None:
        await self.until(lambda client: number in client.ended)

    async def over(self) -> None:
        await self.played.over()


def client_of(*rules: dict[str, Any], answers: tuple[bytes, ...] = (OK,) * 4) -> Client:
    return Client(PlayedFlow(policy_of(*(rules or (ALL,))), answering(*answers), alpn="h2"))


async def test_a_stream_is_written_as_it_was_decided() -> None:
    client = client_of()
    number = client.ask(
        plain(
            "/%61?q",
            "POST",
            ("x-a", "1"),
            ("content-length", "2"),
            ("te", "trailers"),
            ("cookie", "a"),
            ("cookie", "b"),
        ),
        b"hi",
    )
    assert await client.answer(number) == (200, b"ok")
    assert client.answers[number] == {":status": "200", "content-length": "2"}
    assert client.flow.arrived == b"POST /a?q HTTP/1.1\r\nhost: index.example\r\nx-a: 1\r\ncontent-length: 2\r\n\r\nhi"
    assert client.flow.records[0][3]["version"] == "2"
    await client.over()


async def test_a_body_of_unknown_length_goes_on_in_chunks() -> None:
    client = client_of()
    number = client.ask(plain("/a", "POST"), b"hello", end=False)
    async with asyncio.timeout(10):
        while b"hello" not in client.flow.arrived:
            await asyncio.sleep(0)
    client.h2.send_data(number, b"", end_stream=True)
    client.flush()
    assert await client.answer(number) == (200, b"ok")
    assert client.flow.arrived.endswith(b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    await client.over()


HOSTILE = [
    ("h16", plain(authority="other.example"), 421),
    ("h16", plain(authority="index.example:8443"), 421),
    ("h16", plain(authority="user@index.example"), 421),
    ("h18", plain("/a", "GET", ("host", "other.example")), 400),
    ("h18", [(":method", "GET"), (":scheme", "https"), (":path", "/a"), ("host", HOST)], 400),
    ("h18", plain("/a", "GET", ("host", HOST), ("host", HOST)), 400),
    ("h20", plain("https://other.example/"), 400),
    ("h20", plain("*", "OPTIONS"), 400),
    ("h20", plain("a"), 400),
    ("h20", plain("/a#b"), 400),
    ("h20", plain("/a b"), 400),
    ("h20", plain(scheme="http"), 400),
    ("h20", plain("/a", "get"), 400),
    ("h20", plain("/a", "TRACE"), 405),
    ("h20", [(":method", "CONNECT"), (":authority", "other.example:443")], 405),
    ("h28", plain("/a/../b"), 400),
    ("h28", plain("/a/%2e%2e/b"), 400),
    ("h10", plain("/a", "POST", ("content-length", "+1")), 400),
    ("h13", plain("/a", "GET", ("x-a", "1\r\nx-b: 2")), 400),
    ("h13", plain("/a", "GET", ("x a", "1")), 400),
    ("h27", plain("/a?_method=PUT"), 403),
    ("h36", plain("/a", "GET", *[("x", "1")] * 101), 431),
    ("a02", plain("/a", "GET", ("authorization", "Bearer mine")), 403),
]


@pytest.mark.parametrize(
    ("row", "headers", "status"), HOSTILE, ids=[f"{row}-{n}" for n, (row, *_) in enumerate(HOSTILE)]
)
async def test_hostile_streams_arrive_nowhere(row: str, headers: Headers, status: int) -> None:
    """Refused on the stream, or with the whole connection where the library calls it broken; the outside has seen nothing."""
    client = client_of()
    number = client.ask(headers)
    await client.until(lambda one: number in one.ended or number in one.resets or one.goaway is not None)
    if number in client.ended:
        assert int(client.answers[number][":status"]) == status
        assert json.loads(client.bodies[number])["cause"]
    else:
        assert number in client.resets or client.goaway == h2.errors.ErrorCodes.PROTOCOL_ERROR
    assert not client.flow.lines
    assert len(client.flow.reasons("denied")) == 1
    await client.over()


@pytest.mark.parametrize(
    "extra",
    [
        (":method", "PUT"),
        (":protocol", "websocket"),
        (":other", "x"),
        ("Upper", "x"),
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("te", "gzip"),
        ("content_length", "1"),
        ("x", " y"),
        ("x", "y\x00"),
    ],
)
def test_h20_the_gateway_checks_for_itself(extra: tuple[str, str]) -> None:
    """Whatever the library lets pass, in this version or the next."""
    raw = [(name.encode(), value.encode()) for name, value in [*plain(), extra]]
    with pytest.raises(HatchwayError):
        parse_head(raw, ended=True)
    late = [(name.encode(), value.encode()) for name, value in [("x", "1"), *plain()]]
    with pytest.raises(HatchwayError):
        parse_head(late, ended=True)


async def test_h16_every_stream_of_a_connection_is_decided() -> None:
    client = client_of(rule(http={"allow": [{"methods": ["GET"], "paths": ["/a"]}]}))
    good, bad, other, again = (
        client.ask(plain()),
        client.ask(plain("/b")),
        client.ask(plain(authority="other.example")),
        client.ask(plain()),
    )
    assert [(await client.answer(number))[0] for number in (good, bad, other, again)] == [200, 403, 421, 200]
    assert client.flow.arrived.count(b"HTTP/1.1") == 2
    assert b"/b" not in client.flow.arrived
    await client.over()


async def test_h17_a_name_of_another_rule_is_misdirected_too() -> None:
    """Coalescing: allowed by another rule is not allowed here."""
    client = client_of(ALL, rule("other", "other.example"))
    assert (await client.answer(client.ask(plain(authority="other.example"))))[0] == 421
    assert not client.flow.lines
    await client.over()


async def test_h21_a_flood_of_continuation_ends_the_connection() -> None:
    client = client_of()
    await client.until(lambda one: bool(one.h2.remote_settings.max_concurrent_streams))
    frame = b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82" + b"\x00\x00\x01\x09\x00\x00\x00\x00\x01\x82" * 5000
    client.stream.feed(frame)
    await client.until(lambda one: one.goaway is not None)
    assert not client.flow.lines
    await client.over()


async def test_h21_a_small_list_that_unpacks_to_a_large_one_ends_the_connection() -> None:
    client = client_of()
    client.h2.encoder.header_table_size = 4096
    number = client.h2.get_next_available_stream_id()
    client.h2.send_headers(number, [*plain(), *[("x-long", "a" * 3000)] * 20], end_stream=True)
    client.flush()
    await client.until(lambda one: one.goaway is not None or number in one.ended)
    if number in client.ended:
        assert client.answers[number][":status"] == "431"
    assert not client.flow.lines
    await client.over()


async def test_h22_streams_that_are_given_up_are_counted() -> None:
    client = client_of(rule(action="ask"))
    client.flow.held = asyncio.Event()
    for _ in range(frames.MAX_RESETS + 20):
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, plain(), end_stream=True)
        client.h2.reset_stream(number)
    client.flush()
    await client.until(lambda one: one.goaway is not None)
    assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert not client.flow.lines
    await client.over()


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


FOR_NOTHING = {
    "ping": frame(6, b"p" * 8),
    "ping acknowledged": frame(6, b"p" * 8, 1),
    "settings": frame(4),
    "settings acknowledged": frame(4, b"", 1),
    "priority": frame(2, b"\x00\x00\x00\x05\x10", 0, 3),
    "unknown": frame(99, b"x"),
    "room": frame(8, b"\x00\x00\x00\x01"),
    "room of a stream": frame(8, b"\x00\x00\x00\x01", 0, 1),
    "nothing of a body": frame(0, b"", 0, 1),
    "an octet of a body": frame(0, b"x", 0, 1),
    "padding of a body": frame(0, b"\xff" + bytes(255), 8, 1),
    "a stream given up": frame(3, bytes(4), 0, 1),
}


@pytest.mark.parametrize("name", FOR_NOTHING)
@pytest.mark.parametrize("bound", ["connection", "sandbox"])
async def test_h22_frames_that_ask_for_next_to_nothing_are_counted(
    name: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a connection, and of all of its sandbox, each of which stays within its own bound."""
    if bound == "connection":
        for kind in ("MAX_CONTROL", "MAX_RESETS", "MAX_SMALL"):
            monkeypatch.setattr(frames, kind, 50)
    clients = [client_of() for _ in range(1 if bound == "connection" else 4)]
    shares = clients[0].flow.shares
    for client in clients:
        client.flow.shares = shares
    if bound == "sandbox":
        shares.control, shares.resets, shares.small = (allowance(120, time.monotonic) for _ in range(3))
    for client in clients:
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, plain("/a", "POST"))
        client.flush()
        await client.until(lambda one: bool(one.h2.remote_settings.max_concurrent_streams))
        client.stream.feed(FOR_NOTHING[name] * (200 if bound == "connection" else 45))
    for client in clients[-1:]:
        await client.until(lambda one: one.goaway is not None)
        assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
        await client.played.ended()
        assert client.flow.reasons("denied") == ["too_many_frames"]
    for client in clients:
        await client.over()


@pytest.mark.parametrize(
    "block",
    [b"\x20" * 20_000, b"\x20" * 3, b"\x82" * 300, b"\x40\x01a\x01b" * 300],
    ids=["resizes", "three resizes", "indexed", "literal"],
)
async def test_h21_a_head_that_takes_long_to_unpack_is_not_unpacked(block: bytes) -> None:
    """Tables that are resized without end, and fields of nearly nothing: a few octets on the wire, and each of them work."""
    client = client_of()
    client.stream.feed(
        b"".join(frame(1 if at == 0 else 9, block[at : at + 10_000], 0, 1) for at in range(0, len(block), 10_000))
    )
    client.stream.feed(frame(9, b"", 4, 1))
    await client.until(lambda one: one.goaway is not None)
    assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert not client.flow.lines
    await client.over()


async def test_h21_a_head_in_many_frames_is_bounded_before_it_is_whole() -> None:
    client = client_of()
    client.stream.feed(frame(1, b"x" * 16_000, 0, 1) + frame(9, b"x" * 16_000, 0, 1) * 2)
    await client.until(lambda one: one.goaway is not None)
    assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    await client.over()


async def test_a_setting_is_not_said_a_thousand_times_in_one_frame() -> None:
    client = client_of()
    client.stream.feed(frame(4, b"\x00\x04\x00\x00\xff\xff" * 1_000))
    await client.until(lambda one: one.goaway is not None)
    assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    await client.over()


async def test_a_client_that_makes_room_for_every_piece_of_a_large_answer_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some make room for the stream and for the connection with each piece: that asks for what was sent."""
    monkeypatch.setattr(frames, "MAX_CONTROL", 50)
    body = bytes(4 * 1024 * 1024)
    client = client_of(answers=(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body,))
    made = 0

    def each(size: int, number: int) -> None:
        nonlocal made
        for half in (size // 2, size - size // 2):
            with contextlib.suppress(ValueError, h2.exceptions.ProtocolError):  # nothing of it is left
                client.h2.increment_flow_control_window(half)
                client.h2.increment_flow_control_window(half, number)
                made += 2

    monkeypatch.setattr(client.h2, "acknowledge_received_data", each)
    assert await client.answer(client.ask(plain())) == (200, body)
    assert made > 500
    await client.over()


async def test_g11_a_flood_of_frames_is_a_turn_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over however many connections: in a round of the loop some frames of a sandbox are looked at, and one more stream begins."""
    seen = [0]
    most = 0
    received = h2.connection.H2Connection._receive_frame

    def counted(self: Any, one: Any) -> Any:
        seen[0] += not self.config.client_side
        return received(self, one)

    monkeypatch.setattr(h2.connection.H2Connection, "_receive_frame", counted)
    clients = [client_of() for _ in range(5)]
    for client in clients:
        client.flow.shares = clients[0].flow.shares
        client.stream.feed(frame(6, b"p" * 8) * 600)
    total = 0
    async with asyncio.timeout(20):
        while total < 3_000:
            seen[0] = 0
            await asyncio.sleep(0)
            most, total = max(most, seen[0]), total + seen[0]
    assert most <= AT_ONCE * (frames.AT_ONCE + 1)
    numbers = [[client.ask(plain()) for _ in range(4)] for client in clients]
    begun = 0
    async with asyncio.timeout(20):
        while begun < 20:
            now = sum(len(client.flow.records) for client in clients)
            assert now - begun <= AT_ONCE
            begun = now
            await asyncio.sleep(0)
    for client, asked in zip(clients, numbers, strict=True):
        for number in asked:
            assert await client.answer(number) == (200, b"ok")
        await client.over()


async def test_streams_of_a_sandbox_are_bounded_over_all_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "MAX_STREAMS_OF_SANDBOX", 3)
    clients = [client_of(rule(action="ask")) for _ in range(2)]
    for client in clients:
        client.flow.shares = clients[0].flow.shares
        client.flow.held, client.flow.answers = asyncio.Event(), [True] * 4
    held = [clients[n % 2].ask(plain()) for n in range(3)]
    async with asyncio.timeout(10):
        while sum(len(client.flow.asked) for client in clients) < 3:
            await asyncio.sleep(0)
    beyond = clients[1].ask(plain())
    await clients[1].until(lambda one: beyond in one.resets)
    assert clients[1].resets[beyond] == h2.errors.ErrorCodes.REFUSED_STREAM
    assert clients[1].flow.reasons("denied") == ["limit"]
    for client in clients:
        assert client.flow.held is not None
        client.flow.held.set()
    assert [(await clients[n % 2].answer(number))[0] for n, number in enumerate(held)] == [200] * 3
    assert await clients[1].answer(clients[1].ask(plain())) == (200, b"ok"), "there is room again"
    for client in clients:
        await client.over()
    assert clients[0].flow.shares.streams == 0


async def test_a_stream_that_its_client_gave_up_ends_outside_too() -> None:
    async def silent(line: PlayedStream) -> None:
        await line.until(lambda one: one.over)

    client = Client(PlayedFlow(policy_of(ALL), silent, alpn="h2"))
    number = client.ask(plain("/a", "POST"), b"part", end=False)
    async with asyncio.timeout(10):
        while b"part" not in client.flow.arrived:
            await asyncio.sleep(0)
    client.h2.reset_stream(number)
    client.flush()
    await client.flow.lines[0].until(lambda line: line.aborted)
    assert not client.flow.arrived.endswith(b"0\r\n\r\n")
    await client.over()


@pytest.mark.parametrize("held", [False, True])
async def test_a_stream_that_waits_for_an_answer_ends_when_its_client_gives_it_up(held: bool) -> None:
    """Also one that is held for an approval: nothing goes on for nobody, and nothing is dialled for it afterwards."""

    async def silent(line: PlayedStream) -> None:
        await line.until(lambda one: one.over)

    flow = PlayedFlow(policy_of(rule(action="ask") if held else ALL), silent, alpn="h2")
    flow.held, flow.answers = asyncio.Event(), [True]
    client = Client(flow)
    number = client.ask(plain())
    async with asyncio.timeout(10):
        while not (flow.asked if held else flow.arrived):
            await asyncio.sleep(0)
    client.h2.reset_stream(number)
    client.flush()
    if held:
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 2 + len(flow.lines):
                await asyncio.sleep(0)
        flow.held.set()
        assert not flow.lines
    else:
        await flow.lines[0].until(lambda line: line.aborted)
        assert not flow.exchanges
    await client.over()


async def test_a_fault_in_one_stream_ends_the_connection_and_is_not_hidden() -> None:
    client = client_of()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    client.flow.decide = broken  # type: ignore[assignment,method-assign]  # a fault of ours
    client.ask(plain())
    with pytest.raises(ZeroDivisionError):
        await client.played.ended()
    assert client.stream.aborted
    await client.over()


async def test_bodies_wait_within_the_window_of_their_stream() -> None:
    """An upstream that takes nothing lets the client send no more than the window."""
    client = client_of(answers=())
    number = client.h2.get_next_available_stream_id()
    client.h2.send_headers(number, plain("/a", "POST"))
    client.flush()
    async with asyncio.timeout(10):
        while not client.flow.lines:
            await asyncio.sleep(0)
    taken = asyncio.Event()

    async def drain() -> None:
        await taken.wait()

    client.flow.lines[0].drain = drain  # type: ignore[method-assign]  # an upstream that does not read
    await client.until(lambda one: one.h2.local_flow_control_window(number) > 0)
    sent = 0
    while (room := client.h2.local_flow_control_window(number)) > 0:
        piece = b"x" * min(room, 16_384)
        client.h2.send_data(number, piece)
        client.flush()
        sent += len(piece)
        for _ in range(20):
            await asyncio.sleep(0)
        client._look()
    assert sent <= 2 * http2.WINDOW
    await client.over()


async def test_octets_of_a_field_pass_as_they_are() -> None:
    client = client_of(answers=(b"HTTP/1.1 200 OK\r\nX-Name: caf\xe9\r\nContent-Length: 2\r\n\r\nok",))
    client.h2.config.header_encoding = None
    number = client.ask(plain())
    await client.answer_raw(number)
    assert (b"x-name", b"caf\xe9") in client.raw[number]
    await client.over()


async def test_streams_of_a_connection_that_broke_the_protocol_end_outside_too() -> None:
    async def silent(line: PlayedStream) -> None:
        await line.until(lambda one: one.over)

    client = Client(PlayedFlow(policy_of(ALL), silent, alpn="h2"))
    client.ask(plain())
    async with asyncio.timeout(10):
        while not client.flow.arrived:
            await asyncio.sleep(0)
    client.stream.feed(b"\x00\x00\x01\x00\x00\x00\x00\x00\x00x")
    await client.played.ended()
    assert client.flow.lines[0].aborted
    assert not client.flow.exchanges
    await client.over()


async def test_a_large_answer_waits_for_its_client() -> None:
    body = bytes(range(256)) * 1024
    client = client_of(answers=(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body,))
    assert await client.answer(client.ask(plain())) == (200, body)
    await client.over()


async def test_t23_an_answer_that_is_cut_off_is_reset() -> None:
    async def cut(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        line.feed_end()

    client = Client(PlayedFlow(policy_of(ALL), cut, alpn="h2"))
    number = client.ask(plain())
    await client.until(lambda one: number in one.resets)
    assert number not in client.ended
    await client.over()


async def test_g03_a_stream_is_cut_and_its_connection_lives() -> None:
    async def endless(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        if b"/a" in line.written:
            line.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
            await line.until(lambda one: one.over)
        else:
            line.feed(OK)

    client = Client(PlayedFlow(policy_of(ALL), endless, alpn="h2"))
    number = client.ask(plain())
    await client.until(lambda one: one.bodies.get(number) == b"hello")
    for exchange in list(client.flow.exchanges):
        exchange.cut("policy_changed")
    await client.until(lambda one: number in one.resets)
    assert await client.answer(client.ask(plain("/b"))) == (200, b"ok")
    await client.over()


async def test_h15_continue_is_said_on_the_stream() -> None:
    client = client_of()
    number = client.ask(plain("/a", "PUT", ("expect", "100-continue"), ("content-length", "2")), end=False)
    async with asyncio.timeout(10):
        while not client.flow.lines:
            await asyncio.sleep(0)
    client.h2.send_data(number, b"hi", end_stream=True)
    client.flush()
    assert await client.answer(number) == (200, b"ok")
    assert b"expect" not in client.flow.arrived
    await client.over()


# -- fuzzing

NAMES = st.sampled_from(
    [
        ":method",
        ":path",
        ":authority",
        ":scheme",
        ":status",
        ":protocol",
        "host",
        "content-length",
        "cookie",
        "te",
        "connection",
        "x-a",
        "X-A",
        "x\r\n",
        "",
    ]
)
VALUES = st.sampled_from(
    [
        "GET",
        "/",
        "/a",
        "*",
        HOST,
        "other.example",
        "https",
        "http",
        "1",
        "+1",
        "trailers",
        "chunked",
        " x",
        "x\r\ny: z",
        "\x00",
        "é",
        "",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(NAMES, VALUES), max_size=8))
def test_no_header_list_breaks_the_parser_and_what_passes_is_plain(extra: list[tuple[str, str]]) -> None:
    for made in (extra, plain() + extra, extra + plain()):
        raw = [(name.encode(), value.encode()) for name, value in made]
        try:
            head = parse_head(raw, ended=True)
        except HatchwayError:
            continue
        names = [name for name, _ in made]
        assert all(names.count(one) == 1 for one in (":method", ":path", ":authority", ":scheme"))
        assert head.target.startswith("/")
        assert all("\r" not in value and "\n" not in value and "\x00" not in value for _, value in head.fields)
        assert head.length == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 5), st.binary(max_size=40)), max_size=12
    ),
    st.binary(max_size=40),
)
def test_no_frames_break_the_connection_of_anybody_else(frames: list[tuple[int, int, int, bytes]], junk: bytes) -> None:
    """Random frames behind a proper beginning: the session ends by itself or goes on; nothing that was not decided leaves."""

    async def run() -> None:
        client = client_of()
        wire = b"".join(
            len(body).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + body
            for kind, flags, number, body in frames
        )
        client.stream.feed(wire + junk)
        client.stream.feed_end()
        await client.played.ended()
        allowed = client.flow.arrived.count(b" HTTP/1.1\r\nhost: index.example\r\n")
        assert allowed == sum(decision == "allowed" for _, decision, _, _ in client.flow.records)
        await client.over()

    asyncio.run(run())
