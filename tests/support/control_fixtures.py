"""Fixtures of the control plane's tests: a node double, and a control plane that is connected to it."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support import postgres
from tests.support.control_service import Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: sockets' paths end at 108 octets."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        yield Path(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The database of a control plane: a file in its folder (None), or one on a server."""
    if request.param == "sqlite":
        yield None
    else:
        with postgres.database_url() as url:
            yield url


@pytest.fixture
def only_sqlite() -> None:
    """For modules that have nothing to do with the database: import it as `database_url`."""


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[NodeDouble]:
    """A node that listens."""
    double = NodeDouble(folder / "node.sock")
    await double.start()
    yield double
    await double.die()


@pytest.fixture
async def service(folder: Path, node: NodeDouble, database_url: str | None) -> AsyncIterator[Service]:
    """A control plane that is connected to the node."""
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    async with in_process(config) as running:
        await running.ready()
        await node.followed()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing() -> AsyncIterator[Service]:
    """A control plane and its node for all tests of a module, which leave them as they found them; on SQLite."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        double = NodeDouble(folder / "node.sock")
        await double.start()
        try:
            async with in_process(ControlConfig(folder=folder / "control", node_socket=double.path)) as running:
                await running.ready()
                await double.followed()
                yield running
        finally:
            await double.die()
