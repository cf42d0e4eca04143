"""What sandboxes use and when they were last used: `sandbox.metrics` and `sandbox.activity` of `wire.node`."""

from hatchway.wire.message import Struct


class GuestUsage(Struct, frozen=True, kw_only=True):
    """What a guest says that it uses: a hostile one says what it likes. CPU times are those of all its CPUs since its boot."""

    uptime_s: float
    cpus: int
    cpu_user_s: float
    cpu_system_s: float
    load1: float
    processes: int
    memory_total_bytes: int
    memory_available_bytes: int
    memory_cached_bytes: int = 0
    disk_total_bytes: int
    disk_free_bytes: int


class HostUsage(Struct, frozen=True, kw_only=True):
    """What a sandbox takes of its host, as the host counts it; zeros where that is not counted."""

    cpu_s: float = 0.0
    """CPU time of its machine monitor, the guest's included, since that was started."""
    memory_bytes: int = 0
    """Of its cgroup, with the page cache that it was the first to touch."""
    memory_private_bytes: int = 0
    """What its machine monitor shares with no other."""
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    processes: int = 0
    oom_kills: int = 0
    disk_bytes: int = 0
    """What its own disk takes; the template's is shared."""


class SandboxMetrics(Struct, frozen=True, kw_only=True):
    """Answer to `sandbox.metrics`."""

    sandbox_id: str
    state: str
    observed_at: float
    guest: GuestUsage | None = None
    """None where it does not run, or did not answer: `guest_error` says why."""
    guest_error: str = ""
    host: HostUsage = HostUsage()


class ActivityRequest(Struct, frozen=True, kw_only=True):
    """`sandbox.activity`: when these were last used. Those that are not here are not answered."""

    sandbox_ids: tuple[str, ...]


class Activity(Struct, frozen=True, kw_only=True):
    """When a sandbox was last used: by a request to the data plane, or a session that was made.

    Told as an age, because the clocks of two hosts differ. A node that was restarted counts from then.
    """

    sandbox_id: str
    idle_s: float
    busy: bool = False
    """A client is at it now: a request is in hand, or a process of its has not ended."""


class Activities(Struct, frozen=True, kw_only=True):
    """Answer to `sandbox.activity`."""

    activities: tuple[Activity, ...]
