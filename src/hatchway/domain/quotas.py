"""What a project may have: quotas for all that is in it together, caps for each sandbox, and the templates that it may use."""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=1, le=100 * 366 * 24 * 3600.0)]


class Quotas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Upper bounds of what a project holds at any moment; null or left out: none."""

    sandboxes: Count | None = None
    """Sandboxes that are not deleted, in whatever state."""
    running_vcpus: Count | None = None
    """Virtual CPUs of the sandboxes that have a machine, or are about to get one: running and paused ones."""
    running_memory_mib: Count | None = None
    """Memory of the same, in MiB."""
    disk_mib: Count | None = None
    """Sizes of the disks of all sandboxes that are not deleted, in MiB; what they take on the host is less."""
    snapshot_bytes: Count | None = None
    """What all snapshots take, in octets."""
    sessions: Count | None = None
    """Command sessions that have not ended, in sandboxes that are not deleted."""
    creates_per_minute: Count | None = None
    """Sandboxes made within any 60 seconds, branches of forks among them."""


class Caps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Upper bounds of each single sandbox; null or left out: those of the host."""

    vcpus: Count | None = None
    memory_mib: Count | None = None
    disk_mib: Count | None = None
    timeout_s: Seconds | None = None
    """How long one may run at a time: the longest `timeout_s`, which it gets where none is asked for."""
    suspended_s: Seconds | None = None
    """How long one may be suspended before it is deleted."""
    snapshot_s: Seconds | None = None
    """How old a snapshot may become before it is deleted."""
    export_s: Seconds | None = None
    """How old an export may become before it is deleted, where that is less than the time that it is kept anyway."""


class ProjectUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a project holds now, counted as its quotas count it."""

    sandboxes: int = 0
    running_vcpus: int = 0
    running_memory_mib: int = 0
    disk_mib: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    sessions: int = 0
    creates_last_minute: int = 0


def template_allowed(allowed: tuple[str, ...] | None, *, name: str, tag: str, digest: str) -> bool:
    """Whether a release is one of `allowed`, each a `name`, `name:tag` or `name@sha256:…`; None allows all."""
    return allowed is None or any(one in (name, f"{name}:{tag}", f"{name}@{digest}") for one in allowed)
