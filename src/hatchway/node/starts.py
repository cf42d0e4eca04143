"""Turns of those who start a machine: more at once only take the cores from each other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from hatchway.domain.errors import Unavailable

AT_ONCE = 16


class Starts:
    """Gives `AT_ONCE` turns. A bake is waited for before a turn is taken, so that one template holds up no other."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._closed = False

    def close(self) -> None:
        """The service goes down: whoever waits starts nothing any more."""
        self._closed = True

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn and holds it. Raises `Unavailable("draining")`."""
        async with self._turns:
            if self._closed:
                raise Unavailable("draining", "The service is being taken down.", "Try again when it is up again.")
            yield
