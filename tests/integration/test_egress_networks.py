"""Rules for networks with all names in them, on a slot's real network: what arrives at the sites behind it is what counts."""

import asyncio
from typing import Any

import dns.rcode
import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.fake_internet import web

__all__ = ["ground"]


def unnamed(ground: Ground, *addresses: str) -> dict[str, Any]:
    """A rule for these addresses, or the whole of the fake internet, with all names in them."""
    cidrs = [f"{address}/32" for address in addresses] or [f"{ground.internet.net}.0/24"]
    return {"id": "open", "to": {"cidrs": cidrs, "by_name": True}, "ports": [80, 443, 5432], "protocol": "tcp", "resolve": {"private": "allow"}}  # fmt: skip


async def test_a_name_that_no_rule_is_about_is_reached_end_to_end(ground: Ground):
    site = await ground.internet.site("any.example", port=5432)
    ground.open(spec(unnamed(ground)))
    reader, writer = await ground.connect("any.example", 5432)
    writer.write(b"hello")
    writer.write_eof()
    async with asyncio.timeout(20):
        assert await reader.read() == b"hello"
    assert site.arrived == b"hello"
    writer.close()
    await ground.until(lambda: ground.records.of("egress.connection_ended"))
    (ended,) = ground.records.of("egress.connection_ended")
    assert (ended.data["host"], ended.data["upstream"]) == ("any.example", site.address)


async def test_a_name_that_is_elsewhere_gets_nothing(ground: Ground):
    there = await ground.internet.site("there.example", port=5432)
    elsewhere = await ground.internet.site("elsewhere.example", port=5432, number=11)
    ground.open(spec(unnamed(ground, there.address)))
    reader, writer = await ground.connect("elsewhere.example", 5432)
    writer.write(b"secret")
    assert await is_reset(reader, writer)
    assert not elsewhere.connections
    (failed,) = ground.records.of("egress.connection_failed")
    assert failed.reason == "address_denied"


async def test_a_question_alone_goes_nowhere(ground: Ground):
    ground.open(spec(unnamed(ground)))
    assert (await ground.ask("c2VjcmV0.evil.example", server="8.8.8.8")).rcode() == dns.rcode.NOERROR
    assert ground.internet.names.asked == []


async def test_names_that_no_rule_is_about_have_a_bound_of_their_own(ground: Ground):
    gateway = ground.open(
        spec(
            unnamed(ground),
            rule("wild", "**.wild.example", protocol="tcp", ports=[5432]),
            dns={"wildcard_names_per_min": 1},
        )
    )
    for number in range(10):
        assert (await ground.ask(f"n{number}.example")).rcode() == dns.rcode.NOERROR
    assert (await ground.ask("n10.example")).rcode() == dns.rcode.REFUSED
    assert (await ground.ask("n0.example")).rcode() == dns.rcode.NOERROR
    assert (await ground.ask("a.wild.example")).rcode() == dns.rcode.NOERROR
    assert (await ground.ask("b.wild.example")).rcode() == dns.rcode.REFUSED
    assert gateway.covers("a.wild.example")
    assert not gateway.covers("n0.example")


@pytest.mark.parametrize("how", ["network", "denied"])
async def test_a_connection_to_an_address_that_may_not_be_dialled_any_more_is_cut(ground: Ground, how: str):
    site = await ground.internet.site("any.example", port=5432)
    other = await ground.internet.site("other.example", port=5432, number=11)
    gateway = ground.open(spec(unnamed(ground)))
    streams = []
    for name in ("any.example", "other.example"):
        reader, writer = await ground.connect(name, 5432)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        streams.append((reader, writer))
    deny = {"id": "no", "to": {"cidrs": [f"{site.address}/32"]}, "action": "deny"}
    rules = [unnamed(ground, other.address)] if how == "network" else [unnamed(ground), deny]
    gateway.change(spec(*rules, revision=2), ())
    (cut, was), (reader, writer) = streams
    assert await is_reset(cut, was)
    writer.write(b"again")
    assert await reader.readexactly(5) == b"again"
    writer.close()


async def test_a_kept_connection_of_http_is_not_used_for_an_address_that_may_not_be_dialled_any_more(ground: Ground):
    site = await ground.internet.site("x.example", port=80, handler=web)
    ok: dict[str, Any] = {"tls": {"mode": "none"}, "http": {"allow": [{"paths": ["/**"]}]}}
    gateway = ground.open(spec(rule("x", "x.example", **ok)))
    reader, writer = await ground.connect("x.example", 80)
    request = b"GET /one HTTP/1.1\r\nHost: x.example\r\n\r\n"
    writer.write(request)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await reader.readexactly(len(f"hello from {site.address}"))
    elsewhere = rule("x", "x.example", **ok)
    elsewhere["resolve"]["within"] = ["93.184.216.0/24"]
    gateway.change(spec(elsewhere, revision=2), ())
    writer.write(request.replace(b"/one", b"/two"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 403")
    writer.close()
    assert b"/two" not in site.arrived
