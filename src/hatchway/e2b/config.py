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
    data_ca: Path | None = None
    """File with what data planes may be certified by beside the system's authorities; it is there only where one has TLS."""
    secret: bytes | None = field(default=None, repr=False)
    """What tokens of sandboxes are derived from, where several wrappers share it; None: one that is made at first and kept in the folder."""
    domain: str | None = None
    """Under which ports of sandboxes have names, `PORT-ID.DOMAIN`; SDKs are told. None: they go by their own settings."""

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains all names under which are ours: without the port that SDKs may be told beside."""
        return () if self.domain is None else (self.domain.partition(":")[0],)
