"""What every sandbox of a node shares."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.node.artifacts.keeper import Keeper
from hatchway.node.capacity import Capacity
from hatchway.node.egress.gateways import Gateways
from hatchway.node.events import Events
from hatchway.node.images.bake import Baker
from hatchway.node.images.store import Images
from hatchway.node.sessions.seam import SessionHost
from hatchway.node.starts import Starts
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import Driver
from hatchway.wire.ballast import Ballast


@dataclass(frozen=True)
class Context:
    """The parts of one node, made once by `main`."""

    root: Path
    """Folder of the sandboxes' folders."""
    host_boot_id: str
    driver: Driver
    launcher: LauncherClient
    images: Images
    baker: Baker
    sessions: SessionHost
    events: Events
    capacity: Capacity
    ballast: Ballast
    """What is given up on a full disk so that records of what happened can be written."""
    gateways: Gateways
    """What leaves the sandboxes."""
    drop: Callable[[str], None]
    """Forgets a sandbox that is deleted."""
    keeper: Keeper | None = None
    """Where suspended sandboxes are kept beside this node, so that others can go on with them; None: nowhere."""
    starts: Starts = field(default_factory=Starts)
    host_warnings: tuple[str, ...] = ()
    """What the launcher found lacking on this host."""
    network: bool = True
    """Whether sandboxes have a network card: a launcher without access to /dev/net/tun can give them none."""
