"""The first look at a connection: is it for a port, or for the API? By the `Host` of its first request.

Whoever gets the connection then looks at the `Host` of every request with its own parser, and refuses what is the other's.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from hatchway.domain.errors import Exhausted
from hatchway.node.dataplane.ports.names import PortNames
from hatchway.node.dataplane.ports.relay import Ports, Relay
from hatchway.wire.http_head import HEAD_WITHIN_S, MAX_HEAD, BoundedHead, answer_octets, head_too_slow

_END = re.compile(rb"\r?\n\r?\n")
_HOST = re.compile(rb"^host[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_TARGET = re.compile(rb"\A[^ \r\n]+ +[a-z]+://([^/? \r\n]*)", re.IGNORECASE)


def for_ports(head: bytes, names: PortNames) -> bool:
    """Whether anything in the head of a request names a port's host: all that is in doubt goes to the stricter of both."""
    hosts = _HOST.findall(head)
    absolute = _TARGET.match(head)
    if absolute is not None:
        hosts.append(absolute[1])
    return any(names.covers(host.decode("latin-1")) for host in hosts)


class Front(asyncio.Protocol):
    """A fresh connection, until the head of its first request is whole."""

    def __init__(self, ports: Ports, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        self._ports = ports
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(HEAD_WITHIN_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """It left before it asked for anything."""
        self._leave()

    def data_received(self, data: bytes) -> None:
        """Takes a part of the head."""
        self._head = (self._head + data).lstrip(b"\r\n")
        if _END.search(self._head) is not None or len(self._head) > MAX_HEAD:
            self._hand_over()

    def shutdown(self) -> None:
        """The server ends."""
        if self._transport is not None:
            self._transport.close()

    # -- inside

    @property
    def _connections(self) -> set[Any]:
        return self._state.connections

    def _leave(self) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _too_slow(self) -> None:
        assert self._transport is not None
        if self._head:
            self._transport.write(answer_octets(head_too_slow()))
        self._transport.close()

    def _hand_over(self) -> None:
        assert self._transport is not None
        self._leave()
        end = _END.search(self._head)
        if for_ports(self._head[: end.start() if end else MAX_HEAD], self._ports.names):
            self._relay(self._transport)
            return
        api = BoundedHead(config=self._config, server_state=self._state, app_state=self._app_state)
        api.connection_made(self._transport)
        self._transport.set_protocol(api)
        api.data_received(self._head)

    def _relay(self, transport: asyncio.Transport) -> None:
        most = self._ports.plane.limits.connections
        if len(self._connections) >= most:
            error = Exhausted("too_many_requests", f"{most} connections are open on this node.", "Try again later.")
            transport.write(answer_octets(error))
            transport.close()
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_HEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        relay = Relay(self._ports, reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        reader.feed_data(self._head)
        self._connections.add(relay)
        task = loop.create_task(relay.serve())
        self._state.tasks.add(task)

        def ended(task: "asyncio.Task[None]") -> None:
            self._state.tasks.discard(task)
            self._connections.discard(relay)

        task.add_done_callback(ended)


def front_of(ports: Ports) -> Callable[..., asyncio.Protocol]:
    """What makes a protocol for each connection, as uvicorn asks for it."""

    def make(config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: object = None) -> Front:
        return Front(ports, config, server_state, app_state)

    return make
