"""/v1/audit: what happened, as the audit journal has it. A key of a project sees its project's records, one with the scope `installation` all."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway.control import requests, views
from hatchway.control.auth import require_scope
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.plane import Plane, give_back
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Exhausted, InvalidRequest
from hatchway.storage import audit, keys
from hatchway.storage.rows import KeyRow
from hatchway.wire.audit import Health, Query, Records
from hatchway.wire.node import Empty

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
FLUSH_WITHIN_S = 2.0
FOLLOW_EVERY_S = 0.5
PING_EVERY_S = 15.0
BATCH = 500
MAX_KINDS = 32


class ListAudit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters and order. Oldest first, unless `newest`; `after` and `cursor` are sequences of records."""

    project: Annotated[str, Meta(description="With the scope `installation`: one project's records alone.")] | None = (
        None
    )
    sandbox: str | None = None
    kind: Annotated[str, Meta(description="A kind or its beginning, or several with commas between them.")] | None = (
        None
    )
    decision: str | None = None
    since: Annotated[float, Meta(description="Records of this time or later (Unix seconds).")] | None = None
    until: Annotated[float, Meta(description="Records before this time.")] | None = None
    after: Annotated[int, Meta(ge=0, description="Records behind this one.")] = 0
    newest: Annotated[bool, Meta(description="The newest first.")] = False
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


class AuditRecord(views.View, frozen=True, kw_only=True):
    """One record. `hash` is the SHA-256 of its line without that member, `previous` that of the record before. `time` is the sender's clock, `recorded` the journal's."""

    sequence: int
    previous: str
    recorded: float
    time: float
    kind: str
    project: str
    sandbox_id: str
    generation: int
    actor: str
    request_id: str
    decision: str
    reason: str
    count: int
    data: dict[str, Any]
    source: str
    number: int
    hash: str


class AuditPage(views.View, frozen=True, kw_only=True):
    """Records, each with the very octets that the journal has. A page may be empty and yet have a `next_cursor`: a part of the journal is looked through at a time."""

    records: tuple[AuditRecord, ...]
    next_cursor: str | None


class AuditHead(views.View, frozen=True, kw_only=True):
    """Where the journal is: what to note elsewhere, so that a check can be pinned to it. `behind`: records that wait for it."""

    sequence: int
    hash: str
    first: int
    octets: int
    public_key: str
    writable: bool
    error: str
    behind: int


async def list_(call: Call[NoBody]) -> Response:
    """Lists records; streams them where the client accepts `application/x-ndjson`, and follows where it accepts `text/event-stream`."""
    query = _query(call)
    accepted = call.request.headers.get("accept", "")
    if NDJSON in accepted or SSE in accepted:
        return await _stream(call, query, follow=SSE in accepted)
    if call.query.cursor is None:
        await call.plane.audit.flushed(FLUSH_WITHIN_S)
    found = await call.plane.audit.call("audit.query", query, Records)
    more = bool(found.next_after) if query.newest else found.next_after < found.head
    cursor = str(found.next_after) if more else None
    body = b'{"records":[%b],"next_cursor":%b}' % (b",".join(found.lines), msgspec.json.encode(cursor))
    return Response(
        body, 200, {"cache-control": "no-store", "x-content-type-options": "nosniff"}, media_type="application/json"
    )


async def head(call: Call[NoBody]) -> Response:
    """Shows where the journal is."""
    await call.plane.audit.flushed(FLUSH_WITHIN_S)
    health = await call.plane.audit.call("audit.health", Empty(), Health)
    return answer(
        AuditHead(
            sequence=health.head,
            hash=health.head_hash,
            first=health.first,
            octets=health.octets,
            public_key=health.public_key,
            writable=health.writable,
            error=health.error,
            behind=await call.plane.database.read(audit.behind),
        )
    )


def _query(call: Call[Any]) -> Query:
    wanted: ListAudit = call.query
    project = wanted.project
    if not keys.may(call.key.scopes, "installation"):
        if project not in (None, call.project):
            require_scope(call.key, "installation")
        project = call.project
    kinds = tuple(filter(None, (wanted.kind or "").split(",")))
    if len(kinds) > MAX_KINDS:
        raise invalid_field("kind", "these are too many.", f"at most {MAX_KINDS}")
    place = _place(wanted.cursor)
    return Query(
        after=wanted.after if place is None or wanted.newest else place,
        before=place or 0 if wanted.newest else 0,
        limit=wanted.limit,
        project=project,
        sandbox_id=wanted.sandbox,
        kinds=kinds,
        decision=wanted.decision,
        since_time=wanted.since,
        before_time=wanted.until,
        newest=wanted.newest,
    )


def _place(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise InvalidRequest(
            "invalid_cursor",
            "The cursor is none that a list has answered.",
            "Pass `next_cursor` of the previous page.",
            field="cursor",
        )
    return int(cursor)


async def _stream(call: Call[Any], query: Query, *, follow: bool) -> Response:
    plane = call.plane
    if query.newest:
        raise invalid_field("newest", "a stream has the oldest first.", "false")
    most, most_of = plane.config.max_event_streams, plane.config.max_event_streams_per_project
    if plane.event_streams >= most or plane.event_streams_of[call.project] >= most_of:
        raise Exhausted(
            "too_many_streams", "As many streams as there may be are open.", "Close one, then try again.", limit=most
        )
    begin = call.request.headers.get("last-event-id")
    if begin is not None:
        query = msgspec.structs.replace(query, after=_place(begin) or 0)
    await plane.audit.flushed(FLUSH_WITHIN_S)
    # Before the answer begins: what is wrong with the writer is then said as an error.
    health = await plane.audit.call("audit.health", Empty(), Health)
    return _Stream(plane, msgspec.structs.replace(query, limit=BATCH), None if follow else health.head, call.key)


class _Stream(Response):
    """Records as they lie in the journal, to the head that was there at the beginning, or (`end` None) for as long as the client stays."""

    def __init__(self, plane: Plane, query: Query, end: int | None, key: KeyRow) -> None:
        super().__init__(
            media_type=SSE if end is None else NDJSON, headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._plane = plane
        self._query = query
        self._end = end
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._plane.event_streams += 1
        self._plane.event_streams_of[self._key.project] += 1
        tasks = (
            loop.create_task(self._pump(send)),
            loop.create_task(_gone(receive)),
            loop.create_task(self._plane.ending.wait()),
            loop.create_task(self._plane.auth.until_ended(self._key)),
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            whole = tasks[0] in done
            if whole:
                tasks[0].result()
        finally:
            self._plane.event_streams -= 1
            give_back(self._plane.event_streams_of, self._key.project)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if whole or self._end is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        # Else it is cut off, so that nobody takes a part for the whole.

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for lines in self._batches():
            if self._end is not None:
                shown = b"".join(line + b"\n" for line in lines)
            else:
                shown = b"".join(_event(line) for line in lines) or b": ping\n\n"
            await send({"type": "http.response.body", "body": shown, "more_body": True})

    async def _batches(self) -> AsyncIterator[tuple[bytes, ...]]:
        """What there is; of one that follows, an empty one now and then."""
        query, quiet = self._query, 0.0
        while True:
            found = await self._plane.audit.call("audit.query", query, Records)
            lines = found.lines
            if self._end is not None and found.next_after > self._end:
                lines = tuple(line for line in lines if _sequence(line) <= self._end)
            if lines:
                quiet = 0.0
                yield lines
            query = msgspec.structs.replace(query, after=max(query.after, found.next_after))
            if found.next_after < found.head and (self._end is None or found.next_after < self._end):
                continue
            if self._end is not None:
                return
            await asyncio.sleep(FOLLOW_EVERY_S)
            quiet += FOLLOW_EVERY_S
            if quiet >= PING_EVERY_S:
                quiet = 0.0
                yield ()


def _sequence(line: bytes) -> int:
    return int(line[len(b'{"sequence":') :].partition(b",")[0])


def _event(line: bytes) -> bytes:
    return b"id: %d\nevent: record\ndata: %b\n\n" % (_sequence(line), line)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/audit",
        list_,
        "List, export or follow what happened",
        {200: AuditPage},
        "audit",
        scope="admin",
        query=ListAudit,
        errors=(503,),
        headers={"Last-Event-ID": "With `Accept: text/event-stream`: goes on behind this record."},
        description="With `Accept: application/x-ndjson` all that match are streamed, one line each, exactly as the journal has them; "
        "with `Accept: text/event-stream` the stream goes on with what happens next.",
    ),
    Endpoint(
        "GET",
        "/v1/audit/head",
        head,
        "Show where the audit journal is, and its public key",
        {200: AuditHead},
        "audit",
        scope="admin",
        errors=(503,),
    ),
)
