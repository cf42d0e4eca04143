"""Fixtures of the data plane's tests: the guest agent built for the host, and planes around it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from dataplane_harness import Plane
from tests.support.native import built


@pytest.fixture(scope="session")
def agent() -> Path:
    """The guest agent, built to run on the host."""
    return built("guest", "host") / "hatchway-agent-host"


Opener = Callable[..., Awaitable[Plane]]


@contextlib.asynccontextmanager
async def opening(folder: Path, agent: Path) -> AsyncIterator[Opener]:
    """What makes planes in a folder, and ends them."""
    planes: list[Plane] = []

    async def make(**settings: object) -> Plane:
        own = folder / f"plane{len(planes)}"
        own.mkdir(exist_ok=True)
        plane = Plane(own, agent, **settings)
        planes.append(plane)
        plane.start_agent()
        await plane.start_node()
        return plane

    try:
        yield make
    finally:
        for plane in planes:
            await plane.stop()


@pytest.fixture
async def opened(tmp_path: Path, agent: Path) -> AsyncIterator[Opener]:
    """Makes planes with settings of their own."""
    async with opening(tmp_path, agent) as make:
        yield make


@pytest.fixture
async def plane(opened: Opener) -> Plane:
    """A plane of the test's own."""
    return await opened()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_opened(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> AsyncIterator[Opener]:
    """Makes planes that live as long as the module's tests run (in one event loop)."""
    async with opening(tmp_path_factory.mktemp("planes"), agent) as make:
        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_plane(module_opened: Opener) -> Plane:
    """A plane that the module's tests share, and leave as they found it."""
    return await module_opened()


@pytest_asyncio.fixture(loop_scope="module")
async def own_opened(tmp_path: Path, agent: Path) -> AsyncIterator[Opener]:
    """Like `opened`, for tests that run in their module's event loop."""
    async with opening(tmp_path, agent) as make:
        yield make


@pytest_asyncio.fixture(loop_scope="module")
async def own_plane(own_opened: Opener) -> Plane:
    """A plane of the test's own beside that of its module: for what changes it, ends it, or measures it."""
    return await own_opened()
