"""What one sandbox may use of a shard that serves many: turns of the loop, streams, connections to the outside, frames that ask for nothing.

A shard is one event loop. Whatever a guest can make it do as often as it likes is done in pieces, and of one sandbox only some pieces in
each round of the loop (`Turns`); the others of this sandbox wait, and nobody else does.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from hatchway.egress.bounds import Bucket

AT_ONCE = 1
"""Pieces of work of one sandbox in one round of the loop: some hundred microseconds each."""
MAX_STREAMS = 512
"""Streams of HTTP/2 in hand, over all connections."""
MAX_OUTSIDE = 512
"""Connections to the outside, or twice as many as the sandbox may have to the gateway."""
WITHIN_S = 10.0
CONTROL, RESETS, SMALL = 8_000, 400, 40_000
"""Frames of HTTP/2 within `WITHIN_S`, over all connections: those that ask for nothing, give a stream up, or bring next to nothing of a body."""


def allowance(number: int, clock: Callable[[], float]) -> Bucket:
    """So many at once, and as many again in `WITHIN_S`."""
    return Bucket(number / WITHIN_S, number, clock)


class Turns:
    """Who of one sandbox gets on in this round of the loop, in the order in which they came."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def take(self) -> None:
        """Returns when another piece of work may be done. It is done before anything else is awaited."""
        if self._left > 0 and not self._waiting:
            self._left -= 1
            self._arm()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._arm()
        await turn

    def _use(self) -> None:
        self._left -= 1
        self._arm()

    def _arm(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Another round of the loop began."""
        self._turning = False
        self._left = self._at_once
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # it was cancelled
                turn.set_result(None)
                self._use()
        if self._waiting:
            self._arm()


class Shares:
    """Of one sandbox. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.turns = Turns()
        self.handshake = asyncio.Lock()
        """Whose handshake gets on: see `tls.handshake`."""
        self.streams = 0
        self.outside = 0
        self.control = allowance(CONTROL, clock)
        self.resets = allowance(RESETS, clock)
        self.small = allowance(SMALL, clock)
