"""What the node's core asks of its command sessions; `Sessions` in `sessions.py` does it.

A session is a record and its kept output in `folder/SANDBOX/SESSION/`, so that a node that was killed goes on where it was.
"""

from typing import Protocol

from hatchway.node.guest.seam import GuestLink
from hatchway.wire.node import SessionSpec, SessionStatus


class SessionHost(Protocol):
    """All command sessions of one node."""

    async def create(self, spec: SessionSpec) -> SessionStatus:
        """Records a session; the same spec again answers as the first time, another spec of the same id is a `Conflict`. Starts nothing."""

    def get(self, session_id: str) -> SessionStatus:
        """Raises `NotFound("unknown_session")`."""

    def of_sandbox(self, sandbox_id: str) -> tuple[SessionStatus, ...]:
        """The sessions of one sandbox, oldest first."""

    def sandboxes(self) -> frozenset[str]:
        """Ids of the sandboxes that have sessions."""

    async def delete(self, session_id: str) -> None:
        """Kills what runs, removes what was kept. Idempotent."""

    async def link_up(self, sandbox_id: str, link: GuestLink) -> None:
        """The sandbox's agent is there (just made, or found again by a restarted node): running sessions are re-attached; those whose process the
        agent does not know ended with `sandbox_lost`."""

    def link_down(self, sandbox_id: str) -> None:
        """The sandbox is suspended: its agent cannot be asked until `link_up`, and nothing is lost."""

    def sandbox_lost(self, sandbox_id: str, reason: str) -> None:
        """The VM is gone: streams of what ran end with `sandbox_lost` at once; what was kept stays."""

    async def sandbox_deleted(self, sandbox_id: str) -> None:
        """Ends and removes all sessions of the sandbox."""
