"""Flows of a sandbox through its gateway, on a slot's real network: what arrives at the sites behind it is what counts."""

import asyncio

import dns.rcode
import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec

__all__ = ["ground"]

TCP = {"protocol": "tcp", "ports": [5432]}


async def test_a_tcp_rule_carries_octets_both_ways_and_the_end_of_each(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", **TCP)))
    reader, writer = await ground.connect("db.example", 5432)
    sent = bytes(range(256)) * 40_000
    async with asyncio.timeout(20):

        async def send() -> None:
            for at in range(0, len(sent), 100_000):
                writer.write(sent[at : at + 100_000])
                await writer.drain()
            writer.write_eof()

        sending = asyncio.ensure_future(send())
        came = await reader.read()
        await sending
    assert came == sent, "the answer goes on after the client's end"
    assert site.arrived == sent
    writer.close()
    await ground.until(lambda: not ground.gateway.status().flows)
    (ended,) = ground.records.of("egress.connection_ended")
    assert ended.data["bytes_out"] == ended.data["bytes_in"] == len(sent)
    assert ended.data["upstream"] == site.address


async def test_n01_an_address_that_no_name_was_given_is_reset(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", **TCP)))
    for address in ("93.184.216.34", "198.18.77.77"):
        reader, writer = await ground.connect(address, 5432)
        writer.write(b"secret")
        assert await is_reset(reader, writer)
    assert not site.connections
    assert "dst_unbound" in ground.records.denied("egress.connection")


@pytest.mark.parametrize("server", ["10.200.0.1", "8.8.8.8", "1.1.1.1"])
@pytest.mark.parametrize("tcp", [False, True], ids=["udp", "tcp"])
async def test_d05_whatever_name_server_is_asked_the_gateway_answers(ground: Ground, server: str, tcp: bool):
    ground.open(spec(rule("db", "db.example", **TCP)))
    allowed = await ground.ask("db.example", server=server, tcp=tcp)
    assert allowed.answer[0][0].address.startswith("198.1")
    denied = await ground.ask("evil.example", server=server, tcp=tcp)
    assert denied.rcode() == dns.rcode.REFUSED
    assert "blocked by policy" in denied.options[0].text
    assert ground.internet.names.asked == [], "nobody outside was asked"
