"""What requests say of the lifetime and the scheduled snapshots of a sandbox, checked and made into what is stored."""

import time
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hatchway.domain import lifetimes as rules
from hatchway.domain import schedules
from hatchway.domain.errors import Unprocessable
from hatchway.domain.lifecycle import State
from hatchway.domain.lifetimes import Lifetime, OnTimeout
from hatchway.domain.quotas import Caps
from hatchway.domain.schedules import Schedule
from hatchway.storage import lifetimes
from hatchway.storage.database import Connection
from hatchway.storage.rows import SandboxRow

Seconds = Annotated[float, Meta(ge=rules.MIN_TIMEOUT_S, le=rules.MAX_TIMEOUT_S)]


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a sandbox runs, and which snapshots are made of it. `timeout_s` and `idle_timeout_s` of null: no bound."""

    timeout_s: Seconds | UnsetType | None = UNSET
    idle_timeout_s: Seconds | UnsetType | None = UNSET
    on_timeout: OnTimeout | UnsetType = UNSET
    auto_wake: bool | UnsetType = UNSET
    snapshots: Schedule | UnsetType | None = UNSET


class Extend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how long from now on the sandbox goes on at least."""

    timeout_s: Seconds


def of_new(body: Timing, caps: Caps) -> tuple[Lifetime, dict[str, Any] | None]:
    """Lifetime and schedule of a new sandbox. Raises `Unprocessable("timeout_above_cap")`."""
    lifetime = Lifetime(
        timeout_s=bounded(None if body.timeout_s is UNSET else body.timeout_s, caps, given=body.timeout_s is not UNSET),
        idle_timeout_s=None if body.idle_timeout_s is UNSET else body.idle_timeout_s,
        on_timeout=OnTimeout.SUSPEND if body.on_timeout is UNSET else body.on_timeout,
        auto_wake=body.auto_wake is True,
    )
    schedule = None if body.snapshots is UNSET or body.snapshots is None else msgspec.to_builtins(body.snapshots)
    return lifetime, schedule


def change(body: Timing, shorten: bool, caps: Caps) -> "Changing | None":
    """What a PATCH changes of them; None for nothing. Raises `Unprocessable("timeout_above_cap")`."""
    timing = msgspec.to_builtins(body)
    if not any(name in timing for name in Timing.__struct_fields__):
        return None
    timeout_s = body.timeout_s if body.timeout_s is UNSET else bounded(body.timeout_s, caps, given=True)
    wanted = lifetimes.Change(
        timeout_s=timeout_s,
        idle_timeout_s=body.idle_timeout_s,
        on_timeout=body.on_timeout,
        auto_wake=body.auto_wake,
        shorten=shorten,
    )
    return Changing(wanted, body.snapshots)


class Changing:
    """The columns of a PATCH, made of the row in its transaction."""

    def __init__(self, wanted: lifetimes.Change, schedule: Schedule | UnsetType | None) -> None:
        self._wanted = wanted
        self._schedule = schedule

    def __call__(self, _: Connection, row: SandboxRow) -> dict[str, Any]:
        """Raises `Conflict("would_shorten")`."""
        now = time.time()
        columns: dict[str, Any] = {}
        if self._schedule is not UNSET:
            columns = scheduled(self._schedule, now)
        row = msgspec.structs.replace(row, **columns)
        return {**columns, **lifetimes.changed(row, self._wanted, now)}


class Extending:
    """The columns of an extension."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, _: Connection, row: SandboxRow) -> dict[str, Any]:
        """Never fails."""
        return lifetimes.extended(row, self._seconds, time.time())


class Waking:
    """The columns of a sandbox that is woken for a time: it has that from when it runs again, or at least that where it runs."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, _: Connection, row: SandboxRow) -> dict[str, Any]:
        """Never fails."""
        now = time.time()
        if row.state is State.RUNNING:
            return lifetimes.extended(row, self._seconds, now)
        return lifetimes.changed(row, lifetimes.Change(timeout_s=self._seconds, shorten=True), now)


def waking(timeout_s: float, caps: Caps) -> Waking:
    """What waking for a time changes. Raises `Unprocessable("timeout_above_cap")`."""
    bounded(timeout_s, caps, given=True)
    return Waking(timeout_s)


def scheduled(schedule: Schedule | None, now: float) -> dict[str, Any]:
    """The columns of a sandbox that gets a schedule, or has none any more."""
    return {
        "schedule": None if schedule is None else msgspec.to_builtins(schedule),
        "disk_due_at": schedules.next_due(None, None if schedule is None else schedule.disk_every_s, now),
        "full_due_at": schedules.next_due(None, None if schedule is None else schedule.full_every_s, now),
    }


def extension(body: Extend, caps: Caps) -> Extending:
    """What an extension changes. Raises `Unprocessable("timeout_above_cap")`."""
    bounded(body.timeout_s, caps, given=True)
    return Extending(body.timeout_s)


def bounded(timeout_s: float | None, caps: Caps, *, given: bool) -> float | None:
    """The timeout within the project's cap: one that was not asked for is the cap, one that was and is above it is refused."""
    cap = caps.timeout_s
    if cap is None:
        return timeout_s
    if not given:
        return cap
    if timeout_s is None or timeout_s > cap:
        raise Unprocessable(
            "timeout_above_cap",
            f"No sandbox of the project may run longer than {cap:g} seconds at a time.",
            f"Ask for at most {cap:g} seconds; a sandbox that was suspended goes on with its time anew.",
            field="timeout_s",
            allowed={"type": "number", "maximum": cap},
        )
    return timeout_s
