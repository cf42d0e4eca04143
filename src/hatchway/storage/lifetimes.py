"""Lifetimes in the database: deadlines that are due, what follows from them, and what requests change of them.

`due_at` of a sandbox is when it has to be looked at next, for whatever reason; it is kept with every change of its state, so that
a control process that starts anew, or another one beside it, finds everything that is due by one look at an index.
"""

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import BindParameter, Connection, bindparam, select, update

from hatchway.domain import lifetimes
from hatchway.domain.errors import Conflict
from hatchway.domain.lifecycle import State, Verb
from hatchway.domain.lifetimes import Lifetime, OnTimeout, Why
from hatchway.storage import rows, sandboxes
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.storage.tables import sandboxes as table

AUTOMATIC = "automatic"
"""Argument of an operation that nobody asked for: which deadline had it made."""

COLUMNS = ("expires_at", "left_s", "active_at", "tries", "retry_at", "due_at", "state_since")
BOUND: dict[str, BindParameter[Any]] = {name: bindparam(f"new_{name}") for name in COLUMNS}
"""For an update that moves a sandbox to another state; `moved` gives the values."""

_DUE = (
    select(table)
    .where(table.c.due_at <= bindparam("now"), table.c.operation_id.is_(None), table.c.state == State.RUNNING)
    .order_by(table.c.due_at)
    .limit(bindparam("count"))
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a request sets; what is UNSET stays. `shorten` allows an earlier deadline."""

    timeout_s: float | UnsetType | None = UNSET
    idle_timeout_s: float | UnsetType | None = UNSET
    on_timeout: OnTimeout | UnsetType = UNSET
    auto_wake: bool | UnsetType = UNSET
    shorten: bool = False


def of(row: SandboxRow) -> Lifetime:
    """The lifetime of a sandbox."""
    return Lifetime(
        timeout_s=row.timeout_s,
        idle_timeout_s=row.idle_timeout_s,
        on_timeout=row.on_timeout,
        auto_wake=row.auto_wake,
        expires_at=row.expires_at,
        left_s=row.left_s,
        active_at=row.active_at,
        tries=row.tries,
        retry_at=row.retry_at,
    )


def due_at(lifetime: Lifetime, row: SandboxRow) -> float | None:
    """When a sandbox has to be looked at next: for a deadline or for a snapshot."""
    if lifetime.active_at is None:
        return None
    times = (lifetimes.due_at(lifetime), row.disk_due_at, row.full_due_at)
    return min((one for one in times if one is not None), default=None)


def moved(row: SandboxRow, state: State, now: float, failed: OperationRow | None = None) -> dict[str, Any]:
    """Values for `BOUND` when a sandbox comes to `state`, or stays in it because an operation failed."""
    lifetime = of(row)
    if state is State.RUNNING and row.state is not State.RUNNING:
        lifetime = lifetimes.entered_running(lifetime, now)
    elif state is not State.RUNNING and row.state is State.RUNNING:
        lifetime = lifetimes.left_running(lifetime, now)
    elif failed is not None and AUTOMATIC in failed.arguments:
        lifetime = lifetimes.failed(lifetime, now)
    since = row.state_since if state is row.state else now
    return {f"new_{name}": value for name, value in {**_values(lifetime, row), "state_since": since}.items()}


def due(connection: Connection, now: float, limit: int) -> list[SandboxRow]:
    """The sandboxes that run, have nothing in hand and have to be looked at, the most overdue first."""
    return [rows.sandbox(row) for row in connection.execute(_DUE, {"now": now, "count": limit}).mappings()]


def expected(connection: Connection, sandbox_id: str, now: float) -> tuple[SandboxRow, Why, Verb] | None:
    """The sandbox whose deadline has come, which one, and what is to be done; None when that is not so (any more)."""
    row = sandboxes.find(connection, sandbox_id)
    if row is None or row.operation_id is not None or row.state is not State.RUNNING:
        return None
    lifetime = of(row)
    why = lifetimes.why_due(lifetime, now)
    return None if why is None else (row, why, lifetimes.next_verb(lifetime))


def note_used(connection: Connection, sandbox_id: str, at: float) -> None:
    """Somebody used the sandbox at that time."""
    row = sandboxes.find(connection, sandbox_id)
    if row is None or row.state is not State.RUNNING:
        return
    values = _values(lifetimes.used(of(row), at), row)
    connection.execute(
        update(table).where(table.c.id == row.id, table.c.version == row.version, table.c.operation_id.is_(None)),
        values,
    )


def look_again(connection: Connection, sandbox_id: str, at: float) -> None:
    """What is due cannot be decided now (its node is away): it is looked at again at that time."""
    running = (table.c.state == State.RUNNING, table.c.operation_id.is_(None))
    connection.execute(update(table).where(table.c.id == sandbox_id, *running).values(due_at=at))


def changed(row: SandboxRow, wanted: Change, now: float) -> dict[str, Any]:
    """The columns that a request changes, for the update of its caller. Raises `Conflict("would_shorten")`."""
    lifetime = of(row)
    names = ("idle_timeout_s", "on_timeout", "auto_wake")
    given = {name: value for name in names if (value := getattr(wanted, name)) is not UNSET}
    lifetime = lifetimes.settled(replace(lifetime, **given), now)
    if wanted.timeout_s is not UNSET:
        if lifetimes.shortens(lifetime, wanted.timeout_s, now) and not wanted.shorten:
            raise Conflict(
                "would_shorten",
                "The deadline of the sandbox would come earlier than it does now.",
                "Send `shorten: true` beside `timeout_s` if that is meant; an extension never shortens.",
                expires_at=lifetime.expires_at,
                left_s=lifetime.left_s,
            )
        lifetime = lifetimes.with_timeout(lifetime, wanted.timeout_s, now)
    settings = {name: getattr(lifetime, name) for name in ("timeout_s", *names)}
    return {**settings, **_values(lifetime, row)}


def extended(row: SandboxRow, seconds: float, now: float) -> dict[str, Any]:
    """The columns of a sandbox that has at least so many seconds more."""
    return _values(lifetimes.extended(of(row), seconds, now), row)


def _values(lifetime: Lifetime, row: SandboxRow) -> dict[str, Any]:
    return {
        "expires_at": lifetime.expires_at,
        "left_s": lifetime.left_s,
        "active_at": lifetime.active_at,
        "tries": lifetime.tries,
        "retry_at": lifetime.retry_at,
        "due_at": due_at(lifetime, row),
    }
