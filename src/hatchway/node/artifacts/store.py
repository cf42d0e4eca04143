"""The store of artifacts: files cut into pieces that are named by their digest, each stored once however many need it.

```
pieces/SHA256            zstd of 8 MiB of a file, or of its rest; SHA256 is of what is in it
refs/SHA256/OWNER        empty: OWNER needs the piece
doomed/SHA256            the piece is about to be removed, because nobody needed it
```
A piece that is all zero is stored nowhere. An owner that begins again goes on where it was: what is there is not sent again.

Removing and needing a piece exclude each other without a lock: who needs it writes its reference first and then looks for `doomed`; who
removes it writes `doomed` first and then looks for references. So one of the two sees the other.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from hatchway.domain.errors import HatchwayError, Internal
from hatchway.node.artifacts.backends import Backend
from hatchway.node.artifacts.extents import write_all

PIECE = 8 << 20
AT_ONCE = 4
"""Pieces on their way at one time, of all files of this process."""
DOOMED_FOR_S = 600.0
"""Who writes `doomed` and dies leaves it; older ones count no more."""
WAIT_S = 0.2
ZERO = ""
"""In the place of a digest: the piece is all zero."""

T = TypeVar("T")
Progress = Callable[[float], None]


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the store: its size in octets and the digests of its pieces."""

    size: int
    pieces: tuple[str, ...]


def damaged(what: str) -> HatchwayError:
    """What the store gave is not what was put there."""
    return Internal(
        "artifact_damaged", f"The store has not what was put there: {what}.", "Restore it from a backup of the store."
    )


class Store:
    """Files in a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._turns = asyncio.Semaphore(AT_ONCE)

    def describe(self, path: Path) -> Blob:
        """What a file will be in the store. Blocks: reads all of it. Raises `OSError`."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            return Blob(size=size, pieces=tuple(_digest_at(fd, at, PIECE) for at in range(0, size, PIECE)))
        finally:
            os.close(fd)

    async def put(self, path: Path, owner: str, progress: Progress | None = None, *, known: Blob | None = None) -> Blob:
        """Stores a file, of which `known` may be what it is, for `owner`; all of it has landed when this returns.

        Raises `store_unavailable`, `artifact_damaged` for a file that is not `known` any more, `OSError`.
        """
        blob = await asyncio.to_thread(self.describe, path) if known is None else known
        count, done = len(blob.pieces), 0

        async def one(number: int, digest: str) -> None:
            nonlocal done
            async with self._turns:
                if digest != ZERO:
                    await self._ensure(digest, lambda: _packed_piece(path, number, digest), owner)
            done += 1
            if progress is not None:
                progress(done / count)

        await _all(one(number, digest) for number, digest in enumerate(blob.pieces))
        return blob

    async def put_octets(self, octets: bytes, owner: str) -> str:
        """Stores octets of at most one piece for `owner`; returns their digest."""
        assert 0 < len(octets) <= PIECE
        digest = hashlib.sha256(octets).hexdigest()
        await self._ensure(digest, lambda: _compressed(octets), owner)
        return digest

    async def get_octets(self, digest: str) -> bytes:
        """Returns octets by their digest. Raises `artifact_damaged`, `store_unavailable`."""
        packed = await self._backend.get(f"pieces/{digest}")
        if packed is None:
            raise damaged(f"the piece {digest} is gone")
        try:
            octets = await asyncio.to_thread(_decompressed, packed)
        except zstandard.ZstdError:
            raise damaged(f"the piece {digest} cannot be decompressed") from None
        if hashlib.sha256(octets).hexdigest() != digest:
            raise damaged(f"the piece {digest} has another digest")
        return octets

    async def fetch(self, blob: Blob, target: Path, progress: Progress | None = None) -> None:
        """Makes `target`, sparse and durable, from the store; goes on with one that is there in part. Raises what `get_octets` does, `OSError`."""
        if len(blob.pieces) != -(-blob.size // PIECE):
            raise damaged("a list of pieces is of another length than its file")
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        done = 0

        async def one(number: int, digest: str) -> None:
            nonlocal done
            length = min(PIECE, blob.size - number * PIECE)
            async with self._turns:
                if await asyncio.to_thread(_digest_at, fd, number * PIECE, length) != digest:
                    octets = bytes(length) if digest == ZERO else await self.get_octets(digest)
                    if len(octets) != length:
                        raise damaged(f"the piece {digest} has another length")
                    await asyncio.to_thread(_write_sparse, fd, octets, number * PIECE)
            done += 1
            if progress is not None:
                progress(done / len(blob.pieces))

        try:
            os.ftruncate(fd, blob.size)
            await _all(one(number, digest) for number, digest in enumerate(blob.pieces))
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)

    async def need(self, digests: Iterable[str], owner: str) -> None:
        """Says that `owner` needs pieces that are there, so that they stay. Raises `artifact_damaged` where one is gone."""

        async def one(digest: str) -> None:
            async with self._turns:
                await self._refer(digest, owner)
                if not await self._backend.exists(f"pieces/{digest}"):
                    raise damaged(f"the piece {digest} is gone")

        await _all(one(digest) for digest in set(digests) - {ZERO})

    async def release(self, digests: Iterable[str], owner: str) -> None:
        """`owner` needs these pieces no more; those that nobody needs then are removed. Idempotent. Raises `store_unavailable`."""

        async def one(digest: str) -> None:
            async with self._turns:
                await self._backend.delete(f"refs/{digest}/{owner}")
                if await self._backend.keys(f"refs/{digest}/", 1):
                    return
                await self._backend.put(f"doomed/{digest}", b"")
                if not await self._backend.keys(f"refs/{digest}/", 1):
                    await self._backend.delete(f"pieces/{digest}")
                await self._backend.delete(f"doomed/{digest}")

        await _all(one(digest) for digest in set(digests) - {ZERO})

    async def _ensure(self, digest: str, packed: Callable[[], bytes], owner: str) -> None:
        await self._refer(digest, owner)
        if not await self._backend.exists(f"pieces/{digest}"):
            await self._backend.put(f"pieces/{digest}", await asyncio.to_thread(packed))

    async def _refer(self, digest: str, owner: str) -> None:
        await self._backend.put(f"refs/{digest}/{owner}", b"")
        while True:
            age = await self._backend.age_s(f"doomed/{digest}")
            if age is None or age > DOOMED_FOR_S:
                return
            await asyncio.sleep(WAIT_S)  # it is being removed just now: afterwards it is seen whether it is there


async def _all(works: Iterable[Awaitable[T]]) -> list[T]:
    """Does all; the first error ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _packed_piece(path: Path, number: int, digest: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        octets = _read_at(fd, number * PIECE, PIECE) or b""
    finally:
        os.close(fd)
    if hashlib.sha256(octets).hexdigest() != digest:
        raise damaged(f"{path.name} was changed while it was stored")
    return _compressed(octets)


def _read_at(fd: int, offset: int, length: int) -> bytes | None:
    """What is there; None where it is all zero, which is seen without reading where it is a hole."""
    try:
        if os.lseek(fd, offset, os.SEEK_DATA) >= offset + length:
            return None
    except OSError:
        return None
    octets = b""
    while len(octets) < length and (more := os.pread(fd, length - len(octets), offset + len(octets))):
        octets += more
    return octets if octets.count(0) != len(octets) else None


def _digest_at(fd: int, offset: int, length: int) -> str:
    octets = _read_at(fd, offset, length)
    return ZERO if octets is None else hashlib.sha256(octets).hexdigest()


def _write_sparse(fd: int, octets: bytes, offset: int) -> None:
    step = 65_536
    for start in range(0, len(octets), step):
        piece = octets[start : start + step]
        if any(piece) or any(os.pread(fd, len(piece), offset + start)):
            write_all(fd, piece, offset + start)


def _compressed(octets: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(octets)


def _decompressed(packed: bytes) -> bytes:
    octets: bytes = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed).read(PIECE + 1)
    return octets
