"""The control role: one process that serves the API until it is told to end."""

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable

from hatchway.control import behalf
from hatchway.control.app import make_app
from hatchway.control.config import ControlConfig, NodeAddress, TlsNode, UnixNode
from hatchway.control.keys import ensure_development_key, no_development_keys
from hatchway.control.plane import open_plane
from hatchway.storage.database import Database
from hatchway.wire.http_server import Server
from hatchway.wire.metrics import turn

__all__ = ["ControlConfig", "NodeAddress", "TlsNode", "UnixNode", "run", "serve"]

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
    e2b: socket.socket | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. `api` is a bound socket to listen on, with `tls`; `ready` is called once requests are taken, `alive`
    every second from then on. `e2b` is the listening socket of the E2B wrapper's user, see `control.behalf`.

    Makes the development key on the way, except in production. Raises what `Database.open` and `no_development_keys` raise, and `OSError`.
    """
    _migrate_apart(config)
    asyncio.run(serve(config, api=api, ready=ready, alive=alive, tls=tls, e2b=e2b))


def _migrate_apart(config: ControlConfig) -> None:
    """Has a child bring the database up to date: what that loads is needed once per release, and 15 MiB of it would stay in this process.

    What is wrong with the database is said by `serve`, which opens it again.
    """
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_open_and_close(config))
        finally:
            os._exit(0)
    os.waitpid(child, 0)


async def _open_and_close(config: ControlConfig) -> None:
    config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ballast = config.ballast_mib << 20
    database = await Database.open(config.database, password=config.database_password, ballast=ballast)
    await database.close()


async def serve(
    config: ControlConfig,
    *,
    api: socket.socket | None = None,
    ready: Callable[[], None] | None = None,
    alive: Callable[[], None] | None = None,
    ending: asyncio.Event | None = None,
    tls: ssl.SSLContext | None = None,
    e2b: socket.socket | None = None,
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
        server = Server(make_app(plane), ready=ready, tls=tls)
        servers = [(server, sock)]
        if e2b is not None:
            wrappers = Server(make_app(plane, on_behalf=True), protocol=behalf.protocol(config.e2b_uid))
            servers.append((wrappers, e2b))
        serving = {loop.create_task(one.serve([on])) for one, on in servers}
        turning = loop.create_task(turn(alive))
        waiting = loop.create_task(ending.wait())
        await asyncio.wait({*serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        # Open event streams end by themselves, so that the server has nobody to wait for.
        plane.ending.set()
        for one, _ in servers:
            one.end()
        await asyncio.gather(*serving)
        waiting.cancel()
        turning.cancel()
    finally:
        sock.close()
        if e2b is not None:
            e2b.close()
        await plane.close()


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
