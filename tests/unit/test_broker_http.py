"""What the broker reads and writes of HTTP: whatever comes is read in one way or refused, and what is written is read the same."""

import base64
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.broker import http1, injecting
from hatchway.broker.http1 import Malformed
from hatchway.wire.broker import Injection

SECRET = b"c4n4ry/secret+value="
NAMES = st.sampled_from(
    [b"accept", b"x-data", b"content-type", b"te", b"upgrade", b"x-api-key", b"cookie", b"connection", b"x_token"]
)
VALUES = st.binary(max_size=20).map(lambda octets: bytes(octet for octet in octets if 0x20 <= octet <= 0x7E).strip())
HEADER = (Injection(where="header", name="Authorization", format="Bearer {}"),)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_whatever_comes_is_read_or_refused(octets: bytes, ends: bool) -> None:
    for read in (http1.parse_request, http1.parse_response):
        with contextlib.suppress(Malformed):
            assert read(octets + b"\r\n\r\n" if ends else octets).fields is not None


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([b"GET / HTTP/1.1", b"POST /a?b=c HTTP/1.1", b"HTTP/1.1 200 OK"]),
    st.lists(st.binary(max_size=30), max_size=5),
)
def test_lines_that_are_nearly_right(first: bytes, lines: list[bytes]) -> None:
    head = b"\r\n".join([first, b"Host: a.example", *lines]) + b"\r\n\r\n"
    read = http1.parse_response if first.startswith(b"HTTP") else http1.parse_request
    try:
        found = read(head)
    except Malformed:
        return
    assert not any(octet in value + name for name, value in found.fields for octet in (b"\r", b"\n", b"\0"))
    assert len(found.fields) == len(lines) + 1
    assert not (found.chunked and found.length is not None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, VALUES), max_size=8))
def test_what_is_written_is_read_the_same(fields: list[tuple[bytes, bytes]]) -> None:
    given_fields = ((b"host", b"a.example"), *fields)
    found = http1.parse_request(http1.write_request(b"GET", b"/x?y=1", given_fields))
    assert (found.method, found.target, found.fields) == (b"GET", b"/x?y=1", given_fields)
    back = http1.parse_response(http1.write_response(200, given_fields))
    assert (back.status, back.fields) == (200, given_fields)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=8),
    st.lists(st.sampled_from(["a=1", "token=x", "access%5Ftoken=x", "b", "", "KEY=1"]), max_size=5),
)
def test_c09_the_secret_is_the_only_thing_that_says_who_asks(
    fields: list[tuple[bytes, bytes]], query: list[str]
) -> None:
    target = b"/x?" + "&".join(query).encode() if query else b"/x"
    head = http1.parse_request(http1.write_request(b"GET", target, ((b"host", b"a.example"), *fields)))
    kept_target, kept = injecting.stripped(head, HEADER)
    made_target, made = injecting.injected(kept_target, kept, HEADER, SECRET)
    sent = http1.parse_request(http1.write_request(b"GET", made_target, made))
    assert [field for field in sent.fields if injecting.bears_auth(field[0])] == [
        (b"authorization", b"Bearer " + SECRET)
    ]
    assert all(word not in made_target.lower() for word in (b"token", b"key"))
    assert injecting.stripped(sent, HEADER)[0] == kept_target


@pytest.mark.parametrize(
    ("name", "bears"),
    [
        (b"authorization", True),
        (b"x-amz-security-token", True),
        (b"x-my-api-key", True),
        (b"x_auth_token", True),
        (b"session-secret", True),
        (b"cookie", True),
        (b"accept", False),
        (b"content-type", False),
        (b"x-author", False),
        (b"idempotency-key", False),
        (b"sec-websocket-key", False),
        (b"x-request-id", False),
        (b"mcp-session-id", False),
        (b"if-match", False),
    ],
)
def test_c09_names_that_say_who_asks(name: bytes, bears: bool) -> None:
    assert injecting.bears_auth(name) == bears


def test_places() -> None:
    places = (Injection(where="basic", name="bot"), Injection(where="query", name="key"))
    target, fields = injecting.injected(b"/x", (), places, SECRET)
    assert target == b"/x?key=c4n4ry%2Fsecret%2Bvalue%3D"
    assert fields == ((b"authorization", b"Basic " + base64.b64encode(b"bot:" + SECRET)),)


@pytest.mark.parametrize("line", [b"0", b"1F", b"a;name=value", b"00000001"])
def test_sizes_of_chunks(line: bytes) -> None:
    assert http1.chunk_size(line) == int(line.split(b";")[0], 16)


@pytest.mark.parametrize("line", [b"", b"-1", b"0x1", b"1 2", b"123456789", b"g", b" 1", b"1\t\n"])
def test_what_is_no_size_of_a_chunk(line: bytes) -> None:
    with pytest.raises(Malformed):
        http1.chunk_size(line)
