"""Connections to the E2B wrapper's listener are bounded by number: who is idle gives way, and who finds all busy is told in E2B's form."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hatchway.e2b.connections import Room, heads_in
from hatchway.wire.http_server import Server

ASK = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"
WITHIN = 60


class Listener:
    """A listener whose application answers `/held` when it may."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.go_on = asyncio.Event()
        self.held = 0
        self._clients: list[asyncio.StreamWriter] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/held":
            self.held += 1
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Listener"]:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        server = Server(self, protocol=heads_in(self.room))
        task = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(WITHIN):
                yield self
        finally:
            self.go_on.set()
            for one in self._clients:
                one.close()
            server.end()
            await task
            listener.close()

    async def connect(self) -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._clients.append(writer)
        return Client(reader, writer)

    async def has_held(self, number: int) -> None:
        while self.held < number:
            await asyncio.sleep(0.005)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, octets: bytes) -> None:
        self.writer.write(octets)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), fields, await self.reader.readexactly(int(fields["content-length"]))

    async def ask(self, path: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        self.send(ASK % path)
        return await self.answer()

    async def is_cut(self) -> bool:
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


async def test_who_is_idle_gives_way_the_longest_first() -> None:
    async with Listener(Room(most=3)).serving() as here:
        silent, kept, later = await here.connect(), await here.connect(), await here.connect()
        for one in (kept, later):
            assert (await one.ask())[0] == 200
        silent.send(b"GET / HT")  # a head that is not whole is no request
        first, second = await here.connect(), await here.connect()
        for one in (first, second):
            assert (await one.ask())[0] == 200
        assert await silent.is_cut()
        assert await kept.is_cut()
        assert (await later.ask())[0] == 200


async def test_where_all_are_busy_more_are_refused_in_the_form_that_sdks_read() -> None:
    async with Listener(Room(most=2, beyond=1)).serving() as here:
        busy = [await here.connect() for _ in range(2)]
        for one in busy:
            one.send(ASK % b"held")
        await here.has_held(2)
        refused = await here.connect()
        status, fields, body = await refused.ask()
        assert (status, fields["connection"], fields["should-retry"], fields["retry-after"]) == (
            503,
            "close",
            "true",
            "1",
        )
        assert json.loads(body) == {
            "code": 503,
            "message": "There are 2 connections here, all with requests in hand. Try again in a moment.",
        }
        assert await refused.is_cut()
        waiting = await here.connect()
        waiting.send(b"GET ")
        while not here.room._beyond:
            await asyncio.sleep(0.005)
        assert await (await here.connect()).is_cut(), "there is no place to hear it at either"
        here.go_on.set()
        assert [(await one.answer())[0] for one in busy] == [200, 200]
        waiting.send(b"/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await waiting.answer())[0] == 200, "there was room when it asked"


async def test_nothing_is_kept_of_who_has_gone() -> None:
    async with Listener(Room(most=2)).serving() as here:
        for _ in range(3):
            for client in [await here.connect() for _ in range(2)]:
                assert (await client.ask())[0] == 200
                client.writer.close()
        while here.room._idle:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("octets", "status"), [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, 431)]
)
async def test_errors_of_http_itself_have_e2bs_form(octets: bytes, status: int) -> None:
    async with Listener(Room()).serving() as here:
        client = await here.connect()
        client.send(octets)
        told, fields, body = await client.answer()
        assert (told, fields["content-type"]) == (status, "application/json")
        shown = json.loads(body)
        assert set(shown) == {"code", "message"}
        assert shown["code"] == status
