"""A suspended sandbox goes on at another node that shares the store, when its own is away; and only then."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.control_fixtures import database_url, folder
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control import engine
from hatchway.control.main import ControlConfig, UnixNode
from hatchway.domain.lifecycle import State

__all__ = ["database_url", "folder"]
WAIT = {"prefer": "wait=20"}

Nodes = tuple[NodeDouble, NodeDouble]


@pytest.fixture
async def nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    """Two nodes with one store."""
    monkeypatch.setattr(engine, "MOVE_AFTER_S", 0.1)
    made = (NodeDouble(folder / "one.sock", "node-one"), NodeDouble(folder / "two.sock", "node-two"))
    for one in made:
        one.store = "shared"
        await one.start()
    yield made
    for one in made:
        if one._server is not None and one._server.is_serving():
            await one.die()


@pytest.fixture
async def service(folder: Path, nodes: Nodes, database_url: str | None) -> AsyncIterator[Service]:
    """A control plane that is connected to both."""
    config = ControlConfig(
        folder=folder / "control",
        node_socket=nodes[0].path,
        more_nodes=(UnixNode(path=nodes[1].path),),
        database_url=database_url,
        reconcile_every_s=0.2,
    )
    async with in_process(config) as running:
        await running.ready()
        for one in nodes:
            await one.followed()
        yield running


async def suspended(service: Service) -> str:
    sandbox = await service.create()
    answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/suspend", headers=WAIT)
    assert answer.json()["sandbox"]["state"] == "suspended", answer.text
    return str(sandbox["id"])


async def test_it_goes_on_elsewhere_and_its_old_node_lets_go(service: Service, nodes: Nodes) -> None:
    one, two = nodes
    sandbox = await suspended(service)
    await one.die()
    answer = await service.http.post(f"/v1/sandboxes/{sandbox}/wake", headers=WAIT)
    shown = answer.json()["sandbox"]
    assert (shown["state"], shown["node"], shown["generation"]) == ("running", "node-two", 2), answer.text
    assert two.calls.count("sandbox.fetch") == 1
    assert one.boxes[sandbox].state == State.SUSPENDED
    # Back again, the other one has nothing to say, and what it kept goes.
    await one.start()
    async with asyncio.timeout(WITHIN):
        while sandbox in one.boxes and one.boxes[sandbox].state != State.DELETED:
            await asyncio.sleep(0.02)
    shown = await service.get(sandbox)
    assert (shown["state"], shown["conditions"]) == ("running", [])


async def test_it_stays_where_it_is_while_its_node_is_there(service: Service, nodes: Nodes) -> None:
    sandbox = await suspended(service)
    answer = await service.http.post(f"/v1/sandboxes/{sandbox}/restore", headers=WAIT)
    assert (answer.json()["sandbox"]["node"], answer.json()["sandbox"]["generation"]) == ("node-one", 1)
    assert "sandbox.fetch" not in nodes[1].calls


async def test_without_the_store_it_waits_for_its_node(service: Service, nodes: Nodes) -> None:
    one, two = nodes
    one.store = ""
    sandbox = await suspended(service)
    await one.die()
    answer = await service.http.post(f"/v1/sandboxes/{sandbox}/restore", headers={"prefer": "wait=1"})
    assert answer.json()["operation"]["status"] in ("pending", "running")
    assert "sandbox.fetch" not in two.calls
    await one.start()
    assert (await service.operation(answer.json()["operation"]["id"]))["status"] == "succeeded"
