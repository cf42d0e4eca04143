"""What the room is given: the way to sandboxes, and who they are."""

from collections.abc import AsyncIterator
from typing import Protocol

from hatchway.client.aio import AsyncSandbox


class Sandboxes(Protocol):
    """Gives handles of sandboxes; `hatchway.e2b.reaching.Reaching` is one."""

    async def reach(self, sandbox_id: str) -> AsyncSandbox:
        """The handle, which may have been asked for long ago. Raises `hatchway.client.NotFound`, `ConnectionFailed`."""

    async def look(self, sandbox_id: str) -> AsyncSandbox:
        """The handle with `info` as it is now. Raises the same."""

    def changes(self) -> AsyncIterator[tuple[str, str] | None]:
        """Sandboxes whose state changes, with the new one. None: what was before may have been missed. Raises `hatchway.client.HatchwayError`."""


class Identity(Protocol):
    """Derives the token of a sandbox; `hatchway.e2b.identity.Identity` is one."""

    def envd_token(self, sandbox_id: str) -> str:
        """What `X-Access-Token` must be."""
