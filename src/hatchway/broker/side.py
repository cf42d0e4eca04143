"""One side of a leg: octets of a stream, read as heads, lines and bodies within bounds of size and time."""

import asyncio
from collections.abc import AsyncIterator

from hatchway.broker.http1 import Head, Malformed, chunk_size

PIECE = 64 * 1024
MAX_CHUNK_LINE = 1024
MAX_TRAILERS = 8 * 1024


class Lost(Exception):
    """The stream ended in the middle, or nothing came in time. The text is for people."""


class Side:
    """A stream that one task reads and one writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()

    async def wait_for_input(self, within: float | None) -> bool:
        """Returns when something came; False at the stream's end. Raises `Lost`."""
        return bool(self._buffer) or await self._fill(within)

    async def head(self, bound: int, within: float) -> bytes:
        """The octets up to and with the first empty line; something has come already. Raises `Lost`, and `Malformed` beyond `bound` octets."""
        try:
            async with asyncio.timeout(within):
                while (end := self._buffer.find(b"\r\n\r\n", 0, bound)) < 0:
                    if len(self._buffer) >= bound:
                        raise Malformed(f"the head has more than {bound} octets")
                    if not await self._fill(None):
                        raise Lost("the connection ended in the middle of a head")
        except TimeoutError:
            raise Lost(f"the head did not come within {within:g} s") from None
        return self._take(end + 4)

    async def body(self, head: Head, within: float, *, until_end: bool = False) -> AsyncIterator[bytes]:
        """The body in pieces; with `until_end`, where nothing says its length, all up to the end of the stream. Trailers are thrown away.

        Raises `Lost` when it ends too early or nothing comes for `within` seconds, and `Malformed`.
        """
        if head.chunked:
            while (size := chunk_size(await self._line(within))) > 0:
                async for piece in self._exactly(size, within):
                    yield piece
                if await self._line(within) != b"":
                    raise Malformed("a chunk is longer than its size")
            await self._skip_trailers(within)
        elif head.length is not None:
            async for piece in self._exactly(head.length, within):
                yield piece
        elif until_end:
            while await self.wait_for_input(within):
                yield self._take(PIECE)

    async def pieces(self, within: float) -> AsyncIterator[bytes]:
        """Everything that comes, up to the end of the stream. Raises `Lost`."""
        while await self.wait_for_input(within):
            yield self._take(PIECE)

    async def send(self, data: bytes, within: float) -> None:
        """Writes, and waits while much is queued. Raises `Lost`."""
        if self._writer.transport.is_closing():
            raise Lost("the connection is closed")
        self._writer.write(data)
        try:
            async with asyncio.timeout(within):
                await self._writer.drain()
        except TimeoutError:
            raise Lost(f"the other side takes nothing for {within:g} s") from None
        except OSError:
            raise Lost("the connection was reset") from None

    async def _fill(self, within: float | None) -> bool:
        try:
            async with asyncio.timeout(within):
                data = await self._reader.read(PIECE)
        except TimeoutError:
            raise Lost(f"nothing came for {within:g} s") from None
        except OSError:
            raise Lost("the connection was reset") from None
        self._buffer += data
        return bool(data)

    async def _line(self, within: float) -> bytes:
        while (end := self._buffer.find(b"\r\n", 0, MAX_CHUNK_LINE)) < 0:
            if len(self._buffer) >= MAX_CHUNK_LINE:
                raise Malformed("a line of a chunk does not end")
            if not await self._fill(within):
                raise Lost("the connection ended in the middle of a body")
        return self._take(end + 2)[:-2]

    async def _exactly(self, size: int, within: float) -> AsyncIterator[bytes]:
        while size > 0:
            if not await self.wait_for_input(within):
                raise Lost("the connection ended in the middle of a body")
            piece = self._take(min(size, PIECE))
            size -= len(piece)
            yield piece

    async def _skip_trailers(self, within: float) -> None:
        size = 0
        while line := await self._line(within):
            size += len(line)
            if size > MAX_TRAILERS:
                raise Malformed("the trailers are too long")

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken
