"""`GET /v1/sandboxes/{id}/ports/{port}/tcp`: a TCP connection to a port, over a WebSocket.

Binary messages are octets, in both directions; the text message `{"eof": true}` says that no more will come from its sender.
"""

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from websockets.frames import CloseCode

from hatchway.domain import checking
from hatchway.domain.errors import HatchwayError, InvalidRequest
from hatchway.node.dataplane.ports.access import may_use_port
from hatchway.node.dataplane.ports.dialling import broken
from hatchway.node.dataplane.ports.names import Port
from hatchway.node.dataplane.ports.relay import Ports
from hatchway.node.dataplane.requests import claims_of
from hatchway.node.dataplane.websocket import Socket
from hatchway.node.guest.seam import GuestError, GuestStream, LinkLost

_PIECE = 64 * 1024
_MAX_TEXT = 1_024


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text message of the client."""

    eof: bool


class Tunnel:
    """The endpoint; an ASGI application for WebSockets."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one client. The port is connected to before the handshake is answered."""
        plane = self._ports.plane
        claims = claims_of(scope, plane.tokens)
        sandbox_id = str(scope["path_params"]["sandbox_id"])
        may_use_port(plane, claims, sandbox_id)
        port = Port(sandbox_id, _number(str(scope["path_params"]["port"])))
        why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with plane.opened(claims, why.set_result):
            async with self._ports.dialler.connection(port) as stream:
                socket = Socket(scope, receive, send)
                await socket.accept()
                await _carry(socket, stream, why)


async def _carry(socket: Socket, stream: GuestStream, why: "asyncio.Future[str]") -> None:
    """Until both directions are over, one of the peers is gone, or `why` says so."""
    loop = asyncio.get_running_loop()
    listening = loop.create_task(_to_guest(socket, stream))
    output, ending = loop.create_task(_to_client(socket, stream)), loop.create_task(stream.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (listening, output, ending)
    try:
        waiting: set[asyncio.Future[Any]] = {*tasks, why}
        while not (output.done() and ending.done()):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if why.done():
                await socket.close_because(why.result())
                return
            for task in tasks:
                if task.done() and task in waiting:
                    task.result()
                    waiting.discard(task)
        if ending.result().exit_code:
            await socket.close(CloseCode.INTERNAL_ERROR, "broken")
        else:
            await socket.close(CloseCode.NORMAL_CLOSURE, "end")
    except (GuestError, LinkLost):
        await socket.close(CloseCode.INTERNAL_ERROR, "broken")
    except HatchwayError as error:
        await socket.close(CloseCode.INVALID_DATA, error.code)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_guest(socket: Socket, stream: GuestStream) -> None:
    """Reads until the client is gone, also behind the end that it said."""
    ended = False
    while True:
        message = await socket.receive()
        if ended:
            raise InvalidRequest("malformed_request", "A message came behind the end.", "Send nothing behind it.")
        if isinstance(message, bytes):
            with contextlib.suppress(GuestError):  # who takes no more may still send
                await stream.write(message)
        elif _is_eof(message):
            ended = True
            await stream.write_eof()


async def _to_client(socket: Socket, stream: GuestStream) -> None:
    while data := await stream.read():
        for at in range(0, len(data), _PIECE):
            await socket.send(data[at : at + _PIECE])
            await asyncio.sleep(0)  # to a client that takes all at once, sending never waits
    if not await broken(stream):
        await socket.tell(eof=True)


def _is_eof(message: str) -> bool:
    if len(message) > _MAX_TEXT:
        raise checking.too_large(_MAX_TEXT)
    return checking.decode(message.encode(), Said).eof


def _number(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) < 2**16:
        return int(text)
    raise checking.invalid_field("port", f"it is {text[:20]!r}.", {"type": "integer", "minimum": 1, "maximum": 65_535})
