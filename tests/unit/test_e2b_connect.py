"""The Connect protocol of the E2B wrapper: frames, heads, deadlines, and messages as JSON has them."""

import base64
import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.client import errors as ours
from hatchway.e2b.envd import connect, messages
from hatchway.e2b.envd.connect import ConnectError, Frames

plain = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20)
values = plain | st.lists(plain, max_size=3)
objects = st.dictionaries(st.text(max_size=10), values, max_size=5)


def cut(octets: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(octets), *(place % (len(octets) + 1) for place in at)})
    return [octets[start:stop] for start, stop in itertools.pairwise(places)]


@given(sent=st.lists(objects, max_size=6), at=st.lists(st.integers(0, 10_000), max_size=10))
def test_frames_are_found_however_they_were_cut(sent: list[dict[str, Any]], at: list[int]) -> None:
    frames = Frames()
    octets = b"".join(map(connect.frame, sent)) + connect.end()
    found = [json.loads(one) for piece in cut(octets, at) for one in frames.feed(piece)]
    frames.finish()
    assert found == sent


@given(octets=st.binary(max_size=200), at=st.lists(st.integers(0, 10_000), max_size=10))
def test_any_octets_are_frames_or_an_error_of_the_protocol(octets: bytes, at: list[int]) -> None:
    frames = Frames(most=64)
    found: list[bytes] = []
    refused: str | None = None
    try:
        for piece in cut(octets, at):
            found.extend(frames.feed(piece))
        frames.finish()
    except ConnectError as error:
        refused = error.code
    assert refused in (None, "invalid_argument", "resource_exhausted", "internal")
    assert sum(5 + len(one) for one in found) <= len(octets)


def test_a_frame_is_a_flag_a_length_and_json() -> None:
    assert connect.frame({"a": 1}) == b"\0\0\0\0\x07" + b'{"a":1}'
    assert connect.end() == b"\2\0\0\0\2{}"
    flags, size = struct.unpack(">BI", connect.end(ConnectError("not_found", "no"))[:5])
    assert (flags, size) == (2, len(connect.end(ConnectError("not_found", "no"))) - 5)


def test_a_frame_beyond_the_bound_is_refused_before_it_came() -> None:
    frames = Frames(most=10)
    with pytest.raises(ConnectError) as caught:
        list(frames.feed(struct.pack(">BI", 0, 11)))
    assert caught.value.code == "resource_exhausted"
    with pytest.raises(ConnectError, match="compressed"):
        list(Frames().feed(struct.pack(">BI", 1, 0)))


def test_a_stream_that_is_cut_off_is_said() -> None:
    frames = Frames()
    assert list(frames.feed(connect.frame({})[:-1])) == []
    with pytest.raises(ConnectError, match="incomplete"):
        frames.finish()


def test_every_code_has_its_status() -> None:
    known = {
        "canceled": 499, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404, "already_exists": 409,
        "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400, "unimplemented": 501, "internal": 500,
        "unknown": 500, "unavailable": 503, "unauthenticated": 401,
    }  # fmt: skip
    assert {code: connect.STATUSES[code] for code in known} == known
    assert json.loads(ConnectError("not_found", "gone").body()) == {"code": "not_found", "message": "gone"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ours.NotFound("unknown_session", "c", ""), "not_found"),
        (ours.Gone("session_gone", "c", ""), "not_found"),
        (ours.Exhausted("too_many_processes", "c", ""), "resource_exhausted"),
        (ours.Unprocessable("invalid_field", "c", ""), "invalid_argument"),
        (ours.ConnectionFailed("c"), "unavailable"),
        (ours.BadAnswer("bad_answer", "c", ""), "internal"),
    ],
)
def test_our_errors_have_a_code(error: ours.HatchwayError, code: str) -> None:
    assert connect.of_client(error).code == code


def test_the_head_of_a_request() -> None:
    connect.check_head({"content-type": "application/json"}, stream=False)
    connect.check_head(
        {"content-type": 'Application/JSON; charset="UTF-8"', "content-encoding": "identity"}, stream=False
    )
    connect.check_head({"content-type": "application/connect+json", "connect-protocol-version": "1"}, stream=True)
    for wrong in ("application/json", "application/connect+proto", "application/grpc", ""):
        with pytest.raises(connect.Unsupported):
            connect.check_head({"content-type": wrong}, stream=True)
    with pytest.raises(ConnectError) as caught:
        connect.check_head({"content-type": "application/json", "content-encoding": "gzip"}, stream=False)
    assert caught.value.code == "unimplemented"
    with pytest.raises(ConnectError):
        connect.check_head({"content-type": "application/json", "connect-protocol-version": "2"}, stream=False)


@pytest.mark.parametrize(("text", "seconds"), [(None, None), ("0", None), ("1500", 1.5), ("9999999999", 9999999.999)])
def test_deadlines(text: str | None, seconds: float | None) -> None:
    assert connect.timeout_s({} if text is None else {"connect-timeout-ms": text}) == seconds


@pytest.mark.parametrize("text", ["-1", "1.5", "1" * 11, "soon"])
def test_deadlines_that_are_none(text: str) -> None:
    with pytest.raises(ConnectError):
        connect.timeout_s({"connect-timeout-ms": text})


@pytest.mark.parametrize(("text", "seconds"), [(None, 90), ("50", 50), ("0", 90), ("often", 90), ("1" * 9, 90)])
def test_keepalives(text: str | None, seconds: int) -> None:
    assert connect.keepalive_s({} if text is None else {"keepalive-ping-interval": text}) == seconds


# -- messages


def message(**fields: Any) -> messages.Message:
    return messages.of(json.dumps(fields).encode())


def test_fields_stand_under_either_name_and_null_is_not_there() -> None:
    assert message(watcherId="a").text("watcher_id") == "a"
    assert message(watcher_id="a").text("watcher_id") == "a"
    assert message(watcherId=None).text("watcher_id") is None
    assert message(unknown=1).text("watcher_id") is None
    with pytest.raises(ConnectError, match="duplicate"):
        message(watcherId="a", watcher_id="b").text("watcher_id")


@pytest.mark.parametrize("value", [7, 7.0, "7"])
def test_numbers_may_be_text_and_have_no_fraction(value: object) -> None:
    assert message(pid=value).unsigned("pid") == 7


@pytest.mark.parametrize("value", [7.5, "7.5", -1, "x", True, 2**32, str(2**32), [], {}, "9" * 30])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ConnectError) as caught:
        message(pid=value).unsigned("pid")
    assert caught.value.code == "invalid_argument"


def test_large_numbers_are_numbers_of_64_bits() -> None:
    assert message(size=str(2**63)).unsigned("size", 64) == 2**63


@given(octets=st.binary(max_size=100), url=st.booleans(), padded=st.booleans())
def test_octets_are_base64_of_either_alphabet(octets: bytes, url: bool, padded: bool) -> None:
    text = (base64.urlsafe_b64encode if url else base64.b64encode)(octets).decode()
    assert message(stdin=text if padded else text.rstrip("=")).octets("stdin") == octets
    assert messages.encoded(octets) == base64.b64encode(octets).decode()


@pytest.mark.parametrize("value", ["a", "a b=", 1, ["YQ=="], "Y\u00e4Q="])
def test_what_is_no_base64_is_refused(value: object) -> None:
    with pytest.raises(ConnectError):
        message(stdin=value).octets("stdin")


def test_choices_are_named_or_numbered() -> None:
    signals = {"SIGNAL_UNSPECIFIED": 0, "SIGNAL_SIGTERM": 15}
    assert message(signal="SIGNAL_SIGTERM").choice("signal", signals) == "SIGNAL_SIGTERM"
    assert message(signal=15).choice("signal", signals) == "SIGNAL_SIGTERM"
    assert message().choice("signal", signals) is None
    for wrong in ("SIGKILL", 3, True, 15.5):
        with pytest.raises(ConnectError):
            message(signal=wrong).choice("signal", signals)


def test_one_of_several() -> None:
    assert message(stdin="").one_of("stdin", "pty") == "stdin"
    assert message().one_of("stdin", "pty") is None
    with pytest.raises(ConnectError):
        message(stdin="", pty="").one_of("stdin", "pty")


def read_all(fields: dict[str, Any]) -> None:
    found = message(**fields)
    found.texts("args")
    found.text_map("envs")
    found.text("cmd")
    found.flag("stdin")
    found.message("process")


@pytest.mark.parametrize(
    "fields",
    [
        {"args": "x"},
        {"args": [1]},
        {"envs": []},
        {"envs": {"A": 1}},
        {"cmd": 1},
        {"cmd": "\ud800"},
        {"stdin": "true"},
        {"process": 1},
    ],
)
def test_wrong_types_are_errors_of_a_call(fields: dict[str, Any]) -> None:
    with pytest.raises(ConnectError) as caught:
        read_all(fields)
    assert caught.value.code == "invalid_argument"


@given(octets=st.binary(max_size=60))
def test_any_octets_are_a_message_or_an_error_of_a_call(octets: bytes) -> None:
    refused: str | None = None
    try:
        messages.of(octets)
    except ConnectError as error:
        refused = error.code
    assert refused in (None, "invalid_argument")


def test_deep_nesting_and_much_of_everything_are_refused() -> None:
    with pytest.raises(ConnectError):
        messages.of(b"[" * 100_000)
    with pytest.raises(ConnectError):
        message(args=["a"] * (messages.MAX_ENTRIES + 1)).texts("args")
    assert messages.of(b" ").text("a") is None
