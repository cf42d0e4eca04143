"""What the service tells about its objects, as immutable records.

Fields that this version does not know are ignored, fields that the service leaves out have the defaults below. Times are
Unix seconds.
"""

import base64
import os
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgspec

from .errors import CommandFailed
from .events import Exit, Gap, Usage

T = TypeVar("T")


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    def as_dict(self) -> dict[str, Any]:
        """Returns the record as JSON-like values."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]  # a Struct always becomes a dict


class SandboxInfo(_Record, frozen=True, kw_only=True):
    """A sandbox as the service saw it when it answered."""

    id: str
    state: str
    """`pending running paused suspended stopped failed deleted`: the last stable state."""
    desired: str | None = None
    """The state that was last asked for."""
    project: str = ""
    name: str | None = None
    operation: dict[str, Any] | None = None
    """The operation in flight, if any: its id, kind and status."""
    conditions: tuple[dict[str, Any], ...] = ()
    """What holds besides the state, for example that the node cannot be reached."""
    template: str = ""
    template_digest: str | None = None
    vcpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    metadata: dict[str, str] = {}
    annotations: dict[str, Any] | None = None
    """What programs keep with it for themselves; None unless it was asked for."""
    isolation: str | None = None
    """`hardware` or `emulated`; None before the sandbox was first started."""
    require_isolation: str | None = None
    cause: str | None = None
    reason: str | None = None
    """For people: why it stopped or failed."""
    boot_id: str | None = None
    forked_from: str | None = None
    """The sandbox that it branched off from."""
    snapshot: str | None = None
    """The snapshot that it was made from."""
    head_snapshot: str | None = None
    """The snapshot that its present state goes back to."""
    stored_bytes: int | None = None
    """What a suspended sandbox keeps of its memory, in octets on its node's disk."""
    timeout_s: float | None = None
    """How long it runs at a time; None for no bound."""
    idle_timeout_s: float | None = None
    on_timeout: str = "suspend"
    """What is done when its time is over: `suspend pause stop delete`."""
    auto_wake: bool = False
    """Whether traffic wakes it."""
    expires_at: float | None = None
    """When its time is over, in Unix seconds, while it runs."""
    left_s: float | None = None
    """What is left of its time while it does not run."""
    policy: dict[str, Any] | None = None
    """What may leave it: `name own credentials revision applied_revision conditions`."""
    snapshots: dict[str, Any] | None = None
    """The schedule of its snapshots: `disk_every_s full_every_s keep max_bytes`."""
    state_since: float | None = None
    """When it came to its state."""
    created_at: float | None = None
    updated_at: float | None = None
    deleted_at: float | None = None


class Snapshot(_Record, frozen=True, kw_only=True):
    """A kept state of a sandbox, with a life of its own; sizes in octets."""

    id: str
    state: str = "pending"
    """`pending ready failed deleting deleted`."""
    sandbox_id: str | None = None
    kind: str = "full"
    """`disk`, or `full`: memory and disk."""
    name: str | None = None
    parent: str | None = None
    """The snapshot that the sandbox went on from when this one was made."""
    error: dict[str, Any] | None = None
    template: str = ""
    template_digest: str | None = None
    vcpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    disk_bytes: int | None = None
    memory_bytes: int | None = None
    digest: str | None = None
    scheduled: bool = False
    """Whether a schedule made it, which then may remove it."""
    origin: dict[str, Any] | None = None
    """Of an imported one: `sandbox`, `snapshot` and `key`, the ids that its archive was made of and signed with."""
    created_at: float | None = None
    updated_at: float | None = None


class Pool(_Record, frozen=True, kw_only=True):
    """Sandboxes that are made ahead, which creations claim."""

    name: str
    state: str = "active"
    """`active`, or `draining`: it is gone when its last member is."""
    template: str = ""
    template_digest: str | None = None
    size: int = 0
    """How many it shall hold."""
    ready: int = 0
    making: int = 0
    vcpus: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    condition: str | None = None
    """What keeps it from being full."""
    created_at: float | None = None
    updated_at: float | None = None


class Policy(_Record, frozen=True, kw_only=True):
    """A policy of what may leave sandboxes. `document` comes with one that is asked for by name."""

    name: str
    tier: str
    project: str | None = None
    template: str | None = None
    version: int = 1
    digest: str = ""
    etag: str = ""
    """Names this version, for `if_match`."""
    created_at: float | None = None
    updated_at: float | None = None
    document: dict[str, Any] | None = None


class EffectivePolicy(_Record, frozen=True, kw_only=True):
    """All that decides what leaves a sandbox. It holds on its node when `applied_revision` is `revision`."""

    sandbox_id: str
    revision: int = 0
    applied_revision: int = 0
    conditions: dict[str, str] = msgspec.field(default_factory=dict)
    """What keeps it from what its policy allows."""
    credentials: tuple[str, ...] | None = None
    documents: tuple[dict[str, Any], ...] = ()
    """Each with `tier name version document`, the highest tier first."""


class Export(_Record, frozen=True, kw_only=True):
    """An archive of a sandbox or a snapshot that waits to be fetched."""

    id: str
    sandbox: str
    state: str = "pending"
    """`pending ready failed`."""
    snapshot: str | None = None
    operation: str | None = None
    size_bytes: int | None = None
    """Of the archive, without encryption."""
    digest: str | None = None
    signed_by: str = ""
    """What another installation has to trust to take it in."""
    error: dict[str, Any] | None = None
    created_at: float | None = None
    expires_at: float | None = None


class GuestUsage(_Record, frozen=True, kw_only=True):
    """What the guest says that it uses; whoever is root in it can make it say anything. CPU times are since its boot."""

    uptime_s: float = 0.0
    cpus: int = 0
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    load1: float = 0.0
    processes: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    memory_cached_bytes: int = 0
    """What the guest keeps of files, and gives back when memory is needed."""
    disk_total_bytes: int = 0
    disk_free_bytes: int = 0


class HostUsage(_Record, frozen=True, kw_only=True):
    """What the host counts of the sandbox's machine monitor; zeros where nothing runs, or nothing is counted."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    """With the page cache that it was the first to touch."""
    memory_private_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    processes: int = 0
    oom_kills: int = 0
    disk_bytes: int = 0
    """What its own disk takes; the template's is shared."""


class SandboxMetrics(_Record, frozen=True, kw_only=True):
    """What a sandbox uses, at `observed_at`."""

    sandbox_id: str
    state: str
    observed_at: float = 0.0
    guest: GuestUsage | None = None
    """None where it does not run or does not answer; `guest_error` says why."""
    guest_error: str = ""
    host: HostUsage = HostUsage()


class OperationError(_Record, frozen=True, kw_only=True):
    """Why an operation failed."""

    code: str = "failed"
    message: str = ""
    cause: str = ""
    remedy: str = ""


class Operation(_Record, frozen=True, kw_only=True):
    """The record of one lifecycle request."""

    id: str
    kind: str
    status: str
    """`pending running succeeded failed cancelled`."""
    target: str | None = None
    """The id of the sandbox."""
    phase: str | None = None
    progress: float | None = None
    result: Any = None
    error: OperationError | None = None
    created_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self.status in ("succeeded", "failed", "cancelled")


class SessionInfo(_Record, frozen=True, kw_only=True):
    """A command session: one process in a sandbox, from before its start until its output is dropped."""

    id: str
    state: str = "created"
    """`created` (not started: attaching starts it), `running`, `exited` (the leader ended), `ended`, `lost`."""
    sandbox_id: str | None = None
    process_id: int | None = None
    forked_from: str | None = None
    """The session of another past or sandbox whose process runs on in this one."""
    argv: tuple[str, ...] | None = None
    pid: int | None = None
    exit: Exit | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    created_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    retain_until: float | None = None
    cwd: str | None = None
    user: str | None = None
    pty: dict[str, int] | None = None
    stdin: bool = True
    metadata: dict[str, str] = {}
    env: dict[str, str] | None = None
    """Where it was asked for."""


class Access(_Record, frozen=True, kw_only=True):
    """How to reach a session on its node: URL and a token for this session alone."""

    attach_url: str
    token: str
    token_expires_at: float | None = None


class SandboxToken(_Record, frozen=True, kw_only=True):
    """The right to use one sandbox on the data plane without a key, until `expires_at`.

    `port_url` has `{port}` where the number of a port belongs.
    """

    token: str
    token_id: str = ""
    expires_at: float
    scopes: tuple[str, ...] = ()
    sandbox_id: str = ""
    data_plane_url: str
    port_url: str = ""


class Limits(_Record, frozen=True, kw_only=True):
    """What a command and its children may use. `memory_mib`, `processes` and `cpu_s` (seconds of CPU time) hold for all of them
    together, `open_files` and `file_size_mib` (the largest file that is written) for each.
    """

    memory_mib: int | None = None
    cpu_s: float | None = None
    open_files: int | None = None
    processes: int | None = None
    file_size_mib: int | None = None


class LeadsTo(_Record, frozen=True, kw_only=True):
    """What a symbolic link leads to in the end."""

    path: str
    type: str
    mode: int = 0
    path_base64: str | None = None

    def __post_init__(self) -> None:
        if self.path_base64 is not None:
            msgspec.structs.force_setattr(self, "path", os.fsdecode(base64.b64decode(self.path_base64)))


class FileEntry(_Record, frozen=True, kw_only=True):
    """A file, folder, link or the like in a sandbox.

    Names are as `os.fsdecode` gives them: what is not UTF-8 has surrogates, and every method of `files` takes it so.
    """

    path: str
    name: str
    type: str
    """`file dir symlink fifo socket char block`."""
    size: int = 0
    mode: int = 0
    """The permission bits, as a number: `0o644`."""
    uid: int = 0
    gid: int = 0
    user: str = ""
    group: str = ""
    mtime_ns: int = 0
    target: str | None = None
    """Where a symbolic link leads."""
    path_base64: str | None = None
    name_base64: str | None = None
    target_base64: str | None = None
    leads_to: LeadsTo | None = None
    """Of a symbolic link, where that was asked for (`Files.seeing`); None where it leads nowhere."""
    attributes: dict[str, str] = {}
    """Extended attributes, where they were asked for (`Files.seeing`)."""
    attributes_left_out: int = 0
    """How many more there are, which are no text or too long."""

    def __post_init__(self) -> None:
        for member in ("path", "name", "target"):
            exact = getattr(self, f"{member}_base64")
            if exact is not None:
                msgspec.structs.force_setattr(self, member, os.fsdecode(base64.b64decode(exact)))

    @property
    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.type == "dir"


class FileChange(_Record, frozen=True, kw_only=True):
    """Something changed below what is watched."""

    event: str
    """`create modify remove rename chmod`; `ready` (from now on changes are told); `overflow` (changes may be missing: look again); `mark`."""
    path: str = ""
    name: str = ""
    dir: bool = False
    from_: str | None = msgspec.field(name="from", default=None)
    """Where it was before a `rename`."""
    reason: str | None = None
    """Why of an `overflow`: `queue watches unreadable`, or `reconnected`."""
    path_base64: str | None = None
    name_base64: str | None = None
    from_base64: str | None = None
    moved: bool = False
    """Of a `remove`: it was moved out of what is watched."""
    entry: FileEntry | None = None
    """What is there by now, where that was asked for."""
    watch: str | None = None
    """Of `ready`: the name by which marks are asked for."""

    def __post_init__(self) -> None:
        for member, exact in (("path", self.path_base64), ("name", self.name_base64), ("from_", self.from_base64)):
            if exact is not None:
                msgspec.structs.force_setattr(self, member, os.fsdecode(base64.b64decode(exact)))


class Transfer(_Record, frozen=True, kw_only=True):
    """What was copied: how many files, folders and links, and the octets of the files."""

    files: int = 0
    dirs: int = 0
    links: int = 0
    bytes: int = 0
    skipped: int = 0
    """What was left out: sockets, devices, and in a download links that lead out of the folder."""

    def plus(self, other: "Transfer") -> "Transfer":
        """Both together."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        return Transfer(**sums)


class Template(_Record, frozen=True, kw_only=True):
    """A release of a template."""

    name: str
    tag: str = ""
    digest: str = ""
    size_bytes: int = 0
    created_at: float | None = None
    description: str = ""


class Project(_Record, frozen=True, kw_only=True):
    """What keys and objects belong to. `usage`, counted as the quotas are, is there when one project was asked for."""

    name: str
    state: str = "active"
    """`active`, or `deleting`: it ends as soon as nothing of it is left."""
    created_at: float | None = None
    require_isolation: str | None = None
    templates: tuple[str, ...] | None = None
    """Those that may be used; None: all."""
    quotas: dict[str, int] = {}
    caps: dict[str, float] = {}
    approvals: tuple[str, ...] = ()
    """Verbs that wait for somebody's consent."""
    usage: dict[str, int] | None = None


class AuditRecord(_Record, frozen=True, kw_only=True):
    """One thing that happened, as the audit journal has it. Hashes are SHA-256 in hexadecimal digits."""

    sequence: int
    kind: str
    time: float
    """When it happened, by the clock of the process that says so; `recorded` is the journal's."""
    recorded: float = 0.0
    project: str = ""
    sandbox_id: str = ""
    generation: int = 0
    actor: str = ""
    """Id of the key, `sandbox`, or the process of ours that did it by itself."""
    request_id: str = ""
    decision: str = ""
    """`allowed denied asked failed`, or nothing where nothing was decided."""
    reason: str = ""
    count: int = 1
    """How many alike it stands for."""
    data: dict[str, Any] = {}
    source: str = ""
    number: int = 0
    previous: str = ""
    hash: str = ""


class Approval(_Record, frozen=True, kw_only=True):
    """Something that waits for somebody's consent, or did. `request` says what: `rule host port protocol method path reason`, or `verb` and its arguments."""

    id: str
    kind: str = ""
    """`egress` (a request of a sandbox) or `operation`."""
    state: str = ""
    """`pending allowed denied ended`."""
    sandbox_id: str = ""
    operation: str | None = None
    key: str = ""
    """What an answer for longer than once holds for."""
    request: dict[str, Any] = {}
    scope: str | None = None
    ttl_s: float | None = None
    note: str = ""
    approver: str | None = None
    """Id of the key that answered."""
    delivered: bool = False
    why: str | None = None
    """How it ended without an answer: `timeout client_gone policy_changed closed …`."""
    created_at: float | None = None
    expires_at: float | None = None
    answered_at: float | None = None


class AuditHead(_Record, frozen=True, kw_only=True):
    """Where the audit journal is, and the key that its heads are signed with."""

    sequence: int
    hash: str
    public_key: str
    first: int = 1
    """The oldest record that is kept."""
    octets: int = 0
    writable: bool = True
    error: str = ""
    behind: int = 0
    """Records that wait for the journal."""


class Token(_Record, frozen=True, kw_only=True):
    """A token of a sandbox, without the token itself. `key_id` is the API key that asked for it."""

    id: str
    sandbox_id: str = ""
    key_id: str = ""
    scopes: tuple[str, ...] = ()
    created_at: float | None = None
    expires_at: float | None = None


class Key(_Record, frozen=True, kw_only=True):
    """An API key, without its secret."""

    id: str
    project: str = ""
    name: str = ""
    prefix: str = ""
    """The beginning of the key, to recognise it by."""
    scopes: tuple[str, ...] = ()
    created_at: float | None = None
    expires_at: float | None = None
    last_used_at: float | None = None


class NewKey(Key, frozen=True, kw_only=True):
    """A key that was just made. `key` is shown this once and is stored nowhere."""

    key: str


class Credential(_Record, frozen=True, kw_only=True):
    """A secret for requests of sandboxes, without its value."""

    name: str
    project: str = ""
    source: dict[str, Any] = {}
    """`kind` (`store env file vault`) and what it needs."""
    hosts: tuple[str, ...] = ()
    """The only ones that it may ever be sent to."""
    version: int = 0
    """0: it was not made yet."""
    state: str = "ready"
    """`ready`, `changing`, or `incomplete`: nobody knows whether the broker made the last change. Put it again, or delete it."""
    available: bool | None = None
    """Whether it can be had, where that was looked at."""
    error: str | None = None
    created_at: float | None = None
    updated_at: float | None = None


class MasterKey(_Record, frozen=True, kw_only=True):
    """The key that stored credentials are sealed with: its name, and how many credentials there are."""

    key_id: str
    sealed: int = 0


class ServiceEvent(_Record, frozen=True, kw_only=True):
    """Something changed in the project: an element of the event stream."""

    id: str
    """What to go on after."""
    kind: str
    subject: str = ""
    """The id of what it is about."""
    data: dict[str, Any] = {}
    created_at: float | None = None


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list; `cursor` asks for the next one, None at the end."""

    items: tuple[T, ...]
    cursor: str | None = None


class Result:
    """How a command ended and what it wrote."""

    def __init__(
        self, session_id: str, end: Exit, stdout_octets: bytes, stderr_octets: bytes, gaps: tuple[Gap, ...] = ()
    ) -> None:
        self.session_id = session_id
        self.exit = end
        self.stdout_octets = stdout_octets
        self.stderr_octets = stderr_octets
        self.gaps = gaps

    @property
    def exit_code(self) -> int:
        """The exit code, or what a shell would show: see `Exit.status`."""
        return self.exit.status

    @property
    def reason(self) -> str:
        """`exited signaled timeout oom spawn_failed sandbox_lost rolled_back agent_unresponsive`."""
        return self.exit.reason

    @property
    def usage(self) -> Usage:
        """CPU and wall time in seconds, memory in KiB."""
        return self.exit.usage

    @cached_property
    def stdout(self) -> str:
        """Standard output as text; what is no UTF-8 becomes replacement characters."""
        return self.stdout_octets.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        """Standard error as text; what is no UTF-8 becomes replacement characters."""
        return self.stderr_octets.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the command exited with 0 and no output was lost."""
        return self.exit_code == 0 and not self.gaps

    def check(self) -> "Result":
        """Returns itself, or raises `CommandFailed` when the command did not exit with 0."""
        if self.exit_code == 0:
            return self
        tail = self.stderr[-2000:].strip()
        raise CommandFailed(
            "command_failed",
            f"The command ended with {self.exit_code} ({self.exit.message or self.reason})."
            + (f" Its standard error ends with: {tail}" if tail else ""),
            session_id=self.session_id,
            exit_code=self.exit_code,
        )

    def __repr__(self) -> str:
        return f"Result(exit_code={self.exit_code}, reason={self.reason!r}, stdout={self.stdout[:60]!r}, stderr={self.stderr[:60]!r})"
