"""`GET /files`: the octets of a file, whole or a range, under conditions, and packed where a client takes nothing else."""

import asyncio
import email.utils
import mimetypes
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import Send

from hatchway.client import FileHead, RangeUnsatisfiable
from hatchway.client import errors as ours
from hatchway.e2b.envd import paths
from hatchway.e2b.envd.fileaccess import Access, let_in, of_files
from hatchway.e2b.envd.requests import Cut, Request
from hatchway.e2b.errors import E2bError
from hatchway.e2b.signatures import READ

_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.ASCII)
_GZIP = 31
IDENTITY, GZIP = "identity", "gzip"


@dataclass(frozen=True, slots=True)
class _Part:
    offset: int = 0
    length: int | None = None
    tail: int | None = None

    @property
    def whole(self) -> bool:
        return self.offset == 0 and self.length is None and self.tail is None


def coding(accepted: str | None) -> str:
    """How the answer is packed: as it is wherever that is taken. Raises `E2bError` 406 where nothing of ours is (RFC 9110, 12.5.3)."""
    if accepted is None or not accepted.strip():
        return IDENTITY
    weights: dict[str, float] = {}
    for part in accepted.lower().split(","):
        name, _, parameters = part.partition(";")
        try:
            weight = (
                float(parameters.strip().removeprefix("q=").strip()) if parameters.strip().startswith("q=") else 1.0
            )
        except ValueError:
            weight = 1.0
        weights.setdefault(name.strip(), weight)
    if weights.get(IDENTITY, weights.get("*", 1.0)) > 0:
        return IDENTITY
    if weights.get(GZIP, weights.get("*", 0.0)) > 0:
        return GZIP
    raise E2bError(406, f"no acceptable encoding found, supported: {IDENTITY}, {GZIP}")


class Download:
    """Answers one request."""

    def __init__(self, request: Request, send: Send, token: str | None) -> None:
        self._request = request
        self._send = send
        self._token = token
        self._begun = False

    async def answer(self) -> None:
        """Lets in, reads and answers. Raises `E2bError`, `Cut`, `Departed`."""
        access = await let_in(self._request, READ, self._token)
        if access.path is None:
            raise E2bError(400, "path is required")
        packed = coding(self._request.headers.get("accept-encoding"))
        await self._request.while_there(self._stream(access, access.path, packed))

    async def _stream(self, access: Access, path: str, packed: str) -> None:
        part = _Part() if packed == GZIP else _part(self._request.headers.get("range"))
        try:
            if await self._try(access, path, part, packed):
                return
            await self._try(access, path, _Part(), packed)
        except RangeUnsatisfiable as error:
            size = error.extra.get("size")
            await self._head(416, [(b"content-range", b"bytes */%d" % (size if isinstance(size, int) else 0))])
            await self._send({"type": "http.response.body", "body": b""})
        except ours.HatchwayError as error:
            if self._begun:
                raise Cut from None
            if self._request.gone(error):
                raise self._request.not_found() from None
            raise of_files(error, access.named) from None

    async def _try(self, access: Access, path: str, part: _Part, packed: str) -> bool:
        """Answers, unless the range that was asked for is not to be given."""
        items = access.files.open(path, offset=part.offset, length=part.length, tail=part.tail, user=paths.ROOT)
        assert isinstance(items, AsyncGenerator)  # the driver's
        async with aclosing(items):
            head = await anext(items)
            assert isinstance(head, FileHead)  # it comes first
            refused = self._condition(head)
            if refused is not None:
                await self._head(refused, _common(head, path))
                await self._send({"type": "http.response.body", "body": b""})
                return True
            if not part.whole and not self._may_be_part(head):
                return False
            await self._begin(head, path, part, packed)
            pieces = _packed(items) if packed == GZIP else items
            if self._request.scope["method"] != "HEAD":
                async for piece in pieces:
                    assert isinstance(piece, bytes)  # the head is taken
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})
        return True

    async def _begin(self, head: FileHead, path: str, part: _Part, packed: str) -> None:
        headers = _common(head, path)
        status = 200
        if packed == GZIP:
            headers.append((b"content-encoding", b"gzip"))
        elif head.length is not None:
            headers.append((b"content-length", b"%d" % head.length))
        if not part.whole and head.length is not None:
            status, last = 206, head.offset + head.length - 1
            whole = b"*" if head.size is None else b"%d" % head.size
            headers.append((b"content-range", b"bytes %d-%d/%b" % (head.offset, last, whole)))
        await self._head(status, headers)

    async def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _condition(self, head: FileHead) -> int | None:
        """The status where a condition on the last change does not hold. There are no tags: `If-Match` of one fails, `If-None-Match` holds."""
        headers, modified = self._request.headers, head.modified
        if "if-match" in headers and headers["if-match"].strip() != "*":
            return 412
        since = _date(headers.get("if-unmodified-since"))
        if "if-match" not in headers and since is not None and modified is not None and modified > since:
            return 412
        if "if-none-match" in headers:
            return 304 if headers["if-none-match"].strip() == "*" else None
        since = _date(headers.get("if-modified-since"))
        return 304 if since is not None and modified is not None and modified <= since else None

    def _may_be_part(self, head: FileHead) -> bool:
        text = self._request.headers.get("if-range")
        return text is None or (head.modified is not None and _date(text) == head.modified)


async def _packed(items: AsyncIterator[FileHead | bytes]) -> AsyncIterator[bytes]:
    packing = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    async for piece in items:
        assert isinstance(piece, bytes)  # the head is taken
        if octets := await asyncio.to_thread(packing.compress, piece):
            yield octets
    yield packing.flush()


def _part(text: str | None) -> _Part:
    """The one range that is asked for; what is several, malformed or of another unit is as if it were not there (RFC 9110, 14.2)."""
    match = _RANGE.fullmatch((text or "").strip())
    if match is None:
        return _Part()
    first, last, tail = match.groups()
    if tail is not None:
        return _Part(tail=int(tail))
    if last and int(last) < int(first):
        return _Part()
    return _Part(offset=int(first), length=int(last) - int(first) + 1 if last else None)


def _date(text: str | None) -> float | None:
    """Unix seconds; what is no date, or beyond all that there are, is as if it were not there."""
    found = None if text is None else email.utils.parsedate_tz(text)
    try:
        return None if found is None else float(email.utils.mktime_tz(found))
    except (ValueError, OverflowError):
        return None


def _common(head: FileHead, path: str) -> list[tuple[bytes, bytes]]:
    name = path.rpartition("/")[2]
    kind, packed = mimetypes.guess_type(name)
    media = kind if kind is not None and packed is None else "application/octet-stream"
    plain = "".join(one if " " < one <= "~" and one not in '"\\%' else "_" for one in name)
    exact = "" if plain == name else f"; filename*=utf-8''{quote(name, safe='')}"
    headers = [
        (b"content-type", media.encode()),
        (b"content-disposition", f'inline; filename="{plain}"{exact}'.encode()),
        (b"accept-ranges", b"bytes"),
        (b"vary", b"Accept-Encoding"),
        (b"cache-control", b"no-store"),
        # The page of a sandbox, shown where others' are: it runs nothing, and reads nothing of theirs.
        (b"content-security-policy", b"sandbox"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if head.modified is not None:
        headers.append((b"last-modified", email.utils.formatdate(head.modified, usegmt=True).encode()))
    return headers
