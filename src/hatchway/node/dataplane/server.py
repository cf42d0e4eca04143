"""Runs the data plane on listening sockets, inside the node's event loop."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from typing import Any, cast

import uvicorn

from hatchway.node.dataplane.app import App
from hatchway.node.dataplane.ports.front import front_of
from hatchway.node.dataplane.websocket import MAX_MESSAGE, PING_S, BoundedWebSocket
from hatchway.wire.http_server import QuietServer

log = logging.getLogger(__name__)


class DataPlaneServer:
    """An HTTP server for an `App`; open streams do not hold up its end."""

    def __init__(
        self, app: App, sockets: Sequence[socket.socket], *, tls: ssl.SSLContext | None = None, drain_s: float = 1.0
    ) -> None:
        """`sockets` are bound already (listening or not); `tls` has certificate and key; `drain_s` is how long answers may take to go out."""
        _raise_descriptor_limit()
        self._app = app
        self._sockets = list(sockets)
        self._server = QuietServer(
            uvicorn.Config(
                app,
                http=cast(Any, front_of(app.ports)),  # what makes a protocol is all that is asked of it
                loop="asyncio",
                ws=BoundedWebSocket,
                ws_max_size=MAX_MESSAGE,
                ws_ping_interval=PING_S,
                ws_ping_timeout=None,
                ws_per_message_deflate=False,
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level=logging.CRITICAL,  # the app logs what fails; an answer that is cut off is meant to be
                server_header=False,
                limit_concurrency=app.plane.limits.connections,
                backlog=1024,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain_s)),
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when requests are answered. Raises `OSError` when a socket cannot listen."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(self._sockets))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError("the HTTP server ended while starting")
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Ends all streams where they are, lets short answers go out, and stops. Idempotent."""
        self._app.plane.close()
        if self._task is not None:
            self._server.end()
            await self._task
            self._task = None


def _raise_descriptor_limit() -> None:
    """Every client and every output file takes a descriptor; the soft limit is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
