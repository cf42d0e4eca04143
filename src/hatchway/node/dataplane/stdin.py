"""`POST /v1/sessions/{id}/stdin`: octets for the process, as they come."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import Conflict
from hatchway.node.dataplane import requests
from hatchway.node.dataplane.plane import Plane
from hatchway.node.guest.seam import GuestLink
from hatchway.node.sessions.session import Session


class Stdin:
    """The endpoint; an ASGI application.

    `eof=1` ends stdin after the body. `offset=N` makes a retry safe: octets that were taken before are skipped; without it
    the body goes on where stdin is. The answer, `{"offset": N}`, comes when the process's side took everything. A request that
    is cut off has given what came of it, and no end.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        plane = self._plane
        session, _ = requests.session_of(scope, plane.tokens, plane.sessions)
        request = Request(scope)
        eof = requests.flag(request, "eof")
        at = requests.offset(request, "offset")
        record = session.record
        if not session.started:
            raise Conflict("not_started", "The process was not started yet.", "Attach to the session first.")
        if not record.spec.stdin and record.spec.pty is None:
            raise Conflict("no_stdin", "The session has no stdin.", "Create it with `stdin: true`.")
        await plane.ready_for(session)
        link = plane.link(session) if record.exit is None else None
        body = requests.Body(receive, plane.limits.stdin_ahead)
        departed = asyncio.ensure_future(body.departed())
        try:
            await self._take_turn(session, departed)
            turn = Turn(session, departed)
            try:
                reached = await self._feed(turn, link, body, at, eof=eof)
            finally:
                turn.close()
        finally:
            departed.cancel()
            body.close()
        await Response(msgspec.json.encode({"offset": reached}), media_type="application/json")(scope, receive, send)

    async def _take_turn(self, session: Session, departed: "asyncio.Future[None]") -> None:
        acquired = asyncio.ensure_future(session.stdin_turn.acquire())
        both: set[asyncio.Future[Any]] = {acquired, departed}
        try:
            await asyncio.wait(both, timeout=self._plane.limits.stdin_turn_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if acquired.done() and not acquired.cancelled():
                session.stdin_turn.release()
            acquired.cancel()
            raise
        if acquired.done():
            return
        acquired.cancel()
        if departed.done():
            raise requests.ClientGone
        raise Conflict(
            "stdin_busy",
            "Another request feeds stdin, and the process does not take it.",
            "Wait for that request, or send again later.",
        )

    async def _feed(
        self, turn: "Turn", link: GuestLink | None, body: requests.Body, at: int | None, *, eof: bool
    ) -> int:
        session = turn.session
        reached = session.record.stdin_offset if at is None else at
        async for data in body.chunks():
            if link is not None:
                await turn.feed(link, reached, data)
            reached += len(data)
            if link is None and reached > session.record.stdin_offset:
                break
        if link is not None and eof:
            await turn.feed(link, reached, b"", eof=eof)
        if link is None and (at is None or reached > session.record.stdin_offset):
            # Only a repetition of what was taken before succeeds when nobody is left to take anything.
            raise Conflict("process_ended", "The process has ended.", "Read its output; start another session.")
        return session.record.stdin_offset


class Turn:
    """The right to feed stdin. Octets that were given to the link are on their way: when their client goes away the turn lasts
    until they arrived, so that the offset of what follows is known."""

    def __init__(self, session: Session, departed: "asyncio.Future[None]") -> None:
        self.session = session
        self._departed = departed
        self._task: asyncio.Task[int] | None = None

    async def feed(self, link: GuestLink, offset: int, data: bytes, *, eof: bool = False) -> None:
        """Feeds and waits until it is taken, or the client went away (`ClientGone`)."""
        task = self._task = self.session.feeding(link, offset, data, eof=eof)
        both: set[asyncio.Future[Any]] = {task, self._departed}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise requests.ClientGone
        task.result()

    def close(self) -> None:
        """Gives the turn back, now or when what is on its way arrived."""
        if self._task is None or self._task.done():
            self.session.stdin_turn.release()
        else:
            self._task.add_done_callback(lambda _: self.session.stdin_turn.release())
