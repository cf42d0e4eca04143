"""Requests, answers and events between the control plane and a node, over any asyncio byte stream.

A message is a 4-octet big-endian length and that many octets of MessagePack: `[id, method, params, context]` is a request,
whose `context` (see `wire.tracing`) may be left out, `[id, null, result]` its answer, `[id, {error…}, null]` its failure and `[0, method, params]` an event, which nobody
answers. Both ends may have any number of requests in flight up to their bound. The stream is a Unix socket whose peer was
checked, or mutual TLS; this module does not know which.
"""

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, Internal, Unavailable, from_status
from hatchway.wire import tracing
from hatchway.wire.paths import address

T = TypeVar("T")

MAX_MESSAGE = 8 * 1024 * 1024
MAX_CONCURRENT = 256
CLOSE_WITHIN_S = 5.0

log = logging.getLogger(__name__)

Handler = Callable[["Connection", msgspec.Raw], Awaitable[object]]
EventHandler = Callable[[str, msgspec.Raw], None]

_HEADER = struct.Struct(">I")
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()


class _Message(msgspec.Struct, array_like=True, frozen=True):
    number: int
    head: msgspec.Raw
    content: msgspec.Raw
    context: dict[str, str] = {}


_decoder = msgspec.msgpack.Decoder(_Message)


class Connection:
    """One end of an RPC stream: calls methods of the peer and serves its calls, until either side closes."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler] | None = None,
        on_event: EventHandler | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers or {}
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()

    async def call(self, method: str, params: object, result: type[T], *, within: float | None = None) -> T:
        """Calls `method` and returns its result, decoded as `result`.

        Raises the `HatchwayError` that the peer answered with, `Unavailable("peer_lost")` when the stream ends first,
        `Internal("bad_message")` for a result that is no `result`, and `TimeoutError` after `within` seconds.
        """
        if self.closed.is_set():
            raise Unavailable("peer_lost", "The connection to the other process is closed.", "Try again.")
        request = next(self._ids)
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._pending[request] = future
        try:
            self._send((request, method, params, tracing.current()))
            async with asyncio.timeout(within):
                answered = await future
        finally:
            self._pending.pop(request, None)
        try:
            return msgspec.msgpack.decode(answered, type=result)
        except _UNREADABLE as error:
            raise Internal(
                "bad_message",
                f"The answer to {method} cannot be read: {error}",
                "Both processes must be of one version: restart the one that was not updated.",
            ) from error

    def notify(self, method: str, params: object) -> None:
        """Sends an event. A peer that does not read is closed when more than `MAX_MESSAGE` octets wait for it."""
        if not self.closed.is_set():
            self._send((0, method, params))

    async def run(self) -> None:
        """Reads until the stream ends; then fails what is pending. Never raises for what the peer did."""
        try:
            while True:
                header = await self._reader.readexactly(4)
                (length,) = _HEADER.unpack(header)
                if length > MAX_MESSAGE:
                    log.warning("rpc peer announced %d octets; closing", length)
                    return
                self._receive(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError, *_UNREADABLE):
            return
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes the stream; pending calls fail with `peer_lost`, calls being served are cancelled."""
        if self.closed.is_set():
            return
        self.closed.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(
                    Unavailable("peer_lost", "The other process went away in the middle.", "Try again.")
                )
        for task in list(self._serving):
            task.cancel()
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._writer.wait_closed()
        except TimeoutError:  # a peer that does not read what was sent before
            self._writer.transport.abort()
        except OSError:
            return

    def _send(self, message: tuple[object, ...]) -> None:
        body = _encoder.encode(message)
        transport = self._writer.transport
        if transport.get_write_buffer_size() > MAX_MESSAGE:
            log.warning("rpc peer does not read; closing")
            transport.abort()
            return
        self._writer.write(_HEADER.pack(len(body)) + body)

    def _receive(self, body: bytes) -> None:
        message = _decoder.decode(body)
        number, params = message.number, message.content
        method = msgspec.msgpack.decode(message.head, type=str | dict[str, object] | None)
        if isinstance(method, str):
            if number == 0:
                if self._on_event is not None:
                    self._on_event(method, params)
            elif len(self._serving) >= MAX_CONCURRENT:
                self._send((number, _error_body(Unavailable("busy", "Too many requests at once.", "Try again.")), None))
            else:
                task = asyncio.get_running_loop().create_task(self._serve(number, method, params, message.context))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
            return
        future = self._pending.get(number)
        if future is None or future.done():
            return
        if method is None:
            future.set_result(params)
        else:
            future.set_exception(_error_from(method))

    async def _serve(self, number: int, method: str, params: msgspec.Raw, context: dict[str, str]) -> None:
        with tracing.bound(context):
            answer = await self._answer(number, method, params)
        if not self.closed.is_set():
            self._send(answer)

    async def _answer(self, number: int, method: str, params: msgspec.Raw) -> tuple[object, ...]:
        handler = self._handlers.get(method)
        try:
            if handler is None:
                raise Internal(
                    "unknown_method", f"There is no method {method!r}.", "Both processes must be of one version."
                )
            result = await handler(self, params)
        except HatchwayError as error:
            return number, _error_body(error), None
        except asyncio.CancelledError:
            if self.closed.is_set():
                raise
            # What was asked for was given up from within: the peer must not wait for it for good.
            return number, _error_body(Unavailable("peer_lost", "The request was given up.", "Try again.")), None
        except _UNREADABLE as error:
            return number, _error_body(Internal("bad_message", str(error))), None
        except Exception as error:
            log.exception("rpc %s failed", method)
            return number, _error_body(Internal("internal", f"{type(error).__name__}: {error}")), None
        return number, None, result


def call_once(path: Path, method: str, params: object, *, within: float) -> msgspec.Raw:
    """One call without an event loop, over the Unix socket at `path`; returns the result, not decoded.

    Raises the `HatchwayError` that the peer answered with, `Unavailable("peer_lost")` when it went away, `TimeoutError` when it is
    silent for `within` seconds, and `OSError` when nobody listens.
    """
    with socket.socket(socket.AF_UNIX) as sock, address(path) as reached:
        sock.settimeout(within)
        sock.connect(reached)
        body = _encoder.encode((1, method, params))
        sock.sendall(_HEADER.pack(len(body)) + body)
        with sock.makefile("rb") as stream:
            header = stream.read(_HEADER.size)
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
            answer = stream.read(min(length, MAX_MESSAGE))
    try:
        _, error, result = msgspec.msgpack.decode(answer, type=tuple[int, dict[str, object] | None, msgspec.Raw])
    except _UNREADABLE:
        raise Unavailable("peer_lost", "The other process went away in the middle.", "Try again.") from None
    if error is not None:
        raise _error_from(error)
    return result


def _error_body(error: HatchwayError) -> dict[str, object]:
    return {"status": error.status, **error.as_dict()}


def _error_from(body: dict[str, object]) -> HatchwayError:
    extra = {key: value for key, value in body.items() if key not in ("status", "code", "cause", "remedy")}
    status = body.get("status")
    return from_status(
        status if isinstance(status, int) else 500,
        str(body.get("code", "internal")),
        str(body.get("cause", "")),
        str(body.get("remedy", "")),
        **extra,
    )
