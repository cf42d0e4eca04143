"""Connections to the nodes: one link each, which reconnects for as long as the process lives.

A link that lost its node tries again within `RETRY_LOCAL_S` (a restarted node is picked up at once), a remote one more slowly.
Calls of a link without a connection fail with `node_unreachable`; whoever can wait asks `wait` first.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.control import metrics
from hatchway.control.config import NodeAddress, UnixNode
from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.wire.fault_points import reached
from hatchway.wire.node import METHODS, Configure, Empty, Event, NodeInfo
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

T = TypeVar("T")

RETRY_LOCAL_S = 0.1
RETRY_REMOTE_S = 1.0
RETRY_AT_MOST_S = 10.0
CONNECT_WITHIN_S = 10.0
GREET_WITHIN_S = 10.0
CONFIGURE_WITHIN_S = 5.0
LOST_CODES = frozenset({"peer_lost", "node_unreachable", "busy"})
"""Codes of errors after which a verb can be sent again: the node may have done it or not."""

log = logging.getLogger(__name__)


def node_timeout() -> Unavailable:
    """The error of a request whose node did not answer in time."""
    return Unavailable("node_timeout", "The node did not answer in time.", "Try again when it is less busy.")


class NodeLink:
    """One node, connected or not. `info` is None until it was connected once."""

    def __init__(self, address: NodeAddress) -> None:
        self.address = address
        self.info: NodeInfo | None = None
        self.lost_at: float | None = time.time()
        """Since when it is unreachable; None while it is connected."""
        self.greeted_at: float | None = None
        """When it last answered a greeting (monotonic)."""
        self.configured: Configure | None = None
        """What the node was told last on this connection."""
        self.configuring = asyncio.Lock()
        self._connection: Connection | None = None

    @property
    def node_id(self) -> str | None:
        """The node's id; None until it was connected once."""
        return None if self.info is None else self.info.node_id

    @property
    def connected(self) -> bool:
        """Whether calls can be made."""
        return self._connection is not None

    async def call(self, method: str, params: object, result: type[T], *, within: float) -> T:
        """Calls the node. Raises what it answers, `Unavailable` with a code of `LOST_CODES`, or `TimeoutError` after `within` seconds."""
        connection = self._connection
        if connection is None:
            raise unreachable(self.node_id or str(self.address))
        assert METHODS[method][1] is result
        began, outcome = time.perf_counter(), "ok"
        try:
            reached("call", method)
            answer = await connection.call(method, params, result, within=within)
            reached("answered", method)
            return answer
        except BaseException as error:
            outcome = type(error).__name__  # the code of an error is what a node says; a label must not be
            raise
        finally:
            metrics.NODE_CALLS.labels(method, outcome).observe(time.perf_counter() - began)

    async def drop(self) -> None:
        """Gives up a connection on which nothing is answered: the node is unreachable until it greets again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            log.warning("node %s does not answer", self.node_id)
            await connection.close()


def unreachable(node: str) -> Unavailable:
    """The error of a node that is not connected."""
    return Unavailable(
        "node_unreachable", f"The node {node} is not connected.", "It is being reconnected; try again in a moment."
    )


class Nodes:
    """All links. `start` connects, `close` ends; the callbacks are the reconciler's."""

    def __init__(self, addresses: tuple[NodeAddress, ...], configure: Callable[[], Awaitable[Configure]]) -> None:
        self.links = tuple(NodeLink(address) for address in addresses)
        self.on_connected: Callable[[NodeLink], Awaitable[None]] | None = None
        self.on_lost: Callable[[NodeLink], Awaitable[None]] | None = None
        self.on_event: Callable[[NodeLink, Event], None] | None = None
        self._configure = configure
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to connect to every node."""
        for link in self.links:
            self._tasks.append(asyncio.get_running_loop().create_task(self._keep(link), name=f"node {link.address}"))

    async def close(self) -> None:
        """Drops every connection; nodes go on without us."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def find(self, node_id: str) -> NodeLink | None:
        """The link to a node, when it was connected once since this process started."""
        return next((link for link in self.links if link.node_id == node_id), None)

    def is_connected(self, node_id: str) -> bool:
        """Whether the node is there now."""
        link = self.find(node_id)
        return link is not None and link.connected

    def ready(self) -> list[NodeLink]:
        """The connected links, in the order of the configuration."""
        return [link for link in self.links if link.connected]

    async def wait(self, node_id: str | None, *, within: float) -> NodeLink:
        """Waits for a node, or for any, to be connected. Raises `Unavailable("node_unreachable")` after `within` seconds."""

        def found() -> NodeLink | None:
            return next((link for link in self.ready() if node_id is None or node_id == link.node_id), None)

        link = found()
        if link is not None:
            return link
        try:
            async with asyncio.timeout(within), self._changed:
                while link is None:
                    await self._changed.wait()
                    link = found()
        except TimeoutError:
            raise unreachable(node_id or "of this installation") from None
        return link

    async def configure(self, link: NodeLink) -> None:
        """Tells a connected node what changed of its configuration, if anything did. A node that does not take it is connected anew."""
        async with link.configuring:
            wanted = await self._configure()
            if wanted == link.configured or not link.connected:
                return
            try:
                await link.call("node.configure", wanted, Empty, within=CONFIGURE_WITHIN_S)
            except (HatchwayError, TimeoutError) as error:
                # It learns it when it is connected again, before anything else.
                log.warning("node %s was not configured: %s", link.node_id, error)
                await link.drop()
            else:
                link.configured = wanted

    async def configure_all(self) -> None:
        """Tells every connected node, and returns when each was told or given up. A revocation holds on the nodes from then on."""
        await asyncio.gather(*(self.configure(link) for link in self.ready()))

    async def _keep(self, link: NodeLink) -> None:
        pause = RETRY_LOCAL_S if isinstance(link.address, UnixNode) else RETRY_REMOTE_S
        told, failures = False, 0
        while True:
            began = time.monotonic()
            try:
                reader, writer = await self._open(link.address)
                await self._serve(link, reader, writer)
                told, failures = False, 0
            except (OSError, ssl.SSLError, TimeoutError, HatchwayError) as error:
                failures += 1
                if not told:
                    log.warning("node %s: %s", link.address, error)
                    told = True
            except Exception:  # a link that gave up would make its node unreachable for good
                failures += 1
                log.exception("node %s: the connection failed", link.address)
            # A node that is away is picked up at once when it is back; one that is there and fails us is not asked ten times a second.
            greeted = link.greeted_at is not None and link.greeted_at > began
            await asyncio.sleep(min(pause * 2 ** min(failures, 10), RETRY_AT_MOST_S) if greeted else pause)

    async def _serve(self, link: NodeLink, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From a fresh connection to its end."""

        def on_event(_method: str, params: msgspec.Raw) -> None:
            try:
                event = msgspec.msgpack.decode(params, type=Event)
            except msgspec.MsgspecError as error:
                log.warning("node %s sent an event that cannot be read: %s", link.address, error)
                return
            if self.on_event is not None:
                self.on_event(link, event)

        connection = Connection(reader, writer, on_event=on_event)
        reading = asyncio.get_running_loop().create_task(connection.run())
        greeted = False
        try:
            info = await connection.call("node.info", Empty(), NodeInfo, within=GREET_WITHIN_S)
            other = self.find(info.node_id)
            if other is not None and other is not link:
                raise Unavailable(
                    "node_twice", f"The node {info.node_id} is configured twice.", "Remove one of its addresses."
                )
            async with link.configuring:
                link.configured = await self._configure()
                await connection.call("node.configure", link.configured, Empty, within=GREET_WITHIN_S)
            link.info, link.lost_at, link._connection = info, None, connection
            greeted, link.greeted_at = True, time.monotonic()
            log.info("node %s connected: %s", info.node_id, link.address)
            async with self._changed:
                self._changed.notify_all()
            await self.configure(link)  # what was revoked after it was told, and before it was known to be there
            if self.on_connected is not None:
                await self.on_connected(link)
            await connection.closed.wait()
        finally:
            link._connection = None
            link.lost_at = link.lost_at or time.time()
            await connection.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if greeted and self.on_lost is not None and not _is_ending():
                log.warning("node %s lost", link.node_id)
                await self.on_lost(link)

    async def _open(self, address: NodeAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(CONNECT_WITHIN_S):
            if isinstance(address, UnixNode):
                reader, writer = await _open_unix(address.path)
                try:
                    _check_peer(writer, address.uid)
                except BaseException:
                    writer.close()
                    raise
                return reader, writer
            return await asyncio.open_connection(
                address.host,
                address.port,
                ssl=client_tls(address.certificate, address.key, address.ca),
                server_hostname=address.server_name,
            )


def client_tls(certificate: os.PathLike[str], key: os.PathLike[str], ca: os.PathLike[str]) -> ssl.SSLContext:
    """TLS 1.3 with our certificate, trusting the installation's authority and nothing else. Raises `OSError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(ca)
    context.load_cert_chain(certificate, key)
    return context


async def _open_unix(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with address(path) as reached:
        return await asyncio.open_unix_connection(reached)


def _check_peer(writer: asyncio.StreamWriter, uid: int | None) -> None:
    sock = writer.get_extra_info("socket")
    _pid, peer, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    # Root, too: the supervisor binds the socket, and is its peer until the node listens on it.
    admitted = {0, os.geteuid() if uid is None else uid}
    if peer not in admitted:
        raise Unavailable(
            "node_is_someone_else",
            f"The user {peer} listens on the node's socket.",
            "Check the owner of the run folder.",
        )


def _is_ending() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def quietly(call: Awaitable[object]) -> None:
    """Awaits a call whose failure is repaired by the next reconciliation."""
    with contextlib.suppress(HatchwayError, TimeoutError):
        await call
