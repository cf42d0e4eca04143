"""How long the phases of a verb take."""

import time

from hatchway.node import metrics
from hatchway.wire.fault_points import reached


class Phases:
    """Stopwatch of one verb; `ms` maps each phase's name to its milliseconds."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """Ends a phase."""
        now = time.perf_counter()
        metrics.PHASES.labels(name).observe(now - self._last)
        self.ms[name] = round((now - self._last) * 1e3, 2)
        self._last = now
        reached("phase", name)
