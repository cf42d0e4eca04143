"""What Ctrl-C and SIGTERM mean while a command runs in a sandbox.

Before the command runs they end us: `Interrupted` is raised, and whoever made something removes it. While it runs the
first one goes to the command, a second one within `AGAIN_S` ends us. While we clean up, the first one says that we do.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from .front import note

AGAIN_S = 2.0
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to end; `status` is the exit status that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


class Interrupts:
    """Handles the signals of one run. Use it as a context manager, in the main thread."""

    def __init__(self) -> None:
        self._forward: Callable[[str], None] | None = None
        self._last = 0.0
        self._deferring = False
        self._deferred: int | None = None
        self._cleaning: str | None = None
        self._before: list[tuple[int, object]] = []

    def __enter__(self) -> "Interrupts":
        for number in _HANDLED:
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before == signal.SIG_IGN:
                continue  # nohup
            self._before.append((number, before))
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before:
            signal.signal(number, before)  # type: ignore[arg-type]  # it is what getsignal gave

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within it a first signal waits for the end, so that what is being made is known by then; a second one does not."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._deferred is not None:
            raise Interrupted(self._deferred)

    @contextlib.contextmanager
    def forwarding(self, send: Callable[[str], None]) -> Iterator[None]:
        """Within it signals go to the command: `send` is called with a name like `INT`, in a thread of its own."""
        self._forward = send
        try:
            yield
        finally:
            self._forward = None

    def clean_up(self, what: str) -> None:
        """From now on we end anyway; `what` would be left behind if somebody insists."""
        self._cleaning = what
        self._last = 0.0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self._last > 0 and now - self._last <= AGAIN_S
        self._last = now
        if self._cleaning is not None:
            if again:
                raise Interrupted(number)
            note(f"cleaning up; once more within {AGAIN_S:g} s leaves {self._cleaning} behind")
        elif self._deferring and self._deferred is None:
            self._deferred = number
        elif self._forward is not None and not again and number != signal.SIGHUP:
            name = signal.Signals(number).name.removeprefix("SIG")
            threading.Thread(target=self._forward, args=(name,), daemon=True).start()
        else:
            raise Interrupted(number)
