"""`GET /v1/sessions/{id}/ws`: a terminal over one WebSocket.

To the client, binary messages are output and text messages are events; from it, binary messages are input and text messages
are requests. `from=N` goes on at an offset of the output, as a client that lost its connection does.
"""

import asyncio
import contextlib
from typing import Any, Literal

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send
from websockets.frames import CloseCode

from hatchway.domain import checking
from hatchway.domain.errors import Conflict, HatchwayError, InvalidRequest
from hatchway.node.dataplane import requests, sse
from hatchway.node.dataplane.control import ResizeBody, signal_number
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.stdin import Turn
from hatchway.node.dataplane.websocket import Socket
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.spool import STDOUT, Gap


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a text message of the client asks for: one of `resize`, `signal` (with `scope`) and `eof`."""

    resize: ResizeBody | None = None
    signal: str | int | None = None
    scope: Literal["tree", "leader"] = "tree"
    eof: bool = False


class Terminal:
    """The endpoint; an ASGI application for WebSockets."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one client; starts the process when nobody did before."""
        plane = self._plane
        session, claims = requests.session_of(scope, plane.tokens, plane.sessions)
        if session.record.spec.pty is None:
            raise Conflict("no_terminal", "The session has no terminal.", "Create it with `pty`, or use `attach`.")
        at = requests.offset(HTTPConnection(scope), "from") or 0
        why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with plane.following(session, claims, at, 0, stop=why.set_result) as follower:
            await plane.ready_for(session)
            if not session.started:
                await session.start(plane.link(session))
            socket = Socket(scope, receive, send)
            await socket.accept()
            await _Served(plane, session, follower, socket).run(why)


class _Served:
    """One client: what it reads and what it asks, side by side, so that neither waits for the other."""

    def __init__(self, plane: Plane, session: Session, follower: Follower, socket: Socket) -> None:
        self._plane = plane
        self._session = session
        self._follower = follower
        self._socket = socket
        self._cursor = follower.cursors[STDOUT]
        self._exited = False
        self._input = bytearray()
        self._eof = False
        self._changed = asyncio.Event()
        self._departed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, why: "asyncio.Future[str]") -> None:
        loop = asyncio.get_running_loop()
        output, listening = loop.create_task(self._output()), loop.create_task(self._listen())
        tasks = [output, listening, loop.create_task(self._feed())]
        ends: list[asyncio.Future[Any]] = [output, listening, why]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if why.done():
                await self._socket.close_because(why.result())
            elif output.done() and output.exception() is None:
                if self._follower.stopped:
                    await self._socket.close_because(self._follower.stopped)
                else:
                    await self._socket.close(CloseCode.NORMAL_CLOSURE, "end")
        finally:
            if not self._departed.done():
                self._departed.set_result(None)  # input that is on its way is not waited for
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, requests.ClientGone):
                    raise result

    # -- to the client

    async def _output(self) -> None:
        session, cursor, record = self._session, self._cursor, self._session.record
        if record.pid is not None:
            await self._socket.tell(event="started", pid=record.pid, epoch=record.epoch, offset=cursor.position)
        while not self._follower.stopped:
            if self._exit_is_due():
                await self._tell_exit()
            chunk = cursor.peek(self._plane.limits.terminal_octets)
            if isinstance(chunk, Gap):
                cursor.position = chunk.end
                await self._socket.tell(event="gap", **{"from": chunk.start, "to": chunk.end}, cause=chunk.cause)
            elif chunk is not None:
                cursor.position += len(chunk)
                await self._socket.send(chunk)
                await asyncio.sleep(0)  # to a client that takes all at once, sending never waits
            elif session.ended:
                if record.exit is not None and not self._exited:
                    await self._tell_exit()
                await self._socket.tell(event="end", stdout_bytes=session.ends()[0])
                return
            else:
                await self._follower.wait(self._plane.limits.ping_s)

    def _exit_is_due(self) -> bool:
        """The leader ended, and the client has all that it wrote."""
        exit_ = self._session.record.exit
        return exit_ is not None and not self._exited and self._cursor.position >= exit_.stdout_bytes

    async def _tell_exit(self) -> None:
        self._exited = True
        exit_ = self._session.record.exit
        assert exit_ is not None
        await self._socket.tell(event="exit", **sse.exit_data(exit_))

    # -- from the client

    async def _listen(self) -> None:
        """Reads messages until the client is gone, ahead of the process within a bound."""
        while True:
            message = await self._socket.receive()
            try:
                if isinstance(message, bytes):
                    self._input += message
                else:
                    await self._ask(message)
            except HatchwayError as error:
                await self._socket.tell(event="error", code=error.code, cause=error.cause, remedy=error.remedy)
            self._changed.set()
            while len(self._input) > self._plane.limits.terminal_ahead:
                self._changed.clear()
                await self._changed.wait()

    async def _ask(self, message: str) -> None:
        if len(message) > self._plane.limits.body:
            raise checking.too_large(self._plane.limits.body)
        asked = checking.decode(message.encode(), Asked)
        given = [asked.resize is not None, asked.signal is not None, asked.eof]
        if given.count(True) != 1:
            raise InvalidRequest(
                "body_missing", "The message asks for none or several things.", "Send one of resize, signal and eof."
            )
        session = self._session
        if asked.eof:
            self._eof = True
        elif asked.signal is not None:
            number = signal_number(asked.signal)
            if session.living:
                await session.signal(self._plane.link(session), number, leader_only=asked.scope == "leader")
        elif asked.resize is not None and session.record.exit is None:
            await session.resize(self._plane.link(session), asked.resize.rows, asked.resize.cols)

    async def _feed(self) -> None:
        """Gives what was typed to the process, as it takes it; what nobody is left to take is dropped."""
        session = self._session
        while True:
            while not self._input and not self._eof:
                self._changed.clear()
                await self._changed.wait()
            data, eof = bytes(self._input), self._eof
            if session.record.exit is None:
                try:
                    await self._give(data, eof=eof)
                except HatchwayError as error:
                    await self._socket.tell(event="error", code=error.code, cause=error.cause, remedy=error.remedy)
            del self._input[: len(data)]
            self._eof = self._eof and not eof
            self._changed.set()

    async def _give(self, data: bytes, *, eof: bool) -> None:
        session = self._session
        await session.stdin_turn.acquire()
        turn = Turn(session, self._departed)
        with contextlib.closing(turn):
            await turn.feed(self._plane.link(session), session.record.stdin_offset, data, eof=eof)
