"""Schedules of snapshots: when the next one is due, and which of those that a schedule made are kept. Pure; times are Unix seconds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

MIN_EVERY_S = 5.0
MAX_EVERY_S = 366 * 24 * 3600.0
MAX_RULES = 16

Every = Annotated[float, Meta(ge=MIN_EVERY_S, le=MAX_EVERY_S)]
Age = Annotated[float, Meta(ge=0, le=10 * MAX_EVERY_S)]


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of snapshots older than `older_than_s`, one in every `one_per_s` seconds is kept; null: none is."""

    older_than_s: Age
    one_per_s: Every | None = None


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often snapshots are made while the sandbox runs, and which are kept; what nothing here thins is kept.

    `max_bytes` bounds what all of them take: the oldest go first, the newest stays in any case.
    """

    disk_every_s: Every | None = None
    full_every_s: Every | None = None
    keep: Annotated[tuple[Keep, ...], Meta(max_length=MAX_RULES)] = ()
    max_bytes: Annotated[int, Meta(ge=0, le=2**60)] | None = None


@dataclass(frozen=True)
class Point:
    """A snapshot that a schedule made."""

    id: str
    kind: str
    made_at: float
    size: int
    """Octets."""


@dataclass(frozen=True)
class Dropped:
    """A snapshot that goes, and why: `thinned`, `max_age` or `max_bytes`."""

    id: str
    why: str


def next_due(last_due: float | None, every_s: float | None, now: float) -> float | None:
    """When the next one is made: on the beat of those before it, and never several for a time in which none could be made."""
    if every_s is None:
        return None
    if last_due is None or last_due > now + every_s:
        return now + every_s
    return last_due + (math.floor(max(0.0, now - last_due) / every_s) + 1) * every_s


def thin(points: Iterable[Point], schedule: Schedule, now: float) -> list[Dropped]:
    """Which of the points go. Of each kind those of a rule fall into spans of its length, counted from the epoch so that they
    stay the same whenever it is asked, and the oldest of each span stays."""
    dropped: list[Dropped] = []
    kept: list[Point] = []
    rules = sorted(schedule.keep, key=lambda rule: rule.older_than_s)
    filled: set[tuple[str, float, int]] = set()
    for point in sorted(points, key=lambda one: (one.made_at, one.id)):
        rule = next((one for one in reversed(rules) if now - point.made_at > one.older_than_s), None)
        if rule is None:
            kept.append(point)
        elif rule.one_per_s is None:
            dropped.append(Dropped(point.id, "max_age"))
        elif (span := (point.kind, rule.older_than_s, math.floor(point.made_at / rule.one_per_s))) in filled:
            dropped.append(Dropped(point.id, "thinned"))
        else:
            filled.add(span)
            kept.append(point)
    if schedule.max_bytes is not None:
        size = sum(point.size for point in kept)
        for point in kept[:-1]:
            if size <= schedule.max_bytes:
                break
            size -= point.size
            dropped.append(Dropped(point.id, "max_bytes"))
    return dropped
