"""The requests that were decided on, and those that a server with another parser finds in what arrived: always the same ones, in the same order."""

import asyncio
import itertools
from collections import Counter

import h2.config
import h2.connection
import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.http_flow import ALL, OK, PlayedFlow, PlayedStream, policy_of, say, whole_request

KNOWN = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
H = b"Host: index.example\r\n"


class Server:
    """How Node's parser (llhttp) reads the octets of one connection."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        self.bodies: list[bytes] = []
        self._url = b""
        self._host = b""

    def on_message_begin(self) -> None:
        self._url = self._host = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"host":
            assert not self._host
            self._host = value

    def on_headers_complete(self) -> None:
        self.requests.append(
            (self._parser.get_method().decode(), self._url.decode().partition("?")[0], self._host.decode())
        )
        self.bodies.append(b"")

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def read(self, octets: bytes) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(octets)


async def answer_all(line: PlayedStream) -> None:
    """Answers as many requests as come."""
    at = 0
    while True:
        while not (end := whole_request(bytes(line.written), at)):
            seen = len(line.written)
            await line.until(lambda one, seen=seen: len(one.written) > seen or one.over)  # type: ignore[misc]
            if line.over:
                return
        at = end
        line.feed(OK)


async def compare(octets: bytes, cuts: list[int], alpn: str = "http/1.1") -> int:
    """Sends octets in pieces through the gateway, and compares; returns how many requests went on."""
    flow = PlayedFlow(policy_of(ALL), answer_all, alpn=alpn)
    places = sorted({0, len(octets), *(cut % (len(octets) + 1) for cut in cuts)})
    pieces = [octets[a:b] for a, b in itertools.pairwise(places) if a < b]
    answer = await say(flow, *pieces, rounds=40 if alpn == "h2" else 0)  # a client that leaves gives up its streams
    decided = [
        (data["method"], data["path"], data["host"]) for _, decision, _, data in flow.records if decision == "allowed"
    ]
    assert not flow.exchanges
    if any(method not in KNOWN for method, _, _ in decided):
        return len(decided)  # methods that this server knows none of; it would refuse the whole connection
    found = []
    for line in flow.lines:
        server = Server()
        server.read(bytes(line.written))
        found += server.requests
    if (
        alpn == "h2"
    ):  # streams go on beside each other, and one may be given up between the decision and its first octet
        assert not Counter(found) - Counter(decided)
    else:
        assert found == decided
    assert answer.count(b"HTTP/1.1 200 OK\r\n") <= len(decided)
    return len(decided)


SMUGGLED = [
    b"POST / HTTP/1.1\r\n"
    + H
    + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n"
    + H
    + b"\r\n",
    b"POST / HTTP/1.1\r\n"
    + H
    + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n1e\r\nGET /hidden HTTP/1.1\r\nX: 1\r\n\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + H + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n" + H + b"\r\n",
    b"POST / HTTP/1.1\r\n"
    + H
    + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n"
    + H
    + b"\r\n",
    b"POST / HTTP/1.1\r\n"
    + H
    + b"X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n"
    + H
    + b"\r\n",
    b"POST / HTTP/1.1\r\n"
    + H
    + b"Content-Length: 0\r\nContent-Length: 44\r\n\r\nGET /hidden HTTP/1.1\r\n"
    + H
    + b"\r\n",
    b"POST / HTTP/1.1\r\n" + H + b"Content-Length: 44, 0\r\n\r\nGET /hidden HTTP/1.1\r\n" + H + b"\r\n",
    b"POST / HTTP/1.1\r\n"
    + H
    + b"Transfer-Encoding: chunked\r\n\r\n5;a=\nb\r\nhello\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n"
    + H
    + b"\r\n",
    b"GET / HTTP/1.1\r\n" + H + b"X: 1\r\n\r\n\r\nGET /hidden HTTP/1.1\r\n" + H + b"\r\n",
    b"GET /\x00 HTTP/1.1\r\n" + H + b"\r\nGET /hidden HTTP/1.1\r\n" + H + b"\r\n",
    b"GET /a HTTP/1.1\r\n" + H + b"Content-Length: 5\r\n\r\nhelloGET /b HTTP/1.1\r\n" + H + b"\r\n",
]


@pytest.mark.parametrize("octets", SMUGGLED, ids=range(len(SMUGGLED)))
async def test_h07_h08_h10_requests_hidden_in_others_are_seen_by_both_or_by_none(octets: bytes) -> None:
    went = await compare(octets, [])
    assert went == (2 if b"/b HTTP" in octets else 1 if octets.startswith(b"GET / HTTP/1.1") else 0)


PIECES = st.sampled_from(
    [
        b"GET /a HTTP/1.1\r\n" + H + b"\r\n",
        b"HEAD /h HTTP/1.1\r\n" + H + b"\r\n",
        b"POST /b HTTP/1.1\r\n" + H + b"Content-Length: 5\r\n\r\nhello",
        b"PUT /c HTTP/1.1\r\n" + H + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\nGET\r\n0\r\n\r\n",
        b"DELETE /d?x=%41 HTTP/1.1\r\n" + H + b"Connection: keep-alive, x\r\nX: 1\r\n\r\n",
        b"GET /e HTTP/1.1\r\nHost: other.example\r\n\r\n",
        b"GET /f HTTP/1.0\r\n\r\n",
        b"POST /g HTTP/1.1\r\n" + H + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    ]
)
JUNK = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\t",
        b":",
        b"0",
        b"5\r\n",
        b"\x00",
        b",",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"GET /x HTTP/1.1\r\n",
        b"Connection: close\r\n",
    ]
)


@settings(max_examples=250, deadline=None)
@given(
    st.lists(PIECES, min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 6), JUNK), max_size=3),
    st.lists(st.integers(0, 2000), max_size=4),
)
@example([b"GET /a HTTP/1.1\r\n" + H + b"\r\n"] * 3, [], [])
def test_what_was_decided_is_what_another_parser_finds(
    pieces: list[bytes], changes: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    """Connections of several requests, with octets put in, taken out and cut at random."""
    octets = bytearray(b"".join(pieces))
    for at, out, junk in changes:
        at %= len(octets) + 1
        octets[at : at + out] = junk
    asyncio.run(compare(bytes(octets), cuts))


def conversation() -> bytes:
    """What a client of HTTP/2 sends that asks for four things."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    for number, (method, path) in enumerate((("GET", "/a"), ("POST", "/b"), ("GET", "/c?x"), ("PUT", "/d"))):
        stream = 2 * number + 1
        fields = [
            (":method", method),
            (":scheme", "https"),
            (":authority", "index.example"),
            (":path", path),
            ("x-a", "1"),
        ]
        client.send_headers(stream, fields, end_stream=method == "GET")
        if method != "GET":
            client.send_data(stream, b"hello", end_stream=True)
    return client.data_to_send()


TALK = conversation()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(24, len(TALK)), st.integers(0, 4), st.binary(max_size=4)), max_size=4),
    st.lists(st.integers(0, len(TALK)), max_size=3),
)
@example([], [])
def test_what_was_decided_on_a_stream_is_what_another_parser_finds(
    changes: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    """A conversation in HTTP/2 with octets changed behind its preface: frames, lengths, flags, packed headers."""
    octets = bytearray(TALK)
    for at, out, junk in changes:
        octets[at : at + out] = junk
    went = asyncio.run(compare(bytes(octets), cuts, alpn="h2"))
    assert went == 4 or changes
