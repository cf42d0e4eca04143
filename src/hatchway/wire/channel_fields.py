"""Fields, the payloads of the guest channel's frames: `tag u16, length u32, value`, little-endian.

Every tag has one type, checked in both directions; unknown tags are skipped, the last of a repeated one holds, except
for the lists ENV and ARG. See docs/protocols/guest-channel.md.
"""

import enum
import struct
from collections.abc import Iterable
from typing import Final


class Malformed(Exception):
    """A payload is not what its frame type or a field's type says."""


class Tag(enum.IntEnum):
    """What a field holds."""

    VERSION = 1
    NONCE = 2
    EPOCH = 3
    BOOT_ID = 4
    AGENT = 5
    UPTIME_NS = 6
    STATUS = 7
    MESSAGE = 8
    TIME_NS = 9
    ENTROPY = 10
    HOSTNAME = 11
    MACHINE_ID = 12
    ENV = 13
    ARG = 14
    CWD = 15
    USER = 16
    SIGNAL = 17
    SCOPE = 18
    OFFSET = 19
    LIMIT = 20
    FD = 21
    KEY = 22
    UID = 23
    GID = 24
    ROWS = 25
    COLS = 26
    FLAGS = 27
    TIMEOUT_MS = 28
    PID = 29
    EXIT_CODE = 30
    EXIT_SIGNAL = 31
    REASON = 32
    STDOUT_TOTAL = 33
    STDERR_TOTAL = 34
    STDIN_OFFSET = 35
    UTIME_US = 36
    STIME_US = 37
    MAXRSS_KIB = 38
    STATE = 39
    SIZE = 40
    STDOUT_ACK = 41
    STDERR_ACK = 42
    WALL_US = 43
    MEM_TOTAL_KIB = 44
    MEM_AVAILABLE_KIB = 45
    DISK_TOTAL = 46
    DISK_FREE = 47
    LIMIT_MEMORY = 48
    LIMIT_CPU_MS = 49
    LIMIT_NOFILE = 50
    LIMIT_PIDS = 51
    PORT = 52
    HOST = 53
    CPUS = 54
    PROCESSES = 55
    LOAD1_MILLI = 56
    LIMIT_FSIZE = 57
    CA = 58
    MEM_CACHED_KIB = 59


class Kind(enum.Enum):
    """The type of a field's value."""

    U32 = "u32"
    I32 = "i32"
    U64 = "u64"
    TEXT = "text"
    OCTETS = "octets"


_TEXT: Final = {
    Tag.BOOT_ID,
    Tag.AGENT,
    Tag.MESSAGE,
    Tag.HOSTNAME,
    Tag.MACHINE_ID,
    Tag.ENV,
    Tag.CWD,
    Tag.USER,
    Tag.KEY,
    Tag.HOST,
    Tag.CA,
}
_U32: Final = {
    Tag.VERSION,
    Tag.SIGNAL,
    Tag.SCOPE,
    Tag.FD,
    Tag.UID,
    Tag.GID,
    Tag.ROWS,
    Tag.COLS,
    Tag.FLAGS,
    Tag.PID,
    Tag.EXIT_SIGNAL,
    Tag.REASON,
    Tag.STATE,
    Tag.PORT,
    Tag.CPUS,
    Tag.PROCESSES,
    Tag.LOAD1_MILLI,
}


def _kind_of(tag: Tag) -> Kind:
    if tag in _TEXT:
        return Kind.TEXT
    if tag in _U32:
        return Kind.U32
    if tag in (Tag.STATUS, Tag.EXIT_CODE):
        return Kind.I32
    if tag in (Tag.NONCE, Tag.ENTROPY, Tag.ARG):
        return Kind.OCTETS
    return Kind.U64


KINDS: Final[dict[int, Kind]] = {int(tag): _kind_of(tag) for tag in Tag}
LISTS: Final = frozenset((int(Tag.ENV), int(Tag.ARG)))

_LENGTHS: Final[dict[int, tuple[int, int]]] = {
    int(Tag.NONCE): (16, 16),
    int(Tag.ENTROPY): (0, 512),
    int(Tag.HOSTNAME): (0, 64),
    int(Tag.MACHINE_ID): (32, 32),
    int(Tag.CA): (0, 16_384),
}
"""Shortest and longest value in octets, where a tag has such bounds."""

_HEAD = struct.Struct("<HI")
_INTEGERS: Final = {Kind.U32: struct.Struct("<I"), Kind.I32: struct.Struct("<i"), Kind.U64: struct.Struct("<Q")}
_HEX: Final = frozenset("0123456789abcdefABCDEF")

Value = int | str | bytes


def encode_fields(fields: Iterable[tuple[Tag, Value]]) -> bytes:
    """Returns the payload of these fields. Raises `ValueError` for a value that is not of its tag's type."""
    parts: list[bytes] = []
    for tag, value in fields:
        octets = _encode_value(tag, value)
        parts.append(_HEAD.pack(tag, len(octets)))
        parts.append(octets)
    return b"".join(parts)


def _encode_value(tag: Tag, value: Value) -> bytes:
    kind = KINDS[tag]
    packing = _INTEGERS.get(kind)
    if packing is not None:
        if not isinstance(value, int):
            raise ValueError(f"{tag.name} is a number, not {type(value).__name__}")
        try:
            return packing.pack(value)
        except struct.error:
            raise ValueError(f"{tag.name}: {value} is not a {kind.value}") from None
    if kind is Kind.TEXT:
        if not isinstance(value, str):
            raise ValueError(f"{tag.name} is text, not {type(value).__name__}")
        octets = value.encode()
    elif isinstance(value, bytes):
        octets = value
    else:
        raise ValueError(f"{tag.name} is octets, not {type(value).__name__}")
    problem = _problem(tag, octets)
    if problem is not None:
        raise ValueError(f"{tag.name} {problem}")
    return octets


def _problem(tag: int, octets: bytes) -> str | None:
    """Says what is wrong with the value of a text or octets field, if anything is."""
    bounds = _LENGTHS.get(tag)
    if bounds is not None and not bounds[0] <= len(octets) <= bounds[1]:
        return f"has {len(octets)} octets, not {bounds[0]} to {bounds[1]}"
    if (tag == Tag.ARG or KINDS[tag] is Kind.TEXT) and 0 in octets:
        return "holds a NUL"
    if tag == Tag.MACHINE_ID and not _HEX.issuperset(octets.decode(errors="replace")):
        return "is not hexadecimal"
    return None


class Fields:
    """The decoded fields of one payload. What is asked for and missing is `Malformed` (`number`, `text`) or None (`get_…`)."""

    __slots__ = ("_lists", "_values")

    def __init__(self, payload: bytes | memoryview) -> None:
        """Decodes all fields; raises `Malformed` for a field that ends beyond the payload or is not of its type."""
        self._values: dict[int, Value] = {}
        self._lists: dict[int, list[Value]] = {}
        at, end = 0, len(payload)
        while at < end:
            if end - at < 6:
                raise Malformed("a field without its head")
            tag, length = _HEAD.unpack_from(payload, at)
            at += 6
            if length > end - at:
                raise Malformed("a field that ends beyond its payload")
            kind = KINDS.get(tag)
            if kind is not None:
                value = _decode_value(tag, kind, payload[at : at + length])
                self._values[tag] = value
                if tag in LISTS:
                    self._lists.setdefault(tag, []).append(value)
            at += length

    def number(self, tag: Tag) -> int:
        """Returns a number that must be there."""
        value = self._values.get(tag)
        if not isinstance(value, int):
            raise Malformed(f"{tag.name} is missing")
        return value

    def get_number(self, tag: Tag) -> int | None:
        """Returns a number, or None."""
        value = self._values.get(tag)
        return value if isinstance(value, int) else None

    def text(self, tag: Tag, longest: int) -> str:
        """Returns a text that must be there, of at most `longest` characters."""
        value = self._values.get(tag)
        if not isinstance(value, str):
            raise Malformed(f"{tag.name} is missing")
        if len(value) > longest:
            raise Malformed(f"{tag.name} has {len(value)} characters, at most {longest} may come")
        return value

    def get_text(self, tag: Tag) -> str | None:
        """Returns a text, or None."""
        value = self._values.get(tag)
        return value if isinstance(value, str) else None

    def get_octets(self, tag: Tag) -> bytes | None:
        """Returns octets, or None."""
        value = self._values.get(tag)
        return value if isinstance(value, bytes) else None

    def all(self, tag: Tag) -> tuple[Value, ...]:
        """Returns all values of a list, in order."""
        return tuple(self._lists.get(tag, ()))

    def items(self) -> tuple[tuple[Tag, Value], ...]:
        """Returns every known field once (of a list the last), in order of first appearance."""
        return tuple((Tag(tag), value) for tag, value in self._values.items())


def _decode_value(tag: int, kind: Kind, raw: bytes | memoryview) -> Value:
    packing = _INTEGERS.get(kind)
    if packing is not None:
        if len(raw) != packing.size:
            raise Malformed(f"{Tag(tag).name} of {len(raw)} octets is no {kind.value}")
        number: int = packing.unpack(raw)[0]
        return number
    octets = bytes(raw)
    problem = _problem(tag, octets)
    if problem is not None:
        raise Malformed(f"{Tag(tag).name} {problem}")
    if kind is Kind.OCTETS:
        return octets
    try:
        return octets.decode()
    except UnicodeDecodeError:
        raise Malformed(f"{Tag(tag).name} is not UTF-8") from None
