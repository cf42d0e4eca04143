"""Requests of clients that need a sandbox which does not run: the control plane is asked to wake it, and they wait.

Whether a sandbox is woken by traffic is the control plane's to say; nothing of it is kept here. However many requests wait for a
sandbox, the control plane is asked once, and again only for as long as it says nothing.
"""

import asyncio
from collections.abc import Callable

from hatchway.domain.errors import Conflict, HatchwayError, Unavailable
from hatchway.domain.lifecycle import State
from hatchway.node.events import Events
from hatchway.wire.node import Event

WAKE_WITHIN_S = 120.0
"""How long a request waits: a cold boot on a busy host, behind a suspension that is not done yet."""
ASK_AGAIN_S = 5.0
"""A control process may have been restarted since it was asked."""
REFUSED_FOR_S = 1.0
"""For so long a refusal holds: a client that asks on and on asks this node alone."""

ASLEEP = frozenset({State.PAUSED, State.SUSPENDED, State.STOPPED})


class Waker:
    """`needs_waking` tells whether a sandbox is in a state, or on its way to one, that traffic may lead out of."""

    def __init__(
        self,
        events: Events,
        is_running: Callable[[str], bool],
        needs_waking: Callable[[str], bool],
        *,
        within_s: float = WAKE_WITHIN_S,
    ) -> None:
        self._events = events
        self._is_running = is_running
        self._needs_waking = needs_waking
        self._within_s = within_s
        self._waiting: dict[str, asyncio.Task[HatchwayError | None]] = {}
        self._wanted: dict[str, asyncio.Future[HatchwayError | None]] = {}
        self._refused: dict[str, float] = {}

    async def awake(self, sandbox_id: str) -> None:
        """Returns when the sandbox runs, and at once where nobody will wake it: what can be done then is the caller's to find out.

        Raises what kept it from being woken, and `Unavailable("wake_timeout")`.
        """
        if not self._needs_waking(sandbox_id):
            return
        task = self._waiting.get(sandbox_id)
        if task is None:
            if not self._events.heard or self._is_refused(sandbox_id):
                return
            task = self._waiting[sandbox_id] = asyncio.get_running_loop().create_task(self._wake(sandbox_id))
            task.add_done_callback(lambda _: self._waiting.pop(sandbox_id, None))
        error = await asyncio.shield(task)
        if error is not None:
            raise error

    def stay(self, sandbox_id: str, error: dict[str, str] | None) -> None:
        """The control plane does not wake it; `error` where it tried and failed."""
        self._refused[sandbox_id] = asyncio.get_running_loop().time() + REFUSED_FOR_S
        wanted = self._wanted.get(sandbox_id)
        if wanted is not None and not wanted.done():
            failed = (
                None
                if error is None
                else Conflict(
                    "wake_failed",
                    f"The sandbox could not be woken: {error.get('cause', '')}",
                    error.get("remedy") or "Look at its last operation.",
                    reason=error.get("code", ""),
                )
            )
            wanted.set_result(failed)

    def close(self) -> None:
        """Lets nobody wait any more."""
        for task in list(self._waiting.values()):
            task.cancel()

    def _is_refused(self, sandbox_id: str) -> bool:
        now = asyncio.get_running_loop().time()
        self._refused = {one: until for one, until in self._refused.items() if until > now}
        return sandbox_id in self._refused

    async def _wake(self, sandbox_id: str) -> HatchwayError | None:
        """None when it runs, or when the control plane says that it stays; else why it could not be woken."""
        loop = asyncio.get_running_loop()
        wanted: asyncio.Future[HatchwayError | None] = loop.create_future()
        self._wanted[sandbox_id] = wanted

        def listen(event: Event) -> None:
            seen = event.observed
            if (
                seen is not None
                and seen.sandbox_id == sandbox_id
                and self._is_running(sandbox_id)
                and not wanted.done()
            ):
                wanted.set_result(None)

        end = self._events.listen(listen)
        try:
            async with asyncio.timeout(self._within_s):
                while not wanted.done() and self._needs_waking(sandbox_id):
                    self._events.wake_wanted(sandbox_id)
                    await asyncio.wait({wanted}, timeout=ASK_AGAIN_S)
            return wanted.result() if wanted.done() else None
        except TimeoutError:
            return Unavailable(
                "wake_timeout",
                f"The sandbox was not woken within {self._within_s:g} seconds.",
                "Look at its last operation, and try again.",
            )
        finally:
            end()
            del self._wanted[sandbox_id]
