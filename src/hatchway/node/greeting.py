"""The way to a sandbox's agent: over the socket of its machine, and given up where the machine ends."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from hatchway.domain.errors import HatchwayError
from hatchway.node.guest.link import Link, Setup, connect
from hatchway.node.guest.seam import GuestError, GuestLink, LinkLost
from hatchway.node.vmm.seam import Vm, VmmError

BOOT_WITHIN_S = 60.0
"""A cold boot's agent answers within this (measured: 2–5 s on two slow cores)."""
RESTORE_WITHIN_S = 20.0


async def meet(vm: Vm, *, fresh: bool = False, within: float, setup: Setup | None = None) -> Link:
    """Connects to the agent of a machine and gives it a set-up. Raises `LinkLost`, `GuestError`, as `guest.link.connect` does."""
    return await connect(vm.agent_socket, fresh=fresh, vm_ended=vm.ended, setup=setup, within=within)


class Greeting:
    """The first words to a sandbox's agent: said as soon as its socket is there, so that they wait for the machine and not it for them.

    `complete` adds what is known only when there is a machine, and may refuse it: it runs while that is loaded.
    """

    def __init__(
        self, setup: Setup, *, fresh: bool, within: float, complete: Callable[[Setup], Awaitable[Setup]] | None = None
    ) -> None:
        self.setup = setup
        self._complete = complete
        self._fresh = fresh
        self._within = within
        self._task: asyncio.Task[Link] | None = None

    @property
    def begun(self) -> bool:
        """Whether there was a machine to greet."""
        return self._task is not None

    def begin(self, vm: Vm) -> None:
        """Connects, greets and gives the guest its set-up."""
        self._task = asyncio.get_running_loop().create_task(self._greet(vm))

    async def _greet(self, vm: Vm) -> Link:
        if self._complete is not None:
            self.setup = await self._complete(self.setup)
        return await meet(vm, fresh=self._fresh, setup=self.setup, within=self._within)

    async def answered(self) -> GuestLink:
        """Waits for the answer. Raises what `meet` and `complete` raise."""
        assert self._task is not None
        try:
            return await self._task
        except asyncio.CancelledError:
            await self.give_up()
            raise

    async def give_up(self) -> None:
        """Leaves no connection behind where the machine did not come to be."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LinkLost, GuestError, OSError, HatchwayError, VmmError):
                await (await self._task).close()
