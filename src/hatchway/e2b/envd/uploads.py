"""`POST /files`: files into a sandbox, from a form or as they are; and `POST /files/compose`, several into one.

Octets go through as they come. A file is emptied and written in place, as E2B's agent does it: links to it stay, and whoever watches sees one
creation, one change of owner, one write of a small file.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from hatchway.client import FileEntry, NotFound
from hatchway.client import errors as ours
from hatchway.e2b.envd import multipart, paths
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.entries import as_text, cleaned
from hatchway.e2b.envd.fileaccess import Access, let_in, of_files
from hatchway.e2b.envd.messages import of as message_of
from hatchway.e2b.envd.requests import Departed, Request
from hatchway.e2b.errors import E2bError
from hatchway.e2b.held import Full, Share
from hatchway.e2b.signatures import WRITE

SMALL = 256 * 1024
"""Octets of a file that is gathered before it is written: it then goes in one request."""
PIECE = 256 * 1024
MAX_PARTS = 1_000
MAX_SOURCES = 1_000
MAX_COMPOSE = 1024 * 1024
METADATA = "x-metadata-"
MAX_KEY, MAX_METADATA = 246, 4096
_GZIP = 47
"""With its head, or that of zlib."""


def metadata_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The metadata that the headers of an upload give its files. Raises `E2bError` 400."""
    found = {name.removeprefix(METADATA): value for name, value in headers.items() if name.startswith(METADATA)}
    for name, value in found.items():
        if not name or len(name) > MAX_KEY:
            raise E2bError(400, f"invalid metadata: the key {name[:40]!r} has {len(name)} octets, of 1 to {MAX_KEY}")
        if any(not " " <= one <= "~" for one in name + value):
            raise E2bError(400, f"invalid metadata: {name[:40]!r} is not printable ASCII")
    if sum(len(name) + len(value) for name, value in found.items()) > MAX_METADATA:
        raise E2bError(400, f"invalid metadata: it has more than {MAX_METADATA} octets in all")
    return found


@dataclass
class Upload:
    """One request."""

    request: Request
    token: str | None
    _written: list[dict[str, object]] = field(default_factory=list)
    _paths: set[str] = field(default_factory=set)

    async def do(self) -> list[dict[str, object]]:
        """Lets in and writes; returns what is told of each file. Raises `E2bError`, `Departed`."""
        access = await let_in(self.request, WRITE, self.token)
        attributes = metadata_of(self.request.headers)
        content_type = self.request.headers.get("content-type", "")
        media = content_type.partition(";")[0].strip().lower()
        if media == "multipart/form-data":
            await self._form(access, content_type, attributes)
        elif media == "application/octet-stream":
            if access.path is None:
                raise E2bError(400, "path is required")
            await self._write(access, access.path, self._body(), attributes)
        else:
            raise E2bError(400, f"unsupported content type: {media[:80] or 'none'}")
        return self._written

    async def _form(self, access: Access, content_type: str, attributes: Mapping[str, str]) -> None:
        async with aclosing(_events(multipart.Form(content_type), self._body())) as events:
            parts = 0
            async for event in events:
                if not isinstance(event, multipart.Begin):
                    continue
                parts += 1
                if parts > MAX_PARTS:
                    raise E2bError(400, f"the form has more than {MAX_PARTS} parts")
                if event.name == "file":
                    await self._write(access, _path(access, event), _part(events), attributes)

    async def _body(self) -> AsyncGenerator[bytes, None]:
        coding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity", "gzip"):
            raise E2bError(400, f"unsupported content encoding: {coding[:40]}")
        pieces = self.request.pieces()
        async for piece in unpacked(pieces) if coding == "gzip" else pieces:
            yield piece

    async def _write(
        self, access: Access, path: str, pieces: AsyncIterator[bytes], attributes: Mapping[str, str]
    ) -> None:
        if path in self._paths:
            raise E2bError(400, f"you cannot upload multiple files to the same path '{as_text(path)}'")
        self._paths.add(path)
        first, whole = await _gathered(pieces, self.request.share)
        cut: list[BaseException] = []

        async def all_of() -> AsyncIterator[bytes]:
            yield first
            try:
                async for piece in pieces:
                    yield piece
            except (E2bError, Departed) as error:  # the HTTP library would wrap it
                cut.append(error)
                raise

        content = first if whole else all_of()
        try:
            entry = await access.files.write(
                path, content, parents=True, in_place=True, attributes=attributes, user=paths.ROOT
            )
        except BaseException as error:
            if cut:
                raise cut[0] from None
            if not isinstance(error, ours.HatchwayError):
                raise
            if self.request.gone(error):
                raise self.request.not_found() from None
            raise of_files(error, path) from None
        finally:
            self.request.share.hold(0)
        self._written.append(_told(entry, attributes))


def _path(access: Access, part: multipart.Begin) -> str:
    if access.path is not None:
        return access.path
    if not part.filename:
        raise E2bError(400, "a part has no filename, and the query no path")
    try:
        return paths.local(part.filename)
    except ConnectError as error:
        raise E2bError(400, error.message) from None


def _told(entry: FileEntry, attributes: Mapping[str, str]) -> dict[str, object]:
    told: dict[str, object] = {"path": as_text(cleaned(entry.path)), "name": as_text(entry.name), "type": "file"}
    return {**told, "metadata": dict(attributes)} if attributes else told


async def _events(form: multipart.Form, body: AsyncIterator[bytes]) -> AsyncGenerator[multipart.Event, None]:
    async for piece in body:
        for event in form.feed(piece):
            yield event
    form.finish()


async def _part(events: AsyncIterator[multipart.Event]) -> AsyncIterator[bytes]:
    """The octets of the part that has begun."""
    async for event in events:
        if isinstance(event, multipart.End):
            return
        assert isinstance(event, bytes)  # parts do not lie in each other
        yield event


async def _gathered(pieces: AsyncIterator[bytes], share: Share) -> tuple[bytes, bool]:
    """The beginning of a body, and whether that is all; where memory is short, the beginning is shorter."""
    found = bytearray()
    async for piece in pieces:
        found += piece
        try:
            share.hold(len(found))
        except Full:
            return bytes(found), False
        if len(found) > SMALL:
            return bytes(found), False
    return bytes(found), True


async def unpacked(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Unpacks gzip in pieces of a bounded size. Raises `E2bError` 400."""
    member = zlib.decompressobj(_GZIP)
    begun = False
    try:
        async for piece in pieces:
            rest = piece
            while rest:
                begun = True
                if member.eof:
                    member = zlib.decompressobj(_GZIP)
                data = await asyncio.to_thread(member.decompress, rest, PIECE)
                while data:
                    yield data
                    more = member.unconsumed_tail
                    data = b"" if member.eof else await asyncio.to_thread(member.decompress, more, PIECE)
                rest = member.unused_data
    except zlib.error as error:
        raise E2bError(400, f"the body is no gzip: {error}") from None
    if begun and not member.eof:
        raise E2bError(400, "the body is no gzip: it is cut off")


async def compose(request: Request) -> dict[str, object]:
    """Puts several files together as one, and removes them. Raises `E2bError`."""
    try:
        message = message_of(await request.body(MAX_COMPOSE))
        sources = [paths.local(source) for source in message.texts("source_paths")]
        target, user = message.text("destination"), message.text("username") or request.user()
        if not target or not sources:
            raise E2bError(400, "source_paths and destination are required")
        if len(sources) > MAX_SOURCES:
            raise E2bError(400, f"there are more than {MAX_SOURCES} source_paths")
        path, files = paths.local(target), paths.files_of(await request.sandbox(), user)
    except ConnectError as error:
        raise E2bError(401 if error.code == "unauthenticated" else 400, error.message) from None
    reading = sources[0]

    async def octets() -> AsyncIterator[bytes]:
        nonlocal reading
        for reading in sources:
            async for piece in files.stream(reading, user=paths.ROOT):
                yield piece

    try:
        for source in sources:
            found = await files.stat(source, user=paths.ROOT)
            if found.type != "file":
                raise E2bError(400, f"path '{source}' is not a regular file")
        # As a whole: the target may be one of the sources.
        entry = await files.write(path, octets(), parents=True, user=paths.ROOT)
        for source in dict.fromkeys(sources):
            if (await files.stat(source, follow=False, user=paths.ROOT)).path != entry.path:
                await files.remove(source, user=paths.ROOT)
    except NotFound as error:
        if error.code != "file_not_found":
            raise request.not_found() from None
        raise of_files(error, reading) from None
    except ours.HatchwayError as error:
        if request.gone(error):
            raise request.not_found() from None
        raise of_files(error, reading) from None
    return _told(entry, {})
