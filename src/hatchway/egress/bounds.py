"""Bounds of one sandbox: token buckets, and budgets that are counted in a window. Pure; the clock is given."""

from collections import deque
from collections.abc import Callable

MINUTE = 60.0
HOUR = 3600.0


class Bucket:
    """`rate` tokens a second, `burst` at most."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def take(self) -> bool:
        """Takes a token, where there is one."""
        self._fill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_s(self) -> float:
        """Seconds until there is a token."""
        self._fill()
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate

    def change(self, rate: float, burst: float) -> None:
        """Goes on with another rate."""
        self._fill()
        self._rate, self._burst = rate, burst
        self._tokens = min(self._tokens, burst)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now


class Budget:
    """How much was used in the last `window` seconds, in slices of a sixtieth of it."""

    SLICES = 60

    def __init__(self, window: float, clock: Callable[[], float]) -> None:
        self._slice = window / self.SLICES
        self._clock = clock
        self._used: deque[tuple[int, int]] = deque()
        self._sum = 0

    def take(self, amount: int, limit: int) -> bool:
        """Uses so much, if that stays within the limit."""
        at = int(self._clock() / self._slice)
        while self._used and self._used[0][0] <= at - self.SLICES:
            self._sum -= self._used.popleft()[1]
        if self._sum + amount > limit:
            return False
        if self._used and self._used[-1][0] == at:
            self._used[-1] = (at, self._used[-1][1] + amount)
        else:
            self._used.append((at, amount))
        self._sum += amount
        return True
