"""WebSockets to ports of sandboxes: the handshake goes through the relay, and what follows passes as octets, whatever the frames are.

The HTTP server hands over a connection that asks for a WebSocket; nothing else is served on it afterwards.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.server import ServerState

from hatchway.client import errors as ours
from hatchway.e2b import errors, origin, refusals
from hatchway.e2b.errors import E2bError
from hatchway.e2b.origin import first_of_each
from hatchway.e2b.ports.admission import Admission
from hatchway.e2b.ports.exchange import Answers, Broken, Peer
from hatchway.e2b.ports.heads import answer_fields
from hatchway.wire.http_head import MAX_HEAD

_READ = 64 * 1024
_CLOSE_WITHIN_S = 10.0

log = logging.getLogger(__name__)

TargetOf = Callable[[Mapping[str, str]], origin.Target | None]


class Upgrade(asyncio.StreamReaderProtocol):
    """One connection whose client asked for a WebSocket. The first octets are the head of its request, as the HTTP server writes it."""

    def __init__(self, admission: Admission, target_of: TargetOf, server_state: ServerState) -> None:
        self._admission = admission
        self._target_of = target_of
        self._state = server_state
        self._reader = asyncio.StreamReader(limit=_READ)
        self._head = b""
        self._transport: asyncio.Transport | None = None
        super().__init__(self._reader)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is ours from now on."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """First the head, then what follows the upgrade."""
        if self._head:
            super().data_received(data)
            return
        self._head = data
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(asyncio.StreamWriter(self._transport, self, self._reader, loop)))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def shutdown(self) -> None:
        """The server ends."""
        if self._transport is not None:
            _reset(self._transport)

    @property
    def _connections(self) -> set[Any]:
        return self._state.connections

    async def _serve(self, writer: asyncio.StreamWriter) -> None:
        headers: dict[str, str] = {}
        try:
            request = _parsed(self._head)
            headers = first_of_each(request.headers.raw_items())
            await self._carry(request, headers, writer)
        except E2bError as error:
            await _answer(writer, refusals.answer(error, headers))
        except ours.HatchwayError as error:
            await _answer(writer, errors.answer(errors.of_client(error)))
        except (OSError, Broken):
            _reset(writer.transport)
        except Exception:
            log.exception("a WebSocket to a port failed")
            _reset(writer.transport)
        finally:
            await _close(writer)

    async def _carry(self, request: h11.Request, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        target = self._target_of(headers)
        if target is None:
            raise E2bError(404, "There is no WebSocket here.")
        if target.envd:
            raise E2bError(404, "There is no WebSocket on this port of a sandbox.")
        admitted = await self._admission.admit(target, headers)
        peer = writer.get_extra_info("peername")
        forwarding = admitted.forwarding(
            peer=str(peer[0]) if isinstance(peer, tuple) else "unknown",
            secure=writer.get_extra_info("ssl_object") is not None,
            host=headers.get("host", ""),
        )
        forwarded = forwarding.request(
            request.method.decode(), request.target, list(request.headers.raw_items()), upgrade=b"websocket"
        )
        async with self._admission.connected(admitted) as port:
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
            try:
                await port.write((http.send(forwarded) or b"") + (http.send(h11.EndOfMessage()) or b""))
                answers = Answers(port, http)
                head = await answers.head()
            except (Broken, ours.ConnectionFailed) as error:
                gone = await self._admission.gone(target)
                raise gone or refusals.broken(target.sandbox_id, target.port, str(error)) from None
            upgraded = isinstance(head, h11.InformationalResponse)
            fields = answer_fields(list(head.headers.raw_items()), head.status_code)
            if upgraded:
                fields += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
            else:
                fields = [(name, value) for name, value in fields if name != b"content-length"]
                fields.append((b"connection", b"close"))
            writer.write(_head(head.status_code, fields))
            await writer.drain()
            if upgraded:
                await _splice(self._reader, writer, port, http.trailing_data[0])
            else:
                await _body(answers, writer)


def _parsed(head: bytes) -> h11.Request:
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=2 * MAX_HEAD)
    try:
        http.receive_data(head)
        event = http.next_event()
    except h11.RemoteProtocolError as error:
        raise E2bError(400, f"This is not HTTP/1.1: {error}") from None
    if not isinstance(event, h11.Request):
        raise E2bError(400, "This is no request.")
    return event


def _head(status: int, fields: list[tuple[bytes, bytes]]) -> bytes:
    lines = [b"HTTP/1.1 %d %s" % (status, _phrase(status)), *(name + b": " + value for name, value in fields)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Unknown"


async def _body(answers: Answers, writer: asyncio.StreamWriter) -> None:
    """The body of an answer that was no upgrade, whose end is that of the connection. Raises `Broken`."""
    while isinstance(event := await answers.next(), h11.Data):
        writer.write(bytes(event.data))
        await writer.drain()
    if not isinstance(event, h11.EndOfMessage):
        raise Broken("it closed the connection")


async def _splice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: Peer, early: bytes) -> None:
    """Octets both ways, each direction until its own end. Raises `Broken` and `OSError`: the client is to see that it broke."""
    loop = asyncio.get_running_loop()
    both = (loop.create_task(_to_port(reader, port)), loop.create_task(_to_client(port, writer, early)))
    try:
        await asyncio.gather(*both)
    except ours.ConnectionFailed as error:
        raise Broken(str(error)) from None
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _to_port(reader: asyncio.StreamReader, port: Peer) -> None:
    while data := await reader.read(_READ):
        await port.write(data)
    await port.write_eof()


async def _to_client(port: Peer, writer: asyncio.StreamWriter, early: bytes) -> None:
    data = early
    while data or (data := await port.read()):
        writer.write(data)
        await writer.drain()
        data = b""
    if writer.can_write_eof():
        writer.write_eof()
    else:
        raise Broken("TLS knows no end of one direction")


async def _answer(writer: asyncio.StreamWriter, response: Response) -> None:
    fields = [*response.raw_headers, (b"connection", b"close")]
    with contextlib.suppress(OSError):
        writer.write(_head(response.status_code, fields) + bytes(response.body))
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """What was written goes out, but is not waited for long."""
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_WITHIN_S):
            await writer.wait_closed()
    except (TimeoutError, OSError):
        writer.transport.abort()


def _reset(transport: asyncio.BaseTransport) -> None:
    """Breaks the connection so that the client knows it."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert isinstance(transport, asyncio.Transport)
    transport.abort()


def upgrades_of(admission: Admission, target_of: TargetOf) -> Callable[..., asyncio.Protocol]:
    """What makes a protocol for each connection that asks for a WebSocket, as uvicorn asks for it."""

    def make(config: Config, server_state: ServerState, app_state: dict[str, Any]) -> Upgrade:
        return Upgrade(admission, target_of, server_state)

    return make
