"""Calls of the Connect protocol over ASGI: a body in, an answer or a stream of messages out.

A stream is answered with its head and first message at once, every message is a write of its own, and one that is silent for long says
that it lives. When its sandbox is gone, the last frame says that it is not available: SDKs then ask whether the sandbox is still there, and
each raises an exception of its own, where some let one of their HTTP library out when a stream is merely cut off.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Send

from hatchway.client import errors as ours
from hatchway.e2b.envd import connect, messages
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.messages import Message
from hatchway.e2b.envd.requests import MAX_SILENCE_S, Cut, Request

LAST_S = 5.0
"""How long the last message of a stream whose sandbox is gone is waited with until somebody takes it."""

Unary = Callable[[Request, Message], Awaitable[object]]
Stream = Callable[[Request, Message], AsyncGenerator[object, None]]
ClientStream = Callable[[Request, AsyncIterator[Message]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class OnUnary:
    """Answers one message with one."""

    handle: Unary

    async def __call__(self, request: Request, send: Send) -> None:
        """Answers one request."""
        try:
            connect.check_head(request.headers, stream=False)
            within = connect.timeout_s(request.headers)
            message = messages.of(await request.body(connect.MAX_MESSAGE))
            answer = await request.while_there(_bounded(self.handle(request, message), within))
        except connect.Unsupported:
            await _unsupported(request, send)
        except (ConnectError, ours.HatchwayError) as error:
            failure = _failure(error, request)
            await _answer(request, send, failure.body(), failure.status)
        else:
            await _answer(request, send, msgspec.json.encode(answer), 200)


@dataclass(frozen=True, slots=True)
class OnStream:
    """Answers one message with a stream, which the deadline of the call ends."""

    handle: Stream
    keepalive: object
    """What is said after a long silence."""

    async def __call__(self, request: Request, send: Send) -> None:
        """Answers one request."""
        if not await _is_stream(request, send):
            return
        last: bytes
        begun = False
        try:
            within = connect.timeout_s(request.headers)
            silence = connect.keepalive_s(request.headers)
            # Nothing here keeps the message: a stream may last for days.
            handled = self.handle(request, await _only(request))

            async def events() -> None:
                nonlocal begun
                async with contextlib.aclosing(handled) as stream:
                    async for event in _kept_alive(stream, silence, self.keepalive):
                        if not begun:
                            begun = True
                            await _begin(send)
                        await send(_piece(connect.frame(event)))

            await request.while_there(_bounded(events(), within))
            last = connect.end()
        except (ConnectError, ours.HatchwayError) as error:
            last = connect.end(_failure(error, request, begun=begun))
        except Cut:
            if not begun:
                raise
            await _say_lost(request, send)
            return
        if not begun:
            await _begin(send)
        await send(_last(last))


@dataclass(frozen=True, slots=True)
class OnClientStream:
    """Answers a stream of messages with one."""

    handle: ClientStream

    async def __call__(self, request: Request, send: Send) -> None:
        """Answers one request."""
        if not await _is_stream(request, send):
            return
        try:
            within = connect.timeout_s(request.headers)
            async with contextlib.aclosing(_messages(request)) as stream:
                answer = await _bounded(self.handle(request, stream), within)
        except (ConnectError, ours.HatchwayError) as error:
            last = connect.end(_failure(error, request))
        else:
            last = connect.frame(answer) + connect.end()
        await _begin(send)
        await send(_last(last))


async def _is_stream(request: Request, send: Send) -> bool:
    """Whether the head of a request is that of a stream; it is answered where it is not."""
    try:
        connect.check_head(request.headers, stream=True)
    except connect.Unsupported:
        await _unsupported(request, send)
    except ConnectError as error:
        await _begin(send)
        await send(_last(connect.end(error)))
    else:
        return True
    return False


async def _messages(request: Request, silence_s: float | None = None) -> AsyncGenerator[Message, None]:
    frames = connect.Frames()
    async for piece in request.pieces(silence_s):
        for octets in frames.feed(piece):
            request.hold(len(octets) + frames.held)
            yield messages.of(octets)
        request.hold(frames.held)
    frames.finish()


async def _only(request: Request) -> Message:
    """The one message of a request for a stream."""
    found: Message | None = None
    async for message in _messages(request, MAX_SILENCE_S):
        if found is not None:
            raise ConnectError("unimplemented", "unary request has multiple messages")
        found = message
    if found is None:
        raise ConnectError("unimplemented", "unary request has zero messages")
    return found


async def _kept_alive(stream: AsyncGenerator[object, None], silence: float, keepalive: object) -> AsyncIterator[object]:
    following: asyncio.Task[Any] = asyncio.ensure_future(anext(stream, None))
    try:
        while True:
            await asyncio.wait({following}, timeout=silence)
            if not following.done():
                yield keepalive
                continue
            event = following.result()
            if event is None:
                return
            yield event
            following = asyncio.ensure_future(anext(stream, None))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _bounded(work: Awaitable[Any], within: float | None) -> Any:
    try:
        async with asyncio.timeout(within) as bound:
            return await work
    except TimeoutError:
        if not bound.expired():
            raise
        raise ConnectError("deadline_exceeded", "the deadline of the call has passed") from None


def _failure(error: ConnectError | ours.HatchwayError, request: Request, *, begun: bool = False) -> ConnectError:
    """The error to be told. Raises `E2bError` 502 where it is the sandbox that is not there, and nothing was told yet."""
    if isinstance(error, ConnectError):
        return error
    if request.gone(error):
        if not begun:
            raise request.not_found() from None
        request.lost(request.sandbox_id)
        return connect.lost()
    return connect.of_client(error)


async def _say_lost(request: Request, send: Send) -> None:
    """The last message of a stream whose sandbox is gone. Raises `Cut` where nobody takes it."""
    request.lost(request.sandbox_id)  # before the client asks whether that is so
    try:
        async with asyncio.timeout(LAST_S):
            await send(_last(connect.end(connect.lost())))
    except TimeoutError:
        raise Cut from None


async def _unsupported(request: Request, send: Send) -> None:
    headers = {"accept-post": f"{connect.UNARY_TYPE}, {connect.STREAM_TYPE}"}
    await Response(None, 415, headers)(request.scope, request.receive, send)


async def _answer(request: Request, send: Send, body: bytes, status: int) -> None:
    await Response(body, status, media_type=connect.UNARY_TYPE)(request.scope, request.receive, send)


async def _begin(send: Send) -> None:
    headers = [
        (b"content-type", connect.STREAM_TYPE.encode()),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


def _piece(octets: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": octets, "more_body": True}


def _last(octets: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": octets}
