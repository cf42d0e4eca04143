"""Fixtures of the control plane's tests: a node double, and a control plane that is connected to it."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.control_service import Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: sockets' paths end at 108 octets."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        yield Path(name)


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[NodeDouble]:
    """A node that listens."""
    double = NodeDouble(folder / "node.sock")
    await double.start()
    yield double
    await double.die()


@pytest.fixture
async def service(folder: Path, node: NodeDouble) -> AsyncIterator[Service]:
    """A control plane that is connected to the node."""
    async with in_process(ControlConfig(folder=folder / "control", node_socket=node.path)) as running:
        await running.ready()
        yield running
