"""The driver for asyncio, which carries flows out over HTTP; a module of its own, because loading asyncio takes a while."""

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from .bodies import Body
from .config import Config
from .errors import ConnectionFailed
from .steps import Emit, Flow, Open, Pause, Read, Reply, Request, Stream
from .transport import MAX_ANSWER, Common, too_large

T = TypeVar("T")
E = TypeVar("E")


class AsyncDriver(Common):
    """Carries flows out in the running event loop."""

    def __init__(self, config: Config, timeout_s: float) -> None:
        super().__init__(config, timeout_s)
        options = self.options()
        if config.socket is not None:
            over = httpx.AsyncHTTPTransport(uds=config.socket, limits=options["limits"])
            options["mounts"] = {f"all://{urlsplit(config.url).hostname}": over}
        self._http = httpx.AsyncClient(**options)

    def with_config(self, config: Config) -> "AsyncDriver":
        """A driver for another key or other headers, over the same connections: only one of them is to be closed."""
        other = copy.copy(self)
        other.config = config
        return other

    def _pieces(self, body: Body) -> AsyncIterator[bytes]:
        pieces = body.open()
        return pieces if isinstance(pieces, AsyncIterator) else _in_thread(pieces)

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """Returns what `flow` returns, or raises what it raises."""
        outcome: Any = None
        failure: ConnectionFailed | None = None
        while True:
            try:
                step = flow.send(outcome) if failure is None else flow.throw(failure)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # the type of the generator says what it is
            outcome = failure = None
            try:
                outcome = await self._do(step)
            except ConnectionFailed as error:
                failure = error
            except BaseException:
                flow.close()
                raise

    async def stream(self, flow: Stream[E]) -> AsyncGenerator[E, None]:
        """Yields what `flow` emits. Closing the generator closes the connection."""
        response: httpx.Response | None = None
        pieces: AsyncGenerator[bytes, None] | None = None
        outcome: Any = None
        failure: ConnectionFailed | None = None
        try:
            while True:
                try:
                    step = flow.send(outcome) if failure is None else flow.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step.item
                    continue
                try:
                    if isinstance(step, Read):
                        with self.failures():
                            outcome = b"" if pieces is None else await anext(pieces, b"")
                    elif isinstance(step, Open):
                        if response is not None:
                            await response.aclose()
                        response, outcome = await self._open(step.request)
                        pieces = response.aiter_raw() if outcome.status < 400 else None  # type: ignore[assignment]  # it is an async generator
                    else:
                        outcome = await self._do(step)
                except ConnectionFailed as error:
                    failure = error
        finally:
            flow.close()
            if response is not None:
                await response.aclose()

    async def _do(self, step: Request | Pause) -> Reply | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        with self.failures():
            request = self._http.build_request(**self.arguments(step, streaming=False))
            response = await self._http.send(request, stream=True)
            try:
                return Reply(response.status_code, response.headers, await _acollect(response))
            finally:
                await response.aclose()

    async def _open(self, step: Request) -> tuple[httpx.Response, Reply]:
        with self.failures():
            request = self._http.build_request(**self.arguments(step, streaming=True))
            response = await self._http.send(request, stream=True)
            body = b""
            if response.status_code >= 400:
                try:
                    body = await _acollect(response)
                finally:
                    await response.aclose()
            return response, Reply(response.status_code, response.headers, body)


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Reads an iterator that may wait for a disk beside the event loop."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


async def _acollect(response: httpx.Response) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MAX_ANSWER:
            raise too_large()
        pieces.append(piece)
    return b"".join(pieces)
