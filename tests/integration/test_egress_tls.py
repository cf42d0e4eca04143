"""TLS of a sandbox's flows: the name in the ClientHello is the one that the address stands for, or nothing is dialled."""

import asyncio
import datetime
import socket
import ssl
import struct
import threading
import warnings

import pytest
from cryptography import x509
from tests.support.egress_fixtures import Ground, ground, is_reset, rule, spec
from tests.support.fake_internet import echo, web

from hatchway.egress import gateway as all_gateways
from hatchway.egress import tls
from hatchway.egress.client_hello import MAX_HELLO
from hatchway.egress.http.seam import StreamLost
from hatchway.egress.streams import TcpStream
from hatchway.egress.tls import handshake

__all__ = ["ground"]

GET = b"GET /simple/ HTTP/1.1\r\nHost: index.example\r\n\r\n"
PASSED = {
    "protocol": "tls",
    "tls": {"mode": "passthrough", "fronting_risk": "accepted", "expires": "2100-01-01T00:00:00Z"},
}


async def _answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head + await reader.readexactly(length)


def _hello(server_name: str | None, *, tls12: bool = False) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    if tls12:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _with_ech(data: bytes) -> bytes:
    """The same ClientHello with one more extension."""
    hello = bytearray(data)
    hello += struct.pack(">HH", 0xFE0D, 4) + b"\x00" * 4
    for at, size in ((3, 2), (6, 3)):
        hello[at : at + size] = (int.from_bytes(hello[at : at + size], "big") + 8).to_bytes(size, "big")
    at = 9 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2], "big")
    at += 1 + hello[at]
    hello[at : at + 2] = (int.from_bytes(hello[at : at + 2], "big") + 8).to_bytes(2, "big")
    return bytes(hello)


async def _alert(ground: Ground, host: str, data: bytes, port: int = 443) -> int:
    """What alert a client gets that begins so; 0: none."""
    reader, writer = await ground.connect(host, port)
    writer.write(data)
    try:
        async with asyncio.timeout(20):
            came = await reader.read()
    except ConnectionResetError:
        return 0
    finally:
        writer.close()
    return came[6] if came[:1] == b"\x15" and len(came) == 7 else 0


async def _index(ground: Ground, **more):
    site = await ground.internet.site("index.example", port=443, tls=True, handler=web)
    ground.open(spec(rule("index", "index.example", **more), rule("other", "other.example", **more)))
    return site


async def test_an_allowed_request_goes_to_the_site_that_is_verified_and_the_client_sees_a_certificate_of_its_authority(
    ground,
):
    site = await _index(ground)
    reader, writer = await ground.connect("index.example", 443, server_name="index.example")
    certificate = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["index.example"], "one name: no coalescing"
    writer.write(GET)
    assert b"hello from" in await _answer(reader)
    assert site.arrived.startswith(b"GET /simple/ HTTP/1.1\r\n")
    assert site.names == ["index.example"]
    writer.close()
    await ground.until(lambda: ground.records.of("egress.connection_ended"))
    (ended,) = ground.records.of("egress.connection_ended")
    assert ended.data["upstream"] == site.address
    assert len(ended.data["certificate_sha256"]) == 64


async def test_t01_no_server_name_no_connection(ground):
    site = await _index(ground)
    assert await _alert(ground, "index.example", _hello(None)) == 112
    assert not site.connections
    assert ground.records.denied("egress.connection") == ["sni_missing"]


@pytest.mark.parametrize("mode", [{}, PASSED], ids=["intercept", "passthrough"])
@pytest.mark.parametrize("name", ["other.example", "evil.example"])
async def test_t02_d22_another_name_than_the_address_stands_for(ground, mode, name):
    """Allowed or not, with the same address outside or not: the name that the guest connected to is the one that it has to want."""
    site = await _index(ground, **mode)
    ground.internet.names.zone["other.example"] = [site.address]
    assert await _alert(ground, "index.example", _hello(name)) == 112
    assert not site.connections
    assert ground.records.denied("egress.connection") == ["authority_mismatch"]


async def test_t03_d01_an_address_of_the_guests_own_choice_is_not_dialled(ground):
    """A forged hosts file or resolver: the right name, sent to an address that the attacker chose."""
    site = await _index(ground)
    evil = await ground.internet.site("evil.example", port=443, number=66)
    for address in (evil.address.replace("127.", "45."), site.address.replace("127.", "45."), "198.19.9.9"):
        reader, writer = await ground.connect(address, 443)
        writer.write(_hello("index.example"))
        assert await is_reset(reader, writer)
    assert not site.connections
    assert not evil.connections


async def test_d02_a_name_that_was_never_asked_here_still_goes_where_we_resolve_it(ground):
    """The address of an allowed name follows from the name: who knows it may use it, and gets that name and no other."""
    site = await _index(ground)
    address = await ground.resolve("index.example")
    ground.gateway.names = type(ground.gateway.names)()
    reader, writer = await ground.connect(address, 443, server_name="index.example")
    writer.write(GET)
    assert b"hello from" in await _answer(reader)
    writer.close()
    assert site.connections == 1


async def test_t06_case_and_dot_of_the_server_name_do_not_matter(ground):
    site = await _index(ground)
    reader, writer = await ground.connect("index.example", 443)
    writer.write(_hello("INDEX.Example"))
    async with asyncio.timeout(20):
        assert (await reader.readexactly(1)) == b"\x16", "a handshake goes on"
    writer.transport.abort()
    assert not site.connections, "and nothing is dialled before a request"


async def test_t07_t15_what_is_no_tls_and_no_http_is_reset(ground):
    site = await _index(ground)
    for data in (b"\x00\x01\x02\x03", b"\x80\x2e\x01\x00\x02"):
        reader, writer = await ground.connect("index.example", 443)
        writer.write(data)
        assert await is_reset(reader, writer)
    assert await _alert(ground, "index.example", b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00") == 50
    assert not site.connections
    assert ground.records.denied("egress.connection") == ["protocol_mismatch", "protocol_mismatch", "hello_malformed"]


async def test_t15_another_protocol_to_an_http_rule_gets_no_further_than_the_gateway(ground):
    site = await _index(ground)
    for first in (b"SSH-2.0-client\r\n", b"EHLOxEHLOxEHLOxEHLOxEHLO", b"A" * 40, b"HELO\r\n"):
        reader, writer = await ground.connect("index.example", 443)
        writer.write(first)
        assert await is_reset(reader, writer)
    assert not site.connections
    assert set(ground.records.denied("egress.connection")) == {"protocol_mismatch"}


async def test_t10_an_encrypted_hello_is_refused_where_it_could_not_be_looked_into(ground):
    site = await _index(ground, **PASSED)
    assert await _alert(ground, "index.example", _with_ech(_hello("index.example"))) == 49
    assert ground.records.denied("egress.connection") == ["ech_refused"]
    assert not site.connections


async def test_t10_in_interception_it_is_not_understood_and_so_of_no_effect(ground):
    site = await _index(ground)
    assert await _alert(ground, "index.example", _with_ech(_hello("evil.example"))) == 112
    reader, writer = await ground.connect("index.example", 443)
    writer.write(_with_ech(_hello("index.example")))
    async with asyncio.timeout(20):
        assert (await reader.readexactly(1)) == b"\x16", "our own handshake goes on, for the outer name"
    writer.transport.abort()
    assert not site.connections


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_t11_a_session_of_one_name_is_of_no_use_for_another(ground, version):
    await _index(ground)
    context = ground.trusting()
    context.maximum_version = version
    address = await ground.resolve("index.example")
    session = None
    for name, resumed in (("index.example", None), ("index.example", session), ("other.example", session)):
        sock = ground.slot.guest_socket()
        target = address if name == "index.example" else await ground.resolve("other.example")
        await asyncio.get_running_loop().sock_connect(sock, (target, 443))
        found = await asyncio.to_thread(_handshake, sock, context, name, resumed)
        session = found[0] or session
        assert found[1] is False, "nothing is resumed"
        assert found[2] == name


def _handshake(sock: socket.socket, context: ssl.SSLContext, name: str, session):
    sock.setblocking(True)
    sock.settimeout(20)
    with context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False) as tls:
        if session is not None:
            tls.session = session
        tls.do_handshake()
        return tls.session, bool(tls.session_reused), tls.getpeercert()["subjectAltName"][0][1]


async def test_t12_nothing_is_negotiated_anew_and_old_versions_are_refused(ground):
    await _index(ground)
    context = ground.trusting()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    sock = ground.slot.guest_socket()
    await asyncio.get_running_loop().sock_connect(sock, (await ground.resolve("index.example"), 443))
    with pytest.raises((ssl.SSLError, OSError)):
        await asyncio.to_thread(_handshake, sock, context, "index.example", None)
    made = ground.gateway.leaf("index.example", ("http/1.1",))
    assert made.options & ssl.OP_NO_RENEGOTIATION
    assert made.options & ssl.OP_NO_TICKET
    assert made.num_tickets == 0
    assert made.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_t13_no_ticket_and_so_no_early_data(ground):
    await _index(ground)
    sock = ground.slot.guest_socket()
    await asyncio.get_running_loop().sock_connect(sock, (await ground.resolve("index.example"), 443))
    context = ground.trusting()

    def go() -> bool:
        sock.setblocking(True)
        sock.settimeout(20)
        with context.wrap_socket(sock, server_hostname="index.example") as tls:
            tls.sendall(GET)
            tls.recv(65536)
            return bool(tls.session and tls.session.has_ticket)

    assert await asyncio.to_thread(go) is False


async def test_t16_a_clear_prelude_is_no_tls(ground):
    """PostgreSQL's request for TLS, to a rule for TLS: it is no ClientHello, and nothing is answered."""
    site = await ground.internet.site("db.example", port=5432)
    ground.open(spec(rule("db", "db.example", ports=[5432], protocol="tls", tls={"mode": "intercept"})))
    reader, writer = await ground.connect("db.example", 5432)
    writer.write(struct.pack(">II", 8, 80877103))
    assert await is_reset(reader, writer)
    assert not site.connections


async def test_t18_passthrough_carries_the_clients_own_tls_and_says_the_name_it_wants(ground):
    site = await _index(ground, **PASSED)
    context = ssl.create_default_context(cafile=str(ground.internet.authority.ca))
    sock = ground.slot.guest_socket()
    await asyncio.get_running_loop().sock_connect(sock, (await ground.resolve("index.example"), 443))
    reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname="index.example")
    writer.write(GET)
    assert b"hello from" in await _answer(reader)
    assert site.names == ["index.example"]
    writer.close()


async def test_t20_a_leaf_is_made_for_what_was_allowed_and_for_nothing_else(ground):
    await _index(ground)
    authority = ground.gateway._authority
    for name in ("evil.example", "other.example"):
        await _alert(ground, "index.example", _hello(name))
    assert not authority._leaves
    for number in range(70):
        authority.context(f"n{number}.example", (), datetime.datetime.now(datetime.UTC))
    assert len(authority._leaves) == 64


async def test_t21_the_authority_is_of_one_sandbox_and_of_the_names_that_it_may_reach(ground):
    await _index(ground)
    opened = ground.gateway.opened()
    certificate = x509.load_pem_x509_certificate(opened.ca_certificate.encode())
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert [name.value for name in constraints.value.permitted_subtrees] == ["index.example", "other.example"]
    assert len(constraints.value.excluded_subtrees) == 2
    # A leaf that a thief of the key makes for another name is refused by whoever trusts the authority.
    stolen = ground.gateway.leaf("bank.example", ())
    client = ssl.create_default_context(cadata=opened.ca_certificate)
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        _joined(client, stolen, "bank.example")
    _joined(client, ground.gateway.leaf("index.example", ()), "index.example")


def _joined(client_context: ssl.SSLContext, server_context: ssl.SSLContext, name: str) -> None:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname=name)
    server = server_context.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


async def test_t22_who_waits_for_the_server_to_speak_first_is_refused_after_a_time(ground, monkeypatch):
    monkeypatch.setattr("hatchway.egress.peeking.WITHIN_S", 0.2)
    site = await _index(ground)
    reader, writer = await ground.connect("index.example", 443)
    assert await is_reset(reader, writer)
    reader, writer = await ground.connect("index.example", 443)
    writer.write(_hello("index.example")[:40])
    assert await is_reset(reader, writer)
    assert ground.records.denied("egress.connection") == ["peek_timeout", "peek_timeout"]
    assert not site.connections


async def test_t22_a_hello_without_end_is_refused(ground):
    site = await _index(ground)
    endless = b"\x16\x03\x01\x40\x00\x01\x00\x3f\x00" + bytes(MAX_HELLO)
    assert await _alert(ground, "index.example", endless) == 50
    assert not site.connections


async def test_t23_tls_that_is_cut_off_is_not_taken_for_an_end(ground):
    async def cut_off(site, reader, writer):
        await site.note(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nthe first half")
        await writer.drain()
        writer.transport._ssl_protocol._transport.abort()

    await ground.internet.site("index.example", port=443, tls=True, handler=cut_off)
    ground.open(spec(rule("index", "index.example")))
    sock = ground.slot.guest_socket()
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (await ground.resolve("index.example"), 443))
    _, under = await loop.create_connection(TcpStream, sock=sock)
    client = await handshake(under, ground.trusting(), server_side=False, server_hostname="index.example")
    client.write(GET)
    came, lost = b"", False
    async with asyncio.timeout(20):
        try:
            while data := await client.read():
                came += data
        except StreamLost:
            lost = True
    client.abort()
    unfinished = b"transfer-encoding: chunked" in came.lower() and not came.endswith(b"0\r\n\r\n")
    assert lost or unfinished or came.startswith(b"HTTP/1.1 502"), came


async def test_an_upstream_without_a_valid_certificate_gets_no_request(ground):
    site = await ground.internet.site("wrong.example", port=443, tls=True, handler=web)
    ground.internet.names.zone["index.example"] = [site.address]
    ground.open(spec(rule("index", "index.example")))
    reader, writer = await ground.connect("index.example", 443, server_name="index.example")
    writer.write(GET)
    answer = await _answer(reader)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"tls_failed" in answer
    assert site.arrived == b""


async def test_tls_inside_a_rule_for_tls_is_ended_and_begun_anew(ground):
    site = await ground.internet.site("db.example", port=5432, tls=True, handler=echo)
    ground.open(spec(rule("db", "db.example", ports=[5432], protocol="tls", tls={"mode": "intercept"})))
    reader, writer = await ground.connect("db.example", 5432, server_name="db.example")
    writer.write(b"whatever protocol")
    async with asyncio.timeout(20):
        assert await reader.readexactly(17) == b"whatever protocol"
    assert site.arrived == b"whatever protocol"
    writer.close()


async def test_a_denied_connection_to_an_allowed_name_is_told_why_in_http(ground):
    """Another port than the rule's: the client finishes its handshake and reads the reason."""
    site = await _index(ground)
    reader, writer = await ground.connect("index.example", 8443, server_name="index.example")
    writer.write(b"GET / HTTP/1.1\r\nHost: index.example:8443\r\n\r\n")
    answer = await _answer(reader)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"port_not_allowed" in answer
    writer.close()
    reader, writer = await ground.connect("index.example", 80)
    writer.write(b"GET / HTTP/1.1\r\nHost: index.example\r\n\r\n")
    answer = await _answer(reader)
    assert answer.startswith(b"HTTP/1.1 403 ")
    writer.close()
    assert not site.connections
    assert ground.records.denied("egress.connection") == ["port_not_allowed", "port_not_allowed"]


async def test_d01_a_rule_may_take_a_connection_home_by_its_server_name(ground):
    """`rehome`: whatever address the guest believes in, the name is resolved here; another name than a rule's is not taken."""
    site = await ground.internet.site("index.example", port=443, tls=True, handler=web)
    home = rule("index", "index.example")
    home["resolve"]["rehome"] = True
    ground.open(spec(home, rule("other", "other.example")))
    reader, writer = await ground.connect("93.184.216.34", 443, server_name="index.example")
    writer.write(GET)
    assert b"hello from" in await _answer(reader)
    writer.close()
    for name in ("other.example", "evil.example"):
        reader, writer = await ground.connect("93.184.216.34", 443)
        writer.write(_hello(name))
        assert await is_reset(reader, writer)
    assert site.connections == 1
    assert ground.records.denied("egress.connection") == ["dst_unbound", "dst_unbound"]


async def test_g11_many_handshakes_of_one_sandbox_take_turns(ground, monkeypatch):
    """While many are on their way, one step of them is in hand, and beside the loop: other sandboxes wait for one step, and their requests for none."""
    await _index(ground)
    address = await ground.resolve("index.example")
    loop_thread, threads, waiting, most = threading.get_ident(), [], 0, 0
    submit = tls.aside().submit

    def counted(step, *args):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)

        def done(_) -> None:
            nonlocal waiting
            waiting -= 1

        def observed():
            threads.append(threading.get_ident())
            return step(*args)

        future = submit(observed)
        future.add_done_callback(done)
        return future

    monkeypatch.setattr(tls.aside(), "submit", counted)
    hello = _hello("index.example")
    writers = []
    for _ in range(40):
        _, writer = await ground.connect(address, 443)
        writers.append(writer)
    for writer in writers:
        writer.write(hello)
    async with asyncio.timeout(20):
        while len(threads) < 40:
            await asyncio.sleep(0.01)
    for writer in writers:
        writer.transport.abort()
    assert most == 1
    assert loop_thread not in threads


async def test_connections_to_the_outside_are_bounded_for_a_sandbox_and_those_that_are_only_kept_make_room(
    ground, monkeypatch
):
    """A stream is not a connection of the sandbox: over HTTP/2 one connection could open any number to the outside."""
    monkeypatch.setattr(all_gateways, "MAX_OUTSIDE", 1)
    await ground.internet.site("index.example", port=443, tls=True, handler=web)
    ground.open(spec(rule("index", "index.example"), limits={"connections": 4}))
    shares = ground.gateway.shares
    kept, keeper = await ground.connect("index.example", 443, server_name="index.example")
    keeper.write(GET)
    assert b"hello from" in await _answer(kept)
    await ground.until(lambda: shares.outside == 1)
    shares.outside += 7
    reader, writer = await ground.connect("index.example", 443, server_name="index.example")
    writer.write(GET)
    assert b"hello from" in await _answer(reader), "what was kept for later made room"
    keeper.write(GET)
    assert b"hello from" in await _answer(kept), "and so did that of another connection"
    shares.outside += 1
    for one in (reader, kept):
        one._transport.abort()
    await ground.until(lambda: shares.outside == 8)
    reader, writer = await ground.connect("index.example", 443, server_name="index.example")
    writer.write(GET)
    answer = await _answer(reader)
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"limit" in answer
    writer.close()
    shares.outside -= 8
