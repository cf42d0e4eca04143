"""`POST /v1/sessions/{id}/attach`: starts the process, or goes on where a client was; server-sent events until the end."""

import asyncio
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hatchway.node.dataplane import sse
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.requests import Departure, read_json, session_of
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.spool import NAMES, STDERR, STDOUT, Gap

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Offsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where to go on in each stream, in octets."""

    stdout: Offset = 0
    stderr: Offset = 0


class AttachBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optional body."""

    offsets: Offsets | None = None


class Attach:
    """The endpoint; an ASGI application."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        plane = self._plane
        session, claims = session_of(scope, plane.tokens, plane.sessions)
        body = await read_json(scope, receive, AttachBody, plane.limits.body)
        place = _place(session, body, Request(scope).headers.get("last-event-id"))
        with plane.following(session, claims, place.stdout, place.stderr) as follower:
            departure = Departure(receive, lambda: follower.stop("disconnected"))
            try:
                await plane.ready_for(session)
                if not session.started:
                    await session.start(plane.link(session))
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await self._stream(session, follower, send)
            finally:
                departure.close()

    async def _stream(self, session: Session, follower: Follower, send: Send) -> None:
        limits = self._plane.limits
        feed = Feed(session, follower, limits.event_octets)
        while not follower.stopped:
            frames: list[bytes] = []
            size = 0
            while size < limits.write_octets and (frame := feed.next()) is not None:
                frames.append(frame)
                size += len(frame)
            if frames:
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": not feed.over})
                # To a client that is gone, send never waits: without a turn for the loop nobody would hear that it is.
                await asyncio.sleep(0)
                if feed.over:
                    return
            elif not await follower.wait(limits.ping_s):
                await send({"type": "http.response.body", "body": sse.PING, "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # without `end`: the client goes on elsewhere or later


class Feed:
    """The events of one attached client, one after the other; holds nothing but its place."""

    def __init__(self, session: Session, follower: Follower, event_octets: int) -> None:
        self.over = False
        """`end` was given: nothing will follow."""
        self._session = session
        self._cursors = follower.cursors
        self._event_octets = event_octets
        self._started = False
        self._exited = False
        self._turn = STDOUT

    def next(self) -> bytes | None:
        """Returns the next event, or None when there is none now."""
        session = self._session
        record = session.record
        if not self._started and session.started:
            self._started = True
            if record.pid is not None:
                return sse.event("started", self._here(), {"pid": record.pid})
        if (
            not self._exited
            and record.exit is not None
            and self._has_all_of_leader(record.exit.stdout_bytes, record.exit.stderr_bytes)
        ):
            return self._exit()
        for fd in (self._turn, STDOUT + STDERR - self._turn):
            frame = self._output(fd)
            if frame is not None:
                self._turn = STDOUT + STDERR - fd
                return frame
        if record.exit is not None and not self._exited and self._stored_all_of_leader():
            return self._exit()
        if session.ended and not self.over:
            self.over = True
            stdout, stderr = session.ends()
            return sse.event("end", self._here(), {"stdout_bytes": stdout, "stderr_bytes": stderr})
        return None

    def _output(self, fd: int) -> bytes | None:
        cursor = self._cursors[fd]
        chunk = cursor.peek(self._event_octets)
        if chunk is None:
            return None
        start = cursor.position
        if isinstance(chunk, Gap):
            cursor.position = chunk.end
            return sse.gap(NAMES[fd], chunk, self._here())
        whole = sse.whole_characters(chunk)
        if whole == 0:  # the start of one character is all there is
            behind = cursor.stream.locate(start + len(chunk))
            if not isinstance(behind, Gap) and not self._session.ended:
                return None
            whole = len(chunk)
        cursor.position = start + whole
        return sse.output(NAMES[fd], start, chunk[:whole], self._here())

    def _exit(self) -> bytes:
        self._exited = True
        exit_ = self._session.record.exit
        assert exit_ is not None
        return sse.exited(exit_, self._here())

    def _has_all_of_leader(self, stdout: int, stderr: int) -> bool:
        return self._cursors[STDOUT].position >= stdout and self._cursors[STDERR].position >= stderr

    def _stored_all_of_leader(self) -> bool:
        exit_ = self._session.record.exit
        assert exit_ is not None
        stdout, stderr = self._session.ends()
        return self._session.ended or (stdout >= exit_.stdout_bytes and stderr >= exit_.stderr_bytes)

    def _here(self) -> sse.Place:
        return sse.Place(self._session.record.epoch, self._cursors[STDOUT].position, self._cursors[STDERR].position)


def _place(session: Session, body: AttachBody | None, last_event_id: str | None) -> sse.Place:
    """Where to go on: the body's offsets, else those of the last event, else the beginning. Offsets of another epoch are void."""
    epoch = session.record.epoch
    if body is not None and body.offsets is not None:
        return sse.Place(epoch, body.offsets.stdout, body.offsets.stderr)
    if last_event_id:
        place = sse.parse_id(last_event_id)
        if place.epoch == epoch:
            return place
    return sse.Place(epoch, 0, 0)
