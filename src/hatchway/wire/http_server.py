"""An HTTP server of ours: uvicorn with the bounds of `http_head`, awake once a second only, and without its own handling of signals."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from hatchway.wire.http_head import BoundedHead

SHUTDOWN_WITHIN_S = 5
BACKLOG = 1024
KEEP_ALIVE_S = 75
"""How long a connection on which nothing happens stays."""


class QuietServer(uvicorn.Server):
    """Leaves the process's signals alone, whose role handles them, and wakes once a second only, for the clock in its answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Takes no more requests, and ends when those in hand are answered."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Waits for the end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ending.wait()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `end` is called. The sockets stay open."""
        for sock in sockets or ():
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                # Handed down to what is accepted. asyncio sets it only where the protocol number was named when the socket was
                # made; without it an answer in two writes waits 40 ms for the peer's delayed acknowledgement.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._serve(sockets)


class Server(QuietServer):
    """Serves one application on sockets that are there."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ready: Callable[[], None] | None = None,
        tls: ssl.SSLContext | None = None,
        protocol: type[BoundedHead] = BoundedHead,
        upgrades: Callable[..., asyncio.Protocol] | None = None,
    ) -> None:
        """`ready` is called once requests are taken. `upgrades` makes what takes over a connection whose client asks for a WebSocket, as uvicorn's `ws`."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=protocol,
                ws=cast(Any, upgrades) or "none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=SHUTDOWN_WITHIN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes requests from now on."""
        await super().startup(sockets)
        if self._ready is not None and self.started:
            self._ready()
