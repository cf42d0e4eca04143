"""What an upload sends, piece by piece: octets, a file, an iterator. Counts what it gave, and holds it to the announced size."""

import io
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import IO, Any, TypeAlias, cast

from .errors import InvalidRequest, TransferFailed

PIECE = 256 * 1024
"""Octets that are read from a file at once."""

Content: TypeAlias = bytes | bytearray | memoryview | str | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
"""What can be uploaded; text becomes UTF-8. An asynchronous iterator is for the asyncio client only."""


class Body:
    """The body of one request. `begin` gives its pieces from the start; with `again` it can do so more than once.

    `size` is the number of octets, None where it is not known beforehand; `sent` is how many were given since the last start.
    """

    def __init__(
        self, begin: Callable[[], Iterable[bytes] | AsyncIterable[bytes]], size: int | None, *, again: bool
    ) -> None:
        self._begin = begin
        self.size = size
        self.again = again
        self.sent = 0

    def open(self) -> Iterator[bytes] | AsyncIterator[bytes]:
        """Starts anew. Raises `TransferFailed("source_changed")` on the way when there is more or less than `size`."""
        self.sent = 0
        pieces = self._begin()
        if isinstance(pieces, AsyncIterable):
            return self._counted_async(pieces)
        return self._counted(pieces)

    def _counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if given := self._take(piece):
                yield given
        self._end()

    async def _counted_async(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            if given := self._take(piece):
                yield given
        self._end()

    def _take(self, piece: object) -> bytes:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidRequest(
                "bad_content", f"The content gave {type(piece).__name__}, not bytes.", "Open files with mode 'rb'."
            )
        self.sent += memoryview(piece).nbytes
        if self.size is not None and self.sent > self.size:
            raise self._changed("more")
        return bytes(piece)

    def _end(self) -> None:
        if self.size is not None and self.sent != self.size:
            raise self._changed("fewer")

    def _changed(self, what: str) -> TransferFailed:
        return TransferFailed(
            "source_changed",
            f"The content has {what} octets than the {self.size} that it began with.",
            "Nothing was written. Is somebody else writing the file?",
        )


def body_of(content: Content | Body) -> Body:
    """Returns what `content` is as a body. A file is sent from where it stands; one that can seek, once more if need be."""
    if isinstance(content, Body):
        return content
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        octets = bytes(content)
        return Body(lambda: (octets,) if octets else (), len(octets), again=True)
    if hasattr(content, "read"):
        return _of_file(cast(IO[bytes], content))
    if not isinstance(content, Iterable | AsyncIterable):
        raise InvalidRequest(
            "bad_content",
            f"{type(content).__name__} is no content.",
            "Give octets, text, a binary file or an iterator of octets.",
        )
    pieces = cast(Iterable[bytes] | AsyncIterable[bytes], content)
    return Body(lambda: pieces, None, again=False)


def _of_file(file: IO[bytes]) -> Body:
    try:
        start = file.tell() if file.seekable() else None
    except (OSError, AttributeError):
        start = None
    if start is None:
        return Body(lambda: read_all(file), None, again=False)
    size = max(file.seek(0, os.SEEK_END) - start, 0)
    file.seek(start)

    def begin() -> Iterator[bytes]:
        file.seek(start)
        return read_all(file)

    if isinstance(file, io.TextIOBase):
        raise InvalidRequest("bad_content", "The file is open for text.", "Open it with mode 'rb'.")
    return Body(begin, size, again=True)


def read_all(file: IO[Any]) -> Iterator[bytes]:
    """Yields what a file has from where it stands. Raises `TransferFailed("local_read_failed")`."""
    try:
        while piece := file.read(PIECE):
            yield piece
    except OSError as error:
        raise read_failed(error, getattr(file, "name", "the file")) from None


def read_failed(error: OSError, name: object) -> TransferFailed:
    """The error for a file or folder here that cannot be read."""
    return TransferFailed(
        "local_read_failed", f"{error.filename or name} cannot be read: {error.strerror or error}", ""
    )
