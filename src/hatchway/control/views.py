"""What the API shows: the objects of v1, and how they are made from rows. Times are Unix seconds; these types are the OpenAPI schemas."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hatchway.control.engine import Live
from hatchway.domain.lifecycle import State
from hatchway.domain.schedules import Schedule
from hatchway.storage.rows import KeyRow, OperationRow, SandboxRow, SessionRow, SnapshotRow
from hatchway.wire.node import Exit, SessionLimits, SessionStatus, TemplateRelease, TerminalSize


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is shown."""


class OperationError(View, frozen=True, kw_only=True):
    """Why an operation failed or was cancelled."""

    code: str
    message: str
    cause: str
    remedy: str


class Operation(View, frozen=True, kw_only=True):
    """The record of one lifecycle request. `status`: `pending running succeeded failed cancelled`; `target` is the id of its sandbox, or of the snapshot that it imports."""

    id: str
    kind: str
    target: str
    status: str
    phase: str
    progress: float | None
    result: dict[str, Any] | None
    error: OperationError | None
    created_at: float
    started_at: float | None
    finished_at: float | None


class OperationInFlight(View, frozen=True, kw_only=True):
    """What a sandbox shows of the operation that is working on it."""

    id: str
    kind: str | None
    status: str | None


class Condition(View, frozen=True, kw_only=True):
    """Something that holds besides the state: `node_unreachable`, `foreign_generation`."""

    type: str
    message: str


class SandboxPolicy(View, frozen=True, kw_only=True):
    """What may leave a sandbox. `name` is of the policy that it refers to, `own` that it has a document of its own; both come beside
    what higher tiers say (`/v1/sandboxes/{id}/policy` shows all of it). It holds on the node when `applied_revision` is `revision`."""

    name: str | None
    own: bool
    credentials: tuple[str, ...] | None
    revision: int
    applied_revision: int
    conditions: dict[str, str]


class Sandbox(View, frozen=True, kw_only=True):
    """A sandbox: the last stable state, what is desired of it, and why it is as it is. Its environment is not shown, its annotations
    where they are asked for."""

    id: str
    project: str
    name: str | None
    state: str
    desired: str
    operation: OperationInFlight | None
    conditions: tuple[Condition, ...]
    cause: str | None
    reason: str
    template: str
    template_digest: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    metadata: dict[str, str]
    isolation: str | None
    require_isolation: str | None
    boot_id: str | None
    forked_from: str | None
    snapshot: str | None
    head_snapshot: str | None
    stored_bytes: int | None
    timeout_s: float | None
    idle_timeout_s: float | None
    on_timeout: str
    auto_wake: bool
    expires_at: float | None
    left_s: float | None
    snapshots: Schedule | None
    policy: SandboxPolicy
    node: str
    generation: int
    version: int
    created_at: float
    updated_at: float
    state_since: float | None
    deleted_at: float | None
    annotations: dict[str, Any] | UnsetType = UNSET


class SnapshotOrigin(View, frozen=True, kw_only=True):
    """What an imported snapshot was where it was exported: of which sandbox, under which id (null: its archive does not say), signed with which key."""

    sandbox: str
    snapshot: str | None
    key: str


class Snapshot(View, frozen=True, kw_only=True):
    """A kept state of a sandbox, with a life of its own. `state`: `pending ready failed deleting deleted`; sizes in octets; `origin` of an imported one."""

    id: str
    project: str
    sandbox_id: str
    kind: str
    name: str | None
    parent: str | None
    state: str
    error: OperationError | None
    template: str
    template_digest: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    disk_bytes: int | None
    memory_bytes: int | None
    digest: str | None
    scheduled: bool
    origin: SnapshotOrigin | None
    node: str
    created_at: float
    updated_at: float


class Session(View, frozen=True, kw_only=True):
    """A command session. `state`: `created running exited ended lost`. `token` and its expiry are in the answers to POST only."""

    id: str
    sandbox_id: str
    process_id: int
    state: str
    argv: tuple[str, ...]
    cwd: str | None
    user: str | None
    pty: TerminalSize | None
    stdin: bool
    timeout_s: float | None
    timeout_scope: str
    linger_s: float | None
    limits: SessionLimits | None
    retain_s: float
    metadata: dict[str, str]
    forked_from: str | None
    attach_url: str | None
    pid: int | None
    exit: Exit | None
    stdout_bytes: int
    stderr_bytes: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    retain_until: float | None
    env: dict[str, str] | UnsetType = UNSET


class OpenedSession(Session, frozen=True, kw_only=True):
    """A command session with the right to attach to it."""

    token: str
    token_expires_at: float


class SandboxToken(View, frozen=True, kw_only=True):
    """A data-plane token of one sandbox. `port_url` has `{port}` where the number of a port belongs."""

    token: str
    token_id: str
    expires_at: float
    scopes: tuple[str, ...]
    sandbox_id: str
    data_plane_url: str
    port_url: str


class Template(View, frozen=True, kw_only=True):
    """A release of a template."""

    name: str
    tag: str
    digest: str
    size_bytes: int
    created_at: float
    description: str


class Key(View, frozen=True, kw_only=True):
    """An API key, without its secret."""

    id: str
    project: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    development: bool


class NewKey(Key, frozen=True, kw_only=True):
    """A key that was just made, with its secret in `key`: shown this once, stored nowhere."""

    key: str


class AcceptedAnswer(View, frozen=True, kw_only=True):
    """The sandbox, and the operation that changes it. 202 while the operation is open, 200 when it has ended."""

    sandbox: Sandbox
    operation: Operation


class ImportAnswer(View, frozen=True, kw_only=True):
    """What is made from an archive: `made` says which of the two, `sandbox` or `snapshot`, and that one is beside the operation that makes it."""

    made: str
    sandbox: Sandbox | UnsetType = UNSET
    snapshot: Snapshot | UnsetType = UNSET
    operation: Operation


class SandboxAnswer(View, frozen=True, kw_only=True):
    """One sandbox."""

    sandbox: Sandbox


class SandboxPage(View, frozen=True, kw_only=True):
    """Sandboxes, newest first; `next_cursor` asks for the next page, null at the end."""

    sandboxes: tuple[Sandbox, ...]
    next_cursor: str | None
    total: int | UnsetType = UNSET


class SnapshotAnswer(View, frozen=True, kw_only=True):
    """One snapshot."""

    snapshot: Snapshot


class SnapshotPage(View, frozen=True, kw_only=True):
    """Snapshots, newest first; `next_cursor` asks for the next page, null at the end."""

    snapshots: tuple[Snapshot, ...]
    next_cursor: str | None


class OperationAnswer(View, frozen=True, kw_only=True):
    """One operation."""

    operation: Operation


class OperationPage(View, frozen=True, kw_only=True):
    """Operations, newest first; `next_cursor` asks for the next page, null at the end."""

    operations: tuple[Operation, ...]
    next_cursor: str | None


class SessionAnswer(View, frozen=True, kw_only=True):
    """One session."""

    session: Session


class OpenedSessionAnswer(View, frozen=True, kw_only=True):
    """One session that can be attached to."""

    session: OpenedSession


class SessionPage(View, frozen=True, kw_only=True):
    """Sessions, newest first; `next_cursor` asks for the next page, null at the end."""

    sessions: tuple[Session, ...]
    next_cursor: str | None


class Pool(View, frozen=True, kw_only=True):
    """Sandboxes that are made ahead. `state`: `active draining`; `condition` says what keeps it from being full."""

    name: str
    project: str
    state: str
    template: str
    template_digest: str
    size: int
    ready: int
    making: int
    vcpus: int
    memory_mib: int
    disk_mib: int
    condition: str | None
    node: str
    created_at: float
    updated_at: float


class PoolAnswer(View, frozen=True, kw_only=True):
    """One pool."""

    pool: Pool


class PoolPage(View, frozen=True, kw_only=True):
    """The project's pools, by name."""

    pools: tuple[Pool, ...]
    next_cursor: str | None


class TemplatePage(View, frozen=True, kw_only=True):
    """Templates of the nodes that are connected."""

    templates: tuple[Template, ...]
    next_cursor: str | None


class TemplateAnswer(View, frozen=True, kw_only=True):
    """One template release."""

    template: Template


class KeyAnswer(View, frozen=True, kw_only=True):
    """One key."""

    key: Key


class NewKeyAnswer(View, frozen=True, kw_only=True):
    """The key that was made."""

    key: NewKey


class KeyPage(View, frozen=True, kw_only=True):
    """The project's keys, oldest first."""

    keys: tuple[Key, ...]
    next_cursor: str | None


class EventView(View, frozen=True, kw_only=True):
    """Data of one event of the stream; its SSE `id` is `sequence`, its SSE `event` is `kind`."""

    sequence: int
    kind: str
    subject: str
    project: str
    data: dict[str, Any]
    created_at: float


class Health(View, frozen=True, kw_only=True):
    """`ok`, or `unready` with what is lacking."""

    status: str
    checks: dict[str, str]


class Problem(View, frozen=True, kw_only=True):
    """What every error answers. Further members depend on `code`, for example `operation`, `state`, `verbs`, `field`, `allowed`."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    cause: str
    remedy: str


def operation(row: OperationRow, live: Live | None = None) -> Operation:
    """Shows an operation, as far as the engine knows it to be."""
    status, phase, progress, started_at = row.status, row.phase, row.progress, row.started_at
    if live is not None and row.finished_at is None and live.started_at is not None:
        status, phase, progress, started_at = "running", live.phase, live.progress, live.started_at
    return Operation(
        id=row.id,
        kind=str(row.kind),
        target=row.target,
        status=status,
        phase=phase,
        progress=progress,
        result=row.result,
        error=_error(row.error),
        created_at=row.created_at,
        started_at=started_at,
        finished_at=row.finished_at,
    )


def _error(error: dict[str, Any] | None) -> OperationError | None:
    if error is None:
        return None
    cause = str(error.get("cause", ""))
    return OperationError(
        code=str(error.get("code", "internal")), message=cause, cause=cause, remedy=str(error.get("remedy", ""))
    )


def snapshot(row: SnapshotRow) -> Snapshot:
    """Shows a snapshot."""
    return Snapshot(
        id=row.id,
        project=row.project,
        sandbox_id=row.sandbox_id,
        kind=str(row.kind),
        name=row.name,
        parent=row.parent_id,
        state=row.state,
        error=_error(row.error),
        template=row.template,
        template_digest=row.template_digest,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        disk_bytes=row.disk_bytes,
        memory_bytes=row.memory_bytes,
        digest=row.digest,
        scheduled=row.scheduled,
        origin=None if row.origin is None else SnapshotOrigin(**row.origin),
        node=row.node_id,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def sandbox(row: SandboxRow, live: Live | None = None, conditions: tuple[Condition, ...] = ()) -> Sandbox:
    """Shows a sandbox; `live` is what the engine knows of its operation in flight."""
    in_flight = None
    if row.operation_id is not None:
        if live is not None:
            status = "pending" if live.started_at is None else "running"
            in_flight = OperationInFlight(id=row.operation_id, kind=str(live.operation.kind), status=status)
        else:
            in_flight = OperationInFlight(id=row.operation_id, kind=None, status=None)
    return Sandbox(
        id=row.id,
        project=row.project,
        name=row.name,
        state=str(row.state),
        desired=str(row.desired),
        operation=in_flight,
        conditions=() if row.state is State.DELETED else conditions,
        cause=row.cause,
        reason=row.reason,
        template=row.template,
        template_digest=row.template_digest,
        vcpus=row.vcpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        metadata=row.metadata,
        isolation=row.isolation,
        require_isolation=row.require_isolation,
        boot_id=row.boot_id,
        forked_from=row.forked_from,
        snapshot=row.snapshot_id,
        head_snapshot=row.head_snapshot_id,
        stored_bytes=row.stored_bytes,
        timeout_s=row.timeout_s,
        idle_timeout_s=row.idle_timeout_s,
        on_timeout=str(row.on_timeout),
        auto_wake=row.auto_wake,
        expires_at=row.expires_at,
        left_s=row.left_s,
        snapshots=None if row.schedule is None else msgspec.convert(row.schedule, Schedule),
        policy=SandboxPolicy(
            name=row.policy,
            own=row.policy_document is not None,
            credentials=None if row.credentials is None else tuple(row.credentials),
            revision=row.policy_revision,
            applied_revision=row.policy_applied,
            conditions=row.policy_conditions or {},
        ),
        state_since=row.state_since,
        node=row.node_id,
        generation=row.generation,
        version=row.version,
        created_at=row.created_at,
        updated_at=row.updated_at,
        deleted_at=row.deleted_at,
    )


def session_fields(row: SessionRow, status: SessionStatus | None, attach_url: str | None) -> dict[str, Any]:
    """The members of a session, with what its node last said of it."""
    spec = row.spec
    if status is None and row.status is not None:
        status = msgspec.convert(row.status, SessionStatus)
    state = row.state if row.state in ("lost", "deleted") or status is None else status.state
    pty = spec.get("pty")
    return {
        "id": row.id,
        "sandbox_id": row.sandbox_id,
        "process_id": row.process_id,
        "state": "created" if state == "new" else state,
        "argv": tuple(spec["argv"]),
        "cwd": spec.get("cwd"),
        "user": spec.get("user"),
        "pty": None if pty is None else TerminalSize(**pty),
        "stdin": spec.get("stdin", True),
        "timeout_s": spec.get("timeout_s"),
        "timeout_scope": spec.get("timeout_scope", "tree"),
        "linger_s": spec.get("linger_s"),
        "metadata": spec.get("metadata", {}),
        "limits": msgspec.convert(spec.get("limits"), SessionLimits | None),
        "retain_s": spec.get("retain_s", 3600.0),
        "forked_from": row.forked_from,
        "attach_url": attach_url,
        "pid": None if status is None else status.pid,
        "exit": None if status is None else status.exit,
        "stdout_bytes": 0 if status is None else status.stdout_bytes,
        "stderr_bytes": 0 if status is None else status.stderr_bytes,
        "created_at": row.created_at,
        "started_at": None if status is None else status.started_at,
        "ended_at": None if status is None else status.ended_at,
        "retain_until": None if status is None else status.retain_until,
    }


def key_fields(row: KeyRow) -> dict[str, Any]:
    """The members of a key."""
    return {
        "id": row.id,
        "project": row.project,
        "name": row.name,
        "prefix": row.prefix,
        "scopes": row.scopes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "last_used_at": row.last_used_at,
        "development": row.development,
    }


def template(release: TemplateRelease) -> Template:
    """Shows a template release."""
    return Template(
        name=release.name,
        tag=release.tag,
        digest=release.digest,
        size_bytes=release.size_bytes,
        created_at=release.created_at,
        description=release.description,
    )
