"""Notices that a sandbox stops running while streams of it are open: they are to be cut off then, whatever they wait for.

One question for each sandbox with open streams, however many these are; what is killed is mostly known sooner, by the stream itself.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from hatchway.client import errors as ours
from hatchway.e2b.envd.seam import Sandboxes

PERIOD_S = 1.0
RUNNING = "running"


@dataclass(eq=False)
class Watched:
    """One stream's interest; `future` is done when the sandbox does not run any more. `close` it."""

    future: "asyncio.Future[None]"
    close: Callable[[], None]


@dataclass
class _Sandbox:
    streams: set["asyncio.Future[None]"] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None


class Endings:
    """The watch over all sandboxes with open streams."""

    def __init__(self, sandboxes: Sandboxes, period_s: float = PERIOD_S) -> None:
        self._sandboxes = sandboxes
        self._period_s = period_s
        self._open: dict[str, _Sandbox] = {}

    def watch(self, sandbox_id: str) -> Watched:
        """Watches for a stream, until that is closed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        sandbox = self._open.setdefault(sandbox_id, _Sandbox())
        sandbox.streams.add(future)
        if sandbox.task is None:
            sandbox.task = loop.create_task(self._ask(sandbox_id, sandbox))

        def close() -> None:
            sandbox.streams.discard(future)
            if not sandbox.streams and sandbox.task is not None:
                sandbox.task.cancel()
                sandbox.task = None
                if self._open.get(sandbox_id) is sandbox:
                    del self._open[sandbox_id]

        return Watched(future, close)

    async def _ask(self, sandbox_id: str, sandbox: _Sandbox) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            # That nobody answers says nothing of the sandbox.
            with contextlib.suppress(ours.HatchwayError):
                if await self._runs(sandbox_id):
                    continue
                for future in list(sandbox.streams):
                    if not future.done():
                        future.set_result(None)

    async def _runs(self, sandbox_id: str) -> bool:
        try:
            handle = await self._sandboxes.look(sandbox_id)
        except ours.NotFound:
            return False
        return handle.state == RUNNING
