"""What goes over the wire to an attached client."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.domain.errors import InvalidRequest
from hatchway.node.dataplane import sse
from hatchway.node.sessions.spool import Gap
from hatchway.wire.node import Exit


def fields(frame: bytes) -> tuple[str, str, dict[str, object]]:
    """Id, name and data of one event."""
    assert frame.endswith(b"\n\n")
    lines = frame.decode().rstrip("\n").split("\n")
    parts = dict(line.split(": ", 1) for line in lines)
    assert list(parts) == ["id", "event", "data"]
    return parts["id"], parts["event"], json.loads(parts["data"])


def test_text_stays_text_whatever_it_holds() -> None:
    chunk = 'tab\t "quotes" \\ line\nreturn\r\x00\x1b[31m é 漢 \N{GRINNING FACE}'.encode()
    name, event, data = fields(sse.output("stdout", 7, chunk, sse.Place(1, 7 + len(chunk), 3)))
    assert (name, event) == (f"1.{7 + len(chunk)}.3", "stdout")
    assert data == {"offset": 7, "text": chunk.decode()}


def test_what_is_not_utf8_is_base64() -> None:
    _, _, data = fields(sse.output("stderr", 0, b"\xff\x00abc", sse.Place(1, 0, 5)))
    assert base64.b64decode(str(data["base64"])) == b"\xff\x00abc"
    assert "text" not in data


def test_gap_and_exit_say_all() -> None:
    assert fields(sse.gap("stdout", Gap(5, 9, "bound"), sse.Place(1, 9, 0))) == (
        "1.9.0",
        "gap",
        {"stream": "stdout", "from": 5, "to": 9, "cause": "bound"},
    )
    _, event, data = fields(sse.exited(Exit(reason="signaled", signal=9, stdout_bytes=4), sse.Place(1, 4, 0)))
    assert event == "exit"
    assert data == {
        "code": None,
        "signal": 9,
        "reason": "signaled",
        "usage": {"user_s": 0.0, "system_s": 0.0, "wall_s": 0.0, "max_rss_kib": 0},
        "stdout_bytes": 4,
        "stderr_bytes": 0,
    }


def test_event_ids_read_back() -> None:
    assert sse.parse_id("3.12.0") == sse.Place(3, 12, 0)


@pytest.mark.parametrize(
    "text", ["", "1.2", "1.2.3.4", "a.b.c", "-1.0.0", "1.1e3.0", " 1.2.3", "1.2.3\n", "١.٢.٣", "1." + "9" * 20 + ".0"]
)
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid_event_id"):
        sse.parse_id(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(0, 160))
def test_text_is_cut_between_characters(text: str, at: int) -> None:
    octets = text.encode()
    chunk = octets[:at]
    whole = sse.whole_characters(chunk)
    chunk[:whole].decode()
    assert len(chunk) - whole < 4
    if at >= len(octets):
        assert whole == len(chunk)


@given(st.binary(max_size=40))
def test_at_most_three_octets_are_held_back_and_only_ones_that_may_become_a_character(chunk: bytes) -> None:
    whole = sse.whole_characters(chunk)
    held = chunk[whole:]
    assert len(held) <= 3
    if held:
        assert any(
            _decodes(held + bytes([0x80] * n)) or _decodes(held + bytes([0xBF] * n)) or _lead_only(held)
            for n in (1, 2, 3)
        )


def _decodes(octets: bytes) -> bool:
    try:
        return len(octets.decode()) == 1
    except UnicodeDecodeError:
        return False


def _lead_only(octets: bytes) -> bool:
    return 0xC2 <= octets[0] <= 0xF4
