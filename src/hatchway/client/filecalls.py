"""The files of a sandbox as flows: which request, what the answer means, and what is believed of it. No I/O.

What comes from the node was said by a hostile guest: it is decoded strictly, counted, and bounded.
"""

import base64
import email.utils
import os
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from . import streams
from .bodies import Body
from .calls import decode
from .errors import (
    BadAnswer,
    ConnectionFailed,
    HatchwayError,
    InvalidRequest,
    OutputLimit,
    Unauthenticated,
    Unavailable,
)
from .models import FileChange, FileEntry, Page, SandboxToken, Transfer
from .reach import Reach
from .sse import Parser, ServerEvent
from .steps import Emit, Flow, Open, Read, Reply, Request, Stream

PAGE = 500
"""Entries of a listing that one request asks for."""
SLOW_S = 20 * 60.0
"""How long an answer may take: the sandbox has 15 minutes to remove, change or flush."""
SILENT_S = 90.0
"""How long a download may say nothing: the sandbox has 60 s for each piece."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_MODE = re.compile(r"[0-7]{1,5}", re.ASCII)
DEFAULT_MAX_READ = 64 * 1024 * 1024
"""Octets of a file that `read` holds in memory."""


def _octets(path: str) -> bytes:
    if not path:
        raise InvalidRequest("bad_path", "The path is empty.", 'Give a path; "." is the home of the user.')
    return os.fsencode(path)


def _in_body(name: str, path: str) -> dict[str, str]:
    octets = _octets(path)
    try:
        return {name: octets.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(octets).decode()}


def _query(values: Mapping[str, object]) -> str:
    pairs = {key: value for key, value in values.items() if value is not None}
    return "&".join(
        f"{key}={quote(value if isinstance(value, bytes) else str(value), safe='/')}" for key, value in pairs.items()
    )


class _Entry(msgspec.Struct):
    entry: FileEntry


class _Removed(msgspec.Struct):
    removed: int


class _Changed(msgspec.Struct):
    changed: int


class _Listed(msgspec.Struct):
    entries: tuple[FileEntry, ...]
    next_cursor: str | None = None


class _Ready(msgspec.Struct):
    entry: FileEntry | None = None
    watch: str | None = None


class _Ended(msgspec.Struct):
    reason: str
    code: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Seeing:
    """What every operation is asked beside its own: `links`, what symbolic links lead to; `attributes_of`, the extended attributes of the
    namespace `user` whose names begin so (told without that); `owner`, for whom root works."""

    links: bool = False
    attributes_of: str | None = None
    owner: str | None = None

    def query(self, *, entries: bool = True) -> dict[str, object]:
        """As parameters; without `entries` of what tells no entry."""
        told = {"links": 1 if self.links else None, "attributes_of": self.attributes_of} if entries else {}
        return {**told, "owner": self.owner}

    def body(self, *, entries: bool = False) -> dict[str, object]:
        """As members of a body."""
        told = {"links": self.links or None, "attributes_of": self.attributes_of} if entries else {}
        return {**told, "owner": self.owner}


@dataclass(frozen=True, slots=True)
class FileHead:
    """What is known of a file before its octets: how large it is, where they begin, how many will come (None: nobody knows), mode, last change."""

    size: int | None
    offset: int
    length: int | None
    mode: int
    modified: float | None


class FileCalls:
    """The requests for the files of one sandbox."""

    def __init__(self, reach: Reach, seeing: Seeing | None = None) -> None:
        self._reach = reach
        self._seeing = seeing or Seeing()

    def seeing(self, seeing: Seeing) -> "FileCalls":
        """The same requests, asking this beside."""
        return FileCalls(self._reach, seeing)

    def _url(self, token: SandboxToken, verb: str, query: Mapping[str, object] | None = None) -> str:
        base = f"{token.data_plane_url.rstrip('/')}/v1/sandboxes/{quote(self._reach.sandbox_id, safe='')}/files/{verb}"
        return f"{base}?{_query(query)}" if query else base

    def _get(self, verb: str, query: Mapping[str, object], timeout_s: float | None = SILENT_S) -> Flow[Reply]:
        def build(token: SandboxToken) -> Request:
            return Request("GET", self._url(token, verb, query), token=token.token, timeout_s=timeout_s)

        return (yield from self._reach.call("files", build))

    def _post(self, verb: str, body: Mapping[str, object], *, again: bool) -> Flow[Reply]:
        sent = {key: value for key, value in body.items() if value is not None}

        def build(token: SandboxToken) -> Request:
            return Request(
                "POST", self._url(token, verb), json=sent, token=token.token, timeout_s=SLOW_S, repeatable=again
            )

        if not again:
            yield from self._sure()
        return (yield from self._reach.call("files", build))

    def _put(self, verb: str, query: Mapping[str, object], body: Body, headers: Mapping[str, str]) -> Flow[Reply]:
        def build(token: SandboxToken) -> Request:
            return Request(
                "PUT",
                self._url(token, verb, query),
                content=body,
                headers=headers,
                token=token.token,
                timeout_s=SLOW_S,
                repeatable=body.again,
            )

        if not body.again:
            yield from self._sure()
        return (yield from self._reach.call("files", build))

    def _sure(self) -> Flow[None]:
        """Makes sure that the token is taken, before something is sent that can be sent but once."""
        yield from self._get("stat", {"path": "/"})

    def stat(self, path: str, *, follow: bool, user: str | None) -> Flow[FileEntry]:
        """Asks what is at a path."""
        reply = yield from self._get(
            "stat", {"path": _octets(path), "follow": int(follow), "user": user, **self._seeing.query()}
        )
        return decode(reply.body, _Entry).entry

    def write(
        self,
        path: str,
        body: Body,
        *,
        mode: int | None,
        parents: bool,
        user: str | None,
        in_place: bool = False,
        attributes: Mapping[str, str] | None = None,
    ) -> Flow[FileEntry]:
        """Uploads one file; holds the answer to the number of octets that were sent."""
        seen = self._seeing.query()
        query = {
            "path": _octets(path),
            "mode": None if mode is None else f"{mode:o}",
            "parents": 1 if parents else None,
            "in_place": 1 if in_place else None,
            "attributes": None if attributes is None else "\n".join(f"{k}={v}" for k, v in attributes.items()),
            "attributes_of": seen["attributes_of"],
            "owner": seen["owner"],
            "user": user,
        }
        reply = yield from self._put("content", query, body, {})
        entry = decode(reply.body, _Entry).entry
        if entry.size != body.sent:
            raise _wrong(f"The sandbox has {entry.size} octets of the {body.sent} that were sent to {path!r}.")
        return entry

    def listing(self, path: str, *, depth: int, user: str | None) -> "FileListing":
        """What is in a folder."""
        return FileListing(self, path, depth, user)

    def mkdir(self, path: str, *, mode: int | None, parents: bool, user: str | None) -> Flow[FileEntry]:
        """Makes a folder."""
        body = {**_in_body("path", path), "mode": None if mode is None else f"{mode:o}", "parents": parents}
        # That it is there already would be an error of the second try alone, if parents are not made.
        reply = yield from self._post("mkdir", {**body, "user": user, **self._seeing.body()}, again=parents)
        return decode(reply.body, _Entry).entry

    def move(
        self, source: str, target: str, *, overwrite: bool, user: str | None, parents: bool = False
    ) -> Flow[FileEntry]:
        """Renames."""
        how = {"overwrite": overwrite, "parents": parents or None, "user": user}
        body = {**_in_body("from", source), **_in_body("to", target), **how, **self._seeing.body(entries=True)}
        reply = yield from self._post("move", body, again=False)
        return decode(reply.body, _Entry).entry

    def remove(self, path: str, *, recursive: bool, user: str | None) -> Flow[int]:
        """Removes; answers how many entries."""
        body = {**_in_body("path", path), "recursive": recursive, "user": user, **self._seeing.body()}
        reply = yield from self._post("remove", body, again=False)
        return decode(reply.body, _Removed).removed

    def chmod(self, path: str, mode: int, *, recursive: bool, user: str | None) -> Flow[int]:
        """Changes modes; answers of how many entries."""
        body = {
            **_in_body("path", path),
            "mode": f"{mode:o}",
            "recursive": recursive,
            "user": user,
            **self._seeing.body(),
        }
        reply = yield from self._post("chmod", body, again=True)
        return decode(reply.body, _Changed).changed

    def unpack(self, path: str, body: Body, *, parents: bool, user: str | None) -> Flow[Transfer]:
        """Uploads an archive into a folder."""
        query = {"path": _octets(path), "format": "tar", "parents": 1 if parents else None, "user": user}
        reply = yield from self._put("archive", query, body, {"Content-Type": "application/x-tar"})
        return decode(reply.body, Transfer)

    # Streams

    def _open(self, verb: str, query: Mapping[str, object], headers: Mapping[str, str]) -> Generator[Any, Any, Reply]:
        """Opens a stream, again while nothing of it came; returns the head of its answer."""
        patience = streams.Patience(f"The request for {verb}", "Try again when the service is back.")
        renewed = False
        while True:
            token = yield from self._reach.ready("files")
            try:
                url = self._url(token, verb, query)
                reply: Reply = yield Open(Request("GET", url, headers=headers, token=token.token, timeout_s=SILENT_S))
                streams.raise_for(reply)
                return reply
            except Unauthenticated:
                self._reach.forget("files", token)
                if renewed:
                    raise
                renewed = True
            except (ConnectionFailed, Unavailable) as error:
                if isinstance(error, ConnectionFailed) and error.code in ("timeout", "not_trusted"):
                    raise
                yield patience.next_pause(error.cause)

    def content(self, path: str, *, offset: int, length: int | None, user: str | None) -> Stream[bytes]:
        """The octets of a file from `offset` on. An answer that is cut off raises `ConnectionFailed`."""
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest("bad_range", f"{length} octets from {offset} on are no part of a file.", "")
        query = {"path": _octets(path), "user": user, **self._seeing.query(entries=False)}
        if length == 0:
            yield from self.stat(path, follow=True, user=user)
            return
        part = offset > 0 or length is not None
        end = None if length is None else offset + length
        headers = {"Range": f"bytes={offset}-{'' if end is None else end - 1}"} if part else {}
        reply = yield from self._open("content", query, headers)
        at = 0
        if reply.status == 206:
            if not reply.headers.get("content-range", "").startswith(f"bytes {offset}-"):
                raise _wrong("The answer is another part of the file than was asked for.")
            at = offset
        # What the kernel makes up while it is read has no parts: it comes from its beginning.
        while piece := (yield Read()):
            begin, at = at, at + len(piece)
            wanted = piece[max(offset - begin, 0) : None if end is None else max(end - begin, 0)]
            if wanted:
                yield Emit(wanted)
            if end is not None and at >= end and reply.status == 200:
                return
        if end is not None and at > end:
            raise _wrong("The answer is longer than the part of the file that was asked for.")

    def opened(
        self, path: str, *, offset: int, length: int | None, tail: int | None, user: str | None
    ) -> "Stream[FileHead | bytes]":
        """A `FileHead`, then the octets. Where a part was asked for of what the kernel makes up while it is read, all of it comes."""
        query = {"path": _octets(path), "user": user, **self._seeing.query(entries=False)}
        headers = {}
        if tail is not None:
            headers = {"Range": f"bytes=-{tail}"}
        elif offset or length is not None:
            headers = {"Range": f"bytes={offset}-{'' if length is None else offset + length - 1}"}
        reply = yield from self._open("content", query, headers)
        yield Emit(_head(reply))
        while piece := (yield Read()):
            yield Emit(piece)

    def mark(self, watch: str) -> Flow[None]:
        """Asks for a mark."""

        def build(token: SandboxToken) -> Request:
            return Request("POST", self._url(token, f"watch/{quote(watch, safe='')}/marks"), json={}, token=token.token)

        yield from self._reach.call("files", build)

    def pack(self, path: str, *, user: str | None) -> Stream[bytes]:
        """A folder, or a file, as tar. An archive that is cut off raises `ConnectionFailed`."""
        yield from self._open("archive", {"path": _octets(path), "format": "tar", "user": user}, {})
        while piece := (yield Read()):
            yield Emit(piece)

    def watch(
        self,
        path: str,
        *,
        recursive: bool,
        user: str | None,
        entries: bool = False,
        local: bool = False,
        marks: bool = False,
    ) -> Stream[FileChange]:
        """Changes below a path, until what is watched is gone. After a lost connection it goes on, and says so."""
        flags = {"entries": entries, "local": local, "marks": marks}
        patience = streams.Patience(f"The watch of {path!r}", "Watch again when the service is back.")
        query = {
            "path": _octets(path),
            "recursive": int(recursive),
            "user": user,
            **{name: 1 for name, wanted in flags.items() if wanted},
            **self._seeing.query(),
        }
        begun = False
        while True:
            try:
                yield from self._open("watch", query, {"Accept": "text/event-stream"})
                if begun:
                    yield Emit(FileChange(event="overflow", path=path, reason="reconnected"))
                parser = Parser()
                ended: _Ended | None = None
                while ended is None:
                    piece: bytes = yield Read()
                    if not piece:
                        raise ConnectionFailed("The stream ended in the middle.")
                    for event in parser.feed(piece):
                        patience.progress()
                        if event.name == "end":
                            ended = decode(event.data, _Ended)
                            break
                        for change in _changes(event, path):
                            if change.event != "ready" or marks or not begun:
                                yield Emit(change)
                            begun = True
                if ended.reason in ("removed", "moved"):
                    return
                if ended.reason == "failed":
                    raise HatchwayError(ended.code, ended.cause, "Watch again.")
                yield patience.next_pause(f"the node said: {ended.reason}")
            except (ConnectionFailed, Unavailable) as error:
                yield patience.next_pause(error.cause)


def _head(reply: Reply) -> FileHead:
    headers = reply.headers
    size = headers.get("content-length")
    length = int(size) if size is not None and size.isdecimal() else None
    offset, whole = 0, length
    if reply.status == 206:
        match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        if match is None:
            raise _wrong("The answer does not say which part of the file it is.")
        offset, whole = int(match[1]), None if match[3] == "*" else int(match[3])
    mode = headers.get("hatchway-mode", "")
    modified = email.utils.parsedate_tz(headers.get("last-modified"))
    return FileHead(
        size=whole,
        offset=offset,
        length=length,
        mode=int(mode, 8) if _MODE.fullmatch(mode) else 0,
        modified=None if modified is None else float(email.utils.mktime_tz(modified)),
    )


def _changes(event: ServerEvent, path: str) -> Iterator[FileChange]:
    if event.name == "ready":
        ready = decode(event.data, _Ready)
        yield FileChange(event="ready", path=path, entry=ready.entry, watch=ready.watch)
    elif event.name in ("file", "overflow", "mark"):
        fields = decode(event.data, dict[str, Any])
        try:
            yield msgspec.convert({**fields, "event": fields.get("event", "overflow")}, FileChange)
        except (msgspec.ValidationError, ValueError) as error:
            raise _wrong(f"A change that cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class FileListing:
    """What is in a folder, read page by page."""

    calls: FileCalls
    path: str
    depth: int
    user: str | None

    def page(self, cursor: str | None) -> Flow[Page[FileEntry]]:
        """Asks for the page at `cursor`, the first one at None."""
        query = {
            "path": _octets(self.path),
            "depth": self.depth,
            "limit": PAGE,
            **self.calls._seeing.query(),
            "cursor": cursor,
            "user": self.user,
        }
        reply = yield from self.calls._get("list", query)
        listed = decode(reply.body, _Listed)
        if listed.next_cursor is not None and (not listed.entries or listed.next_cursor == cursor):
            raise _wrong("The listing does not come to an end.")
        return Page(listed.entries, listed.next_cursor)


class Reading:
    """Collects a file up to a bound."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, piece: bytes) -> None:
        """Takes one piece in; raises `OutputLimit` when the bound is passed."""
        self._size += len(piece)
        if self._size > self._max:
            raise OutputLimit(
                "file_too_large",
                f"{self._path!r} has more than {self._max} octets.",
                "Give a larger max_bytes, or use stream() or download().",
            )
        self._pieces.append(piece)

    def octets(self) -> bytes:
        """Returns what was collected."""
        return b"".join(self._pieces)


def _wrong(cause: str) -> BadAnswer:
    return BadAnswer("bad_answer", cause, "Check the versions, and whether somebody else writes there.")
