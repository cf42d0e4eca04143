"""The listener itself: clients that take their time, and TLS. In one process, with a guest that is played by sockets."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ports_harness import echo_heads, serving
from tests.support.certificates import Authority
from websockets.asyncio.client import connect

from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.ports import front, sides
from hatchway.node.dataplane.server import DataPlaneServer
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.wire import http_head
from hatchway.wire.node import Configure, TokenKey
from hatchway.wire.tokens import Signer

SANDBOX = "a" * 20
WITHIN = 20.0


class Connection:
    """A `GuestStream` over a socket of ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.closed = asyncio.Event()

    async def read(self) -> bytes:
        return await self.reader.read(65_536)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def write_eof(self) -> None:
        self.writer.write_eof()

    async def wait(self) -> Any:
        await self.closed.wait()
        return SimpleNamespace(exit_code=0, message="")

    async def close(self) -> None:
        self.closed.set()
        self.writer.close()


class Guests:
    """One sandbox, and the link to it."""

    def link_of(self, sandbox_id: str) -> Any:
        return self if sandbox_id == SANDBOX else None

    def state_of(self, sandbox_id: str) -> str | None:
        return "running" if sandbox_id == SANDBOX else None

    def project_of(self, sandbox_id: str) -> str | None:
        return "p" if sandbox_id == SANDBOX else None

    async def dial(self, port: int) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", port))


@contextlib.asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, str]]:
    """A data plane; gives its port, and a token."""
    key = Ed25519PrivateKey.generate()
    checker = TokenChecker()
    checker.configure(Configure(token_keys=(TokenKey(key_id="k", public=key.public_key().public_bytes_raw()),)))
    token, _ = Signer(key, "k").issue(
        project="p", sandbox_id=SANDBOX, generation=1, ttl_s=60, scopes=frozenset({"ports"})
    )
    sock = socket.create_server(("127.0.0.1", 0))
    server = DataPlaneServer(make_app(cast(Any, None), checker, cast(Any, Guests())), [sock], tls=tls)
    port = sock.getsockname()[1]
    await server.start()
    try:
        yield port, token
    finally:
        await server.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http_head, front, sides):
        monkeypatch.setattr(module, "HEAD_WITHIN_S", 0.2)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET / HT", b"HTTP/1.1 400 "),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: ", b"HTTP/1.1 400 "),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nX", b"HTTP/1.1 200 "),
        (b"GET / HTTP/1.1\r\nHost: 80-" + b"a" * 20 + b".localhost\r\nX: ", b"HTTP/1.1 400 "),
    ],
    ids=["nothing", "half a line", "half a head", "half of the second head", "half a head of a port"],
)
async def test_a_head_that_does_not_come_to_its_end(impatient: None, sent: bytes, answer: bytes) -> None:
    async with listening() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(WITHIN):
            got = await reader.read()
        writer.close()
    assert got.startswith(answer)
    assert bool(answer) == bool(got)
    if b"200" in answer:
        assert b"head_too_slow" in got


async def test_the_second_head_of_a_port(impatient: None) -> None:
    async with listening() as (listener, token), serving(echo_heads) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener)
        head = f"GET / HTTP/1.1\r\nHost: {port}-{SANDBOX}.localhost\r\nHatchway-Token: {token}\r\n\r\n".encode()
        writer.write(head + head[:20])
        async with asyncio.timeout(WITHIN):
            got = await reader.read()
        writer.close()
    assert got.startswith(b"HTTP/1.1 200 ")


async def test_a_head_that_comes_octet_by_octet() -> None:
    async with listening() as (listener, token), serving(echo_heads) as port:
        for host, status in ((f"{port}-{SANDBOX}.localhost", b"200"), ("x", b"404")):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener)
            head = f"\r\nGET /nothing HTTP/1.1\r\nhOsT:  {host} \r\nHatchway-Token: {token}\r\n\r\n"
            for octet in head.encode():
                writer.write(bytes([octet]))
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(WITHIN):
                assert (await reader.readline()).split()[1] == status
            writer.close()


async def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "Test")
    certificate, key = authority.issue("127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    trusting.check_hostname = False
    async with listening(server) as (listener, token), serving(echo_heads) as port:
        host = f"{port}-{SANDBOX}.localhost"
        base = f"https://127.0.0.1:{listener}"
        async with httpx.AsyncClient(base_url=base, headers={"host": host}, verify=trusting, timeout=WITHIN) as client:
            opened = await client.get(f"/.hatchway/open?token={token}")
            cookie = opened.headers["set-cookie"]
            assert cookie.startswith(f"__Host-hatchway-port={token}; Path=/; ")
            assert cookie.endswith("; Secure")
            value = cookie.split(";")[0]
            answer = await client.get("/", headers={"cookie": value, "origin": f"https://{host}"})
            assert answer.status_code == 200
            assert "X-Forwarded-Proto: https" in answer.text
            assert token not in answer.text
            client.cookies.clear()
            plain = await client.get("/", headers={"cookie": value.removeprefix("__Host-")})
            assert plain.status_code == 401  # one that a neighbour could have set
        address = f"wss://127.0.0.1:{listener}/v1/sandboxes/{SANDBOX}/ports/{port}/tcp"
        headers = {"authorization": f"Bearer {token}"}
        async with connect(address, ssl=trusting, additional_headers=headers, proxy=None) as connection:
            await connection.send(b"GET / HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(WITHIN):
                assert b"200 OK" in cast(bytes, await connection.recv())
