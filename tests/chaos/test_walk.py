"""Two thousand random steps against the real control plane and the real core of a node; every one is compared with the model."""

import pytest
from tests.support.chaos_fixtures import api, world
from tests.support.played_world import PlayedWorld

from hatchway.chaos.api import Api
from hatchway.chaos.walk import WEIGHTS, Walk

__all__ = ["api", "world"]

STEPS = 500


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_what_is_shown_is_what_came_of_every_verb(world: PlayedWorld, api: Api, seed: int) -> None:
    walk = Walk(api, world, seed)
    await walk.run(STEPS)
    await walk.end()
    assert set(walk.steps) == set(WEIGHTS), "a kind of step was never taken"
    assert not walk.failures
    assert world.restarts == 0
