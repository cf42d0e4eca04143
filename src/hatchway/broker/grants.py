"""What sandboxes may use now: by generation, each for a short time, and nothing that the node did not say since this process began."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from hatchway.broker import checking
from hatchway.broker.checking import Bound
from hatchway.broker.sources import Sources
from hatchway.domain.errors import Conflict, Exhausted, HatchwayError, Unprocessable
from hatchway.wire.broker import MAX_LEASE_S, Grant, Granted, Leg

MAX_GRANTS = 50_000
MAX_BINDINGS = 2048
MIN_LEASE_S = 5.0
LOOK_WITHIN_S = 5.0
"""So long a grant waits for its secrets, which is less than the node waits for its answer; one that comes later is had when it is used."""
MAX_REMEMBERED = 100_000
"""Sandboxes whose last generation is known after their grant was revoked."""


class Cuttable(Protocol):
    """A leg that is open."""

    @property
    def head(self) -> Leg:
        """What it is for."""
        ...

    @property
    def bound(self) -> Bound:
        """What it rested on when it was opened."""
        ...

    @property
    def ended(self) -> asyncio.Event:
        """Set when both its connections are closed."""
        ...

    def cut(self, why: str) -> None:
        """Closes both its connections at once."""
        ...


class _Held:
    """A grant in force."""

    def __init__(self, grant: Grant, bounds: dict[Bound, tuple[float, float]]) -> None:
        self.grant = grant
        self.bounds = bounds
        """Each binding with its end, by the wall clock and by the monotonic one: whichever comes first."""


class Grants:
    """The grants of all sandboxes, and the legs that rest on them."""

    def __init__(
        self,
        sources: Sources,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._now = now
        self._monotonic = monotonic
        self._held: dict[str, _Held] = {}
        self._legs: dict[str, set[Cuttable]] = {}
        self._newest: dict[str, int] = {}

    async def put(self, grant: Grant) -> Granted:
        """Replaces what a sandbox may use, and cuts the legs that it may not have any more.

        Raises `Conflict("stale_generation")`, `Exhausted("too_many_grants")`, and what `checking.read` raises.
        """
        if grant.generation < self._newest.get(grant.sandbox_id, 0):
            raise Conflict(
                "stale_generation", f"A later generation of {grant.sandbox_id} has a grant.", "Nothing is to be done."
            )
        if grant.sandbox_id not in self._held and len(self._held) >= MAX_GRANTS:
            raise Exhausted(
                "too_many_grants", f"{MAX_GRANTS} sandboxes have grants.", "Delete sandboxes.", limit=MAX_GRANTS
            )
        if len(grant.bindings) > MAX_BINDINGS:
            raise Unprocessable(
                "credential_binding",
                f"A sandbox has at most {MAX_BINDINGS} bindings.",
                "Use fewer rules with credentials.",
            )
        now, monotonic = self._now(), self._monotonic()
        bounds: dict[Bound, tuple[float, float]] = {}
        for binding in grant.bindings:
            lease = max(MIN_LEASE_S, min(binding.lease_s, MAX_LEASE_S))
            bounds[checking.read(binding)] = now + lease, monotonic + lease
        self._remember(grant.sandbox_id, grant.generation)
        if bounds:
            self._held[grant.sandbox_id] = _Held(grant, bounds)
        else:  # nothing is granted, and nothing has to be remembered
            self._held.pop(grant.sandbox_id, None)
        await self._cut(self._not_allowed(grant.sandbox_id), "the grant changed")
        unavailable = await self._unavailable(grant)
        expires_at = min((end for end, _ in bounds.values()), default=now + MAX_LEASE_S)
        return Granted(expires_at=expires_at, unavailable=unavailable)

    async def revoke(self, sandbox_id: str, generation: int) -> Grant | None:
        """Ends a grant and cuts its legs, which are closed when this returns. Returns the grant, if there was one."""
        held = self._held.get(sandbox_id)
        if generation:
            self._remember(sandbox_id, generation)
        if held is not None and generation in (0, held.grant.generation):
            del self._held[sandbox_id]
        else:
            held = None
        legs = [one for one in self._legs.get(sandbox_id, ()) if generation in (0, one.head.generation)]
        await self._cut(legs, "revoked")
        self.tidy()
        return None if held is None else held.grant

    def all(self) -> list[Grant]:
        """Every grant that somebody may use now, or could until it is looked at the next time."""
        return [held.grant for held in self._held.values()]

    def find(self, leg: Leg) -> Bound | None:
        """The binding that a leg rests on now; None when there is no grant, or its time is over. Raises `checking.NotBound`."""
        held = self._held.get(leg.sandbox_id)
        if held is None or (held.grant.project, held.grant.generation) != (leg.project, leg.generation):
            return None
        alive = [bound for bound, ends in held.bounds.items() if self._alive(ends)]
        if not alive and held.bounds:
            return None
        return checking.find(alive, leg)

    def opened(self, leg: Cuttable) -> None:
        """A leg is there from now on."""
        self._legs.setdefault(leg.head.sandbox_id, set()).add(leg)

    def closed(self, leg: Cuttable) -> None:
        """A leg is there no more."""
        legs = self._legs.get(leg.head.sandbox_id)
        if legs is not None:
            legs.discard(leg)
            if not legs:
                del self._legs[leg.head.sandbox_id]

    def legs_of(self, sandbox_id: str) -> int:
        """How many legs a sandbox has."""
        return len(self._legs.get(sandbox_id, ()))

    @property
    def legs(self) -> int:
        """How many legs there are."""
        return sum(map(len, self._legs.values()))

    async def source_changed(self, project: str, names: Iterable[str]) -> None:
        """Cuts the legs that use a secret which is gone, or may not go any more where they go."""
        changed = set(names)
        for legs in list(self._legs.values()):
            hit: list[Cuttable] = []
            for leg in legs:
                if leg.head.project == project and leg.bound.binding.source in changed:
                    held = self._sources.current(project, leg.bound.binding.source)
                    if held is None or not held.may_go_to(leg.head.host):
                        hit.append(leg)
            await self._cut(hit, "the credential changed")

    async def expire(self) -> list[Grant]:
        """Ends what nobody renewed, and cuts its legs; returns the grants that ended as a whole. Called now and then."""
        ended: list[Grant] = []
        for sandbox_id, held in list(self._held.items()):
            if held.bounds and not any(map(self._alive, held.bounds.values())):
                del self._held[sandbox_id]
                ended.append(held.grant)
        for sandbox_id in list(self._legs):
            await self._cut(self._not_allowed(sandbox_id), "the lease ended")
        self.tidy()
        return ended

    def tidy(self) -> None:
        """Gives up the secrets that no grant names."""
        used = {(held.grant.project, bound.binding.source) for held in self._held.values() for bound in held.bounds}
        self._sources.keep_only(used)

    def _alive(self, ends: tuple[float, float]) -> bool:
        return self._now() < ends[0] and self._monotonic() < ends[1]

    def _not_allowed(self, sandbox_id: str) -> list[Cuttable]:
        found: list[Cuttable] = []
        for leg in self._legs.get(sandbox_id, ()):
            try:
                bound = self.find(leg.head)
            except checking.NotBound:
                bound = None
            if bound is None or bound.reached != leg.bound.reached or bound.binding.source != leg.bound.binding.source:
                found.append(leg)
        return found

    async def _cut(self, legs: Iterable[Cuttable], why: str) -> None:
        legs = list(legs)
        for leg in legs:
            leg.cut(why)
        for leg in legs:
            await leg.ended.wait()

    async def _unavailable(self, grant: Grant) -> dict[str, str]:
        found: dict[str, str] = {}
        sources = sorted({binding.source for binding in grant.bindings})

        async def look(source: str) -> tuple[str, str]:
            try:
                async with asyncio.timeout(LOOK_WITHIN_S):
                    await self._sources.held(grant.project, source)
            except HatchwayError as error:
                return source, f"{error.cause} {error.remedy}".strip()
            except TimeoutError:
                return source, f"Its source has not answered within {LOOK_WITHIN_S:g} s. It is asked again."
            return source, ""

        for source, error in await asyncio.gather(*map(look, sources)):
            if error:
                found.update({one.credential_id: error for one in grant.bindings if one.source == source})
        return found

    def _remember(self, sandbox_id: str, generation: int) -> None:
        newest = max(generation, self._newest.pop(sandbox_id, 0))
        self._newest[sandbox_id] = newest
        while len(self._newest) > MAX_REMEMBERED:
            oldest = next(iter(self._newest))
            del self._newest[oldest]
