"""`…/files/content`: the octets of one file, down with ranges, up with its size verified."""

import email.utils
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import RangeUnsatisfiable
from hatchway.node.dataplane.files import answers
from hatchway.node.dataplane.files.access import Call, Files
from hatchway.node.dataplane.files.entries import PATH
from hatchway.node.dataplane.files.program import Argument, Program, run
from hatchway.node.dataplane.files.uploads import upload

_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))", re.ASCII)
_WRITING = ("mode", "parents", "in_place", "attributes", "attributes_of", "owner")
_LATEST = 253_402_300_799
"""The end of the year 9999, as Unix time: no date of HTTP is later."""


@dataclass(frozen=True, slots=True)
class Range:
    """Octets `first` to `last` (None: to the end), or the last `tail` ones."""

    first: int = 0
    last: int | None = None
    tail: int | None = None

    def arguments(self) -> list[Argument]:
        """What the guest's program is asked for."""
        if self.tail is not None:
            return [("tail", self.tail)]
        return [("offset", self.first), ("length", None if self.last is None else self.last - self.first + 1)]


def parse_range(request: Request) -> Range | None:
    """The one range that is asked for; None is the whole file: for several ranges, other units, conditions, what is malformed (RFC 9110, 14.2)."""
    if "if-range" in request.headers:
        return None
    match = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None:
        return None
    first, last, tail = match.groups()
    if tail is not None:
        return Range(tail=int(tail))
    if last and int(last) < int(first):
        return None
    return Range(int(first), int(last) if last else None)


class Content:
    """The endpoint; an ASGI application."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["method"] == "PUT":
            await self._put(self._files.call(scope, receive, send, (*PATH, *_WRITING)))
        else:
            call = self._files.call(scope, receive, send, (*PATH, "owner"))
            await call.download(self._get(call, Request(scope)))

    async def _get(self, call: Call, request: Request) -> None:
        wanted = parse_range(request) if request.method == "GET" else None
        if wanted is not None and await self._try(call, request, wanted):
            return
        await self._try(call, request, None)

    async def _try(self, call: Call, request: Request, wanted: Range | None) -> bool:
        """Answers, unless a range was asked for of something whose end nobody knows."""
        arguments: list[Argument] = [
            ("path", call.query.path()),
            *(wanted.arguments() if wanted else ()),
            *call.query.beside(),
        ]
        async with run(call.link, "read", arguments, user=call.query.user(), limits=call.limits) as program:
            head = await program.head(answers.ReadHead)
            if wanted is None:
                if head.offset != 0:
                    raise answers.bad_answer("another part of the file than was asked for")
            elif head.length is None:
                return False
            else:
                _check(head, wanted)
            await call.send(
                {"type": "http.response.start", "status": 206 if wanted else 200, "headers": _headers(head, wanted)}
            )
            if request.method == "HEAD":
                await call.send({"type": "http.response.body", "body": b""})
            else:
                await _stream(call, program, head.length)
        return True

    async def _put(self, call: Call) -> None:
        request = Request(call.scope)
        announced = request.headers.get("content-length", "")
        size = int(announced) if announced.isascii() and announced.isdecimal() else None
        arguments: list[Argument] = [
            ("path", call.query.path()),
            ("size", size),
            ("mode", call.query.mode()),
            ("parents", int(call.query.flag("parents"))),
            ("in_place", int(call.query.flag("in_place")) or None),
            ("attributes", call.query.attributes()),
            *call.query.beside(),
        ]
        sent = 0

        async def counted(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            nonlocal sent
            async for chunk in chunks:
                sent += len(chunk)
                yield chunk

        done = await upload(call, "write", arguments, answers.WriteDone, counted)
        if done.bytes != sent or done.entry.size != sent:
            raise answers.bad_answer(f"it took {done.bytes} of {sent} octets")
        await call.answer({"entry": done.entry, "created": done.created}, 201 if done.created else 200)


async def _stream(call: Call, program: Program, length: int | None) -> None:
    """The octets. The last piece waits until the program said that all is well: an answer is whole only if the file was."""
    held = b""
    count = 0
    while piece := await program.read():
        count += len(piece)
        if length is not None and count > length:
            raise answers.bad_answer(f"more than the {length} octets that it announced")
        if held:
            await call.send({"type": "http.response.body", "body": held, "more_body": True})
        held = piece
    done = await program.done(answers.ReadDone)
    if done.bytes != count or length not in (None, count):
        raise answers.bad_answer(f"{count} octets, where it announced {length} and counts {done.bytes}")
    await call.send({"type": "http.response.body", "body": held})


def _check(head: answers.ReadHead, wanted: Range) -> None:
    length = head.length or 0
    size = head.entry.size
    if length == 0:
        raise RangeUnsatisfiable(
            "range_unsatisfiable", f"The file has {size} octets.", "Ask for a range within the file.", size=size
        )
    if wanted.tail is None:
        fits = head.offset == wanted.first and (wanted.last is None or length <= wanted.last - wanted.first + 1)
    else:
        fits = length <= wanted.tail
    if not fits:
        raise answers.bad_answer("another part of the file than was asked for")


def _headers(head: answers.ReadHead, wanted: Range | None) -> list[tuple[bytes, bytes]]:
    entry = head.entry
    seconds = min(max(entry.mtime_ns // 10**9, 0), _LATEST)
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
        (b"accept-ranges", b"bytes"),
        (b"hatchway-mode", b"%04o" % entry.mode),
        (b"last-modified", email.utils.formatdate(seconds, usegmt=True).encode()),
    ]
    if head.length is not None:
        headers.append((b"content-length", b"%d" % head.length))
        if wanted is not None:
            end = head.offset + head.length
            whole = b"%d" % entry.size if entry.size >= end else b"*"
            headers.append((b"content-range", b"bytes %d-%d/%b" % (head.offset, end - 1, whole)))
    return headers
