"""How much of a host its sandboxes may take: the operator's policy, one per installation. docs/limits.md explains it."""

from typing import Annotated

import msgspec

BURST = 4
"""A disk may be used this many times as fast as its bound says, for `BURST_S` seconds at a stretch."""
BURST_S = 10

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**30)]
_Factor = Annotated[float, msgspec.Meta(ge=1, le=100)]


class HostLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are such that the host does not run out of memory, and hardly of disk. Sizes in MiB; 0 for a rate: not bounded."""

    memory_reserve_mib: Annotated[int, msgspec.Meta(ge=64, le=2**30)] | None = None
    """Memory that sandboxes together leave to the host and to us; None: a sixteenth of it, 512 MiB at least."""
    memory_overcommit: _Factor = 1.0
    """How many times the memory of guests may exceed what there is. Above 1 sandboxes may be ended as `out_of_memory`."""
    disk_reserve_mib: Annotated[int, msgspec.Meta(ge=64, le=2**30)] = 512
    """Free space that creation leaves: records, kept output and databases go on where sandboxes do not."""
    disk_overcommit: _Factor = 8.0
    """How many times the sizes of disks, which grow as they are written, may exceed what there is."""
    disk_mib_s: _Size = 256
    """What one sandbox may read and write in a second, taken together."""
    disk_ops_s: _Size = 10_000
    """How many reads, writes and flushes one sandbox may ask for in a second."""
    kept_output_mib: Annotated[int, msgspec.Meta(ge=64, le=2**30)] = 1024
    """Output that is kept of all sessions of one sandbox; beyond it the oldest of ended sessions goes first."""
    ballast_mib: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    """Size of each file that is given up on a full disk so that records can still be written: one of the node's, one of the control plane's."""

    def memory_reserve(self, total_mib: int) -> int:
        """What of a host with `total_mib` is not the sandboxes'."""
        return max(512, total_mib // 16) if self.memory_reserve_mib is None else self.memory_reserve_mib

    def for_sandboxes(self, total_mib: int) -> int:
        """What of it all sandboxes and their monitors may have together."""
        return max(0, total_mib - self.memory_reserve(total_mib))


DEFAULTS = HostLimits()
