"""Decoding of session events, and the cursor that delivers every octet once."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.client import BadAnswer, End, Exit, Gap, Output, Started
from hatchway.client.events import Cursor
from hatchway.client.sse import ServerEvent


def event(name: str, data: Any, at: str = "") -> ServerEvent:
    return ServerEvent(name, json.dumps(data).encode(), at)


def out(offset: int, data: bytes, at: str = "", stream: str = "stdout") -> ServerEvent:
    return event(stream, {"offset": offset, "base64": base64.b64encode(data).decode()}, at)


def test_a_session_from_beginning_to_end() -> None:
    cursor = Cursor()
    end = {
        "reason": "exited",
        "code": 3,
        "signal": None,
        "usage": {"user_s": 0.5},
        "stdout_bytes": 3,
        "stderr_bytes": 1,
    }
    events = [
        event("started", {"pid": 9}, "1.0.0"),
        event("stdout", {"offset": 0, "text": "aä"}, "1.3.0"),
        out(0, b"\xff", "1.3.1", "stderr"),
        event("ping", {}),
        event("something new", [1]),
        event("exit", end, "1.3.1"),
        event("end", {}, "1.3.1"),
    ]
    items = [item for one in events for item in cursor.take(one)]
    assert items[:3] == [Started(pid=9), Output("stdout", 0, "aä".encode()), Output("stderr", 0, b"\xff")]
    assert isinstance(items[3], Exit)
    assert (items[3].status, items[3].usage.user_s) == (3, 0.5)
    assert items[4:] == [End()]
    assert cursor.ended
    assert cursor.event_id == "1.3.1"


def test_what_is_repeated_is_delivered_once() -> None:
    cursor = Cursor()
    first = [event("started", {"pid": 9}), out(0, b"abcdef"), event("exit", {"reason": "exited", "code": 0})]
    assert len([item for one in first for item in cursor.take(one)]) == 3
    again = [*first, out(4, b"efgh"), event("end", {})]
    assert [item for one in again for item in cursor.take(one)] == [Output("stdout", 6, b"gh"), End()]


def test_octets_that_never_came_are_told() -> None:
    cursor = Cursor()
    told = event("gap", {"stream": "stdout", "from": 2, "to": 10, "cause": "bound"})
    events = [out(0, b"ab"), told, out(10, b"kl"), out(15, b"pq"), told]
    assert [item for one in events for item in cursor.take(one)] == [
        Output("stdout", 0, b"ab"),
        Gap(stream="stdout", from_=2, to=10),
        Output("stdout", 10, b"kl"),
        Gap(stream="stdout", from_=12, to=15),
        Output("stdout", 15, b"pq"),
    ]


def test_a_rollback_begins_a_new_epoch() -> None:
    cursor = Cursor()
    events = [out(0, b"abcdef", "1.6.0"), event("exit", {"reason": "rolled_back"}, "1.6.0"), out(2, b"XY", "2.4.0")]
    items = [item for one in events for item in cursor.take(one)]
    assert items[-1] == Output("stdout", 2, b"XY")
    assert cursor.event_id == "2.4.0"
    assert cursor.exit is None


@given(st.binary(min_size=1, max_size=200), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=30))
def test_any_overlapping_pieces_give_the_content_once(content: bytes, pieces: list[tuple[int, int]]) -> None:
    cursor = Cursor()
    got = bytearray()
    for start, length in [*pieces, (0, len(content))]:
        start = min(start, len(got))  # the service never skips without a gap
        for item in cursor.take(out(start, content[start : start + length])):
            assert isinstance(item, Output)
            assert item.offset == len(got)
            got += item.data
    assert bytes(got) == content


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("stdout", b"{"),
        ("stdout", b'{"text": "no offset"}'),
        ("stderr", b'{"offset": 0, "base64": "%"}'),
        ("exit", b"{}"),
        ("gap", b'{"stream": "stdin", "from": 0, "to": 1}'),
        ("started", b'{"pid": "x"}'),
    ],
)
def test_what_is_not_of_the_protocol_is_an_error(name: str, data: bytes) -> None:
    with pytest.raises(BadAnswer, match="bad_event"):
        list(Cursor().take(ServerEvent(name, data, "")))


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Exit(reason="exited", code=0), 0),
        (Exit(reason="exited", code=77), 77),
        (Exit(reason="signaled", signal=15), 143),
        (Exit(reason="timeout", signal=9), 124),
        (Exit(reason="oom", signal=9), 137),
        (Exit(reason="spawn_failed"), 127),
        (Exit(reason="sandbox_lost"), 125),
        (Exit(reason="rolled_back"), 125),
    ],
)
def test_the_end_as_one_number(end: Exit, status: int) -> None:
    assert end.status == status
