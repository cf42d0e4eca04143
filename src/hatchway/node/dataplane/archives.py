"""Archives over HTTP: exports go out, with ranges; uploads come in, in pieces. Encrypted on the way where a passphrase comes along.

The passphrase is a header's value, as base64url of its octets, is used for this one request, and is kept nowhere.
"""

import asyncio
import base64
import binascii
import contextlib
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import Conflict, HostExhausted, InvalidRequest, RangeUnsatisfiable, Unauthenticated
from hatchway.node.artifacts import sealed
from hatchway.node.artifacts.fetching import Fetches
from hatchway.node.artifacts.spool import Spool
from hatchway.node.dataplane import requests
from hatchway.node.dataplane.files.content import Range, parse_range
from hatchway.node.dataplane.pace import Pace
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.requests import ClientGone, Departure
from hatchway.node.dataplane.tokens import may_use_sandbox, may_use_scope
from hatchway.wire.tokens import ARCHIVES, Claims

PASSPHRASE = "hatchway-passphrase"
PIECE = 1 << 20


@dataclass
class Archives:
    """What there is of archives on this node."""

    exports: Spool
    uploads: Spool
    fetches: Fetches | None = None
    deriving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """A key takes 64 MiB of memory while it is made of a passphrase: one at a time."""


def make_routes(plane: Plane, archives: Archives) -> list[BaseRoute]:
    """Returns the routes for archives; each checks the token of its request."""
    at = "/v1/uploads/{archive_id}"
    return [
        Route("/v1/exports/{archive_id}/content", Download(plane, archives), methods=["GET"]),
        Route(at, Progress(plane, archives), methods=["GET"]),
        Route(f"{at}/content", Upload(plane, archives), methods=["PUT"]),
        Route(f"{at}/open", Open(plane, archives), methods=["POST"]),
    ]


class _Endpoint:
    def __init__(self, plane: Plane, archives: Archives) -> None:
        self._plane = plane
        self._archives = archives

    def _claims(self, scope: Scope, project: str | None) -> tuple[Claims, str]:
        archive_id = str(scope["path_params"]["archive_id"])
        claims = requests.claims_of(scope, self._plane.tokens)
        may_use_scope(claims, ARCHIVES)
        may_use_sandbox(claims, archive_id, project)
        return claims, archive_id

    async def _while_valid(self, claims: Claims, work: Coroutine[Any, Any, None]) -> None:
        """Does `work` for as long as its token is good. Raises `Unauthenticated` when it ended before."""
        task = asyncio.ensure_future(work)

        def stop(_: str) -> None:
            task.cancel()

        try:
            with self._plane.opened(claims, stop):
                await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise Unauthenticated("token_revoked", "The token is not good any more.", "Ask for a new one, and go on.")
        task.result()


class Download(_Endpoint):
    """`GET /v1/exports/{id}/content`; an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        claims, export_id = self._claims(scope, None)
        path, entry = self._archives.exports.get(export_id, "export")
        may_use_sandbox(claims, export_id, entry.project)
        request = Request(scope)
        passphrase = _passphrase(request)
        sealer = None
        if passphrase is not None:
            async with self._archives.deriving:
                sealer = await asyncio.to_thread(sealed.Sealer, passphrase, entry.salt)
        plain = path.stat().st_size
        size = plain if sealer is None else sealer.size(plain)
        first, last, partial = _bounds(parse_range(request), size)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % (last + 1 - first)),
            (b"accept-ranges", b"bytes"),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            (b"hatchway-digest", entry.digest.encode()),
        ]
        if partial:
            headers.append((b"content-range", b"bytes %d-%d/%d" % (first, last, size)))

        send = Pace(self._plane.limits).sending(scope, send)

        async def work() -> None:
            gone = asyncio.Event()
            departure = Departure(receive, gone.set)
            try:
                await send({"type": "http.response.start", "status": 206 if partial else 200, "headers": headers})
                at = first
                while at <= last and request.method != "HEAD" and not gone.is_set():
                    data = await asyncio.to_thread(_piece, path, plain, sealer, at, min(PIECE, last + 1 - at))
                    at += len(data)
                    await send({"type": "http.response.body", "body": data, "more_body": at <= last})
                if request.method == "HEAD" or at == first:
                    await send({"type": "http.response.body", "body": b""})
            finally:
                departure.close()

        await self._while_valid(claims, work())


class Progress(_Endpoint):
    """`GET /v1/uploads/{id}`: how much is here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        claims, upload_id = self._claims(scope, None)
        entry = self._archives.uploads.find(upload_id)
        if entry is None or not entry.url or self._archives.fetches is None:
            await _answer({"offset": _size(self._archives.uploads, upload_id)}, scope, receive, send)
            return
        may_use_sandbox(claims, upload_id, entry.project)
        told = self._archives.fetches.status(upload_id)
        await _answer({name: getattr(told, name) for name in told.__struct_fields__}, scope, receive, send)


class Upload(_Endpoint):
    """`PUT /v1/uploads/{id}/content?offset=N`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        claims, upload_id = self._claims(scope, None)
        entry = self._archives.uploads.find(upload_id)
        may_use_sandbox(claims, upload_id, None if entry is None else entry.project)
        if entry is not None and entry.url:
            raise Conflict("upload_exists", "The upload is fetched by the node.", "Begin a new one.")
        request = Request(scope, receive)
        offset = requests.offset(request, "offset") or 0

        async def work() -> None:
            nonlocal offset
            held = bytearray()
            try:
                async for chunk in Pace(self._plane.limits).receiving(request.stream()):
                    held += chunk
                    if len(held) >= PIECE:
                        offset = await self._append(claims, upload_id, offset, held)
            except ClientDisconnect:
                raise ClientGone from None
            finally:
                # What came stays, also where its sender went away: it goes on behind it.
                if held:
                    offset = await asyncio.shield(self._append(claims, upload_id, offset, held))

        await self._while_valid(claims, work())
        await _answer({"offset": offset}, scope, receive, send)

    async def _append(self, claims: Claims, upload_id: str, offset: int, held: bytearray) -> int:
        data = bytes(held)
        held.clear()
        try:
            return await asyncio.to_thread(self._archives.uploads.append, upload_id, claims.project, offset, data)
        except OSError as error:
            raise HostExhausted(
                "host_disk_full", f"It cannot be stored: {error.strerror}.", "Free space there."
            ) from error


class Open(_Endpoint):
    """`POST /v1/uploads/{id}/open`: decrypts a whole upload, where it is encrypted."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        claims, upload_id = self._claims(scope, None)
        path, entry = self._archives.uploads.get(upload_id, "upload")
        may_use_sandbox(claims, upload_id, entry.project)
        if self._archives.fetches is not None:
            self._archives.fetches.require_whole(upload_id)
        with path.open("rb") as file:
            encrypted = sealed.is_sealed(file.read(len(sealed.MAGIC)))
        if encrypted:
            passphrase = _passphrase(Request(scope))
            if passphrase is None:
                raise sealed.passphrase_needed()
            temporary = self._archives.uploads.path(upload_id, ".new")
            async with self._archives.deriving:
                await asyncio.to_thread(_decrypt, path, temporary, passphrase)
                await asyncio.to_thread(self._archives.uploads.opened, upload_id)
        await _answer({"encrypted": encrypted, "size_bytes": path.stat().st_size}, scope, receive, send)


def _decrypt(path: Path, temporary: Path, passphrase: bytes) -> None:
    opener = sealed.Opener(passphrase)
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            while data := source.read(PIECE):
                for piece in opener.feed(data):
                    target.write(piece)
            target.write(opener.finish())
        os.rename(temporary, path)
    except OSError as error:
        raise HostExhausted(
            "host_disk_full", f"It cannot be decrypted: {error.strerror}.", "Free space there."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _size(spool: Spool, archive_id: str) -> int:
    if spool.find(archive_id) is None:
        return 0
    with contextlib.suppress(FileNotFoundError):
        return spool.path(archive_id).stat().st_size
    return 0


def _piece(path: Path, plain: int, sealer: sealed.Sealer | None, at: int, length: int) -> bytes:
    """Up to `length` octets of what is sent, from `at` on; at least one."""
    with path.open("rb", buffering=0) as file:
        if sealer is None:
            data = os.pread(file.fileno(), length, at)
        elif at < sealed.HEAD:
            data = sealer.head[at : at + length]
        else:
            data = _sealed_piece(file.fileno(), plain, sealer, at, length)
    if not data:
        raise OSError("the archive is shorter than it was")
    return data


def _sealed_piece(fd: int, plain: int, sealer: sealed.Sealer, at: int, length: int) -> bytes:
    whole = sealed.CHUNK + sealed.TAG
    number, skip = divmod(at - sealed.HEAD, whole)
    out = b""
    while len(out) < length + skip and (number == 0 or number * sealed.CHUNK < plain):
        chunk = os.pread(fd, sealed.CHUNK, number * sealed.CHUNK)
        out += sealer.chunk(number, chunk, last=(number + 1) * sealed.CHUNK >= plain)
        number += 1
    return out[skip : skip + length]


def _bounds(wanted: Range | None, size: int) -> tuple[int, int, bool]:
    if wanted is None:
        return 0, size - 1, False
    first = max(0, size - wanted.tail) if wanted.tail is not None else wanted.first
    last = size - 1 if wanted.last is None else min(wanted.last, size - 1)
    if first > last:
        raise RangeUnsatisfiable(
            "range_unsatisfiable", f"The archive has {size} octets.", "Ask for a range within it.", size=size
        )
    return first, last, True


def _passphrase(request: Request) -> bytes | None:
    value = request.headers.get(PASSPHRASE)
    if value is None:
        return None
    try:
        octets = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        octets = b""
    if not 0 < len(octets) <= sealed.MAX_PASSPHRASE:
        raise InvalidRequest(
            "invalid_field",
            f"The header Hatchway-Passphrase is not the base64url of 1 to {sealed.MAX_PASSPHRASE} octets.",
            "Encode the passphrase as UTF-8, then as base64url.",
            field="Hatchway-Passphrase",
        )
    return octets


async def _answer(value: object, scope: Scope, receive: Receive, send: Send) -> None:
    await Response(msgspec.json.encode(value), media_type="application/json")(scope, receive, send)
