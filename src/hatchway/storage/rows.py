"""Rows as values. A row that came out of a transaction is a snapshot: nobody else sees changes to it."""

from typing import Any

import msgspec
from sqlalchemy import RowMapping

from hatchway.domain.lifecycle import SnapshotKind, State, Verb
from hatchway.domain.lifetimes import OnTimeout


class SandboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox: what is wanted of it, what is known of it, and the operation in flight."""

    id: str
    project: str
    name: str | None
    state: State
    desired: State
    version: int
    generation: int
    node_id: str
    observed_sequence: int
    operation_id: str | None
    template: str
    template_digest: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    metadata: dict[str, str]
    env: dict[str, str]
    require_isolation: str | None
    isolation: str | None
    boot_id: str | None
    cause: str | None
    reason: str
    last_process_id: int
    forked_from: str | None
    """The sandbox that it branched off from."""
    snapshot_id: str | None
    """The snapshot that it was made from."""
    head_snapshot_id: str | None
    """The snapshot that its present state goes back to: the parent of the next one."""
    stored_bytes: int | None
    artifact: str | None
    """What a suspended sandbox takes on its node's disk for its memory, in octets."""
    created_at: float
    updated_at: float
    deleted_at: float | None
    timeout_s: float | None = None
    """How long it may run before `on_timeout` is done; None for no bound."""
    idle_timeout_s: float | None = None
    """How long nobody may use it."""
    on_timeout: OnTimeout = OnTimeout.SUSPEND
    auto_wake: bool = False
    """Whether traffic wakes it."""
    expires_at: float | None = None
    """The deadline while it runs."""
    left_s: float | None = None
    """What is left of its time while it does not run."""
    active_at: float | None = None
    """When it was last used, as far as that is known; None while it does not run."""
    tries: int = 0
    """How often what is due at its deadline has failed."""
    retry_at: float | None = None
    due_at: float | None = None
    """When it has to be looked at next."""
    state_since: float | None = None
    schedule: dict[str, Any] | None = None
    """A `domain.schedules.Schedule`, as plain data."""
    disk_due_at: float | None = None
    full_due_at: float | None = None
    pool: str | None = None
    """The pool that it is a member of, which hides it; None for a sandbox of its own."""
    pool_key: str | None = None
    """What a member was made of: release and machine monitor."""
    policy: str | None = None
    """The policy of the tier `sandbox` that it refers to by name."""
    policy_document: str | None = None
    """Or the document that was given with it, in canonical form."""
    credentials: list[str] | None = None
    """Ids of the credentials that it may use; None: all that its policy binds."""
    policy_revision: int = 0
    """Counts every change of what may leave it, in whichever tier."""
    policy_applied: int = 0
    """The revision that its node says is in force."""
    policy_conditions: dict[str, str] | None = None
    """What its node says keeps it from what its policy allows."""
    annotations: dict[str, Any] | None = None
    """What programs keep with it for themselves; None: nothing."""


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """One pool: sandboxes that are made ahead. `state`: `active`, or `draining` when it is being deleted."""

    project: str
    name: str
    state: str
    template: str
    template_digest: str
    """What the template names now."""
    pool_key: str
    """What members are made of; one that was made of something else is replaced."""
    node_id: str
    size: int
    vcpus: int
    memory_mib: int
    disk_mib: int
    condition: str
    """What keeps it from being full; "" when nothing does."""
    retry_at: float | None
    created_at: float
    updated_at: float


class CredentialRow(msgspec.Struct, frozen=True, kw_only=True):
    """One credential, as it was recorded last: where its value comes from, and where it may go."""

    project: str
    name: str
    version: int
    """0: it was not made yet."""
    changing_version: int
    """The last change that was begun."""
    changing_until: float | None
    """When that should have come to its end (Unix seconds); None: it has."""
    kind: str
    """`store env file vault`."""
    source: dict[str, str]
    """What the kind needs besides a value, which is never here."""
    hosts: tuple[str, ...]
    created_at: float
    updated_at: float


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. `tier`: `platform project template sandbox`; those of `platform` have no project ("")."""

    project: str
    name: str
    tier: str
    template: str | None
    """The template, by its name, whose sandboxes it holds for; tier `template` alone."""
    version: int
    """From 1, counted up with every change."""
    document: str
    """JSON in canonical form."""
    digest: str
    """`sha256:…` of that."""
    created_at: float
    updated_at: float

    @property
    def etag(self) -> str:
        """Names this version, also where a policy of the same name was deleted and made anew."""
        return f"{self.version}-{self.digest[7:19]}"


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One asynchronous request, from its acceptance to its end; `target` is the id of its sandbox, or of the snapshot that it imports."""

    id: str
    project: str
    target: str
    kind: Verb
    status: str
    phase: str
    progress: float | None
    arguments: dict[str, Any]
    """What the verb needs besides the sandbox: `snapshot`, `children`."""
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    controller_id: str | None = None
    """The control process that executes it; None where there is only one, or nobody has claimed it."""

    @property
    def of_snapshot(self) -> bool:
        """Whether its target is no sandbox, but a snapshot that is imported."""
        return self.kind is Verb.IMPORT and "snapshot" in self.arguments

    @property
    def about(self) -> dict[str, Any]:
        """Its target, under the name of what that is."""
        return {"snapshot" if self.of_snapshot else "sandbox": self.target}


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot. `state`: `pending ready failed deleting deleted`; the sizes, in octets, and the digest are known when it is `ready`."""

    id: str
    project: str
    sandbox_id: str
    node_id: str
    operation_id: str | None
    kind: SnapshotKind
    name: str | None
    parent_id: str | None
    state: str
    template: str
    template_digest: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    disk_bytes: int | None
    memory_bytes: int | None
    digest: str | None
    error: dict[str, Any] | None
    created_at: float
    updated_at: float
    scheduled: bool = False
    """A schedule made it, and may delete it again."""
    origin: dict[str, Any] | None = None
    """Of one that was imported, what its archive said: `sandbox snapshot key` (ids of where it was made, and of the key that signed it)."""
    last_process_id: int = 0
    """The highest number that a process of its sandbox had had: what is made from it counts on from there."""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One command session. `spec` is a `wire.node.SessionSpec`, `status` the last `wire.node.SessionStatus` heard, as plain data."""

    id: str
    project: str
    sandbox_id: str
    process_id: int
    spec: dict[str, Any]
    state: str
    status: dict[str, Any] | None
    forked_from: str | None
    """The session of the source whose process runs on in this one."""
    created_at: float
    updated_at: float


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One API key, without its secret."""

    id: str
    project: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked_at: float | None
    development: bool


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the outbox; `subject` is the id of what it is about."""

    sequence: int
    project: str
    kind: str
    subject: str
    data: dict[str, Any]
    created_at: float
    actor: str | None = None
    """Id of the key by whose right it was done; None: the control plane did it by itself."""
    request_id: str | None = None
    unseen: bool = False
    """It is for the audit journal alone, and in no stream of events."""


def sandbox(row: RowMapping) -> SandboxRow:
    """From a row of the table."""
    values = dict(row)
    values["state"] = State(values["state"])
    values["desired"] = State(values["desired"])
    values["on_timeout"] = OnTimeout(values["on_timeout"])
    return SandboxRow(**values)


def operation(row: RowMapping) -> OperationRow:
    """From a row of the table."""
    values = dict(row)
    values["kind"] = Verb(values["kind"])
    return OperationRow(**values)


def snapshot(row: RowMapping) -> SnapshotRow:
    """From a row of the table."""
    values = dict(row)
    values["kind"] = SnapshotKind(values["kind"])
    return SnapshotRow(**values)
