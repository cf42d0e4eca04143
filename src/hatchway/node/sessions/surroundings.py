"""What a session has of its host: bounds, time, the guest's link, and who hears of its changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hatchway.node.guest.seam import GuestLink
from hatchway.node.sessions.deadline import Timer
from hatchway.node.sessions.spool import SpoolLimits

if TYPE_CHECKING:
    from hatchway.node.sessions.session import Session


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the sessions of one node."""

    spool: SpoolLimits = field(default_factory=SpoolLimits)
    linger_s: float = 2.0
    """How long after the leader's end a stream that somebody still holds open is waited for."""
    followers: int = 64
    """Clients that may follow one session at the same time."""
    per_sandbox: int = 10_000
    """Sessions of one sandbox, those that ended and are kept included: beyond it the oldest of these goes."""
    kept_per_sandbox: int = 1 << 30
    """Octets of output that all sessions of one sandbox keep together: beyond it the oldest output of ended ones goes first."""
    unstarted_s: float = 24 * 3600.0
    """How long a session that nobody attaches to is kept."""
    start_s: float = 60.0
    """How long an agent may take to say that a process was started; in seconds that the guest runs, like the next."""
    grace_s: float = 15.0
    """How much later than the guest's own clock says an agent may tell of an end, and how long it may take to kill what it should have ended."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a session needs of its host."""

    limits: Limits
    now: Callable[[], float]
    later: Callable[[float, Callable[[], None]], Timer]
    soon: Callable[[Callable[[], None]], object]
    link_of: Callable[[str], GuestLink | None]
    crowded: Callable[["Session"], None]
    """More output is kept of the session's sandbox than may be."""
    published: Callable[["Session"], None]
    """The state changed and is on disk (or could not be written, and will be tried again)."""
