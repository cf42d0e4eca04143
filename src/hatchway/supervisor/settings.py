"""Where things lie and who may touch them."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hatchway.domain import archive_policy, broker_settings, egress_settings, vmm_policy
from hatchway.domain.archive_policy import ArchivePolicy
from hatchway.domain.broker_settings import BrokerSettings
from hatchway.domain.egress_settings import MAX_SHARDS, USUAL_SHARDS, EgressSettings
from hatchway.domain.errors import Unavailable
from hatchway.domain.host_limits import DEFAULTS, HostLimits
from hatchway.domain.oversight_settings import AuditSettings
from hatchway.domain.vmm_policy import VmmPolicy

DEFAULT_API_PORT = 7070
DEFAULT_DATA_PORT = 7071
DEFAULT_E2B_PORT = 7080
DEFAULT_UID_BASE = 1_900_000_000
"""First of the user ids that sandboxes run under; no distribution hands these out. Control and node have the two before it."""
UID_RANGE = 2048
"""User ids from one installation's first to that of the next."""
SLOTS = 1024
"""User ids of VMs, as the launcher hands them out; behind them come those of the audit writer, the broker, the gateways and the E2B wrapper."""
MIN_UID_BASE, MAX_UID_BASE = 1_000, 2**31 - 1 - UID_RANGE

Profile = Literal["development", "production"]


def default_data_dir() -> Path:
    """`HATCHWAY_DATA_DIR`, else /var/lib/hatchway for root, else the user's own data folder."""
    if named := os.environ.get("HATCHWAY_DATA_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/hatchway")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "hatchway"


def libexec(name: str) -> Path:
    """Returns the path of one of our native programs. Raises `Unavailable("not_built")` where it was not built."""
    candidates = [Path(sys.prefix) / "libexec/hatchway", Path(__file__).parents[3] / "build/libexec"]
    if named := os.environ.get("HATCHWAY_LIBEXEC"):
        candidates.insert(0, Path(named))
    for folder in candidates:
        if (folder / name).is_file():
            return folder / name
    raise Unavailable(
        "not_built", f"The program {name} is in none of: {', '.join(map(str, candidates))}.", "Run `make native`."
    )


@dataclass(frozen=True)
class Identity:
    """User ids of the roles; all the same where we are not root."""

    rootless: bool
    control: int
    node: int
    vm_base: int
    audit: int
    broker: int
    egress: tuple[int, ...]
    """Of each shard, in their order."""
    e2b: int

    @property
    def gateways_group(self) -> int:
        """The group that all shards are in: it reaches the broker's socket for them."""
        return self.egress[0]


@dataclass(frozen=True)
class Tls:
    """Certificate (with its chain) and key of a listener, files in PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Settings:
    """One installation."""

    data_dir: Path
    config: Path | None = None
    """The settings file that was read."""
    profile: Profile = "development"
    allow_emulated: bool = False
    """In production: start also where sandboxes have software emulation for a boundary."""
    uid_base: int | None = None
    """First of the VMs' user ids; None: the range that the installation has, see `supervisor.uids`."""
    limits: HostLimits = DEFAULTS
    vmm: VmmPolicy = vmm_policy.DEFAULT
    api_host: str = "127.0.0.1"
    api_port: int = DEFAULT_API_PORT
    api_tls: Tls | None = None
    api_url: str | None = None
    """How clients reach the API, where that is not what it listens on."""
    data_host: str = "127.0.0.1"
    data_port: int = DEFAULT_DATA_PORT
    data_tls: Tls | None = None
    data_url: str | None = None
    e2b: bool = True
    """Whether there is the API of E2B."""
    e2b_host: str = "127.0.0.1"
    e2b_port: int = DEFAULT_E2B_PORT
    e2b_tls: Tls | None = None
    e2b_url: str | None = None
    e2b_domain: str | None = None
    """Under which ports of E2B's sandboxes have names; a port may stand behind it."""
    e2b_secret: Path | None = None
    """File with the secret that tokens of sandboxes are derived from, for several wrappers to share; None: one of its own."""
    e2b_data_ca: Path | None = None
    """File with authorities of other nodes' data planes, beside the system's and the certificate of our own."""
    database_url: str | None = None
    """A PostgreSQL database; None: a file in the data folder."""
    database_password_file: Path | None = None
    port_domains: tuple[str, ...] = ("localhost",)
    """Domains under which the ports of sandboxes have names; the first one is told to clients."""
    archives: ArchivePolicy = archive_policy.DEFAULT
    audit_kept: AuditSettings = field(default_factory=AuditSettings)
    webhook: str | None = None
    """Where requests for approval are told of."""
    webhook_secret: Path | None = None
    """File with the secret that it is told under."""
    egress: EgressSettings = egress_settings.DEFAULT
    lending: BrokerSettings = broker_settings.DEFAULT
    """What the broker lends of the operator's own secrets."""
    broker_environment: int | None = None
    """Descriptor with the environment variables that are the broker's alone; this process has them no more."""
    database_environment: int | None = None
    """Descriptor with the environment variables that are the control plane's alone; this process has them no more."""
    metrics_token: Path | None = None
    """File with the token that /metrics is read with; None: in development programs of this machine may, in production nobody."""
    bake: bool = True
    """Bake the default shape of `seed:latest` at start, so that the first creation is fast."""

    @property
    def production(self) -> bool:
        """Whether nothing may be weaker than it should be."""
        return self.profile == "production"

    @property
    def identity(self) -> Identity:
        """Separate ids when we are root, our own for everything otherwise."""
        if os.geteuid() != 0:
            own = os.geteuid()
            shards = (own,) * self.shards
            return Identity(
                rootless=True, control=own, node=own, vm_base=own, audit=own, broker=own, egress=shards, e2b=own
            )
        base = DEFAULT_UID_BASE if self.uid_base is None else self.uid_base
        behind = base + SLOTS
        return Identity(
            rootless=False,
            control=base - 2,
            node=base - 1,
            vm_base=base,
            audit=behind,
            broker=behind + 1,
            egress=tuple(behind + 2 + shard for shard in range(self.shards)),
            e2b=behind + 2 + MAX_SHARDS,
        )

    @property
    def shards(self) -> int:
        """How many gateway processes there are."""
        return self.egress.shards or min(USUAL_SHARDS, os.cpu_count() or 1)

    @property
    def run(self) -> Path:
        """Sockets, lock and the VMs' run folders."""
        return self.data_dir / "run"

    @property
    def control(self) -> Path:
        """The control plane's own."""
        return self.data_dir / "control"

    @property
    def node(self) -> Path:
        """The node's own."""
        return self.data_dir / "node"

    @property
    def audit(self) -> Path:
        """The audit writer's own: the journal."""
        return self.data_dir / "audit"

    @property
    def broker(self) -> Path:
        """The broker's own: sealed secrets."""
        return self.data_dir / "broker"

    @property
    def e2b_folder(self) -> Path:
        """The E2B wrapper's own: its secret."""
        return self.data_dir / "e2b"

    @property
    def secrets(self) -> Path:
        """Files with secrets that the operator lends."""
        return self.broker / "secrets"

    @property
    def images(self) -> Path:
        """Templates; the node reads them. `HATCHWAY_IMAGES_DIR` lets several installations share one folder."""
        return Path(os.environ.get("HATCHWAY_IMAGES_DIR") or self.data_dir / "images").absolute()

    @property
    def log(self) -> Path:
        """One log file per role."""
        return self.data_dir / "log"

    @property
    def supervisor_log(self) -> Path:
        """What a detached supervisor reports."""
        return self.data_dir / "supervisor.log"

    @property
    def endpoint(self) -> Path:
        """Where CLI and SDK find the URLs."""
        return self.data_dir / "endpoint.json"

    @property
    def development_key(self) -> Path:
        """Where CLI and SDK find the key made for development (0600)."""
        return self.data_dir / "dev.key"
