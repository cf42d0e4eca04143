"""What the rooms of the wrapper share."""

from dataclasses import dataclass

from hatchway.e2b.config import E2bConfig
from hatchway.e2b.identity import Identity
from hatchway.e2b.reaching import Reaching


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """One wrapper that serves."""

    config: E2bConfig
    identity: Identity
    reaching: Reaching
