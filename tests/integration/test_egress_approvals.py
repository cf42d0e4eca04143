"""A question on its whole way: a guest's connection, held by a real shard, through the node's gateways to the control plane, and the answer back.

The oracle is what arrived at the server. The launcher is played, and the node's service between gateways and control plane.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.audit_writer import audit_writer
from tests.support.control_fixtures import folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.egress_shard import Shard, shard
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.node.egress.gateways import Gateways
from hatchway.wire.egress import AskAnswer, Asked
from hatchway.wire.node import Event

__all__ = ["folder", "ground", "node", "shard"]

ASKING = {"protocol": "tcp", "ports": [5432], "action": "ask", "ask": {"scope": "session", "timeout": "60s"}}


class Launcher:
    """Has the listeners of one slot, and gives duplicates as often as it is asked."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.listeners_held = listeners

    async def listeners(self, sandbox_id: str, generation: int) -> list[int]:
        return [os.dup(sock.fileno()) for sock in self.listeners_held]


@pytest.fixture
async def gateways(shard: Shard, ground: Ground, node: NodeDouble) -> AsyncIterator[Gateways]:
    """The node's gateways, whose questions the node double passes on, and the answers back."""
    launcher = Launcher(ground.slot.listeners())
    made = Gateways(shard.run, 1, launcher)  # type: ignore[arg-type]  # what it asks of a launcher is there

    def asked(one: Asked) -> None:
        node.asks[one.ask_id] = one
        node.tell(Event(asked=one))

    async def answer(request: AskAnswer) -> None:
        await made.answer(request)

    made.on_asked = asked
    made.on_ask_ended = lambda ended: node.tell(Event(ask_ended=ended))
    node.hooks["egress.answer"] = answer
    made.start()
    try:
        yield made
    finally:
        await made.close()
        for sock in launcher.listeners_held:
            sock.close()


@pytest.fixture
async def service(folder: Path, node: NodeDouble) -> AsyncIterator[Service]:
    with audit_writer(folder) as writer:
        config = ControlConfig(folder=folder / "control", node_socket=node.path, audit_socket=writer.path)
        async with in_process(config) as running:
            await running.ready()
            await node.followed()
            yield running


async def pending(service: Service) -> dict[str, Any]:
    """The one question that waits, as soon as there is one."""
    async with asyncio.timeout(WITHIN):
        while True:
            found = (await service.http.get("/v1/approvals", params={"state": "pending"})).json()["approvals"]
            if found:
                (one,) = found
                return dict(one)
            await asyncio.sleep(0.02)


async def test_a_held_connection_reaches_its_server_when_it_is_allowed_and_never_when_it_is_denied(
    gateways: Gateways, ground: Ground, service: Service, folder: Path
) -> None:
    site = await ground.internet.site("db.example", port=5432)
    sandbox = (await service.create())["id"]
    gateway = gateways.of(sandbox, "default", 1, folder / "sandbox")
    gateway.say(spec(rule("db", "db.example", **ASKING)))
    async with asyncio.timeout(WITHIN):
        while not gateway.served:
            await gateway.open()
            await asyncio.sleep(0.05)

    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"first")
    asked = await pending(service)
    assert (asked["sandbox_id"], asked["request"]["host"], asked["request"]["port"]) == (sandbox, "db.example", 5432)
    assert asked["request"]["rule"]
    assert not site.connections, "nothing leaves before somebody has decided"
    answer = await service.http.post(f"/v1/approvals/{asked['id']}/answer", json={"decision": "deny"})
    assert answer.json()["approval"]["delivered"], answer.text
    assert await is_reset(reader, writer)
    assert not site.connections

    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"second")
    asked = await pending(service)
    assert not site.connections
    body = {"decision": "allow", "scope": "session"}
    assert (await service.http.post(f"/v1/approvals/{asked['id']}/answer", json=body)).status_code == 200
    async with asyncio.timeout(WITHIN):
        assert await reader.readexactly(6) == b"second"
    writer.close()
    assert site.connections == 1

    # The same key asks nobody again until the session ends.
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"third")
    async with asyncio.timeout(WITHIN):
        assert await reader.readexactly(5) == b"third"
    writer.close()
    recorded = (await service.http.get("/v1/audit", params={"kind": "approval.", "limit": 100})).json()["records"]
    assert [(one["kind"], one["decision"]) for one in recorded] == [
        ("approval.asked", "asked"),
        ("approval.answered", "denied"),
        ("approval.asked", "asked"),
        ("approval.answered", "allowed"),
    ]


async def test_a_client_that_gives_up_ends_the_question(
    gateways: Gateways, ground: Ground, service: Service, folder: Path
) -> None:
    site = await ground.internet.site("db.example", port=5432)
    sandbox = (await service.create())["id"]
    gateway = gateways.of(sandbox, "default", 1, folder / "sandbox")
    gateway.say(spec(rule("db", "db.example", **ASKING)))
    async with asyncio.timeout(WITHIN):
        while not gateway.served:
            await gateway.open()
            await asyncio.sleep(0.05)
    _, writer = await ground.connect("db.example", 5432)
    asked = await pending(service)
    writer.transport.abort()
    async with asyncio.timeout(WITHIN):
        while True:
            shown = (await service.http.get(f"/v1/approvals/{asked['id']}")).json()["approval"]
            if shown["state"] == "ended":
                break
            await asyncio.sleep(0.02)
    assert shown["why"] == "client_gone"
    answer = await service.http.post(f"/v1/approvals/{asked['id']}/answer", json={"decision": "allow"})
    assert answer.json()["code"] == "approval_over"
    assert not site.connections
