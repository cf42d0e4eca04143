"""Quotas: what a project holds is counted in the transaction that adds to it, so that no two together pass a bound that one alone would.

Nothing is counted up and down. What is held follows from the rows that there are, so that no crash and no mistake elsewhere can make
the numbers drift. Where a quota is set, accepting transactions of one project come one after the other (`projects.lock`).
"""

import time
from collections.abc import Sequence

from sqlalchemy import Connection, and_, bindparam, case, func, or_, select

from hatchway.domain.errors import Exhausted, Forbidden
from hatchway.domain.lifecycle import State
from hatchway.domain.quotas import ProjectUsage, Quotas
from hatchway.domain.shapes import Shape
from hatchway.storage import projects
from hatchway.storage.rows import SandboxRow
from hatchway.storage.tables import sandboxes, sessions, snapshots

WINDOW_S = 60.0
HELD = (State.RUNNING, State.PAUSED)
"""States in which a sandbox has a machine; one that is on the way there counts too."""

_ALIVE = tuple(state for state in State if state is not State.DELETED)
_OPEN_SESSIONS = ("new", "created", "running", "exited")
_HOLDS = or_(sandboxes.c.state.in_(HELD), sandboxes.c.desired.in_(HELD))
_SANDBOXES = select(
    func.count().label("sandboxes"),
    func.coalesce(func.sum(case((_HOLDS, sandboxes.c.vcpus), else_=0)), 0).label("running_vcpus"),
    func.coalesce(func.sum(case((_HOLDS, sandboxes.c.memory_mib), else_=0)), 0).label("running_memory_mib"),
    func.coalesce(func.sum(sandboxes.c.disk_mib), 0).label("disk_mib"),
).where(sandboxes.c.project == bindparam("project"), sandboxes.c.state.in_(_ALIVE))
_SNAPSHOTS = select(
    func.count().label("snapshots"),
    func.coalesce(
        func.sum(func.coalesce(snapshots.c.disk_bytes, 0) + func.coalesce(snapshots.c.memory_bytes, 0)), 0
    ).label("snapshot_bytes"),
).where(snapshots.c.project == bindparam("project"), snapshots.c.state.in_(("pending", "ready", "deleting")))
_SESSIONS = (
    select(func.count())
    .select_from(sessions.join(sandboxes, sandboxes.c.id == sessions.c.sandbox_id))
    .where(
        sessions.c.project == bindparam("project"),
        sessions.c.state.in_(_OPEN_SESSIONS),
        sandboxes.c.state != State.DELETED,
    )
)
_MADE = and_(
    sandboxes.c.project == bindparam("project"),
    sandboxes.c.created_at > bindparam("since"),
    sandboxes.c.pool.is_(None),
)
_RATE = select(func.count()).select_from(sandboxes).where(_MADE)
_NTH = select(sandboxes.c.created_at).where(_MADE).order_by(sandboxes.c.created_at).limit(1).offset(bindparam("nth"))

_DELETE = "Delete sandboxes that are not needed"
_STOP = "Stop or suspend sandboxes that are not needed"
_RAISE = "or ask whoever administers the installation to raise the quota."


def usage(connection: Connection, project: str) -> ProjectUsage:
    """What the project holds now."""
    values = {"project": project}
    held = connection.execute(_SANDBOXES, values).mappings().one()
    kept = connection.execute(_SNAPSHOTS, values).mappings().one()
    return ProjectUsage(
        **{name: int(value) for name, value in {**held, **kept}.items()},
        sessions=connection.execute(_SESSIONS, values).scalar_one(),
        creates_last_minute=connection.execute(_RATE, {**values, "since": time.time() - WINDOW_S}).scalar_one(),
    )


def admit_sandboxes(connection: Connection, project: str, shapes: Sequence[Shape], *, running: bool = True) -> None:
    """Room for new sandboxes of these sizes, all of them or none; they are about to run, unless it is said that they are not.

    Raises `Forbidden("quota_exceeded")`, `Exhausted("create_rate_exceeded")`, `Conflict("project_deleting")`.
    """
    quotas = _quotas(connection, project)
    if quotas.creates_per_minute is not None:
        _admit_rate(connection, project, quotas.creates_per_minute, len(shapes))
    _admit_amounts(connection, project, quotas, shapes, running=running)


def _admit_amounts(
    connection: Connection, project: str, quotas: Quotas, shapes: Sequence[Shape], *, running: bool = True
) -> None:
    if (quotas.sandboxes, quotas.disk_mib, quotas.running_vcpus, quotas.running_memory_mib) == (None,) * 4:
        return
    held = connection.execute(_SANDBOXES, {"project": project}).mappings().one()
    _require(project, "sandboxes", quotas.sandboxes, held["sandboxes"], len(shapes), _DELETE)
    _require(project, "disk_mib", quotas.disk_mib, held["disk_mib"], sum(one.disk_mib for one in shapes), _DELETE)
    if running:
        _admit_running(project, quotas, held["running_vcpus"], held["running_memory_mib"], shapes)


def admit_members(connection: Connection, project: str, shapes: Sequence[Shape]) -> None:
    """Room for new members of a pool: like sandboxes, but nobody has asked for one yet. Raises what `admit_sandboxes` does."""
    _admit_amounts(connection, project, _quotas(connection, project), shapes)


def admit_claim(connection: Connection, project: str) -> None:
    """A member of a pool, which was counted when it was made, is asked for. Raises what `admit_sandboxes` does."""
    quotas = _quotas(connection, project)
    if quotas.creates_per_minute is not None:
        _admit_rate(connection, project, quotas.creates_per_minute, 1)


def admit_running(connection: Connection, row: SandboxRow) -> None:
    """Room for the machine of a sandbox that is there, when it has none: its start, restore, wake or rollback. Raises what `admit_sandboxes` does."""
    if row.state in HELD or row.desired in HELD:
        return
    quotas = _quotas(connection, row.project)
    if quotas.running_vcpus is None and quotas.running_memory_mib is None:
        return
    held = connection.execute(_SANDBOXES, {"project": row.project}).mappings().one()
    shape = Shape(vcpus=row.vcpus, memory_mib=row.memory_mib, disk_mib=row.disk_mib)
    _admit_running(row.project, quotas, held["running_vcpus"], held["running_memory_mib"], [shape])


def admit_session(connection: Connection, project: str) -> None:
    """Room for one more session. Raises `Forbidden("quota_exceeded")`, `Conflict("project_deleting")`."""
    quotas = _quotas(connection, project)
    if quotas.sessions is not None:
        used = connection.execute(_SESSIONS, {"project": project}).scalar_one()
        _require(project, "sessions", quotas.sessions, used, 1, "DELETE /v1/sessions/{id} those that are not needed")


def admit_snapshot(connection: Connection, project: str, octets: int = 1) -> None:
    """Room for a snapshot: any at all before it is made, its `octets` when they are known. Raises what `admit_session` does."""
    quotas = _quotas(connection, project)
    if quotas.snapshot_bytes is not None:
        used = connection.execute(_SNAPSHOTS, {"project": project}).mappings().one()["snapshot_bytes"]
        _require(
            project, "snapshot_bytes", quotas.snapshot_bytes, int(used), octets, "Delete snapshots that are not needed"
        )


def _quotas(connection: Connection, project: str) -> Quotas:
    held = projects.hold(connection, project)
    return held.quotas if held.quotas == Quotas() else projects.lock(connection, project).quotas


def _admit_running(project: str, quotas: Quotas, vcpus: int, memory_mib: int, shapes: Sequence[Shape]) -> None:
    wanted = sum(one.vcpus for one in shapes)
    _require(project, "running_vcpus", quotas.running_vcpus, vcpus, wanted, _STOP)
    wanted = sum(one.memory_mib for one in shapes)
    _require(project, "running_memory_mib", quotas.running_memory_mib, memory_mib, wanted, _STOP)


def _admit_rate(connection: Connection, project: str, limit: int, wanted: int) -> None:
    if wanted > limit:
        _require(project, "creates_per_minute", limit, 0, wanted, "Ask for fewer at once")
    now = time.time()
    values = {"project": project, "since": now - WINDOW_S}
    used = connection.execute(_RATE, values).scalar_one()
    if used + wanted <= limit:
        return
    # So many of the oldest must leave the window before there is room.
    made_at = connection.execute(_NTH, {**values, "nth": used + wanted - limit - 1}).scalar_one()
    wait = max(0.0, made_at + WINDOW_S - now)
    raise Exhausted(
        "create_rate_exceeded",
        f"The project {project} may make {limit} sandboxes in a minute; it made {used} in the last one"
        + (f", and {wanted} more are asked for." if wanted > 1 else "."),
        f"Try again in {wait:.0f} seconds, {_RAISE}",
        quota="creates_per_minute",
        limit=limit,
        used=used,
        wanted=wanted,
        retry_after_s=round(wait, 3),
    )


def _require(project: str, quota: str, limit: int | None, used: int, wanted: int, remedy: str) -> None:
    if limit is None or wanted <= 0 or used + wanted <= limit:
        return
    raise Forbidden(
        "quota_exceeded",
        f"The quota `{quota}` of the project {project} is {limit}; {used} are used, and {wanted} more are asked for.",
        f"{remedy}, {_RAISE}",
        quota=quota,
        limit=limit,
        used=used,
        wanted=wanted,
    )
