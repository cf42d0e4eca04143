"""How long a guest may take for something, by the host's clock: time in which it stands still, or is no machine, does not count."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from hatchway.node.guest.seam import GuestLink

STANDING_S = 5.0
"""How often is looked whether a guest that stands still runs again: by so much what is late may be found later."""

_TINY_S = 0.001
"""What sums of seconds may be off by."""


class Timer(Protocol):
    """What `later` returns."""

    def cancel(self) -> None:
        """Makes it not happen."""


class Deadline:
    """One bound at a time. `passed` is called when the guest has run for as long as was `set`."""

    def __init__(self, later: Callable[[float, Callable[[], None]], Timer], passed: Callable[[], None]) -> None:
        self._later = later
        self._passed = passed
        self._link: GuestLink | None = None
        self._left: float | None = None
        """Seconds, from `_ran` on."""
        self._ran = 0.0
        self._timer: Timer | None = None

    def set(self, seconds: float, link: GuestLink) -> None:
        """So many seconds from now on, in place of what was set before."""
        self.clear()
        self._left = seconds
        self.go_on(link)

    def go_on(self, link: GuestLink) -> None:
        """The guest has another link from now on; what was left is left."""
        self.hold()
        self._link, self._ran = link, link.ran()
        self._arm()

    def hold(self) -> None:
        """The guest is no machine for a while."""
        if self._link is not None and self._left is not None:
            self._left -= self._link.ran() - self._ran
        self._link = None
        self._cancel()

    def clear(self) -> None:
        """Nothing is waited for any more."""
        self._left = None
        self._link = None
        self._cancel()

    @property
    def is_set(self) -> bool:
        """Whether something is waited for."""
        return self._left is not None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at_least: float = 0.0) -> None:
        if self._left is not None:
            self._timer = self._later(max(self._left, at_least, 0.0), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._link is None or self._left is None:
            return
        ran = self._link.ran()
        self._left -= ran - self._ran
        self._ran = ran
        if self._left > _TINY_S:
            self._arm(STANDING_S)
            return
        self.clear()
        self._passed()


class GivingUp:
    """Whether an agent was given up on, and what waits for it."""

    def __init__(self) -> None:
        self.given_up = False
        self._waits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Raises `TimeoutError` out of the block as soon as the agent is given up on."""
        async with asyncio.timeout(None) as bound:
            self._waits.add(bound)
            try:
                yield
            finally:
                self._waits.discard(bound)

    def give_up(self) -> None:
        """Nobody waits for the agent any more."""
        self.given_up = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
