"""What a record looks like: one line of printable ASCII, chained to the one before by its SHA-256. Pure.

```
{"sequence":7,"previous":"<hash of record 6>",…,"hash":"<SHA-256 of this line without this member>"}
```
What is hashed are the octets of the line, so that nobody has to agree on a canonical form of JSON. Everything but printable ASCII is escaped as
JSON allows: no value of a guest can begin a line, turn the direction of writing or speak to a terminal. Long values are cut, with their
digest in place of the rest.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hatchway.wire.audit import MAX_RECORD, Entry

GENESIS = "0" * 64
"""What stands in place of a hash before the first record."""
MAX_VALUE = 1024
"""Characters of one value."""
MAX_NAME = 128
MAX_ITEMS = 64
MAX_DEPTH = 6
MAX_LINE = 8 * MAX_RECORD
"""Octets of a line; only records of the journal about itself come near it."""
OWN = "journal"
"""The source of what the journal says of itself."""

_END = re.compile(rb',"hash":"([0-9a-f]{64})"\}')
_END_OCTETS = len(b',"hash":"') + 64 + len(b'"}')


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A line that was read, whose own hash is right. `Broken` otherwise."""

    sequence: int
    previous: str
    recorded: float
    """When the writer had it (Unix seconds, the writer's clock); `time` is the sender's."""
    time: float
    kind: str
    project: str
    sandbox_id: str
    generation: int
    actor: str
    request_id: str
    decision: str
    reason: str
    count: int
    data: dict[str, Any]
    source: str
    number: int
    hash: str


class Broken(ValueError):
    """A line that is no record, or not as it was written."""


_decoder = msgspec.json.Decoder(Record)


def line(entry: Entry, *, sequence: int, previous: str, source: str, number: int, recorded: float) -> tuple[bytes, str]:
    """The record as a line with its end, and its hash. Of what the journal says of itself nothing is cut."""
    record = {
        "sequence": sequence,
        "previous": previous,
        "recorded": round(recorded, 6),
        "time": round(entry.time, 6) if math.isfinite(entry.time) else 0.0,
        "kind": cut(entry.kind, MAX_NAME),
        "project": cut(entry.project, MAX_NAME),
        "sandbox_id": cut(entry.sandbox_id, MAX_NAME),
        "generation": entry.generation,
        "actor": cut(entry.actor, MAX_NAME),
        "request_id": cut(entry.request_id, MAX_NAME),
        "decision": cut(entry.decision, MAX_NAME),
        "reason": cut(entry.reason, MAX_NAME),
        "count": entry.count,
        "data": entry.data if source == OWN else plain(entry.data),
        "source": cut(source, MAX_NAME),
        "number": number,
    }
    body = _encode(record)
    if len(body) > MAX_RECORD and source != OWN:
        whole = _encode(record["data"])
        record["data"] = {"cut": f"sha256:{hashlib.sha256(whole).hexdigest()}", "octets": len(whole)}
        body = _encode(record)
    digest = hashlib.sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body[:-1], digest.encode()), digest


def read(raw: bytes) -> Record:
    """A line, with or without its end. Raises `Broken`."""
    text = raw.removesuffix(b"\n")
    found = _END.fullmatch(text[-_END_OCTETS:])
    if found is None or not text.startswith(b'{"sequence":'):
        raise Broken("it is not a record")
    digest = hashlib.sha256(text[:-_END_OCTETS] + b"}").hexdigest()
    if digest.encode() != found[1]:
        raise Broken("its hash is not that of its content")
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(f"it is not a record: {error}") from None


def plain(value: object, depth: int = 0) -> Any:
    """The value within the bounds of a record, of what JSON has."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else cut(str(value), MAX_VALUE)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return cut(value, MAX_VALUE)
    if isinstance(value, bytes | bytearray | memoryview):
        return cut(bytes(value).hex(), MAX_VALUE)
    if depth >= MAX_DEPTH:
        return cut(repr(value), MAX_VALUE)
    if isinstance(value, Mapping):
        items = list(value.items())
        kept = {cut(str(key), MAX_NAME): plain(item, depth + 1) for key, item in items[:MAX_ITEMS]}
        return kept if len(items) <= MAX_ITEMS else {**kept, "…": f"{len(items) - MAX_ITEMS} more"}
    if isinstance(value, list | tuple | set | frozenset):
        listed = list(value)
        shown = [plain(item, depth + 1) for item in listed[:MAX_ITEMS]]
        return shown if len(listed) <= MAX_ITEMS else [*shown, f"… {len(listed) - MAX_ITEMS} more"]
    return cut(str(value), MAX_VALUE)


def cut(text: str, most: int) -> str:
    """The text, when it is too long with the digest of the whole in place of its rest; halves of surrogates, which are no text, become marks."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    if len(text) <= most:
        return text
    whole = text.encode()
    tail = f"…[sha256:{hashlib.sha256(whole).hexdigest()} of {len(whole)} octets]"
    return text[: max(0, most - len(tail))] + tail


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
