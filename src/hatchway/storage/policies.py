"""Policies: what may leave sandboxes, by tier, and what of it each sandbox has.

Every change counts up the revision of every sandbox that it concerns, in the same transaction. What a node has is compared with that:
a change that was not told, or got lost, is told again.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, insert, literal, or_, select, update

from hatchway.domain.errors import Conflict, Exhausted, NotFound, Unprocessable
from hatchway.domain.lifecycle import State
from hatchway.storage import outbox, projects, rows, sandboxes
from hatchway.storage.rows import PolicyRow, SandboxRow
from hatchway.storage.tables import policies
from hatchway.storage.tables import sandboxes as table
from hatchway.wire.egress import EgressSpec, EgressState, PolicyDocument

PLATFORM, PROJECT, TEMPLATE, SANDBOX = "platform", "project", "template", "sandbox"
TIERS = (PLATFORM, PROJECT, TEMPLATE, SANDBOX)
INSTALLATION = ""
"""Project of the policies of the tier `platform`."""
INLINE = "inline"
"""What the document is called that was given with a sandbox."""
MAX_POLICIES = 256
"""Of one project, or of the installation."""
MAX_DOCUMENT = 256 * 1024
MAX_TOGETHER = 1024 * 1024
"""Octets of all documents that one project, or the installation, gives every sandbox: what a sandbox has must fit into one message."""
LIVE = (State.RUNNING, State.PAUSED)
"""States in which a change is told to the node; from the others on it goes with the verb that makes the sandbox run."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is to be stored; `document` is JSON in canonical form."""

    project: str
    name: str
    tier: str
    template: str | None
    document: str


def owner_of(tier: str | None, project: str) -> str:
    """Whose a policy of a tier is."""
    return INSTALLATION if tier == PLATFORM else project


def find(connection: Connection, owner: str, name: str) -> PolicyRow | None:
    """The policy, or None."""
    query = select(policies).where(policies.c.project == owner, policies.c.name == name)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else PolicyRow(**row)


def get(connection: Connection, owner: str, name: str) -> PolicyRow:
    """Raises `NotFound("unknown_policy")`."""
    row = find(connection, owner, name)
    if row is None:
        raise unknown(name)
    return row


def unknown(name: str) -> NotFound:
    """The error of a policy that is not there."""
    return NotFound(
        "unknown_policy", f"There is no policy {name[:64]!r}.", "GET /v1/policies lists those that there are."
    )


def list_all(connection: Connection, owners: Sequence[str], tier: str | None = None) -> list[PolicyRow]:
    """The policies of a project and of the installation, the highest tier first, then by name; without their documents, which may be large."""
    shown = [literal("").label("document") if column.name == "document" else column for column in policies.c]
    query = select(*shown).where(policies.c.project.in_(owners))
    if tier is not None:
        query = query.where(policies.c.tier == tier)
    return _in_order(PolicyRow(**row) for row in connection.execute(query).mappings())


def _in_order(found: Iterable[PolicyRow]) -> list[PolicyRow]:
    return sorted(found, key=lambda row: (TIERS.index(row.tier), row.name))


def put(connection: Connection, wanted: Wanted, if_match: str | None, *, only_new: bool) -> tuple[PolicyRow, bool]:
    """Makes a policy or changes one; tells whether it is new. What does not change anything counts nothing up.

    Raises `Conflict` (`policy_changed` where it is not what `if_match` names, `policy_exists`, `policy_tier` for another tier than it has),
    `Exhausted("policy_limit")`, `NotFound("unknown_project")`, `Conflict("project_deleting")`.
    """
    if wanted.project != INSTALLATION:
        projects.hold(connection, wanted.project)
    before = find(connection, wanted.project, wanted.name)
    _check_version(before, wanted.name, if_match)
    if before is not None and only_new:
        raise Conflict(
            "policy_exists", f"There is a policy {wanted.name!r} already.", "Choose another name, or change that one."
        )
    if before is not None and before.tier != wanted.tier:
        raise Conflict(
            "policy_tier",
            f"The policy {wanted.name} is of the tier {before.tier}.",
            "Give it another name, or delete that one before.",
            tier=before.tier,
        )
    digest = "sha256:" + hashlib.sha256(wanted.document.encode()).hexdigest()
    if before is not None and (before.digest, before.template) == (digest, wanted.template):
        return before, False
    _check_bounds(connection, wanted)
    now = time.time()
    row = PolicyRow(
        **msgspec.structs.asdict(wanted),
        version=1 if before is None else before.version + 1,
        digest=digest,
        created_at=now if before is None else before.created_at,
        updated_at=now,
    )
    values = msgspec.structs.asdict(row)
    if before is None:
        connection.execute(insert(policies), values)
    else:
        changed = connection.execute(
            update(policies)
            .where(policies.c.project == row.project, policies.c.name == row.name, policies.c.version == before.version)
            .values(**values)
        )
        if changed.rowcount != 1:
            raise _changed(before, row.name)
        if before.template != row.template:
            count_up(connection, before)
    count_up(connection, row)
    _say(connection, row, "put")
    return row, before is None


def remove(connection: Connection, owner: str, name: str, if_match: str | None) -> PolicyRow:
    """Deletes a policy; what it allowed is not allowed any more. Raises `NotFound`, `Conflict` (`policy_in_use policy_changed`)."""
    row = get(connection, owner, name)
    _check_version(row, name, if_match)
    users = _refer(connection, row)
    if users:
        raise Conflict(
            "policy_in_use",
            f"{users} sandboxes refer to the policy {name}.",
            "Give them another policy, or delete them first.",
            sandboxes=users,
        )
    connection.execute(delete(policies).where(policies.c.project == owner, policies.c.name == name))
    count_up(connection, row)
    _say(connection, row, "deleted")
    return row


def count_up(connection: Connection, policy: PolicyRow) -> None:
    """The sandboxes that a policy concerns have a new revision."""
    if policy.tier == PROJECT:
        of: ColumnElement[bool] = table.c.project == policy.project
    elif policy.tier == TEMPLATE:
        named = table.c.template == policy.template
        for mark in ":@":
            named = or_(named, table.c.template.startswith(f"{policy.template}{mark}", autoescape=True))
        of = (table.c.project == policy.project) & named
    elif policy.tier == SANDBOX:
        of = (table.c.project == policy.project) & (table.c.policy == policy.name)
    else:
        of = table.c.id.is_not(None)
    connection.execute(
        update(table).where(of, table.c.state != State.DELETED).values(policy_revision=table.c.policy_revision + 1)
    )


def require_sandbox_tier(connection: Connection, project: str, name: str) -> None:
    """Raises `Unprocessable("unknown_policy")` for a name that no sandbox can refer to."""
    row = find(connection, project, name)
    if row is None or row.tier != SANDBOX:
        why = "There is no policy" if row is None else f"It has the tier {row.tier}: no sandbox refers to"
        raise Unprocessable(
            "unknown_policy",
            f"{why} {name[:64]!r}.",
            "Name one of the tier `sandbox` (GET /v1/policies?tier=sandbox), or give the document itself.",
            field="policy",
        )


def assign(connection: Connection, row: SandboxRow, given: dict[str, Any]) -> dict[str, Any]:
    """The columns of a sandbox that gets another policy (`policy`, `policy_document`) or other `credentials`. Raises as `require_sandbox_tier`."""
    changes = {name: value for name, value in given.items() if getattr(row, name) != value}
    if not changes:
        return {}
    name = given.get("policy")
    if name is not None:
        require_sandbox_tier(connection, row.project, name)
    return {**changes, "policy_revision": row.policy_revision + 1}


# -- what a sandbox has


def effective(connection: Connection, sandbox_id: str) -> EgressSpec | None:
    """All that decides what leaves a sandbox, as of now; None where there is no such sandbox."""
    row = sandboxes.find(connection, sandbox_id)
    return None if row is None else effective_of(connection, row)


def effective_of(connection: Connection, row: SandboxRow) -> EgressSpec:
    """Like `effective`, for a row that was read in this transaction."""
    named = (policies.c.tier == TEMPLATE) & (policies.c.template == template_name(row.template))
    own = (policies.c.tier == SANDBOX) & (policies.c.name == row.policy)
    query = select(policies).where(
        policies.c.project.in_((INSTALLATION, row.project)), or_(policies.c.tier.in_((PLATFORM, PROJECT)), named, own)
    )
    documents = [
        PolicyDocument(tier=one.tier, name=one.name, version=one.version, text=one.document)
        for one in _in_order(PolicyRow(**found) for found in connection.execute(query).mappings())
    ]
    if row.policy_document is not None:
        documents.append(
            PolicyDocument(tier=SANDBOX, name=INLINE, version=row.policy_revision, text=row.policy_document)
        )
    return EgressSpec(
        revision=row.policy_revision,
        documents=tuple(documents),
        credentials=None if row.credentials is None else tuple(row.credentials),
    )


def template_name(reference: str) -> str:
    """The name in `name`, `name:tag` or `name@sha256:…`."""
    return reference.partition("@")[0].partition(":")[0]


def untold(connection: Connection, node_id: str, limit: int, after: str = "") -> list[SandboxRow]:
    """Sandboxes of a node that run and whose node has not said that their newest revision is in force, by id."""
    query = (
        select(table)
        .where(
            table.c.node_id == node_id,
            table.c.state.in_(LIVE),
            table.c.pool.is_(None),
            table.c.policy_applied != table.c.policy_revision,
            table.c.id > after,
        )
        .order_by(table.c.id)
        .limit(limit)
    )
    return [rows.sandbox(row) for row in connection.execute(query).mappings()]


def told(connection: Connection, told_of: Sequence[tuple[str, int, EgressState]]) -> None:
    """What nodes answered: by sandbox and generation, what is in force. An older revision than is known changes nothing."""
    for sandbox_id, generation, state in told_of:
        connection.execute(
            update(table)
            .where(
                table.c.id == sandbox_id,
                table.c.generation == generation,
                table.c.policy_applied <= state.revision,
            )
            .values(policy_applied=state.revision, policy_conditions=state.conditions or None)
        )


def _check_version(row: PolicyRow | None, name: str, if_match: str | None) -> None:
    if if_match is not None and (row is None or if_match not in ("*", row.etag)):
        raise _changed(row, name)


def _changed(row: PolicyRow | None, name: str) -> Conflict:
    return Conflict(
        "policy_changed",
        f"The policy {name} is not what the request was made for.",
        "Look at it again (GET), and repeat the request with its ETag.",
        etag=None if row is None else row.etag,
    )


def _check_bounds(connection: Connection, wanted: Wanted) -> None:
    mine = (policies.c.project == wanted.project) & (policies.c.name != wanted.name)
    number = connection.execute(select(func.count()).where(mine)).scalar_one()
    if number >= MAX_POLICIES:
        raise Exhausted("policy_limit", f"There are {number} policies.", "Delete some.", limit=MAX_POLICIES)
    size = len(wanted.document)
    if wanted.tier != SANDBOX:
        together = select(func.coalesce(func.sum(func.length(policies.c.document)), 0)).where(
            mine, policies.c.tier != SANDBOX
        )
        size += connection.execute(together).scalar_one()
    if size > MAX_TOGETHER:
        raise Exhausted(
            "policy_limit", f"The documents have {size} octets together.", "Make them shorter.", limit=MAX_TOGETHER
        )


def _refer(connection: Connection, row: PolicyRow) -> int:
    if row.tier != SANDBOX:
        return 0
    query = select(func.count()).where(
        table.c.project == row.project, table.c.policy == row.name, table.c.state != State.DELETED
    )
    return int(connection.execute(query).scalar_one())


def _say(connection: Connection, row: PolicyRow, what: str) -> None:
    data = {"change": what, "tier": row.tier, "version": row.version, "digest": row.digest}
    if row.template is not None:
        data["template"] = row.template
    outbox.append(connection, row.project or outbox.INSTALLATION, "policy.changed", row.name, data)
