"""Our HTTP server on sockets that somebody else made."""

import asyncio
import socket

import pytest
from starlette.types import Receive, Scope, Send

from hatchway.wire.http_server import Server


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers nobody: only the connection is looked at."""


@pytest.mark.parametrize("number", [0, socket.IPPROTO_TCP])
async def test_a_short_answer_does_not_wait_for_the_peers_acknowledgement(number: int) -> None:
    """However the listening socket was made: asyncio cares for those alone whose protocol was named."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, number) as listening:
        listening.bind(("127.0.0.1", 0))
        serving = asyncio.Event()
        server = Server(_nothing, ready=serving.set)
        task = asyncio.create_task(server.serve([listening]))
        try:
            await serving.wait()
            _, writer = await asyncio.open_connection(*listening.getsockname())
            while not server.server_state.connections:
                await asyncio.sleep(0)
            (accepted,) = server.server_state.connections
            taken = accepted.transport.get_extra_info("socket")  # type: ignore[union-attr]  # ours are all asyncio's
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
        finally:
            server.end()
            await task
