"""What a session's process wrote, kept on disk within a bound, with exact account of what was not kept.

A stream is a row of segment files `NAME.OFFSET`, each holding the octets from `OFFSET` on; what lies between the end of
one and the start of the next is a gap. Nothing else describes them, so a process that is killed at any instant leaves a
spool that `Spool.open` reads back: the last segment ends where the last write ended. Octets are handed to the kernel
before they count as stored; they are not fsynced, because a process in a VM does not outlive a crash of the host either.
"""

import contextlib
import errno
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

STDOUT, STDERR = 1, 2
NAMES = {STDOUT: "stdout", STDERR: "stderr"}
MAX_OFFSET = 2**62
"""A guest that claims more is lying: at 1 GiB/s this takes a century."""
_TAIL_KEEP = 64 * 1024
_TAIL_MAX = 128 * 1024
_MAX_CAUSES = 64
_LEAST = 4
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SpoolLimits:
    """Bounds of one session's spool, in octets."""

    keep: int = 256 * 1024 * 1024
    """Both streams together; beyond it the oldest segments of the larger stream are dropped."""
    segment: int = 4 * 1024 * 1024
    disk_reserve: int = 256 * 1024 * 1024
    """Free space of the disk below which output is dropped (a gap) rather than stored."""

    def __post_init__(self) -> None:
        if self.segment < 4096 or self.keep < 4 * self.segment:
            raise ValueError("a segment must have at least 4096 octets, and a spool room for four segments")


@dataclass(frozen=True, slots=True)
class Gap:
    """Octets `start` to `end` (exclusive) are not there. `cause`: `bound disk_full write_failed lost unreadable`."""

    start: int
    end: int
    cause: str


@dataclass(slots=True)
class _Segment:
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


class Stream:
    """The kept part of one output stream. Offsets count the octets that the process wrote, from 0."""

    def __init__(self, folder: Path, name: str, limits: SpoolLimits) -> None:
        self.name = name
        self.end = 0
        """Offset behind the last octet that arrived, stored or not."""
        self.kept = 0
        """Octets on disk."""
        self._prefix = f"{folder}/{name}."
        self._folder = str(folder)
        self._limits = limits
        self._max_segments = 2 * (limits.keep // limits.segment) + 16
        self._segments: deque[_Segment] = deque()
        self._fd: int | None = None
        self._tail = bytearray()
        self._tail_start = 0
        self._causes: deque[tuple[int, int, str]] = deque(maxlen=_MAX_CAUSES)
        self._failing = False
        self._sealed = False

    @property
    def first(self) -> int:
        """Offset of the oldest octet that is kept; `end` when there is none."""
        return self._segments[0].start if self._segments else self.end

    @property
    def segments(self) -> int:
        """How many files the stream has."""
        return len(self._segments)

    @property
    def crowded(self) -> bool:
        """Tells that there are more files than the bound admits (only gaps after gaps make so many)."""
        return len(self._segments) > self._max_segments

    def path_of(self, start: int) -> str:
        """Returns the path of the segment that starts at this offset."""
        return f"{self._prefix}{start:020d}"

    def recover(self, starts: list[int]) -> None:
        """Takes over the segments that a former process left; `starts` are their offsets."""
        for start in sorted(starts):
            path = self.path_of(start)
            size = os.stat(path).st_size
            if size == 0 or start < self.end:
                os.unlink(path)
                continue
            if start > self.end and self._segments:
                self._note(self.end, start, "lost")
            self._segments.append(_Segment(start, size))
            self.kept += size
            self.end = start + size

    def append(self, offset: int, data: memoryview | bytes) -> None:
        """Stores `data`, which the process wrote at `offset`; what was stored before is skipped, what is missing is a gap.

        Never raises for a full or failing disk: those octets are a gap then.
        """
        self._sealed = False
        end = offset + len(data)
        if not data or end <= self.end or end > MAX_OFFSET:
            return
        view = memoryview(data)
        if offset < self.end:
            view = view[self.end - offset :]
            offset = self.end
        elif offset > self.end:
            self._note(self.end, offset, "lost")
            self._roll()
            self._advance_unstored(offset)
        stored = self._write(offset, view)
        self._remember(offset, view[:stored])
        self.end = offset + stored
        if self.end < end:
            self._advance_unstored(end)

    def advance(self, end: int, cause: str) -> None:
        """Declares everything up to `end` as having existed and not being here."""
        if self.end < end <= MAX_OFFSET:
            self._note(self.end, end, cause)
            self._roll()
            self._advance_unstored(end)

    def drop_oldest(self) -> bool:
        """Removes the oldest segment, unless it is the one being written; tells whether it did."""
        if len(self._segments) < (1 if self._sealed else 2):
            return False
        segment = self._segments.popleft()
        self.kept -= segment.size
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path_of(segment.start))
        return True

    def locate(self, position: int) -> tuple[int, int] | Gap | None:
        """Returns start and end of the segment that holds `position`, the gap at it, or None at the end of what arrived."""
        if position >= self.end:
            return None
        if position < self.first:
            return Gap(position, self.first, self._cause(position, "bound"))
        low, high = 0, len(self._segments)
        while low < high:  # the last segment that starts at or before the position
            middle = (low + high) // 2
            if self._segments[middle].start <= position:
                low = middle + 1
            else:
                high = middle
        segment = self._segments[low - 1]
        if position < segment.end:
            return segment.start, segment.end
        until = self._segments[low].start if low < len(self._segments) else self.end
        return Gap(position, until, self._cause(position, "lost"))

    def from_memory(self, position: int, limit: int) -> bytes | None:
        """Returns up to `limit` octets from the newest ones, or None when they are not in memory."""
        start = position - self._tail_start
        if start < 0 or start >= len(self._tail) or position < self.first:
            return None
        return bytes(memoryview(self._tail)[start : start + limit])

    def seal(self) -> None:
        """Nothing more will come: gives file and memory back. Reading goes on from disk."""
        self._sealed = True
        self._roll()
        self._tail = bytearray()
        self._tail_start = self.end

    def _write(self, offset: int, view: memoryview) -> int:
        done = 0
        try:
            while done < len(view):
                fd, segment = self._writable(offset + done)
                count = os.write(fd, view[done : done + self._limits.segment - segment.size])
                segment.size += count
                self.kept += count
                done += count
        except OSError as error:
            cause = "disk_full" if error.errno in _NO_SPACE else "write_failed"
            if not self._failing:
                log.error("output of %s is dropped: %s", self._prefix, error)
            self._failing = True
            self._note(offset + done, offset + len(view), cause)
            self._roll()
        else:
            self._failing = False
        return done

    def _writable(self, offset: int) -> tuple[int, _Segment]:
        last = self._segments[-1] if self._segments else None
        if last is not None and last.end == offset and last.size < self._limits.segment:
            if self._fd is None:  # what a former process left unfinished
                self._fd = os.open(self.path_of(last.start), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            return self._fd, last
        self._roll()
        room = os.statvfs(self._folder)
        if room.f_bavail * room.f_frsize < self._limits.disk_reserve:
            raise OSError(errno.ENOSPC, "the disk's reserve of free space was reached")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(self.path_of(offset), flags, 0o600)
        last = _Segment(offset, 0)
        self._segments.append(last)
        return self._fd, last

    def _roll(self) -> None:
        """Closes the current file; one that never got an octet goes away."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._segments and self._segments[-1].size == 0:
            segment = self._segments.pop()
            with contextlib.suppress(OSError):
                os.unlink(self.path_of(segment.start))

    def _remember(self, offset: int, view: memoryview) -> None:
        if self._tail_start + len(self._tail) != offset:
            self._tail.clear()
            self._tail_start = offset
        self._tail += view
        if len(self._tail) > _TAIL_MAX:
            surplus = len(self._tail) - _TAIL_KEEP
            del self._tail[:surplus]
            self._tail_start += surplus

    def _advance_unstored(self, end: int) -> None:
        self.end = end
        self._tail.clear()
        self._tail_start = end

    def _note(self, start: int, end: int, cause: str) -> None:
        if self._causes and self._causes[-1][1] == start and self._causes[-1][2] == cause:
            start = self._causes.pop()[0]
        self._causes.append((start, end, cause))

    def _cause(self, position: int, otherwise: str) -> str:
        return next((cause for start, end, cause in self._causes if start <= position < end), otherwise)


class Budget:
    """What all sessions of one sandbox may keep together, in octets."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def over(self) -> bool:
        """More is kept than may be."""
        return self.used > self.limit


class Spool:
    """Both streams of one session in one folder, under one bound, and counted in the `budget` that it shares with others."""

    def __init__(self, folder: Path, limits: SpoolLimits, budget: Budget | None = None) -> None:
        self._limits = limits
        self._budget = budget
        self._counted = 0
        self.streams = {fd: Stream(folder, name, limits) for fd, name in NAMES.items()}

    @classmethod
    def open(cls, folder: Path, limits: SpoolLimits, budget: Budget | None = None) -> "Spool":
        """Reads back what is on disk."""
        spool = cls(folder, limits, budget)
        found: dict[str, list[int]] = {name: [] for name in NAMES.values()}
        for entry in os.scandir(folder):
            name, _, start = entry.name.partition(".")
            if name in found and start.isdecimal():
                found[name].append(int(start))
        for stream in spool.streams.values():
            stream.recover(found[stream.name])
        spool._count()
        return spool

    @property
    def over_budget(self) -> bool:
        """It and the others that share its budget keep more than they may."""
        return self._budget is not None and self._budget.over

    @property
    def kept(self) -> int:
        """Octets on disk, of both streams."""
        return self.streams[STDOUT].kept + self.streams[STDERR].kept

    def stored(self) -> tuple[int, int]:
        """Offsets behind the last octets of stdout and stderr."""
        return self.streams[STDOUT].end, self.streams[STDERR].end

    def append(self, fd: int, offset: int, data: memoryview | bytes) -> None:
        """Stores output; drops the oldest of the larger stream beyond the bound, so that a flood spares the other one."""
        stream = self.streams[fd]
        stream.append(offset, data)
        while self.kept > self._limits.keep or stream.crowded:
            victim = stream if stream.crowded else max(self.streams.values(), key=lambda one: one.kept)
            if not victim.drop_oldest():
                break
        self._count()

    def drop_oldest(self) -> bool:
        """Gives up the oldest part of the larger stream, which is a gap from then on; tells whether there was anything to give.

        The part that is being written stays; a sealed spool gives up all.
        """
        dropped = any(
            stream.drop_oldest() for stream in sorted(self.streams.values(), key=lambda one: one.kept, reverse=True)
        )
        self._count()
        return dropped

    def forget(self) -> None:
        """Its files are removed, or no longer ours to count."""
        if self._budget is not None:
            self._budget.used -= self._counted
        self._counted = 0
        self._budget = None

    def _count(self) -> None:
        if self._budget is not None:
            kept = self.kept
            self._budget.used += kept - self._counted
            self._counted = kept

    def seal(self) -> None:
        """Gives files and memory back; see `Stream.seal`."""
        for stream in self.streams.values():
            stream.seal()


class Cursor:
    """One reader's place in one stream. A reader that lags costs nobody anything but its own file descriptor."""

    def __init__(self, stream: Stream, position: int) -> None:
        self.stream = stream
        self.position = position
        self._fd: int | None = None
        self._fd_start = -1

    def peek(self, limit: int) -> bytes | Gap | None:
        """Returns up to `limit` octets at the position, a gap there, or None when nothing more has arrived; does not move."""
        data = self.stream.from_memory(self.position, limit)
        if data is not None:
            return data
        place = self.stream.locate(self.position)
        if place is None or isinstance(place, Gap):
            return place
        start, end = place
        data = self._read(start, self.position, min(limit, end - self.position))
        if not data:
            return Gap(self.position, end, "unreadable")
        if len(data) < min(_LEAST, limit):  # so that a character is never cut by the border of two files
            place = self.stream.locate(self.position + len(data))
            if isinstance(place, tuple):
                return data + self._read(place[0], place[0], min(limit - len(data), place[1] - place[0]))
        return data

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read(self, start: int, position: int, count: int) -> bytes:
        try:
            if self._fd is None or self._fd_start != start:
                self.close()
                self._fd = os.open(self.stream.path_of(start), os.O_RDONLY | os.O_CLOEXEC)
                self._fd_start = start
            return os.pread(self._fd, count, position - start)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            log.error("kept output %s cannot be read: %s", self.stream.path_of(start), error)
            return b""
