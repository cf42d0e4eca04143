"""What a command session tells, and the cursor that makes it exactly once.

Pure: server-sent events in, typed events out.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from .errors import BadAnswer
from .sse import ServerEvent

StreamName: TypeAlias = Literal["stdout", "stderr"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a process used: CPU and wall time in seconds, memory in KiB."""

    user_s: float = 0.0
    system_s: float = 0.0
    wall_s: float = 0.0
    max_rss_kib: int = 0


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The process runs; `pid` is its number inside the sandbox."""

    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Octets that the process wrote, `offset` octets from the beginning of the stream."""

    stream: StreamName
    offset: int
    data: bytes

    @property
    def text(self) -> str:
        """The octets as text; what is no UTF-8 becomes replacement characters. The service never cuts a character in two."""
        return self.data.decode("utf-8", "replace")


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Octets `from_` to `to` of a stream are lost: more was written than the service keeps."""

    stream: StreamName
    from_: int = msgspec.field(name="from")
    to: int


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """The process ended. Output of children that it left behind may follow until `End`."""

    reason: str
    """`exited signaled timeout oom spawn_failed sandbox_lost rolled_back agent_unresponsive`."""
    code: int | None = None
    signal: int | None = None
    message: str = ""
    usage: Usage = Usage()
    stdout_bytes: int = 0
    stderr_bytes: int = 0

    @property
    def status(self) -> int:
        """The end as one number, as a shell would tell it.

        The exit code; 128 + signal; 124 for a timeout, 137 out of memory, 127 for a command that could not be started, 125
        when the sandbox was lost or rolled back, or its agent does not tell.
        """
        if self.reason == "timeout":
            return 124
        if self.reason == "exited" and self.code is not None:
            return self.code
        if self.reason == "oom":
            return 137
        if self.signal is not None:
            return 128 + self.signal
        if self.reason == "spawn_failed":
            return 127 if self.code is None else self.code
        return 125


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing more will come."""


SessionEvent: TypeAlias = Started | Output | Gap | Exit | End


class _Chunk(msgspec.Struct):
    offset: int
    text: str | None = None
    base64: str | None = None


_STREAMS: dict[str, StreamName] = {"stdout": "stdout", "stderr": "stderr"}
_chunk = msgspec.json.Decoder(_Chunk)
_started = msgspec.json.Decoder(Started)
_gap = msgspec.json.Decoder(Gap)
_exit = msgspec.json.Decoder(Exit)


@dataclass(slots=True)
class Cursor:
    """How far one reader of a session is.

    The service repeats what it is not sure of (after a re-attach); the cursor drops what was delivered already, cuts what
    was delivered in part, and tells of octets that never came.
    """

    epoch: int | None = None
    stdout: int = 0
    stderr: int = 0
    started: bool = False
    exit: Exit | None = None
    ended: bool = False

    @property
    def event_id(self) -> str | None:
        """What to send as `Last-Event-ID`; None before anything came."""
        return None if self.epoch is None else f"{self.epoch}.{self.stdout}.{self.stderr}"

    def begin(self, stdout: int, stderr: int) -> None:
        """Takes what came up to these offsets for delivered."""
        self.stdout, self.stderr = stdout, stderr

    def take(self, event: ServerEvent) -> Iterator[SessionEvent]:
        """Yields what is new in `event`, and counts each item as delivered just before it is yielded.

        Raises `BadAnswer` for what is not of the protocol. Events with unknown names are skipped.
        """
        try:
            yield from self._take(event)
        except (msgspec.DecodeError, ValueError) as error:
            raise BadAnswer(
                "bad_event",
                f"The stream sent a {event.name!r} event that cannot be read: {error}",
                "Update the client.",
            ) from None

    def _take(self, event: ServerEvent) -> Iterator[SessionEvent]:
        rolled_back = self._see_epoch(event.id)
        name = event.name
        stream = _STREAMS.get(name)
        if stream is not None:
            chunk = _chunk.decode(event.data)
            if chunk.text is not None:
                data = chunk.text.encode()
            else:
                data = base64.b64decode(chunk.base64 or "", validate=True)
            if rolled_back:
                self._advance(stream, chunk.offset)
            yield from self._output(stream, chunk.offset, data)
        elif name == "started":
            started = _started.decode(event.data)
            if not self.started:
                self.started = True
                yield started
        elif name == "gap":
            gap = _gap.decode(event.data)
            yield from self._skip(gap.stream, gap.to)
        elif name == "exit":
            ended = _exit.decode(event.data)
            if self.exit is None:
                self.exit = ended
                yield ended
        elif name == "end" and not self.ended:
            self.ended = True
            yield End()

    def _see_epoch(self, event_id: str) -> bool:
        """Tells whether a new epoch begins: the sandbox was rolled back and the streams go on from where they were then."""
        head, dot, rest = event_id.partition(".")
        if not dot:
            return False
        epoch = int(head)
        rolled_back = self.epoch is not None and epoch > self.epoch
        if rolled_back:
            out, _, err = rest.partition(".")
            self.stdout = min(self.stdout, int(out))
            self.stderr = min(self.stderr, int(err))
            self.exit = None
        if self.epoch is None or epoch > self.epoch:
            self.epoch = epoch
        return rolled_back

    def _output(self, stream: StreamName, offset: int, data: bytes) -> Iterator[SessionEvent]:
        at = self.stdout if stream == "stdout" else self.stderr
        if offset > at:
            yield from self._skip(stream, offset)
        elif offset < at:
            data = data[at - offset :]
            offset = at
        if data:
            self._advance(stream, offset + len(data))
            yield Output(stream, offset, data)

    def _skip(self, stream: StreamName, to: int) -> Iterator[SessionEvent]:
        at = self.stdout if stream == "stdout" else self.stderr
        if to > at:
            self._advance(stream, to)
            yield Gap(stream=stream, from_=at, to=to)

    def _advance(self, stream: StreamName, to: int) -> None:
        if stream == "stdout":
            self.stdout = to
        else:
            self.stderr = to
