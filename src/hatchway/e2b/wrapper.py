"""What the rooms of the wrapper share."""

from dataclasses import dataclass, field

from hatchway.e2b.config import E2bConfig
from hatchway.e2b.identity import Identity
from hatchway.e2b.links import Links
from hatchway.e2b.reaching import Reaching


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """One wrapper that serves."""

    config: E2bConfig
    identity: Identity
    reaching: Reaching
    links: Links = field(default_factory=Links)
