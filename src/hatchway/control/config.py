"""What a control process is told when it starts."""

from dataclasses import dataclass, field
from pathlib import Path

from hatchway.wire.metrics import MetricsAccess


@dataclass(frozen=True, kw_only=True)
class UnixNode:
    """A node on this host: the path of its socket, and the user that listens on it (None: our own user, or root)."""

    path: Path
    uid: int | None = None

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, kw_only=True)
class TlsNode:
    """A node on another host, over mutual TLS: both ends show a certificate of `ca`, and the node's names `server_name`."""

    host: str
    port: int
    server_name: str
    certificate: Path
    key: Path
    ca: Path

    def __str__(self) -> str:
        return f"tls://{self.server_name}@{self.host}:{self.port}"


NodeAddress = UnixNode | TlsNode


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """Configuration of the control role; the defaults are those of one machine."""

    folder: Path
    """The control plane's own folder: `hatchway.db` and `dev.key` lie there."""
    node_socket: Path | None = None
    """Socket of the node on this host."""
    node_uid: int | None = None
    """The user that it runs as; None: our own."""
    broker_socket: Path | None = None
    """Socket of the broker on this host; None: credentials can be looked at, and not changed."""
    broker_uid: int | None = None
    """The user that it runs as; None: our own."""
    e2b_uid: int = -1
    """The user of the E2B wrapper, where there is one."""
    run_dir: Path | None = None
    """Where the supervisor tells what it sees of the roles; None without one."""
    audit_socket: Path | None = None
    """Socket of the audit writer; None: there is no journal."""
    metrics: MetricsAccess = field(default_factory=MetricsAccess)
    """Who may read /metrics."""
    more_nodes: tuple[NodeAddress, ...] = ()
    database_url: str | None = None
    """A PostgreSQL database, which other control processes may share; None: a file in the folder."""
    database_password: str | None = field(default=None, repr=False)
    lease_s: float = 5.0
    """After so many seconds without a sign of life others take up what this process was doing."""
    webhook_url: str | None = None
    """Where requests for approval are told of; None: nowhere."""
    webhook_secret: bytes = field(default=b"", repr=False)
    """What its messages are signed with."""
    production: bool = False
    """Make no key for development, and start with none."""
    host: str = "127.0.0.1"
    port: int = 7070
    """Where to listen when no socket is handed over."""
    token_ttl_s: float = 3600.0
    """Life of a session token; a client renews it by POST /v1/sessions/{id}/token."""
    max_concurrent_operations: int = 32
    """Verbs that nodes execute at once; further operations wait as `pending`."""
    max_requests: int = 2048
    """Requests in hand at once, waiting ones and event streams among them."""
    max_event_streams: int = 64
    max_requests_per_project: int = 1024
    """Of `max_requests`, what one project may have in hand: the others always find a place."""
    max_event_streams_per_project: int = 32
    trusted_archive_keys: tuple[str, ...] = ()
    """Keys of other installations whose archives may be imported here: `ID:PUBLIC`, as an export's `signed_by` says it."""
    operation_bound_s: float = 900.0
    """An operation other than a delete that has not ended by then, node away or not, fails."""
    reconcile_every_s: float = 30.0
    ballast_mib: int = 16
    """What is held on the disk so that deletions can be recorded when it is full."""
    deleted_kept_s: float = 3600.0
    """How long a deleted sandbox can still be seen."""

    @property
    def database(self) -> str:
        """Where the database is, as `Database.open` takes it."""
        return self.database_url or str(self.folder / "hatchway.db")

    @property
    def development_key(self) -> Path:
        """Where the key that is made for development lies (0600)."""
        return self.folder / "dev.key"

    @property
    def nodes(self) -> tuple[NodeAddress, ...]:
        """Every node to connect to, the local one first."""
        local = () if self.node_socket is None else (UnixNode(path=self.node_socket, uid=self.node_uid),)
        return (*local, *self.more_nodes)
