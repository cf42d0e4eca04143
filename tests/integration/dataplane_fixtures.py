"""Fixtures of the data plane's tests: the guest agent built for the host, and planes around it."""

import fcntl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
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


@pytest.fixture
async def opened(tmp_path: Path, agent: Path) -> AsyncIterator[Opener]:
    """Makes planes with settings of their own."""
    planes: list[Plane] = []

    async def make(**settings: object) -> Plane:
        folder = tmp_path / f"plane{len(planes)}"
        folder.mkdir(exist_ok=True)
        plane = Plane(folder, agent, **settings)
        planes.append(plane)
        plane.start_agent()
        await plane.start_node()
        return plane

    yield make
    for plane in planes:
        await plane.stop()


@pytest.fixture
async def plane(opened: Opener) -> Plane:
    return await opened()
