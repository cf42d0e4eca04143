"""The egress role: one shard of gateways, until it is asked to end."""

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.audit.client import AuditClient
from hatchway.egress.http.session import HttpSession
from hatchway.egress.service import EgressService
from hatchway.egress.upstream import Dialler, OutConfig
from hatchway.wire import audit
from hatchway.wire.metrics import turn
from hatchway.wire.private_memory import make_private

MAX_FILES = 65_536
"""Two for each flow, and three for each sandbox; a sandbox alone has 256 flows unless its policy says otherwise."""


@dataclass(frozen=True)
class EgressConfig:
    """What the supervisor (or a unit file on a host of its own) tells a shard."""

    shard: int
    run_dir: Path
    node_uids: frozenset[int]
    out: OutConfig = field(default_factory=OutConfig)


def run(
    config: EgressConfig,
    *,
    rpc: socket.socket,
    fds: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None = None,
) -> None:
    """Runs the shard until SIGTERM. `rpc` and `fds` listen (`wire.egress`). `ready` is called when it serves, `alive` every second from then on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MAX_FILES), hard))
    make_private()  # keys of authorities are in it, and what programs say inside TLS
    asyncio.run(_run(config, rpc, fds, ready, alive))


async def _run(
    config: EgressConfig,
    rpc: socket.socket,
    fds: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None,
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    sink = AuditClient(config.run_dir / audit.SOCKET, f"egress-{config.shard}")
    sink.start()
    service = EgressService(Dialler(config.out), HttpSession(), sink)
    server = await service.serve_rpc(rpc, config.node_uids)
    tasks = [
        loop.create_task(service.serve_fds(fds, config.node_uids)),
        loop.create_task(service.judge_forever()),
        loop.create_task(turn(alive)),
    ]
    ready()
    await ended.wait()

    server.close()
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await service.close()
    await sink.close()
