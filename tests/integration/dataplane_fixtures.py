"""Fixtures of the data plane's tests: the guest agent built for the host, and planes around it."""

import contextlib
import fcntl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from dataplane_harness import Plane

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guest agent, built to run on the host; once for all test workers."""
    out = tmp_path_factory.getbasetemp().parent / "agent-for-dataplane"
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(
            ["make", "-C", ROOT / "guest", "host", f"OUT={out}"], check=True, capture_output=True, timeout=300
        )
    return out / "hatchway-agent-host"


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
