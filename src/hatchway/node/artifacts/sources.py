"""Where archives may be fetched from: addresses that lie under what the operator allows, and no other.

An address is compared as it is written, so only those are taken that can be written in one way: no user, query, fragment, percent sign or
dot segments. A server that leads elsewhere (a redirect) is not followed: nobody has allowed that place.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from hatchway.domain.errors import HatchwayError, NotFound, Unavailable, Unprocessable

PIECE = 1 << 20
"""Octets that are read at once of a folder or an object store."""
SILENT_S = 60.0
"""How long a server may say nothing."""
PROJECTS = "archives/"
"""Below the store that nodes share: what is under `archives/PROJECT/` is that project's to fetch."""

_ADDRESS = re.compile(r"(file|s3|gs|az|https?)://[A-Za-z0-9._~:/+=,@-]{1,900}", re.ASCII)
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Opened:
    """What is there, from octet `start` on. `version` is another one when the content is."""

    size: int
    version: str
    start: int
    chunks: AsyncIterator[bytes]


class Source(Protocol):
    """One archive somewhere."""

    def open(self, at: int, version: str) -> AbstractAsyncContextManager[Opened]:
        """Begins to read at `at`, where that is still `version`, else at 0. Raises `NotFound("unknown_archive")`, `Unavailable("archive_unreachable")`."""


def check_prefix(prefix: str) -> str:
    """A prefix that an operator allows, which ends with a slash. Raises `Unprocessable("config_invalid")`."""
    if not prefix.endswith("/") or not _written_in_one_way(prefix[:-1]):
        raise Unprocessable(
            "config_invalid",
            f"{prefix[:200]!r} in `import_from` is no prefix of addresses.",
            "Write file:///FOLDER/, s3://BUCKET/PREFIX/, gs://…/, az://…/ or https://HOST/PATH/, with a slash at the end.",
        )
    return prefix


def find(url: str, project: str, *, store: str | None, allowed: Sequence[str]) -> Source:
    """The archive at an address. Raises `Unprocessable("url_not_allowed")` for one that lies under nothing that is allowed."""
    own = [] if store is None else [f"{store.rstrip('/')}/{PROJECTS}{project}/"]
    prefix = next((one for one in (*own, *allowed) if url.startswith(one) and len(url) > len(one)), None)
    if prefix is None or not _written_in_one_way(url):
        raise Unprocessable(
            "url_not_allowed",
            "Archives may not be fetched from this address.",
            "Use one below `archives/PROJECT/` in the service's store, or one that its operator has listed in `import_from`; or upload the file.",
            field="url",
        )
    if url.startswith("file:"):
        return _File(Path(urlsplit(prefix).path), Path(urlsplit(url).path))
    if url.startswith("http"):
        return _Served(url)
    return _Object(prefix, url.removeprefix(prefix))


def _written_in_one_way(url: str) -> bool:
    if not _ADDRESS.fullmatch(url):
        return False
    parts = urlsplit(url)
    if parts.netloc != parts.netloc.lower() or "@" in parts.netloc:
        return False
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        return False  # what comes in the clear can be another's
    segments = parts.path.split("/")[1:]
    return bool(parts.netloc) != (parts.scheme == "file") and all(one not in ("", ".", "..") for one in segments)


class _File:
    """A file below a folder that is allowed; a link that leads out of it is none."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path

    @contextlib.asynccontextmanager
    async def open(self, at: int, version: str) -> AsyncIterator[Opened]:
        """See `Source`."""
        try:
            fd = await asyncio.to_thread(self._open)
        except FileNotFoundError:
            raise unknown() from None
        except OSError as error:
            raise unreachable(error.strerror or str(error)) from error
        try:
            found = os.fstat(fd)
            now = f"{found.st_ino}.{found.st_mtime_ns}.{found.st_size}"
            start = at if version == now else 0
            yield Opened(found.st_size, now, start, _read(fd, start))
        finally:
            os.close(fd)

    def _open(self) -> int:
        real = self._path.resolve(strict=True)
        if not real.is_relative_to(self._folder.resolve()) or not real.is_file():
            raise FileNotFoundError
        return os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


async def _read(fd: int, at: int) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(os.pread, fd, PIECE, at):
        yield piece
        at += len(piece)


class _Object:
    """An object below a prefix of an object store; the credentials come from the environment."""

    def __init__(self, prefix: str, key: str) -> None:
        self._prefix, self._key = prefix, key

    @contextlib.asynccontextmanager
    async def open(self, at: int, version: str) -> AsyncIterator[Opened]:
        """See `Source`."""
        import obstore.store

        with _explained():
            store = obstore.store.from_url(self._prefix.rstrip("/"))
            found = await store.head_async(self._key)
        now = str(found["e_tag"] or found["last_modified"].isoformat())
        start, size = (at if version == now else 0), int(found["size"])
        yield Opened(size, now, start, self._read(store, start, size))

    async def _read(self, store: Any, at: int, size: int) -> AsyncIterator[bytes]:
        while at < size:
            with _explained():
                piece = bytes(await store.get_range_async(self._key, start=at, length=min(PIECE, size - at)))
            if not piece:
                return
            yield piece
            at += len(piece)


@contextlib.contextmanager
def _explained() -> Any:
    try:
        yield
    except FileNotFoundError:
        raise unknown() from None
    except Exception as error:
        raise unreachable(f"{type(error).__name__}: {str(error)[:200]}") from error


class _Served:
    """A file that a web server has."""

    def __init__(self, url: str) -> None:
        self._url = url

    @contextlib.asynccontextmanager
    async def open(self, at: int, version: str) -> AsyncIterator[Opened]:
        """See `Source`."""
        import httpx

        headers = {"accept-encoding": "identity"}
        if at and version:
            headers |= {"range": f"bytes={at}-", "if-range": version}
        try:
            async with (
                httpx.AsyncClient(follow_redirects=False, timeout=SILENT_S) as client,
                client.stream("GET", self._url, headers=headers) as answer,
            ):
                yield _opened(answer.status_code, dict(answer.headers), answer.aiter_raw())
        except httpx.HTTPError as error:
            raise unreachable(f"{type(error).__name__}: {error}") from error


def _opened(status: int, headers: dict[str, str], chunks: AsyncIterator[bytes]) -> Opened:
    """What the head of an answer says. Of weak validators none is one: they do not tell that every octet is the same."""
    version = headers.get("etag", "")
    version = "" if version.startswith("W/") else version
    if status in (404, 410):
        raise unknown()
    if status == 200 and headers.get("content-length", "").isdigit() and "content-encoding" not in headers:
        return Opened(int(headers["content-length"]), version, 0, chunks)
    part = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", headers.get("content-range", ""), re.ASCII)
    if status == 206 and part is not None:
        return Opened(int(part[2]), version, int(part[1]), chunks)
    raise unreachable(f"the server answered {status}" + (" without a length" if status == 200 else ""))


def unknown() -> HatchwayError:
    """Nothing is there."""
    return NotFound("unknown_archive", "There is no archive at this address.", "Compare the address.")


def unreachable(why: str) -> HatchwayError:
    """It cannot be read now."""
    return Unavailable(
        "archive_unreachable", f"The archive cannot be fetched: {why}", "Try again; it goes on where it was."
    )
