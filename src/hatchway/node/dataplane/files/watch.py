"""`GET …/files/watch`: changes below a path as server-sent events, until the client goes; and marks in them, where one is asked for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import HatchwayError, NotFound
from hatchway.domain.ids import new_id
from hatchway.node.dataplane import sse
from hatchway.node.dataplane.files import answers
from hatchway.node.dataplane.files.access import Call, Files, no_more
from hatchway.node.dataplane.files.entries import TOLD
from hatchway.node.dataplane.files.program import Argument, Program, run

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Watch:
    """The endpoint; an ASGI application. Events: `ready`, `file`, `overflow`, `ping`, and `end` with its `reason`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, (*TOLD, "recursive", "entries", "local", "marks"))
        watching = _Watching(call)
        await call.present(watching.run(), watch=True, stopped=watching.stopped)


class Mark:
    """`POST …/watch/{watch}/marks`: has a watch tell `mark` behind all that had happened before. Answers 202."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        call = self._files.call(scope, receive, send, ())
        program = self._files.marked.get((call.sandbox_id, str(scope["path_params"]["watch"])))
        if program is None or not await program.write(b"."):
            raise NotFound("unknown_watch", "There is no such watch that takes marks.", "Watch with `marks=1`.")
        await call.answer({}, 202)


class _Watching:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._started = False

    async def run(self) -> None:
        call = self._call
        flags = ("recursive", "entries", "local", "marks")
        arguments: list[Argument] = [
            ("path", call.query.path()),
            *((name, int(call.query.flag(name)) or None) for name in flags),
            *call.query.beside(),
        ]
        user, marks = call.query.user(), call.query.flag("marks")
        try:
            async with run(call.link, "watch", arguments, user=user, limits=call.limits, upload=marks) as program:
                head = await program.head(answers.WatchHead)
                with self._known(program, marks=marks) as watch:
                    await call.send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    self._started = True
                    told = msgspec.structs.asdict(head)
                    await self._event("ready", told if watch is None else {**told, "watch": watch})
                    await self._events(program.lines(within=None))
                    done = await program.done(answers.WatchDone)
        except HatchwayError as error:
            if not self._started:
                raise
            await self._end({"reason": "failed", "code": error.code, "cause": error.cause})
        else:
            await self._end({"reason": done.ended})

    @contextlib.contextmanager
    def _known(self, program: Program, *, marks: bool) -> Iterator[str | None]:
        """The name by which marks are asked for, until the block is left; None where they are not."""
        if not marks:
            yield None
            return
        watch, marked = new_id(), self._call.files.marked
        marked[self._call.sandbox_id, watch] = program
        try:
            yield watch
        finally:
            del marked[self._call.sandbox_id, watch]

    async def stopped(self, why: str) -> None:
        """The client is there and may watch no longer."""
        if self._started:
            await self._end({"reason": why})
        else:
            raise no_more(why)

    async def _events(self, lines: AsyncIterator[bytes]) -> None:
        following = asyncio.ensure_future(anext(lines, None))
        try:
            while True:
                await asyncio.wait({following}, timeout=self._call.limits.ping_s)
                if not following.done():
                    await self._send(sse.PING)
                    continue
                line = following.result()
                if line is None:
                    return
                kind = answers.decode(line, answers.Kind).event
                if kind == "overflow":
                    await self._event("overflow", answers.decode(line, answers.Overflow))
                elif kind == "mark":
                    await self._event("mark", answers.decode(line, answers.Mark))
                else:
                    await self._event("file", answers.decode(line, answers.Change))
                following = asyncio.ensure_future(anext(lines, None))
        finally:
            following.cancel()

    async def _event(self, name: str, data: object) -> None:
        await self._send(b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data)))

    async def _end(self, data: dict[str, str]) -> None:
        await self._event("end", data)
        await self._call.send({"type": "http.response.body", "body": b""})

    async def _send(self, octets: bytes) -> None:
        await self._call.send({"type": "http.response.body", "body": octets, "more_body": True})
        # To a client that is gone, send never waits: without a turn for the loop nobody would hear that it is.
        await asyncio.sleep(0)
