"""A connection to a port of a sandbox, for asyncio: octets there and back, without a listener on this machine."""

from types import TracebackType
from typing import TYPE_CHECKING

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from .aterminal import open_socket
from .atransport import AsyncDriver
from .errors import ConnectionFailed, Unauthenticated
from .reach import Reach
from .wires import EOF, is_eof, refusal, tunnel

if TYPE_CHECKING:
    from .aio import AsyncSandbox

PIECE = 64 * 1024
"""Octets of one message."""
NORMAL = 1000
"""The close code that says that both directions came to their end (RFC 6455)."""


class AsyncConnection:
    """A TCP connection that the sandbox's agent made to a port of its loopback. One task reads, one writes.

    Who does not read holds the other side back, and `write` waits while that takes nothing. As a context manager it is broken off at the end,
    unless both directions ended before.
    """

    def __init__(self, wire: ClientConnection, port: int) -> None:
        self._wire = wire
        self._port = port
        self._ended = False

    async def read(self) -> bytes:
        """What came; b"" once the other side will send no more. Raises `ConnectionFailed("port_broken")` when it broke."""
        while not self._ended:
            try:
                message = await self._wire.recv()
            except ConnectionClosed as error:
                if error.rcvd is None or error.rcvd.code != NORMAL:
                    raise self._broken(error) from None
                self._ended = True
            else:
                if isinstance(message, str):
                    self._ended = is_eof(message)
                elif message:
                    return message
        return b""

    async def write(self, data: bytes) -> None:
        """Sends octets. Raises `ConnectionFailed("port_broken")`."""
        try:
            for at in range(0, len(data), PIECE):
                await self._wire.send(data[at : at + PIECE])
        except ConnectionClosed as error:
            raise self._broken(error) from None

    async def write_eof(self) -> None:
        """Says that no more will be sent. Raises `ConnectionFailed("port_broken")`."""
        try:
            await self._wire.send(EOF)
        except ConnectionClosed as error:
            raise self._broken(error) from None

    def abort(self) -> None:
        """Breaks it off at once."""
        self._wire.transport.abort()

    async def __aenter__(self) -> "AsyncConnection":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        await self._wire.wait_closed()

    def _broken(self, error: ConnectionClosed) -> ConnectionFailed:
        return ConnectionFailed(
            f"The connection to port {self._port} of the sandbox broke: {error}", "Connect again.", code="port_broken"
        )


async def connect(sandbox: "AsyncSandbox", port: int) -> AsyncConnection:
    """Connects to a port of a sandbox, 127.0.0.1 included. Raises what the node refuses it for: `port_closed sandbox_not_running` and others."""
    return AsyncConnection(await open_tunnel(sandbox._driver, sandbox._reach, port), port)


async def open_tunnel(driver: AsyncDriver, reach: Reach, port: int) -> ClientConnection:
    """Connects to a port; once more with a fresh token when the one at hand is not taken any more. Raises `HatchwayError`."""
    for again in (True, False):
        dial, token = await driver.run(tunnel(reach, port))
        try:
            return await open_socket(driver, dial)
        except InvalidStatus as error:
            refused = refusal(error.response.status_code, error.response.body)
            if not (again and isinstance(refused, Unauthenticated)):
                raise refused from None
            reach.forget("ports", token)
        except (OSError, InvalidHandshake, EOFError) as error:
            raise ConnectionFailed(f"The node cannot be reached: {error}") from None
    raise AssertionError("the last round returns or raises")
