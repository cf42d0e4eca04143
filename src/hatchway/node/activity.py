"""When each sandbox was last used: what the control plane asks before it takes one for idle.

Use is a request to the data plane, for as long as it is in hand, and a session that is made. It costs one entry per sandbox and
is not recorded: a node that was restarted counts from then, so that nothing is taken for idle too early.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hatchway.wire.node import Activity


class Uses:
    """All sandboxes of one node. `now` is a clock that is never set back, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._last: dict[str, float] = {}
        self._open: Counter[str] = Counter()

    def note(self, sandbox_id: str) -> None:
        """It is used in this moment."""
        self._last[sandbox_id] = self._now()

    @contextmanager
    def during(self, sandbox_id: str) -> Iterator[None]:
        """It is used until the block is left."""
        self._open[sandbox_id] += 1
        try:
            yield
        finally:
            self.note(sandbox_id)
            self._open[sandbox_id] -= 1
            if not self._open[sandbox_id]:
                del self._open[sandbox_id]

    def of(self, sandbox_id: str) -> Activity:
        """How long it has not been used."""
        last = self._last.get(sandbox_id, self._began)
        return Activity(sandbox_id=sandbox_id, idle_s=self._now() - last, busy=sandbox_id in self._open)

    def forget(self, sandbox_id: str) -> None:
        """It is no more."""
        self._last.pop(sandbox_id, None)
