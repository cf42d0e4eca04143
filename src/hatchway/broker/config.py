"""What a broker is told when it starts: by the operator, through the supervisor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.wire.egress import shard_of

EVERY_PROJECT = "*"


@dataclass(frozen=True, kw_only=True)
class Lent:
    """To whom the operator lends something that is his own: an environment variable, or a file."""

    projects: frozenset[str]
    """Projects whose credentials may come from it; `*` is every one."""
    hosts: tuple[str, ...]
    """Names (in the grammar of policies) that it may be sent to. A project can narrow them, and not widen."""

    def is_for(self, project: str) -> bool:
        """Whether a project may use it."""
        return bool(self.projects & {project, EVERY_PROJECT})


@dataclass(frozen=True, kw_only=True)
class VaultServer:
    """A HashiCorp Vault, how to log in to it, and what of it each project may read."""

    address: str
    """`https://NAME:PORT`. In clear only on loopback."""
    paths: Mapping[str, tuple[str, ...]]
    """Project (or `*`) → beginnings of `MOUNT/PATH`, by whole segments."""
    hosts: tuple[str, ...]
    """Names that secrets of it may be sent to."""
    namespace: str = ""
    token_file: Path | None = None
    role_id_file: Path | None = None
    secret_id_file: Path | None = None
    """AppRole, where no token is given."""
    auth_mount: str = "approle"
    ca_file: Path | None = None
    """PEM of the authorities that its certificate is verified by; None: the system's."""
    refresh_s: float = 300.0
    """How long a value is believed before it is read again."""
    within_s: float = 10.0
    """How long a request to it may take."""

    def lends(self, project: str, mount: str, path: str) -> bool:
        """Whether a project may read what lies there."""
        wanted = f"{mount}/{path}".split("/")
        beginnings = (*self.paths.get(project, ()), *self.paths.get(EVERY_PROJECT, ()))
        return any(wanted[: len(one)] == one for one in (beginning.strip("/").split("/") for beginning in beginnings))


@dataclass(frozen=True, kw_only=True)
class LegLimits:
    """Bounds of the legs. Times in seconds."""

    legs: int = 1024
    legs_per_project: int = 512
    legs_per_sandbox: int = 64
    head_within_s: float = 10.0
    """From the first octet of a head to its last."""
    idle_s: float = 75.0
    """Between two requests of a leg."""
    body_idle_s: float = 30.0
    """Between two pieces of a request's body."""
    response_within_s: float = 600.0
    """From a request's end to the head of its response: models think long."""
    response_idle_s: float = 600.0
    """Between two pieces of a response's body."""
    connect_within_s: float = 10.0
    """For all addresses together, with TLS."""
    websocket_idle_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """Configuration of the broker's role."""

    folder: Path
    """The broker's own folder (0700): sealed sources, and the master key where no other is named."""
    control_uids: frozenset[int]
    node_uids: frozenset[int]
    egress_uids: tuple[int, ...]
    """The user of each shard of the gateway, in their order: each is served for its own projects."""
    audit: Path | None = None
    """Socket of the audit writer. None: nothing is recorded (for tests of the parts)."""
    master_key_file: Path | None = None
    """Keys in Base64, one a line, the one that is sealed with first. What is sealed with another of them is sealed anew at the start."""
    master_key_variable: str | None = None
    """The same in an environment variable."""
    environment: int | None = None
    """Descriptor with variables that the supervisor took out of its own environment (see `broker.environment`); None: that of the process."""
    variables: Mapping[str, Lent] = field(default_factory=dict)
    """Environment variables that are lent, by name."""
    files_folder: Path | None = None
    files: Mapping[str, Lent] = field(default_factory=dict)
    """Files in that folder that are lent, by name."""
    vaults: Mapping[str, VaultServer] = field(default_factory=dict)
    """By the name that sources use."""
    upstream_ca: tuple[Path, ...] = ()
    """PEM of authorities that are trusted for upstreams beside the system's."""
    proxies: frozenset[str] = frozenset()
    """URLs of upstream proxies that a leg may name."""
    reachable: tuple[tuple[str, int], ...] = ()
    """Networks and ports that are dialled, where the rule allows private addresses there, although they are this host's own or of another
    special kind: an operator's exception."""
    limits: LegLimits = LegLimits()

    def may_lead(self, uid: int, project: str) -> bool:
        """Whether a user is the shard that serves a project."""
        return bool(self.egress_uids) and self.egress_uids[shard_of(project, len(self.egress_uids))] == uid
