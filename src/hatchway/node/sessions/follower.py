"""One client that follows a session's output: its place in each stream, and how it is woken."""

import asyncio
from collections.abc import Callable

from hatchway.node.sessions.spool import Cursor


class Follower:
    """Reads at its own pace; holds no output itself, so a stalled one costs a file descriptor at most."""

    def __init__(self, cursors: dict[int, Cursor], leave: Callable[["Follower"], None]) -> None:
        self.cursors = cursors
        """By descriptor: 1 stdout, 2 stderr."""
        self.stopped = ""
        """Why it is to end although the session goes on: `disconnected shutdown revoked superseded expired`."""
        self._leave = leave
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something changed: a waiting reader looks again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def stop(self, why: str) -> None:
        """Makes the reader end at its next look."""
        self.stopped = self.stopped or why
        self.wake()

    async def wait(self, timeout: float) -> bool:
        """Waits until woken, at most `timeout` seconds; tells whether it was woken.

        The caller looks at the state and then calls this without awaiting in between, so that no change is missed.
        """
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self._expire, waiter)
        try:
            await waiter
            return True
        except _Expired:
            return False
        finally:
            timer.cancel()
            self._waiter = None

    def close(self) -> None:
        """Leaves the session. Idempotent."""
        for cursor in self.cursors.values():
            cursor.close()
        self._leave(self)

    @staticmethod
    def _expire(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(_Expired())


class _Expired(Exception):
    """The time to wait is over."""
