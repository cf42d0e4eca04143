"""The broker as a process: what is left of a grant when it is killed, who may speak with it, and what others can read of it."""

import asyncio
import contextlib
import os
import re
import socket
import ssl
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.broker_world import (
    CANARY,
    HOST,
    PLACEHOLDER,
    SANDBOX,
    WITHIN_S,
    GatewayLeg,
    Site,
    connect,
    get,
    listening,
    ok,
    open_leg,
    server_context,
)
from tests.support.certificates import Authority
from tests.support.egress_fixtures import PORTS, Ground, ground, rule, spec
from tests.support.egress_process import Process
from tests.support.fake_internet import Site as FakeSite

from hatchway.domain.errors import HatchwayError
from hatchway.wire import audit, egress
from hatchway.wire.audit import Query, Records
from hatchway.wire.broker import Binding, Grant, Granted, Injection, Leg, Source, SourceCheck
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

__all__ = ["ground"]

BROKER_UID, CONTROL_UID, NODE_UID, SHARDS = 1_234_501, 1_234_502, 1_234_503, (1_234_504, 1_234_505)


class Alone:
    """A broker in a process of its own, and a site."""

    def __init__(self, folder: Path, **config: object) -> None:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        self.folder = folder
        self.own = folder / "broker"
        self.own.mkdir(mode=0o700)
        self.authority = Authority(folder / "ca", "Upstream authority")
        self.site = Site(server_context(self.authority, HOST))
        self.rpc_path, self.leg_path = folder / "broker.sock", folder / "broker-leg.sock"
        self.sockets = {"rpc": listening(self.rpc_path), "legs": listening(self.leg_path)}
        for path in (self.rpc_path, self.leg_path):
            path.chmod(0o666)
        self._given = {"folder": str(self.own), "ca": str(self.authority.ca), **config}
        if "become" in config:
            os.chown(self.own, int(str(config["become"])), -1)
        self.process = Process("broker", self._given, self.sockets)
        self.said = folder / "said"
        self.process.stderr = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._connections: list[tuple[Connection, asyncio.Task[None]]] = []

    async def start(self) -> None:
        await self.site.start()
        self._given["reachable"] = [["127.0.0.0/8", self.site.port]]
        await self.process.start()

    async def connect(self) -> Connection:
        connection, task = await connect(self.rpc_path)
        self._connections.append((connection, task))
        return connection

    async def put(self, connection: Connection) -> SourceCheck:
        source = Source(project="default", name="github", hosts=(HOST,), value=CANARY)
        return await connection.call("source.put", source, SourceCheck, within=WITHIN_S)

    async def grant(self, connection: Connection) -> Granted:
        binding = Binding(
            credential_id="gh",
            source="github",
            placeholder=PLACEHOLDER,
            inject=(Injection(where="header", name="authorization", format="Bearer {}"),),
            rules=("api",),
            hosts=(HOST,),
            ports=(self.site.port,),
            private=("127.0.0.0/8",),
        )
        grant = Grant(sandbox_id=SANDBOX, project="default", generation=1, revision=1, bindings=(binding,))
        return await connection.call("grant.put", grant, Granted, within=WITHIN_S)

    def head(self) -> Leg:
        return Leg(
            sandbox_id=SANDBOX,
            project="default",
            generation=1,
            credential_id="gh",
            rule="api",
            host=HOST,
            port=self.site.port,
            addresses=("127.0.0.1",),
        )

    async def leg(self) -> GatewayLeg:
        return await open_leg(self.leg_path, self.head())

    def get(self) -> bytes:
        return get(host=f"{HOST}:{self.site.port}")

    async def close(self) -> None:
        for connection, task in self._connections:
            await connection.close()
            task.cancel()
        await self.process.kill()
        await self.site.stop()
        for sock in self.sockets.values():
            sock.close()
        assert self.process.stderr is not None
        os.close(self.process.stderr)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach, which those that pytest makes are not."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        yield Path(name)


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Alone]:
    made = Alone(tmp_path / "alone")
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def test_a_killed_broker_knows_its_sources_and_no_grant(alone: Alone) -> None:
    """Legs end with it. The next process denies until the node has told it again; who connected meanwhile is answered."""
    connection = await alone.connect()
    assert (await alone.put(connection)).available
    await alone.grant(connection)
    leg = await alone.leg()
    await leg.ask(alone.get())
    await alone.process.kill()
    assert await leg.ends()
    waiting = asyncio.ensure_future(alone.leg())
    await asyncio.sleep(0)
    await alone.process.start()
    assert (await waiting).answer.error == "cred_unavailable"
    assert len(alone.site.heads) == 1
    connection = await alone.connect()
    granted = await alone.grant(connection)
    assert granted.unavailable == {}
    leg = await alone.leg()
    await leg.ask(alone.get())
    assert CANARY in alone.site.heads[1]
    leg.close()


async def test_it_ends_in_good_order(alone: Alone) -> None:
    connection = await alone.connect()
    await alone.put(connection)
    await alone.grant(connection)
    leg = await alone.leg()
    await leg.ask(alone.get())
    assert await alone.process.end() == 0
    assert await leg.ends()


def as_user(uid: int, path: Path, octets: bytes) -> bytes:
    """What a process of this user gets that sends something to a socket."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            with socket.socket(socket.AF_UNIX) as sock, address(path) as at:
                sock.settimeout(WITHIN_S)
                sock.connect(at)
                with contextlib.suppress(OSError):
                    sock.sendall(octets)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                    while data := sock.recv(65_536):
                        os.write(writing, data)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        got = file.read()
    os.waitpid(pid, 0)
    return got


def framed(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to be several users: that peers are told apart is not shown"
)


@needs_root
async def test_each_user_may_do_its_own_part_only(open_folder: Path) -> None:
    alone = Alone(open_folder, become=BROKER_UID, control=[CONTROL_UID], node=[NODE_UID], egress=[*SHARDS])
    source = (1, "source.put", Source(project="default", name="github", hosts=(HOST,), value=CANARY))
    grant = (1, "grant.put", Grant(sandbox_id=SANDBOX, project="default", generation=1, revision=1, bindings=()))
    try:
        await alone.start()

        async def told(uid: int, path: Path, message: object) -> bytes:
            return await asyncio.to_thread(as_user, uid, path, framed(message))

        # The answer is cut off where the sender has closed its half; so a call that works is made by its effect.
        assert b"unknown_method" in await told(CONTROL_UID, alone.rpc_path, grant)
        assert b"unknown_method" in await told(NODE_UID, alone.rpc_path, source)
        for uid in (SHARDS[0], 65_534, BROKER_UID):
            assert await told(uid, alone.rpc_path, source) == b""
            assert await told(uid, alone.rpc_path, grant) == b""
        served = SHARDS[egress.shard_of("default", 2)]
        foreign = SHARDS[1 - egress.shard_of("default", 2)]
        assert b"cred_unavailable" in await told(served, alone.leg_path, alone.head())
        for uid in (foreign, CONTROL_UID, NODE_UID, 65_534):
            assert b"cred_not_bound" in await told(uid, alone.leg_path, alone.head())
    finally:
        await alone.close()


@needs_root
async def test_others_of_its_user_cannot_read_it_and_it_leaves_no_core(open_folder: Path) -> None:
    alone = Alone(open_folder, become=BROKER_UID)
    try:
        await alone.start()
        proc = Path(f"/proc/{alone.process.pid}")
        assert re.search(r"Max core file size +0 +0 ", (proc / "limits").read_text())
        assert re.search(rf"Uid:\s+{BROKER_UID}\s", (proc / "status").read_text())
        assert (proc / "mem").stat().st_uid == 0  # not its own user's: it cannot be dumped
        pid = os.fork()
        if pid == 0:
            readable = 0
            os.setresuid(BROKER_UID, BROKER_UID, BROKER_UID)
            for name in ("mem", "environ", "maps"):
                with contextlib.suppress(OSError):
                    os.read(os.open(proc / name, os.O_RDONLY), 1)
                    readable += 1
            os._exit(readable)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        await alone.close()


def memory_of(pid: int) -> bytes:
    """All that can be read of a process's memory."""
    found = bytearray()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        for line in maps:
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line:
                continue
            with contextlib.suppress(OSError, ValueError, OverflowError):
                mem.seek(begin)
                found += mem.read(end - begin)
    return bytes(found)


@needs_root
async def test_a_canary_is_in_no_log_and_no_error_whatever_fails(alone: Alone) -> None:
    connection = await alone.connect()
    await alone.put(connection)
    wrong = msgspec.msgpack.encode({"project": "default", "name": CANARY, "hosts": [HOST], "value": CANARY.decode()})
    with pytest.raises(HatchwayError) as error:
        await connection.call("source.put", msgspec.Raw(wrong), SourceCheck, within=WITHIN_S)
    assert CANARY.decode() not in str(error.value.as_dict())
    for value in (CANARY + b"\r\n", CANARY * 200, b"\0" + CANARY):
        source = Source(project="default", name="github", hosts=(HOST,), value=value, version=2)
        with pytest.raises(HatchwayError) as error:
            await connection.call("source.put", source, SourceCheck, within=WITHIN_S)
        assert "C4n4ry" not in str(error.value.as_dict())
    await alone.grant(connection)
    alone.site.answer = lambda head, body: (
        b"HTTP/1.1 200 " + CANARY + b"\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc"
    )
    leg = await alone.leg()
    await leg.ask(alone.get())
    leg.close()
    alone.site.answer = lambda head, body: b"nonsense " + CANARY + b"\r\n\r\n"
    leg = await alone.leg()
    await leg.ask(alone.get())
    leg.close()
    await alone.process.end()
    said = alone.said.read_bytes()
    assert b"C4n4ry" not in said
    assert CANARY in alone.site.heads[0]


HANDING = """
import sys
from hatchway.wire import handed
fd = handed.hand_over({"FD": ["TEAM_TOKEN", "NOT_THERE"], "OTHER": ["X"]})["FD"] if sys.argv[1] == "hand" else None
print("ready", fd is not None, flush=True)
sys.stdin.readline()
print(len(handed.value(fd, "TEAM_TOKEN") or b""), flush=True)
"""


@needs_root
@pytest.mark.parametrize("way", ["hand", "keep"])
async def test_a_variable_that_is_handed_over_is_in_no_memory_that_a_role_could_inherit(way: str) -> None:
    """Of a program that keeps it in its environment the memory has it, so that the search is one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HANDING, way),
        env={**os.environ, "TEAM_TOKEN": CANARY.decode()},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WITHIN_S):
            assert (await process.stdout.readline()).split() == [b"ready", str(way == "hand").encode()]
            assert (CANARY in memory_of(process.pid)) == (way == "keep")
            process.stdin.write(b"\n")
            assert await process.stdout.readline() == b"%d\n" % len(CANARY)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# -- the whole chain


class Chain:
    """A guest's network, a shard, a broker and an audit writer, each a process; behind them the fake internet."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self.ground = ground
        self.folder = folder
        net = f"{ground.internet.net}.0/24"
        ca = str(ground.internet.authority.ca)
        rpc, legs = listening(folder / "broker.sock"), listening(folder / "broker-leg.sock")
        journal, own = folder / "journal", folder / "broker"
        journal.mkdir(mode=0o700)
        own.mkdir(mode=0o700)
        self.audit_socket = listening(folder / audit.SOCKET)
        shard = {
            "rpc": listening(folder / "egress-0.sock"),
            "fds": socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET),
        }
        shard["fds"].bind(str(folder / "egress-0.fds"))
        shard["fds"].listen(4)
        self.sockets = [rpc, legs, self.audit_socket, *shard.values()]
        self.audit = Process("audit", {"folder": str(journal)}, {"rpc": self.audit_socket})
        self.broker = Process(
            "broker",
            {"folder": str(own), "ca": ca, "reachable": [[net, 443]], "audit": str(folder / audit.SOCKET)},
            {"rpc": rpc, "legs": legs},
        )
        self.shard = Process(
            "egress",
            {
                "run": str(folder),
                "net": net,
                "resolver": list(ground.internet.resolver),
                "ca": ca,
                "ports": list(PORTS),
                "broker": str(folder / "broker-leg.sock"),
            },
            shard,
        )
        self._connections: list[tuple[Connection, asyncio.Task[None]]] = []

    async def start(self) -> None:
        await asyncio.gather(self.audit.start(), self.broker.start(), self.shard.start())

    async def connect(self, name: str) -> Connection:
        connection, task = await connect(self.folder / name)
        self._connections.append((connection, task))
        return connection

    async def open(self, wanted: egress.EgressSpec, **more: object) -> egress.GatewayOpened:
        ref = egress.Listeners(sandbox_id=SANDBOX, generation=1)
        listeners = self.ground.slot.listeners()

        def bring() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(WITHIN_S)
                sock.connect(str(self.folder / "egress-0.fds"))
                socket.send_fds(sock, [msgspec.json.encode(ref)], [one.fileno() for one in listeners])
                return sock.recv(4096)

        assert isinstance(
            msgspec.json.decode(await asyncio.to_thread(bring), type=egress.FdsAnswer), egress.ListenersTaken
        )
        given = egress.GatewaySpec(sandbox_id=SANDBOX, project="default", generation=1, egress=wanted, **more)  # type: ignore[arg-type]
        return await (await self.connect("egress-0.sock")).call(
            "gateway.open", given, egress.GatewayOpened, within=WITHIN_S
        )

    async def close(self) -> None:
        for connection, task in self._connections:
            await connection.close()
            task.cancel()
        for process in (self.shard, self.broker, self.audit):
            await process.kill()
        for sock in self.sockets:
            sock.close()


@pytest.fixture
async def chain(ground: Ground, tmp_path: Path) -> AsyncIterator[Chain]:
    folder = tmp_path / "run"
    folder.mkdir()
    made = Chain(ground, folder)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


CREDENTIAL = {
    "id": "gh",
    "source": "store:github",
    "inject": [{"where": "header", "name": "authorization", "format": "Bearer {}"}],
    "expose": {"env": "GITHUB_TOKEN"},
}


async def test_c_rows_a_guest_uses_a_secret_that_no_process_but_the_broker_has(chain: Chain, ground: Ground) -> None:
    """From a connection of the guest through interception and the broker to a site that echoes all it gets, and back."""

    async def mirror(site: FakeSite, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await site.note(head)
                writer.write(ok(head, b"x-echo: " + CANARY))
                await writer.drain()

    site = await ground.internet.site(HOST, port=443, handler=mirror, tls=True)
    evil = await ground.internet.site("evil.example", port=443, handler=mirror, tls=True, number=11)
    control, node = await chain.connect("broker.sock"), await chain.connect("broker.sock")
    source = Source(project="default", name="github", hosts=(HOST,), value=CANARY)
    assert (await control.call("source.put", source, SourceCheck, within=WITHIN_S)).available
    binding = Binding(
        credential_id="gh",
        source="github",
        placeholder=PLACEHOLDER,
        inject=(Injection(where="header", name="authorization", format="Bearer {}"),),
        rules=("api",),
        hosts=(HOST,),
        private=("127.0.0.0/8",),
    )
    grant = Grant(sandbox_id=SANDBOX, project="default", generation=1, revision=1, bindings=(binding,))
    wanted = spec(
        rule("api", HOST, credentials=["gh"], client_auth="placeholder_only"),
        rule("evil", "evil.example", client_auth="allow"),
        credentials=[CREDENTIAL],
    )
    placeholders = (egress.CredentialSpec(credential_id="gh", placeholder=PLACEHOLDER),)
    opened = await chain.open(wanted, credentials=placeholders)

    async def ask(host: str, *fields: str) -> bytes:
        where = await ground.resolve(host)
        sock = ground.slot.guest_socket()
        async with asyncio.timeout(WITHIN_S):
            await asyncio.get_running_loop().sock_connect(sock, (where, 443))
            context = ssl.create_default_context(cadata=opened.ca_certificate)
            reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=host)
            writer.write(
                "\r\n".join(["GET /v1/user HTTP/1.1", f"Host: {host}", *fields, "Connection: close", "", ""]).encode()
            )
            answer = await reader.read()
        writer.close()
        return answer

    bearer = f"Authorization: Bearer {PLACEHOLDER}"
    before = await ask(HOST, bearer)
    assert b"cred_unavailable" in before
    assert site.arrived == b""
    await node.call("grant.put", grant, Granted, within=WITHIN_S)
    answer = await ask(HOST, bearer)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
    assert b"authorization: Bearer " + CANARY in site.arrived
    assert CANARY not in answer
    assert b"*" * len(CANARY) in answer
    assert PLACEHOLDER.encode() not in site.arrived

    refused = await ask("evil.example", bearer)
    assert not refused.startswith(b"HTTP/1.1 200 ")
    assert evil.arrived == b""

    assert CANARY in memory_of(chain.broker.pid)  # so that what follows can find something
    for process in (chain.shard, chain.audit):
        memory = memory_of(process.pid)
        assert len(memory) > 1_000_000
        assert CANARY not in memory
    assert PLACEHOLDER.encode() in memory_of(chain.shard.pid)
    journal = await (await chain.connect(audit.SOCKET)).call("audit.query", Query(limit=500), Records, within=WITHIN_S)
    assert any(b"credential.used" in line for line in journal.lines)
    assert not any(b"C4n4ry" in line for line in journal.lines)

    await chain.broker.kill()
    arrived = site.arrived
    waiting = asyncio.ensure_future(ask(HOST, bearer))  # its leg waits for the next broker, which knows of no grant
    await chain.broker.start()
    assert b"cred_unavailable" in await waiting
    assert site.arrived == arrived
    node = await chain.connect("broker.sock")
    await node.call("grant.put", grant, Granted, within=WITHIN_S)
    assert (await ask(HOST, bearer)).startswith(b"HTTP/1.1 200 OK\r\n")
