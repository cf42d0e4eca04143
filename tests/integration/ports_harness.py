"""Servers that play a guest's, and a client of ports that speaks in plain octets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dataplane_harness import WITHIN, Plane

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """A TCP server in the sandbox (the agent in host mode shares our loopback); gives its port."""
    tasks: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def head_of(reader: asyncio.StreamReader) -> bytes:
    """Reads the head of one message."""
    return await reader.readuntil(b"\r\n\r\n")


def answering(answer: bytes) -> Handler:
    """A server that reads one head and sends these octets."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(answer)
        await writer.drain()

    return handle


async def echo_heads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that answers each request with its head and its body (of a Content-Length, or chunked as it came)."""
    while True:
        head = await head_of(reader)
        lower = head.lower()
        body = b""
        if b"content-length:" in lower:
            body = await reader.readexactly(int(lower.split(b"content-length:")[1].split(b"\r\n")[0]))
        elif b"transfer-encoding: chunked" in lower:
            while not body.endswith(b"0\r\n\r\n") and b"\r\n0\r\n" not in body:
                body += await reader.read(65_536)
        answer = head + body
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer))
        writer.write(b"" if head.startswith(b"HEAD ") else answer)
        await writer.drain()


def token_of(plane: Plane, *scopes: str, **more: Any) -> str:
    """A token of the sandbox."""
    return plane.token(None, scopes=frozenset(scopes or ("ports",)), **more)


def host_of(plane: Plane, port: int, domain: str = "localhost") -> str:
    """The name of a port."""
    return f"{port}-{plane.sandbox_id}.{domain}"


class Client:
    """One connection to the node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, octets: bytes) -> None:
        """Sends octets."""
        self.writer.write(octets)
        async with asyncio.timeout(WITHIN):
            await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Reads the head of an answer."""
        async with asyncio.timeout(WITHIN):
            lines = (await head_of(self.reader)).decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in fields.items()}

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Reads an answer with a Content-Length."""
        status, fields = await self.head()
        async with asyncio.timeout(WITHIN):
            body = await self.reader.readexactly(int(fields.get("content-length", "0")))
        return status, fields, body

    async def problem(self) -> tuple[int, str]:
        """Reads a problem document: status and code."""
        status, fields, body = await self.answer()
        assert fields["content-type"] == "application/problem+json", body
        return status, str(json.loads(body)["code"])

    async def rest(self) -> bytes:
        """Reads to the end of the connection."""
        async with asyncio.timeout(WITHIN):
            return await self.reader.read()

    async def is_closed(self) -> bool:
        """Whether the node closes the connection without another octet."""
        try:
            return await self.rest() == b""
        except ConnectionError:
            return True


@contextlib.asynccontextmanager
async def connected(plane: Plane) -> AsyncIterator[Client]:
    """A connection to the node."""
    host, port = plane.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def request(
    plane: Plane, port: int, *lines: str, method: str = "GET", target: str = "/", token: str | None = ""
) -> bytes:
    """The octets of a request's head with a good token, or another one, or none."""
    head = [f"{method} {target} HTTP/1.1", f"Host: {host_of(plane, port)}", *lines]
    if token is not None:
        head.append(f"Hatchway-Token: {token or token_of(plane)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1")
