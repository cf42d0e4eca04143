"""A broker over real sockets, and the world around it: an upstream that speaks TLS and writes down what it gets, and a gateway's side of a leg."""

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from tests.support.certificates import Authority

from hatchway.broker.config import BrokerConfig
from hatchway.broker.grants import Grants
from hatchway.broker.legs import Legs
from hatchway.broker.service import BrokerService
from hatchway.broker.sources import Sources
from hatchway.broker.store import Store
from hatchway.wire.audit import Entry
from hatchway.wire.broker import Binding, Grant, GrantRef, Injection, Leg, LegAnswer, Source, SourceCheck
from hatchway.wire.message import Empty
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

HOST = "api.example"
OTHER = "evil.example"
CANARY = b'ghp_C4n4ry/Secret+Value="quoted"&<s>\\end'
PLACEHOLDER = "ghp_" + "0" * 32
SANDBOX = "sandboxsandboxsandbo"
PROJECT = "default"
WITHIN_S = 20.0

Answer = Callable[[bytes, bytes], bytes]
"""From head and body of a request to the octets of its response."""


def ok(body: bytes, *more: bytes) -> bytes:
    """A response with a length."""
    fields = b"".join(b"%s\r\n" % one for one in more)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n%s\r\n%s" % (len(body), fields, body)


class Site:
    """An upstream of one name. `heads` and `bodies` are what arrived; `answer` says what it says, and `script` takes a whole connection."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.raw = bytearray()
        self.connections = 0
        self.open = 0
        self.answer: Answer = lambda head, body: ok(b"hello")
        self.script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        try:
            if self.script is not None:
                await self.script(reader, writer)
                return
            while True:
                head, body = await read_message(reader, self.raw)
                self.heads.append(head)
                self.bodies.append(body)
                writer.write(self.answer(head, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.transport.abort()


async def read_message(reader: asyncio.StreamReader, raw: bytearray | None = None) -> tuple[bytes, bytes]:
    """Head and body of one HTTP/1.1 message; responses to HEAD are not read by it."""
    head = await reader.readuntil(b"\r\n\r\n")
    if raw is not None:
        raw += head
    lower = head.lower()
    body = b""
    if b"\r\ntransfer-encoding: chunked" in lower:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            piece = await reader.readexactly(size + 2)
            if raw is not None:
                raw += line + piece
            if size == 0:
                break
            body += piece[:-2]
    elif b"\r\ncontent-length:" in lower:
        size = int(lower.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(size)
        if raw is not None:
            raw += body
    return head, body


class Recorded:
    """An audit sink that keeps all, or refuses."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.refuses: Exception | None = None

    def record(self, entry: Entry) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.entries.append(entry)

    async def durable(self, entry: Entry) -> None:
        self.record(entry)

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.entries]


class GatewayLeg:
    """A gateway's end of a leg."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: LegAnswer) -> None:
        self.reader = reader
        self.writer = writer
        self.answer = answer

    async def ask(self, octets: bytes) -> tuple[bytes, bytes]:
        """Sends a request as it is, and reads a response."""
        self.writer.write(octets)
        async with asyncio.timeout(WITHIN_S):
            return await read_message(self.reader)

    async def ends(self) -> bool:
        """Waits until the broker has closed; tells whether nothing came before."""
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self.reader.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.transport.abort()


def get(
    path: str = "/v1/things", *fields: str, method: str = "GET", host: str = HOST, body: bytes | None = None
) -> bytes:
    """A request as a gateway writes it. The port of the leg is added to Host by `World.get`."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", *fields]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


@dataclass
class World:
    """Everything of one test."""

    folder: Path
    authority: Authority
    config: BrokerConfig
    site: Site
    other: Site
    audit: Recorded
    sources: Sources
    grants: Grants
    legs: Legs
    control: Connection
    node: Connection
    rpc_path: Path
    leg_path: Path
    open: list[GatewayLeg] = field(default_factory=list)

    def binding(self, **changes: Any) -> Binding:
        """A binding for the site."""
        made = Binding(
            credential_id="gh",
            source="github",
            placeholder=PLACEHOLDER,
            inject=(Injection(where="header", name="authorization", format="Bearer {}"),),
            rules=("github-api",),
            hosts=(HOST,),
            ports=(self.site.port,),
            upstream_ca=(self.authority.ca.read_text(),),
            private=("127.0.0.0/8",),
        )
        return msgspec.structs.replace(made, **changes)

    async def put(self, value: bytes = CANARY, **changes: Any) -> SourceCheck:
        """Puts the source of the binding."""
        source = Source(project=PROJECT, name="github", hosts=(HOST,), value=value)
        return await self.control.call("source.put", msgspec.structs.replace(source, **changes), SourceCheck)

    async def grant(self, *bindings: Binding, generation: int = 1, sandbox: str = SANDBOX) -> Any:
        """Grants the bindings, by default the one for the site."""
        from hatchway.wire.broker import Granted

        grant = Grant(
            sandbox_id=sandbox,
            project=PROJECT,
            generation=generation,
            revision=1,
            bindings=bindings or (self.binding(),),
        )
        return await self.node.call("grant.put", grant, Granted)

    async def revoke(self, generation: int = 0, sandbox: str = SANDBOX) -> None:
        await self.node.call("grant.revoke", GrantRef(sandbox_id=sandbox, generation=generation), Empty)

    def head(self, **changes: Any) -> Leg:
        """The head of a leg to the site."""
        made = Leg(
            sandbox_id=SANDBOX,
            project=PROJECT,
            generation=1,
            credential_id="gh",
            rule="github-api",
            host=HOST,
            port=self.site.port,
            addresses=("127.0.0.1",),
        )
        return msgspec.structs.replace(made, **changes)

    async def leg(self, **changes: Any) -> GatewayLeg:
        """Opens a leg, whatever it is answered."""
        leg = await open_leg(self.leg_path, self.head(**changes))
        self.open.append(leg)
        return leg

    def get(self, path: str = "/v1/things", *fields: str, **more: Any) -> bytes:
        """A request for the site."""
        return get(path, *fields, **{"host": f"{HOST}:{self.site.port}", **more})


async def open_leg(path: Path, head: Leg) -> GatewayLeg:
    """Opens a leg at a socket."""
    with address(path) as at:
        reader, writer = await asyncio.open_unix_connection(at, limit=1 << 20)
    body = msgspec.msgpack.encode(head)
    writer.write(struct.pack(">I", len(body)) + body)
    async with asyncio.timeout(WITHIN_S):
        size = struct.unpack(">I", await reader.readexactly(4))[0]
        answer = msgspec.msgpack.decode(await reader.readexactly(size), type=LegAnswer)
    return GatewayLeg(reader, writer, answer)


def listening(path: Path) -> socket.socket:
    """A listening Unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with address(path) as at:
        sock.bind(at)
    sock.listen(64)
    return sock


async def connect(path: Path) -> tuple[Connection, "asyncio.Task[None]"]:
    """An rpc connection to a socket."""
    with address(path) as at:
        reader, writer = await asyncio.open_unix_connection(at)
    connection = Connection(reader, writer)
    return connection, asyncio.ensure_future(connection.run())


def server_context(authority: Authority, host: str) -> ssl.SSLContext:
    """TLS of a site."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(host))
    return context


@contextlib.asynccontextmanager
async def world(folder: Path, **changes: Any) -> AsyncIterator[World]:
    """A broker in this loop, with everything around it. `changes` are of its configuration."""
    folder.mkdir(exist_ok=True)
    authority = Authority(folder / "ca", "Upstream authority")
    site, other = Site(server_context(authority, HOST)), Site(server_context(authority, OTHER))
    await site.start()
    await other.start()
    own = os.geteuid()
    config = replace(
        BrokerConfig(
            folder=folder / "broker",
            control_uids=frozenset({own}),
            node_uids=frozenset({own}),
            egress_uids=(own,),
            upstream_ca=(authority.ca,),
            reachable=tuple(("127.0.0.0/8", port) for port in (443, site.port, other.port)),
        ),
        **changes,
    )
    config.folder.mkdir(exist_ok=True)
    audit = Recorded()
    sources = Sources(config, Store(config.folder))
    grants = Grants(sources)
    legs = Legs(config, grants, sources, audit)
    service = BrokerService(config, sources, grants, audit)
    rpc_path, leg_path = folder / "broker.sock", folder / "broker-leg.sock"
    servers = [
        await service.serve_unix(listening(rpc_path)),
        await asyncio.start_unix_server(legs.serve, sock=listening(leg_path)),
    ]
    watching = asyncio.ensure_future(legs.watch())
    control, control_task = await connect(rpc_path)
    node, node_task = await connect(rpc_path)
    made = World(
        folder, authority, config, site, other, audit, sources, grants, legs, control, node, rpc_path, leg_path
    )
    try:
        yield made
    finally:
        for leg in made.open:
            leg.close()
        for connection in (control, node):
            await connection.close()
        for task in (control_task, node_task, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for server in servers:
            server.close()
        await legs.close()
        sources.close()
        await site.stop()
        await other.stop()
