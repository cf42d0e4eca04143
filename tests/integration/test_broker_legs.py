"""Requests with a credential, over real sockets and TLS: where the secret arrives, and where it does not. The oracle is what the upstreams got."""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.support.broker_world import (
    CANARY,
    HOST,
    OTHER,
    PLACEHOLDER,
    PROJECT,
    SANDBOX,
    WITHIN_S,
    GatewayLeg,
    World,
    ok,
    read_message,
    world,
)
from tests.support.certificates import Authority

from hatchway.broker.config import LegLimits
from hatchway.domain.errors import Conflict, Unavailable, Unprocessable
from hatchway.wire.broker import LEG_ERROR, Allowed, Grant, Granted, Injection, SourceRef
from hatchway.wire.message import Empty
from hatchway.wire.paths import address

ERROR = LEG_ERROR.encode() + b": "


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    """A broker with the source and the grant of the site."""
    async with world(tmp_path / "world") as made:
        await made.put()
        await made.grant()
        yield made


def nothing_arrived(here: World) -> bool:
    """Whether no upstream got a request, or a word of the secret."""
    return not here.site.heads and not here.other.heads and CANARY not in here.site.raw + here.other.raw


async def refused(leg: GatewayLeg, octets: bytes) -> str:
    """The code that the broker itself answers a request with."""
    head, _ = await leg.ask(octets)
    assert ERROR in head, head
    return head.split(ERROR)[1].split(b"\r\n")[0].decode()


# -- what it is for


async def test_the_secret_is_in_the_header_of_the_bound_host_alone(here: World) -> None:
    leg = await here.leg()
    assert leg.answer.error == ""
    assert leg.answer.peer_address == "127.0.0.1"
    assert len(leg.answer.certificate_sha256) == 64
    head, body = await leg.ask(here.get("/v1/things?page=2", "accept: text/plain"))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"hello"
    (arrived,) = here.site.heads
    assert arrived.startswith(b"GET /v1/things?page=2 HTTP/1.1\r\n")
    assert b"\r\nauthorization: Bearer " + CANARY + b"\r\n" in arrived
    assert b"\r\naccept: text/plain\r\n" in arrived
    assert CANARY not in here.other.raw


async def test_several_requests_of_one_leg_each_get_it(here: World) -> None:
    leg = await here.leg()
    for number in range(5):
        await leg.ask(here.get(f"/v1/{number}"))
    assert [head.count(CANARY) for head in here.site.heads] == [1] * 5
    assert here.site.connections == 1
    assert here.audit.kinds().count("credential.used") == 5


async def test_basic_and_query(here: World) -> None:
    places = (Injection(where="basic", name="bot"), Injection(where="query", name="Access_Token"))
    await here.grant(here.binding(inject=places))
    leg = await here.leg()
    await leg.ask(here.get("/v1?access%5ftoken=mine&a=1", "authorization: Basic bWluZTptaW5l"))
    (head,) = here.site.heads
    assert b"authorization: Basic " + base64.b64encode(b"bot:" + CANARY) + b"\r\n" in head
    target = head.split(b" ")[1]
    assert target.startswith(b"/v1?a=1&Access_Token=ghp_C4n4ry%2FSecret")
    assert head.count(b"authorization:") == 1


async def test_a_body_passes_in_both_directions(here: World) -> None:
    here.site.answer = lambda head, body: ok(body)
    leg = await here.leg()
    body = bytes(range(256)) * 4096
    assert (await leg.ask(here.get(method="POST", body=body)))[1] == body
    chunked = here.get("/v1/x", "transfer-encoding: chunked", method="PUT")
    pieces = (
        b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:1000], body[1000:70_000])) + b"0\r\n\r\n"
    )
    assert (await leg.ask(chunked + pieces))[1] == body[:70_000]
    assert here.site.bodies == [body, body[:70_000]]


async def test_head_and_empty_responses(here: World) -> None:
    leg = await here.leg()
    here.site.answer = lambda head, body: b"HTTP/1.1 204 No Content\r\n\r\n"
    head, _ = await leg.ask(here.get(method="DELETE"))
    assert head.startswith(b"HTTP/1.1 204 No Content\r\n")
    here.site.answer = lambda head, body: b"HTTP/1.1 200 OK\r\ncontent-length: 70\r\n\r\n"
    leg.writer.write(here.get(method="HEAD"))
    assert b"content-length: 70\r\n" in await leg.reader.readuntil(b"\r\n\r\n")
    here.site.answer = lambda head, body: ok(b"after")
    assert (await leg.ask(here.get()))[1] == b"after"


async def test_events_pass_at_once(here: World) -> None:
    """A stream without a length, each piece of which is there before the next is sent."""
    goes_on = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await goes_on.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        await writer.drain()

    here.site.script = script
    leg = await here.leg()
    leg.writer.write(here.get())
    async with asyncio.timeout(WITHIN_S):
        await leg.reader.readuntil(b"data: 1\n\n\r\n")
        goes_on.set()
        await leg.reader.readuntil(b"data: 2\n\n\r\n0\r\n\r\n")


# -- where it does not go


OTHER_LEGS = [
    ({"host": OTHER}, "cred_not_bound"),
    ({"host": "API.example"}, "cred_not_bound"),
    ({"host": "api.example."}, "cred_not_bound"),
    ({"host": "xapi.example"}, "cred_not_bound"),
    ({"port": 443}, "cred_not_bound"),
    ({"rule": "other"}, "cred_not_bound"),
    ({"credential_id": "other"}, "cred_not_bound"),
    ({"sandbox_id": "anotheranotheranothe"}, "cred_unavailable"),
    ({"project": "other"}, "cred_unavailable"),
    ({"generation": 2}, "cred_unavailable"),
]


async def test_c01_a_leg_for_anything_else_gets_nothing(here: World) -> None:
    for changes, error in OTHER_LEGS:
        leg = await here.leg(**changes)
        assert leg.answer.error == error
        assert await leg.ends()
        assert here.site.connections == here.other.connections == 0
        assert here.audit.entries[-1].kind == "credential.denied"


@pytest.mark.parametrize(
    ("path", "fields", "more"),
    [
        ("/v1/things", (), {"host": OTHER}),
        ("/v1/things", (f"x-data: {PLACEHOLDER}",), {}),
        (f"/v1/{PLACEHOLDER}", (), {}),
        (f"/v1?q={PLACEHOLDER}", (), {}),
    ],
)
async def test_c02_a_request_for_anything_else_is_refused(
    here: World, path: str, fields: tuple[str, ...], more: dict[str, str]
) -> None:
    leg = await here.leg()
    host = more.get("host", f"{HOST}:{here.site.port}")
    assert await refused(leg, here.get(path, *fields, host=host)) == "cred_not_bound"
    assert await leg.ends()
    assert nothing_arrived(here)


OTHER_PATHS = [
    ("DELETE", "/repos/acme/x"),
    ("GET", "/repos/other/x"),
    ("GET", "/repos/acme"),
    ("GET", "/repos/acme/../other"),
    ("GET", "/repos/acme/%2e%2e/other"),
    ("GET", "/repos/acme//x"),
    ("GET", "/repos/acme/x;y"),
    ("GET", "/repos/acme/a%2Fb"),
    ("GET", "/repos/acme/%41"),
    ("OPTIONS", "*"),
]


async def test_c17_methods_and_paths_that_it_is_not_for(here: World) -> None:
    for method, path in OTHER_PATHS:
        await here.grant(here.binding(methods=("GET", "OPTIONS"), paths=("/repos/acme/*",)))
        leg = await here.leg()
        assert await refused(leg, here.get(path, method=method)) == "cred_not_bound"
        assert nothing_arrived(here)


async def test_c17_what_it_is_for_passes(here: World) -> None:
    await here.grant(here.binding(methods=("GET",), paths=("/repos/acme/*",)))
    await (await here.leg()).ask(here.get("/repos/acme/x"))
    assert CANARY in here.site.heads[0]


PAIRED = [
    ("GET", "/simple/x", True),
    ("POST", "/upload", True),
    ("POST", "/simple/x", False),
    ("GET", "/upload", False),
    ("PUT", "/any/path", False),
    ("PUT", "/put", True),
]


async def test_c17_methods_and_paths_that_a_rule_pairs(here: World) -> None:
    """What a gateway would have to deny is denied here once more."""
    pairs = (
        Allowed(methods=("GET", "HEAD"), paths=("/simple/**",)),
        Allowed(methods=("POST",), paths=("/upload",)),
        Allowed(paths=("/put",)),
    )
    await here.grant(here.binding(allow=pairs))
    for method, path, passes in PAIRED:
        before = len(here.site.heads)
        leg = await here.leg()
        request = here.get(path, method=method, body=b"")
        if passes:
            assert (await leg.ask(request))[1] == b"hello"
        else:
            assert await refused(leg, request) == "cred_not_bound"
        assert len(here.site.heads) == before + passes


async def test_c06_a_rule_names_the_public_key(here: World) -> None:
    certificate = x509.load_pem_x509_certificate((here.folder / "ca" / f"{HOST}.pem").read_bytes())
    octets = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    own = base64.b64encode(hashlib.sha256(octets).digest()).decode()
    other = base64.b64encode(hashlib.sha256(b"another").digest()).decode()
    await here.grant(here.binding(upstream_spki=(other,)))
    assert (await here.leg()).answer.error == "tls_failed"
    await here.grant(here.binding(upstream_spki=(other, own)))
    assert (await here.leg()).answer.error == ""
    assert not here.site.heads
    with pytest.raises(Unprocessable, match="credential_binding"):
        await here.grant(here.binding(upstream_spki=("nonsense",)))


async def test_c05_a_redirect_goes_back_and_is_not_followed(here: World) -> None:
    where = b"https://%s:%d/?t=%s" % (OTHER.encode(), here.other.port, base64.b64encode(b"u:" + CANARY))
    here.site.answer = lambda head, body: b"HTTP/1.1 302 Found\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % where
    leg = await here.leg()
    head, _ = await leg.ask(here.get())
    assert head.startswith(b"HTTP/1.1 302 Found\r\n")
    assert b"location: https://evil.example:" in head
    assert base64.b64encode(b"u:" + CANARY)[4:-4] not in head
    assert here.other.connections == 0


async def test_c06_another_server_at_the_address(here: World) -> None:
    leg = await here.leg(addresses=("127.0.0.1",), port=here.other.port)
    assert leg.answer.error == "cred_not_bound"
    await here.grant(here.binding(ports=(here.other.port,)))
    leg = await here.leg(port=here.other.port)
    assert leg.answer.error == "tls_failed"
    assert nothing_arrived(here)


async def test_c06_authorities_are_those_of_the_grant(here: World, tmp_path: Path) -> None:
    """A gateway cannot name whom to trust: the leg has no place for it. Without any, the system's and the configuration's are trusted."""
    await here.grant(here.binding(upstream_ca=()))
    assert (await here.leg()).answer.error == ""
    foreign = Authority(tmp_path / "foreign", "Foreign")
    await here.grant(here.binding(upstream_ca=(foreign.ca.read_text(),)))
    assert (await here.leg()).answer.error == "tls_failed"
    await here.grant(here.binding(upstream_ca=(here.authority.ca.read_text(),)))
    assert (await here.leg()).answer.error == ""


async def test_c07_never_in_clear(here: World) -> None:
    got = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.read(4096))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    port = here.other.port
    await here.other.stop()
    server = await asyncio.start_server(plain, "127.0.0.1", port)
    await here.grant(here.binding(ports=(port,)))
    leg = await here.leg(port=port)
    assert leg.answer.error == "tls_failed"
    assert CANARY not in got
    server.close()


OTHER_ADDRESSES = [
    (("10.1.2.3",), ()),
    (("10.1.2.3",), ("10.9.0.0/16",)),
    (("169.254.169.254",), ("0.0.0.0/0",)),
    (("64:ff9b::a9fe:a9fe",), ("::/0",)),
    (("::ffff:10.1.2.3",), ()),
    (("0.0.0.0",), ()),
    (("2130706433",), ()),
    (("0x7f.1",), ()),
    (("api.example",), ()),
    (("127.0.0.1", "10.1.2.3"), ("127.0.0.0/8",)),
    (("127.0.0.1",), ()),
]


async def test_n05_n32_addresses_are_vetted_again(here: World) -> None:
    for addresses, private in OTHER_ADDRESSES:
        await here.grant(here.binding(private=private))
        assert (await here.leg(addresses=addresses)).answer.error == "address_denied"
        assert here.site.connections == 0


async def test_n31_addresses_of_this_host_are_not_dialled(tmp_path: Path) -> None:
    async with world(tmp_path / "world", reachable=()) as here:
        await here.put()
        await here.grant(here.binding(private=("0.0.0.0/0",)))
        assert (await here.leg()).answer.error == "address_denied"
        assert here.site.connections == 0


async def test_a_proxy_is_one_of_the_configuration(here: World) -> None:
    leg = await here.leg(via=f"http://127.0.0.1:{here.other.port}")
    assert leg.answer.error == "proxy_failed"
    assert here.other.connections == 0


@pytest.mark.parametrize("refuses", [False, True])
async def test_c16_through_a_proxy_the_secret_stays_inside_tls(tmp_path: Path, refuses: bool) -> None:
    got = bytearray()
    tasks: set[asyncio.Task[None]] = set()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        got.extend(head)
        if refuses:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            writer.close()
            return
        port = int(head.split(b" ")[1].split(b":")[1])
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65_536):
                    got.extend(data)
                    sink.write(data)
            sink.close()

        tasks.update({asyncio.ensure_future(pump(reader, far_writer)), asyncio.ensure_future(pump(far_reader, writer))})

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    url = f"http://user:proxy-password@127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with world(tmp_path / "world", proxies=frozenset({url})) as here:
        await here.put()
        await here.grant()
        leg = await here.leg(via=url, addresses=())
        if refuses:
            assert leg.answer.error == "proxy_failed"
            assert "proxy-password" not in leg.answer.message
        else:
            await leg.ask(here.get("/", "proxy-authorization: Basic bWluZTptaW5l"))
            assert CANARY in here.site.heads[0]
            assert b"proxy-authorization" not in here.site.heads[0].lower()
            assert got.startswith(b"CONNECT api.example:")
        assert CANARY not in got
    server.close()
    await asyncio.gather(*tasks)


# -- what a client brings of its own


async def test_c09_everything_that_says_who_asks_is_taken_out(here: World) -> None:
    own = "own-token-of-the-client"
    names = [
        "authorization",
        "proxy-authorization",
        "cookie",
        "cookie2",
        "x-api-key",
        "api-key",
        "x_api_key",
        "X-Auth-Token",
        "private-token",
        "job-token",
        "x-gitlab-token",
        "x-amz-security-token",
        "x-goog-api-key",
        "x-vault-token",
        "x-access-token",
        "x-session-id",
        "x-forwarded-user",
        "remote-user",
        "x-jwt-assertion",
        "x-client-secret",
        "authentication",
        "x-authorization-bearer",
        "dd-application-key",
    ]
    queries = [
        "access_token",
        "api_key",
        "apikey",
        "token",
        "key",
        "private_token",
        "auth",
        "password",
        "client_secret",
        "X-Amz-Signature",
        "sig",
        "ACCESS_TOKEN",
        "access%5Ftoken",
        "access%255Ftoken",
        "token[]",
        "+token",
    ]
    query = "&".join(f"{name}={own}" for name in queries) + f"&page=2;token={own}"
    leg = await here.leg()
    await leg.ask(here.get(f"/v1?{query}", *(f"{name}: {own}" for name in names), "x-request-id: 7"))
    (head,) = here.site.heads
    assert own.encode() not in head
    assert head.startswith(b"GET /v1?page=2 HTTP/1.1\r\n")
    assert head.count(CANARY) == 1
    assert b"x-request-id: 7\r\n" in head


async def test_h30_h31_overrides_and_nominated_fields(here: World) -> None:
    leg = await here.leg()
    more = (
        "connection: authorization, x-mine",
        "x-mine: 1",
        "x-http-method-override: DELETE",
        "x-forwarded-host: evil.example",
        "expect: 100-continue",
    )
    await leg.ask(here.get("/v1", *more, method="POST", body=b""))
    (head,) = here.site.heads
    for name in (b"x-mine", b"override", b"forwarded", b"evil", b"connection", b"expect"):
        assert name not in head.lower()
    assert CANARY in head


AMBIGUOUS = [
    b"GET /v1 HTTP/1.1\nhost: {host}\n\n\r\n\r\n",
    b"GET /v1 HTTP/1.1\r\nhost: {host}\r\nhost: {host}\r\n\r\n",
    b"GET /v1 HTTP/1.1\r\n\r\n",
    b"GET /v1 HTTP/1.0\r\nhost: {host}\r\n\r\n",
    b"GET /v1\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nhost: {host}\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nhost: {host}\r\n\r\n",
    b"TRACE / HTTP/1.1\r\nhost: {host}\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: {host}\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: {host}\r\ncontent-length: +3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nhost: {host}\r\ncontent-length: 3, 3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: {host}\r\nx: a\r\n b\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost : {host}\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: {host}\r\nx: \0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: {host}\r\nx: a\rb\r\n\r\n",
    b"GET /#x HTTP/1.1\r\nhost: {host}\r\n\r\n",
    b"GET /\xe9 HTTP/1.1\r\nhost: {host}\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: {host}\r\n" + b"x: y\r\n" * 101 + b"\r\n",
    b"GET / HTTP/1.1\r\nhost: {host}\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: {host}\r\n" + b"x: " + b"y" * 8000 + b"\r\n" + (b"x: " + b"y" * 8000 + b"\r\n") * 5,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


async def test_h_rows_a_request_that_can_be_read_in_two_ways_is_refused(here: World) -> None:
    for octets in AMBIGUOUS:
        leg = await here.leg()
        assert await refused(leg, octets.replace(b"{host}", f"{HOST}:{here.site.port}".encode())) == "request_refused"
        assert await leg.ends()
        assert nothing_arrived(here)


# -- what comes back


async def test_c04_nothing_that_comes_back_has_the_secret(here: World) -> None:
    """The upstream echoes all that it was sent, in a header and in the body, in the forms that services use."""
    encoded = base64.b64encode(b"x-oauth:" + CANARY)

    def echo(head: bytes, body: bytes) -> bytes:
        return ok(
            head + b"|" + encoded + b"|" + CANARY.hex().encode(),
            b"x-echo: " + CANARY,
            b"x-basic: " + encoded,
            b"set-cookie: t=" + CANARY,
            b"www-authenticate: Bearer realm=" + CANARY,
        ).replace(b"200 OK", b"200 " + CANARY)

    here.site.answer = echo
    leg = await here.leg()
    head, body = await leg.ask(here.get())
    assert CANARY in here.site.heads[0]
    for text in (head, body):
        assert CANARY not in text
        assert CANARY.hex().encode() not in text
        assert encoded[12:-4] not in text
    assert b"x-echo: " + b"*" * len(CANARY) in head
    assert b"set-cookie: t=***" in head


async def test_c04_split_over_writes_and_chunks(here: World) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for octet in b"<" + CANARY + b">":
            writer.write(b"1\r\n%c\r\n" % octet)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\nx-trailer: " + CANARY + b"\r\n\r\n")
        await writer.drain()
        await reader.read()

    here.site.script = script
    leg = await here.leg()
    leg.writer.write(here.get())
    async with asyncio.timeout(WITHIN_S):
        octets = await leg.reader.readuntil(b"0\r\n\r\n")
    assert CANARY not in octets
    assert b"trailer" not in octets
    body = b"".join(octets.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2])
    assert body == b"<" + b"*" * len(CANARY) + b">"


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s"
        % (len(gzip.compress(CANARY)), gzip.compress(CANARY)),
        b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-9/40\r\ncontent-length: 10\r\n\r\n" + CANARY[:10],
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n" + CANARY,
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\nx: y\n\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: " + CANARY + b"\r\n\r\n" + b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
        b"garbage " + CANARY + b"\r\n\r\n",
        b"",
    ],
    ids=["gzip", "part", "101", "CL and TE", "two CL", "LF", "HTTP/2", "TE gzip", "1xx flood", "garbage", "end"],
)
async def test_h41_a_response_that_cannot_be_searched_is_refused(here: World, response: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        writer.write(response)
        await writer.drain()
        if response:
            await reader.read()
        else:
            writer.close()

    here.site.script = script
    leg = await here.leg()
    head, body = await leg.ask(here.get())
    assert head.startswith(b"HTTP/1.1 502 ")
    assert ERROR in head
    assert CANARY[:10] not in head + body
    assert await leg.ends()


async def test_h41_a_response_that_nobody_asked_for_reaches_no_request(here: World) -> None:
    here.site.answer = lambda head, body: ok(b"first") + ok(b"smuggled")
    leg = await here.leg()
    assert (await leg.ask(here.get()))[1] == b"first"
    with contextlib.suppress(ConnectionError):
        leg.writer.write(here.get("/second"))
    assert await leg.ends()
    assert len(here.site.heads) == 1


async def test_pieces_and_compression_are_not_asked_for(here: World) -> None:
    leg = await here.leg()
    await leg.ask(here.get("/v1", "range: bytes=0-9", "if-range: x", "accept-encoding: gzip, br"))
    (head,) = here.site.heads
    assert b"range" not in head
    assert head.count(b"accept-encoding: identity\r\n") == head.count(b"accept-encoding") == 1


async def test_without_scrubbing_responses_pass_as_they_are(here: World) -> None:
    await here.grant(here.binding(scrub=False))
    packed = gzip.compress(b"hello")
    here.site.answer = lambda head, body: ok(packed, b"content-encoding: gzip")
    leg = await here.leg()
    assert (await leg.ask(here.get("/v1", "accept-encoding: gzip")))[1] == packed
    assert b"accept-encoding: gzip\r\n" in here.site.heads[0]


async def test_cookies_and_hints_of_the_upstream(here: World) -> None:
    here.site.answer = lambda head, body: ok(
        b"", b"set-cookie: a=1", b"alt-svc: h3=evil", LEG_ERROR.encode() + b": forged"
    )
    head, _ = await (await here.leg()).ask(here.get())
    assert b"set-cookie: a=1\r\n" in head
    assert b"alt-svc" not in head
    assert ERROR not in head
    await here.grant(here.binding(set_cookie=False))
    head, _ = await (await here.leg()).ask(here.get())
    assert b"set-cookie" not in head


@pytest.mark.parametrize("proper", [True, False])
async def test_t23_a_body_that_is_cut_off_does_not_look_whole(here: World, proper: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await writer.drain()
        if proper:
            writer.close()
            await writer.wait_closed()
        else:
            writer.transport.abort()  # without TLS's own end

    here.site.script = script
    leg = await here.leg()
    leg.writer.write(here.get())
    async with asyncio.timeout(WITHIN_S):
        octets = await leg.reader.read(-1)
    assert octets.endswith(b"4\r\npart\r\n0\r\n\r\n") == proper
    assert b"connection: close\r\n" in octets


# -- WebSocket


async def _upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head, _ = await read_message(reader)
    assert b"sec-websocket-extensions" not in head
    key = head.split(b"sec-websocket-key: ")[1].split(b"\r\n")[0]
    accept = base64.b64encode(
        hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
    )
    writer.write(
        b"HTTP/1.1 101 Yes\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
        + accept
        + b"\r\n\r\n"
    )
    sent = await reader.read(100)
    writer.write(b"\x81%c" % len(CANARY) + CANARY + sent)
    await writer.drain()
    await reader.read()


WEBSOCKET = (
    "connection: upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    "sec-websocket-extensions: permessage-deflate",
)


async def test_h25_a_websocket_where_the_rule_lets_it(here: World) -> None:
    await here.grant(here.binding(websocket=True))
    here.site.script = _upgrade
    leg = await here.leg()
    head, _ = await leg.ask(here.get("/v1", *WEBSOCKET))
    assert head.startswith(b"HTTP/1.1 101 ")
    leg.writer.write(b"frame")
    async with asyncio.timeout(WITHIN_S):
        octets = await leg.reader.readuntil(b"frame")
    assert octets == b"\x81%c" % len(CANARY) + b"*" * len(CANARY) + b"frame"


@pytest.mark.parametrize("fields", [WEBSOCKET, ("connection: upgrade", "upgrade: h2c"), ("upgrade: foo",)])
async def test_h26_no_other_upgrade(here: World, fields: tuple[str, ...]) -> None:
    leg = await here.leg()
    assert await refused(leg, here.get("/v1", *fields)) == "cred_not_bound"
    assert nothing_arrived(here)


# -- leases


async def test_g05_a_revoked_grant_cuts_what_is_open_before_it_is_answered(here: World) -> None:
    begun = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nfirst")
        await writer.drain()
        begun.set()
        await reader.read()

    here.site.script = script
    leg = await here.leg()
    leg.writer.write(here.get())
    async with asyncio.timeout(WITHIN_S):
        await leg.reader.readuntil(b"first")
    await here.revoke(1)
    assert here.grants.legs == 0
    assert await leg.ends()
    assert (await here.leg()).answer.error == "cred_unavailable"
    assert "credential.revoked" in here.audit.kinds()


async def test_c11_a_new_generation_leaves_the_old_one_nothing(here: World) -> None:
    leg = await here.leg()
    await leg.ask(here.get())
    await here.grant(here.binding(placeholder="ghp_" + "1" * 32), generation=2)
    assert await leg.ends()
    assert (await here.leg()).answer.error == "cred_unavailable"
    assert (await here.leg(generation=2)).answer.error == ""
    with pytest.raises(Conflict, match="stale_generation"):
        await here.grant(generation=1)
    await here.revoke(1)
    assert (await here.leg(generation=2)).answer.error == ""


async def test_c11_a_fork_has_a_grant_of_its_own(here: World) -> None:
    child = "childchildchildchild"
    assert (await here.leg(sandbox_id=child)).answer.error == "cred_unavailable"
    await here.grant(here.binding(placeholder="ghp_" + "2" * 32), sandbox=child)
    await here.revoke(0, SANDBOX)
    leg = await here.leg(sandbox_id=child)
    await leg.ask(here.get())
    assert CANARY in here.site.heads[0]
    assert (await here.leg()).answer.error == "cred_unavailable"


async def test_a_narrower_grant_cuts_only_what_it_does_not_allow(here: World) -> None:
    both = here.binding(rules=("github-api", "github-uploads"))
    await here.grant(both)
    kept, cut = await here.leg(), await here.leg(rule="github-uploads")
    await here.grant(here.binding())
    assert await cut.ends()
    assert (await kept.ask(here.get()))[1] == b"hello"


async def test_a_grant_that_is_not_renewed_ends(here: World) -> None:
    leg = await here.leg()
    now = here.grants._now
    here.grants._now = lambda: now() + 3601.0  # the wall clock jumps: what was suspended wakes
    assert [grant.sandbox_id for grant in await here.grants.expire()] == [SANDBOX]
    assert await leg.ends()
    assert (await here.leg()).answer.error == "cred_unavailable"


async def test_a_source_that_changes_or_goes(here: World) -> None:
    leg = await here.leg()
    await leg.ask(here.get())
    await here.put(b"another-secret-value", version=2)
    await leg.ask(here.get())
    assert b"Bearer another-secret-value\r\n" in here.site.heads[1]
    await here.put(b"another-secret-value", version=3, hosts=("elsewhere.example",))
    assert await leg.ends()
    assert (await here.leg()).answer.error == "cred_not_bound"
    with pytest.raises(Conflict, match="stale_version"):
        await here.put(version=1)
    await here.control.call("source.delete", SourceRef(project="default", name="github"), Empty)
    assert (await here.leg()).answer.error == "cred_unavailable"
    granted = await here.grant()
    assert "gh" in granted.unavailable


@pytest.mark.parametrize(
    "value",
    [
        b"long-enough\r\nx-evil: 1",
        b"long-enough\n\n",
        b"long\0enough",
        b"short",
        b" spaces around ",
        b"x" * 4097,
        "schlüssel-ü".encode(),
    ],
)
async def test_c13_a_value_that_could_be_more_than_a_value_is_refused(here: World, value: bytes) -> None:
    with pytest.raises(Unprocessable) as error:
        await here.put(value, version=2)
    assert error.value.code == "credential_value"
    assert value.decode("utf-8", "replace").strip() not in str(error.value.as_dict())
    await (await here.leg()).ask(here.get())
    assert CANARY in here.site.heads[0]  # the former one is in force


@pytest.mark.parametrize(
    "inject",
    [
        Injection(where="header", name="host"),
        Injection(where="header", name="content-length"),
        Injection(where="header", name="x y"),
        Injection(where="header", name="authorization", format="Bearer"),
        Injection(where="header", name="authorization", format="{} {}"),
        Injection(where="header", name="authorization", format="Bearer {}\r\nx: y"),
        Injection(where="basic", name="a:b"),
        Injection(where="query", name="a&b"),
        Injection(where="body", name="token"),
    ],
)
async def test_c02_places_where_no_secret_may_stand(here: World, inject: Injection) -> None:
    with pytest.raises(Unprocessable, match="credential_injection"):
        await here.grant(here.binding(inject=(inject,)))


# -- bounds and failures


async def test_nothing_is_sent_that_cannot_be_recorded(here: World) -> None:
    leg = await here.leg()
    here.audit.refuses = Unavailable("audit_unavailable", "The disk is full.")
    assert await refused(leg, here.get()) == "audit_unavailable"
    assert nothing_arrived(here)


async def test_too_many_legs(tmp_path: Path) -> None:
    async with world(tmp_path / "world", limits=LegLimits(legs_per_sandbox=2)) as here:
        await here.put()
        await here.grant()
        first, _ = await here.leg(), await here.leg()
        assert (await here.leg()).answer.error == "limit"
        first.close()
        async with asyncio.timeout(WITHIN_S):
            while here.grants.legs > 1:
                await asyncio.sleep(0.01)
        assert (await here.leg()).answer.error == ""


async def test_a_project_leaves_legs_to_the_others(tmp_path: Path) -> None:
    async with world(tmp_path / "world", limits=LegLimits(legs=3, legs_per_project=2)) as here:
        await here.put()
        await here.put(project="tenant")
        await here.grant()
        grant = Grant(sandbox_id="t" * 20, project="tenant", generation=1, revision=1, bindings=(here.binding(),))
        await here.node.call("grant.put", grant, Granted)
        await here.leg()
        await here.leg()
        assert (await here.leg()).answer.error == "limit"
        tenant = {"sandbox_id": "t" * 20, "project": "tenant"}
        assert (await here.leg(**tenant)).answer.error == ""
        assert (await here.leg(**tenant)).answer.error == "limit"


async def test_h37_silence_between_requests_has_an_end(tmp_path: Path) -> None:
    async with world(tmp_path / "world", limits=LegLimits(idle_s=0.1)) as here:
        await here.put()
        await here.grant()
        assert await (await here.leg()).ends()
        assert nothing_arrived(here)


async def test_h37_silence_within_a_message_has_an_end_on_every_side(tmp_path: Path) -> None:
    limits = LegLimits(head_within_s=0.5, body_idle_s=0.5, response_within_s=0.5, response_idle_s=0.5)
    async with world(tmp_path / "world", limits=limits) as here:
        await here.put()
        await here.grant()
        slow = await here.leg()
        slow.writer.write(here.get()[:-2])
        assert await slow.ends()
        body = await here.leg()
        body.writer.write(here.get("/v1/things", "content-length: 5", method="POST"))
        assert await refused(body, b"") == "upstream_failed"
        assert not here.site.bodies

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        here.site.script = never
        assert await refused(await here.leg(), here.get()) == "upstream_failed"


async def test_a_grant_of_nothing_ends_what_there_was(here: World) -> None:
    leg = await here.leg()
    grant = Grant(sandbox_id=SANDBOX, project=PROJECT, generation=1, revision=2, bindings=())
    await here.node.call("grant.put", grant, Granted)
    assert await leg.ends()
    assert (await here.leg()).answer.error == "cred_unavailable"


async def test_a_gateway_that_goes_away_frees_its_upstream(here: World) -> None:
    """Also while the upstream is silent, when nothing is written that would fail."""
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_message(reader)
        asked.set()
        await reader.read()

    here.site.script = silent
    leg = await here.leg()
    leg.writer.write(here.get())
    await asked.wait()
    leg.close()
    async with asyncio.timeout(WITHIN_S):
        while here.site.open or here.grants.legs:
            await asyncio.sleep(0.02)


async def test_what_is_no_leg_is_closed(here: World) -> None:
    for octets in (b"\xff\xff\xff\xff", b"\0\0\0\2{}", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1"):
        with address(here.leg_path) as at:
            reader, writer = await asyncio.open_unix_connection(at)
        writer.write(octets)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_tls_is_that_of_the_rule(here: World) -> None:
    here.site._tls.maximum_version = ssl.TLSVersion.TLSv1_2
    assert (await here.leg()).answer.error == ""
    await here.grant(here.binding(tls_min="1.3"))
    assert (await here.leg()).answer.error == "tls_failed"
