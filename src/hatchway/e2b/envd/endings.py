"""Hears that a sandbox stops running while streams of it are open: they are to be cut off then, whatever they wait for.

The control plane tells what changes, over one stream for all sandboxes (`Sandboxes.changes`), which is open while streams are, and a while longer.
A sandbox is asked about only where a change may have been missed: when that stream begins, or when the sandbox was not seen running just before.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from hatchway.client import errors as ours
from hatchway.e2b.envd.seam import Sandboxes

RUNNING = "running"
LINGER_S = 60.0
"""So long it is listened on when the last stream has closed: another one mostly comes soon."""
AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts where the control plane does not answer; the last one goes on."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Watched:
    """One stream's interest; `future` is done when the sandbox does not run any more. `close` it."""

    future: "asyncio.Future[None]"
    close: Callable[[], None]


class Endings:
    """The watch over all sandboxes with open streams.

    `gone` hears of every sandbox that stopped running; `fresh` tells whether one was seen running a moment ago, and nothing heard of it since.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        *,
        gone: Callable[[str], None] = lambda _: None,
        fresh: Callable[[str], bool] = lambda _: False,
        linger_s: float = LINGER_S,
    ) -> None:
        self._sandboxes = sandboxes
        self._gone = gone
        self._fresh = fresh
        self._linger_s = linger_s
        self._streams: dict[str, set[asyncio.Future[None]]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._hearing: asyncio.Task[None] | None = None
        self._heard = False
        """Whether what changes is told as it happens."""
        self._leaving: asyncio.TimerHandle | None = None

    def watch(self, sandbox_id: str) -> Watched:
        """Watches for a stream, until that is closed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams.setdefault(sandbox_id, set()).add(future)
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._hearing is None:
            self._hearing = asyncio.get_running_loop().create_task(self._hear())
        elif self._heard and not self._fresh(sandbox_id):
            self._ask(sandbox_id)
        return Watched(future, lambda: self._close(sandbox_id, future))

    def _close(self, sandbox_id: str, future: "asyncio.Future[None]") -> None:
        streams = self._streams.get(sandbox_id, set())
        streams.discard(future)
        if streams:
            return
        self._streams.pop(sandbox_id, None)
        if (asking := self._asking.pop(sandbox_id, None)) is not None:
            asking.cancel()
        if not self._streams and self._leaving is None:
            self._leaving = asyncio.get_running_loop().call_later(self._linger_s, self._leave)

    def _leave(self) -> None:
        self._leaving = None
        if self._hearing is not None:
            self._hearing.cancel()
            self._hearing, self._heard = None, False

    def _end(self, sandbox_id: str) -> None:
        self._gone(sandbox_id)
        for future in self._streams.get(sandbox_id, ()):
            if not future.done():
                future.set_result(None)

    async def _hear(self) -> None:
        failures = 0
        while True:
            try:
                async with aclosing(self._sandboxes.changes()) as changes:  # type: ignore[type-var]  # it is an async generator
                    async for change in changes:
                        failures = 0
                        if change is None:
                            self._heard = True
                            for sandbox_id in self._streams:
                                self._ask(sandbox_id)
                        elif change[1] != RUNNING:
                            if (asking := self._asking.pop(change[0], None)) is not None:
                                asking.cancel()  # its answer may be older than this
                            self._end(change[0])
            except ours.HatchwayError as error:
                log.warning("what becomes of sandboxes is not told", extra={"cause": str(error)})
            self._heard = False
            await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
            failures += 1

    def _ask(self, sandbox_id: str) -> None:
        """Looks once at a sandbox, beside whatever is going on."""
        if sandbox_id in self._asking:
            return
        task = self._asking[sandbox_id] = asyncio.get_running_loop().create_task(self._look(sandbox_id))
        task.add_done_callback(lambda done: self._asking.get(sandbox_id) is done and self._asking.pop(sandbox_id))

    async def _look(self, sandbox_id: str) -> None:
        failures = 0
        while True:
            try:
                runs = (await self._sandboxes.look(sandbox_id)).state == RUNNING
            except ours.NotFound:
                runs = False
            except ours.HatchwayError:  # that nobody answers says nothing of the sandbox
                await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
                failures += 1
                continue
            if not runs:
                self._end(sandbox_id)
            return
