"""The E2B role: one process that serves until it is told to end."""

import asyncio
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable

from hatchway.e2b import identity
from hatchway.e2b.app import make_app
from hatchway.e2b.config import E2bConfig
from hatchway.e2b.connections import MOST, Room, heads_in
from hatchway.e2b.errors import E2bError
from hatchway.e2b.reaching import Reaching
from hatchway.e2b.wrapper import Wrapper
from hatchway.wire.http_server import Server
from hatchway.wire.metrics import turn

__all__ = ["E2bConfig", "run", "serve"]

MAX_FILES = 65_536
"""Open descriptors: connections, where the system's hard limit gives so many. Those of all places (`places`), to the control plane and of clients that wait."""


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record of the HTTP server says something: that an answer was cut off, because what it was of has ended, is meant to be."""
    return record.exc_info is None or not isinstance(record.exc_info[1], E2bError)


def run(
    config: E2bConfig,
    *,
    listener: socket.socket,
    ready: Callable[[], None] | None = None,
    alive: Callable[[], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serves on `listener`, with `tls`, until SIGTERM or SIGINT; `ready` is called once requests are taken, `alive` every second from then on.

    Raises `OSError`, and `Forbidden("secret_too_short")`.
    """
    asyncio.run(serve(config, listener=listener, ready=ready, alive=alive, tls=tls))


async def serve(
    config: E2bConfig,
    *,
    listener: socket.socket,
    ready: Callable[[], None] | None = None,
    alive: Callable[[], None] | None = None,
    ending: asyncio.Event | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Like `run`, in a loop that is there; it ends by `ending` too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    logging.getLogger("uvicorn.error").addFilter(is_news)
    logging.getLogger("httpx").setLevel(
        logging.WARNING
    )  # it writes a line for each request, which the control plane has too
    ending = ending or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    secret = identity.load(config.folder) if config.secret is None else config.secret
    wrapper = Wrapper(
        config=config, identity=identity.Identity(secret), reaching=Reaching(config.control, config.data_ca)
    )
    app = make_app(wrapper)
    heads = heads_in(Room(min(MOST, files // 4)))
    server = Server(app, ready=ready, tls=tls, protocol=heads, upgrades=app.upgrades)
    serving = loop.create_task(server.serve([listener]))
    turning = loop.create_task(turn(alive))
    waiting = loop.create_task(ending.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        server.end()
        await serving
    finally:
        waiting.cancel()
        turning.cancel()
        listener.close()
        await wrapper.reaching.close()
