"""A policy that changes while something is under way: judged again where nothing has left yet, and while it is in flight."""

import asyncio
import json
import time
from typing import Any

import dns.rcode
import pytest
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.fake_internet import web

from hatchway.domain.errors import Unprocessable
from hatchway.domain.policy.reading import canonical, load
from hatchway.wire.egress import AskAnswer, EgressSpec, PolicyDocument

__all__ = ["ground"]

TCP = {"protocol": "tcp", "ports": [5432]}
CLEAR = {"ports": [80], "tls": {"mode": "none"}}
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="


def index(*paths: str, **more: Any) -> dict[str, Any]:
    return rule("index", "index.example", http={"allow": [{"paths": list(paths)}]}, **CLEAR, **more)


def tiers(revision: int, **documents: str) -> EgressSpec:
    """Documents of their own tiers, in YAML."""
    return EgressSpec(
        revision=revision,
        documents=tuple(
            PolicyDocument(tier=tier, name=tier, version=revision, text=canonical(load("version: 1\n" + text)))
            for tier, text in documents.items()
        ),
    )


async def until_asked(ground: Ground, name: str) -> None:
    """The gateway is on its way to a site: it waits for where that is."""
    await ground.until(lambda: name in ground.internet.names.asked)


async def ask(ground: Ground, path: str = "/a", host: str = "index.example", fields: bytes = b""):
    reader, writer = await ground.connect(host, 80)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n".encode() + fields + b"\r\n")
    return reader, writer


async def head(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        return await reader.readuntil(b"\r\n\r\n")


# -- while it is dialled


NARROWED = [
    pytest.param(index("/b"), id="the-path-goes"),
    pytest.param(rule("other", "other.example", **CLEAR), id="the-host-goes"),
    pytest.param(index("/a", action="ask"), id="it-is-to-be-asked"),
    pytest.param({**index("/a"), "resolve": {"private": "allow", "pin": ["127.0.0.9"]}}, id="another-place"),
    pytest.param({**index("/a"), "resolve": {"private": "deny"}}, id="no-private-address"),
    pytest.param({**index("/a"), "client_auth": "placeholder_only"}, id="other-terms"),
]


@pytest.mark.parametrize("narrowed", NARROWED)
async def test_g03_of_a_request_whose_policy_changes_while_it_is_dialled_no_octet_leaves(ground: Ground, narrowed):
    site = await ground.internet.site("index.example", port=80, handler=web)
    gateway = ground.open(spec(index("/a", "/b")))
    ground.internet.names.holding = True
    reader, writer = await ask(ground)
    await until_asked(ground, "index.example")
    gateway.change(spec(narrowed, revision=2), ())
    ground.internet.names.release()
    try:
        answer = await head(reader)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"x-hatchway-reason: policy_changed" in answer
    except (ConnectionResetError, asyncio.IncompleteReadError):
        assert narrowed["to"]["hosts"] == ["other.example"], "the whole connection is not allowed any more"
    assert site.arrived == b""
    writer.close()


async def test_g03_a_websocket_whose_policy_changes_while_it_is_dialled_is_not_asked_for(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    chat = rule("chat", "index.example", protocol="websocket", http={"allow": [{"paths": ["/a"]}]}, **CLEAR)
    gateway = ground.open(spec(chat))
    ground.internet.names.holding = True
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY
    reader, writer = await ask(ground, fields=upgrade + b"\r\n")
    await until_asked(ground, "index.example")
    gateway.change(spec({**chat, "http": {"allow": [{"paths": ["/b"]}]}}, revision=2), ())
    ground.internet.names.release()
    answer = await head(reader)
    assert b"x-hatchway-reason: policy_changed" in answer
    assert site.arrived == b""
    writer.close()


async def test_g03_over_tls_too_the_site_hears_nothing_of_a_request_that_is_not_allowed_any_more(ground: Ground):
    site = await ground.internet.site("index.example", port=443, handler=web, tls=True)
    secure = rule("index", "index.example", http={"allow": [{"paths": ["/a"]}]})
    gateway = ground.open(spec(secure))
    reader, writer = await ground.connect("index.example", 443, server_name="index.example")
    ground.internet.names.holding = True
    writer.write(b"GET /a HTTP/1.1\r\nHost: index.example\r\n\r\n")
    await until_asked(ground, "index.example")
    gateway.change(spec({**secure, "http": {"allow": [{"paths": ["/b"]}]}}, revision=2), ())
    ground.internet.names.release()
    assert b"x-hatchway-reason: policy_changed" in await head(reader)
    assert site.arrived == b""
    assert site.names == [], "not even a ClientHello was sent"
    writer.close()


async def test_a_request_that_passes_under_the_new_policy_as_under_the_old_one_goes_on(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    gateway = ground.open(spec(index("/a")))
    ground.internet.names.holding = True
    reader, writer = await ask(ground)
    await until_asked(ground, "index.example")
    gateway.change(spec(index("/a"), rule("other", "other.example", **CLEAR), revision=2), ())
    ground.internet.names.release()
    assert (await head(reader)).startswith(b"HTTP/1.1 200 ")
    assert site.connections == 1
    writer.close()


async def test_g03_a_tunnel_whose_address_is_denied_while_it_is_dialled_carries_nothing(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    gateway = ground.open(spec(rule("db", "db.example", **TCP)))
    ground.internet.names.holding = True
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(b"hello")
    await until_asked(ground, "db.example")
    denied = {"id": "no", "to": {"cidrs": [f"{site.address}/32"]}, "action": "deny"}
    gateway.change(spec(rule("db", "db.example", **TCP), denied, revision=2), ())
    ground.internet.names.release()
    assert await is_reset(reader, writer)
    assert (site.connections, site.arrived) == (0, b"")


# -- while it is in flight


async def _slow(site, reader, writer):
    await site.note(await reader.readuntil(b"\r\n\r\n"))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")
    await writer.drain()
    await reader.read()


async def _half(ground: Ground, path: str = "/a"):
    """A request of which half an answer came."""
    reader, writer = await ask(ground, path)
    async with asyncio.timeout(20):
        await reader.readuntil(b"half")
    return reader, writer


async def test_g03_a_request_in_flight_to_an_address_that_is_denied_now_is_cut(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=_slow)
    gateway = ground.open(spec(index("/a")))
    reader, writer = await _half(ground)
    denied = {"id": "no", "to": {"cidrs": [f"{site.address}/32"]}, "action": "deny"}
    gateway.change(spec(index("/a"), denied, revision=2), ())
    assert await is_reset(reader, writer)


@pytest.mark.parametrize(
    "changed",
    [
        {"resolve": {"private": "allow", "pin": ["127.0.0.9"]}},
        {"client_auth": "placeholder_only"},
        {"resolve": {"private": "deny"}},
    ],
    ids=["pinned-elsewhere", "no-account-of-its-own", "no-private-address"],
)
async def test_g03_a_request_in_flight_on_terms_that_do_not_hold_any_more_is_cut(ground: Ground, changed):
    await ground.internet.site("index.example", port=80, handler=_slow)
    gateway = ground.open(spec(index("/a", client_auth="allow")))
    reader, writer = await _half(ground)
    gateway.change(spec({**index("/a", client_auth="allow"), **changed}, revision=2), ())
    assert await is_reset(reader, writer)


async def test_g03_a_tunnel_whose_place_changes_is_cut(ground: Ground):
    site = await ground.internet.site("db.example", port=5432)
    await ground.internet.site("other.example", port=5432, number=11)
    first = rule("db", "db.example", **TCP)
    for changed, more in (
        ({"resolve": {"private": "allow", "pin": [site.address.rpartition(".")[0] + ".11"]}}, {}),
        ({}, {"dns": {"records": {"db.example": [site.address.rpartition(".")[0] + ".11"]}}}),
        ({"resolve": {"private": "deny"}}, {}),
    ):
        gateway = ground.open(spec(first))
        reader, writer = await ground.connect("db.example", 5432)
        writer.write(b"hello")
        async with asyncio.timeout(20):
            assert await reader.readexactly(5) == b"hello"
        gateway.change(spec({**first, **changed}, revision=2, **more), ())
        assert await is_reset(reader, writer), changed
        await gateway.close()


async def _approve(ground: Ground, scope: str = "once") -> None:
    await ground.until(lambda: ground.gateway is not None and ground.gateway.asks.held())
    assert ground.gateway is not None
    for asked in ground.gateway.asks.held():
        answer = AskAnswer(ask_id=asked.ask_id, sandbox_id=asked.sandbox_id, generation=1, allow=True, scope=scope)
        ground.gateway.asks.answer(answer)


async def test_what_somebody_approved_goes_on_when_something_else_changes(ground: Ground):
    await ground.internet.site("index.example", port=80, handler=_slow)
    await ground.internet.site("db.example", port=5432, number=11)
    asked = [index("/a", action="ask"), rule("db", "db.example", action="ask", **TCP)]
    gateway = ground.open(spec(*asked))
    reader, writer = await ask(ground)
    await _approve(ground)
    async with asyncio.timeout(20):
        await reader.readuntil(b"half")
    tunnel_reader, tunnel_writer = await ground.connect("db.example", 5432)
    tunnel_writer.write(b"hello")
    await _approve(ground)
    async with asyncio.timeout(20):
        assert await tunnel_reader.readexactly(5) == b"hello"
    gateway.change(spec(*asked, rule("other", "other.example", **CLEAR), revision=2), ())
    gateway.rejudge()
    assert gateway.status().flows == 2, "neither was cut"
    tunnel_writer.write(b"still")
    async with asyncio.timeout(20):
        assert await tunnel_reader.readexactly(5) == b"still"
    # The next request is asked about anew: former answers were for the former policy.
    _, second_writer = await ask(ground)
    await ground.until(lambda: len(gateway.asks.held()) == 1)
    second_writer.transport.abort()
    # What another rule asks about now was never approved.
    other = [{**asked[0], "id": "stricter"}, {**asked[1], "id": "stricter-db"}]
    gateway.change(spec(*other, revision=3), ())
    assert await is_reset(reader, writer)
    assert await is_reset(tunnel_reader, tunnel_writer)


async def test_an_approved_request_is_not_cut_when_an_unrelated_rule_ends(ground: Ground):
    await ground.internet.site("index.example", port=80, handler=_slow)
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    gateway = ground.open(spec(index("/a", action="ask"), rule("other", "other.example", expires=ends, **CLEAR)))
    _, writer = await ask(ground)
    await _approve(ground)
    await ground.until(lambda: gateway.status().flows == 1 and next(iter(gateway._flows)).requests.in_flight)
    ground.ahead = 601
    gateway.tick()
    assert next(iter(gateway._flows)).requests.in_flight, "it goes on"
    writer.close()


async def test_a_connection_that_is_asked_about_as_a_tunnel_is_asked_about_as_http_too(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    tunnel = rule("any", "index.example", protocol="tcp", ports=[80], action="ask")
    ground.open(
        EgressSpec(
            revision=1,
            documents=tuple(
                PolicyDocument(
                    tier="project",
                    name=name,
                    version=1,
                    text=canonical(load('{"version": 1, "rules": [' + json.dumps(one) + "]}")),
                )
                for name, one in (("tunnels", tunnel), ("index", index("/a")))
            ),
        )
    )
    reader, writer = await ask(ground)
    await ground.until(lambda: ground.gateway is not None and ground.gateway.asks.held())
    assert site.connections == 0
    await _approve(ground)
    assert (await head(reader)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_policy_that_begins_to_ask_before_a_tunnel_is_let_through_is_heeded(ground: Ground):
    """TLS waits for a ClientHello between the first verdict and the last one before it is dialled."""
    site = await ground.internet.site("db.example", port=8443, tls=True)
    through = {"protocol": "tls", "ports": [8443]}
    gateway = ground.open(spec(rule("db", "db.example", **through)))
    address = await ground.resolve("db.example")
    sock = ground.slot.guest_socket()
    await asyncio.get_running_loop().sock_connect(sock, (address, 8443))
    await ground.until(lambda: gateway.status().flows)
    await ground.until(lambda: next(iter(gateway._flows)).verdict is not None)
    gateway.change(spec(rule("db", "db.example", action="ask", **through), revision=2), ())
    with pytest.raises((ConnectionError, OSError)):
        async with asyncio.timeout(20):
            await asyncio.open_connection(sock=sock, ssl=ground.trusting(), server_hostname="db.example")
    assert site.connections == 0
    assert ground.records.denied("egress.connection") == ["policy_changed"]


# -- live bounds of names


async def test_max_names_is_changed_while_a_gateway_lives(ground: Ground):
    wild = rule("wild", "*.wild.example", **TCP)
    gateway = ground.open(spec(wild, dns={"max_names": 2}))
    codes = [(await ground.ask(f"n{number}.wild.example")).rcode() for number in range(3)]
    assert codes == [dns.rcode.NOERROR] * 2 + [dns.rcode.REFUSED]
    gateway.change(spec(wild, dns={"max_names": 3}, revision=2), ())
    assert (await ground.ask("n3.wild.example")).rcode() == dns.rcode.NOERROR
    assert (await ground.ask("n4.wild.example")).rcode() == dns.rcode.REFUSED
    gateway.change(spec(wild, dns={"max_names": 1}, revision=3), ())
    assert (await ground.ask("n5.wild.example")).rcode() == dns.rcode.REFUSED
    assert (await ground.ask("n0.wild.example")).rcode() == dns.rcode.NOERROR, "what has an address keeps it"


# -- what holds whatever else is said


async def test_g15_a_deny_of_the_sandboxs_own_holds_against_what_its_project_allows(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    wide = (
        "rules: [{id: all, to: {hosts: [index.example]}, ports: [80], tls: {mode: none}, resolve: {private: allow}, "
        "http: {allow: [{methods: ['*'], paths: ['/**']}]}}]"
    )
    own = "rules: [{id: mine, to: {hosts: [index.example]}, action: deny, http: {deny: [{paths: ['/a']}]}}]"
    ground.open(tiers(1, project=wide, sandbox=own))
    reader, writer = await ask(ground, "/a")
    answer = await head(reader)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"x-hatchway-reason: denied_by_rule" in answer
    writer.close()
    reader, writer = await ask(ground, "/b")
    assert (await head(reader)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert b"/a" not in site.arrived
    gateway = ground.gateway
    assert gateway is not None
    whole = "rules: [{id: mine, to: {hosts: [index.example]}, action: deny}]"
    gateway.change(tiers(2, project=wide, sandbox=whole), ())
    reader, writer = await ground.connect(str(gateway.names.address_of("index.example")), 80)
    writer.write(b"GET /b HTTP/1.1\r\nHost: index.example\r\n\r\n")
    assert (await head(reader)).startswith(b"HTTP/1.1 403 ")
    writer.close()
    assert site.arrived.count(b"GET ") == 1


async def test_g25_what_is_only_observed_ends_with_its_date_for_what_is_open_too(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    slow = await ground.internet.site("slow.example", port=80, handler=_slow, number=11)
    where = f"{{index.example: ['{site.address}'], slow.example: ['{slow.address}']}}"
    lent = f"private_networks: ['127.0.0.0/8']\ndns: {{records: {where}}}"
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    # What is observed has no rule, and so reaches no private address: a rule that it observes the denial of has one.
    watched = (
        f"mode: observe\nexpires: '{ends}'\nrules:\n"
        "  - {id: no, to: {hosts: [index.example, slow.example]}, action: deny, http: {deny: [{paths: ['/**']}]}}"
    )
    given = (
        "rules: [{id: all, to: {hosts: [index.example, slow.example]}, ports: [80], tls: {mode: none}, "
        "resolve: {private: allow}}]"
    )
    gateway = ground.open(tiers(1, platform=lent, project=given, sandbox=watched))
    reader, writer = await ask(ground)
    assert (await head(reader)).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert [one.data.get("observed") for one in ground.records.of("egress.request")] == [True]
    open_reader, open_writer = await ask(ground, host="slow.example")
    async with asyncio.timeout(20):
        await open_reader.readuntil(b"half")
    ground.ahead = 601
    gateway.tick()
    assert await is_reset(open_reader, open_writer)
    reader, writer = await ask(ground)
    answer = await head(reader)
    assert b"x-hatchway-reason: denied_by_rule" in answer
    writer.close()
    assert site.arrived.count(b"GET ") == 1


async def test_g02_a_bad_policy_leaves_the_former_one_in_force_for_requests(ground: Ground):
    site = await ground.internet.site("index.example", port=80, handler=web)
    gateway = ground.open(spec(index("/a")))
    bad = [
        "{",
        '{"version": 1, "rules": [{"id": "a"}]}',
        '{"version": 1, "rules": [{"id": "a", "to": {"hosts": ["**"]}, "protocol": "tcp", "ports": [80]}]}',
        '{"version": 1, "rules": [{"id": "a", "to": {"cidrs": ["10.0.0.0/"]}, "protocol": "tcp", "ports": [80]}]}',
    ]
    for text in bad:
        document = PolicyDocument(tier="project", name="test", version=2, text=text)
        with pytest.raises(Unprocessable, match="invalid_policy"):
            gateway.change(EgressSpec(revision=2, documents=(document,)), ())
        reader, writer = await ask(ground, "/a")
        assert (await head(reader)).startswith(b"HTTP/1.1 200 "), text
        writer.close()
        reader, writer = await ask(ground, "/b")
        assert b"x-hatchway-reason: path_not_allowed" in await head(reader), text
        writer.close()
    assert gateway.opened().revision == 1
    assert b"/b" not in site.arrived
