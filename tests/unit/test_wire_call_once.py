"""One call without an event loop, at a path that no socket address can hold."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from hatchway.domain.errors import Conflict, Unavailable
from hatchway.supervisor.folder import listen_unix
from hatchway.wire.node import Empty
from hatchway.wire.rpc import Connection, call_once


@pytest.fixture
def path(tmp_path: Path) -> Path:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    return deep / "node.sock"


@pytest.fixture
async def heard(path: Path) -> AsyncIterator[list[str]]:
    heard: list[str] = []

    async def done(_: Connection, __: msgspec.Raw) -> object:
        heard.append("done")
        return Empty()

    async def refused(_: Connection, __: msgspec.Raw) -> object:
        raise Conflict("wrong_state", "It is not so.", "Wait.", state="paused")

    async def gone(connection: Connection, _: msgspec.Raw) -> object:
        await connection.close()
        return Empty()

    async def silent(_: Connection, __: msgspec.Raw) -> object:
        await asyncio.Event().wait()
        return Empty()

    methods = {"done": done, "refused": refused, "gone": gone, "silent": silent}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(reader, writer, methods).run()

    server = await asyncio.start_unix_server(serve, sock=listen_unix(path, socket.SOCK_STREAM, os.geteuid()))
    async with server:
        yield heard


async def call(path: Path, method: str, within: float = 20.0) -> None:
    await asyncio.to_thread(call_once, path, method, Empty(), within=within)


async def test_it_is_answered(path: Path, heard: list[str]) -> None:
    await call(path, "done")
    assert heard == ["done"]


@pytest.mark.usefixtures("heard")
async def test_the_error_of_the_peer_is_raised(path: Path) -> None:
    with pytest.raises(Conflict) as raised:
        await call(path, "refused")
    error = raised.value
    assert (error.code, error.cause, error.remedy, error.extra) == (
        "wrong_state",
        "It is not so.",
        "Wait.",
        {"state": "paused"},
    )


@pytest.mark.usefixtures("heard")
async def test_a_peer_that_goes_away_or_says_nothing(path: Path) -> None:
    with pytest.raises(Unavailable) as raised:
        await call(path, "gone")
    assert raised.value.code == "peer_lost"
    with pytest.raises(TimeoutError):
        await call(path, "silent", within=0.1)


async def test_nobody_listens(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await call(path, "done")
