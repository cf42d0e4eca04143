"""Lets a request for file work in, counts it, and ends its work with the client, its token or the node."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import HatchwayError, InvalidRequest, Unauthenticated, Unavailable
from hatchway.node.dataplane import requests, tokens
from hatchway.node.dataplane.accesses import note_claims, note_data
from hatchway.node.dataplane.files.failures import too_many
from hatchway.node.dataplane.files.limits import FileLimits
from hatchway.node.dataplane.files.program import Program
from hatchway.node.dataplane.files.query import Query
from hatchway.node.dataplane.pace import Pace, too_long
from hatchway.node.dataplane.plane import Plane
from hatchway.node.guest.seam import GuestLink
from hatchway.wire.tokens import Claims

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)
SCOPE = "files"
_WATCH = " watch"


@dataclass
class Files:
    """What the endpoints for files share."""

    plane: Plane
    limits: FileLimits

    def __post_init__(self) -> None:
        self._running: Counter[str] = Counter()
        self.marked: dict[tuple[str, str], Program] = {}
        """Watches that take marks, by sandbox and name."""
        self._all = 0

    def call(self, scope: Scope, receive: Receive, send: Send, known: Collection[str]) -> "Call":
        """A request that may be answered. Raises `Unauthenticated`, `Forbidden`, and what `Query` does."""
        request = Request(scope)
        sandbox_id = str(request.path_params["sandbox_id"])
        claims = self.plane.tokens.check(request.headers.get("authorization"))
        note_claims(scope, claims)
        tokens.may_use_sandbox(claims, sandbox_id, self.plane.guests.project_of(sandbox_id))
        tokens.may_use_scope(claims, SCOPE)
        pace, query = Pace(self.plane.limits), Query(scope, known)
        note_data(scope, query.shown())
        return Call(self, scope, receive, pace.sending(scope, send), claims, sandbox_id, query, pace)

    @contextmanager
    def counted(self, sandbox_id: str, *, watch: bool = False) -> Iterator[None]:
        """A place for one operation on a sandbox. Raises `Exhausted("too_many_file_operations")`."""
        limits = self.limits
        bounds = [(sandbox_id, limits.per_sandbox, "file operations of the sandbox")]
        if watch:
            bounds.append((sandbox_id + _WATCH, limits.watches, "watches of the sandbox"))
        if self._all >= limits.per_node:
            raise too_many(f"{limits.per_node} file operations of the node are in hand.")
        for name, most, what in bounds:
            if self._running[name] >= most:
                raise too_many(f"{most} {what} are in hand.")
        self._running.update(name for name, _, _ in bounds)
        self._all += 1
        try:
            yield
        finally:
            self._all -= 1
            self._running.subtract(name for name, _, _ in bounds)
            self._running += Counter()  # forgets those that are 0


@dataclass
class Call:
    """One request: who asks, what for, of which sandbox."""

    files: Files
    scope: Scope
    receive: Receive
    send: Send
    claims: Claims
    sandbox_id: str
    query: Query
    pace: Pace
    """How fast the client has to be; its answer is bound to it."""

    @property
    def link(self) -> GuestLink:
        """The sandbox's agent. Raises `Conflict("sandbox_not_running")`."""
        return self.files.plane.link_of(self.sandbox_id)

    @property
    def limits(self) -> FileLimits:
        """The bounds."""
        return self.files.limits

    async def body(self, kind: type[B]) -> B:
        """The JSON body. Raises what `read_json` does, and `InvalidRequest("body_missing")`."""
        body = await requests.read_json(self.scope, self.receive, kind, self.limits.body)
        if body is None:
            raise InvalidRequest("body_missing", "The request has no body.", "Send a JSON object.")
        note_data(self.scope, body)
        return body

    async def answer(self, value: object, status: int = 200) -> None:
        """Answers with JSON."""
        response = Response(msgspec.json.encode(value), status, media_type="application/json")
        await response(self.scope, self.receive, self.send)

    async def download(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work`, an answer that may take as long as one transfer may. Raises what `present` does, and `client_too_slow`."""

        async def bounded() -> None:
            try:
                async with asyncio.timeout(self.limits.transfer_s):
                    await work
            except TimeoutError:
                raise too_long(self.limits.transfer_s) from None

        try:
            await self.present(bounded())
        finally:
            work.close()

    async def present(
        self,
        work: Coroutine[Any, Any, T],
        *,
        watch: bool = False,
        stopped: Callable[[str], Coroutine[Any, Any, T]] | None = None,
    ) -> T:
        """Does `work` in a place of its own for as long as the client is there and may. Raises what `counted` and `held` do."""
        try:
            with self.files.counted(self.sandbox_id, watch=watch):
                return await self.held(work, stopped=stopped)
        finally:
            work.close()

    async def held(
        self,
        work: Coroutine[Any, Any, T],
        *,
        departed: Callable[[], Awaitable[None]] | None = None,
        stopped: Callable[[str], Coroutine[Any, Any, T]] | None = None,
    ) -> T:
        """Does `work` for as long as the client is there and may; then it is cancelled and waited for.

        `departed` returns when a client whose body is being read goes away. Raises `ClientGone`, or the error for a token that
        ended or a node that does; where there is `stopped` it is called with the reason instead.
        """
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        try:
            with self.files.plane.opened(self.claims, end):
                return await self._until(ended, end, self._ready(work), departed, stopped)
        finally:
            work.close()

    async def _ready(self, work: Coroutine[Any, Any, T]) -> T:
        await self.files.plane.ready(self.sandbox_id)
        return await work

    async def _until(
        self,
        ended: "asyncio.Future[str]",
        end: Callable[[str], None],
        work: Coroutine[Any, Any, T],
        departed: Callable[[], Awaitable[None]] | None,
        stopped: Callable[[str], Coroutine[Any, Any, T]] | None,
    ) -> T:
        async def watch_departure() -> None:
            if departed is not None:
                await departed()
            else:
                while (await self.receive())["type"] != "http.disconnect":
                    pass
            end("disconnected")

        loop = asyncio.get_running_loop()
        task, departure = loop.create_task(work), loop.create_task(watch_departure())
        both: set[asyncio.Future[Any]] = {task, ended}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            departure.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            return task.result()
        why = ended.result()
        if why == "disconnected":
            raise requests.ClientGone
        if stopped is not None:
            return await stopped(why)
        raise no_more(why)


def no_more(why: str) -> HatchwayError:
    """Why work that a client had a right to was ended."""
    if why == "shutdown":
        return Unavailable("closing", "The node is shutting down.", "Try again in a moment.")
    words = {
        "revoked": Unauthenticated("token_revoked", "The token was revoked.", tokens.RENEW),
        "expired": Unauthenticated("token_expired", "The token has expired.", tokens.RENEW),
        "superseded": Unauthenticated(
            "token_superseded", "The token was issued for an earlier life of the sandbox.", tokens.RENEW
        ),
    }
    return words[why]
