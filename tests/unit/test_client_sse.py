"""The client's parser of server-sent events: however the stream is cut, the events are the same."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.client.errors import BadAnswer
from hatchway.client.sse import Parser, ServerEvent

STREAM = (
    b'\xef\xbb\xbfid: 1.0.0\r\nevent: started\r\ndata: {"pid":7}\r\n\r\n'
    b": a comment\n\n"
    b"event: stdout\ndata: one\ndata: two\nid: 1.8.0\n\n"
    b"data\n\n"
    b"data:no space\rdata:  two spaces\r\r"
    b"event: nothing\n\n"
    b"unknown: field\nid: nul\0id\ndata: z\xc3\xa4\n\n"
    b"data: unfinished"
)
EVENTS = [
    ServerEvent("started", b'{"pid":7}', "1.0.0"),
    ServerEvent("stdout", b"one\ntwo", "1.8.0"),
    ServerEvent("message", b"", "1.8.0"),
    ServerEvent("message", b"no space\n two spaces", "1.8.0"),
    ServerEvent("message", b"z\xc3\xa4", "1.8.0"),
]


def parse(pieces: list[bytes], parser: Parser | None = None) -> list[ServerEvent]:
    parser = parser or Parser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_whole_stream() -> None:
    assert parse([STREAM]) == EVENTS


def test_octet_by_octet() -> None:
    assert parse([STREAM[at : at + 1] for at in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in itertools.pairwise(places)]
    assert parse(pieces) == EVENTS


@given(st.binary(max_size=300), st.integers(1, 50))
def test_anything_in_any_pieces_gives_the_same(stream: bytes, size: int) -> None:
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert parse(pieces) == parse([stream])


@pytest.mark.parametrize("line", [b"data: " + b"x" * 100, b"data: x\n" * 20, b"y" * 101])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_is_bounded(line: bytes, size: int) -> None:
    parser = Parser(max_event=100)
    with pytest.raises(BadAnswer, match="event_too_large"):
        parse([line[at : at + size] for at in range(0, len(line), size)], parser)


def test_the_bound_is_for_one_event_only() -> None:
    parser = Parser(max_event=100)
    assert len(parse([b"data: " + b"x" * 90 + b"\n\n"] * 50, parser)) == 50
    assert parse([b": comment\n"] * 50, parser) == []
