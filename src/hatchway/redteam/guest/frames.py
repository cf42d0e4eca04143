"""Frames of the agent's channel, as whoever has its port writes and reads them: see the protocol. Nothing here is strict."""

import struct
from typing import Any

Field = tuple[int, int | bytes | str]
"""A tag and its value."""

HELLO, HELLO_ACK, READY, RESPONSE, PING, SPAWN, CLOSE, OUTPUT, OUTPUT_ACK, PROC = 1, 2, 3, 4, 16, 18, 20, 32, 33, 36
VERSION_TAG, NONCE, EPOCH, BOOT_ID, AGENT, UPTIME, STATUS, MESSAGE, TIME, ARG, KEY, FLAGS, PID = 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 22, 27, 29  # fmt: skip
CODE, REASON, OUT, ERR, STATE, SIZE = 30, 32, 33, 34, 39, 40
BUILTIN = 8
MAGIC, TRAILER = b"HWF1", b"\xa5\x5a\xc3\x3c"
_FORMATS = {EPOCH: "<Q", UPTIME: "<Q", TIME: "<Q", OUT: "<Q", ERR: "<Q", SIZE: "<Q", STATUS: "<i", CODE: "<i"}


def header(kind: int, stream: int, length: int, flags: int = 0) -> bytes:
    """The head of a frame, with its check; the length is whatever one says."""
    head = struct.pack("<4sBBHII", MAGIC, kind, flags, 0, stream, length)
    one = two = 0
    for octet in head:
        one += octet
        two += one
    return head[:6] + bytes([one % 255, two % 255]) + head[8:]


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A whole frame."""
    return header(kind, stream, len(payload), flags) + payload + TRAILER


def fields(*pairs: Field) -> bytes:
    """A payload."""
    out = b""
    for tag, value in pairs:
        if isinstance(value, int):
            value = struct.pack(_FORMATS.get(tag, "<I"), value)
        elif isinstance(value, str):
            value = value.encode()
        out += struct.pack("<HI", tag, len(value)) + value
    return out


def read_fields(payload: bytes) -> dict[int, Any]:
    """What a payload says: numbers as such, the rest as octets, arguments as a list."""
    found: dict[int, Any] = {ARG: []}
    at = 0
    while at + 6 <= len(payload):
        tag, length = struct.unpack_from("<HI", payload, at)
        raw = payload[at + 6 : at + 6 + length]
        at += 6 + length
        if tag == ARG:
            found[ARG].append(raw)
        elif tag in _FORMATS or tag in (FLAGS, PID, REASON, STATE, VERSION_TAG):
            found[tag] = int.from_bytes(raw, "little")
        else:
            found[tag] = raw
    return found


def output(number: int, descriptor: int, offset: int, data: bytes) -> bytes:
    """Output of a process."""
    return frame(OUTPUT, number, struct.pack("<B7xQ", descriptor, offset) + data)


def split(buffer: bytearray) -> "tuple[int, int, int, bytes] | None":
    """Takes the first frame out of a buffer: kind, flags, stream, payload. What stands before it is thrown away."""
    while (at := buffer.find(MAGIC)) >= 0 and len(buffer) >= at + 16:
        kind, flags, _, stream, length = struct.unpack_from("<BBHII", buffer, at + 4)
        if bytes(buffer[at : at + 16]) != header(kind, stream, length, flags):
            del buffer[: at + 1]
            continue
        if len(buffer) < at + 20 + length:
            return None
        payload = bytes(buffer[at + 16 : at + 16 + length])
        del buffer[: at + 20 + length]
        return kind, flags, stream, payload
    if at < 0:
        del buffer[: max(0, len(buffer) - 3)]
    return None
