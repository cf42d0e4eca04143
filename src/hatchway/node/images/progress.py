"""How far a long piece of work is, as events."""

from collections.abc import Callable

import msgspec


class BuildProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One step: `phase` is a stable word for programs, `fraction` (0 to 1) how far the phase is when that is known, `message` is for people."""

    phase: str
    fraction: float | None = None
    message: str = ""


Report = Callable[[BuildProgress], None]


def silent(_event: BuildProgress) -> None:
    """Reports to nobody."""
