"""What happened on this node, for every control process that listens."""

import collections
import time
from collections.abc import Callable

from hatchway.wire.node import Event, Observed, Progress, SessionStatus

BACKLOG = 4_096
"""Events that are kept for a control process that comes back; an older `sequence` means: list again."""


class Events:
    """Numbers the events of this node and gives them to the listeners.

    Sequences grow over restarts too: they start at the clock, in microseconds.
    """

    def __init__(self) -> None:
        self.sequence = time.time_ns() // 1_000
        self._backlog: collections.deque[tuple[int, Event]] = collections.deque(maxlen=BACKLOG)
        self._listeners: set[Callable[[Event], None]] = set()

    def next_sequence(self) -> int:
        """Returns the number of the change that is about to be published."""
        self.sequence += 1
        return self.sequence

    def observed(self, observed: Observed) -> None:
        """A sandbox changed; `observed.sequence` is its number."""
        self._publish(Event(observed=observed))

    def session(self, status: SessionStatus) -> None:
        """A session changed."""
        self.next_sequence()
        self._publish(Event(session=status))

    def progress(self, sandbox_id: str, phase: str, fraction: float | None = None) -> None:
        """A long verb went on."""
        self.next_sequence()
        self._publish(Event(progress=Progress(sandbox_id=sandbox_id, phase=phase, fraction=fraction)))

    def subscribe(self, listener: Callable[[Event], None], sequence: int) -> Callable[[], None]:
        """Gives the listener what is kept after `sequence`, then everything new; returns what ends it."""
        for number, event in self._backlog:
            if number > sequence:
                listener(event)
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def _publish(self, event: Event) -> None:
        self._backlog.append((self.sequence, event))
        for listener in list(self._listeners):
            listener(event)
