"""The stream between control plane and node: no call waits for good, whatever the peer or its handler does."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest

from hatchway.domain.errors import Internal, Unavailable
from hatchway.wire import rpc
from hatchway.wire.node import Empty, NodeInfo
from hatchway.wire.rpc import Connection

WITHIN = 10.0


async def pair(handlers: Mapping[str, Callable[..., Awaitable[object]]]) -> tuple[Connection, Connection]:
    """A caller and the one who answers, both reading."""
    ends = socket.socketpair()
    caller = Connection(*await asyncio.open_connection(sock=ends[0]))
    answering = Connection(*await asyncio.open_connection(sock=ends[1]), handlers)
    for end in (caller, answering):
        _reading.add(asyncio.create_task(end.run()))
    return caller, answering


_reading: set[asyncio.Task[None]] = set()


async def test_a_call_whose_handler_was_given_up_ends() -> None:
    doomed: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(3600))

    async def handle(_: Connection, __: msgspec.Raw) -> object:
        await asyncio.shield(doomed)
        return Empty()

    caller, _ = await pair({"one": handle})
    call = asyncio.create_task(caller.call("one", Empty(), Empty))
    await asyncio.sleep(0)
    doomed.cancel()
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(call, WITHIN)
    assert caught.value.code == "peer_lost"
    await caller.close()


async def test_an_answer_of_another_kind_is_an_error_and_the_stream_goes_on() -> None:
    async def handle(_: Connection, __: msgspec.Raw) -> object:
        return 5

    caller, _ = await pair({"one": handle})
    for _ in range(2):
        with pytest.raises(Internal) as caught:
            await caller.call("one", Empty(), NodeInfo, within=WITHIN)
        assert caught.value.code == "bad_message"
        assert caught.value.remedy
    await caller.close()


async def test_a_peer_that_reads_nothing_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CLOSE_WITHIN_S", 0.05)
    ends = socket.socketpair()
    connection = Connection(*await asyncio.open_connection(sock=ends[0]))
    connection.notify("event", b"x" * 4_000_000)
    await asyncio.wait_for(connection.close(), WITHIN)
    ends[1].close()


@pytest.mark.parametrize("octets", [b"\xc1", b"\x93\x01\xa1\xff\xc0", b"\x91" * 100_000, b"\x93\x01\xc0"])
async def test_what_is_no_message_closes_the_stream(octets: bytes) -> None:
    ends = socket.socketpair()
    connection = Connection(*await asyncio.open_connection(sock=ends[0]))
    running = asyncio.create_task(connection.run())
    ends[1].sendall(len(octets).to_bytes(4, "big") + octets)
    await asyncio.wait_for(running, WITHIN)
    call: Any = connection.call("one", Empty(), Empty)
    with pytest.raises(Unavailable):
        await call
    ends[1].close()
