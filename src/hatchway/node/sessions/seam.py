"""What the node's core asks of its command sessions; `Sessions` in `sessions.py` does it.

A session is a record and its kept output in `folder/SANDBOX/SESSION/`, so that a node that was killed goes on where it was.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from hatchway.node.guest.seam import GuestLink
from hatchway.wire.node import BranchedSession, SessionSpec, SessionStatus


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A session whose process lives in a machine that stands still: what another one, made from this machine, goes on from."""

    spec: SessionSpec
    state: str
    """`running`, or `exited` where a child of its leader holds its streams."""
    boot_id: str | None
    pid: int | None
    started_at: float | None
    stdout: int
    """How much of the stream was stored: octets from the beginning."""
    stderr: int
    stdin: int
    stdin_eof: bool


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

    def standing(self, sandbox_id: str) -> tuple[Standing, ...]:
        """The sessions whose processes live in the sandbox's machine."""

    async def branch(self, sandbox_id: str, project: str, standing: Sequence[Standing]) -> tuple[BranchedSession, ...]:
        """Gives a sandbox that was made from another's machine sessions of its own for the processes that run on in it.

        Called before `link_up`. Raises `HostExhausted("host_disk_full")`.
        """

    def branched(self, sandbox_id: str) -> tuple[BranchedSession, ...]:
        """The sessions of a sandbox that it began with."""

    def rolled_back(self, sandbox_id: str) -> None:
        """The sandbox goes back to a snapshot: what runs in it never was, and ends with `rolled_back`."""

    def link_down(self, sandbox_id: str) -> None:
        """The sandbox is suspended: its agent cannot be asked until `link_up`, and nothing is lost."""

    def sandbox_lost(self, sandbox_id: str, reason: str) -> None:
        """The VM is gone: streams of what ran end with `sandbox_lost` at once; what was kept stays."""

    async def sandbox_deleted(self, sandbox_id: str) -> None:
        """Ends and removes all sessions of the sandbox."""
