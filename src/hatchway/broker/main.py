"""The broker role: puts its parts together and runs them until it is asked to end."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable

from hatchway.audit.client import AuditClient
from hatchway.broker.auditing import AuditSink, NoAudit
from hatchway.broker.config import BrokerConfig, LegLimits, Lent, VaultServer
from hatchway.broker.grants import Grants
from hatchway.broker.hardening import harden
from hatchway.broker.legs import Legs
from hatchway.broker.service import BrokerService
from hatchway.broker.sources import Sources
from hatchway.broker.store import MasterKey, Store, read_keys, read_private
from hatchway.domain.errors import Unavailable
from hatchway.wire import handed
from hatchway.wire.metrics import turn

__all__ = ["BrokerConfig", "LegLimits", "Lent", "VaultServer", "run"]

log = logging.getLogger(__name__)


def run(
    config: BrokerConfig,
    *,
    rpc: socket.socket,
    legs: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None = None,
) -> None:
    """Runs the broker until SIGTERM. `rpc` and `legs` listen on Unix sockets; `ready` is called when it serves, `alive` every second from then on.

    Of grants it knows what the node says to this very process: after a restart routes with credentials are denied until then.
    Raises what `Store` and `read_keys` raise: a broker without its key does not come up.
    """
    harden()
    asyncio.run(_run(config, rpc, legs, ready, alive))


async def _run(
    config: BrokerConfig,
    rpc: socket.socket,
    legs_socket: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None,
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    store = await asyncio.to_thread(Store, config.folder, _master_keys(config))
    client = None if config.audit is None else AuditClient(config.audit, "broker")
    audit: AuditSink = NoAudit() if client is None else client
    if client is not None:
        client.start()
    sources = Sources(config, store)
    grants = Grants(sources)
    legs = Legs(config, grants, sources, audit)
    service = BrokerService(config, sources, grants, audit)
    servers = [await service.serve_unix(rpc), await asyncio.start_unix_server(legs.serve, sock=legs_socket)]
    tasks = [loop.create_task(one) for one in (service.expire(), legs.watch(), turn(alive))]
    ready()
    await ended.wait()

    for server in servers:
        server.close()
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await service.close()
    await legs.close()
    sources.close()
    if client is not None:
        await client.close()


def _master_keys(config: BrokerConfig) -> list[MasterKey] | None:
    """The operator's keys, or None where the broker has its own. Raises what `read_keys` does, and `Unavailable("master_key_missing")`."""
    if config.master_key_file is not None:
        try:
            return read_keys(read_private(config.master_key_file), str(config.master_key_file))
        except OSError as error:
            raise _missing(f"{config.master_key_file} cannot be read: {error.strerror}.") from None
    if config.master_key_variable is not None:
        value = handed.value(config.environment, config.master_key_variable)
        if value is None:
            raise _missing(f"The variable {config.master_key_variable} is not set.")
        return read_keys(value, config.master_key_variable)
    return None


def _missing(cause: str) -> Unavailable:
    return Unavailable(
        "master_key_missing", f"The master key is not there. {cause}", "It is where [broker] of the configuration says."
    )
