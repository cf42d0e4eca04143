"""The control role: one process that serves the API until it is told to end."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable

import uvicorn

from hatchway.control.app import make_app
from hatchway.control.config import ControlConfig, NodeAddress, TlsNode, UnixNode
from hatchway.control.keys import ensure_development_key, no_development_keys
from hatchway.control.plane import open_plane
from hatchway.wire.http_head import BoundedHead
from hatchway.wire.metrics import turn

__all__ = ["ControlConfig", "NodeAddress", "TlsNode", "UnixNode", "run", "serve"]

SHUTDOWN_WITHIN_S = 5
BACKLOG = 1024
MAX_FILES = 16_384
"""Open descriptors: connections, where the system's hard limit gives so many."""

log = logging.getLogger(__name__)


def run(
    config: ControlConfig,
    *,
    api: socket.socket | None = None,
    ready: Callable[[], None] | None = None,
    alive: Callable[[], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. `api` is a bound socket to listen on, with `tls`; `ready` is called once requests are taken, `alive`
    every second from then on.

    Makes the development key on the way, except in production. Raises what `Database.open` and `no_development_keys` raise, and `OSError`.
    """
    asyncio.run(serve(config, api=api, ready=ready, alive=alive, tls=tls))


async def serve(
    config: ControlConfig,
    *,
    api: socket.socket | None = None,
    ready: Callable[[], None] | None = None,
    alive: Callable[[], None] | None = None,
    ending: asyncio.Event | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Like `run`, in a loop that is there; it ends by `ending` too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MAX_FILES), hard))
    ending = ending or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    plane = await open_plane(config)
    sock = api or _listen(config.host, config.port)
    try:
        if config.production:
            await no_development_keys(plane.database)
        else:
            await ensure_development_key(plane.database, config.development_key)
        server = _Server(
            uvicorn.Config(
                make_app(plane),
                loop="asyncio",
                http=BoundedHead,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=SHUTDOWN_WITHIN_S,
                timeout_keep_alive=75,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            ),
            ready,
        )
        serving = loop.create_task(server.serve([sock]))
        turning = loop.create_task(turn(alive))
        waiting = loop.create_task(ending.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        # Open event streams end by themselves, so that the server has nobody to wait for.
        plane.ending.set()
        server.end()
        await serving
        waiting.cancel()
        turning.cancel()
    finally:
        sock.close()
        await plane.close()


class _Server(uvicorn.Server):
    """uvicorn, without its signal handlers (they are ours), with a call when it serves, and awake once a second only."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._ready = ready
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Takes no more requests, and ends when those in hand are answered."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ending.wait()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None and self.started:
            self._ready()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
