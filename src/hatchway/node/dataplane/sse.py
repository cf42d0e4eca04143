"""What an attached client reads: server-sent events, and where it is in the streams.

The id of an event is `EPOCH.STDOUT.STDERR`: the offsets up to which the client has everything once it has the event.
"""

import binascii
import re
from dataclasses import dataclass

import msgspec

from hatchway.domain.errors import InvalidRequest
from hatchway.node.sessions.spool import Gap
from hatchway.wire.node import Exit

PING = b"event: ping\ndata: {}\n\n"
_ID = re.compile(r"(\d{1,9})\.(\d{1,19})\.(\d{1,19})", re.ASCII)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client is: the epoch, and offsets in stdout and stderr."""

    epoch: int
    stdout: int
    stderr: int


def parse_id(text: str) -> Place:
    """Reads an event id. Raises `InvalidRequest("invalid_event_id")`."""
    match = _ID.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            "invalid_event_id", f"{text[:80]!r} is not the id of an event.", "Send the id of the last event that came."
        )
    return Place(*map(int, match.groups()))


def event(name: str, place: Place, data: object) -> bytes:
    """Encodes one event with its id."""
    return b"id: %d.%d.%d\nevent: %s\ndata: %s\n\n" % (
        place.epoch,
        place.stdout,
        place.stderr,
        name.encode(),
        _encode(data),
    )


def output(stream: str, offset: int, chunk: bytes, place: Place) -> bytes:
    """Encodes output as text where it is UTF-8, else as base64; `place` is behind it."""
    try:
        data: dict[str, object] = {"offset": offset, "text": chunk.decode()}
    except UnicodeDecodeError:
        data = {"offset": offset, "base64": binascii.b2a_base64(chunk, newline=False).decode("ascii")}
    return event(stream, place, data)


def gap(stream: str, missing: Gap, place: Place) -> bytes:
    """Encodes octets that are not there any more, or were never kept."""
    return event("gap", place, {"stream": stream, "from": missing.start, "to": missing.end, "cause": missing.cause})


def exited(exit_: Exit, place: Place) -> bytes:
    """Encodes the end of the leader."""
    return event("exit", place, exit_data(exit_))


def exit_data(exit_: Exit) -> dict[str, object]:
    """What a client is told of the end of the leader."""
    data: dict[str, object] = {
        "code": exit_.code,
        "signal": exit_.signal,
        "reason": exit_.reason,
        "usage": {
            "user_s": exit_.usage.user_s,
            "system_s": exit_.usage.system_s,
            "wall_s": exit_.usage.wall_s,
            "max_rss_kib": exit_.usage.max_rss_kib,
        },
        "stdout_bytes": exit_.stdout_bytes,
        "stderr_bytes": exit_.stderr_bytes,
    }
    if exit_.message:
        data["message"] = exit_.message
    return data


def whole_characters(chunk: bytes) -> int:
    """Returns how many octets of `chunk` come before a character that its end cuts off; its length when none is cut.

    Octets that cannot be the start of a character are not held back: they are not UTF-8, whatever follows.
    """
    length = len(chunk)
    for back in range(1, min(3, length) + 1):
        octet = chunk[length - back]
        if octet & 0xC0 == 0x80:  # a continuation: its start is further ahead
            continue
        needs = 2 if 0xC2 <= octet <= 0xDF else 3 if 0xE0 <= octet <= 0xEF else 4 if 0xF0 <= octet <= 0xF4 else 1
        return length - back if needs > back else length
    return length
