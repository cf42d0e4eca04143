"""`…/files/archive`: a folder as a tar archive, down and up, with or without gzip."""

import asyncio
import zlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import Unprocessable
from hatchway.node.dataplane.files import answers
from hatchway.node.dataplane.files.access import Call, Files
from hatchway.node.dataplane.files.entries import PATH
from hatchway.node.dataplane.files.program import Argument, Program, run
from hatchway.node.dataplane.files.uploads import upload

FORMATS = ("tar", "tar.gz")
_GZIP = 31
"""zlib's window bits for gzip with its own header and checksum."""
_LEVEL = 3
_TYPES = {"tar": b"application/x-tar", "tar.gz": b"application/gzip"}
_COMPRESSED = (
    "application/gzip",
    "application/x-gzip",
    "application/x-gtar-compressed",
    "application/x-compressed-tar",
)


class Archive:
    """The endpoint; an ASGI application."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["method"] == "PUT":
            await self._put(self._files.call(scope, receive, send, (*PATH, "format", "parents", "owners")))
        else:
            call = self._files.call(scope, receive, send, (*PATH, "format"))
            await call.download(self._get(call, Request(scope)))

    async def _get(self, call: Call, request: Request) -> None:
        kind = call.query.one_of("format", FORMATS) or "tar"
        arguments: list[Argument] = [("path", call.query.path())]
        async with run(call.link, "pack", arguments, user=call.query.user(), limits=call.limits) as program:
            await program.head(answers.PackHead)
            headers = [
                (b"content-type", _TYPES[kind]),
                (b"x-content-type-options", b"nosniff"),
                (b"cache-control", b"no-store"),
            ]
            await call.send({"type": "http.response.start", "status": 200, "headers": headers})
            if request.method == "HEAD":
                await call.send({"type": "http.response.body", "body": b""})
                return
            compress = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP) if kind == "tar.gz" else None
            await self._stream(call, program, compress)

    async def _stream(self, call: Call, program: Program, compress: "zlib._Compress | None") -> None:
        """The archive. Its last piece waits until the program said that all is well: one without it is seen to be cut off."""
        held = b""
        gathered = bytearray()
        over = False
        while not over:
            piece = await program.read()
            gathered += piece
            over = not piece
            if not over and len(gathered) < call.limits.archive_octets:
                continue
            block = bytes(gathered)
            gathered.clear()
            if compress is not None:
                block = await asyncio.to_thread(compress.compress, block)
            if held and block:
                await call.send({"type": "http.response.body", "body": held, "more_body": True})
                held = b""
            held += block
        await program.done(answers.PackDone)
        if compress is not None:
            held += compress.flush()
        await call.send({"type": "http.response.body", "body": held})

    async def _put(self, call: Call) -> None:
        request = Request(call.scope)
        kind = call.query.one_of("format", FORMATS)
        if kind is None:
            media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            kind = "tar.gz" if media in _COMPRESSED or request.headers.get("content-encoding") == "gzip" else "tar"
        arguments: list[Argument] = [
            ("path", call.query.path()),
            ("parents", int(call.query.flag("parents"))),
            ("owners", int(call.query.flag("owners"))),
        ]

        def unpacked(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            return gunzip(chunks, call.limits.archive_octets) if kind == "tar.gz" else chunks

        await call.answer(await upload(call, "unpack", arguments, answers.UnpackDone, unpacked))


async def gunzip(chunks: AsyncIterator[bytes], piece: int) -> AsyncIterator[bytes]:
    """Unpacks gzip, of one member or several, in pieces of at most so many octets. Raises `Unprocessable("archive_malformed")`.

    Zeros behind the last member are padding, as for gzip itself.
    """
    member = zlib.decompressobj(_GZIP)
    padding = False
    async for chunk in chunks:
        rest = chunk
        while rest:
            if member.eof:
                padding, member = True, zlib.decompressobj(_GZIP)
            if padding:
                rest = rest.lstrip(b"\0")
                if not rest:
                    break
                padding = False
            try:
                data = await asyncio.to_thread(member.decompress, rest, piece)
                while data:
                    yield data
                    # What is still inside comes without more input.
                    data = (
                        b"" if member.eof else await asyncio.to_thread(member.decompress, member.unconsumed_tail, piece)
                    )
            except zlib.error as error:
                raise _malformed(str(error)) from None
            rest = member.unused_data
    if not (member.eof or padding):
        raise _malformed("it is cut off")


def _malformed(what: str) -> Unprocessable:
    return Unprocessable(
        "archive_malformed", f"The body is no gzip: {what}.", "Send a whole archive, and its `format`."
    )
