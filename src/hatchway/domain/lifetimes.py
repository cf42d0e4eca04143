"""How long a sandbox runs: its deadlines, and what is done when one has come. Pure; times are Unix seconds that callers give.

Only the time in which a sandbox runs counts. A deadline is there while it runs (`expires_at`); what is left of it otherwise
is `left_s`. A sandbox that comes back with nothing left gets its whole time anew, so that waking one is never in vain.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from hatchway.domain.lifecycle import Verb


class OnTimeout(StrEnum):
    """What is done with a sandbox whose time is over."""

    SUSPEND = "suspend"
    PAUSE = "pause"
    STOP = "stop"
    DELETE = "delete"


class Why(StrEnum):
    """Which deadline has come."""

    TIMEOUT = "timeout"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """What was asked for, and how far it is. `expires_at` and `active_at` are None while the sandbox does not run."""

    timeout_s: float | None = None
    idle_timeout_s: float | None = None
    on_timeout: OnTimeout = OnTimeout.SUSPEND
    auto_wake: bool = False
    expires_at: float | None = None
    left_s: float | None = None
    active_at: float | None = None
    tries: int = 0
    retry_at: float | None = None


MIN_TIMEOUT_S = 1.0
MAX_TIMEOUT_S = 10 * 365 * 24 * 3600.0

_LADDER: dict[OnTimeout, tuple[Verb, ...]] = {
    OnTimeout.SUSPEND: (Verb.SUSPEND, Verb.SUSPEND, Verb.SUSPEND, Verb.PAUSE, Verb.PAUSE, Verb.STOP),
    OnTimeout.PAUSE: (Verb.PAUSE, Verb.PAUSE, Verb.PAUSE, Verb.STOP),
    OnTimeout.STOP: (Verb.STOP,),
    OnTimeout.DELETE: (Verb.DELETE,),
}
_FIRST_RETRY_S = 5.0
_RETRY_AT_MOST_S = 600.0


def entered_running(lifetime: Lifetime, now: float) -> Lifetime:
    """The sandbox runs from now on."""
    left = lifetime.left_s if lifetime.left_s is not None and lifetime.left_s > 0 else lifetime.timeout_s
    return replace(
        lifetime,
        expires_at=None if left is None else now + left,
        left_s=None,
        active_at=now,
        tries=0,
        retry_at=None,
    )


def left_running(lifetime: Lifetime, now: float) -> Lifetime:
    """The sandbox does not run any more; its time stands still."""
    left = None if lifetime.expires_at is None else max(0.0, lifetime.expires_at - now)
    return replace(lifetime, expires_at=None, left_s=left, active_at=None, tries=0, retry_at=None)


def due_at(lifetime: Lifetime) -> float | None:
    """When the next deadline comes; None for never, and while the sandbox does not run."""
    if lifetime.active_at is None:
        return None
    if lifetime.retry_at is not None:
        return lifetime.retry_at
    idle = None if lifetime.idle_timeout_s is None else lifetime.active_at + lifetime.idle_timeout_s
    return min((one for one in (lifetime.expires_at, idle) if one is not None), default=None)


def why_due(lifetime: Lifetime, now: float) -> Why | None:
    """Which deadline has come; None for none, also while what failed is waited with."""
    if lifetime.active_at is None or (lifetime.retry_at is not None and lifetime.retry_at > now):
        return None
    if lifetime.expires_at is not None and lifetime.expires_at <= now:
        return Why.TIMEOUT
    if lifetime.idle_timeout_s is not None and lifetime.active_at + lifetime.idle_timeout_s <= now:
        return Why.IDLE
    return None


def next_verb(lifetime: Lifetime) -> Verb:
    """What is to be done now that a deadline has come: what was asked for, and when that fails again and again something that frees less."""
    ladder = _LADDER[lifetime.on_timeout]
    return ladder[min(lifetime.tries, len(ladder) - 1)]


def failed(lifetime: Lifetime, now: float) -> Lifetime:
    """What was due has failed: it is tried again, after longer and longer."""
    pause = min(_FIRST_RETRY_S * 3**lifetime.tries, _RETRY_AT_MOST_S) if lifetime.tries < 10 else _RETRY_AT_MOST_S
    return replace(lifetime, tries=lifetime.tries + 1, retry_at=now + pause)


def used(lifetime: Lifetime, at: float) -> Lifetime:
    """Somebody used the sandbox at that time; an older time than what is known changes nothing."""
    if lifetime.active_at is None or at <= lifetime.active_at:
        return lifetime
    return settled(replace(lifetime, active_at=at), at)


def extended(lifetime: Lifetime, seconds: float, now: float) -> Lifetime:
    """At least that long from now on, or from when it runs again; what is longer stays, and none stays none."""
    if lifetime.active_at is not None:
        at = lifetime.expires_at
        return lifetime if at is None else settled(replace(lifetime, expires_at=max(at, now + seconds)), now)
    if lifetime.timeout_s is None:
        return lifetime
    left = lifetime.left_s if lifetime.left_s is not None and lifetime.left_s > 0 else lifetime.timeout_s
    return replace(lifetime, left_s=max(left, seconds))


def with_timeout(lifetime: Lifetime, timeout_s: float | None, now: float) -> Lifetime:
    """Another `timeout_s`, which counts from now on, be the deadline then earlier or later."""
    if lifetime.active_at is None:
        return replace(lifetime, timeout_s=timeout_s, left_s=timeout_s)
    expires_at = None if timeout_s is None else now + timeout_s
    return settled(replace(lifetime, timeout_s=timeout_s, expires_at=expires_at), now)


def shortens(lifetime: Lifetime, timeout_s: float | None, now: float) -> bool:
    """Whether `with_timeout` would make the deadline come earlier than it does."""
    if timeout_s is None:
        return False
    if lifetime.active_at is not None:
        return lifetime.expires_at is None or now + timeout_s < lifetime.expires_at
    left = lifetime.left_s if lifetime.left_s is not None and lifetime.left_s > 0 else lifetime.timeout_s
    return left is None or timeout_s < left


def settled(lifetime: Lifetime, now: float) -> Lifetime:
    """A lifetime after a change: where no deadline has come any more, what failed is over."""
    if why_due(replace(lifetime, retry_at=None), now) is None:
        return replace(lifetime, tries=0, retry_at=None)
    return lifetime
