"""Bounds of file work."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Reaching one gives a problem document that names it, or cuts an answer off that has begun."""

    per_sandbox: int = 28
    """Operations on one sandbox at one time; the agent has room for 32."""
    per_node: int = 512
    """Operations at one time on all sandboxes of the node: each may hold up to a MiB of octets that wait."""
    watches: int = 16
    """Of those of one sandbox, watches."""
    answer_s: float = 60.0
    """How long the guest may take to begin its answer, to give the next octets of one, or to take octets of an upload."""
    work_s: float = 900.0
    """How long it may be silent while it removes, moves, changes or flushes."""
    transfer_s: float = 6 * 3600.0
    """How long one upload or download may take in all."""
    page_octets: int = 256 * 1024
    """Octets of a list that are gathered before the answer begins; until then an error is answered as one."""
    archive_octets: int = 256 * 1024
    """Octets that are packed or unpacked (gzip) at once."""
    upload_ahead: int = 256 * 1024
    """Octets of an upload that are taken from its client before the guest took those before."""
    body: int = 65_536
    """Octets of a JSON body."""
    ping_s: float = 15.0
