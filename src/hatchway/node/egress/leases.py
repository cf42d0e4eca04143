"""What the broker is told: which sandbox may use which credential, for as long as its lease; renewed by half of it."""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hatchway.domain.errors import HatchwayError
from hatchway.node.egress.links import Link
from hatchway.wire.broker import Binding, Grant, Granted, GrantRef
from hatchway.wire.message import Empty

if TYPE_CHECKING:
    from hatchway.node.egress.gateway import Gateway

RENEW_EVERY_S = 1.0
"""How often it is looked whose lease has to be renewed."""
RETRY_S = 10.0
"""After this a credential that could not be had is asked for again."""
PUT_WITHIN_S = 10.0
REVOKE_WITHIN_S = 5.0
AT_ONCE = 128
"""So many sandboxes are leased for at once; verbs that lease themselves find room at the broker beside them."""
AT_ONCE_OF_PROJECT = 8
"""So many of one project: what its sources are slow with holds up no other."""

log = logging.getLogger(__name__)


class Leases:
    """See the module. `link` is None where there is no broker: no credential can be had then."""

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._due: dict[str, float] = {}
        """By sandbox: when its grant is asked for again (monotonic)."""
        self._task: asyncio.Task[None] | None = None
        self._leasing: dict[str, asyncio.Task[None]] = {}
        """By sandbox: what is asked for now, or waits for its turn."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._turns_of: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """By project, while somebody has one of its turns or waits for it."""
        self.gateways: Callable[[], Iterable[Gateway]] = tuple

    def start(self) -> None:
        """Begins. May be called again."""
        if self._link is not None and self._task is None:
            self._link.on_up = self._tell_all
            self._link.start()
            self._task = asyncio.get_running_loop().create_task(self._renew_forever(), name="leases of credentials")

    async def close(self) -> None:
        """Ends; leases end by themselves."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for task in self._leasing.values():
            task.cancel()
        if self._link is not None:
            await self._link.close()
        await asyncio.gather(*self._leasing.values(), return_exceptions=True)

    async def put(self, gateway: "Gateway", revision: int, granted: tuple[Binding, ...]) -> str:
        """Grants what a sandbox's policy binds, and nothing else any more. Returns what cannot be had now, and why; empty: nothing."""
        if not granted:
            if gateway.sandbox_id in self._due:
                await self.revoke(gateway)
            return ""
        if self._link is None:
            return "This node has no broker."
        grant = Grant(
            sandbox_id=gateway.sandbox_id,
            project=gateway.project,
            generation=gateway.generation,
            revision=revision,
            bindings=granted,
        )
        now = time.monotonic()
        try:
            answer = await self._link.call("grant.put", grant, Granted, within=PUT_WITHIN_S, alone=True)
        except HatchwayError as error:
            self._due[gateway.sandbox_id] = time.monotonic() + RETRY_S
            return error.cause
        lasts = max(0.0, answer.expires_at - time.time())
        self._due[gateway.sandbox_id] = now + (min(RETRY_S, lasts / 2) if answer.unavailable else lasts / 2)
        return "; ".join(f"{name}: {why}" for name, why in sorted(answer.unavailable.items()))

    async def revoke(self, gateway: "Gateway") -> None:
        """Ends what a sandbox was granted, if anything was; legs that are open are cut on return."""
        self._due.pop(gateway.sandbox_id, None)
        if self._link is None or not self._link.connected:
            return
        ref = GrantRef(sandbox_id=gateway.sandbox_id, generation=gateway.generation)
        try:
            await self._link.call("grant.revoke", ref, Empty, within=REVOKE_WITHIN_S)
        except HatchwayError as error:
            # A broker that was started again knows of no grant; of one that hangs, the lease ends.
            log.warning("%s: its credentials were not revoked yet: %s", gateway.sandbox_id, error)

    async def _tell_all(self) -> None:
        for gateway in [one for one in self.gateways() if one.leases]:
            self._lease_again(gateway)

    async def _renew_forever(self) -> None:
        assert self._link is not None
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            if not self._due or not self._link.connected:
                continue
            now = time.monotonic()
            for gateway in [one for one in self.gateways() if one.leases]:
                if self._due.get(gateway.sandbox_id, now) <= now:
                    self._lease_again(gateway)

    def _lease_again(self, gateway: "Gateway") -> None:
        """Begins, unless it has: nobody waits for one sandbox's lease but itself."""
        if gateway.sandbox_id not in self._leasing:
            task = asyncio.get_running_loop().create_task(self._in_turn(gateway), name=f"lease {gateway.sandbox_id}")
            self._leasing[gateway.sandbox_id] = task
            task.add_done_callback(lambda task: self._ended(gateway.sandbox_id, task))

    async def _in_turn(self, gateway: "Gateway") -> None:
        async with self._turns_of.setdefault(gateway.project, asyncio.Semaphore(AT_ONCE_OF_PROJECT)), self._turns:
            await gateway.lease_again()

    def _ended(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        del self._leasing[sandbox_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: its credentials were not leased again", sandbox_id, exc_info=error)
