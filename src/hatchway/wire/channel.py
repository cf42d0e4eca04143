"""The frames of the guest channel, sans-I/O: docs/protocols/guest-channel.md as code, for the host end.

Encoders return the octets to send. `FrameReader` takes received octets and gives frames; it is strict, allocates one
buffer for its whole life, and raises `Lost` at the first octet that no frame explains. What stands in the payloads is
in `channel_fields`. The peer is hostile: nothing here trusts a length, and nothing grows.
"""

import enum
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import mul
from typing import Final, NamedTuple

from hatchway.wire.channel_fields import Malformed, Tag, encode_fields

VERSION: Final = 1
MAGIC: Final = b"HWF1"
TRAILER: Final = b"\xa5\x5a\xc3\x3c"
HEADER_SIZE: Final = 16
OVERHEAD: Final = HEADER_SIZE + len(TRAILER)
MAX_PAYLOAD: Final = 65_536
MAX_FRAME: Final = MAX_PAYLOAD + OVERHEAD
NONCE_SIZE: Final = 16
RESYNC: Final = bytes(MAX_FRAME)
"""Zeros that complete whatever frame the guest was in the middle of; sent before HELLO."""

DATA_HEADER_SIZE: Final = 16
"""Octets before the data of OUTPUT and INPUT."""
MAX_DATA: Final = MAX_PAYLOAD - DATA_HEADER_SIZE

MAX_SPAWN_FRAMES: Final = 17
MAX_SPAWN_FIELDS: Final = 1024
MAX_SPAWN_OCTETS: Final = 1024 * 1024
MAX_KEY: Final = 64
MAX_PROCESS_NUMBER: Final = 2**31 - 1
MAX_PROCESSES: Final = 256
MAX_BUILTINS: Final = 32
"""Programs of the agent's own that run at once, beside the processes."""
MAX_CONNECTIONS: Final = 512
MAX_LISTED: Final = MAX_PROCESSES + MAX_BUILTINS + MAX_CONNECTIONS
"""PROC frames that follow a HELLO_ACK at most."""
FIRST_OWN_NUMBER: Final = 2**30
"""Process numbers from here on are the node's own streams (builtins, connections); the control plane gives those below."""
MAX_REQUESTS: Final = 32

_MORE: Final = 1
"""Frame flag of a SPAWN that goes on in the next frame."""
_HEADER = struct.Struct("<4sBBHII")
_DATA_HEADER = struct.Struct("<B7sQ")
_ZEROS = bytes(7)
_WEIGHTS: Final = tuple(range(16, 0, -1))
_BEFORE_NONCE = struct.Struct("<HI4xHI")
"""What stands between the header of a HELLO_ACK and its nonce: the VERSION field and the head of the nonce's own field."""
_NONCE_AT: Final = HEADER_SIZE + _BEFORE_NONCE.size


class FrameType(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    HELLO_ACK = 2
    READY = 3
    RESPONSE = 4
    PING = 16
    SETUP = 17
    SPAWN = 18
    SIGNAL = 19
    CLOSE = 20
    RESIZE = 21
    SYNC = 22
    FREEZE = 23
    THAW = 24
    RESIZE_DISK = 25
    SHUTDOWN = 26
    METRICS = 27
    DIAL = 28
    OUTPUT = 32
    OUTPUT_ACK = 33
    INPUT = 34
    INPUT_ACK = 35
    PROC = 36


class SpawnFlag(enum.IntFlag):
    """FLAGS of a SPAWN."""

    STDIN = 1
    PTY = 2
    MERGE_STDERR = 4
    BUILTIN = 8
    TIMEOUT_LEADER = 16


class CloseFlag(enum.IntFlag):
    """FLAGS of a CLOSE."""

    IF_OVER = 1


class SignalScope(enum.IntEnum):
    """SCOPE of a SIGNAL."""

    TREE = 0
    LEADER = 1


class Lost(Exception):
    """The octets are no frames, or a frame is not what the protocol allows here: the connection is of no more use."""


class Frame(NamedTuple):
    """One frame. `payload` looks into the reader's buffer and is valid only until the next frame is asked for."""

    type: int
    flags: int
    stream: int
    payload: memoryview


class Data(NamedTuple):
    """The payload of an OUTPUT (`tag` is the descriptor) or INPUT (`tag` is its flags); `data` has the life of the frame's payload."""

    tag: int
    offset: int
    data: memoryview


def checksum(header: bytes | bytearray | memoryview) -> int:
    """Returns the Fletcher-16 of 16 header octets whose check is 0."""
    weighted: int = sum(map(mul, header, _WEIGHTS))
    return sum(header) % 255 | weighted % 255 << 8


def encode_frame(kind: int, stream: int, payload: bytes | bytearray | memoryview = b"", *, flags: int = 0) -> bytes:
    """Returns one whole frame. Raises `ValueError` when the payload is longer than `MAX_PAYLOAD`."""
    return b"".join((_head(kind, stream, len(payload), flags), payload, TRAILER))


def _head(kind: int, stream: int, length: int, flags: int = 0) -> bytes:
    if length > MAX_PAYLOAD:
        raise ValueError(f"a frame of {length} octets: at most {MAX_PAYLOAD}")
    check = checksum(_HEADER.pack(MAGIC, kind, flags, 0, stream, length))
    return _HEADER.pack(MAGIC, kind, flags, check, stream, length)


def encode_hello(nonce: bytes, epoch: int) -> bytes:
    """Returns a HELLO; `nonce` is 16 octets that nobody in the guest can know before."""
    fields = ((Tag.VERSION, VERSION), (Tag.NONCE, nonce), (Tag.EPOCH, epoch))
    return encode_frame(FrameType.HELLO, 0, encode_fields(fields))


def encode_request(kind: FrameType, request: int, fields: Iterable[tuple[Tag, int | str | bytes]] = ()) -> bytes:
    """Returns a request that fits one frame: all but SPAWN."""
    return encode_frame(kind, request, encode_fields(fields))


def setup_fields(
    *,
    time_ns: int | None = None,
    entropy: bytes = b"",
    hostname: str | None = None,
    machine_id: str | None = None,
    boot_id: str | None = None,
    renew_keys: bool = False,
    ca: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[tuple[Tag, int | str | bytes]]:
    """Returns the fields of a SETUP; `env` (also when empty) replaces the sandbox's environment, None leaves it.

    `renew_keys`: the host keys of ssh, where there are any, are made anew before the answer. `ca`: certificates in PEM that the sandbox trusts beside the template's, none
    when empty; None leaves them.
    """
    fields: list[tuple[Tag, int | str | bytes]] = []
    if time_ns is not None:
        fields.append((Tag.TIME_NS, time_ns))
    if entropy:
        fields.append((Tag.ENTROPY, entropy))
    if hostname is not None:
        fields.append((Tag.HOSTNAME, hostname))
    if machine_id is not None:
        fields.append((Tag.MACHINE_ID, machine_id))
    if boot_id is not None:
        fields.append((Tag.BOOT_ID, boot_id))
    if ca is not None:
        fields.append((Tag.CA, ca))
    flags = (1 if env is not None else 0) | (2 if renew_keys else 0)
    if flags:
        fields.append((Tag.FLAGS, flags))
    if env is not None:
        fields.extend((Tag.ENV, variable) for variable in _environment(env))
    return fields


def _environment(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if not name or "=" in name:
            raise ValueError(f"{name!r} is not the name of a variable")
        yield f"{name}={value}"


def encode_spawn(
    request: int,
    *,
    number: int,
    key: str,
    argv: Sequence[str | bytes],
    env: Mapping[str, str],
    cwd: str | None = None,
    user: str | None = None,
    stdin: bool = True,
    pty: tuple[int, int] | None = None,
    merge_stderr: bool = False,
    timeout_ms: int = 0,
    timeout_leader: bool = False,
    builtin: bool = False,
    limits: Iterable[tuple[Tag, int]] = (),
) -> bytes:
    """Returns a SPAWN, as many frames as it takes; `pty` is rows and columns, `timeout_ms` 0 is none; with `timeout_leader` it ends the leader alone.

    `builtin` starts the agent's own program of the name `argv[0]`; `limits` are the fields LIMIT_….
    Raises `ValueError` for a value that the protocol cannot carry or that is beyond its bounds.
    """
    _check_name(number, key)
    if not argv:
        raise ValueError("a process needs at least one argument, its program")
    if len(argv) + len(env) > MAX_SPAWN_FIELDS:
        raise ValueError(f"{len(argv)} arguments and {len(env)} variables: at most {MAX_SPAWN_FIELDS} of both")
    flags = SpawnFlag(0)
    fields: list[tuple[Tag, int | str | bytes]] = [(Tag.KEY, key), (Tag.SIZE, number)]
    fields.extend((Tag.ARG, value.encode() if isinstance(value, str) else value) for value in argv)
    fields.extend((Tag.ENV, variable) for variable in _environment(env))
    if cwd is not None:
        fields.append((Tag.CWD, cwd))
    if user is not None:
        fields.append((Tag.USER, user))
    if stdin:
        flags |= SpawnFlag.STDIN
    if merge_stderr:
        flags |= SpawnFlag.MERGE_STDERR
    if builtin:
        flags |= SpawnFlag.BUILTIN
    if timeout_leader:
        flags |= SpawnFlag.TIMEOUT_LEADER
    if pty is not None:
        flags |= SpawnFlag.PTY
        fields.extend(((Tag.ROWS, pty[0]), (Tag.COLS, pty[1])))
    fields.append((Tag.FLAGS, int(flags)))
    if timeout_ms:
        fields.append((Tag.TIMEOUT_MS, timeout_ms))
    fields.extend(limits)
    payload = encode_fields(fields)
    if len(payload) > MAX_SPAWN_OCTETS:
        raise ValueError(f"arguments and environment take {len(payload)} octets: at most {MAX_SPAWN_OCTETS}")
    view = memoryview(payload)
    last = (len(payload) - 1) // MAX_PAYLOAD
    return b"".join(
        encode_frame(
            FrameType.SPAWN,
            request,
            view[part * MAX_PAYLOAD : (part + 1) * MAX_PAYLOAD],
            flags=_MORE if part < last else 0,
        )
        for part in range(last + 1)
    )


def encode_dial(request: int, *, number: int, key: str, port: int, host: str | None = None) -> bytes:
    """Returns a DIAL to a TCP port inside the guest; without `host` to its loopback.

    Raises `ValueError` for a value that the protocol cannot carry or that is beyond its bounds.
    """
    _check_name(number, key)
    if not 1 <= port <= 65_535:
        raise ValueError(f"port {port}: 1 to 65535")
    fields: list[tuple[Tag, int | str | bytes]] = [(Tag.KEY, key), (Tag.SIZE, number), (Tag.PORT, port)]
    if host is not None:
        fields.append((Tag.HOST, host))
    return encode_frame(FrameType.DIAL, request, encode_fields(fields))


def _check_name(number: int, key: str) -> None:
    if not 1 <= number <= MAX_PROCESS_NUMBER:
        raise ValueError(f"process number {number}: 1 to {MAX_PROCESS_NUMBER}")
    if not key or len(key.encode()) > MAX_KEY:
        raise ValueError(f"a process key has 1 to {MAX_KEY} octets")


def encode_output_ack(number: int, stdout: int, stderr: int, limit: int) -> bytes:
    """Returns an OUTPUT_ACK: both streams of the process are stored up to these offsets, `limit` octets past them may come."""
    fields = ((Tag.STDOUT_ACK, stdout), (Tag.STDERR_ACK, stderr), (Tag.LIMIT, limit))
    return encode_frame(FrameType.OUTPUT_ACK, number, encode_fields(fields))


def encode_input(number: int, offset: int, data: bytes | memoryview, *, eof: bool = False) -> bytes:
    """Returns an INPUT of at most `MAX_DATA` octets of stdin; `eof` ends it behind them."""
    return _data_frame(FrameType.INPUT, number, int(eof), offset, data)


def encode_output(number: int, descriptor: int, offset: int, data: bytes | memoryview) -> bytes:
    """Returns an OUTPUT, as the guest sends it."""
    return _data_frame(FrameType.OUTPUT, number, descriptor, offset, data)


def _data_frame(kind: FrameType, number: int, tag: int, offset: int, data: bytes | memoryview) -> bytes:
    head = _head(kind, number, DATA_HEADER_SIZE + len(data))
    return b"".join((head, _DATA_HEADER.pack(tag, _ZEROS, offset), data, TRAILER))


def decode_data(payload: memoryview) -> Data:
    """Splits the payload of an OUTPUT or INPUT. Raises `Malformed`."""
    if len(payload) < DATA_HEADER_SIZE:
        raise Malformed("a data frame without its header")
    tag, zeros, offset = _DATA_HEADER.unpack_from(payload)
    if zeros != _ZEROS:
        raise Malformed("reserved octets of a data frame are set")
    return Data(tag, offset, payload[DATA_HEADER_SIZE:])


class FrameReader:
    """Takes octets, gives frames.

    Either `feed` octets that are somewhere else, or receive straight into `buffer()` and tell by `received()` how many;
    the two return the frames that are complete then, one after the other, and must be used up before the next call.
    After `Lost` the reader is of no more use until `hunt`.
    """

    def __init__(self, capacity: int = 4 * MAX_FRAME) -> None:
        if capacity < 2 * MAX_FRAME:
            raise ValueError(f"a reader needs room for two frames, {2 * MAX_FRAME} octets")
        self._octets = bytearray(capacity)
        self._view = memoryview(self._octets)
        self._start = 0
        self._end = 0
        self._nonce: bytes | None = None
        self._skippable = 0
        self.skipped = 0
        """Octets thrown away by the last hunt."""

    def hunt(self, nonce: bytes, skippable: int = 4 * 1024 * 1024) -> None:
        """Throws away everything up to the HELLO_ACK that carries `nonce`, which is then the next frame.

        What was received and not yet given out is thrown away at once. More than `skippable` octets are `Lost`.
        """
        if len(nonce) != NONCE_SIZE:
            raise ValueError(f"a nonce has {NONCE_SIZE} octets")
        self._nonce = nonce
        self._skippable = skippable
        self._start = self._end = self.skipped = 0

    def buffer(self) -> memoryview:
        """Returns free space, at least one frame long, to receive into."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._octets) - self._end < MAX_FRAME:
            # What is left is less than a frame, and the space behind was used up before: this moves few octets, seldom.
            self._octets[: self._end - self._start] = self._octets[self._start : self._end]
            self._end -= self._start
            self._start = 0
        return self._view[self._end :]

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Takes these octets; gives the frames they complete. Raises `Lost`."""
        rest = memoryview(data)
        while rest:
            space = self.buffer()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            yield from self.received(count)

    def received(self, count: int) -> Iterator[Frame]:
        """Takes `count` octets that were written into `buffer()`; gives the frames they complete. Raises `Lost`."""
        self._end += count
        if self._nonce is not None and not self._found(self._nonce):
            return
        octets, view = self._octets, self._view
        while self._end - self._start >= HEADER_SIZE:
            start = self._start
            magic, kind, flags, check, stream, length = _HEADER.unpack_from(octets, start)
            if magic != MAGIC or length > MAX_PAYLOAD or check != _check_at(octets, start):
                raise Lost(f"no frame header but {bytes(view[start : start + HEADER_SIZE]).hex()}")
            stop = start + HEADER_SIZE + length
            if self._end < stop + 4:
                return
            if octets[stop : stop + 4] != TRAILER:
                raise Lost("a frame without its trailer")
            self._start = stop + 4
            yield Frame(kind, flags, stream, view[start + HEADER_SIZE : stop])
            if self._nonce is not None:
                # The consumer began a hunt in the middle of the batch; what was left of it is gone.
                return

    def _found(self, nonce: bytes) -> bool:
        """Looks for the answer with the nonce; True when the reader stands at its header."""
        while True:
            at = self._octets.find(nonce, self._start, self._end)
            if at < 0:
                # Keep what may be the beginning of the answer: header and first fields, and all but the last octet of the nonce.
                self._skip(max(self._start, self._end - (_NONCE_AT + NONCE_SIZE - 1)))
                return False
            head = at - _NONCE_AT
            if head >= self._start and self._answers(head):
                self._skip(head)
                self._nonce = None
                return True
            self._skip(at + 1)

    def _answers(self, head: int) -> bool:
        """Says whether a HELLO_ACK has its header here, and between that and the nonce what belongs there."""
        magic, kind, _, check, _, length = _HEADER.unpack_from(self._octets, head)
        fits = magic == MAGIC and kind == FrameType.HELLO_ACK and length <= MAX_PAYLOAD
        before = _BEFORE_NONCE.unpack_from(self._octets, head + HEADER_SIZE)
        fits = fits and before == (Tag.VERSION, 4, Tag.NONCE, NONCE_SIZE)
        return bool(fits and check == _check_at(self._octets, head))

    def _skip(self, to: int) -> None:
        self.skipped += to - self._start
        self._start = to
        if self.skipped > self._skippable:
            raise Lost(f"no answer to HELLO in {self.skipped} octets")


def _check_at(octets: bytearray, start: int) -> int:
    """Fletcher-16 of the header at `start`, its check taken as 0."""
    header = octets[start : start + HEADER_SIZE]
    header[6] = header[7] = 0
    return checksum(header)
