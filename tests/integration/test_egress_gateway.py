"""A sandbox's gateway: where it dials and where never, its bounds, its asks, and what a change of policy does to what is open."""

import asyncio
import contextlib
import random
import socket
import ssl
import struct
import time

import dns.rcode
import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.fake_internet import web

from hatchway.domain.errors import Unprocessable
from hatchway.egress.upstream import UpstreamProxy
from hatchway.wire.egress import AskAnswer, EgressSpec, PolicyDocument

__all__ = ["ground"]

TCP = {"protocol": "tcp", "ports": [5432]}
CLEAR = {"ports": [80], "tls": {"mode": "none"}}


async def _get(ground: Ground, host: str, path: str = "/", port: int = 80) -> bytes:
    reader, writer = await ground.connect(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


async def _talk(ground: Ground, host: str, port: int = 5432):
    """An open connection that has carried something."""
    reader, writer = await ground.connect(host, port)
    writer.write(b"hello")
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"hello"
    return reader, writer


# -- where it dials


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "168.63.129.16", "100.100.100.200", "127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"],
)
async def test_n31_n32_a_name_that_leads_to_what_no_policy_can_allow_is_not_dialled(ground: Ground, address: str):
    ground.internet.names.zone["index.example"] = [address]
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    answer = await _get(ground, "index.example")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"address_denied" in answer


async def test_n31_a_private_address_needs_a_rule_that_allows_it(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    denied = rule("index", "index.example", **CLEAR)
    del denied["resolve"]
    ground.open(spec(denied))
    assert b"address_denied" in await _get(ground, "index.example")
    assert not site.connections


async def test_n33_the_addresses_of_this_host_are_no_destination(ground: Ground):
    from hatchway.egress.upstream import own_addresses

    own = {str(address) for address in own_addresses()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with contextlib.suppress(OSError):
            sock.connect(("192.0.2.1", 9))
        here = sock.getsockname()[0]
    assert "127.0.0.1" in own
    assert here in own or here == "0.0.0.0"
    for address in own - {"::1"}:
        ground.internet.names.zone["index.example"] = [address]
        if ":" not in address:
            break
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    assert b"address_denied" in await _get(ground, "index.example")


async def test_n30_nothing_else_than_the_gateway_is_at_its_address(ground: Ground):
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    for port in (80, 7070, 9090, 15001, 15053):
        reader, writer = await ground.connect("10.200.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert await is_reset(reader, writer)


async def test_d06_dns_over_tls_is_a_port_without_a_rule(ground: Ground):
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    reader, writer = await ground.connect("1.1.1.1", 853)
    assert await is_reset(reader, writer)


async def test_d10_an_alias_is_followed_and_what_it_leads_to_is_judged(ground: Ground):
    site = await ground.internet.site("cdn.example", port=80, handler=web)
    names = ground.internet.names
    names.aliases["index.example"] = "cdn.example"
    names.aliases["inside.example"] = "metadata.internal"
    names.zone["metadata.internal"] = ["169.254.169.254"]
    ground.open(spec(rule("index", ["index.example", "inside.example"], **CLEAR)))
    assert b"hello from" in await _get(ground, "index.example")
    answer = await _get(ground, "inside.example")
    assert b"address_denied" in answer
    assert site.connections == 1
    await ground.until(lambda: len(ground.records.of("egress.connection_ended")) == 2)
    assert ground.records.of("egress.connection_ended")[0].data["chain"] == "cdn.example"


async def test_d12_g23_names_are_asked_as_they_are_and_of_the_configured_servers_alone(ground: Ground):
    ground.open(spec(rule("index", ["missing.example", "localhost.example"], **CLEAR)))
    answer = await _get(ground, "missing.example")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"there is no name missing.example" in answer
    assert set(ground.internet.names.asked) == {"missing.example"}, "no search list, no second guess"


async def test_d16_a_name_means_what_it_resolves_to_when_it_is_connected_to(ground: Ground):
    first = await ground.internet.site("db.example", port=5432, number=10)
    second = await ground.internet.site("db.example", port=5432, number=11)
    ground.open(spec(rule("db", "db.example", **TCP)))
    address = await ground.resolve("db.example")
    ground.internet.names.zone["db.example"] = [second.address]
    _, writer = await _talk(ground, address)
    writer.close()
    assert (first.connections, second.connections) == (0, 1)


async def test_d03_a_denied_name_is_asked_of_nobody_even_when_it_is_connected_to(ground: Ground):
    ground.open(spec(rule("db", "db.example", **TCP)))
    assert (await ground.ask("c2VjcmV0.evil.example")).rcode() == dns.rcode.REFUSED
    assert ground.internet.names.asked == []
    assert ground.records.denied("egress.dns") == ["no_rule"]


async def test_d21_new_names_under_a_wildcard_are_few_in_a_minute(ground: Ground):
    ground.open(spec(rule("wild", "*.wild.example", **TCP), dns={"wildcard_names_per_min": 3}))
    codes = [(await ground.ask(f"n{number}.wild.example")).rcode() for number in range(5)]
    assert codes == [dns.rcode.NOERROR] * 3 + [dns.rcode.REFUSED] * 2
    assert (await ground.ask("n0.wild.example")).rcode() == dns.rcode.NOERROR, "a name that has its address keeps it"
    assert ground.internet.names.asked == []


async def test_name_servers_that_do_not_answer_are_told_to_the_client(ground: Ground, monkeypatch):
    monkeypatch.setattr("hatchway.egress.resolver.RESOLVE_WITHIN_S", 0.3)
    ground.internet.names.silent = True
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    answer = await _get(ground, "index.example")
    assert answer.startswith((b"HTTP/1.1 504 ", b"HTTP/1.1 502 "))
    assert b"resolve_failed" in answer


async def test_pins_and_records_stand_instead_of_a_resolver(ground: Ground):
    site = await ground.internet.site("somewhere.example", port=5432)
    pinned = rule("pinned", "pinned.example", **TCP)
    pinned["resolve"]["pin"] = [site.address]
    ground.open(spec(pinned, rule("known", "known.example", **TCP), dns={"records": {"known.example": [site.address]}}))
    for host in ("pinned.example", "known.example"):
        _, writer = await _talk(ground, host)
        writer.close()
    assert ground.internet.names.asked == []
    assert site.connections == 2


async def test_a_rule_for_addresses_lets_that_address_pass_at_its_port(ground: Ground):
    site = await ground.internet.site("x.example", port=5432)
    net = "10.77.0.0/24"
    ground.open(spec({"id": "net", "to": {"cidrs": [net]}, "resolve": {"private": "allow"}, **TCP}))
    reader, writer = await ground.connect("10.77.1.1", 5432)
    assert await is_reset(reader, writer)
    assert ground.records.denied("egress.connection") == ["dst_unbound"]
    assert not site.connections


@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_g20_a_proxy_is_used_where_the_rule_says_so_and_gets_the_name(ground: Ground, kind: str):
    asked: list[bytes] = []

    async def http(site, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.write(await reader.readexactly(5))

    async def socks(site, reader, writer):
        greeting = await reader.readexactly(2)
        await reader.readexactly(greeting[1])
        writer.write(b"\x05\x00")
        assert await reader.readexactly(4) == b"\x05\x01\x00\x03"
        name = await reader.readexactly((await reader.readexactly(1))[0])
        asked.append(name + b":%d" % int.from_bytes(await reader.readexactly(2), "big"))
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        writer.write(await reader.readexactly(5))

    proxy = await ground.internet.site("proxy.example", port=8443, handler=http if kind == "http" else socks)
    ground.proxies[f"{kind}:corporate"] = UpstreamProxy(f"{kind}://{proxy.address}:8443")
    ground.open(spec(rule("db", ["db.example", "other.example"], route={"via": f"{kind}:corporate"}, **TCP)))
    _, writer = await _talk(ground, "db.example")
    writer.close()
    assert asked == [b"CONNECT db.example:5432 HTTP/1.1" if kind == "http" else b"db.example:5432"]
    assert ground.internet.names.asked == []


async def test_g20_a_proxy_that_is_not_configured_lets_nothing_pass(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", route={"via": "http:unknown"}, **TCP)))
    reader, writer = await ground.connect("db.example", 5432)
    assert await is_reset(reader, writer)
    assert not site.connections
    await ground.until(lambda: ground.records.of("egress.connection_failed"))
    assert ground.records.of("egress.connection_failed")[0].reason == "proxy_failed"
    assert ground.records.one_by_one == 3, "policy, connection and its end: what fails again and again is counted"


async def test_n23_urgent_octets_are_not_carried_on(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", **TCP)))
    reader, writer = await _talk(ground, "db.example")
    sock = writer.get_extra_info("socket")
    ground.slot.in_guest(lambda: sock._sock.send(b"!", socket.MSG_OOB))
    writer.write(b"after")
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"after"
    assert site.arrived == b"helloafter"
    writer.close()


async def test_g18_g21_clear_http_to_any_host_is_captured(ground: Ground):
    site = await ground.internet.site("evil.example", port=80, handler=web)
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    reader, writer = await ground.connect(site.address.replace("127.", "45."), 80)
    writer.write(b"GET / HTTP/1.1\r\nHost: index.example\r\n\r\n")
    assert await is_reset(reader, writer)
    assert (await ground.ask("evil.example")).rcode() == dns.rcode.REFUSED
    assert not site.connections


# -- changes of policy


async def test_g03_a_narrowed_policy_cuts_what_is_open_before_it_answers(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    other = await ground.internet.site("other.example", port=5432, number=11)
    gateway = ground.open(spec(rule("db", "db.example", **TCP), rule("other", "other.example", **TCP)))
    reader, writer = await _talk(ground, "db.example")
    kept_reader, kept_writer = await _talk(ground, "other.example")
    gateway.change(spec(rule("other", "other.example", **TCP), revision=2), ())
    writer.write(b"too late")
    assert await is_reset(reader, writer)
    kept_writer.write(b"still")
    async with asyncio.timeout(20):
        assert await kept_reader.readexactly(5) == b"still"
    kept_writer.close()
    assert site.arrived == b"hello"
    assert other.arrived == b"hellostill"
    assert (await ground.ask("db.example")).rcode() == dns.rcode.REFUSED
    reader, writer = await ground.connect(str(gateway.names.address_of("db.example")), 5432)
    writer.write(b"hello")
    assert await is_reset(reader, writer)
    await ground.until(lambda: ground.records.of("egress.connection_ended"))
    assert ground.records.of("egress.connection_ended")[0].reason == "policy_changed"


async def test_g03_a_request_in_flight_is_cut_when_its_rule_goes(ground: Ground):
    held = asyncio.Event()

    async def slow(site, reader, writer):
        await site.note(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        await held.wait()
        writer.write(bytes(96))
        await writer.drain()

    await ground.internet.site("index.example", port=80, handler=slow)
    wide = rule("index", "index.example", http={"allow": [{"paths": ["/a/**", "/b/**"]}]}, **CLEAR)
    narrow = rule("index", "index.example", http={"allow": [{"paths": ["/b/**"]}]}, **CLEAR)
    gateway = ground.open(spec(wide))
    streams = {}
    for path in ("a", "b"):
        reader, writer = await ground.connect("index.example", 80)
        writer.write(f"GET /{path}/x HTTP/1.1\r\nHost: index.example\r\n\r\n".encode())
        async with asyncio.timeout(20):
            await reader.readuntil(b"half")
        streams[path] = reader, writer
    gateway.change(spec(narrow, revision=2), ())
    assert await is_reset(*streams["a"])
    held.set()
    async with asyncio.timeout(20):
        assert await streams["b"][0].readexactly(96) == bytes(96), "that one goes on"
    streams["b"][1].close()


async def test_g03_a_connection_that_was_judged_under_the_old_policy_is_judged_again(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    gateway = ground.open(spec(rule("index", "index.example", **CLEAR)))
    reader, writer = await ground.connect("index.example", 80)
    await ground.until(lambda: gateway.status().flows)
    gateway.change(spec(rule("other", "other.example", **CLEAR), revision=2), ())
    writer.write(b"GET / HTTP/1.1\r\nHost: index.example\r\n\r\n")
    assert await is_reset(reader, writer)
    assert not site.connections


async def test_g02_a_bad_policy_leaves_the_former_one_in_force(ground: Ground):
    await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP)))
    _, kept = await _talk(ground, "db.example")
    for text in ("{", '{"version": 1, "rules": [], "allow_host": "evil.example"}', '{"version": 2}'):
        bad = EgressSpec(revision=2, documents=(PolicyDocument(tier="project", name="test", version=2, text=text),))
        with pytest.raises(Unprocessable, match="invalid_policy"):
            gateway.change(bad, ())
    assert gateway.opened().revision == 1
    told = [(one.decision, one.reason, one.data["revision"]) for one in ground.records.of("egress.policy")]
    assert told == [("", "", 1), *[("failed", "invalid_policy", 2)] * 3]
    _, writer = await _talk(ground, "db.example")
    writer.close()
    kept.close()
    assert (await ground.ask("evil.example")).rcode() == dns.rcode.REFUSED


async def test_an_older_revision_changes_nothing(ground: Ground):
    gateway = ground.open(spec(revision=5))
    assert gateway.change(spec(rule("db", "db.example", **TCP), revision=4), ()).revision == 5
    assert (await ground.ask("db.example")).rcode() == dns.rcode.REFUSED


async def test_no_document_at_all_denies_everything(ground: Ground):
    ground.open(EgressSpec(revision=1))
    assert (await ground.ask("index.example")).rcode() == dns.rcode.REFUSED
    reader, writer = await ground.connect("93.184.216.34", 443)
    assert await is_reset(reader, writer)


async def test_a_rule_that_ends_cuts_what_it_let_pass(ground: Ground):
    await ground.internet.site("db.example", port=5432)
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    gateway = ground.open(spec(rule("db", "db.example", expires=ends, **TCP)))
    reader, writer = await _talk(ground, "db.example")
    gateway.tick()
    assert gateway.status().flows == 1
    ground.ahead = 601
    gateway.tick()
    assert await is_reset(reader, writer)


async def test_g05_suspending_cuts_every_flow_and_what_was_bound_stays(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP)))
    address = await ground.resolve("db.example")
    reader, writer = await _talk(ground, address)
    await gateway.cut()
    assert gateway.status().flows == 0
    assert await is_reset(reader, writer)
    assert site.arrived == b"hello"
    _, writer = await _talk(ground, address)
    writer.close()


async def test_g06_every_gateway_has_an_authority_of_its_own_and_the_same_addresses(ground: Ground):
    first = ground.open(spec(rule("db", "db.example", **TCP)))
    address = await ground.resolve("db.example")
    opened = first.opened()
    await first.close()
    second = ground.open(spec(rule("db", "db.example", **TCP)))
    assert second.opened().ca_key != opened.ca_key
    assert await ground.resolve("db.example") == address
    await second.close()
    third = ground.open(spec(rule("db", "db.example", **TCP)), ca_key=opened.ca_key)
    assert third.opened().ca_key == opened.ca_key
    await third.close()
    with pytest.raises(Unprocessable, match="invalid_ca_key"):
        ground.open(spec(), ca_key=b"no key")


# -- asks


async def _asked(ground: Ground):
    await ground.until(lambda: any(event == "gateway.asked" for event, _ in ground.events))
    return next(params for event, params in ground.events if event == "gateway.asked")


async def test_a_connection_that_is_asked_about_is_held_and_nothing_leaves_before_the_answer(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", action="ask", ask={"scope": "session"}, **TCP)))
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"hello")
    asked = await _asked(ground)
    assert (asked.host, asked.port, asked.protocol, asked.rule) == ("db.example", 5432, "tcp", "project/test/db")
    assert gateway.asks.held() == (asked,)
    assert not site.connections
    assert ground.internet.names.asked == []
    gateway.asks.answer(
        AskAnswer(ask_id=asked.ask_id, sandbox_id=asked.sandbox_id, generation=1, allow=True, scope="session")
    )
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"hello"
    writer.close()
    _, writer = await _talk(ground, "db.example")
    writer.close()
    assert len([event for event, _ in ground.events if event == "gateway.asked"]) == 1, "the answer holds"


async def test_an_ask_that_is_denied_or_not_answered_lets_nothing_pass(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", action="ask", ask={"timeout": "1s"}, **TCP)))
    reader, writer = await ground.connect("db.example", 5432)
    asked = await _asked(ground)
    gateway.asks.answer(AskAnswer(ask_id=asked.ask_id, sandbox_id=asked.sandbox_id, generation=1, allow=False))
    assert await is_reset(reader, writer)
    reader, writer = await ground.connect("db.example", 5432)
    assert await is_reset(reader, writer)
    assert [params.why for event, params in ground.events if event == "gateway.ask_ended"] == ["timeout"]
    assert not site.connections
    assert ground.records.denied("egress.connection") == ["approval_denied", "approval_denied"]


async def test_an_ask_ends_with_its_client_and_with_its_policy(ground: Ground):
    gateway = ground.open(spec(rule("db", "db.example", action="ask", **TCP)))
    _, writer = await ground.connect("db.example", 5432)
    await _asked(ground)
    writer.transport.abort()
    await ground.until(lambda: not gateway.asks.held())
    reader, writer = await ground.connect("db.example", 5432)
    await ground.until(lambda: gateway.asks.held())
    gateway.change(spec(rule("db", "db.example", action="ask", **TCP), revision=2), ())
    assert await is_reset(reader, writer)
    ended = [params.why for event, params in ground.events if event == "gateway.ask_ended"]
    assert ended == ["client_gone", "policy_changed"]


async def test_asks_are_bounded(ground: Ground):
    gateway = ground.open(spec(rule("db", "db.example", action="ask", **TCP), limits={"pending_ask": 2}))
    kept = [await ground.connect("db.example", 5432) for _ in range(2)]
    await ground.until(lambda: len(gateway.asks.held()) == 2)
    reader, writer = await ground.connect("db.example", 5432)
    assert await is_reset(reader, writer)
    for _, open_writer in kept:
        open_writer.transport.abort()
    await ground.until(lambda: not gateway.asks.held())
    assert gateway.status().denied_by.get("limit") == 1


# -- bounds


async def test_g10_beyond_the_bound_connections_wait_in_the_kernel_and_are_served_later(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP), limits={"connections": 3}))
    address = await ground.resolve("db.example")
    kept = [await _talk(ground, address) for _ in range(3)]
    reader, writer = await ground.connect(address, 5432)
    writer.write(b"hello")
    assert (await ground.ask("db.example")).rcode() == dns.rcode.NOERROR
    await ground.until(lambda: any(one.paused for one in gateway._listening))
    assert gateway.status().flows == 3
    assert site.connections == 3
    kept[0][1].close()
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"hello"
    for _, open_writer in (*kept, (reader, writer)):
        open_writer.close()


async def test_n26_g11_a_flood_of_connections_is_taken_at_its_rate_and_all_are_served(ground: Ground):
    await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP), limits={"connections_per_s": 20}))
    address = await ground.resolve("db.example")
    talks = await asyncio.gather(*(_talk(ground, address) for _ in range(60)))
    for _, writer in talks:
        writer.close()
    assert sum(one.paused for one in gateway._listening) > 0


async def test_d24_a_flood_of_questions_is_refused_beyond_its_rate_and_counted(ground: Ground):
    gateway = ground.open(spec(rule("db", "db.example", **TCP), limits={"dns_per_s": 1}))
    codes = [(await ground.ask("db.example")).rcode() for _ in range(8)]
    assert codes[:4] == [dns.rcode.NOERROR] * 4
    assert dns.rcode.REFUSED in codes
    assert (count := gateway.status().denied_by["dns_rate"]) >= 1
    assert ground.records.denied("egress.dns") == ["dns_rate"] * count, "they are counted like denials"


async def test_the_rate_of_a_rule_bounds_its_connections(ground: Ground):
    await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", rate={"concurrent": 1}, **TCP)))
    _, kept = await _talk(ground, "db.example")
    reader, writer = await ground.connect("db.example", 5432)
    assert await is_reset(reader, writer)
    kept.close()
    await ground.until(lambda: not gateway.status().flows)
    _, writer = await _talk(ground, "db.example")
    writer.close()
    assert ground.records.denied("egress.connection") == ["rate_exceeded"]


async def test_a_full_audit_sink_lets_nothing_pass(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", **TCP)))
    address = await ground.resolve("db.example")
    ground.records.full = True
    reader, writer = await ground.connect(address, 5432)
    writer.write(b"secret")
    assert await is_reset(reader, writer)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await ground.ask("db.example")
    assert not site.connections
    ground.records.full = False
    _, writer = await _talk(ground, address)
    writer.close()


async def test_back_pressure_reaches_the_sender(ground: Ground):
    """A site that does not read stops the guest; what is on its way stays within the buffers of four sockets."""
    gate = asyncio.Event()

    async def deaf(site, reader, writer):
        await gate.wait()

    await ground.internet.site("db.example", port=5432, handler=deaf)
    gateway = ground.open(spec(rule("db", "db.example", **TCP)))
    _, writer = await ground.connect("db.example", 5432)
    writer.transport.set_write_buffer_limits(high=1)
    await ground.until(lambda: gateway.status().allowed)

    async def pour() -> None:
        while True:
            writer.write(bytes(1 << 20))
            await writer.drain()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pour(), 1.5)
    flow = next(iter(gateway._flows))
    assert flow.bytes_out < 64 << 20
    assert sum(stream._transport.get_write_buffer_size() for stream in flow.outward.streams) < 1 << 20
    gate.set()
    writer.transport.abort()


async def test_n26_buffers_are_divided_among_the_flows_of_a_sandbox(ground: Ground):
    await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP), limits={"buffer": 1 << 20}))
    whole = gateway.room
    assert whole == 256 * 1024
    address = await ground.resolve("db.example")
    talks = [await _talk(ground, address) for _ in range(20)]
    assert gateway.room <= (1 << 20) // (2 * 20)
    for flow in gateway._flows:
        for stream in (flow._client, *flow.outward.streams):
            assert len(stream.get_buffer(-1)) + stream._water <= gateway.room
    for _, writer in talks:
        writer.close()
    await ground.until(lambda: not gateway.status().flows)
    assert gateway.room >= whole // 4


async def test_the_octets_of_a_rule_for_tcp_are_bounded(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", rate={"bytes_out_per_hour": "64KiB"}, **TCP)))
    reader, writer = await _talk(ground, "db.example")
    for _ in range(8):
        writer.write(bytes(32 * 1024))
        await asyncio.sleep(0)
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            await reader.read()
    writer.close()
    await ground.until(lambda: ground.records.of("egress.connection_ended"))
    assert ground.records.of("egress.connection_ended")[0].reason == "byte_budget"
    assert len(site.arrived) <= 64 * 1024 + 512 * 1024, "at most the piece that was on its way"


async def test_g03_the_certificate_is_renewed_in_time_and_when_a_rule_ends(ground: Ground):
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    gateway = ground.open(spec(rule("db", "db.example", **TCP), rule("other", "other.example", expires=ends, **TCP)))
    first = gateway.opened().ca_certificate
    gateway.tick()
    assert not ground.events
    ground.ahead = 601
    gateway.tick()
    ground.ahead = 20 * 24 * 3600
    gateway.tick()
    gateway.tick()
    renewed = [params.ca_certificate for event, params in ground.events if event == "gateway.renewed"]
    assert len(renewed) == 2
    assert len({first, *renewed}) == 3
    assert gateway.opened().ca_certificate == renewed[-1]


async def test_a_connection_over_which_nothing_passes_is_cut_after_hours(ground: Ground):
    await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP)))
    reader, writer = await _talk(ground, "db.example")
    (flow,) = gateway._flows
    began = float(int(time.monotonic()))  # whole seconds: sums of them are exact
    for hours in (0, 1, 2):
        flow.end_idle(began + hours * 3600)
    writer.write(b"still")
    async with asyncio.timeout(20):
        assert await reader.readexactly(5) == b"still"
    flow.end_idle(began + 3 * 3600)
    flow.end_idle(began + 5 * 3600)
    assert gateway.status().flows == 1
    flow.end_idle(began + 5 * 3600 + 1)
    assert await is_reset(reader, writer)


async def test_a_request_that_comes_octet_by_octet_is_read(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    ground.open(spec(rule("index", "index.example", **CLEAR)))
    reader, writer = await ground.connect("index.example", 80)
    for octet in b"GET / HTTP/1.1\r\nHost: index.example\r\n\r\n":
        writer.write(bytes((octet,)))
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert site.connections == 1


async def test_d01_a_rule_may_take_a_request_in_clear_home_by_its_host(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    home = rule("index", "index.example", **CLEAR)
    home["resolve"]["rehome"] = True
    ground.open(spec(home, rule("other", "other.example", **CLEAR)))
    for head, status in (
        (b"Host: index.example", b"200"),
        (b"hOST:INDEX.example:80", b"200"),
        (b"Host: index.example\r\nHost: evil.example", b"400"),
    ):
        reader, writer = await ground.connect("93.184.216.34", 80)
        writer.write(b"GET / HTTP/1.1\r\n" + head + b"\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"\r\n")).split(b" ")[1] == status
        writer.close()
    for name in (b"other.example", b"evil.example", b"93.184.216.34"):
        reader, writer = await ground.connect("93.184.216.34", 80)
        writer.write(b"GET / HTTP/1.1\r\nHost: " + name + b"\r\n\r\n")
        assert await is_reset(reader, writer)
    assert site.connections == 2


async def test_g11_whatever_a_guest_sends_and_however_it_leaves_no_flow_fails(ground: Ground, caplog):
    """Beginnings of TLS and HTTP, changed at random, cut anywhere, ended or reset: each is refused or served, none is a fault."""
    await ground.internet.site("index.example", port=443, tls=True, handler=web)
    await ground.internet.site("index.example", port=80, handler=web)
    await ground.internet.site("db.example", port=5432)
    gateway = ground.open(
        spec(
            rule("index", "index.example"),
            rule("clear", "index.example", **CLEAR),
            rule("db", "db.example", **TCP),
            limits={"connections_per_s": 10_000},
        )
    )
    chance = random.Random(7)
    addresses = [await ground.resolve("index.example"), await ground.resolve("db.example"), "93.184.216.34"]
    hello = _first_octets(ground)
    beginnings = [
        hello,
        b"GET / HTTP/1.1\r\nHost: index.example\r\n\r\n",
        b"\x16\x03\x01",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"",
    ]

    async def one() -> None:
        sock = ground.slot.guest_socket()
        try:
            await asyncio.get_running_loop().sock_connect(
                sock, (chance.choice(addresses), chance.choice((80, 443, 5432)))
            )
            octets = bytearray(chance.choice(beginnings))
            for _ in range(chance.randrange(3)):
                if octets:
                    octets[chance.randrange(len(octets))] = chance.randrange(256)
            with contextlib.suppress(OSError):
                sock.send(octets[: chance.randrange(len(octets) + 1)])
                if chance.random() < 0.3:
                    sock.shutdown(socket.SHUT_WR)
                elif chance.random() < 0.5:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(0)
        finally:
            sock.close()

    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(15)))
        if chance.random() < 0.3:
            await gateway.cut()
    await gateway.cut()
    await ground.until(lambda: not gateway.status().flows)
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert b"hello from" in await _get(ground, "index.example")


def _first_octets(ground: Ground) -> bytes:
    """What a TLS client begins with."""
    outgoing = ssl.MemoryBIO()
    client = ground.trusting().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="index.example")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()
