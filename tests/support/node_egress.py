"""The node's side of the gateways for tests: a real shard and a real audit writer as processes, a launcher and a broker that are played."""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.certificates import Authority
from tests.support.egress_process import Process

from hatchway.node.egress.gateway import Gateway
from hatchway.node.egress.gateways import Gateways
from hatchway.node.vmm.seam import LaunchRefused
from hatchway.wire import audit, broker, egress
from hatchway.wire.broker import Grant, Granted, GrantList, GrantRef
from hatchway.wire.egress import EgressSpec, GatewayList, PolicyDocument
from hatchway.wire.message import Empty
from hatchway.wire.rpc import Connection

WITHIN_S = 30.0
ID = "sandbox0000000000001"


def spec(revision: int, host: str = "a.example", tier: str = "sandbox", **more: Any) -> EgressSpec:
    """A policy that lets one host pass; `credential=True` with a secret, of the source `source`."""
    rule: dict[str, Any] = {"id": "one", "to": {"hosts": [host]}}
    document: dict[str, Any] = {"version": 1, "rules": [rule]}
    source = more.pop("source", "bot")
    if more.pop("credential", False):
        rule["credentials"] = ["bot"]
        document["credentials"] = [
            {"id": "bot", "source": f"store:{source}", "expose": {"env": "BOT"}, "inject": [{"where": "header"}]}
        ]
    text = msgspec.json.encode(document).decode()
    return EgressSpec(
        revision=revision, documents=(PolicyDocument(tier=tier, name="web", version=revision, text=text),), **more
    )


class Slots:
    """What the launcher gives: listeners of a slot, here of this host's loopback. `asked` counts how often."""

    def __init__(self) -> None:
        self.asked = 0
        self.refuses: LaunchRefused | None = None
        self._made = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM), socket.socket()]
        for sock in self._made:
            sock.bind(("127.0.0.1", 0))
        self._made[0].listen(8)
        self._made[2].listen(8)

    async def listeners(self, sandbox_id: str, generation: int) -> list[int]:
        self.asked += 1
        if self.refuses is not None:
            raise self.refuses
        return [os.dup(sock.fileno()) for sock in self._made]

    def close(self) -> None:
        for sock in self._made:
            sock.close()


class World:
    """A run folder with the sockets of a shard and a writer, and the node's gateways."""

    def __init__(self, folder: Path) -> None:
        self.run = folder
        self.sandbox = folder / "sandbox"
        self.slots = Slots()
        names = (egress.SOCKET.format(shard=0), egress.FDS_SOCKET.format(shard=0), audit.SOCKET)
        kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM)
        self.sockets = [_listen(folder / name, kind) for name, kind in zip(names, kinds, strict=True)]
        ca = Authority(folder / "pki", "outside").ca
        config = {"run": str(folder), "net": "127.0.0.0/8", "resolver": ["127.0.0.1", 9], "ca": str(ca), "ports": []}
        self.shard = Process("egress", config, {"rpc": self.sockets[0], "fds": self.sockets[1]})
        journal = folder / "journal"
        journal.mkdir(mode=0o700)
        self.writer = Process("audit", {"folder": str(journal)}, {"rpc": self.sockets[2]})
        self.nodes: list[Gateways] = []

    def node(self) -> Gateways:
        """A node that begins; another one before it has died."""
        launcher: Any = self.slots
        made = Gateways(self.run, 1, launcher)
        self.nodes.append(made)
        return made

    def gateway(self, node: Gateways, sandbox_id: str = ID, project: str = "default") -> Gateway:
        return node.of(sandbox_id, project, 1, self.sandbox if sandbox_id == ID else self.run / sandbox_id)

    async def served(self) -> list[str]:
        """What the shard says that it serves."""
        reader, writer = await asyncio.open_unix_connection(str(self.run / egress.SOCKET.format(shard=0)))
        connection = Connection(reader, writer)
        reading = asyncio.ensure_future(connection.run())
        try:
            found = await connection.call("gateway.list", Empty(), GatewayList, within=WITHIN_S)
        finally:
            await connection.close()
            await reading
        return [one.sandbox_id for one in found.gateways]

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()
        await self.shard.kill()
        await self.writer.kill()
        self.slots.close()
        for sock in self.sockets:
            sock.close()


class Broker:
    """A broker that is played, because a real one cannot be made to be silent for one sandbox alone. `silent` is for whom it answers nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / broker.SOCKET
        self.speaks = asyncio.Event()
        self.silent: set[str] = set()
        self.asked: list[str] = []
        """For whom, in the order in which it came."""
        self.connections: list[Connection] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(
                reader, writer, {"grant.put": self._put, "grant.revoke": self._revoke, "grant.list": self._list}
            )
            self.connections.append(connection)
            await connection.run()

        self._server = await asyncio.start_unix_server(accept, str(self._path))

    async def _put(self, _: Connection, raw: msgspec.Raw) -> Granted:
        await self._answers(msgspec.msgpack.decode(raw, type=Grant).sandbox_id)
        return Granted(expires_at=time.time() + 900)

    async def _revoke(self, _: Connection, raw: msgspec.Raw) -> Empty:
        await self._answers(msgspec.msgpack.decode(raw, type=GrantRef).sandbox_id)
        return Empty()

    async def _list(self, _: Connection, raw: msgspec.Raw) -> GrantList:
        return GrantList()

    async def _answers(self, sandbox_id: str) -> None:
        self.asked.append(sandbox_id)
        if sandbox_id in self.silent:
            await self.speaks.wait()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            await connection.close()


def _listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(str(path))
    sock.listen(16)
    return sock


async def until(holds: Any, what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.01)
    assert holds(), what


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:  # sockets' paths end at 108 octets
        yield Path(name)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    made = World(folder)
    try:
        await asyncio.gather(made.writer.start(), made.shard.start())
        yield made
    finally:
        await made.close()


@pytest.fixture
async def played(world: World) -> AsyncIterator[Broker]:
    made = Broker(world.run)
    yield made
    await made.close()
