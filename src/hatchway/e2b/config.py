"""What the wrapper is told when it starts."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class E2bConfig:
    """Configuration of the role."""

    folder: Path
    """Its own: `secret` lies there (0600)."""
    control: Path
    """The socket of the control plane that it asks over: `wire.behalf.SOCKET`."""
    secret: bytes | None = field(default=None, repr=False)
    """What tokens of sandboxes are derived from, where several wrappers share it; None: one that is made at first and kept in the folder."""
