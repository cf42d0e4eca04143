"""How fast a client takes an answer, or gives a body: who does so octet by octet would hold its place, and a program in the guest, for hours."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.types import Message, Scope, Send

from hatchway.domain.errors import InvalidRequest
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.wire.http_head import ABORT

T = TypeVar("T")

PIECE = 64 * 1024
"""Octets that are handed to the HTTP server at once: even the slowest client that is borne takes them within its time."""


def too_long(seconds: float) -> InvalidRequest:
    """The error of an answer that takes too long in all."""
    return InvalidRequest(
        "client_too_slow",
        f"The answer was not taken within {seconds:g} s.",
        "Ask for the rest with `Range`, over a faster connection.",
    )


class Pace:
    """The time of one request that its client may let others wait.

    It has `client_grace_s` to spare. Waiting for it uses that up, `client_rate` octets give a second back, never more than it had at
    first: a client may be slow for as long as it likes, or stand still for the grace. The time that the guest or the disk takes is not
    its.
    """

    def __init__(self, limits: PlaneLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = limits.client_rate
        self._most = self._left = limits.client_grace_s
        self._now = now

    def sending(self, scope: Scope, send: Send) -> Send:
        """`send`, for a client that has to take the answer in time. Its connection is broken off when it does not, with all that waits in it."""
        abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)

        async def paced(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            body, more = message.get("body", b""), message.get("more_body", False)
            try:
                for at in range(0, max(1, len(body)), PIECE):
                    piece = body[at : at + PIECE]
                    rest = more or at + PIECE < len(body)
                    await self._wait(send({"type": "http.response.body", "body": piece, "more_body": rest}), len(piece))
            except TimeoutError:
                if abort is not None:
                    abort()
                raise InvalidRequest(
                    "client_too_slow",
                    f"The client took fewer than {self._rate} octets a second, and stood still for {self._most:g} s in all.",
                    "Ask for the rest with `Range`, over a faster connection.",
                ) from None

        return paced

    async def receiving(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The body of a client that has to give it in time. Raises `InvalidRequest("body_too_slow")`, and what `chunks` does."""
        try:
            while True:
                try:
                    chunk = await self._wait(anext(chunks), 0)
                except StopAsyncIteration:
                    return
                self._moved(len(chunk))
                yield chunk
        except TimeoutError:
            raise InvalidRequest(
                "body_too_slow",
                f"The body came with fewer than {self._rate} octets a second, and stood still for {self._most:g} s in all.",
                "Try again over a faster connection.",
            ) from None

    async def _wait(self, waiting: Awaitable[T], octets: int) -> T:
        """Raises `TimeoutError` when its time is used up."""
        began = self._now()
        async with asyncio.timeout(self._left):
            result = await waiting
        self._left -= self._now() - began
        if self._left <= 0:
            raise TimeoutError
        self._moved(octets)
        return result

    def _moved(self, octets: int) -> None:
        self._left = min(self._most, self._left + octets / self._rate)
