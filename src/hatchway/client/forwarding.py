"""Ports of a sandbox on this machine: a listener here, and for each of its connections a WebSocket to the port in the sandbox.

All of it is asyncio; `Forward`, for blocking code, runs it in a thread of its own.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from .atransport import AsyncDriver
from .config import Config
from .connecting import PIECE, open_tunnel
from .errors import ConnectionFailed, HatchwayError, InvalidRequest, TransferFailed
from .reach import Reach, check_port
from .wires import EOF, is_eof

MAX_CONNECTIONS = 128
"""Connections of one listener at a time; further ones wait until one ends."""

OnError: TypeAlias = Callable[[HatchwayError], None]
"""Told of each connection that could not be made or broke, for example because nothing listens in the sandbox."""


def _ignore(_error: HatchwayError) -> None:
    """Whoever connected sees that the connection is reset."""


class AsyncForward:
    """A listener on this machine whose connections lead to a port of a sandbox. As a context manager it is closed at the end."""

    def __init__(
        self, driver: AsyncDriver, reach: Reach, remote: int, local: int, host: str, on_error: OnError | None
    ) -> None:
        self._driver = driver
        self._reach = reach
        self._remote = check_port(remote)
        self._local = local
        self._host = host
        self._on_error = on_error or _ignore
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)

    @property
    def host(self) -> str:
        """The address here."""
        return self._host

    @property
    def port(self) -> int:
        """The port here."""
        return self._local

    async def open(self) -> None:
        """Begins to listen. Raises `TransferFailed("local_port_taken")`."""
        try:
            self._server = await asyncio.start_server(self._accepted, self._host, self._local, limit=PIECE, backlog=64)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TransferFailed(
                "local_port_taken",
                f"{self._host}:{self._local} cannot be listened on: {reason}",
                "Choose another port, or 0 for any.",
            ) from None
        self._local = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening, and resets what is open."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> "AsyncForward":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # the server makes one for each connection
        self._tasks.add(task)
        try:
            async with self._room:
                await self._carry(reader, writer)
        except HatchwayError as error:
            self._on_error(error)
            _reset(writer)
        except (OSError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await open_tunnel(self._driver, self._reach, self._remote)
        sending = asyncio.ensure_future(_to_sandbox(reader, wire))
        receiving = asyncio.ensure_future(_to_client(wire, writer))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                sending.result()
            # The sandbox's side closes the WebSocket when both directions are over, or the connection broke.
            await receiving
        except ConnectionClosed as error:
            raise ConnectionFailed(
                f"The connection to port {self._remote} of the sandbox broke: {error}",
                "Connect again.",
                code="port_broken",
            ) from None
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)
            wire.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Breaks a connection so that its other side sees that it broke, and does not take it for an end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _to_sandbox(reader: asyncio.StreamReader, wire: ClientConnection) -> None:
    while data := await reader.read(PIECE):
        await wire.send(data)
    await wire.send(EOF)


async def _to_client(wire: ClientConnection, writer: asyncio.StreamWriter) -> None:
    """Until the sandbox's side closes the WebSocket; raises `ConnectionClosed` when it broke."""
    async for message in wire:
        if isinstance(message, bytes):
            writer.write(message)
            await writer.drain()
        elif is_eof(message):
            writer.write_eof()


class Forward:
    """A listener on this machine whose connections lead to a port of a sandbox. As a context manager it is closed at the end."""

    def __init__(
        self,
        config: Config,
        timeout_s: float,
        reach: Reach,
        remote: int,
        local: int,
        host: str,
        on_error: OnError | None,
    ) -> None:
        check_port(remote)
        self._made: Any = (config, timeout_s, reach, remote, local, host, on_error)
        self._forward: AsyncForward | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="forward")

    @property
    def host(self) -> str:
        """The address here."""
        return self._listening().host

    @property
    def port(self) -> int:
        """The port here."""
        return self._listening().port

    def open(self) -> None:
        """Begins to listen. Raises `TransferFailed("local_port_taken")`."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stops listening, and resets what is open."""
        if self._loop is not None and self._over is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._over.set)
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> "Forward":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listening(self) -> AsyncForward:
        if self._forward is None:
            raise InvalidRequest("not_listening", "The forward was not opened.", "Call open() first.")
        return self._forward

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - it is raised where open() was called
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        config, timeout_s, reach, remote, local, host, on_error = self._made
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        driver = AsyncDriver(config, timeout_s)
        try:
            async with AsyncForward(driver, reach, remote, local, host, on_error) as forward:
                await forward.open()
                self._forward = forward
                self._ready.set()
                await self._over.wait()
        finally:
            await driver.close()
