"""Reads the log files of all roles as one: in the order of time, those lines that belong to something."""

import contextlib
import heapq
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hatchway.domain.egress_settings import MAX_SHARDS
from hatchway.supervisor.logs import KEPT
from hatchway.supervisor.settings import Settings

ROLES = (
    "supervisor",
    "launcher",
    "node",
    "control",
    "audit",
    "broker",
    *(f"egress-{shard}" for shard in range(MAX_SHARDS)),
)
LEVELS = ("debug", "info", "warning", "error", "critical")
MAX_LINE = 64 * 1024
"""Octets of one line; of a longer one, which no role of ours writes, the rest is skipped."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Which lines are shown: those that fit everything that is given."""

    roles: tuple[str, ...] = ROLES
    level: str = "debug"
    members: dict[str, str] = field(default_factory=dict)
    """For example `{"request_id": …}`."""

    def fits(self, line: Line) -> bool:
        """Whether a line is one of them."""
        level = str(line.get("level", "info"))
        loud = LEVELS.index(level) >= LEVELS.index(self.level) if level in LEVELS else True
        return loud and all(line.get(name) == value for name, value in self.members.items())


def files(settings: Settings, role: str) -> list[Path]:
    """The log files of a role, the oldest first."""
    newest = settings.supervisor_log if role == "supervisor" else settings.log / f"{role}.log"
    return [*(newest.with_name(f"{newest.name}.{number}") for number in range(KEPT, 0, -1)), newest]


def last(settings: Settings, wanted: Wanted, count: int) -> list[Line]:
    """The last `count` lines that are wanted, in the order of time. Files that cannot be read raise `OSError`."""
    by_role = []
    for role in wanted.roles:
        kept: deque[Line] = deque(maxlen=count)
        at = ""
        for path in files(settings, role):
            with contextlib.suppress(FileNotFoundError), Tail(path, role, from_start=True) as tail:
                for line in tail.read():
                    # What has no time of its own, a complaint of the interpreter above all, belongs to what stands before it.
                    at = line.setdefault("timestamp", at)
                    if wanted.fits(line):
                        kept.append(line)
        by_role.append(kept)
    merged = heapq.merge(*by_role, key=lambda line: str(line["timestamp"]))
    return list(deque(merged, maxlen=count))


class Tail:
    """Follows one file, which may be emptied meanwhile."""

    def __init__(self, path: Path, role: str, *, from_start: bool) -> None:
        self._role = role
        self._rest = b""
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._offset = 0 if from_start else os.fstat(self._fd).st_size

    def __enter__(self) -> "Tail":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self) -> Iterator[Line]:
        """The whole lines that have come since the last time."""
        if os.fstat(self._fd).st_size < self._offset:
            self._offset, self._rest = 0, b""
        while data := os.pread(self._fd, 1 << 20, self._offset):
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[:MAX_LINE]
            for line in lines:
                if line.strip():
                    yield self._parsed(line[:MAX_LINE])

    def _parsed(self, line: bytes) -> Line:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            found = {"event": line.decode("utf-8", "replace"), "level": "error"}
        return {"role": self._role, **found}
