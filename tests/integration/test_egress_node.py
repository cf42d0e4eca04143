"""The node and a shard, each as it is: what the one says and what the other then lets pass. The launcher is played: it holds the listeners of a slot."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import dns.rcode
import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.egress_shard import Shard, shard

from hatchway.node.egress.gateways import Gateways

__all__ = ["ground", "shard"]

TCP = {"protocol": "tcp", "ports": [5432]}


class Launcher:
    """Has the listeners of one slot, and gives duplicates as often as it is asked."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.listeners_held = listeners

    async def listeners(self, sandbox_id: str, generation: int) -> list[int]:
        return [os.dup(sock.fileno()) for sock in self.listeners_held]


@pytest.fixture
async def gateways(shard: Shard, ground: Ground) -> AsyncIterator[Gateways]:
    launcher = Launcher(ground.slot.listeners())
    made = Gateways(shard.run, 1, launcher)  # type: ignore[arg-type]  # what it asks of a launcher is there
    made.start()
    try:
        yield made
    finally:
        await made.close()
        for sock in launcher.listeners_held:
            sock.close()


async def _opened(gateways: Gateways, folder: Path, *rules):
    gateway = gateways.of("sandbox0000000000001", "p1", 1, folder)
    gateway.say(spec(*rules))
    async with asyncio.timeout(20):
        while True:
            trust = await gateway.open()
            if gateway.served:
                return gateway, trust
            await asyncio.sleep(0.05)  # the link to the shard is on its way


async def test_g01_a_shard_that_is_killed_is_told_everything_again_and_serves_what_waited(
    gateways: Gateways, shard: Shard, ground: Ground, tmp_path: Path
):
    site = await ground.internet.site("db.example", port=5432)
    gateway, trust = await _opened(gateways, tmp_path / "sandbox", rule("db", "db.example", **TCP))
    assert trust.certificate.startswith("-----BEGIN CERTIFICATE")
    address = await ground.resolve("db.example")
    await shard.process.kill()
    await ground.until(lambda: not gateway.served)
    reader, writer = await ground.connect(address, 5432)
    writer.write(b"waited")
    evil, evil_writer = await ground.connect("93.184.216.34", 5432)
    assert not site.connections
    await shard.process.start()
    async with asyncio.timeout(20):
        assert await reader.readexactly(6) == b"waited"
    evil_writer.write(b"x")
    assert await is_reset(evil, evil_writer)
    await ground.until(lambda: gateway.served)
    writer.close()


async def test_a_policy_that_the_node_takes_holds_for_what_is_open(
    gateways: Gateways, shard: Shard, ground: Ground, tmp_path: Path
):
    await ground.internet.site("db.example", port=5432)
    gateway, _ = await _opened(gateways, tmp_path / "sandbox", rule("db", "db.example", **TCP))
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"hello")
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"hello"
    await gateway.take(spec(rule("other", "other.example", **TCP), revision=2))
    assert gateway.state.revision == 2
    assert await is_reset(reader, writer)
    assert (await ground.ask("db.example")).rcode() == dns.rcode.REFUSED


async def test_a_renewed_certificate_reaches_whoever_gives_it_to_the_guest(
    gateways: Gateways, shard: Shard, ground: Ground, tmp_path: Path
):
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 4))
    rules = rule("db", "db.example", **TCP), rule("short", "short.example", expires=ends, **TCP)
    gateway, trust = await _opened(gateways, tmp_path / "sandbox", *rules)
    told = asyncio.Event()
    gateway.on_changed = told.set
    async with asyncio.timeout(30):
        await told.wait()
    assert gateway.trust.certificate != trust.certificate
    assert (await ground.ask("short.example")).rcode() == dns.rcode.REFUSED
