"""The audit role: the one process that appends to the journal, until it is asked to end."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.audit.journal import Journal, Limits
from hatchway.audit.writer import Writer
from hatchway.domain.errors import Unavailable
from hatchway.wire.metrics import turn

LOCK_WITHIN_S = 10.0
"""How long the writer before this one may take to be gone."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditConfig:
    """What the supervisor tells the writer."""

    folder: Path
    """Its own: nobody else may write there, and who may read it may read all that happened."""
    senders: Mapping[int, frozenset[str]]
    """By user id, the names under which it may append: `control node broker egress-0 …`; `*` admits every name."""
    readers: frozenset[int]
    """User ids that may query: the control plane's."""
    limits: Limits = field(default_factory=Limits)


def run(
    config: AuditConfig,
    *,
    rpc: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None = None,
) -> None:
    """Appends until SIGTERM. `rpc` is the listening socket `wire.audit.SOCKET`; `ready` is called when it serves, `alive` every second.

    Raises what `Journal.open` raises, and `OSError` when the disk failed so that nobody knows what it holds: the next start finds out.
    """
    asyncio.run(_run(config, rpc, ready, alive))


async def _run(
    config: AuditConfig, rpc: socket.socket, ready: Callable[[], None], alive: Callable[[], None] | None
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    journal = await _open(config)
    writer = Writer(journal, config.senders, config.readers, head_every_s=config.limits.head_every_s)
    writer.start()
    server = await writer.serve(rpc)
    turning = loop.create_task(turn(alive))
    writer.failed.add_done_callback(lambda _: ended.set())
    ready()
    try:
        await ended.wait()
        if writer.failed.done():
            writer.failed.result()
    finally:
        server.close()
        turning.cancel()
        await writer.close()


async def _open(config: AuditConfig) -> Journal:
    until = asyncio.get_running_loop().time() + LOCK_WITHIN_S
    while True:
        try:
            return await asyncio.to_thread(Journal.open, config.folder, config.limits)
        except Unavailable as error:
            if error.code != "audit_in_use" or asyncio.get_running_loop().time() > until:
                raise
        await asyncio.sleep(0.05)
