"""What the node asks of a shard: the methods of `wire.egress`, and the socket by which it brings listeners."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hatchway.domain.errors import Conflict, NotFound
from hatchway.egress.auditing import AuditSink
from hatchway.egress.gateway import Gateway
from hatchway.egress.http.seam import Http
from hatchway.egress.upstream import Dialler
from hatchway.wire import egress as wire
from hatchway.wire.message import Empty
from hatchway.wire.rpc import Connection, Handler

MAX_DATAGRAM = 4096
MAX_FDS_PEERS = 16
MAX_HELD = 256
"""Sandboxes whose listeners wait for their `gateway.open`."""
HELD_S = 60.0
ACCEPT_PAUSE_S = 0.5
JUDGE_EVERY_S = 1.0
"""How often open flows are judged although no policy changed: rules end at their time."""

_PEER = struct.Struct("3i")
_TAKEN = msgspec.json.encode(wire.ListenersTaken())
_WANTED = len(wire.LISTENERS)

log = logging.getLogger(__name__)


class EgressService:
    """One shard: its gateways, and the node that tells it which."""

    def __init__(self, dialler: Dialler, http: Http, sink: AuditSink) -> None:
        self._dialler = dialler
        self._http = http
        self._sink = sink
        self._gateways: dict[str, Gateway] = {}
        self._held: dict[tuple[str, int], tuple[list[socket.socket], asyncio.TimerHandle]] = {}
        self._nodes: set[Connection] = set()
        self._fds_peers: set[asyncio.Task[None]] = set()
        methods: dict[str, Callable[[Any], Awaitable[object]]] = {
            "gateway.open": self._open,
            "gateway.policy": self._policy,
            "gateway.cut": self._cut,
            "gateway.close": self._close,
            "gateway.status": self._status,
            "gateway.list": self._list,
            "gateway.asks": self._asks,
            "gateway.answer": self._answer,
        }
        self._handlers: dict[str, Handler] = {
            name: _decoding(wire.METHODS[name][0], method) for name, method in methods.items()
        }

    # -- sockets

    async def serve_rpc(self, listener: socket.socket, uids: frozenset[int]) -> asyncio.Server:
        """Serves peers of these users on a listening Unix socket."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not _is_let_in(writer.get_extra_info("socket"), uids):
                writer.close()
                return
            connection = Connection(reader, writer, self._handlers)
            self._nodes.add(connection)
            try:
                await connection.run()
            finally:
                self._nodes.discard(connection)

        return await asyncio.start_unix_server(accept, sock=listener)

    async def serve_fds(self, listener: socket.socket, uids: frozenset[int]) -> None:
        """Takes listeners from peers of these users, until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    log.warning("the node cannot be let in: %s", error.strerror)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if not _is_let_in(sock, uids) or len(self._fds_peers) >= MAX_FDS_PEERS:
                    sock.close()
                    continue
                task = loop.create_task(self._serve_fds_peer(sock))
                self._fds_peers.add(task)
                task.add_done_callback(self._fds_peers.discard)
        finally:
            for task in self._fds_peers:
                task.cancel()

    async def _serve_fds_peer(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            while True:
                await _readable(sock)
                data, ancillary, flags, _ = sock.recvmsg(
                    MAX_DATAGRAM, socket.CMSG_SPACE(_WANTED * 2 * 4), socket.MSG_CMSG_CLOEXEC
                )
                fds = [
                    fd
                    for level, kind, payload in ancillary
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
                    for (fd,) in struct.iter_unpack("i", payload[: len(payload) - len(payload) % 4])
                ]
                if not data:
                    return
                sock.send(self._take(data, fds, truncated=bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))))
        except OSError as error:
            log.info("the node's socket for listeners: %s", error.strerror)
        finally:
            sock.close()

    def _take(self, data: bytes, fds: list[int], *, truncated: bool) -> bytes:
        """Takes one datagram; its descriptors are held, or closed."""
        held: list[socket.socket] = []
        try:
            listeners = msgspec.json.decode(data, type=wire.Listeners)
            if truncated or len(fds) != _WANTED:
                raise ValueError(f"{_WANTED} descriptors belong to it")
            while fds:
                held.append(socket.socket(fileno=fds[0]))
                fds.pop(0)
            _check(held)
            if len(self._held) >= MAX_HELD and (listeners.sandbox_id, listeners.generation) not in self._held:
                raise ValueError("too many sandboxes' listeners wait to be opened")
        except (ValueError, OSError) as error:  # msgspec's errors are ValueErrors
            for fd in fds:
                os.close(fd)
            for sock in held:
                sock.close()
            return msgspec.json.encode(wire.ListenersRefused(message=str(error)))
        key = (listeners.sandbox_id, listeners.generation)
        self._drop(key)
        self._held[key] = (held, asyncio.get_running_loop().call_later(HELD_S, self._drop, key))
        return _TAKEN

    def _drop(self, key: tuple[str, int]) -> None:
        held, timer = self._held.pop(key, (None, None))
        if held is not None and timer is not None:
            timer.cancel()
            for sock in held:
                sock.close()

    def _listeners(self, sandbox_id: str, generation: int) -> list[socket.socket] | None:
        held, timer = self._held.pop((sandbox_id, generation), (None, None))
        if timer is not None:
            timer.cancel()
        return held

    # -- methods

    async def _open(self, spec: wire.GatewaySpec) -> wire.GatewayOpened:
        known = self._gateways.get(spec.sandbox_id)
        if known is not None and known.generation > spec.generation:
            raise Conflict(
                "stale_generation",
                f"Generation {known.generation} of the sandbox is served here, which is newer than {spec.generation}.",
                "Whoever asks has been replaced.",
            )
        listeners = self._listeners(spec.sandbox_id, spec.generation)
        if known is not None and known.generation == spec.generation:
            opened = known.change(spec.egress, spec.credentials)
            if listeners is not None:
                known.listen(listeners)
            return opened
        if listeners is None:
            raise Conflict(
                "no_listeners", "The listeners of the sandbox were not brought before.", "Bring them, and ask again."
            )
        if known is not None:
            self._gateways.pop(spec.sandbox_id)
            await known.close()
        try:
            gateway = Gateway(spec, listeners, dialler=self._dialler, http=self._http, sink=self._sink, tell=self._tell)
        except BaseException:
            for sock in listeners:
                sock.close()
            raise
        self._gateways[spec.sandbox_id] = gateway
        return gateway.opened()

    async def _policy(self, request: wire.GatewayPolicy) -> wire.GatewayOpened:
        gateway = self._get(request.sandbox_id, request.generation)
        return gateway.change(request.egress, request.credentials)

    async def _cut(self, ref: wire.GatewayRef) -> Empty:
        await self._get(ref.sandbox_id, ref.generation).cut()
        return Empty()

    async def _close(self, ref: wire.GatewayRef) -> Empty:
        self._drop((ref.sandbox_id, ref.generation))
        gateway = self._gateways.get(ref.sandbox_id)
        if gateway is not None and gateway.generation <= ref.generation:
            self._gateways.pop(ref.sandbox_id)
            await gateway.close()
        return Empty()

    async def _status(self, ref: wire.GatewayRef) -> wire.GatewayStatus:
        return self._get(ref.sandbox_id, ref.generation).status()

    async def _list(self, _: Empty) -> wire.GatewayList:
        return wire.GatewayList(
            gateways=tuple(
                wire.GatewayRef(sandbox_id=one.sandbox_id, generation=one.generation) for one in self._gateways.values()
            )
        )

    async def _asks(self, _: Empty) -> wire.AskList:
        return wire.AskList(asks=tuple(asked for one in self._gateways.values() for asked in one.asks.held()))

    async def _answer(self, answer: wire.AskAnswer) -> Empty:
        gateway = self._gateways.get(answer.sandbox_id)
        if gateway is not None and gateway.generation == answer.generation:
            gateway.asks.answer(answer)
        return Empty()

    def _get(self, sandbox_id: str, generation: int) -> Gateway:
        gateway = self._gateways.get(sandbox_id)
        if gateway is None or gateway.generation != generation:
            raise NotFound("unknown_gateway", "This generation of the sandbox is not served here.", "Open it first.")
        return gateway

    # -- life

    def _tell(self, event: str, params: object) -> None:
        for connection in self._nodes:
            connection.notify(event, params)

    async def judge_forever(self) -> None:
        """Cuts what may not go on because its time is over, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(JUDGE_EVERY_S)
            for gateway in self._gateways.values():
                loop.call_soon(gateway.tick)  # each by itself: a fault of one is its own

    async def close(self) -> None:
        """Cuts everything."""
        for key in list(self._held):
            self._drop(key)
        gateways, self._gateways = self._gateways, {}
        for gateway in gateways.values():
            await gateway.close()
        for connection in list(self._nodes):
            with contextlib.suppress(OSError):
                await connection.close()


def _decoding(params: type[msgspec.Struct], method: Callable[[Any], Awaitable[object]]) -> Handler:
    decoder = msgspec.msgpack.Decoder(params)

    async def handle(_: Connection, raw: msgspec.Raw) -> object:
        return await method(decoder.decode(raw))

    return handle


def _is_let_in(sock: socket.socket, uids: frozenset[int]) -> bool:
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in uids:
        log.warning("uid %d may not speak to the gateways", uid)
    return uid in uids


def _check(listeners: list[socket.socket]) -> None:
    """Raises ValueError when these are not what `wire.egress.LISTENERS` says."""
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_STREAM)
    for name, sock, kind in zip(wire.LISTENERS, listeners, kinds, strict=True):
        if sock.family != socket.AF_INET or sock.type & ~socket.SOCK_NONBLOCK & ~socket.SOCK_CLOEXEC != kind:
            raise ValueError(f"the descriptor for {name} is of another kind")
        if kind == socket.SOCK_STREAM and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ValueError(f"the descriptor for {name} does not listen")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(sock.fileno(), ready)
    try:
        await future
    finally:
        loop.remove_reader(sock.fileno())
