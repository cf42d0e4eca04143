"""HTTP/2 through the gateway: every stream is decided by itself, and what the library lets through but servers read differently is refused."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.http_flow import ALL, HOST, OK, Played, PlayedFlow, PlayedStream, answering, policy_of, rule

from hatchway.domain.errors import HatchwayError
from hatchway.egress.http import http2
from hatchway.egress.http.http2 import parse_head

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
    for _ in range(http2.MAX_RESETS + 20):
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, plain(), end_stream=True)
        client.h2.reset_stream(number)
    client.flush()
    await client.until(lambda one: one.goaway is not None)
    assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    assert not client.flow.lines
    await client.over()


@pytest.mark.parametrize(
    "frame", [b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"p" * 8, b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
)
async def test_h22_frames_that_ask_for_nothing_are_counted(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "MAX_CONTROL", 50)
    client = client_of()
    client.stream.feed(frame * 200)
    await client.until(lambda one: one.goaway is not None)
    assert client.goaway == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
    await client.over()


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
