"""Fixtures of the tests of chaos: worlds of played machines, and their API."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.played_world import PlayedWorld, played_world

from hatchway.chaos.api import Api


@pytest.fixture
async def world() -> AsyncIterator[PlayedWorld]:
    """Control plane, node and launcher as processes."""
    # A short path: sockets' paths end at 108 octets.
    async with played_world(Path(tempfile.mkdtemp(prefix="hw-"))) as running:
        yield running


@pytest.fixture
async def api(world: PlayedWorld) -> AsyncIterator[Api]:
    """The API with the development key."""
    found = Api(world.url, (world.folder / "control" / "dev.key").read_text().strip())
    yield found
    await found.close()
