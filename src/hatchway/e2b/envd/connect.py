"""The Connect protocol with its JSON codec, without I/O: frames, errors, deadlines, what a request's head must say.

Source: the protocol's reference at connectrpc.com; what E2B's SDKs make of an answer was measured. A unary answer has an HTTP status that
follows from the error's code; a stream is always 200, and how it ended stands in its last frame.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from hatchway.client import errors as ours

UNARY_TYPE = "application/json"
STREAM_TYPE = "application/connect+json"
"""Exactly this, without parameters: an SDK refuses a stream that says more."""

MAX_MESSAGE = 32 * 1024 * 1024
"""Octets of one message of a client, as JSON: what is sent to a process at once is a third less."""
MAX_TIMEOUT_MS = 10**10 - 1
COMPRESSED, END = 1, 2
"""Flags of a frame."""

_HEAD = struct.Struct(">BI")

STATUSES: Final[Mapping[str, int]] = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}


class ConnectError(Exception):
    """An error of a call: one of the protocol's codes, and a text."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code if code in STATUSES else "unknown"
        self.message = message

    @property
    def status(self) -> int:
        """The HTTP status of a unary answer."""
        return STATUSES[self.code]

    def body(self) -> bytes:
        """The body of a unary answer."""
        return msgspec.json.encode({"code": self.code, "message": self.message})


class Unsupported(Exception):
    """The request is in a form that is not spoken here: HTTP status 415."""


def frame(message: object, flags: int = 0) -> bytes:
    """One message of a stream."""
    octets = msgspec.json.encode(message)
    return _HEAD.pack(flags, len(octets)) + octets


def end(error: ConnectError | None = None) -> bytes:
    """The last frame of a stream."""
    return frame({} if error is None else {"error": {"code": error.code, "message": error.message}}, END)


class Frames:
    """Messages out of the octets of a stream, however they were cut."""

    def __init__(self, most: int = MAX_MESSAGE) -> None:
        self._most = most
        self._waiting = bytearray()
        self._ended = False

    def feed(self, octets: bytes) -> Iterator[bytes]:
        """Yields the messages that are whole by now. Raises `ConnectError` for a frame that is too large or none."""
        self._waiting += octets
        start = 0
        try:
            while len(self._waiting) - start >= _HEAD.size:
                flags, size = _HEAD.unpack_from(self._waiting, start)
                self._check(flags, size)
                stop = start + _HEAD.size + size
                if len(self._waiting) < stop:
                    return
                message = bytes(self._waiting[start + _HEAD.size : stop])
                start = stop
                if flags & END:
                    self._ended = True
                else:
                    yield message
        finally:
            del self._waiting[:start]

    @property
    def held(self) -> int:
        """Octets that wait for the rest of their message."""
        return len(self._waiting)

    def finish(self) -> None:
        """Nothing more will come. Raises `ConnectError` when it was cut off."""
        if self._waiting:
            raise ConnectError("invalid_argument", "protocol error: incomplete envelope: unexpected EOF")

    def _check(self, flags: int, size: int) -> None:
        if flags & COMPRESSED:
            raise ConnectError("internal", "protocol error: sent compressed message without compression support")
        if flags & ~(COMPRESSED | END) or self._ended:
            raise ConnectError("invalid_argument", f"protocol error: invalid envelope flags {flags}")
        if size > self._most:
            raise too_large(self._most)


def lost() -> ConnectError:
    """The end of a stream whose sandbox does not run any more."""
    return ConnectError("unavailable", "The sandbox was not found")


def too_large(most: int) -> ConnectError:
    """The error of a message beyond the bound."""
    return ConnectError("resource_exhausted", f"message is larger than configured max {most}")


def check_head(headers: Mapping[str, str], *, stream: bool) -> None:
    """Looks at what a request's head says of its body. Raises `Unsupported` for another codec, `ConnectError` for what cannot be read."""
    media, _, parameters = headers.get("content-type", "").partition(";")
    if media.strip().lower() != (STREAM_TYPE if stream else UNARY_TYPE):
        raise Unsupported(media.strip()[:80])
    charset = parameters.strip().lower().replace(" ", "").removeprefix("charset=").strip('"')
    if charset not in ("", "utf-8"):
        raise Unsupported(f"{media.strip()[:80]}; charset={charset[:20]}")
    coding = headers.get("connect-content-encoding" if stream else "content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise ConnectError("unimplemented", f"unknown compression {coding[:40]!r}: supported encodings are identity")
    version = headers.get("connect-protocol-version", "1")
    if version.strip() != "1":
        raise ConnectError("invalid_argument", f'connect-protocol-version must be "1": got {version[:20]!r}')


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """The deadline of a call in seconds from now; None: it has none. Raises `ConnectError`."""
    text = headers.get("connect-timeout-ms", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ConnectError("invalid_argument", f"protocol error: invalid timeout {text[:40]!r}")
    milliseconds = int(text)
    return milliseconds / 1000 if milliseconds else None


def keepalive_s(headers: Mapping[str, str], usual: float = 90.0) -> float:
    """How long a stream may say nothing, in seconds; what is no number of seconds is as if it were not there."""
    text = headers.get("keepalive-ping-interval", "").strip()
    if text.isascii() and text.isdigit() and len(text) <= 6 and int(text) > 0:
        return float(text)
    return usual


def read(octets: bytes) -> Any:
    """The JSON of a message. Raises `ConnectError`."""
    try:
        return msgspec.json.decode(octets)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConnectError("invalid_argument", f"unmarshal message: {str(error)[:200]}") from None


def of_client(error: ours.HatchwayError) -> ConnectError:
    """What API v1 or a sandbox refused, as an error of a call."""
    text = error.cause or error.code
    match error:
        case ours.NotFound() | ours.Gone():
            return ConnectError("not_found", text)
        case ours.Forbidden():
            return ConnectError("permission_denied", text)
        case ours.Exhausted() | ours.HostExhausted() | ours.OutputLimit():
            return ConnectError("resource_exhausted", text)
        case ours.InvalidRequest() | ours.Unprocessable() | ours.TooLarge() | ours.RangeUnsatisfiable():
            return ConnectError("invalid_argument", text)
        case ours.Conflict():
            return ConnectError("failed_precondition", text)
        case ours.WaitTimeout():
            return ConnectError("deadline_exceeded", text)
        case ours.ConnectionFailed() | ours.Unavailable() | ours.StreamLost():
            return ConnectError("unavailable", text)
    if error.code == "too_many_connections":
        return ConnectError("resource_exhausted", text)
    return ConnectError("internal", text)
