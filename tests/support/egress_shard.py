"""A shard with an audit writer, and the node's side of both. Import the fixtures `ground` and `shard` by name."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.support.egress_fixtures import PORTS, Ground
from tests.support.egress_process import Process

from hatchway.wire import audit, egress
from hatchway.wire.audit import Query, Records
from hatchway.wire.rpc import Connection

REF = egress.GatewayRef(sandbox_id="sandbox0000000000001", generation=1)


class Shard:
    """A shard and an audit writer, and the node's side of them."""

    def __init__(self, ground: Ground, folder: Path, *, uid: int | None = None) -> None:
        self.ground = ground
        self.run = folder
        self.sockets = {
            "rpc": _listen(folder / egress.SOCKET.format(shard=0), socket.SOCK_STREAM),
            "fds": _listen(folder / egress.FDS_SOCKET.format(shard=0), socket.SOCK_SEQPACKET),
        }
        self.audit_socket = _listen(folder / audit.SOCKET, socket.SOCK_STREAM)
        config = {
            "run": str(folder),
            "net": f"{ground.internet.net}.0/24",
            "resolver": list(ground.internet.resolver),
            "ca": str(ground.internet.authority.ca),
            "ports": list(PORTS),
        }
        if uid is not None:
            config["uid"] = uid
        journal = folder / "journal"
        journal.mkdir(mode=0o700)
        self.process = Process("egress", config, self.sockets)
        self.writer = Process("audit", {"folder": str(journal)}, {"rpc": self.audit_socket})
        self.events: list[str] = []
        self._connections: list[tuple[Connection, asyncio.Task[None]]] = []

    async def connect(self, name: str = egress.SOCKET.format(shard=0)) -> Connection:
        reader, writer = await asyncio.open_unix_connection(str(self.run / name))
        connection = Connection(reader, writer, on_event=lambda event, _: self.events.append(event))
        self._connections.append((connection, asyncio.ensure_future(connection.run())))
        return connection

    async def bring(self, listeners: list[socket.socket], **more: object) -> egress.FdsAnswer:
        """Brings listeners as the node does."""
        ref = egress.Listeners(sandbox_id=REF.sandbox_id, generation=1)
        data = more.get("data", msgspec.json.encode(ref))

        def go() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(20)
                sock.connect(str(self.run / egress.FDS_SOCKET.format(shard=0)))
                socket.send_fds(sock, [data], [one.fileno() for one in listeners])
                return sock.recv(4096)

        return msgspec.json.decode(await asyncio.to_thread(go), type=egress.FdsAnswer)

    async def open(self, connection: Connection, wanted: egress.EgressSpec, **more: object) -> egress.GatewayOpened:
        given = {"sandbox_id": REF.sandbox_id, "project": "p1", "generation": 1, "egress": wanted, **more}
        return await connection.call("gateway.open", egress.GatewaySpec(**given), egress.GatewayOpened, within=20)

    async def records(self) -> list[dict]:
        connection = await self.connect(audit.SOCKET)
        answer = await connection.call("audit.query", Query(limit=500), Records, within=20)
        return [json.loads(line) for line in answer.lines]

    async def close(self) -> None:
        for connection, task in self._connections:
            await connection.close()
            task.cancel()
        await self.process.kill()
        await self.writer.kill()
        for sock in (*self.sockets.values(), self.audit_socket):
            sock.close()


def _listen(path: Path, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(str(path))
    sock.listen(16)
    return sock


@pytest.fixture
async def shard(ground: Ground, tmp_path: Path) -> AsyncIterator[Shard]:
    folder = tmp_path / "run"
    folder.mkdir()
    made = Shard(ground, folder)
    try:
        await asyncio.gather(made.writer.start(), made.process.start())
        yield made
    finally:
        await made.close()
