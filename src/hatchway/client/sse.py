"""An incremental parser of server-sent events: octets in, events out, no I/O.

Follows the "event stream interpretation" of the HTML standard, with one addition: an event is bounded, so that a peer
cannot make us hold any amount of memory.
"""

from dataclasses import dataclass

from .errors import BadAnswer

MAX_EVENT = 4 * 1024 * 1024
"""Octets of one event, field names included. The service sends events of at most a few hundred KiB."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its name (`message` when the stream gives none), its data, and the last id seen so far."""

    name: str
    data: bytes
    id: str


class Parser:
    """Turns pieces of an event stream, cut anywhere, into events. An event that the stream ends within is dropped."""

    def __init__(self, max_event: int = MAX_EVENT) -> None:
        self._max_event = max_event
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._size = 0
        self._after_cr = False
        self._begun = False
        self._name = ""
        self._data: list[bytes] = []
        self._id = ""

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Returns the events that `piece` completes; raises `BadAnswer` when one grows past the bound."""
        if self._after_cr and piece:
            self._after_cr = False
            piece = piece.removeprefix(b"\n")
        if not piece:
            return []
        self._after_cr = piece.endswith(b"\r")
        lines = piece.splitlines()
        rest = None if piece.endswith((b"\n", b"\r")) else lines.pop()
        events: list[ServerEvent] = []
        for line in lines:
            if self._partial:
                self._partial.append(line)
                line = b"".join(self._partial)
                self._partial = []
                self._partial_size = 0
            self._line(line, events)
        if rest is not None:
            self._partial.append(rest)
            self._partial_size += len(rest)
            self._check_size()
        return events

    def _check_size(self) -> None:
        if self._size + self._partial_size > self._max_event:
            raise BadAnswer(
                "event_too_large",
                f"An event of the stream is larger than {self._max_event} octets.",
                "Check that the URL is one of the service and that the versions fit.",
            )

    def _line(self, line: bytes, events: list[ServerEvent]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if not line:
            self._size = 0
            if self._data:
                events.append(ServerEvent(self._name or "message", b"\n".join(self._data), self._id))
            self._data = []
            self._name = ""
            return
        if line.startswith(b":"):
            return
        self._size += len(line)
        self._check_size()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
