"""The journal on disk: appended to by one process, in groups that are durable or not there at all.

Everything here blocks, and is called by one thread at a time; `query` alone may be called beside it.
"""

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatchway.audit import lines, segments
from hatchway.audit.segments import Segment
from hatchway.audit.signing import Signer
from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.wire.audit import Append, Entry
from hatchway.wire.ballast import FULL, Ballast
from hatchway.wire.fault_points import reached
from hatchway.wire.small_files import sync_folder

MAX_SOURCES = 1024
"""Senders whose last number is known; of each start of a process there is one."""
RESERVE = 256 << 10
"""Octets that are held for the day when the disk is full, so that the journal can say so."""

RESUME = 512 << 10
"""Octets that have to be free before a journal whose disk was full goes on."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Bounds of a journal."""

    segment: int = 16 << 20
    """Octets after which a segment is sealed and the next begun."""
    keep: int = 4 << 30
    """Octets of all segments; beyond it the oldest sealed ones are removed."""
    keep_s: float = 400 * 86_400.0
    """Seconds after which a sealed segment is removed."""
    head_every: int = 1000
    """Records after which a signed head is due."""
    head_every_s: float = 10.0
    """Seconds after which records that no head covers get one."""


@dataclass
class _Staged:
    """What a group of records makes of the journal, before it is durable."""

    sequence: int
    previous: str
    content: bytearray
    records: list[tuple[lines.Record, int]]
    sources: dict[str, int]


class Journal:
    """An open journal. `Journal.open(folder)`; one process at a time has it."""

    def __init__(self, folder: Path, limits: Limits, now: Callable[[], float]) -> None:
        self._folder = folder
        self._limits = limits
        self._now = now
        self._lock = -1
        self._fd = -1
        self._sources: dict[str, int] = {}
        self._state = threading.Lock()
        """Guards what `query` reads: the list of segments and the index of the last."""
        self._refused_since: float | None = None
        self._refused = 0
        self._head_at = 0
        self._ballast = Ballast(folder / "reserve", RESERVE)
        self.segments: list[Segment] = []
        self.sequence = 0
        self.hash = lines.GENESIS
        self.error = ""
        """Why nothing can be appended now; empty when it can."""
        self.unsigned_since: float | None = None
        """Since when there are records that no head covers."""

    @classmethod
    def open(cls, folder: Path, limits: Limits | None = None, *, now: Callable[[], float] = time.time) -> "Journal":
        """Opens the journal in a folder, begins it if need be, and mends what a killed writer left.

        Raises `Unavailable` with `audit_in_use`, `audit_insecure` where others could write it, `audit_key`; and `OSError`.
        """
        journal = cls(folder, limits or Limits(), now)
        try:
            journal._open()
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def octets(self) -> int:
        """Of all segments."""
        with self._state:
            return sum(segment.index.octets for segment in self.segments)

    def last_of(self, source: str) -> int:
        """The number of a sender's last durable record."""
        return self._sources.get(source, 0)

    def snapshot(self) -> list[Segment]:
        """The segments as they are now, for a reader; what is appended later is not in them."""
        with self._state:
            *sealed, last = self.segments
            index = last.index
            copied = segments.Index(
                first=index.first,
                last=index.last,
                first_hash=index.first_hash,
                last_hash=index.last_hash,
                octets=index.octets,
                first_time=index.first_time,
                last_time=index.last_time,
                offsets=list(index.offsets),
                sandboxes=None if index.sandboxes is None else set(index.sandboxes),
                projects=None if index.projects is None else set(index.projects),
                kinds=None if index.kinds is None else set(index.kinds),
            )
            return [*sealed, Segment(last.path, last.first, copied)]

    def append(self, groups: Sequence[Append]) -> None:
        """Makes the records durable, all or none; what is there already is left out.

        Raises `HostExhausted("audit_full")` when the disk has no room, and `OSError` when it fails, after which nobody knows what it
        holds: the process has to end, and the next one reads it again.
        """
        staged = self._stage_nothing()
        if self._refused_since is not None:
            self._require_room(groups)
            told = {"refused": self._refused, "since": self._refused_since}
            self._stage_own(staged, "journal.resumed", told)
        for group in groups:
            self._stage_group(staged, group)
        if staged.records:
            try:
                self._commit(staged)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._refuse(_records(groups), error)
                raise _full(error.strerror or "") from error
            self._refused, self._refused_since, self.error = 0, None, ""
        if self.sequence - self._head_at >= self._limits.head_every:
            self.sign()
        if self.segments[-1].index.octets >= self._limits.segment:
            self._rotate()

    def sign(self) -> None:
        """Appends a signed head when there are records that none covers. A full disk delays it."""
        if self.unsigned_since is None:
            return
        staged = self._stage_nothing()
        self._stage_own(staged, "journal.head", self._signed_head(staged))
        self._try(staged)

    def retain(self) -> None:
        """Removes sealed segments that are too old or too many, after a signed record of what they were."""
        now, removed = self._now(), []
        total = self.octets
        for segment in self.segments[:-1]:
            index = segment.index
            old = index.last_time < now - self._limits.keep_s
            if not old and total <= self._limits.keep:
                break
            total -= index.octets
            removed.append(
                {
                    "first": index.first,
                    "last": index.last,
                    "previous": index.first_hash,
                    "last_hash": index.last_hash,
                    "octets": index.octets,
                    "why": "age" if old else "size",
                }
            )
            if len(removed) == lines.MAX_ITEMS:
                break
        if not removed:
            return
        statement = {"segments": removed}
        told = {**statement, "key": self._signer.key_id, "signature": self._signer.removal(statement)}
        staged = self._stage_nothing()
        self._stage_own(staged, "journal.removed", told)
        if self._try(staged):
            reached("file", "audit-removal")
            self._drop(len(removed))

    def keep_reserve(self) -> None:
        """Takes the reserve again as soon as there is room."""
        if not self._ballast.whole:
            self._ballast.keep()

    def age(self, since: float) -> float:
        """Seconds since then, on the journal's clock."""
        return self._now() - since

    def close(self) -> None:
        """Lets the journal go. Idempotent."""
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    @property
    def public_key(self) -> str:
        """What a check is pinned to."""
        return self._signer.public

    # -- opening

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise Unavailable(
                "audit_insecure",
                f"{self._folder} is not the audit writer's alone.",
                f"`chmod 700 {self._folder}`, and give it to the user of the audit process.",
            )
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                "audit_in_use", f"Another process appends to {self._folder}.", "End that one first."
            ) from None
        self._signer = Signer(self._folder)
        self._ballast.keep()
        paths = segments.listed(self._folder)
        for first, path in paths[:-1]:
            self.segments.append(Segment(path, first, segments.load_index(path, first)))
        repaired = self._open_last(*paths[-1]) if paths else None
        if not paths:
            self._begin_segment(1)
            self._say("journal.begun", {"key": self._signer.key_id, "public": self._signer.public})
        self._finish_removals()
        if repaired is not None:
            self._say("journal.repaired", repaired)
        if paths:
            self._say("journal.opened", {"key": self._signer.key_id, "public": self._signer.public})

    def _open_last(self, first: int, path: Path) -> dict[str, Any] | None:
        """Takes up the last segment; what is behind its last good record is set aside. Returns what is to be said of that."""
        index = segments.build_index(segments.raw_lines(path), first)
        size = path.stat().st_size
        if not index.octets:
            index = segments.empty(first, self.segments[-1].index.last_hash if self.segments else lines.GENESIS)
        self.segments.append(Segment(path, first, index))
        self.sequence, self.hash = index.last, index.last_hash
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        repaired = None
        if size > index.octets:
            repaired = self._set_aside(path, index.octets, size)
        # A segment begins with what was known of the senders; one that was only just begun has nothing yet.
        for known in self.segments[-1 if index.octets else -2 :]:
            for raw in segments.raw_lines(known.path, 0, known.index.octets):
                self._learn(lines.read(raw))
        if index.octets:
            self.unsigned_since = self._now()
        return repaired

    def _set_aside(self, path: Path, start: int, size: int) -> dict[str, Any]:
        """A line without its end was never acknowledged. Whole lines that do not fit the chain were changed by somebody: they are kept."""
        tail = list(segments.raw_lines(path, start, size))
        whole = sum(raw.endswith(b"\n") for raw in tail)
        content = b"".join(tail)
        told: dict[str, Any] = {
            "octets": len(content),
            "lines": whole,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        if whole:
            aside = path.with_name(f"{path.name}.aside-{self.sequence}")
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                segments.write_all(fd, content)
                os.fsync(fd)
            finally:
                os.close(fd)
            told["aside"] = aside.name
            log.error(
                "%d lines behind record %d do not fit the chain; they are kept in %s", whole, self.sequence, aside
            )
        os.truncate(path, start)
        os.fsync(self._fd)
        return told

    def _learn(self, record: lines.Record) -> None:
        """What the last segment says of senders, and of its heads."""
        if record.source == lines.OWN:
            if record.kind == "journal.sources":
                for source, number in record.data.items():
                    self._remember(source, int(number))
            if record.kind == "journal.head":
                self._head_at = record.sequence
        else:
            self._remember(record.source, record.number)

    def _remember(self, source: str, number: int) -> None:
        last = self._sources.pop(source, 0)  # the one that was heard of last stands last
        self._sources[source] = max(last, number)
        while len(self._sources) > MAX_SOURCES:
            del self._sources[next(iter(self._sources))]

    def _finish_removals(self) -> None:
        """Segments whose removal was recorded, by a writer that was killed before it was done."""
        named: set[int] = set()
        for segment in self.segments[-2:]:
            for raw in segments.raw_lines(segment.path, 0, segment.index.octets):
                if b'"kind":"journal.removed"' in raw and b'"source":"journal"' in raw:
                    named.update(one["first"] for one in lines.read(raw).data["segments"])
        count = 0
        while count < len(self.segments) - 1 and self.segments[count].first in named:
            count += 1
        self._drop(count)

    # -- appending

    def _stage_group(self, staged: _Staged, group: Append) -> None:
        """The records of a group that are not there yet."""
        source = lines.cut(group.source, lines.MAX_NAME)
        last = staged.sources.get(source, self._sources.get(source, 0))
        if group.entries and group.first > last + 1:
            # The sender was heard before, by a journal that is gone: what is lacking is not in this one.
            self._stage_own(staged, "journal.gap", {"source": source, "from": last + 1, "to": group.first - 1})
        for number, entry in enumerate(group.entries, group.first):
            if number > last:
                self._stage(staged, entry, source, number)
                staged.sources[source] = last = number

    def _stage_nothing(self) -> _Staged:
        """A group to which records can be added; a new segment begins with what is known of the senders."""
        staged = _Staged(self.sequence, self.hash, bytearray(), [], {})
        if self._sources and not self.segments[-1].index.octets:
            self._stage_own(staged, "journal.sources", dict(self._sources))
        return staged

    def _stage_own(self, staged: _Staged, kind: str, data: dict[str, Any]) -> None:
        entry = Entry(kind=kind, time=self._now(), actor="audit", data=data)
        self._stage(staged, entry, lines.OWN, staged.sequence + 1)

    def _stage(self, staged: _Staged, entry: Entry, source: str, number: int) -> None:
        staged.sequence += 1
        raw, staged.previous = lines.line(
            entry,
            sequence=staged.sequence,
            previous=staged.previous,
            source=source,
            number=number,
            recorded=self._now(),
        )
        staged.content += raw
        staged.records.append((lines.read(raw), len(raw)))

    def _commit(self, staged: _Staged) -> None:
        """Makes it durable, then the journal's state. Raises `OSError`, leaving the file as it was."""
        segment = self.segments[-1]
        reached("file", "audit-append")
        try:
            segments.write_all(self._fd, bytes(staged.content))
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, segment.index.octets)
            raise
        reached("replaced", "audit-append")
        with self._state:
            for record, octets in staged.records:
                segment.index.note(record, octets)
            self.sequence, self.hash = staged.sequence, staged.previous
        for source, number in staged.sources.items():
            self._remember(source, number)
        last = staged.records[-1][0]
        if last.kind == "journal.head":
            self._head_at, self.unsigned_since = last.sequence, None
        elif self.unsigned_since is None:
            self.unsigned_since = self._now()

    def _say(self, kind: str, data: dict[str, Any]) -> None:
        """Appends a record of the journal about itself; on a full disk at the cost of the reserve. Raises `OSError`."""
        while True:
            staged = self._stage_nothing()
            self._stage_own(staged, kind, data)
            try:
                return self._commit(staged)
            except OSError as error:
                if error.errno not in FULL or not self._ballast.give():
                    raise

    def _try(self, staged: _Staged) -> bool:
        """Commits what can wait for a disk with room."""
        try:
            self._commit(staged)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        return True

    def _require_room(self, groups: Sequence[Append]) -> None:
        """A journal that was refused goes on when there is room for more than the next few records: what the reserve gave is not theirs."""
        room = os.statvfs(self._folder)
        if room.f_bavail * room.f_frsize < RESUME:
            self._refused += _records(groups)
            raise _full(f"less than {RESUME >> 10} KiB are free")

    def _refuse(self, records: int, error: OSError) -> None:
        """Says once, from the reserve, that the disk is full; how many were refused is said when there is room again."""
        self._refused += records
        self.error = f"the disk is full: {error.strerror}"
        if self._refused_since is not None:
            return
        self._refused_since = self._now()
        log.error("the audit journal cannot be appended to: %s", error)
        try:
            self._say("journal.refused", {"error": error.strerror or "", "records": records})
        except OSError as again:
            if again.errno not in FULL:
                raise
            log.error("the reserve of the audit journal was not enough to record that it is full")

    def _signed_head(self, staged: _Staged) -> dict[str, Any]:
        sequence = staged.sequence + 1
        return {"key": self._signer.key_id, "signature": self._signer.head(sequence, staged.previous)}

    # -- segments

    def _begin_segment(self, first: int) -> None:
        path = self._folder / segments.name_of(first)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        sync_folder(self._folder)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        with self._state:
            self.segments.append(Segment(path, first, segments.empty(first, self.hash)))

    def _rotate(self) -> None:
        """Seals the segment with a head, and begins the next one with what is known of the senders. A full disk delays it."""
        self.sign()
        if self.unsigned_since is not None:
            return
        sealed = self.segments[-1]
        try:
            segments.store_index(sealed.path, sealed.index)
            self._begin_segment(self.sequence + 1)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.warning("the next segment of the audit journal is not begun, its disk is full: %s", error)
            return
        self.retain()

    def _drop(self, count: int) -> None:
        """Removes the oldest segments; their removal is recorded."""
        for segment in self.segments[:count]:
            segments.remove(segment.path)
        if count:
            sync_folder(self._folder)
            with self._state:
                del self.segments[:count]


def _records(groups: Sequence[Append]) -> int:
    return sum(len(group.entries) for group in groups)


def _full(why: str) -> HostExhausted:
    return HostExhausted(
        "audit_full",
        f"The disk of the audit journal is full: {why}.",
        "Free space on its file system, or let older records go (`[audit]` in the settings); nothing is let through until then.",
    )
