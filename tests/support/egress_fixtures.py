"""A gateway on a real slot's network, with a fake internet behind it. Import the fixture `ground` by name."""

import asyncio
import ipaddress
import json
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode
import pytest
from tests.support.fake_internet import FakeInternet
from tests.support.slot_network import Slot, lacking

from hatchway.domain.policy.reading import canonical, load
from hatchway.egress.gateway import Gateway
from hatchway.egress.http.session import HttpSession
from hatchway.egress.resolver import NameServer
from hatchway.egress.upstream import Dialler, HostService, OutConfig, UpstreamProxy
from hatchway.wire.audit import Entry
from hatchway.wire.egress import EgressSpec, GatewaySpec, PolicyDocument

WITHIN_S = 20.0
PORTS = (80, 443, 5432, 8443)


class Records:
    """Takes records, and can be full."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.one_by_one = 0
        """How many of them are not counted with others that are alike."""
        self.full = False

    def record(self, entry: Entry, *, bounded: bool = False) -> None:
        self.entries.append(entry)
        self.one_by_one += not bounded

    def denied(self, kind: str = "") -> list[str]:
        """The reasons of denials."""
        return [one.reason for one in self.entries if one.decision == "denied" and one.kind.startswith(kind)]

    def of(self, kind: str) -> list[Entry]:
        return [one for one in self.entries if one.kind == kind]


def rule(name: str, host: str | list[str], **more: Any) -> dict[str, Any]:
    """A rule for hosts of the fake internet, which lies on loopback."""
    hosts = [host] if isinstance(host, str) else host
    return {"id": name, "to": {"hosts": hosts}, "resolve": {"private": "allow"}, **more}


def spec(*rules: dict[str, Any], revision: int = 1, **more: Any) -> EgressSpec:
    if not rules:
        return EgressSpec(revision=revision)
    text = canonical(load(json.dumps({"version": 1, "rules": list(rules), **more})))
    return EgressSpec(
        revision=revision, documents=(PolicyDocument(tier="project", name="test", version=revision, text=text),)
    )


class Ground:
    """Where a test takes place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slot = Slot()
        self.internet = FakeInternet(folder)
        self.records = Records()
        self.events: list[tuple[str, Any]] = []
        self.heard = asyncio.Event()
        self.gateway: Gateway | None = None
        self.ahead = 0.0
        """Seconds by which the gateway's clock is ahead."""
        self.dialler: Dialler | None = None
        self.proxies: dict[str, UpstreamProxy] = {}

    async def start(self) -> None:
        await self.internet.start()
        net = ipaddress.ip_network(f"{self.internet.net}.0/24")
        self.dialler = Dialler(
            OutConfig(
                servers=(NameServer(*self.internet.resolver),),
                extra_ca=(self.internet.authority.ca,),
                host_services=tuple(HostService(net, port) for port in PORTS),
                proxies=self.proxies,
            )
        )

    def open(self, egress: EgressSpec | None = None, **more: Any) -> Gateway:
        """Opens the sandbox's gateway, on listeners that are made anew unless some are given."""
        assert self.dialler is not None
        listeners = more.pop("listeners", None) or self.slot.listeners()
        self.gateway = Gateway(
            GatewaySpec(sandbox_id="sandbox0000000000001", project="p1", generation=1, egress=egress or spec(), **more),
            listeners,
            dialler=self.dialler,
            http=HttpSession(),
            sink=self.records,
            tell=self._tell,
            now=lambda: time.time() + self.ahead,
        )
        return self.gateway

    def _tell(self, event: str, params: object) -> None:
        self.events.append((event, params))
        self.heard.set()

    async def close(self) -> None:
        try:
            if self.gateway is not None:
                await self.gateway.close()
            await self.internet.close()
        finally:
            self.slot.close()

    # -- the guest's side

    async def ask(
        self, name: str, kind: str = "A", server: str = "10.200.0.1", *, tcp: bool = False
    ) -> dns.message.Message:
        """A question of the guest to whatever server; only an answer from that very address is taken."""
        query = dns.message.make_query(name, kind, use_edns=0)
        loop = asyncio.get_running_loop()
        sock = self.slot.guest_socket(socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
        try:
            async with asyncio.timeout(WITHIN_S):
                await loop.sock_connect(sock, (server, 53))
                wire = query.to_wire()
                await loop.sock_sendall(sock, len(wire).to_bytes(2, "big") + wire if tcp else wire)
                data = await loop.sock_recv(sock, 4096)
        finally:
            sock.close()
        return dns.message.from_wire(data[2:] if tcp else data)

    async def resolve(self, name: str) -> str:
        """The address that the guest gets for a name."""
        answer = await self.ask(name)
        assert answer.rcode() == dns.rcode.NOERROR, dns.rcode.to_text(answer.rcode())
        return str(answer.answer[0][0].address)

    async def connect(
        self, where: str, port: int, *, server_name: str | None = None, alpn: list[str] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of the guest to an address or a name; with TLS where a server name is given."""
        address = where if _is_address(where) else await self.resolve(where)
        sock = self.slot.guest_socket()
        async with asyncio.timeout(WITHIN_S):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
            if server_name is None:
                return await asyncio.open_connection(sock=sock)
            return await asyncio.open_connection(
                sock=sock, ssl=self.trusting(alpn), server_hostname=server_name, ssl_handshake_timeout=WITHIN_S
            )

    def trusting(self, alpn: list[str] | None = None) -> ssl.SSLContext:
        """A client of the guest, which trusts the gateway's authority alone."""
        assert self.gateway is not None
        context = ssl.create_default_context(cadata=self.gateway.opened().ca_certificate)
        if alpn:
            context.set_alpn_protocols(alpn)
        return context

    async def until(self, condition: Any) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.005)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


async def is_reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection ends by RST without an octet."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return await reader.read() == b"" and False
    except ConnectionResetError:
        return True
    finally:
        writer.close()


def linger_off(writer: asyncio.StreamWriter) -> None:
    """Makes its close a reset."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    """A `Ground` that is cleaned up."""
    if why := lacking():
        pytest.skip(why)
    made = Ground(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
