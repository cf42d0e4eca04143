"""Nodes and gateways that do not answer: whoever else has to be told of a policy is told of it all the same."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_fixtures import folder, only_sqlite
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control import policykeeper
from hatchway.control.main import ControlConfig, UnixNode

__all__ = ["folder", "only_sqlite"]

Nodes = tuple[NodeDouble, NodeDouble]


@pytest.fixture
async def nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    """Two; nobody gives up in a test what is not answered."""
    monkeypatch.setattr(policykeeper, "TELL_WITHIN_S", 10 * WITHIN)
    made = NodeDouble(folder / "one.sock", "node-one"), NodeDouble(folder / "two.sock", "node-two", "hardware")
    for one in made:
        await one.start()
    yield made
    for one in made:
        await one.die()


@pytest.fixture
async def service(folder: Path, nodes: Nodes) -> AsyncIterator[Service]:
    """A control plane that is connected to both."""
    one, two = (UnixNode(path=node.path) for node in nodes)
    config = ControlConfig(folder=folder / "control", node_socket=one.path, more_nodes=(two,))
    async with in_process(config) as running:
        await running.ready()
        for node in nodes:
            await node.followed()
        yield running


async def put(service: Service, host: str) -> None:
    document = {"version": 1, "rules": [{"id": "one", "to": {"hosts": [host]}}]}
    answer = await service.http.put("/v1/policies/all", json={"document": document, "tier": "project"})
    assert answer.status_code in (200, 201), answer.text


async def has(node: NodeDouble, sandbox_id: str, host: str) -> None:
    """Waits until a node was told that a sandbox may reach a host."""
    async with asyncio.timeout(WITHIN):
        while not any(host in one.text for one in node.egress[sandbox_id].documents):
            await asyncio.sleep(0.01)


async def placed(service: Service, nodes: Nodes) -> tuple[str, str, str]:
    """Sandboxes: two of the first node, one of the other."""
    mine = [(await service.create(require_isolation="emulated"))["id"] for _ in range(2)]
    other = (await service.create(require_isolation="hardware"))["id"]
    assert (set(nodes[0].boxes), set(nodes[1].boxes)) == (set(mine), {other})
    return mine[0], mine[1], other


async def test_g02_a_slow_node_holds_up_no_other(service: Service, nodes: Nodes) -> None:
    first, second, other = await placed(service, nodes)
    asked, speaks = asyncio.Event(), asyncio.Event()

    async def silent(request: Any) -> None:
        asked.set()
        await speaks.wait()

    nodes[0].hooks["sandbox.egress"] = silent
    await put(service, "a.example")
    await asked.wait()
    await has(nodes[1], other, "a.example")
    await put(service, "b.example")
    await has(nodes[1], other, "b.example")
    speaks.set()
    for one in (first, second):
        await has(nodes[0], one, "b.example")


async def test_g02_a_stuck_gateway_holds_up_no_other_of_its_node(service: Service, nodes: Nodes) -> None:
    first, second, _ = await placed(service, nodes)
    asked, speaks = asyncio.Event(), asyncio.Event()

    async def silent(request: Any) -> None:
        if request.sandbox_id == first:
            asked.set()
            await speaks.wait()

    nodes[0].hooks["sandbox.egress"] = silent
    for host in ("a.example", "b.example", "c.example"):
        await put(service, host)
        await has(nodes[0], second, host)
        await asked.wait()
        shown = await service.get(second)
        async with asyncio.timeout(WITHIN):
            while shown["policy"]["applied_revision"] != shown["policy"]["revision"]:
                shown = await service.get(second)
    speaks.set()
    await has(nodes[0], first, "c.example")


async def test_g02_many_that_are_stuck_leave_turns_for_those_that_are_not(
    service: Service, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not answered is asked for later each time."""
    monkeypatch.setattr(policykeeper, "TELL_WITHIN_S", 0.2)
    monkeypatch.setattr(policykeeper, "AT_ONCE", 2)
    mine = sorted([(await service.create(require_isolation="emulated"))["id"] for _ in range(6)])
    stuck, fine = mine[:-1], mine[-1]
    times: dict[str, int] = {}

    async def silent(request: Any) -> None:
        times[request.sandbox_id] = times.get(request.sandbox_id, 0) + 1
        if request.sandbox_id in stuck:
            await asyncio.Event().wait()

    nodes[0].hooks["sandbox.egress"] = silent
    await put(service, "a.example")
    await has(nodes[0], fine, "a.example")
    async with asyncio.timeout(WITHIN):
        while len(times) < len(mine):
            await asyncio.sleep(0.01)
    await put(service, "b.example")
    await has(nodes[0], fine, "b.example")
    del nodes[0].hooks["sandbox.egress"]
    for one in stuck:
        await has(nodes[0], one, "b.example")
