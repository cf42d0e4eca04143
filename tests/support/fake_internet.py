"""An internet on loopback: name servers and sites that write down all that arrives. What arrived there is what tests go by."""

import asyncio
import contextlib
import itertools
import os
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from tests.support.certificates import Authority

Handler = Callable[["Site", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_numbers = itertools.count(1)


class Names(asyncio.DatagramProtocol):
    """A name server with a zone; `asked` are the questions in their order."""

    def __init__(self) -> None:
        self.zone: dict[str, list[str]] = {}
        self.aliases: dict[str, str] = {}
        self.asked: list[str] = []
        self.silent = False
        self.holding = False
        """Answers are kept until `release`."""
        self._held: list[tuple[bytes, object]] = []
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # asyncio's class of it does not say that it is one

    def datagram_received(self, data: bytes, addr: object) -> None:
        query = dns.message.from_wire(data)
        name = str(query.question[0].name).rstrip(".").lower()
        kind = query.question[0].rdtype
        self.asked.append(name)
        if self.silent:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        owner = name
        while owner in self.aliases:
            answer.answer.append(dns.rrset.from_text(owner + ".", 30, "IN", "CNAME", self.aliases[owner] + "."))
            owner = self.aliases[owner]
        if owner not in self.zone:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif kind == 1:
            answer.answer.append(dns.rrset.from_text(owner + ".", 30, "IN", "A", *self.zone[owner]))
        if self.holding:
            self._held.append((answer.to_wire(), addr))
            return
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), addr)  # type: ignore[arg-type]

    def release(self) -> None:
        """Sends what was held, and holds no more."""
        self.holding = False
        held, self._held = self._held, []
        assert self._transport is not None
        for octets, addr in held:
            self._transport.sendto(octets, addr)  # type: ignore[arg-type]  # as above


class Site:
    """One server. `arrived` is all that it got, over all connections; `names` are the server names that TLS clients wanted."""

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self.arrived = b""
        self.connections = 0
        self.names: list[str | None] = []
        self.changed = asyncio.Condition()

    async def got(self, what: bytes) -> None:
        """Waits until these octets have arrived."""
        async with self.changed:
            await self.changed.wait_for(lambda: what in self.arrived)

    async def note(self, data: bytes) -> None:
        """Writes down what came."""
        async with self.changed:
            self.arrived += data
            self.changed.notify_all()


async def echo(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back what comes, and its end."""
    while data := await reader.read(65536):
        await site.note(data)
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def web(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers HTTP/1.1 requests with a short text."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await site.note(head)
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    await site.note(await reader.readexactly(int(line.split(b":")[1])))
            body = f"hello from {site.address}".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()


class FakeInternet:
    """See the module. Its addresses are of loopback and its own: several may be there at once."""

    def __init__(self, folder: Path) -> None:
        number = next(_numbers)
        self.net = f"127.{1 + os.getpid() % 250}.{number % 250}"
        self.names = Names()
        self.authority = Authority(folder / "internet-ca", "internet")
        self.sites: list[Site] = []
        self._servers: list[asyncio.Server] = []
        self._transport: asyncio.DatagramTransport | None = None
        self._streams: set[asyncio.StreamWriter] = set()

    @property
    def resolver(self) -> tuple[str, int]:
        """Where the name server is."""
        return f"{self.net}.53", 53

    async def start(self) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self.names, local_addr=self.resolver
        )

    def site_context(self, *hosts: str) -> ssl.SSLContext:
        """TLS of a server that has a certificate for each of these names and presents the one that is wanted."""
        contexts: dict[str, ssl.SSLContext] = {}
        for host in hosts:
            contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            contexts[host].load_cert_chain(*self.authority.issue(host))
        return contexts[hosts[0]] if len(hosts) == 1 else _chooser(contexts)

    async def site(self, *hosts: str, port: int, handler: Handler = echo, tls: bool = False, number: int = 10) -> Site:
        """A server at address `number` of ours, which these names lead to."""
        site = Site(f"{self.net}.{number}", port)
        context = None
        if tls:
            context = self.site_context(*hosts)

            def wanted(_: object, name: str | None, __: object) -> None:
                site.names.append(name)

            if len(hosts) == 1:
                context.sni_callback = wanted
        for host in hosts:
            self.names.zone[host] = [site.address]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            site.connections += 1
            self._streams.add(writer)
            try:
                await handler(site, reader, writer)
            except OSError:
                pass
            finally:
                self._streams.discard(writer)
                writer.close()

        self._servers.append(await asyncio.start_server(serve, site.address, port, ssl=context))
        self.sites.append(site)
        return site

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in list(self._streams):
            writer.transport.abort()
        if self._transport is not None:
            self._transport.close()


def _chooser(contexts: dict[str, ssl.SSLContext]) -> ssl.SSLContext:
    first = next(iter(contexts.values()))

    def choose(sock: ssl.SSLObject, name: str | None, _: object) -> None:
        if name in contexts:
            sock.context = contexts[name]

    first.sni_callback = choose
    return first
