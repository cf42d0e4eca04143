"""The streams of the service as flows: attach to a session, its raw output, its standard input, the event stream.

What they have in common: a broken connection is taken up again where it was, a bounded number of times without progress.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from .calls import decode, exchange, renew_access
from .errors import BadAnswer, ConnectionFailed, Gone, StreamLost, Unauthenticated, Unavailable, from_problem
from .events import Cursor, SessionEvent, StreamName
from .models import Access, ServiceEvent
from .sse import Parser
from .steps import Emit, Flow, Open, Pause, Read, Reply, Request, Stream

T = TypeVar("T")

BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 5.0, 5.0, 5.0)
"""Pauses between attempts to take a stream up again; any progress starts them anew, after the last one it is lost."""
SILENCE_S = 45.0
"""A stream that says nothing for so long is broken: the service pings every 15 s."""
STDIN_PIECE = 4 * 1024 * 1024
"""Octets of standard input that one request carries at most; between two requests the way to the process runs empty."""


class Line:
    """How to reach one session on its node, renewed when the token has expired. Shared by all flows of the session."""

    def __init__(self, session_id: str, access: Access | None) -> None:
        self.session_id = session_id
        self.access = access

    def ready(self) -> Flow[Access]:
        """Returns the access, asking for it when there is none yet."""
        if self.access is None:
            self.access = yield from renew_access(self.session_id)
        return self.access

    def url(self, access: Access, what: str) -> str:
        """Returns the URL of `what` beside `…/attach`."""
        return access.attach_url.removesuffix("/attach") + "/" + what

    def call(self, build: Callable[[Access], Request]) -> Flow[Reply]:
        """Does the request that `build` makes; once more with a fresh token when the one at hand has expired."""
        access = yield from self.ready()
        try:
            return (yield from exchange(build(access)))
        except Unauthenticated:
            self.access = None
            access = yield from self.ready()
            return (yield from exchange(build(access)))


@dataclass(slots=True)
class Patience:
    """Counts attempts without progress."""

    what: str
    remedy: str
    failures: int = 0

    def progress(self) -> None:
        """Something came: the attempts are counted anew."""
        self.failures = 0

    def next_pause(self, cause: str) -> Pause:
        """Returns how long to wait before the next attempt; raises `StreamLost` when there were enough."""
        if self.failures >= len(BACKOFF_S):
            raise StreamLost(f"{self.what} broke and {self.failures} attempts to go on failed: {cause}", self.remedy)
        self.failures += 1
        return Pause(BACKOFF_S[self.failures - 1])


def attach(line: Line, cursor: Cursor) -> Stream[SessionEvent]:
    """Starts the process of a session, or goes on reading it after `cursor`, until its end.

    Every octet is delivered once, or told of by a `Gap`. Raises `StreamLost` when the node stays away, `Gone` when the
    output was dropped meanwhile.
    """
    patience = Patience(
        f"The stream of session {line.session_id}",
        f"When the service is back, read on with: hatchway logs --follow {line.session_id}",
    )
    renewed = False
    while not cursor.ended:
        try:
            access = yield from line.ready()
            reply: Reply = yield Open(_attach_request(access, cursor))
            raise_for(reply)
            renewed = False
            parser = Parser()
            while not cursor.ended:
                piece: bytes = yield Read()
                if not piece:
                    raise ConnectionFailed("The stream ended in the middle.")
                for event in parser.feed(piece):
                    if event.name == "ping":
                        patience.progress()
                    for item in cursor.take(event):
                        patience.progress()
                        yield Emit(item)
            # The rest of the answer is its end mark: having read it, the connection can be used again.
            while (yield Read()):
                pass
        except Unauthenticated:
            if renewed:
                raise
            renewed = True
            line.access = None
        except (ConnectionFailed, Unavailable) as error:
            if cursor.ended:
                return
            yield patience.next_pause(error.cause)


def _attach_request(access: Access, cursor: Cursor) -> Request:
    headers = {"Accept": "text/event-stream"}
    body: object = None
    if (event_id := cursor.event_id) is not None:
        headers["Last-Event-ID"] = event_id
    elif cursor.stdout or cursor.stderr:
        body = {"offsets": {"stdout": cursor.stdout, "stderr": cursor.stderr}}
    return Request("POST", access.attach_url, json=body, headers=headers, token=access.token, timeout_s=SILENCE_S)


def raise_for(reply: Reply) -> None:
    """Raises the error that the service answered with, if it is one."""
    if reply.status >= 400:
        raise from_problem(reply.status, reply.body)


def output(line: Line, stream: StreamName, from_: int, follow: bool) -> Stream[bytes]:
    """Reads the raw octets of one output stream from `from_` on.

    Raises `Gone` where octets are lost: its `extra` names the range.
    """
    patience = Patience(f"The {stream} of session {line.session_id}", "Try again when the service is back.")
    at = from_
    renewed = False
    while True:
        try:
            access = yield from line.ready()
            query = urlencode({"stream": stream, "from": at, "follow": int(follow)})
            url = f"{line.url(access, 'output')}?{query}"
            # A process may be silent for any time, and raw octets have no pings.
            reply: Reply = yield Open(Request("GET", url, token=access.token, timeout_s=None if follow else SILENCE_S))
            raise_for(reply)
            renewed = False
            start = int(reply.headers.get("hatchway-offset", at))
            if start > at:
                raise Gone(
                    "output_gap",
                    f"Octets {at} to {start} of {stream} are lost.",
                    f"Read on from {start}.",
                    stream=stream,
                    lost_from=at,
                    lost_to=start,
                )
            while True:
                piece: bytes = yield Read()
                if not piece:
                    return
                at += len(piece)
                patience.progress()
                yield Emit(piece)
        except Unauthenticated:
            if renewed:
                raise
            renewed = True
            line.access = None
        except (ConnectionFailed, Unavailable) as error:
            yield patience.next_pause(error.cause)


class _Told(msgspec.Struct):
    subject: str = ""
    data: dict[str, Any] = {}
    created_at: float | None = None


class _Delivered(msgspec.Struct):
    delivered: bool = True


class _Taken(msgspec.Struct):
    offset: int


class Input:
    """The writer's end of a session's standard input: knows its offset, so that a repeated request writes nothing twice.

    `offset` is None where others may have written before: the first request then goes on wherever the input is.
    """

    def __init__(self, line: Line, offset: int | None) -> None:
        self._line = line
        self.offset = offset

    def write(self, data: bytes, *, eof: bool) -> Flow[None]:
        """Writes all of `data`, and closes the input after it with `eof`. Stays until the process's side has taken it."""
        if self.offset is None:
            yield from self._request(b"", None, False)
        for at in range(0, max(len(data), 1), STDIN_PIECE):
            piece = data[at : at + STDIN_PIECE]
            yield from self._write(piece, eof and at + len(piece) == len(data))

    def _write(self, piece: bytes, eof: bool) -> Flow[None]:
        assert self.offset is not None  # the first request told it
        begin = self.offset
        patience = Patience("Standard input", "Is the service running?")
        while True:
            try:
                yield from self._request(piece, begin, eof)
                return
            except ConnectionFailed as error:
                if error.code != "timeout":
                    yield patience.next_pause(error.cause)
                # A process that does not read its input for long is no failure: what it took is skipped next time.

    def _request(self, content: bytes, offset: int | None, eof: bool) -> Flow[None]:
        fields = {**({} if offset is None else {"offset": offset}), **({"eof": 1} if eof else {})}

        def build(access: Access) -> Request:
            url = f"{self._line.url(access, 'stdin')}?{urlencode(fields)}"
            return Request("POST", url, content=content, token=access.token, timeout_s=60.0)

        reply = yield from self._line.call(build)
        taken = decode(reply.body, _Taken).offset
        if offset is not None and taken < offset + len(content):
            raise BadAnswer(
                "bad_answer",
                f"The service took input up to {taken}, not {offset + len(content)}.",
                "Check the versions.",
            )
        self.offset = taken


def append(line: Line, data: bytes, *, eof: bool) -> Flow[None]:
    """Writes to the standard input behind what others write, as one. It is not repeated: who does it knows no offset."""

    def build(access: Access) -> Request:
        url = line.url(access, "stdin") + ("?eof=1" if eof else "")
        return Request("POST", url, content=data, token=access.token, timeout_s=None, repeatable=False)

    yield from line.call(build)


def send_signal(line: Line, signal: str | int, scope: str) -> Flow[bool]:
    """Sends a signal to the whole process tree (`tree`) or to the leader alone (`leader`); tells whether there was one to take it."""

    def build(access: Access) -> Request:
        body = {"signal": signal, "scope": scope}
        return Request("POST", line.url(access, "signal"), json=body, token=access.token, repeatable=False)

    return decode((yield from line.call(build)).body, _Delivered).delivered


def resize(line: Line, rows: int, cols: int) -> Flow[None]:
    """Tells the terminal of a session its new size."""

    def build(access: Access) -> Request:
        return Request("POST", line.url(access, "resize"), json={"rows": rows, "cols": cols}, token=access.token)

    yield from line.call(build)


PING = "ping"


def service_events(after: str | None, filters: Mapping[str, str], *, pings: bool = False) -> Stream[ServiceEvent]:
    """What changes in the project, for as long as the caller iterates; goes on by itself after a lost connection.

    `pings` gives those too: the first one says that from then on nothing is missed.
    """
    patience = Patience("The event stream", "Go on after the last event's id when the service is back.")
    last = after
    while True:
        try:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last is not None else {})}
            path = "/v1/events" + ("?" + urlencode(filters) if filters else "")
            reply: Reply = yield Open(Request("GET", path, headers=headers, timeout_s=SILENCE_S))
            raise_for(reply)
            parser = Parser()
            while True:
                piece: bytes = yield Read()
                if not piece:
                    raise ConnectionFailed("The stream ended.")
                for event in parser.feed(piece):
                    patience.progress()
                    # A ping tells the position too: whoever has seen no event yet misses none that comes while the connection is lost.
                    last = event.id or last
                    if event.name == PING:
                        if pings:
                            yield Emit(ServiceEvent(id=event.id, kind=PING))
                        continue
                    told = decode(event.data, _Told)
                    yield Emit(
                        ServiceEvent(
                            id=event.id,
                            kind=event.name,
                            subject=told.subject,
                            data=told.data,
                            created_at=told.created_at,
                        )
                    )
        except (ConnectionFailed, Unavailable) as error:
            yield patience.next_pause(error.cause)
