"""What a gateway dials where a proxy, the policy or the operator say where a name is: none of them gets past what denies an address."""

import asyncio
import json

from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec

from hatchway.domain.policy.reading import canonical, load
from hatchway.egress.upstream import UpstreamProxy
from hatchway.wire.egress import EgressSpec, PolicyDocument

__all__ = ["ground"]

TCP = {"protocol": "tcp", "ports": [5432]}


async def _connect_proxy(ground: Ground) -> list[bytes]:
    """A proxy of the operator's that connects to whatever it is asked for; what it was asked for."""
    asked: list[bytes] = []

    async def serve(site, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.write(await reader.readexactly(5))

    proxy = await ground.internet.site("proxy.example", port=8443, handler=serve)
    ground.proxies["http:corporate"] = UpstreamProxy(f"http://{proxy.address}:8443")
    return asked


async def test_g20_a_proxy_is_not_asked_for_an_address_that_nobody_judged(ground: Ground):
    asked = await _connect_proxy(ground)
    routed = {"resolve": {"private": "allow"}, "route": {"via": "http:corporate"}, **TCP}
    gateway = ground.open(spec({"id": "net", "to": {"cidrs": ["10.77.0.0/24", "8.8.8.0/24"]}, **routed}))
    reader, writer = await ground.connect("10.77.0.1", 5432)
    writer.write(b"hello")
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"hello"
    writer.close()
    assert asked == [b"CONNECT 10.77.0.1:5432 HTTP/1.1"]
    # A sandbox's own rule reaches no private address that nobody lent it, by way of a proxy either.
    text = canonical(
        load(json.dumps({"version": 1, "rules": [{"id": "net", "to": {"cidrs": ["10.77.0.0/24"]}, **routed}]}))
    )
    own = PolicyDocument(tier="sandbox", name="own", version=2, text=text)
    gateway.change(EgressSpec(revision=2, documents=(own,)), ())
    reader, writer = await ground.connect("10.77.0.1", 5432)
    writer.write(b"hello")
    assert await is_reset(reader, writer)
    assert len(asked) == 1


async def test_g20_a_proxy_gets_the_address_that_the_policy_says_and_that_one_is_judged(ground: Ground):
    asked = await _connect_proxy(ground)
    for said in ({"pin": ["169.254.169.254"]}, {"pin": ["127.0.0.9"]}):
        site = rule("db", "db.example", route={"via": "http:corporate"}, **TCP)
        site["resolve"].update(said)
        gateway = ground.open(spec(site))
        reader, writer = await ground.connect("db.example", 5432)
        writer.write(b"hello")
        assert await is_reset(reader, writer)
        await gateway.close()
    site = rule("db", "db.example", route={"via": "http:corporate"}, **TCP)
    ground.open(spec(site, dns={"records": {"db.example": ["169.254.169.254"]}}))
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"hello")
    assert await is_reset(reader, writer)
    assert asked == []


async def test_n31_what_a_rule_denies_by_its_address_is_denied_where_the_operator_offers_it(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    denied = {"id": "no", "to": {"cidrs": [f"{site.address}/32"]}, "action": "deny"}
    ground.open(spec(rule("db", "db.example", **TCP), denied))
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"hello")
    assert await is_reset(reader, writer)
    assert site.connections == 0
    await ground.until(lambda: ground.records.of("egress.connection_failed"))
    assert ground.records.of("egress.connection_failed")[0].reason == "address_denied"


async def test_g15_a_sandboxs_own_rule_puts_no_other_site_in_the_place_of_the_one_that_a_ceiling_names(ground: Ground):
    """Its own address, its own authority, its own record: none of them is reached under a name that the project admits."""
    evil = await ground.internet.site("evil.example", port=443, tls=True)
    index = '{"hosts": ["index.example"]}'
    ceiling = f'{{"version": 1, "ceiling": true, "private_networks": ["127.0.0.0/8"], "rules": [{{"id": "top", "to": {index}, "resolve": {{"private": "allow"}}}}]}}'
    authority = json.dumps([ground.internet.authority.ca.read_text()])
    for number, said in enumerate(
        (
            f'"rules": [{{"id": "own", "to": {index}, "resolve": {{"private": "allow", "pin": ["{evil.address}"]}}}}]',
            f'"rules": [{{"id": "own", "to": {index}, "resolve": {{"private": "allow"}}, "tls": {{"upstream_ca": {authority}}}}}]',
            f'"dns": {{"records": {{"index.example": ["{evil.address}"]}}}}, "rules": [{{"id": "own", "to": {index}, "resolve": {{"private": "allow"}}}}]',
        )
    ):
        own = f'{{"version": 1, {said}}}'
        documents = tuple(
            PolicyDocument(tier=tier, name=tier, version=1, text=canonical(load(text)))
            for tier, text in (("project", ceiling), ("sandbox", own))
        )
        gateway = ground.open(EgressSpec(revision=1, documents=documents))
        reader, writer = await ground.connect("index.example", 443, server_name="index.example")
        writer.write(b"GET / HTTP/1.1\r\nHost: index.example\r\n\r\n")
        async with asyncio.timeout(20):
            answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        code = b"resolve_failed" if number == 2 else b"beyond_ceiling"
        assert b"x-hatchway-reason: " + code in answer
        await gateway.close()
    assert evil.connections == 0
