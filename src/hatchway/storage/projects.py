"""Projects: what everything of a user belongs to, what is required of it, and how one ends with all that it holds."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, RowMapping, Select, Table, bindparam, delete, false, func, insert, select, update

from hatchway.domain.errors import Conflict, NotFound
from hatchway.domain.lifecycle import State
from hatchway.domain.quotas import Caps, Quotas
from hatchway.storage import audit, operations, outbox
from hatchway.storage.tables import credentials, events, exports, metadata, projects, sandboxes, snapshots
from hatchway.storage.tables import operations as operations_table

DEFAULT = "default"
"""The project that every installation has; it cannot be deleted."""
ACTIVE, DELETING = "active", "deleting"


class ProjectRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `projects`. `state`: `active deleting`; `templates` names those that may be used, None: all."""

    name: str
    state: str
    created_at: float
    require_isolation: str | None
    templates: tuple[str, ...] | None
    quotas: Quotas
    caps: Caps
    approvals: tuple[str, ...] = ()
    """Verbs that wait for somebody's consent: `delete rollback export`."""


_ONE = select(projects).where(projects.c.name == bindparam("name"))
_HELD = _ONE.with_for_update(read=True, key_share=True)


def find(connection: Connection, name: str) -> ProjectRow | None:
    """The project, or None."""
    row = connection.execute(_ONE, {"name": name}).mappings().one_or_none()
    return None if row is None else _row(row)


def get(connection: Connection, name: str) -> ProjectRow:
    """Raises `NotFound("unknown_project")`."""
    row = find(connection, name)
    if row is None:
        raise unknown(name)
    return row


def unknown(name: str) -> NotFound:
    """The error of a project that is not there, or that the caller has no part in."""
    return NotFound(
        "unknown_project", f"There is no project {name[:64]!r}.", "GET /v1/projects lists those that there are."
    )


def list_all(connection: Connection) -> list[ProjectRow]:
    """Every project, by name."""
    return [_row(row) for row in connection.execute(select(projects).order_by(projects.c.name)).mappings()]


def required_isolation(connection: Connection, name: str) -> str | None:
    """The isolation that every sandbox of the project must have; None where any will do."""
    return connection.execute(select(projects.c.require_isolation).where(projects.c.name == name)).scalar_one_or_none()


def hold(connection: Connection, name: str) -> ProjectRow:
    """The project, for a transaction that adds something to it: it is not deleted before that has ended.

    Raises `NotFound("unknown_project")`, `Conflict("project_deleting")`.
    """
    row = connection.execute(_HELD, {"name": name}).mappings().one_or_none()
    if row is None:
        raise unknown(name)
    held = _row(row)
    require_active(held)
    return held


def lock(connection: Connection, name: str) -> ProjectRow:
    """Like `get`; until the transaction ends no other one counts what the project holds (SQLite has one writer at a time anyway)."""
    connection.execute(select(projects.c.name).where(projects.c.name == name).with_for_update(key_share=True))
    return get(connection, name)


def _claim(connection: Connection, name: str) -> None:
    """Waits for every transaction that holds the project, and keeps others from it."""
    connection.execute(select(projects.c.name).where(projects.c.name == name).with_for_update())


def create(connection: Connection, name: str, settings: Mapping[str, Any]) -> ProjectRow:
    """Makes a project. Raises `Conflict("project_exists")`."""
    if find(connection, name) is not None:
        raise Conflict(
            "project_exists", f"There is a project {name!r} already.", "Choose another name, or change that one."
        )
    connection.execute(
        insert(projects), {"name": name, "created_at": time.time(), "state": ACTIVE, **_stored(settings)}
    )
    outbox.append(connection, outbox.INSTALLATION, "project.created", name, msgspec.to_builtins(dict(settings)))
    return get(connection, name)


def require_active(row: ProjectRow) -> None:
    """Raises `Conflict("project_deleting")`."""
    if row.state != ACTIVE:
        raise Conflict("project_deleting", f"The project {row.name} is being deleted.", "Use another project.")


def change(connection: Connection, name: str, settings: Mapping[str, Any]) -> ProjectRow:
    """Sets `require_isolation`, `templates`, `quotas` or `caps`; what is there goes on, even beyond a new bound.

    Raises `NotFound("unknown_project")` and `Conflict("project_deleting")`.
    """
    before = get(connection, name)
    require_active(before)
    changes = {field: value for field, value in settings.items() if getattr(before, field) != value}
    if not changes:
        return before
    connection.execute(update(projects).where(projects.c.name == name).values(**_stored(changes)))
    outbox.append(connection, name, "project.updated", name, msgspec.to_builtins(changes))
    return get(connection, name)


# -- the end of a project

OBJECTS: Mapping[str, Select[Any]] = {
    "sandboxes": select(func.count())
    .select_from(sandboxes)
    .where(sandboxes.c.project == bindparam("name"), sandboxes.c.state != State.DELETED),
    "snapshots": select(func.count())
    .select_from(snapshots)
    .where(snapshots.c.project == bindparam("name"), snapshots.c.state != "deleted"),
    "exports": select(func.count())
    .select_from(exports)
    .where(exports.c.project == bindparam("name"), exports.c.state.in_(("pending", "ready"))),
    "credentials": select(func.count()).select_from(credentials).where(credentials.c.project == bindparam("name")),
    "operations": select(func.count())
    .select_from(operations_table)
    .where(operations_table.c.project == bindparam("name"), operations_table.c.status.in_(operations.OPEN)),
}
"""What must be gone before a project can be: how many there are of each. Whatever else has a project is a record, and goes with it."""


def objects(connection: Connection, name: str) -> dict[str, int]:
    """What the project still holds, by kind; kinds without any are left out."""
    found = {kind: connection.execute(query, {"name": name}).scalar_one() for kind, query in OBJECTS.items()}
    return {kind: number for kind, number in found.items() if number}


def begin_delete(connection: Connection, name: str, *, force: bool) -> ProjectRow:
    """Stores that a project is not wanted any more: nothing new is made in it from now on.

    Raises `NotFound("unknown_project")`, and `Conflict`: `project_not_empty` without `force` while it holds objects, and
    `project_is_default`.
    """
    _claim(connection, name)
    row = get(connection, name)
    if name == DEFAULT:
        raise Conflict(
            "project_is_default",
            f"The project {DEFAULT} belongs to the installation.",
            "Delete what is in it instead.",
        )
    held = objects(connection, name)
    if held and not force and row.state == ACTIVE:
        words = ", ".join(f"{number} {kind}" for kind, number in held.items())
        raise Conflict(
            "project_not_empty",
            f"The project {name} holds {words}.",
            "Delete them first; or ask with `force=true`, which deletes them and all that is recorded of them.",
            objects=held,
        )
    if row.state == ACTIVE:
        connection.execute(update(projects).where(projects.c.name == name).values(state=DELETING))
        outbox.append(connection, outbox.INSTALLATION, "project.deleting", name, {"objects": held})
    return get(connection, name)


def being_deleted(connection: Connection) -> list[str]:
    """Names of the projects that shall go."""
    return list(connection.execute(select(projects.c.name).where(projects.c.state == DELETING)).scalars())


def purge(connection: Connection, name: str) -> bool:
    """Forgets a project that is to be deleted and holds nothing any more, with all that is recorded of it. False while it holds something.

    Its events and idempotency keys go too: who makes a project of the same name must not see them.
    """
    _claim(connection, name)
    row = find(connection, name)
    if row is None:
        return True
    if row.state != DELETING or objects(connection, name):
        return False
    audit.hide(connection, name)
    for table in reversed(metadata.sorted_tables):
        if table is not projects and "project" in table.c:
            _forget(connection, table, name)
    connection.execute(delete(projects).where(projects.c.name == name))
    outbox.append(connection, outbox.INSTALLATION, "project.deleted", name, {})
    return True


def _forget(connection: Connection, table: Table, name: str) -> None:
    rows = delete(table).where(table.c.project == name)
    connection.execute(rows if table is not events else rows.where(events.c.unseen == false()))


def _stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {field: msgspec.to_builtins(value) for field, value in settings.items()}


def _row(row: RowMapping) -> ProjectRow:
    values = dict(row)
    values["templates"] = None if row["templates"] is None else tuple(row["templates"])
    values["quotas"] = msgspec.convert(row["quotas"], Quotas)
    values["approvals"] = tuple(row["approvals"])
    values["caps"] = msgspec.convert(row["caps"], Caps)
    return ProjectRow(**values)
