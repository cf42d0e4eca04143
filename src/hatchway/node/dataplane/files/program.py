"""One run of the guest's `files` program, from the host: its lines in order and within bounds, its octets as they come.

Every wait has an end: a guest that says nothing, or goes on saying things, costs a bounded time and bounded memory.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, HostExhausted, Unprocessable
from hatchway.node.dataplane.files.answers import MAX_LINE, Failure, Line, bad_answer, decode, no_answer
from hatchway.node.dataplane.files.failures import failed, is_unknown_user, refused, unreachable
from hatchway.node.dataplane.files.limits import FileLimits
from hatchway.node.guest.seam import ExitReason, GuestError, GuestLink, GuestStream, LinkLost

Argument = tuple[str, bytes | str | int | None]
T = TypeVar("T", bound=msgspec.Struct)
A = TypeVar("A")

DEFAULT_USER = "user"
FALLBACK_USER = "root"


class Program:
    """A running program. All waits raise `BadGateway` (`guest_no_answer`, `guest_bad_answer`) and `Unavailable("sandbox_unreachable")`."""

    def __init__(self, stream: GuestStream, limits: FileLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._errors = _Lines(stream.read_error)
        self._over = False

    async def head(self, kind: type[T]) -> T:
        """What the program says before its data. Raises the error that it says instead."""
        line = await self._line(self._limits.answer_s)
        if not isinstance(line.head, msgspec.Raw):
            raise bad_answer("an end without a head")
        return decode(line.head, kind)

    async def done(self, kind: type[T], *, forever: bool = False) -> T:
        """The program's last line; `forever` is for a caller who bounds the wait. Raises the error that the program says."""
        line = await self._line(None if forever else self._limits.work_s)
        if not isinstance(line.ok, msgspec.Raw):
            raise bad_answer("a second head")
        return decode(line.ok, kind)

    async def read(self) -> bytes:
        """Octets of its data; b"" at the end."""
        return await self._bounded(self._stream.read(), self._limits.answer_s)

    async def lines(self, *, within: float | None) -> AsyncIterator[bytes]:
        """The lines of its data; each may take `within` seconds, or as long as it takes."""
        lines = _Lines(self._stream.read)
        while True:
            line = await self._bounded(lines.next(), within)
            if line is None:
                return
            yield line

    async def write(self, data: bytes) -> bool:
        """Gives it octets of the upload; False when it takes no more, for a reason that `done` knows."""
        try:
            await self._bounded(self._stream.write(data), self._limits.answer_s)
        except GuestError:
            return False
        return True

    async def write_end(self) -> None:
        """The upload is whole."""
        await self._bounded(self._stream.write_eof(), self._limits.answer_s)

    async def terminate(self) -> None:
        """Asks it to end, and to clear away what it wrote."""
        await self._bounded(self._stream.terminate(), self._limits.answer_s)

    async def _line(self, within: float | None) -> Line:
        raw = await self._bounded(self._errors.next(), within)
        if raw is None:
            raise await self._ended()
        line = decode(raw, Line)
        if self._over:
            raise bad_answer("a line behind the last one")
        if isinstance(line.errno, msgspec.Raw):
            raise failed(decode(raw, Failure))
        self._over = isinstance(line.ok, msgspec.Raw)
        return line

    async def _ended(self) -> HatchwayError:
        """Why a program said nothing more: it was ended for lack of memory, or lies."""
        proc = await self._bounded(self._stream.wait(), self._limits.answer_s)
        if proc.reason is ExitReason.OOM:
            return HostExhausted(
                "sandbox_memory_full",
                "The sandbox has too little memory for this; files on a memory file system (/dev/shm, /run) take it.",
                "Remove such files, end something that runs, or use a sandbox with more memory_mib.",
            )
        return bad_answer("it ended without saying how")

    async def _bounded(self, waiting: Awaitable[A], within: float | None) -> A:
        try:
            with _translated():
                async with asyncio.timeout(within):
                    return await waiting
        except TimeoutError:
            raise no_answer(within or 0) from None


class _Lines:
    """Lines out of pieces, none longer than the protocol admits."""

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        self._read = read
        self._rest = bytearray()
        self._from = 0

    async def next(self) -> bytes | None:
        """The next line, None at the end."""
        searched = self._from
        while True:
            end = self._rest.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._rest[self._from : end])
                self._from = end + 1
                if len(line) > MAX_LINE:
                    raise bad_answer("a line without end")
                return line
            if len(self._rest) - self._from > MAX_LINE:
                raise bad_answer("a line without end")
            del self._rest[: self._from]
            self._from, searched = 0, len(self._rest)
            piece = await self._read()
            if not piece:
                if self._rest:
                    raise bad_answer("half a line")
                return None
            self._rest += piece


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except LinkLost as error:
        raise unreachable(error) from error


@contextlib.asynccontextmanager
async def run(
    link: GuestLink,
    operation: str,
    arguments: Sequence[Argument],
    *,
    user: str | None,
    limits: FileLimits,
    upload: bool = False,
) -> AsyncIterator[Program]:
    """Runs an operation as a user (None: `user`, or `root` where there is no such one), until the block is left.

    An argument that is None is left out. Raises `Unprocessable("unknown_user")`, `Exhausted("too_many_file_operations")` and what
    `Program` does.
    """
    argv: list[str | bytes] = ["files", operation]
    for key, value in arguments:
        if value is not None:
            argv.append(f"{key}=".encode() + (value if isinstance(value, bytes) else str(value).encode()))
    stream = await _start(link, argv, user, limits, upload=upload)
    try:
        yield Program(stream, limits)
    finally:
        await stream.close()


async def _start(
    link: GuestLink, argv: Sequence[str | bytes], user: str | None, limits: FileLimits, *, upload: bool
) -> GuestStream:
    try:
        async with asyncio.timeout(limits.answer_s):
            try:
                return await link.open_builtin(argv, user=user or DEFAULT_USER, stdin=upload)
            except GuestError as error:
                if user is not None or not is_unknown_user(error):
                    raise
            return await link.open_builtin(argv, user=FALLBACK_USER, stdin=upload)
    except GuestError as error:
        raise refused(error) from error
    except LinkLost as error:
        raise unreachable(error) from error
    except ValueError as error:
        raise Unprocessable("file_operation_invalid", str(error), "Use shorter paths, without NUL.") from error
    except TimeoutError:
        raise no_answer(limits.answer_s) from None
