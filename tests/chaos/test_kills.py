"""Sixty processes killed at random instants of a walk."""

import asyncio

from tests.support.chaos_fixtures import api, world
from tests.support.played_world import ROLES, PlayedWorld

from hatchway.chaos.api import Api
from hatchway.chaos.kills import storm
from hatchway.chaos.walk import Walk

__all__ = ["api", "world"]

KILLS = 60


async def test_sixty_processes_die_and_nothing_is_lost(world: PlayedWorld, api: Api) -> None:
    walk = Walk(api, world, 11, tolerant=True)
    tolls = await storm(walk, world, ROLES, KILLS)
    await walk.end()
    assert sum(toll.kills for toll in tolls) == KILLS
    assert all(toll.kills and toll.steps for toll in tolls)
    async with asyncio.timeout(60):
        while world.restarts < KILLS:
            await asyncio.sleep(0.01)
