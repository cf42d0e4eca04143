"""Processes killed at random while a walk goes on: nothing is lost by it, and what is shown stays true."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hatchway.chaos.walk import Walk


@dataclass
class Toll:
    """What came of the kills of one role."""

    role: str
    kills: int = 0
    steps: int = 0
    """Steps that were under way then."""
    longest_s: float = 0.0
    """The longest time from a kill, of this role or others with it, to the end of the step that it hit, with all comparisons."""


class Victims(Protocol):
    """The processes that are killed."""

    def settled(self, role: str) -> bool:
        """Whether the role is there, and may be killed again."""

    def kill(self, role: str) -> None:
        """SIGKILL; somebody starts it again."""


async def storm(
    walk: Walk, victims: Victims, roles: Sequence[str], kills: int, told: Callable[[str], None] = lambda _: None
) -> list[Toll]:
    """Walks until so many processes were killed, each at a random instant of a step. Raises `Divergence`."""
    tolls = {role: Toll(role) for role in roles}
    usual_s, done = 0.3, 0
    while done < kills:
        told(f"kill {done + 1} of {kills}")
        began = time.monotonic()
        step = asyncio.ensure_future(walk.step())
        try:
            settled, hit = [role for role in roles if victims.settled(role)], []
            # More often one than several at once.
            for role in walk.chance.sample(
                settled, min(len(settled), kills - done, walk.chance.choice((1, 1, 1, 2, 3)))
            ):
                await asyncio.wait({step}, timeout=walk.chance.random() * usual_s)
                tolls[role].kills += 1
                tolls[role].steps += not step.done()
                walk.note(f"  {role} is killed")
                victims.kill(role)
                hit.append(role)
                done += 1
            killed = time.monotonic()
            await step
        finally:
            step.cancel()
        for role in hit:
            tolls[role].longest_s = max(tolls[role].longest_s, time.monotonic() - killed)
        usual_s = 0.9 * usual_s + 0.1 * min(time.monotonic() - began, 2.0)
    return list(tolls.values())


def show(tolls: Sequence[Toll], walk: Walk, *, as_json: bool) -> None:
    """Prints one line for each role, and one for the walk."""
    steps, failures = sum(walk.steps.values()), dict(walk.failures)
    if as_json:
        for toll in tolls:
            print(json.dumps({"chaos": "kills", **vars(toll), "longest_s": round(toll.longest_s, 2)}), flush=True)
        print(json.dumps({"chaos": "walk", "steps": steps, "failures": failures, "divergences": 0}), flush=True)
        return
    print(f"{'role':10} {'kills':>6} {'in a step':>10} {'longest s':>10}")
    for toll in tolls:
        print(f"{toll.role:10} {toll.kills:6} {toll.steps:10} {toll.longest_s:10.2f}")
    told = ", ".join(f"{code} {count}" for code, count in failures.items()) or "none"
    print(f"{steps} steps compared, no divergence; operations that failed and said so: {told}")
