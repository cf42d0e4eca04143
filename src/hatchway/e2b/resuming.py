"""Sees to it that a sandbox runs before a request goes to it: waits while it is in the middle of something, and resumes it where it says so.

A sandbox that was seen running a moment ago is taken for running. Who then finds that it is not says so (`doubt`), and comes again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from hatchway.client import errors as ours
from hatchway.domain.lifecycle import State
from hatchway.e2b import refusals, settings
from hatchway.e2b.reaching import Reaching
from hatchway.e2b.settings import Settings

if TYPE_CHECKING:
    from hatchway.client.aio import AsyncSandbox
    from hatchway.client.models import SandboxInfo

FRESH_S = 1.0
"""For so long a sandbox that runs is taken for running."""
WITHIN_S = 50.0
"""How long a request waits; SDKs give up after 60 seconds."""
LOOK_AGAIN_S = 0.1
MIN_TIMEOUT_S = 300.0
"""What a sandbox that traffic resumed has at least."""
MAX_KNOWN = 4096

_RUNS_ON = frozenset({"snapshot", "fork", "export", "update"})
"""Operations in which a sandbox that runs goes on running."""
_ASLEEP = frozenset({State.PAUSED, State.SUSPENDED})

MayResume = Callable[["SandboxInfo"], bool]


def settings_of(info: "SandboxInfo") -> Settings:
    """What the wrapper keeps with a sandbox. Raises `E2bError` 502 for one that is not the wrapper's, or whose settings somebody spoilt: what may
    be done with it is not known then."""
    kept = settings.of(info.annotations)
    if kept is None:
        raise refusals.not_found(info.id)
    return kept


class Resuming:
    """One for the whole wrapper."""

    def __init__(self, reaching: Reaching, *, within_s: float = WITHIN_S) -> None:
        self._reaching = reaching
        self._within_s = within_s
        self._running_at: OrderedDict[str, float] = OrderedDict()
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._doubts = 0

    async def running(self, sandbox_id: str, may_resume: MayResume = lambda _: True) -> "AsyncSandbox":
        """The handle of a sandbox that runs. `may_resume` tells whether the request has the right to resume it.

        Raises `E2bError`: 502 for one that is not there, or does not run and is not resumed; 403 without the right; 409 for one that goes on
        changing.
        """
        now = asyncio.get_running_loop().time
        until = now() + self._within_s
        while True:
            if self.fresh(sandbox_id) and self._reaching.knows(sandbox_id):
                return await self._reached(sandbox_id, looking=False)
            doubts = self._doubts
            handle = await self._reached(sandbox_id, looking=True)
            state, operation = handle.info.state, handle.info.operation
            kind = "" if operation is None else str(operation.get("kind", ""))
            if state in (State.DELETED, State.FAILED) or kind == "delete":
                raise refusals.not_found(sandbox_id)
            if state == State.RUNNING and (operation is None or kind in _RUNS_ON):
                if doubts == self._doubts:  # else it may have stopped since it answered
                    self._note(sandbox_id, now())
                return handle
            if operation is None:
                if state not in _ASLEEP or not settings_of(handle.info).auto_resume:
                    raise refusals.not_found(sandbox_id)
                if not may_resume(handle.info):
                    raise refusals.may_not_resume(sandbox_id)
            if now() >= until:
                raise refusals.in_transition(sandbox_id)
            if operation is None:
                await self._resume(handle, until - now())
            else:
                await asyncio.sleep(LOOK_AGAIN_S)

    def doubt(self, sandbox_id: str) -> None:
        """It was found not to run, or is being changed."""
        self._doubts += 1
        self._reaching.changed(sandbox_id)
        self._running_at.pop(sandbox_id, None)

    def fresh(self, sandbox_id: str) -> bool:
        """Whether it was seen running a moment ago, and nothing has been heard since."""
        seen = self._running_at.get(sandbox_id)
        return seen is not None and asyncio.get_running_loop().time() - seen < FRESH_S

    async def _reached(self, sandbox_id: str, *, looking: bool) -> "AsyncSandbox":
        try:
            return await (self._reaching.look if looking else self._reaching.reach)(sandbox_id)
        except (ours.NotFound, ours.Gone):
            self.doubt(sandbox_id)
            raise refusals.not_found(sandbox_id) from None

    def _note(self, sandbox_id: str, now: float) -> None:
        self._running_at[sandbox_id] = now
        self._running_at.move_to_end(sandbox_id)
        while len(self._running_at) > MAX_KNOWN:
            self._running_at.popitem(last=False)

    async def _wake(self, info: "SandboxInfo") -> None:
        """With its time from then on, or the least that traffic gives."""
        from hatchway.client import calls

        body = {} if info.timeout_s is None else {"timeout_s": max(info.timeout_s, MIN_TIMEOUT_S)}
        driver = self._reaching.for_sandbox(info.id)
        await driver.run(calls.change_sandbox(info.id, "wake", wait=True, timeout_s=WITHIN_S, body=body))

    async def _resume(self, handle: "AsyncSandbox", within_s: float) -> None:
        """Wakes it, once however many requests want that; each waits for as long as it has."""
        task = self._waking.get(handle.id)
        if task is None:
            task = self._waking[handle.id] = asyncio.get_running_loop().create_task(self._wake(handle.info))
            task.add_done_callback(lambda _: self._waking.pop(handle.id, None))
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(task)
        except TimeoutError:
            raise refusals.in_transition(handle.id) from None
        except (ours.Conflict, ours.NotFound, ours.Gone):
            await asyncio.sleep(
                LOOK_AGAIN_S
            )  # something else came first: it is looked at again, but not without a pause
        except (ours.OperationFailed, ours.WaitTimeout):
            raise refusals.in_transition(handle.id) from None
