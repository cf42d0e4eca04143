"""What the broker is told: which sandbox may use which credential, for as long as its lease; renewed by half of it.

What is revoked is told until the broker has heard it. What this process cannot know of, because another one granted it or died in the
middle, the broker knows: whenever it is connected it is asked what it has granted, and what is nobody's any more is revoked.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hatchway.domain.errors import HatchwayError
from hatchway.node.egress.links import Link
from hatchway.wire.broker import Binding, Grant, Granted, GrantList, GrantRef
from hatchway.wire.message import Empty

if TYPE_CHECKING:
    from hatchway.node.egress.gateway import Gateway

RENEW_EVERY_S = 1.0
"""How often it is looked whose lease has to be renewed, and what has to be revoked still."""
RETRY_S = 10.0
"""After this a credential that could not be had is asked for again."""
PUT_WITHIN_S = 10.0
REVOKE_WITHIN_S = 5.0
LIST_WITHIN_S = 10.0
AT_ONCE = 128
"""So many sandboxes are leased for at once; verbs that lease themselves find room at the broker beside them."""
AT_ONCE_OF_PROJECT = 8
"""So many of one project: what its sources are slow with holds up no other."""
UNHEARD = frozenset({"peer_lost", "busy"})
"""Codes of errors after which a grant may have been taken, and is put again in any case."""

log = logging.getLogger(__name__)


class Leases:
    """See the module. `link` is None where there is no broker: no credential can be had then."""

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._due: dict[str, float] = {}
        """By sandbox: when its grant is asked for again (monotonic)."""
        self._owed: set[tuple[str, int]] = set()
        """Sandboxes and generations that were revoked, and of which the broker has not said that it has heard it."""
        self._listed = False
        """Whether it was asked what it has granted since it was connected."""
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
            self._link.on_up = self._up
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
        # Also where nobody waits for the answer any more, the broker may have it.
        self._due[gateway.sandbox_id] = now + RETRY_S
        # It replaces whatever was there; sent behind a revoke that is on its way, it is done behind it.
        self._owed = {one for one in self._owed if one[0] != gateway.sandbox_id or one[1] > gateway.generation}
        try:
            answer = await self._link.call("grant.put", grant, Granted, within=PUT_WITHIN_S, alone=True)
        except HatchwayError as error:
            if error.code not in UNHEARD:  # refused: what was granted before is not what holds now
                self._owed.add((gateway.sandbox_id, gateway.generation))
            return error.cause
        lasts = max(0.0, answer.expires_at - time.time())
        self._due[gateway.sandbox_id] = now + (min(RETRY_S, lasts / 2) if answer.unavailable else lasts / 2)
        return "; ".join(f"{name}: {why}" for name, why in sorted(answer.unavailable.items()))

    async def revoke(self, gateway: "Gateway") -> None:
        """Ends what a sandbox was granted, if anything was; legs that are open are cut on return. What cannot be told now is told later."""
        self._due.pop(gateway.sandbox_id, None)
        if self._link is None:
            return
        owed = gateway.sandbox_id, gateway.generation
        self._owed.add(owed)
        if self._link.connected:
            await self._tell_owed(owed)

    def again(self, gateway: "Gateway") -> None:
        """Leases for a sandbox again, in its turn; nobody waits for it."""
        if self._link is not None and self._link.connected and gateway.leases:
            self._lease_again(gateway)

    async def _tell_owed(self, owed: tuple[str, int]) -> None:
        assert self._link is not None
        sandbox_id, generation = owed
        try:
            ref = GrantRef(sandbox_id=sandbox_id, generation=generation)
            await self._link.call("grant.revoke", ref, Empty, within=REVOKE_WITHIN_S)
        except HatchwayError as error:
            log.warning("%s: its credentials are not revoked yet: %s", sandbox_id, error)
        else:
            self._owed.discard(owed)

    async def _up(self) -> None:
        self._listed = False
        for gateway in [one for one in self.gateways() if one.leases]:
            self._lease_again(gateway)
        await self._settle()

    async def _settle(self) -> None:
        """Has the broker hear what it should not have granted any more. What fails is done again."""
        assert self._link is not None
        if not self._listed:
            try:
                granted = await self._link.call("grant.list", Empty(), GrantList, within=LIST_WITHIN_S)
            except HatchwayError as error:
                log.warning("it is not known what the broker has granted: %s", error)
                return
            self._listed = True
            leased = {(one.sandbox_id, one.generation) for one in self.gateways() if one.leases}
            self._owed |= {(one.sandbox_id, one.generation) for one in granted.grants} - leased
        for owed in sorted(self._owed):
            if owed in self._owed and self._link.connected:
                await self._tell_owed(owed)

    async def _renew_forever(self) -> None:
        assert self._link is not None
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            if not self._link.connected:
                continue
            await self._settle()
            if not self._due:
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
