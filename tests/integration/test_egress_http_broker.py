"""Requests with a credential, all the way: a guest with a placeholder, the gateway, the broker, and a site that sees the secret."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from tests.support.broker_world import CANARY, PLACEHOLDER, World, world
from tests.support.egress_fixtures import Ground, ground, rule, spec
from tests.support.fake_internet import Site
from tests.support.web_site import Answer, Asked, serving

from hatchway.egress.upstream import Dialler
from hatchway.wire.broker import Grant, Granted
from hatchway.wire.egress import CredentialSpec

__all__ = ["ground"]

SANDBOX, PROJECT, HOST = "sandbox0000000000001", "p1", "api.example"
CREDENTIAL = {
    "id": "gh",
    "source": "store:github",
    "inject": [{"where": "header", "name": "authorization", "format": "Bearer {}"}],
    "only": {"paths": ["/repos/**"]},
}
API = rule("api", HOST, credentials=["gh"], http={"allow": [{"methods": ["*"], "paths": ["/**"]}]})
OTHER = rule("other", "other.example")

Handler = Callable[[Site, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Chain:
    """Everything between the guest and the sites."""

    def __init__(self, ground: Ground, broker: World, api: Site, other: Site) -> None:
        self.ground, self.broker, self.api, self.other = ground, broker, api, other

    script: Handler | None = None
    """What the site does with a connection instead of its echo."""

    async def grant(self, **changes: Any) -> None:
        binding = self.broker.binding(
            hosts=(HOST,), rules=("api",), ports=(443,), upstream_ca=(), private=("127.0.0.0/8",), **changes
        )
        await self.broker.node.call(
            "grant.put",
            Grant(sandbox_id=SANDBOX, project=PROJECT, generation=1, revision=1, bindings=(binding,)),
            Granted,
        )

    async def say(self, octets: bytes, host: str = HOST) -> bytes:
        """Sends octets over one connection of the guest; what came back until `Connection: close` did its work."""
        reader, writer = await self.ground.connect(host, 443, server_name=host)
        writer.write(octets)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def chain(ground: Ground, tmp_path: Path) -> AsyncIterator[Chain]:
    async def echo(asked: Asked) -> Answer:
        said = json.dumps({"saw": asked.headers.get("authorization", ""), "body": asked.body.decode()})
        return Answer(said.encode(), "application/json", headers={"X-Echo": asked.headers.get("authorization", "none")})

    async def handle(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (Chain.script or serving(echo))(site, reader, writer)

    api = await ground.internet.site(HOST, port=443, tls=True, handler=handle, number=10)
    other = await ground.internet.site("other.example", port=443, tls=True, handler=serving(echo), number=11)
    async with world(tmp_path / "world", upstream_ca=(ground.internet.authority.ca,)) as broker:
        assert ground.dialler is not None
        ground.dialler = Dialler(replace(ground.dialler.config, broker=broker.leg_path))
        await broker.put(project=PROJECT, hosts=(HOST,))
        ground.open(
            spec(API, OTHER, credentials=[CREDENTIAL]),
            credentials=(CredentialSpec(credential_id="gh", placeholder=PLACEHOLDER),),
        )
        made = Chain(ground, broker, api, other)
        await made.grant()
        yield made


def request(
    path: str, *lines: str, method: str = "GET", host: str = HOST, body: bytes = b"", close: bool = True
) -> bytes:
    named = [f"{method} {path} HTTP/1.1", f"Host: {host}", *lines]
    if body:
        named.append(f"Content-Length: {len(body)}")
    if close:
        named.append("Connection: close")
    return "\r\n".join([*named, "", ""]).encode() + body


AUTH = f"Authorization: Bearer {PLACEHOLDER}"


async def test_c01_the_secret_reaches_its_site_and_nobody_else(chain: Chain) -> None:
    answer = await chain.say(
        request("/repos/a", AUTH, close=False) + request("/repos/b", AUTH, method="POST", body=b"hello")
    )
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert chain.api.arrived.count(b"authorization: Bearer " + CANARY) == 2
    assert b"hello" in answer
    assert chain.api.connections == 1, "one leg for requests of one connection, rule and credential"
    assert CANARY not in answer
    assert CANARY not in json.dumps([str(entry) for entry in chain.ground.records.entries]).encode()
    assert PLACEHOLDER.encode() not in chain.api.arrived
    assert not chain.other.connections


async def test_c01_the_placeholder_goes_nowhere_else(chain: Chain) -> None:
    answer = await chain.say(request("/", AUTH, host="other.example"), "other.example")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"placeholder_misplaced" in answer
    answer = await chain.say(request("/users", AUTH))
    assert b"placeholder_misplaced" in answer
    assert not chain.other.connections
    assert not chain.api.connections


async def test_a_request_beyond_the_credentials_paths_gets_none(chain: Chain) -> None:
    answer = await chain.say(request("/users"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"authorization" not in chain.api.arrived
    assert not chain.broker.audit.kinds()[1:] or "credential.used" not in chain.broker.audit.kinds()


async def test_what_the_broker_refuses_is_said_as_any_denial(chain: Chain) -> None:
    """A binding that is narrower than the policy: the broker has the last word."""
    await chain.grant(methods=("GET",))
    answer = await chain.say(request("/repos/a", AUTH, method="POST", body=b"x"))
    assert answer.startswith(b"HTTP/1.1 403 Forbidden - Hatchway: cred_not_bound: ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "cred_not_bound"
    assert b"hatchway-leg-error" not in answer
    assert b"POST" not in chain.api.arrived
    assert [entry.reason for entry in chain.ground.records.of("egress.request") if entry.decision == "denied"] == [
        "cred_not_bound"
    ]


async def test_g20_without_a_grant_its_routes_are_denied_and_others_go_on(chain: Chain) -> None:
    await chain.broker.node.call(
        "grant.put", Grant(sandbox_id=SANDBOX, project=PROJECT, generation=1, revision=2, bindings=()), Granted
    )
    answer = await chain.say(request("/repos/a", AUTH))
    assert answer.startswith((b"HTTP/1.1 502 ", b"HTTP/1.1 503 ", b"HTTP/1.1 403 "))
    assert b"cred_" in answer
    assert (await chain.say(request("/", host="other.example"), "other.example")).startswith(b"HTTP/1.1 200 ")
    assert not chain.api.connections


async def test_a_streamed_body_and_http_2_go_through_the_broker(chain: Chain) -> None:
    reader, writer = await chain.ground.connect(HOST, 443, server_name=HOST, alpn=["h2"])
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    client.send_headers(
        1,
        [
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", HOST),
            (":path", "/repos/x"),
            ("authorization", f"Bearer {PLACEHOLDER}"),
        ],
    )
    client.send_data(1, b"streamed", end_stream=True)
    writer.write(client.data_to_send())
    body, status, ended = b"", "", False
    async with asyncio.timeout(20):
        while not ended:
            for event in client.receive_data(await reader.read(65536)):
                if isinstance(event, h2.events.ResponseReceived):
                    status = dict(event.headers)[":status"]
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    ended = True
            writer.write(client.data_to_send())
    writer.close()
    assert status == "200"
    assert json.loads(body)["body"] == "streamed"
    assert CANARY not in body
    assert b"authorization: Bearer " + CANARY in chain.api.arrived


def problem_of(answer: bytes, status: int, code: str) -> dict[str, Any]:
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert found["code"] == code
    assert found["cause"]
    assert found["remedy"]
    return found


def failed(chain: Chain) -> list[str]:
    """The reasons of requests that were let through and came to nothing."""
    return [entry.reason for entry in chain.ground.records.of("egress.request") if entry.decision == "failed"]


def ends(chain: Chain) -> None:
    """The broker's sockets close, as when its process ends."""
    for leg in list(chain.broker.legs._open):
        leg.abort()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_g20_a_broker_that_ends_under_a_request_is_told_and_recorded(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    asked = asyncio.Event()

    async def silent(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await site.note(await reader.readuntil(b"\r\n\r\n"))
        asked.set()
        await reader.read()

    monkeypatch.setattr(Chain, "script", staticmethod(silent))
    body = b"x" if method == "POST" else b""
    waiting = asyncio.ensure_future(chain.say(request("/repos/a", AUTH, method=method, body=body)))
    async with asyncio.timeout(20):
        await asked.wait()
    assert CANARY in chain.api.arrived
    ends(chain)
    assert "not known" in problem_of(await waiting, 503, "cred_unavailable")["cause"]
    assert failed(chain) == ["cred_unavailable"]


async def test_g20_an_answer_that_is_cut_with_the_broker_is_not_taken_for_whole_and_is_recorded(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 50_000)
        await reader.read()

    monkeypatch.setattr(Chain, "script", staticmethod(endless))
    reader, writer = await chain.ground.connect(HOST, 443, server_name=HOST)
    writer.write(request("/repos/a", AUTH))
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(1000)
        ends(chain)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            rest = await reader.read()
            assert len(rest) < 99_000
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    await chain.ground.until(lambda: failed(chain) == ["cred_unavailable"])


async def test_g20_a_source_that_cannot_be_opened_says_what_and_how_to_mend_it(chain: Chain) -> None:
    broker = chain.broker
    (file,) = (broker.folder / "broker" / "sources").glob("*.sealed")
    whole = file.read_bytes()

    async def told() -> dict[str, Any]:
        broker.sources.keep_only(set())  # as after a start
        return problem_of(await chain.say(request("/repos/a", AUTH)), 503, "cred_unavailable")

    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = await told()
    assert "damaged" in found["cause"]
    assert found["remedy"] == "Put the credential anew."
    file.write_bytes(whole)
    assert (await chain.say(request("/repos/a", AUTH))).startswith(b"HTTP/1.1 200 ")
    await broker.sources.delete(PROJECT, "github")
    found = await told()
    assert "no source" in found["cause"]
    assert "PUT /v1/credentials" in found["remedy"]
    assert failed(chain) == ["cred_unavailable", "cred_unavailable"]
    assert [entry.reason for entry in broker.audit.entries if entry.kind == "credential.denied"] == [
        "cred_unavailable"
    ] * 2
