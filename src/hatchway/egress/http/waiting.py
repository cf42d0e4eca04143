"""Bounds of waits. A connection waits for octets thousands of times a second, and hardly ever in vain."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Alarm:
    """One timer for the waits of one task, which come one after the other. It stays set from one to the next, so that a wait sets none itself."""

    __slots__ = ("_at", "_due", "_loop", "_rang", "_task", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at = self._due = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._rang = False

    async def within(self, seconds: float, waited: Coroutine[Any, Any, T]) -> T:
        """Awaits it. Raises `TimeoutError` when that takes longer."""
        task = asyncio.current_task()
        assert task is not None
        self._due = due = self._loop.time() + seconds
        if self._timer is None or self._at > due:
            self.stop()
            self._set(due)
        cancelling = task.cancelling()
        self._task = task
        try:
            return await waited
        except asyncio.CancelledError:
            if self._rang and task.uncancel() <= cancelling:
                raise TimeoutError(f"longer than {seconds:g} s") from None
            raise
        finally:
            self._task, self._rang = None, False

    def stop(self) -> None:
        """Takes the timer away. It may be used again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        self._at = due
        self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._due:
            self._set(self._due)
        elif not self._rang:
            self._rang = True
            self._task.cancel()
