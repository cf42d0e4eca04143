"""Heads and bodies of HTTP/1.1: what can be read in two ways is refused, whatever pieces it comes in."""

import string

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hatchway.domain.errors import BadGateway, HatchwayError, HeadTooLarge, InvalidRequest, MethodNotAllowed
from hatchway.egress.http import framing, heads
from hatchway.egress.http.framing import Chunked, Measured
from hatchway.egress.http.heads import Unclear, end_of_head, parse_answer, parse_request
from hatchway.egress.http.lines import head_of

SETTINGS = settings(max_examples=150, deadline=None)
HOST = b"Host: index.example\r\n"


def head(*lines: bytes, first: bytes = b"GET / HTTP/1.1", host: bytes = HOST) -> bytes:
    return first + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def read(data: bytes) -> object:
    end = end_of_head(data)
    return parse_request(data[:end]) if end >= 0 else None


def refused(data: bytes) -> HatchwayError:
    with pytest.raises(HatchwayError) as raised:
        read(data)
    assert raised.value.cause
    assert raised.value.remedy
    return raised.value


def test_a_plain_request_is_taken_apart() -> None:
    parsed = parse_request(
        head(
            b"User-Agent:\t x/1 \t",
            b"content-LENGTH: 5",
            b"Connection: close, X-One",
            b"X-One: 1",
            first=b"POST /a?b=%20 HTTP/1.1",
        )
    )
    assert (parsed.method, parsed.target, parsed.version) == ("POST", "/a?b=%20", "1.1")
    assert parsed.fields[1:3] == [("user-agent", "x/1"), ("content-length", "5")]
    assert (parsed.host, parsed.length, parsed.keep) == ("index.example", 5, False)
    assert parsed.nominated == {"close", "x-one"}


@pytest.mark.parametrize(
    "first",
    [
        b"GET http://other.example/ HTTP/1.1",
        b"GET https://index.example/ HTTP/1.1",
        b"GET //other.example/ HTTP/1.1 x",
        b"GET * HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"GET index.example:443 HTTP/1.1",
    ],
)
def test_h02_the_target_is_a_path(first: bytes) -> None:
    assert isinstance(refused(head(first=first)), InvalidRequest)


def test_h03_two_hosts_are_refused() -> None:
    refused(head(b"Host: other.example"))
    refused(head(b"host: index.example"))
    refused(head(b"Host: other.example", first=b"GET / HTTP/1.0"))


@pytest.mark.parametrize(
    "first",
    [
        b"GET /",
        b"GET / HTTP/1.2",
        b"GET / HTTP/0.9",
        b"GET / HTTP/2.0",
        b"GET / HTTP/11",
        b"GET / http/1.1",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b" GET / HTTP/1.1",
        b"GET\t/ HTTP/1.1",
        b"",
    ],
)
def test_h05_only_http_11_and_10(first: bytes) -> None:
    refused(head(first=first))


def test_h05_a_host_is_needed_but_in_http_10() -> None:
    refused(head(host=b""))
    assert parse_request(head(host=b"", first=b"GET / HTTP/1.0")).host is None


@pytest.mark.parametrize(
    "lines",
    [
        (b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: 3"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked, chunked",),
        (b"Transfer-Encoding: gzip, chunked",),
        (b"Transfer-Encoding: identity",),
        (b"Transfer-Encoding: xchunked",),
        (b"Transfer-Encoding: chunked;q=1",),
        (b"Transfer-Encoding: \x0bchunked",),
        (b"Transfer_Encoding: chunked",),
        (b"Content_Length: 4",),
        (b"Transfer-Encoding:",),
    ],
)
def test_h08_one_way_to_tell_the_length(lines: tuple[bytes, ...]) -> None:
    refused(head(*lines, first=b"POST / HTTP/1.1"))


def test_h08_http_10_has_no_chunks() -> None:
    refused(head(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0"))


@pytest.mark.parametrize(
    "value",
    [b"+1", b"-1", b"0x1", b"1, 1", b"1 1", b"1" * 16, b"1" * 20, b"", b"1.0", b"1e1", b"\xb2", b"\xd9\xa1", b"1_0"],
)
def test_h10_the_length_is_one_plain_number(value: bytes) -> None:
    refused(head(b"Content-Length: " + value, first=b"POST / HTTP/1.1"))


def test_h10_the_length_is_there_once() -> None:
    refused(head(b"Content-Length: 1", b"Content-Length: 1", first=b"POST / HTTP/1.1"))


@pytest.mark.parametrize("fold", [b" folded", b"\tfolded", b" Content-Length: 5"])
def test_h11_no_folded_lines(fold: bytes) -> None:
    assert "folded" in refused(head(b"X-A: 1", fold)).cause
    assert "folded" in refused(b"GET / HTTP/1.1\r\n" + fold + b"\r\n" + HOST + b"\r\n").cause


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\nHost: index.example\n\n",
        b"GET / HTTP/1.1\r\nHost: index.example\nX: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: index.example\rX: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\r\nHost: index.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: index.example\r\n\n",
        b"\nGET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: index.example\r\r",
    ],
)
def test_h12_lines_end_in_crlf_alone(data: bytes) -> None:
    """At once: a client that never sends the right end is not waited for."""
    with pytest.raises(InvalidRequest):
        read(data)


def test_h12_an_empty_line_begins_no_request() -> None:
    refused(b"\r\n\r\n")
    with pytest.raises(InvalidRequest):
        parse_request(b"\r\n" + head())


@pytest.mark.parametrize(
    "line",
    [
        b"X\x00: 1",
        b"X: a\x00b",
        b"X: a\x0bb",
        b"X: a\x7fb",
        b"X : 1",
        b"X\t: 1",
        b": 1",
        b"X",
        b"X-\xe9: 1",
        b"X(a): 1",
        b"Host : other.example",
        b'"X": 1',
    ],
)
def test_h13_names_and_values_are_what_they_may_be(line: bytes) -> None:
    refused(head(line))


@pytest.mark.parametrize("method", [b"TRACE", b"TRACK", b"CONNECT"])
def test_h32_methods_that_never_pass(method: bytes) -> None:
    target = b"other.example:443" if method == b"CONNECT" else b"/"
    assert isinstance(refused(head(first=method + b" " + target + b" HTTP/1.1")), MethodNotAllowed)


@pytest.mark.parametrize("method", [b"get", b"Delete", b"G\xc9T", b"GET1", b"A" * 33, b"", b"GE(T"])
def test_a_method_is_capital_letters(method: bytes) -> None:
    """A lower-case one would be another to the policy and may be the same to a server."""
    refused(head(first=method + b" / HTTP/1.1"))


def test_h15_expect_is_one_thing() -> None:
    assert parse_request(head(b"Expect: 100-Continue", b"Content-Length: 1", first=b"PUT / HTTP/1.1")).expects
    assert not parse_request(head(b"Expect: 100-continue")).expects
    refused(head(b"Expect: 200-ok", first=b"PUT / HTTP/1.1"))
    refused(head(b"Expect: 100-continue", b"Expect: 100-continue", first=b"PUT / HTTP/1.1"))


@pytest.mark.parametrize("target", [b"/a b", b"/a#b", b"/\xc3\xa9", b"/a\x7f", b"/\x01"])
def test_a_target_is_visible_ascii(target: bytes) -> None:
    refused(head(first=b"GET " + target + b" HTTP/1.1"))


def test_h23_the_preface_of_http_2_is_refused() -> None:
    refused(b"PRI * HTTP/2.0\r\n\r\n")
    assert (
        parse_request(head(b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: x")).upgrade
        == "h2c"
    )


def test_h36_heads_are_bounded() -> None:
    assert parse_request(head(*[b"X: 1"] * 99)).fields
    assert isinstance(refused(head(*[b"X: 1"] * 100)), HeadTooLarge)
    assert isinstance(refused(head(b"X: " + b"a" * heads.MAX_LINE)), HeadTooLarge)
    assert isinstance(refused(head(first=b"GET /" + b"a" * heads.MAX_LINE + b" HTTP/1.1")), HeadTooLarge)
    long = head(*[b"X: " + b"a" * 1000] * 40)
    with pytest.raises(HeadTooLarge):
        end_of_head(long)
    with pytest.raises(HeadTooLarge):
        end_of_head(b"G" * heads.MAX_HEAD)


def test_connection_names_headers() -> None:
    refused(head(b"Connection: a b"))
    refused(head(b"Connection: \xe9"))
    assert parse_request(head(b"Connection: ,, close ,", b"Connection: x")).nominated == {"close", "x"}


# -- answers


def answer(*lines: bytes, first: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return first + b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize(
    "data",
    [
        answer(b"Content-Length: 1", b"Transfer-Encoding: chunked"),
        answer(b"Content-Length: 1", b"Content-Length: 1"),
        answer(b"Content-Length: 1, 1"),
        answer(b"Content-Length: +1"),
        answer(b"Transfer-Encoding: gzip, chunked"),
        answer(b"Transfer-Encoding: chunked", first=b"HTTP/1.0 200 OK"),
        answer(b"X: 1", b" folded"),
        answer(b"X : 1"),
        answer(b"X: \x00"),
        answer(first=b"HTTP/2 200 OK"),
        answer(first=b"HTTP/1.1 20 OK"),
        answer(first=b"HTTP/1.1 099 OK"),
        answer(first=b"HTTP/1.1  200 OK"),
        answer(first=b"HTTP/1.1 200 O\x00K"),
        answer(first=b"ICY 200 OK"),
        answer(*[b"X: 1"] * 201),
        answer(b"X: " + b"a" * heads.MAX_ANSWER_LINE),
        b"HTTP/1.1 200 OK\r\nX: 1\n\r\n\r\n",
    ],
)
def test_h41_an_answer_is_checked_as_strictly(data: bytes) -> None:
    with pytest.raises(BadGateway):
        parse_answer(data, "GET")


@pytest.mark.parametrize(
    ("data", "method", "length", "chunked", "to_end", "keep"),
    [
        (answer(b"Content-Length: 7"), "GET", 7, False, False, True),
        (answer(b"Content-Length: 7"), "HEAD", 0, False, False, True),
        (answer(b"Content-Length: 7", first=b"HTTP/1.1 304 Not Modified"), "GET", 0, False, False, True),
        (answer(b"Transfer-Encoding: Chunked"), "GET", None, True, False, True),
        (answer(), "GET", None, False, True, False),
        (answer(first=b"HTTP/1.1 204 No Content"), "GET", 0, False, False, True),
        (answer(b"Content-Length: 7", b"Connection: close"), "GET", 7, False, False, False),
        (answer(b"Content-Length: 7", first=b"HTTP/1.0 200"), "GET", 7, False, False, False),
    ],
)
def test_where_an_answer_ends(
    data: bytes, method: str, length: int | None, chunked: bool, to_end: bool, keep: bool
) -> None:
    parsed = parse_answer(data, method)
    assert (parsed.length, parsed.chunked, parsed.to_end, parsed.keep) == (length, chunked, to_end, keep)


# -- bodies


def taken(body: framing.Body, pieces: list[bytes]) -> tuple[bytes, bytes]:
    made = rest = b""
    for piece in pieces:
        if body.done:
            rest += piece
            continue
        payload, rest = body.take(piece)
        made += payload
        while body.ready and not body.done:
            payload, rest = body.take(b"")
            made += payload
    return made, rest


@pytest.mark.parametrize(
    "data",
    [
        b"5;ext=1\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"\r\n5\r\nhello\r\n",
        b"g\r\n",
        b"1" * 16 + b"\r\n",
        b"1" * 40,
        b"0\r\nX : 1\r\n\r\n",
        b"0\r\n folded\r\n\r\n",
        b"0\r\nX: a\rb\r\n\r\n",
        b"0\r\n\n",
        b"0\r\n" + b"X: 1\r\n" * 2000,
        b"-1\r\n",
        b"\xd9\xa1\r\nx\r\n",
    ],
)
def test_h08_chunks_are_plain(data: bytes) -> None:
    with pytest.raises(Unclear):
        taken(Chunked(strict=True), [data])
    with pytest.raises(Unclear):
        taken(Chunked(strict=True), [data[at : at + 1] for at in range(len(data))])


def test_trailers_end_with_the_body() -> None:
    body = Chunked(strict=True)
    assert taken(body, [b"3\r\nabc\r\n0\r\nAuthorization: x\r\nX: 1\r\n\r\nGET /"]) == (b"abc", b"GET /")
    assert body.done


def test_extensions_of_an_answer_end_here() -> None:
    body = Chunked(strict=False)
    assert taken(body, [b"3 ; a=b\r\nabc\r\n0\r\n\r\n"]) == (b"abc", b"")
    with pytest.raises(Unclear):
        Chunked(strict=False).take(b"3;" + b"a" * 300)


@SETTINGS
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=600), st.binary(max_size=10), st.data())
def test_a_body_is_the_same_in_whatever_pieces(chunks: list[bytes], behind: bytes, data: st.DataObject) -> None:
    wire = b"".join(map(framing.chunk, chunks)) + framing.LAST_CHUNK + behind
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    body = Chunked(strict=True)
    assert taken(body, pieces) == (b"".join(chunks), behind)
    assert body.done
    whole = b"".join(chunks)
    measured = Measured(len(whole))
    if whole:
        assert taken(measured, [whole + behind]) == (whole, behind)


@SETTINGS
@given(st.binary(max_size=200), st.booleans())
@example(b"0\r\n\r\n", True)
def test_no_octets_break_the_parser_of_chunks(data: bytes, strict: bool) -> None:
    body = Chunked(strict=strict)
    try:
        made, rest = taken(body, [data])
    except Unclear:
        return
    assert len(made) + len(rest) <= len(data)


# -- what was decided is what is sent

TOKEN = st.text(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1, max_size=12)
VALUE = st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=20)
JUNK = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\t",
        b":",
        b"\x00",
        b"Host: b\r\n",
        b"Content-Length: 1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"HTTP/1.1",
        b",",
    ]
)


def read_by_others(wire: bytes) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
    """How a server with another parser reads it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(wire)
    event = connection.next_event()
    assert isinstance(event, h11.Request)
    return event.method, event.target, [(name, value) for name, value in event.headers]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TOKEN, VALUE), max_size=6), st.lists(st.tuples(st.integers(0, 400), JUNK), max_size=4))
@example([("X", "\x85")], [])
def test_what_is_let_through_is_read_alike_by_another_parser(
    fields: list[tuple[str, str]], junk: list[tuple[int, bytes]]
) -> None:
    raw = bytearray(b"GET /a?b HTTP/1.1\r\nHost: index.example\r\n")
    raw += b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in fields) + b"\r\n"
    for at, octets in junk:
        raw[at:at] = octets
    data = bytes(raw)
    try:
        end = end_of_head(data)
        if end < 0:
            return
        parsed = parse_request(data[:end])
    except HatchwayError:
        return
    sent = head_of(
        f"{parsed.method} {parsed.target} HTTP/1.1",
        [("host", "index.example"), *((n, v) for n, v in parsed.fields if n not in heads.FRAMING)],
    )
    method, target, read = read_by_others(sent)
    assert (method, target) == (parsed.method.encode(), parsed.target.encode())
    assert [name for name, _ in read].count(b"host") == 1
    assert len(read) == 1 + sum(name not in heads.FRAMING for name, _ in parsed.fields)
    assert {value.decode("latin-1") for _, value in read[1:]} == {
        v.strip(" \t") for n, v in parsed.fields if n not in heads.FRAMING
    }


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_no_octets_break_the_parser_of_heads(data: bytes) -> None:
    for whole in (data, head(data), data + b"\r\n\r\n"):
        for parse in (parse_request, lambda octets: parse_answer(octets, "GET")):
            try:
                if end_of_head(whole) > 0:
                    parse(whole[: end_of_head(whole)])
            except HatchwayError:
                continue
