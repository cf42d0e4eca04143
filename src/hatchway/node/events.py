"""What happened on this node, for every control process that listens."""

import collections
import time
from collections.abc import Callable

from hatchway.wire.node import Asked, AskEnded, Event, Observed, Progress, SessionStatus, WakeWanted

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
        self._inside: set[Callable[[Event], None]] = set()

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

    def wake_wanted(self, sandbox_id: str) -> None:
        """A client's request needs a sandbox that does not run. Not kept for who comes later: it is said again while it is so."""
        self._say(Event(wake=WakeWanted(sandbox_id=sandbox_id)))

    def asked(self, asked: Asked) -> None:
        """A request is held until somebody decides. Not kept for who comes later: he is told of all that are held then."""
        self._say(Event(asked=asked))

    def ask_ended(self, ended: AskEnded) -> None:
        """A request is not held any more."""
        self._say(Event(ask_ended=ended))

    def _say(self, event: Event) -> None:
        self.next_sequence()
        for listener in list(self._listeners):
            listener(event)

    @property
    def heard(self) -> bool:
        """Whether a control process listens now."""
        return bool(self._listeners)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Gives a part of this node what happens from now on; returns what ends it."""
        self._inside.add(listener)
        return lambda: self._inside.discard(listener)

    def subscribe(self, listener: Callable[[Event], None], sequence: int) -> Callable[[], None]:
        """Gives the listener what is kept after `sequence`, then everything new; returns what ends it."""
        for number, event in self._backlog:
            if number > sequence:
                listener(event)
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def _publish(self, event: Event) -> None:
        self._backlog.append((self.sequence, event))
        for listener in (*self._inside, *self._listeners):
            listener(event)
