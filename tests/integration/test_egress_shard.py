"""A shard as a process: what the node says to it, what it keeps of that, and what is left when it is killed."""

import asyncio
import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

import dns.rcode
import msgspec
import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.egress_shard import REF, Shard, shard

from hatchway.domain.errors import Conflict, NotFound, Unprocessable
from hatchway.wire import egress
from hatchway.wire.message import Empty

__all__ = ["ground", "shard"]

TCP = {"protocol": "tcp", "ports": [5432]}


async def test_g01_a_killed_shard_lets_nothing_pass_and_what_waited_is_served_by_the_next(shard: Shard, ground: Ground):
    """The launcher keeps the listeners (here: the test): connections made meanwhile wait in the kernel."""
    site = await ground.internet.site("db.example", port=5432)
    kept = ground.slot.listeners()
    wanted = spec(rule("db", "db.example", **TCP))
    assert isinstance(await shard.bring(kept), egress.ListenersTaken)
    opened = await shard.open(await shard.connect(), wanted)
    address = await ground.resolve("db.example")
    reader, writer = await ground.connect(address, 5432)
    writer.write(b"before")
    async with asyncio.timeout(20):
        assert await reader.readexactly(6) == b"before"

    await shard.process.kill()
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    waiting = [await ground.connect(address, 5432) for _ in range(3)]
    for number, (_, one) in enumerate(waiting):
        one.write(b"wait%d" % number)
    evil, evil_writer = await ground.connect("93.184.216.34", 443)
    asked = asyncio.ensure_future(ground.ask("db.example"))
    assert site.arrived == b"before"

    await shard.process.start()
    await shard.bring(kept)
    again = await shard.open(await shard.connect(), wanted, ca_key=opened.ca_key)
    assert again.ca_key == opened.ca_key
    async with asyncio.timeout(20):
        for number, (one, _) in enumerate(waiting):
            assert await one.readexactly(5) == b"wait%d" % number
        assert (await asked).answer[0][0].address == address
    evil_writer.write(b"x")
    assert await is_reset(evil, evil_writer)
    for _, one in waiting:
        one.close()
    for sock in kept:
        sock.close()


async def test_g08_a_flood_of_denials_is_a_few_records_with_exact_counts(shard: Shard, ground: Ground):
    await shard.bring(ground.slot.listeners())
    connection = await shard.connect()
    await shard.open(connection, spec(rule("db", "db.example", **TCP)))
    for _ in range(40):
        assert (await ground.ask("evil.example")).rcode() == dns.rcode.REFUSED
    await ground.resolve("db.example")
    status = await connection.call("gateway.status", REF, egress.GatewayStatus, within=20)
    assert status.denied_by == {"no_rule": 40}
    assert await shard.process.end() == 0, "at its end it hands over what it counted"
    found = [one for one in await shard.records() if one.get("kind") == "egress.dns"]
    assert len(found) == 2
    assert sum(one["count"] for one in found) == 40
    assert found[0]["data"]["name"] == "evil.example"


async def test_what_is_opened_is_told_and_can_be_closed_again(shard: Shard, ground: Ground):
    connection = await shard.connect()
    with pytest.raises(Conflict, match="no_listeners"):
        await shard.open(connection, spec())
    await shard.bring(ground.slot.listeners())
    opened = await shard.open(connection, spec(rule("db", "db.example", **TCP)))
    assert opened.revision == 1
    assert (await shard.open(connection, spec(rule("db", "db.example", **TCP)))).ca_key == opened.ca_key
    listed = await connection.call("gateway.list", Empty(), egress.GatewayList, within=20)
    assert listed.gateways == (REF,)
    with pytest.raises(Conflict, match="stale_generation"):
        await shard.open(connection, spec(), generation=0)
    newer = egress.GatewayRef(sandbox_id=REF.sandbox_id, generation=2)
    with pytest.raises(NotFound, match="unknown_gateway"):
        await connection.call("gateway.status", newer, egress.GatewayStatus, within=20)
    bad = egress.EgressSpec(
        revision=9, documents=(egress.PolicyDocument(tier="project", name="x", version=1, text="{"),)
    )
    change = egress.GatewayPolicy(sandbox_id=REF.sandbox_id, generation=1, egress=bad)
    with pytest.raises(Unprocessable, match="invalid_policy"):
        await connection.call("gateway.policy", change, egress.GatewayOpened, within=20)
    assert (await ground.ask("db.example")).rcode() == dns.rcode.NOERROR
    for _ in range(2):
        await connection.call("gateway.close", REF, Empty, within=20)
    assert (await connection.call("gateway.list", Empty(), egress.GatewayList, within=20)).gateways == ()


async def test_an_ask_is_an_event_of_the_node_and_its_answer_lets_the_connection_go_on(shard: Shard, ground: Ground):
    await ground.internet.site("db.example", port=5432)
    await shard.bring(ground.slot.listeners())
    connection = await shard.connect()
    await shard.open(connection, spec(rule("db", "db.example", action="ask", **TCP)))
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"hello")
    await ground.until(lambda: shard.events == ["gateway.asked"])
    later = await shard.connect()
    (asked,) = (await later.call("gateway.asks", Empty(), egress.AskList, within=20)).asks
    answer = egress.AskAnswer(ask_id=asked.ask_id, sandbox_id=asked.sandbox_id, generation=1, allow=True)
    await later.call("gateway.answer", answer, Empty, within=20)
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"hello"
    await later.call("gateway.answer", answer, Empty, within=20)
    writer.close()


async def test_descriptors_that_are_no_listeners_are_refused(shard: Shard, ground: Ground):
    tcp, udp, dns_tcp = ground.slot.listeners()
    for given in ([], [tcp, udp], [tcp, udp, dns_tcp, tcp], [udp, tcp, dns_tcp], [tcp, udp, socket.socket()]):
        assert isinstance(await shard.bring(given), egress.ListenersRefused)
    assert isinstance(await shard.bring([tcp, udp, dns_tcp], data=b"{"), egress.ListenersRefused)
    assert isinstance(await shard.bring([tcp, udp, dns_tcp]), egress.ListenersTaken)
    for sock in (tcp, udp, dns_tcp):
        sock.close()


async def test_n30_only_the_node_is_served(ground: Ground, tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    shard = Shard(ground, folder, uid=64_999)
    try:
        await shard.process.start()
        connection = await shard.connect()
        async with asyncio.timeout(20):
            await connection.closed.wait()
        with pytest.raises((OSError, msgspec.DecodeError)):
            await shard.bring(ground.slot.listeners())
    finally:
        await shard.close()


async def test_g11_a_broken_peer_of_the_node_socket_ends_nothing(shard: Shard, ground: Ground):
    for rubbish in (b"", b"\xff\xff\xff\xff", struct.pack(">I", 5) + b"abcde"):
        _, writer = await asyncio.open_unix_connection(str(shard.run / egress.SOCKET.format(shard=0)))
        writer.write(rubbish)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await shard.bring(ground.slot.listeners())
    await shard.open(await shard.connect(), spec(rule("db", "db.example", **TCP)))
    assert ipaddress.ip_address(await ground.resolve("db.example"))


async def test_t21_nobody_of_its_user_reads_the_keys_out_of_its_memory(shard: Shard):
    """Not dumpable: its files in /proc are root's, whoever runs it, and no core is written."""
    limits = (Path("/proc") / str(shard.process.pid) / "limits").read_text()
    assert [line.split()[4] for line in limits.splitlines() if line.startswith("Max core file size")] == ["0"]
    program = "import ctypes,os,sys; sys.exit(ctypes.CDLL(None).ptrace(16, int(sys.argv[1]), 0, 0) != -1)"
    argv = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", program, str(shard.process.pid))
    attaching = await asyncio.create_subprocess_exec(*argv)
    assert await attaching.wait() == 0
