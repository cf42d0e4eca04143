"""The name server that a sandbox sees: decisions and synthetic addresses, never a question to anybody else.

Pure: one message in, one out. `Responder.answer` takes what came over UDP or TCP and returns what is sent back. Its shape is fixed, one
question and at most one EDNS record, so that a reader of some lines has no choice to make that another reader would make differently.
Denied names are REFUSED, with the reason as an extended error, which `dig` and others show. Sources: RFC 1035 §4, RFC 6891 (EDNS),
RFC 8914 (extended errors), RFC 9460 (types 64 and 65).
"""

import enum
import ipaddress
import struct
from collections.abc import Callable
from dataclasses import dataclass

from hatchway.egress.client_hello import Malformed, host_name
from hatchway.egress.synthetic import NamesExhausted, SyntheticNames, is_synthetic

MAX_MESSAGE = 512
"""Octets of a message in either direction, over TCP too."""
TTL_S = 60
MAX_REASON = 160
"""Octets of the text of an extended error."""

_HEADER = struct.Struct(">6H")
_EDNS = struct.Struct(">2H2BHH")
_QUERY_OPCODE = 0
_IN = 1
_OPT = 41


class Type(enum.IntEnum):
    """Types of records that are answered with anything else than a refusal."""

    A = 1
    PTR = 12
    AAAA = 28
    SVCB = 64
    HTTPS = 65


class Code(enum.IntEnum):
    """Response codes."""

    NOERROR = 0
    FORMERR = 1
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


class _Bad(Exception):
    """The message is answered with this code; None: with nothing, since it is no question at all."""

    def __init__(self, code: Code | None) -> None:
        super().__init__(str(code))
        self.code = code


@dataclass(frozen=True)
class Question:
    """What was asked. `labels` are octets as they came."""

    labels: tuple[bytes, ...]
    type: int
    klass: int
    raw: bytes
    """Question section as it came: it is sent back in the same case, which some clients check."""
    edns: bool


@dataclass(frozen=True)
class Refusal:
    """Why a name gets no address: a stable code, and a text for people."""

    reason: str
    explanation: str


Decide = Callable[[str], Refusal | None]
"""May this canonical name be given an address?"""


@dataclass(frozen=True)
class Outcome:
    """What became of a message: the answer (None: nothing is sent), and for the record the name and the refusal."""

    answer: bytes | None
    name: str = ""
    type: int = 0
    refusal: Refusal | None = None


class Responder:
    """Answers for one sandbox."""

    def __init__(self, names: SyntheticNames, decide: Decide, nodata: Callable[[], bool] = lambda: False) -> None:
        """`nodata`: whether names exist without addresses, as the policy may want it."""
        self._names = names
        self._decide = decide
        self._nodata = nodata

    def answer(self, message: bytes) -> Outcome:
        """Answers one message. Never raises, whatever came."""
        if len(message) < _HEADER.size:
            return Outcome(None, refusal=Refusal("dns_malformed", "shorter than the header of a question"))
        number, flags, *counts = _HEADER.unpack_from(message)
        try:
            question = parse(message, flags, counts)
        except _Bad as bad:
            refusal = Refusal("dns_malformed", "not one plain question")
            if bad.code is None:
                return Outcome(None, refusal=refusal)
            return Outcome(_encode(number, flags, bad.code), refusal=refusal)
        name, denied, address = self._judge(question)
        if denied is not None:
            text = f"blocked by policy: {denied.explanation}"
            return Outcome(_encode(number, flags, Code.REFUSED, question, ede=text), name, question.type, denied)
        return Outcome(_encode(number, flags, Code.NOERROR, question, record=address), name, question.type)

    def too_many(self, message: bytes) -> bytes | None:
        """Answers a message of a sandbox that asks too fast, without looking at the name."""
        if len(message) < _HEADER.size:
            return None
        number, flags, *_ = _HEADER.unpack_from(message)
        return None if flags & 0x8000 else _encode(number, flags, Code.REFUSED)

    def _judge(self, question: Question) -> tuple[str, Refusal | None, bytes | None]:
        shown = shown_name(question.labels)
        if question.klass != _IN:
            return shown, Refusal("dns_class", "only the class IN is served"), None
        if question.type == Type.PTR:
            return self._reverse(shown)
        try:
            name = canonical(question.labels)
        except Malformed as error:
            return shown, Refusal("dns_name", error.explanation), None
        refusal = self._decide(name)
        if refusal is not None:
            return name, refusal, None
        if question.type in (Type.AAAA, Type.SVCB, Type.HTTPS) or (question.type == Type.A and self._nodata()):
            return name, None, None
        if question.type != Type.A:
            return name, Refusal("dns_type", "only addresses are answered"), None
        try:
            return name, None, self._names.bind(name).packed
        except NamesExhausted as error:
            return name, Refusal("names_exhausted", f"{error}; a sandbox gets no more"), None

    def _reverse(self, shown: str) -> tuple[str, Refusal | None, bytes | None]:
        refusal = Refusal("dns_type", "names are looked up for addresses that were given out here, no others")
        parts = shown.split(".")
        if len(parts) != 6 or parts[4:] != ["in-addr", "arpa"]:
            return shown, refusal, None
        try:
            address = str(ipaddress.IPv4Address(".".join(reversed(parts[:4]))))
        except ValueError:
            return shown, refusal, None
        name = self._names.name_of(address) if is_synthetic(address) else None
        if name is None:
            return shown, refusal, None
        return shown, None, b"".join(bytes((len(label),)) + label.encode() for label in name.split(".")) + b"\x00"


def parse(message: bytes, flags: int, counts: list[int]) -> Question:
    """Reads a message whose header was taken apart. Raises `_Bad`."""
    if flags & 0x8000:
        raise _Bad(None)
    if flags >> 11 & 15 != _QUERY_OPCODE:
        raise _Bad(Code.NOTIMP)
    if len(message) > MAX_MESSAGE or counts[0] != 1 or counts[1] or counts[2] or counts[3] > 1 or flags & 0x0200:
        raise _Bad(Code.FORMERR)
    labels: list[bytes] = []
    at = _HEADER.size
    while True:
        length = message[at] if at < len(message) else 255
        at += 1
        if length == 0:
            break
        # 64 and more would be a pointer or something unheard of: neither belongs into a question.
        if length > 63 or at + length > len(message) or at + length - _HEADER.size > 254:
            raise _Bad(Code.FORMERR)
        labels.append(message[at : at + length])
        at += length
    if at + 4 > len(message):
        raise _Bad(Code.FORMERR)
    kind, klass = struct.unpack_from(">2H", message, at)
    at += 4
    raw = message[_HEADER.size : at]
    if counts[3]:
        at = _check_edns(message, at)
    if at != len(message):
        raise _Bad(Code.FORMERR)
    return Question(tuple(labels), kind, klass, raw, counts[3] == 1)


def _check_edns(message: bytes, at: int) -> int:
    """Checks the one record that may come behind the question; returns where it ends."""
    if at + 11 > len(message) or message[at] != 0:
        raise _Bad(Code.FORMERR)
    kind, _, _, version, _, length = _EDNS.unpack_from(message, at + 1)
    if kind != _OPT:
        raise _Bad(Code.FORMERR)
    if version:
        raise _Bad(Code.BADVERS)
    return at + 11 + int(length)


def canonical(labels: tuple[bytes, ...]) -> str:
    """Returns labels as the name that policies know. Raises `Malformed`: a label with a dot in it, say, would become another name."""
    if any(b"." in label for label in labels):
        raise Malformed("dns_name", "a label of the name has a dot in it")
    return host_name(b".".join(labels))


def shown_name(labels: tuple[bytes, ...]) -> str:
    """Returns labels as text for the record, whatever octets they have."""
    return ".".join(
        "".join(chr(o) if 33 <= o <= 126 and o not in b".\\" else f"\\{o:03d}" for o in label.lower())
        for label in labels
    )


def _encode(
    number: int,
    flags: int,
    code: Code,
    question: Question | None = None,
    *,
    record: bytes | None = None,
    ede: str = "",
) -> bytes:
    # An answer with authority, recursion available so that stubs do not look further; opcode and "recursion desired" as they came.
    head = 0x8400 | flags & 0x7900 | 0x0080 | code & 15
    edns = (question is not None and question.edns) or code > 15
    parts = [_HEADER.pack(number, head, question is not None, record is not None, 0, edns)]
    if question is not None:
        parts.append(question.raw)
        if record is not None:
            parts.append(struct.pack(">3HIH", 0xC00C, question.type, _IN, TTL_S, len(record)) + record)
    if edns:
        option = b""
        if ede:
            text = ede.encode("utf-8")[:MAX_REASON].decode("utf-8", "ignore").encode()
            option = struct.pack(">3H", 15, 2 + len(text), 15) + text
        parts.append(struct.pack(">B2H2BHH", 0, _OPT, MAX_MESSAGE, code >> 4, 0, 0, len(option)) + option)
    return b"".join(parts)
