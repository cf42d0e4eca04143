"""Where a store keeps its objects: a folder, or whatever obstore reaches by URL. Objects are small, and are written whole or not at all."""

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar
from urllib.parse import urlsplit

from hatchway.domain.errors import HatchwayError, Unavailable, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.wire.small_files import sync_folder

P = ParamSpec("P")
T = TypeVar("T")

SCHEMES = ("file", "s3", "gs", "az", "memory")


class Backend(Protocol):
    """Objects by key. Whatever cannot be done now raises `Unavailable("store_unavailable")`."""

    async def put(self, key: str, octets: bytes) -> None:
        """Makes or replaces an object; it is durable, and seen by all, when this returns."""

    async def get(self, key: str) -> bytes | None:
        """The object; None where there is none."""

    async def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    async def age_s(self, key: str) -> float | None:
        """Seconds since it was written, by the store's clock as far as it is known; None where there is none."""

    async def keys(self, prefix: str, limit: int) -> list[str]:
        """Up to `limit` keys that begin with `prefix`, which ends with a slash."""

    async def delete(self, key: str) -> None:
        """Removes an object. Idempotent."""


def connect(url: str) -> Backend:
    """The backend of a URL: `file:///…`, `s3://…`, `gs://…`, `az://…`, `memory://…`. Raises `Unprocessable("store_invalid")`."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return Folder(Path(parts.path))
    if parts.scheme not in SCHEMES or parts.scheme == "file" or parts.username or parts.password:
        raise Unprocessable(
            "store_invalid",
            f"The store {parts.scheme}://… cannot be used.",
            "Write file:///FOLDER, s3://BUCKET/PREFIX, gs://… or az://…; credentials come from the environment.",
        )
    return Objects(url)


class Folder:
    """A folder of this host, or of a file system that hosts share. Who may read and write what is in it may do so with it all: it has the folder's permissions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, key: str, octets: bytes) -> None:
        """See `Backend`: temporary name, fsync, rename."""
        await self._do(self._put, key, octets)

    async def get(self, key: str) -> bytes | None:
        """See `Backend`."""
        return await self._do(self._get, key)

    async def exists(self, key: str) -> bool:
        """See `Backend`."""
        return await self._do(lambda: (self._folder / key).exists())

    async def age_s(self, key: str) -> float | None:
        """See `Backend`."""
        return await self._do(self._age, key)

    async def keys(self, prefix: str, limit: int) -> list[str]:
        """See `Backend`."""
        return await self._do(self._keys, prefix, limit)

    async def delete(self, key: str) -> None:
        """See `Backend`."""
        await self._do(self._delete, key)

    async def _do(self, what: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
        try:
            return await asyncio.to_thread(what, *arguments, **more)
        except OSError as error:
            raise unavailable(str(error)) from error

    def _put(self, key: str, octets: bytes) -> None:
        path = self._folder / key
        mode = self._make(path.parent)
        temporary = path.with_name(f".{path.name}.{new_id()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.fchmod(fd, mode & 0o666)
                rest = memoryview(octets)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def _make(self, folder: Path) -> int:
        """Makes a folder below the store's, with its permissions; returns them."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = stat.S_IMODE(self._folder.stat().st_mode)
        for one in reversed([folder, *folder.parents]):
            if one.is_relative_to(self._folder) and one != self._folder:
                with contextlib.suppress(FileExistsError):
                    one.mkdir(mode=0o700)
                    one.chmod(mode)
        return mode

    def _get(self, key: str) -> bytes | None:
        try:
            return (self._folder / key).read_bytes()
        except FileNotFoundError:
            return None

    def _age(self, key: str) -> float | None:
        try:
            return max(0.0, time.time() - (self._folder / key).stat().st_mtime)
        except FileNotFoundError:
            return None

    def _keys(self, prefix: str, limit: int) -> list[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder / prefix) as entries:
            found = (prefix + entry.name for entry in entries if not entry.name.startswith("."))
            return [key for key, _ in zip(found, range(limit), strict=False)]
        return []

    def _delete(self, key: str) -> None:
        path = self._folder / key
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is empty now takes no place either
            path.parent.rmdir()


class Objects:
    """An object store; its library retries what is worth it."""

    def __init__(self, url: str) -> None:
        import obstore.store

        try:
            self._store = obstore.store.MemoryStore() if url.startswith("memory:") else obstore.store.from_url(url)
        except Exception as error:
            raise Unprocessable(
                "store_invalid",
                f"The store cannot be used: {type(error).__name__}.",
                "Compare its URL and the environment.",
            ) from error

    async def put(self, key: str, octets: bytes) -> None:
        """See `Backend`."""
        async with _explained(missing=True):
            await self._store.put_async(key, octets)

    async def get(self, key: str) -> bytes | None:
        """See `Backend`."""
        try:
            async with _explained():
                return bytes(await (await self._store.get_async(key)).bytes_async())
        except FileNotFoundError:
            return None

    async def exists(self, key: str) -> bool:
        """See `Backend`."""
        return await self.age_s(key) is not None

    async def age_s(self, key: str) -> float | None:
        """See `Backend`."""
        from datetime import UTC, datetime

        try:
            async with _explained():
                found = await self._store.head_async(key)
        except FileNotFoundError:
            return None
        return max(0.0, (datetime.now(UTC) - found["last_modified"]).total_seconds())

    async def keys(self, prefix: str, limit: int) -> list[str]:
        """See `Backend`."""
        found: list[str] = []
        async with _explained(missing=True):
            async for page in self._store.list(prefix, chunk_size=limit):
                found += [one["path"] for one in page]
                if len(found) >= limit:
                    break
        return found[:limit]

    async def delete(self, key: str) -> None:
        """See `Backend`."""
        try:
            async with _explained():
                await self._store.delete_async(key)
        except FileNotFoundError:
            return


@contextlib.asynccontextmanager
async def _explained(*, missing: bool = False) -> AsyncIterator[None]:
    """Turns what the library raises into ours; with `missing` also what says that there is no such thing: then it is the bucket."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not missing:
            raise
        raise unavailable(f"{type(error).__name__}: {str(error)[:300]}") from error


def unavailable(why: str) -> HatchwayError:
    """The store cannot be used now."""
    return Unavailable(
        "store_unavailable", f"The store of artifacts cannot be used: {why}", "See that it is there, and try again."
    )
