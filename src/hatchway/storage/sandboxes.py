"""Reading sandboxes, and the changes that are no transitions: name and metadata."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, tuple_, union_all, update

from hatchway.domain.errors import Conflict, Gone, NotFound
from hatchway.domain.lifecycle import State
from hatchway.storage import outbox, rows
from hatchway.storage.rows import SandboxRow
from hatchway.storage.tables import sandboxes

_SHOWN = frozenset(
    {
        "name",
        "metadata",
        "timeout_s",
        "idle_timeout_s",
        "on_timeout",
        "auto_wake",
        "expires_at",
        "left_s",
        "schedule",
        "policy",
        "credentials",
    }
)
"""What the event of a change says."""
_END = (1e300, "")
"""A place behind every sandbox."""
_ONE = select(sandboxes).where(sandboxes.c.id == bindparam("id"))


def find(connection: Connection, sandbox_id: str) -> SandboxRow | None:
    """The sandbox of any project, or None."""
    row = connection.execute(_ONE, {"id": sandbox_id}).mappings().one_or_none()
    return None if row is None else rows.sandbox(row)


def get(connection: Connection, project: str, sandbox_id: str) -> SandboxRow:
    """Raises `NotFound("unknown_sandbox")`, also for one of another project: its existence is nobody's business."""
    row = find(connection, sandbox_id)
    if row is None or row.project != project or row.pool is not None:
        raise NotFound(
            "unknown_sandbox", f"There is no sandbox {sandbox_id}.", "GET /v1/sandboxes lists those that there are."
        )
    return row


def get_alive(connection: Connection, project: str, sandbox_id: str) -> SandboxRow:
    """Like `get`; raises `Gone("sandbox_deleted")` for a deleted one."""
    row = get(connection, project, sandbox_id)
    if row.state is State.DELETED:
        raise Gone("sandbox_deleted", f"The sandbox {sandbox_id} was deleted.", "Create a new one.")
    return row


def count_by_state(connection: Connection) -> dict[str, int]:
    """How many sandboxes of all projects are in each state; states without any are left out."""
    query = select(sandboxes.c.state, func.count()).group_by(sandboxes.c.state)
    return {str(state): number for state, number in connection.execute(query)}


def list_page(
    connection: Connection,
    project: str,
    *,
    states: tuple[str, ...] = (),
    name: str | None = None,
    template: str | None = None,
    metadata: Mapping[str, str] | None = None,
    before: tuple[float, str] | None = None,
    limit: int,
) -> list[SandboxRow]:
    """The project's sandboxes, newest first, from behind `before` (creation time, id). Deleted ones only when `states` names them.

    `template` matches the reference as it was given, its name without a tag, or the digest.
    """
    mine = (sandboxes.c.project == project, sandboxes.c.pool.is_(None))
    query = select(sandboxes.c.id, sandboxes.c.created_at).where(*mine)
    if name is not None:
        query = query.where(sandboxes.c.name == name)
    if template is not None:
        query = query.where(
            (sandboxes.c.template == template)
            | (sandboxes.c.template_digest == template)
            | sandboxes.c.template.startswith(f"{template}:", autoescape=True)
        )
    for key, value in (metadata or {}).items():
        query = query.where(sandboxes.c.metadata[key].as_string() == value)
    # Always a place to begin at: by it SQLite, too, finds the index that has the order.
    query = query.where(tuple_(sandboxes.c.created_at, sandboxes.c.id) < (before or _END))
    # Of each state the first few in order, which its index has in order: the time does not grow with what is behind or beside them.
    wanted = dict.fromkeys(states) or [state for state in State if state is not State.DELETED]
    newest = (sandboxes.c.created_at.desc(), sandboxes.c.id.desc())
    firsts = [query.where(sandboxes.c.state == state).order_by(*newest).limit(limit).subquery() for state in wanted]
    merged = union_all(*(select(first.c.id, first.c.created_at) for first in firsts)).subquery()
    page = select(merged.c.id).order_by(merged.c.created_at.desc(), merged.c.id.desc()).limit(limit)
    whole = select(sandboxes).where(sandboxes.c.id.in_(page)).order_by(*newest)
    return [rows.sandbox(row) for row in connection.execute(whole).mappings()]


def of_node(connection: Connection, node_id: str) -> list[SandboxRow]:
    """Every sandbox that was ever placed on the node and is still recorded, deleted ones included."""
    query = select(sandboxes).where(sandboxes.c.node_id == node_id)
    return [rows.sandbox(row) for row in connection.execute(query).mappings()]


def change(
    connection: Connection,
    project: str,
    sandbox_id: str,
    changes: dict[str, Any],
    more: Callable[[Connection, SandboxRow], dict[str, Any]] | None = None,
) -> SandboxRow:
    """Sets `name` or `metadata`, and columns that `more` makes of the row; every change counts the version up. Raises what `more` does."""
    row = get_alive(connection, project, sandbox_id)
    computed = {} if more is None else more(connection, row)
    if not changes and all(getattr(row, name) == value for name, value in computed.items()):
        return row
    now = time.time()
    done = connection.execute(
        update(sandboxes)
        .where(sandboxes.c.id == sandbox_id, sandboxes.c.version == row.version)
        .values(version=row.version + 1, updated_at=now, **changes, **computed)
    )
    if done.rowcount != 1:
        raise changed_meanwhile(sandbox_id)
    shown = {name: value for name, value in {**changes, **computed}.items() if name in _SHOWN}
    outbox.append(connection, project, "sandbox.updated", sandbox_id, shown)
    return get(connection, project, sandbox_id)


def changed_meanwhile(sandbox_id: str) -> Conflict:
    """The error of a guarded update that met somebody else's."""
    return Conflict(
        "changed_meanwhile", f"Somebody else changed the sandbox {sandbox_id} in this moment.", "Try again."
    )
