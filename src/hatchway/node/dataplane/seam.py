"""What the data plane asks of the node's core."""

from typing import Protocol

from hatchway.node.guest.seam import GuestLink


class Guests(Protocol):
    """The sandboxes of the node, as far as clients' streams need them."""

    def link_of(self, sandbox_id: str) -> GuestLink | None:
        """The agent of a sandbox that runs now; None when it is paused, stopped, on its way, or not here."""

    def state_of(self, sandbox_id: str) -> str | None:
        """A `domain.lifecycle.State`, for the error that names the way out; None when the sandbox is not here."""

    def project_of(self, sandbox_id: str) -> str | None:
        """The project that a sandbox belongs to; None when the sandbox is not here."""
