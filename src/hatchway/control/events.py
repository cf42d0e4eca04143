"""/v1/events: the outbox as server-sent events, resumable by `Last-Event-ID`.

Every stream reads from the database at its own pace, so that a slow client costs nothing but its own connection.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway.control import views
from hatchway.control.endpoints import Call, Endpoint, NoBody
from hatchway.control.plane import Plane, give_back
from hatchway.domain.errors import Exhausted, InvalidRequest
from hatchway.storage import outbox, retention, settings
from hatchway.storage.database import Connection
from hatchway.storage.rows import EventRow, KeyRow
from hatchway.wire.behalf import ANNOTATION, KEY_ID

PING_EVERY_S = 15.0
BATCH = 200
MAX_OF_WRAPPERS = 8
"""Streams of E2B wrappers. They take no place from others, and others none from them: by them open streams of a sandbox that ended are cut."""

Follow = Callable[[Connection, int], tuple[list[EventRow], int]]
"""What came after a position, and the position behind it."""


class StreamEvents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to begin, and what to leave out. Without `after` and `Last-Event-ID` the stream begins with what comes next."""

    after: Annotated[int, Meta(ge=0)] | None = None
    subject: Annotated[str, Meta(description="Only events about this id (a sandbox, a session, a key).")] | None = None


async def stream(call: Call[NoBody]) -> Response:
    """Streams events until the client leaves."""
    plane, wrapper = call.plane, call.key.id == KEY_ID
    others = plane.event_streams - plane.event_streams_of[outbox.INSTALLATION]
    if not wrapper and others >= plane.config.max_event_streams:
        raise Exhausted(
            "too_many_streams",
            f"{others} event streams are open.",
            "Close one, then try again.",
            limit=plane.config.max_event_streams,
        )
    most = MAX_OF_WRAPPERS if wrapper else plane.config.max_event_streams_per_project
    if plane.event_streams_of[call.project] >= most:
        raise Exhausted(
            "too_many_streams",
            f"{most} event streams of the project are open.",
            "Close one, then try again.",
            limit=most,
        )
    begin = _position(call)
    projects = (call.project, outbox.INSTALLATION) if "installation" in call.key.scopes else (call.project,)
    plane.event_streams += 1
    plane.event_streams_of[call.project] += 1
    try:
        last, purged = await plane.database.read(_bounds)
    except BaseException:
        _closed(plane, call.project)
        raise
    if begin is None or begin > last:
        begin, purged = last, 0
    follow = _of_wrappers if wrapper else _of_projects(projects)
    return _EventStream(plane, begin, purged, follow, call.query.subject, call.key)


def _of_projects(projects: tuple[str, ...]) -> Follow:
    def follow(connection: Connection, position: int) -> tuple[list[EventRow], int]:
        rows = outbox.after(connection, position, projects, BATCH)
        return rows, rows[-1].sequence if rows else position

    return follow


def _of_wrappers(connection: Connection, position: int) -> tuple[list[EventRow], int]:
    """Nothing but states, and of no sandboxes but theirs."""
    return outbox.states_after(connection, position, ANNOTATION, BATCH)


def _closed(plane: Plane, project: str) -> None:
    plane.event_streams -= 1
    give_back(plane.event_streams_of, project)


def _position(call: Call[NoBody]) -> int | None:
    header = call.request.headers.get("last-event-id")
    if header is None:
        query: StreamEvents = call.query
        return query.after
    if not header.isascii() or not header.isdigit() or len(header) > 18:
        raise InvalidRequest(
            "invalid_field",
            "Last-Event-ID is no id of an event.",
            "Send the `id` of the last event.",
            field="Last-Event-ID",
        )
    return int(header)


class _EventStream(Response):
    """One open stream. Its place among the bounded number of streams is given back however it ends."""

    def __init__(
        self,
        plane: Plane,
        position: int,
        purged: int,
        follow: Follow,
        subject: str | None,
        key: KeyRow,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._plane = plane
        self._position = position
        self._purged = purged
        self._follow = follow
        self._subject = subject
        self._key = key
        self._bell = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._plane.database.on_commit.add(self._bell.set)
        tasks = [
            loop.create_task(self._pump(send)),
            loop.create_task(_gone(receive)),
            loop.create_task(self._plane.ending.wait()),
        ]
        if self._key.id != KEY_ID:  # that one is no key that could end
            tasks.append(loop.create_task(self._plane.auth.until_ended(self._key)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                tasks[0].result()
        finally:
            _closed(self._plane, self._key.project)
            self._plane.database.on_commit.discard(self._bell.set)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send(send, b"retry: 500\n\n" + _ping(self._position))
        if self._position < self._purged:
            await self._send(send, _sse("gap", str(self._purged), {"from": self._position, "to": self._purged}))
            self._position = self._purged
        now = asyncio.get_running_loop().time
        ping_at = now() + PING_EVERY_S
        while True:
            self._bell.clear()
            rows, self._position = await self._plane.database.read(self._follow, self._position)
            if rows:
                shown = [_show(row) for row in rows if self._subject in (None, row.subject)]
                if shown:
                    await self._send(send, b"".join(shown))
                    ping_at = now() + PING_EVERY_S
                continue
            # However often something happens that this stream does not tell, what it says itself is not put off.
            if now() >= ping_at:
                await self._send(send, _ping(self._position))
                ping_at = now() + PING_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ping_at):
                    await self._bell.wait()

    @staticmethod
    async def _send(send: Send, octets: bytes) -> None:
        await send({"type": "http.response.body", "body": octets, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _bounds(connection: Connection) -> tuple[int, int]:
    """The last sequence, and the last one that was purged."""
    purged = int(settings.get(connection, retention.PURGED_TO) or 0)
    return max(outbox.bounds(connection)[1], purged), purged


def _show(row: EventRow) -> bytes:
    view = views.EventView(
        sequence=row.sequence,
        kind=row.kind,
        subject=row.subject,
        project=row.project,
        data=row.data,
        created_at=row.created_at,
    )
    return _sse(row.kind, str(row.sequence), view)


def _ping(position: int) -> bytes:
    """Also tells the position, so that a client that has seen no event yet can go on from here."""
    return _sse("ping", str(position), {})


def _sse(name: str, event_id: str, data: object) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), name.encode(), msgspec.json.encode(data))


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/events",
        stream,
        "Follow what happens, as server-sent events",
        {200: views.EventView},
        "events",
        query=StreamEvents,
        errors=(429,),
        stream=True,
        headers={"Last-Event-ID": "Goes on behind this event. What was purged meanwhile shows as one `gap` event."},
        description="Each event's `data` is an Event; `ping` events come every 15 seconds and have no data.",
    ),
)
