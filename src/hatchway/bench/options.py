"""What a bench is told."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Where the service is, how many runs count, and where progress is told."""

    data_dir: Path
    runs: int = 20
    progress: Callable[[str], None] = lambda _: None
