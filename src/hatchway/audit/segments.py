"""The files of a journal: `NNNNNNNNNNNN.jsonl`, named by its first record, and beside each an index of what is in it.

An index saves reading and proves nothing: one that is missing or wrong is made anew from its segment.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hatchway.audit.lines import MAX_LINE, Broken, Record, read
from hatchway.wire.small_files import replace_file

SUFFIX = ".jsonl"
INDEX_SUFFIX = ".index"
EVERY = 64
"""Records between two places that the index knows."""
MAX_NAMES = 512
"""Sandboxes and projects that an index knows; with more it knows none, and everything is read."""


class Index(msgspec.Struct, kw_only=True):
    """What is in a segment. A set is None where there were too many."""

    first: int
    last: int
    first_hash: str = ""
    """`previous` of the first record."""
    last_hash: str
    octets: int
    first_time: float = 0.0
    last_time: float = 0.0
    offsets: list[int] = []
    """Where the records `first`, `first + EVERY`, … begin."""
    sandboxes: set[str] | None = set()
    projects: set[str] | None = set()
    kinds: set[str] | None = set()

    def note(self, record: Record, octets: int) -> None:
        """Takes up a record that was appended."""
        if (record.sequence - self.first) % EVERY == 0:
            self.offsets.append(self.octets)
        if record.sequence == self.first:
            self.first_hash, self.first_time, self.last_time = record.previous, record.time, record.time
        self.last, self.last_hash = record.sequence, record.hash
        self.octets += octets
        self.first_time, self.last_time = min(self.first_time, record.time), max(self.last_time, record.time)
        self.sandboxes = _with(self.sandboxes, record.sandbox_id)
        self.projects = _with(self.projects, record.project)
        self.kinds = _with(self.kinds, record.kind)


@dataclass
class Segment:
    """One file and what is known of it."""

    path: Path
    first: int
    index: Index


def empty(first: int, previous: str) -> Index:
    """The index of a segment without records."""
    return Index(first=first, last=first - 1, last_hash=previous, octets=0)


def name_of(first: int) -> str:
    """The file that begins with this record."""
    return f"{first:012d}{SUFFIX}"


def listed(folder: Path) -> list[tuple[int, Path]]:
    """The segments of a folder by their first record."""
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        stem = path.name.removesuffix(SUFFIX)
        if path.name.endswith(SUFFIX) and stem.isascii() and stem.isdecimal():
            found.append((int(stem), path))
    return sorted(found)


def raw_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The lines of a file from octet `start` to `end`; a last one without its end comes as it is. A longer one than `MAX_LINE` comes in pieces."""
    with path.open("rb") as file:
        file.seek(start)
        left = end - start if end is not None else None
        while left is None or left > 0:
            raw = file.readline(MAX_LINE if left is None else min(MAX_LINE, left))
            if not raw:
                return
            if left is not None:
                left -= len(raw)
            yield raw


def load_index(path: Path, first: int) -> Index:
    """The index of a sealed segment, read or made anew. Raises `OSError`; records that cannot be read are left out."""
    file = path.with_suffix(INDEX_SUFFIX)
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        index = msgspec.json.decode(file.read_bytes(), type=Index)
        if index.first == first and index.octets == path.stat().st_size:
            return index
    index = build_index(raw_lines(path), first)
    with contextlib.suppress(OSError):  # it is made anew next time
        store_index(path, index)
    return index


def build_index(raws: Iterable[bytes], first: int) -> Index:
    """The index of these lines, up to the first that is no record of the chain."""
    index: Index | None = None
    for raw in raws:
        try:
            record = read(raw)
        except Broken:
            break
        if index is None:
            index = empty(first, record.previous)
        if record.sequence != index.last + 1 or record.previous != index.last_hash or not raw.endswith(b"\n"):
            break
        index.note(record, len(raw))
    return empty(first, "") if index is None else index


def store_index(path: Path, index: Index) -> None:
    """Keeps it beside its segment. Raises `OSError`."""
    replace_file(path.with_suffix(INDEX_SUFFIX), msgspec.json.encode(index), durable=False)


def remove(path: Path) -> int:
    """Removes a segment and its index; returns its octets. Raises `OSError`."""
    octets = path.stat().st_size if path.exists() else 0
    path.unlink(missing_ok=True)
    path.with_suffix(INDEX_SUFFIX).unlink(missing_ok=True)
    return octets


def write_all(fd: int, content: bytes) -> None:
    """Writes all of it. Raises `OSError`; a part may have been written then."""
    rest: memoryview = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _with(known: set[str] | None, name: str) -> set[str] | None:
    if known is None or (name not in known and len(known) >= MAX_NAMES):
        return None
    known.add(name)
    return known


def covers(segment: Segment, project: str | None, sandbox_id: str | None) -> bool:
    """Whether records of this project and sandbox may be in the segment."""
    index = segment.index
    return (project is None or index.projects is None or project in index.projects) and (
        sandbox_id is None or index.sandboxes is None or sandbox_id in index.sandboxes
    )


def has_kind(segment: Segment, kinds: Sequence[str]) -> bool:
    """Whether records whose kind begins with one of these are in the segment; none given: all do."""
    known = segment.index.kinds
    return not kinds or known is None or any(name.startswith(tuple(kinds)) for name in known)
