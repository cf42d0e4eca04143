"""`…/files/{stat,list,mkdir,move,remove,chmod}`: what there is in a sandbox, and changes to it."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from hatchway.domain.checking import invalid_field
from hatchway.node.dataplane.files import answers, query
from hatchway.node.dataplane.files.access import Call, Files
from hatchway.node.dataplane.files.program import Argument, Program, run

T = TypeVar("T", bound=msgspec.Struct)
PATH = ("path", "path_base64", "user")
TOLD = (*PATH, *query.BESIDE)
MAX_DEPTH = 32
MAX_PAGE = 2_000
_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]

User = Annotated[str, Meta(pattern=query.USER)]
PathText = Annotated[str, Meta(min_length=1, max_length=query.MAX_PATH)]
Encoded = Annotated[str, Meta(min_length=1, max_length=2 * query.MAX_PATH)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user: User | None = None
    owner: User | None = None

    def beside(self, *, links: bool = False, attributes_of: str | None = None) -> list[Argument]:
        """What several operations take. Raises `invalid_field`."""
        return [*query.beside(self.user, self.owner, links, attributes_of)]


class MkdirBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mode` in octal digits; `parents` makes what is missing above, and takes a folder that is there for made."""

    path: PathText | None = None
    path_base64: Encoded | None = None
    mode: str | None = None
    parents: bool = False


class MoveBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rename. `overwrite`: a file takes the place of a file, a folder that of an empty folder; `parents` makes what is missing above."""

    from_: PathText | None = msgspec.field(name="from", default=None)
    from_base64: Encoded | None = None
    to: PathText | None = None
    to_base64: Encoded | None = None
    overwrite: bool = False
    parents: bool = False
    links: bool = False
    attributes_of: str | None = None


class RemoveBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`recursive` takes a folder with what is in it."""

    path: PathText | None = None
    path_base64: Encoded | None = None
    recursive: bool = False


class ChmodBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mode` in octal digits."""

    mode: str
    path: PathText | None = None
    path_base64: Encoded | None = None
    recursive: bool = False


class _Endpoint:
    """An ASGI application for one operation."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def _do(
        self, call: Call, operation: str, arguments: Sequence[Argument], user: str | None, kind: type[T]
    ) -> T:
        async def work() -> T:
            async with run(call.link, operation, arguments, user=user, limits=call.limits) as program:
                return await program.done(kind)

        return await call.present(work())


class Stat(_Endpoint):
    """`GET …/stat?path=[&follow=1]` → `{entry}`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, (*TOLD, "follow"))
        arguments: list[Argument] = [
            ("path", call.query.path()),
            ("follow", int(call.query.flag("follow"))),
            *call.query.beside(),
        ]
        await call.answer(await self._do(call, "stat", arguments, call.query.user(), answers.StatDone))


class Mkdir(_Endpoint):
    """`POST …/mkdir` → `{entry, created}`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, ())
        body = await call.body(MkdirBody)
        arguments: list[Argument] = [
            ("path", _path(body.path, body.path_base64, "path")),
            ("mode", None if body.mode is None else query.mode_of(body.mode)),
            ("parents", int(body.parents)),
            *body.beside(),
        ]
        done = await self._do(call, "mkdir", arguments, body.user, answers.MkdirDone)
        await call.answer(done, 201 if done.created else 200)


class Move(_Endpoint):
    """`POST …/move` → `{entry}`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, ())
        body = await call.body(MoveBody)
        arguments: list[Argument] = [
            ("from", _path(body.from_, body.from_base64, "from")),
            ("to", _path(body.to, body.to_base64, "to")),
            ("overwrite", int(body.overwrite)),
            ("parents", int(body.parents) or None),
            *body.beside(links=body.links, attributes_of=body.attributes_of),
        ]
        await call.answer(await self._do(call, "move", arguments, body.user, answers.StatDone))


class Remove(_Endpoint):
    """`POST …/remove` → `{removed}`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, ())
        body = await call.body(RemoveBody)
        arguments: list[Argument] = [
            ("path", _path(body.path, body.path_base64, "path")),
            ("recursive", int(body.recursive)),
            *body.beside(),
        ]
        await call.answer(await self._do(call, "remove", arguments, body.user, answers.RemoveDone))


class Chmod(_Endpoint):
    """`POST …/chmod` → `{entry, changed}`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, ())
        body = await call.body(ChmodBody)
        arguments: list[Argument] = [
            ("path", _path(body.path, body.path_base64, "path")),
            ("mode", query.mode_of(body.mode)),
            ("recursive", int(body.recursive)),
            *body.beside(),
        ]
        await call.answer(await self._do(call, "chmod", arguments, body.user, answers.ChmodDone))


class List(_Endpoint):
    """`GET …/list?path=[&depth=1&limit=1000&cursor=]` → `{entries, skipped, next_cursor}`.

    The page is gathered as far as `page_octets`; the answer of a longer one begins before its end is known, and is cut off
    when that turns out to be an error.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, (*TOLD, "depth", "limit", "cursor"))
        limit = call.query.number("limit", 1_000, 1, MAX_PAGE)
        arguments: list[Argument] = [
            ("path", call.query.path()),
            ("depth", call.query.number("depth", 1, 1, MAX_DEPTH)),
            ("limit", limit),
            ("after", call.query.cursor()),
            *call.query.beside(),
        ]

        async def work() -> None:
            async with run(call.link, "list", arguments, user=call.query.user(), limits=call.limits) as program:
                await self._page(call, program, limit)

        await call.present(work())

    async def _page(self, call: Call, program: Program, limit: int) -> None:
        page = bytearray(b'{"entries":[')
        started = False
        count = 0
        async for line in program.lines(within=call.limits.answer_s):
            entry = msgspec.json.encode(answers.decode(line, answers.Entry))
            count += 1
            if count > limit:
                raise answers.bad_answer("more entries than were asked for")
            page += b"," + entry if count > 1 else entry
            if len(page) >= call.limits.page_octets:
                if not started:
                    await call.send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    started = True
                await call.send({"type": "http.response.body", "body": bytes(page), "more_body": True})
                page.clear()
        done = await program.done(answers.ListDone)
        if done.entries != count:
            raise answers.bad_answer("another number of entries than it counts")
        after = answers.exact(done.next, done.next_base64)
        cursor = None if after is None else query.encode_cursor(after)
        page += b'],"skipped":%d,"next_cursor":%b}' % (done.skipped, msgspec.json.encode(cursor))
        if not started:
            headers = [*_HEADERS, (b"content-length", b"%d" % len(page))]
            await call.send({"type": "http.response.start", "status": 200, "headers": headers})
        await call.send({"type": "http.response.body", "body": bytes(page)})


def _path(text: str | None, encoded: str | None, field: str) -> bytes:
    if (text is None) == (encoded is None):
        raise invalid_field(field, f"exactly one of `{field}` and `{field}_base64` must be given.", {"type": "string"})
    octets = query.from_base64(encoded, f"{field}_base64") if encoded is not None else (text or "").encode()
    return query.path_of(octets, field)
