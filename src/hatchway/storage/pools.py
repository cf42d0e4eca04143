"""Pools: what shall be there ahead, its members, and the claim of one.

A member is a sandbox of the pool's project with `pool` set: nobody sees it until a claim, one guarded update, takes that away and
makes it the sandbox that was asked for. Claims and the refill meet in nothing but rows that one of them gets and the other not.
"""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from hatchway.domain.errors import NotFound
from hatchway.domain.lifecycle import State, Verb
from hatchway.domain.shapes import Shape
from hatchway.storage import accepting, ending, idempotency, outbox, policies, quotas, rows
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import PoolRow, SandboxRow
from hatchway.storage.tables import pools, projects
from hatchway.storage.tables import sandboxes as table

ANY = "auto"
NEVER = "never"
CLAIM = "claim"
"""Argument of a create that claims a member: the pool's name."""
POOL = ending.POOL
DRAINING = "draining"

_READY = (
    select(table)
    .where(
        table.c.project == bindparam("project"),
        table.c.pool.is_not(None),
        table.c.pool_key == bindparam("pool_key"),
        table.c.state == State.PAUSED,
        table.c.operation_id.is_(None),
        table.c.node_id == bindparam("node_id"),
        table.c.vcpus == bindparam("vcpus"),
        table.c.memory_mib == bindparam("memory_mib"),
        table.c.disk_mib == bindparam("disk_mib"),
    )
    .order_by(table.c.created_at)
    .limit(1)
)


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """How many members of a pool can be claimed, and how many are on their way."""

    ready: int = 0
    making: int = 0


def put(connection: Connection, wanted: PoolRow) -> tuple[PoolRow, bool]:
    """Makes a pool, or changes the one of this name, which may be draining; tells whether it is new."""
    before = find(connection, wanted.project, wanted.name)
    values = msgspec.structs.asdict(wanted)
    if before is None:
        connection.execute(insert(pools), values)
    else:
        values["created_at"] = before.created_at
        connection.execute(
            update(pools).where(pools.c.project == wanted.project, pools.c.name == wanted.name).values(**values)
        )
    data = {"size": wanted.size, "template": wanted.template}
    outbox.append(connection, wanted.project, "pool.updated", wanted.name, data)
    return get(connection, wanted.project, wanted.name), before is None


def find(connection: Connection, project: str, name: str) -> PoolRow | None:
    """The pool, or None."""
    query = select(pools).where(pools.c.project == project, pools.c.name == name)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else PoolRow(**row)


def get(connection: Connection, project: str, name: str) -> PoolRow:
    """Raises `NotFound("unknown_pool")`."""
    row = find(connection, project, name)
    if row is None:
        raise NotFound("unknown_pool", f"There is no pool {name[:64]!r}.", "GET /v1/pools lists those that there are.")
    return row


def list_all(connection: Connection, project: str | None = None) -> list[PoolRow]:
    """The pools of a project, or of all, by name; those of a project that is being deleted are draining."""
    query = select(pools).order_by(pools.c.project, pools.c.name)
    if project is not None:
        query = query.where(pools.c.project == project)
    ending = set(connection.execute(select(projects.c.name).where(projects.c.state != "active")).scalars())
    found = [PoolRow(**row) for row in connection.execute(query).mappings()]
    return [msgspec.structs.replace(one, state=DRAINING, size=0) if one.project in ending else one for one in found]


def members(connection: Connection, project: str) -> dict[str, Members]:
    """Of each pool of a project: its members."""
    query = (
        select(table.c.pool, table.c.state, table.c.operation_id.is_(None).label("idle"), func.count().label("number"))
        .where(table.c.project == project, table.c.pool.is_not(None), table.c.state.in_((State.PENDING, State.PAUSED)))
        .group_by(table.c.pool, table.c.state, table.c.operation_id.is_(None))
    )
    found: dict[str, Members] = {}
    for row in connection.execute(query):
        before = found.get(row.pool, Members())
        ready = row.state == State.PAUSED and row.idle
        found[row.pool] = Members(
            ready=before.ready + (row.number if ready else 0), making=before.making + (0 if ready else row.number)
        )
    return found


def begin_delete(connection: Connection, project: str, name: str) -> PoolRow:
    """Nothing new is made; the members go. Raises `NotFound("unknown_pool")`."""
    row = get(connection, project, name)
    if row.state != DRAINING:
        _set(connection, row, state=DRAINING, size=0)
        outbox.append(connection, project, "pool.deleting", name, {})
    return get(connection, project, name)


def resolved(connection: Connection, row: PoolRow, digest: str, pool_key: str, node_id: str) -> None:
    """What its template names now, and what its members are made of from now on."""
    if (row.template_digest, row.pool_key, row.node_id) != (digest, pool_key, node_id):
        _set(connection, row, template_digest=digest, pool_key=pool_key, node_id=node_id)
        outbox.append(connection, row.project, "pool.updated", row.name, {"template_digest": digest})


def note(connection: Connection, row: PoolRow, condition: str, retry_at: float | None) -> None:
    """What keeps it from being full, and when it is tried again."""
    if (row.condition, row.retry_at) != (condition, retry_at):
        _set(connection, row, condition=condition, retry_at=retry_at)
        if row.condition != condition:
            outbox.append(connection, row.project, "pool.updated", row.name, {"condition": condition})


def refill(connection: Connection, project: str, name: str, now: float) -> Accepted | None:
    """Begins to make one more member; None where none is lacking, one is being made, or it has to wait.

    Raises what `quotas.admit_members` does.
    """
    row = find(connection, project, name)
    if row is None or row.state == DRAINING or (row.retry_at is not None and row.retry_at > now):
        return None
    there = members(connection, project).get(name, Members())
    if there.making or there.ready >= row.size:
        return None
    shape = Shape(vcpus=row.vcpus, memory_mib=row.memory_mib, disk_mib=row.disk_mib)
    quotas.admit_members(connection, project, [shape])
    new = NewSandbox(
        project=project,
        name=None,
        node_id=row.node_id,
        template=row.template,
        template_digest=row.template_digest,
        shape=shape,
        metadata={},
        env={},
        require_isolation=None,
        pool=name,
        pool_key=row.pool_key,
    )
    return accepting.accept_member(connection, new)


def spare(connection: Connection, row: PoolRow, limit: int) -> list[SandboxRow]:
    """Members that have to go: made of what is not wanted any more, ended by themselves, or more than there shall be."""
    query = select(table).where(
        table.c.project == row.project,
        table.c.pool == row.name,
        table.c.state != State.DELETED,
        table.c.operation_id.is_(None),
    )
    found = [rows.sandbox(one) for one in connection.execute(query.order_by(table.c.created_at.desc())).mappings()]
    shape = (row.vcpus, row.memory_mib, row.disk_mib)
    bad = [
        one
        for one in found
        if one.state is not State.PAUSED
        or one.pool_key != row.pool_key
        or one.node_id != row.node_id
        or (one.vcpus, one.memory_mib, one.disk_mib) != shape
    ]
    known = {one.id for one in bad}
    good = [one for one in found if one.id not in known]
    return [*bad, *good[row.size :]][:limit]


def drop(connection: Connection, member: SandboxRow) -> Accepted | None:
    """Deletes a member, unless it was claimed meanwhile."""
    query = select(table).where(table.c.id == member.id, table.c.version == member.version, table.c.pool.is_not(None))
    row = connection.execute(query).mappings().one_or_none()
    if row is None or row["operation_id"] is not None:
        return None
    arguments = {POOL: member.pool}
    return accepting.take(connection, rows.sandbox(row), Verb.DELETE, None, desired=State.DELETED, arguments=arguments)


def forget(connection: Connection, row: PoolRow) -> bool:
    """Removes a pool that is draining and has no members any more."""
    left = select(func.count()).where(
        table.c.project == row.project, table.c.pool == row.name, table.c.state != State.DELETED
    )
    if row.state != DRAINING or connection.execute(left).scalar_one():
        return False
    gone = connection.execute(
        delete(pools).where(pools.c.project == row.project, pools.c.name == row.name, pools.c.state == DRAINING)
    )
    if gone.rowcount:
        outbox.append(connection, row.project, "pool.deleted", row.name, {})
    return bool(gone.rowcount)


def claim(
    connection: Connection, new: NewSandbox, pool: str, pool_key: str, key: IdempotencyKey | None
) -> Accepted | None:
    """Makes a member of `pool`, or of any of the project, the sandbox that was asked for; None where none fits now.

    Raises `idempotency.Answered`, and what `quotas.admit_claim` does.
    """
    idempotency.check(connection, new.project, key)
    wanted = {
        "project": new.project,
        "pool_key": pool_key,
        "node_id": new.node_id,
        "vcpus": new.shape.vcpus,
        "memory_mib": new.shape.memory_mib,
        "disk_mib": new.shape.disk_mib,
    }
    query = _READY if pool == ANY else _READY.where(table.c.pool == pool)
    found = connection.execute(query, wanted).mappings().one_or_none()
    if found is None:
        return None
    member = rows.sandbox(found)
    quotas.admit_claim(connection, new.project)
    if new.policy is not None:
        policies.require_sandbox_tier(connection, new.project, new.policy)
    now = time.time()
    operation = accepting.new_create(new.project, member.id, now, {CLAIM: member.pool})
    asked = msgspec.structs.asdict(accepting.row_of(new, operation, member.id, now))
    # What the machine is stays; what it is for is new.
    kept = {"id", "node_id", "version", "generation", "observed_sequence", "isolation", "boot_id", "last_process_id"}
    kept |= {"policy_applied", "policy_conditions"}
    values: dict[str, Any] = {name: value for name, value in asked.items() if name not in kept}
    values["policy_revision"] = member.policy_revision + 1  # its node knows the member's
    taken = connection.execute(
        update(table)
        .where(
            table.c.id == member.id,
            table.c.version == member.version,
            table.c.operation_id.is_(None),
            table.c.pool.is_not(None),
        )
        .values(**values, version=member.version + 1)
        .returning(table)
    )
    row = taken.mappings().one_or_none()
    if row is None:
        return None
    accepting.keep_accepted(connection, operation, key)
    return Accepted(sandbox=rows.sandbox(row), operation=operation, run=True)


def claim_or_create(
    connection: Connection, new: NewSandbox, pool: str, pool_key: str, key: IdempotencyKey | None
) -> Accepted:
    """What `claim` does or, where no member fits now, `accepting.accept_create`: a creation waits for one transaction."""
    claimed = claim(connection, new, pool, pool_key, key)
    return claimed if claimed is not None else accepting.accept_create(connection, new, key)


def _set(connection: Connection, row: PoolRow, **values: Any) -> None:
    connection.execute(
        update(pools)
        .where(pools.c.project == row.project, pools.c.name == row.name)
        .values(**values, updated_at=time.time())
    )
