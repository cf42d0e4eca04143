"""Reading sandboxes, and the changes that are no transitions: name and metadata."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, bindparam, func, select, tuple_, union_all, update

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
"""A place behind every sandbox, as `_BEGIN` is one before."""
_BEGIN = (-1.0, "")
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


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which sandboxes are meant; all that is given must hold.

    `template` matches the reference as it was given, its name without a tag, or the digest. `annotations` are entries that a sandbox must
    have: the value of each is None, or the member that must be a certain text, and that text. Deleted ones are meant only when `states`
    names them.
    """

    states: tuple[str, ...] = ()
    name: str | None = None
    template: str | None = None
    metadata: Mapping[str, str] = {}
    annotations: Mapping[str, tuple[str, str] | None] = {}
    created_after: float | None = None
    """Not before that."""

    def conditions(self, project: str) -> list[ColumnElement[bool]]:
        """Without the states."""
        wanted: list[ColumnElement[bool]] = [sandboxes.c.project == project, sandboxes.c.pool.is_(None)]
        if self.name is not None:
            wanted.append(sandboxes.c.name == self.name)
        if self.template is not None:
            wanted.append(
                (sandboxes.c.template == self.template)
                | (sandboxes.c.template_digest == self.template)
                | sandboxes.c.template.startswith(f"{self.template}:", autoescape=True)
            )
        wanted += [sandboxes.c.metadata[key].as_string() == value for key, value in self.metadata.items()]
        for entry, member in self.annotations.items():
            if member is None:
                wanted.append(sandboxes.c.annotations[entry].as_string().is_not(None))
            else:
                wanted.append(sandboxes.c.annotations[(entry, member[0])].as_string() == member[1])
        if self.created_after is not None:
            wanted.append(sandboxes.c.created_at >= self.created_after)
        return wanted

    @property
    def wanted_states(self) -> list[str]:
        """In no order."""
        return list(dict.fromkeys(self.states)) or [state for state in State if state is not State.DELETED]


ALL = Filter()


def list_page(
    connection: Connection,
    project: str,
    wanted: Filter = ALL,
    *,
    behind: tuple[float, str] | None = None,
    ascending: bool = False,
    limit: int,
) -> list[SandboxRow]:
    """The project's sandboxes that are meant, newest first or `ascending`, from behind a place (creation time, id)."""
    query = select(sandboxes.c.id, sandboxes.c.created_at).where(*wanted.conditions(project))
    # Always a place to begin at: by it SQLite, too, finds the index that has the order.
    place = tuple_(sandboxes.c.created_at, sandboxes.c.id)
    query = query.where(place > (behind or _BEGIN) if ascending else place < (behind or _END))
    # Of each state the first few in order, which its index has in order: the time does not grow with what is behind or beside them.
    in_order = _order(sandboxes.c, ascending)
    firsts = [
        query.where(sandboxes.c.state == state).order_by(*in_order).limit(limit).subquery()
        for state in wanted.wanted_states
    ]
    merged = union_all(*(select(first.c.id, first.c.created_at) for first in firsts)).subquery()
    page = select(merged.c.id).order_by(*_order(merged.c, ascending)).limit(limit)
    whole = select(sandboxes).where(sandboxes.c.id.in_(page)).order_by(*in_order)
    return [rows.sandbox(row) for row in connection.execute(whole).mappings()]


def count(connection: Connection, project: str, wanted: Filter) -> int:
    """How many sandboxes are meant."""
    query = select(func.count()).where(*wanted.conditions(project), sandboxes.c.state.in_(wanted.wanted_states))
    return int(connection.execute(query).scalar_one())


def _order(columns: Any, ascending: bool) -> tuple[Any, Any]:
    if ascending:
        return columns.created_at.asc(), columns.id.asc()
    return columns.created_at.desc(), columns.id.desc()


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
