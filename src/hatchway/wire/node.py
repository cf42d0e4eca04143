"""What the control plane says to a node and hears from it.

Carried by `wire.rpc`: the method names are the keys of `METHODS`; a node answers with the result or an error that is a
`HatchwayError` on the far side. Every request is idempotent: a control process that died in the middle repeats it. A
request with an older `generation` than the node has seen for a sandbox is refused with `Conflict("stale_generation")`.
What sessions and usage are has files of its own (`wire.sessions`, `wire.usage`); all of it can be imported from here.
"""

from hatchway.domain.shapes import Shape

# What is handed on stays together.
# isort: off
from hatchway.wire.egress import (
    AskAnswer as AskAnswer,
    Asked as Asked,
    AskEnded as AskEnded,
    EgressSpec as EgressSpec,
    EgressState as EgressState,
)
from hatchway.wire.message import Empty as Empty, Struct as Struct
from hatchway.wire.sessions import (
    BranchedSession as BranchedSession,
    BranchedSessions as BranchedSessions,
    Exit as Exit,
    SandboxSessions as SandboxSessions,
    SessionLimits as SessionLimits,
    SessionList as SessionList,
    SessionRef as SessionRef,
    SessionSpec as SessionSpec,
    SessionStatus as SessionStatus,
    TerminalSize as TerminalSize,
    Usage as Usage,
)
from hatchway.wire.usage import (
    Activities as Activities,
    Activity as Activity,
    ActivityRequest as ActivityRequest,
    GuestUsage as GuestUsage,
    HostUsage as HostUsage,
    SandboxMetrics as SandboxMetrics,
)

# isort: on


class NodeInfo(Struct, frozen=True, kw_only=True):
    """Who a node is and what it can do; answer to `node.info`."""

    node_id: str
    version: str
    boot_id: str
    """The host's boot id: another one than before means that the host rebooted."""
    attach_url: str
    """Base URL of the data plane that clients connect to, for example `http://127.0.0.1:7071`."""
    port_url: str = ""
    """Where the ports of its sandboxes are: a URL with `{port}` and `{sandbox}`, for example `http://{port}-{sandbox}.localhost:7071/`."""
    isolation: str
    """`hardware` or `emulated`."""
    vmm: str
    """Name and version of the VMM, for example `qemu 7.2.22`."""
    cpus: int
    memory_mib: int
    disk_mib: int
    """Size of the data folder's file system: a larger sandbox disk can never be held."""
    warnings: tuple[str, ...] = ()
    store: str = ""
    """Which store it shares with others; empty: none."""


class TokenKey(Struct, frozen=True, kw_only=True):
    """A public key that data-plane tokens of this installation are checked with (Ed25519, raw, 32 octets)."""

    key_id: str
    public: bytes


class Configure(Struct, frozen=True, kw_only=True):
    """Pushed by every control process as soon as it is connected: `node.configure`."""

    token_keys: tuple[TokenKey, ...]
    revoked: tuple[str, ...] = ()
    """Ids (`jti`) of tokens that are no longer valid although they have not expired."""
    archive_keys: tuple[TokenKey, ...] = ()
    """Keys whose archives are taken in: this installation's own, and those that it trusts."""
    revoked_keys: tuple[str, ...] = ()
    """Ids of API keys that ended lately: no token that goes back to one of them is valid."""
    cutoffs: dict[str, float] = {}
    """By sandbox: its tokens that were issued then (Unix seconds) or before are not valid."""


class TemplateRelease(Struct, frozen=True, kw_only=True):
    """A template that is on the node, ready to run: `template.list`, `template.resolve`."""

    name: str
    tag: str
    digest: str
    """`sha256:…` of the manifest."""
    size_bytes: int
    created_at: float
    description: str = ""


class ResolveTemplate(Struct, frozen=True, kw_only=True):
    """Asks for the release behind a reference: `name`, `name:tag` or `name@sha256:…`. NotFound("unknown_template")."""

    reference: str


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """All that a node needs to make a sandbox: `sandbox.create`.

    `sandbox.prepare` makes it for a pool: warmed and paused. `sandbox.claim` gives such a one what is said here of name and
    environment, and a fresh identity, and lets it run, all in one.
    """

    sandbox_id: str
    project: str
    generation: int
    template_digest: str
    shape: Shape
    hostname: str
    env: dict[str, str] = {}
    require_isolation: str | None = None
    snapshot_id: str | None = None
    """Make it from this snapshot of the node: a `full` one goes on where the machine stood, a `disk` one boots."""
    egress: EgressSpec | None = None
    """What may leave it. None: nothing may, until something else is said."""


class SandboxRef(Struct, frozen=True, kw_only=True):
    """Names a sandbox for `sandbox.start|stop|pause|resume|suspend|restore|delete|get`."""

    sandbox_id: str
    generation: int
    egress: EgressSpec | None = None
    """With what makes it run: what may leave it from then on. None: what was said last holds. An older revision changes nothing."""


class EgressChange(SandboxRef, frozen=True, kw_only=True):
    """`sandbox.egress`: what may leave it from now on, in `egress`. Flows that it does not allow any more are cut before the answer.

    A gateway that refuses it keeps what was in force before: the answer's `egress` has the revision that holds, and why.
    """


class StopRequest(SandboxRef, frozen=True, kw_only=True):
    """`sandbox.stop`: memory is dropped, the disk kept. `reason` is shown by the sandbox."""

    reason: str = ""
    grace_s: float = 5.0
    """How long the guest may take to flush and power off before the VMM is killed."""


class Observed(Struct, frozen=True, kw_only=True):
    """What the node sees of a sandbox: result of every sandbox verb, element of `sandbox.list`, and event."""

    sandbox_id: str
    project: str
    generation: int
    state: str
    """A `domain.lifecycle.State`; `pending` while it is being made; `deleted` when no trace is left."""
    cause: str | None = None
    """A `domain.lifecycle.Cause`, when the state came unasked."""
    reason: str = ""
    """For people: why it failed or stopped."""
    isolation: str = "emulated"
    boot_id: str | None = None
    """The guest's boot id; it changes with a cold boot."""
    phases_ms: dict[str, float] = {}
    """How long the phases of the last verb took."""
    stored_bytes: int | None = None
    """What a suspended sandbox takes on the node's disk for its memory, in octets; None in other states."""
    artifact: str | None = None
    """By which digest another node fetches a suspended sandbox from the store that they share; None where there is none."""
    egress: EgressState | None = None
    """How far its policy holds; None from a node that knows of none."""
    sequence: int = 0
    """Grows with every change on this node."""


class WakeWanted(Struct, frozen=True, kw_only=True):
    """A client's request needs a sandbox that does not run; an event. The request waits on the node.

    The control plane wakes it where `auto_wake` is set, and says `sandbox.stay` where it is not, or where that failed.
    """

    sandbox_id: str


class StayRequest(Struct, frozen=True, kw_only=True):
    """`sandbox.stay`: the sandbox is not woken; `code cause remedy` where it was tried and failed."""

    sandbox_id: str
    error: dict[str, str] | None = None


class SandboxList(Struct, frozen=True, kw_only=True):
    """Answer to `sandbox.list`; `sequence` is where `events` go on from."""

    sandboxes: tuple[Observed, ...]
    sequence: int


BAKING = ("waiting", "boot", "first_job", "save")
"""The phases of a bake, in their order."""


class Progress(Struct, frozen=True, kw_only=True):
    """How far a long verb is; an event."""

    sandbox_id: str
    phase: str
    """While a creation waits for the bake of its template, one of `BAKING`."""
    fraction: float | None = None


class Branch(Struct, frozen=True, kw_only=True):
    """One sandbox to branch off."""

    sandbox_id: str
    generation: int
    hostname: str
    env: dict[str, str] = {}
    egress: EgressSpec | None = None
    """What may leave it: it has credentials of its own from the beginning. None: nothing may."""


class ForkRequest(SandboxRef, frozen=True, kw_only=True):
    """`sandbox.fork`: new sandboxes that go on from where the source stands. The source is stopped for milliseconds and runs on.

    Asked again, branches that are there already are answered as they are.
    """

    branches: tuple[Branch, ...]


class BranchOutcome(Struct, frozen=True, kw_only=True):
    """What became of one branch: exactly one of `observed` and `error` (`code cause remedy`) is set."""

    sandbox_id: str
    observed: Observed | None = None
    sessions: tuple[BranchedSession, ...] = ()
    error: dict[str, str] | None = None


class ForkAnswer(Struct, frozen=True, kw_only=True):
    """Answer to `sandbox.fork`: the source afterwards, and each branch, in the order of the request."""

    source: Observed
    branches: tuple[BranchOutcome, ...]
    source_stopped_ms: float = 0.0
    """How long the source's virtual CPUs stood still; 0 for one that was not running."""


class SnapshotRequest(SandboxRef, frozen=True, kw_only=True):
    """`snapshot.create`: keeps the sandbox as it is under `snapshot_id`; asked again it answers what there is."""

    snapshot_id: str
    project: str
    kind: str
    """`disk` or `full`."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """A snapshot on this node, whole and durable: element of `snapshot.list`."""

    snapshot_id: str
    sandbox_id: str
    project: str
    kind: str
    template_digest: str
    shape: Shape
    disk_bytes: int = 0
    """Octets that its disk takes on the node's, beside what it shares with its template."""
    memory_bytes: int = 0
    """Octets that its memory takes beside the baked one; 0 for `disk`."""
    digest: str = ""
    """`sha256:…` of its manifest, which has the digests of all of its parts."""
    created_at: float = 0.0


class SnapshotMade(Struct, frozen=True, kw_only=True):
    """Answer to `snapshot.create`: the snapshot, and its sandbox afterwards."""

    snapshot: Snapshot
    source: Observed
    source_stopped_ms: float = 0.0


class SnapshotRef(Struct, frozen=True, kw_only=True):
    """Names a snapshot for `snapshot.delete`, which succeeds also when it is gone."""

    snapshot_id: str


class SnapshotImport(Struct, frozen=True, kw_only=True):
    """`snapshot.import`: makes a snapshot from an upload; answered with a `Snapshot`, also when asked again. Nothing is left where that fails."""

    snapshot_id: str
    project: str
    upload_id: str
    kind: str
    """`disk`, also of an archive that has memory; or `full`."""
    template_digest: str
    shape: Shape
    """Both as the upload was described: it is refused when it has changed meanwhile."""


class SnapshotList(Struct, frozen=True, kw_only=True):
    """Answer to `snapshot.list`."""

    snapshots: tuple[Snapshot, ...]


class RollbackRequest(SandboxRef, frozen=True, kw_only=True):
    """`sandbox.rollback`: to one of its own snapshots. A `full` one: running; a `disk` one: stopped."""

    snapshot_id: str


class ExportRequest(SandboxRef, frozen=True, kw_only=True):
    """`export.make`: writes the archive of a suspended or stopped sandbox, or of a snapshot, which then has to be sealed."""

    export_id: str
    project: str
    key_id: str
    """Of the key that it will be signed with."""
    snapshot_id: str | None = None
    """Not the sandbox, of which nothing need be here, but this snapshot of it."""
    include_template: bool = False
    parents: tuple[str, ...] = ()
    labels: dict[str, dict[str, str] | str | None] = {}
    """Name and metadata: what a node does not know of it."""


class ExportHead(Struct, frozen=True, kw_only=True):
    """Answer to `export.make`: what has to be signed; empty where it was sealed before."""

    head: bytes


class ExportSeal(Struct, frozen=True, kw_only=True):
    """`export.seal`: puts the signature in its place. Asked again it answers what there is."""

    export_id: str
    signature: bytes
    kept_s: float
    """For how long it stays."""


class ExportMade(Struct, frozen=True, kw_only=True):
    """Answer to `export.seal`."""

    export_id: str
    size_bytes: int
    digest: str
    """`sha256:…` of its head, which has the digests of all parts."""
    expires_at: float


class ExportRef(Struct, frozen=True, kw_only=True):
    """Names an export for `export.delete`, or an upload for `upload.delete` and `upload.describe`; deleting what is gone succeeds."""

    export_id: str
    project: str = ""


class FetchUpload(ExportRef, frozen=True, kw_only=True):
    """`upload.fetch`: fills an upload from an address that the node's operator allows, or goes on with it. Answered when it has begun."""

    url: str


class UploadStatus(Struct, frozen=True, kw_only=True):
    """Answer to `upload.fetch` and `upload.status`: how much of an upload is here."""

    offset: int
    size: int | None = None
    """Of the whole, where it is fetched and that is known."""
    complete: bool = False
    fetching: bool = False
    error: dict[str, object] | None = None
    """Why it is not fetched any more: `code cause remedy`."""


class UploadDescription(Struct, frozen=True, kw_only=True):
    """Answer to `upload.describe`: what an archive says of itself, under the signature of a trusted key."""

    kind: str
    source: str
    template: str
    """`name:tag`."""
    template_digest: str
    shape: Shape
    hostname: str
    env: dict[str, str]
    name: str | None = None
    metadata: dict[str, str] = {}
    size_bytes: int = 0
    memory_problem: str = ""
    """Why its memory cannot be loaded here; empty where it can."""
    of_snapshot: bool = False
    """Whether it was exported from a snapshot, and not from a sandbox."""
    snapshot: str | None = None
    """That one's id, where it says it."""
    key_id: str = ""
    processes: int = 0
    """The highest number that a process in it had had, where it says that."""


class ImportRequest(SandboxSpec, frozen=True, kw_only=True):
    """`sandbox.import`: makes a sandbox from an upload: `suspended` with `memory`, else `stopped`. Nothing of it is left where that fails."""

    upload_id: str
    memory: bool = True


class FetchRequest(SandboxSpec, frozen=True, kw_only=True):
    """`sandbox.fetch`: takes over a sandbox that another node suspended, from the store; it is `suspended` here then.

    `generation` is a new one: the other node has nothing to say of it any more.
    """

    artifact: str


class Subscribe(Struct, frozen=True, kw_only=True):
    """`events.subscribe`: from then on this connection gets every `Event` after `sequence`."""

    sequence: int = 0


class Event(Struct, frozen=True, kw_only=True):
    """Something changed on the node. Exactly one member is set."""

    observed: Observed | None = None
    session: SessionStatus | None = None
    progress: Progress | None = None
    wake: WakeWanted | None = None
    asked: Asked | None = None
    """A request of a sandbox is held until somebody decides. Said again to every control process that connects, for as long as it is so."""
    ask_ended: AskEnded | None = None


class TemplateList(Struct, frozen=True, kw_only=True):
    """Answer to `template.list`."""

    templates: tuple[TemplateRelease, ...]


METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "node.info": (Empty, NodeInfo),
    "node.configure": (Configure, Empty),
    "node.drain": (Empty, Empty),
    "template.list": (Empty, TemplateList),
    "template.resolve": (ResolveTemplate, TemplateRelease),
    "sandbox.create": (SandboxSpec, Observed),
    "sandbox.start": (SandboxRef, Observed),
    "sandbox.stop": (StopRequest, Observed),
    "sandbox.pause": (SandboxRef, Observed),
    "sandbox.resume": (SandboxRef, Observed),
    "sandbox.suspend": (SandboxRef, Observed),
    "sandbox.restore": (SandboxRef, Observed),
    "sandbox.rollback": (RollbackRequest, Observed),
    "sandbox.fork": (ForkRequest, ForkAnswer),
    "sandbox.delete": (SandboxRef, Observed),
    "sandbox.get": (SandboxRef, Observed),
    "sandbox.list": (Empty, SandboxList),
    "sandbox.metrics": (SandboxRef, SandboxMetrics),
    "sandbox.activity": (ActivityRequest, Activities),
    "sandbox.stay": (StayRequest, Empty),
    "sandbox.egress": (EgressChange, Observed),
    "egress.answer": (AskAnswer, Empty),
    "sandbox.prepare": (SandboxSpec, Observed),
    "sandbox.claim": (SandboxSpec, Observed),
    "session.create": (SessionSpec, SessionStatus),
    "session.get": (SessionRef, SessionStatus),
    "session.list": (SandboxSessions, SessionList),
    "session.delete": (SessionRef, Empty),
    "session.branched": (SandboxSessions, BranchedSessions),
    "snapshot.create": (SnapshotRequest, SnapshotMade),
    "snapshot.delete": (SnapshotRef, Empty),
    "snapshot.import": (SnapshotImport, Snapshot),
    "snapshot.list": (Empty, SnapshotList),
    "export.make": (ExportRequest, ExportHead),
    "export.seal": (ExportSeal, ExportMade),
    "export.delete": (ExportRef, Empty),
    "upload.fetch": (FetchUpload, UploadStatus),
    "upload.status": (ExportRef, UploadStatus),
    "upload.describe": (ExportRef, UploadDescription),
    "upload.delete": (ExportRef, Empty),
    "sandbox.import": (ImportRequest, Observed),
    "sandbox.fetch": (FetchRequest, Observed),
    "events.subscribe": (Subscribe, Empty),
}
"""Method name → (request, answer)."""
