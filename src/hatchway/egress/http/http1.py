"""HTTP/1.1 of a client in the sandbox: one request after the other, each taken apart strictly and decided on by itself."""

import asyncio
from collections.abc import Callable

from hatchway.domain.errors import HatchwayError, TooSlow
from hatchway.egress.http import framing, heads, refusals, websocket
from hatchway.egress.http.carrying import MAX_HERE
from hatchway.egress.http.exchanges import Exchanges
from hatchway.egress.http.heads import Fields, RequestHead, Unclear, malformed
from hatchway.egress.http.incoming import Over
from hatchway.egress.http.lines import head_of
from hatchway.egress.http.seam import Stream, StreamLost
from hatchway.egress.http.waiting import Alarm

HEAD_WITHIN_S = 10.0
"""How long a head may take from its first octet on, and a fresh connection until that comes."""
IDLE_S = 60.0
"""How long a connection is kept for a next request."""
BODY_IDLE_S = 30.0
MIN_RATE = 256
"""Octets a second that a body has to come with on average, once it took `BODY_IDLE_S`."""
TAKE_WITHIN_S = 60.0
"""How long a client may take nothing of its answer."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_REQUEST = RequestHead("", "/", "1.1", [], None, keep=False)
_BODILESS = (204, 304)


class Http1:
    """One client connection."""

    def __init__(self, client: Stream, exchanges: Exchanges) -> None:
        self.client = client
        self.exchanges = exchanges
        self.data = b""
        """What came and belongs to nothing yet."""
        self.alarm = Alarm()
        self._served = 0

    async def serve(self) -> None:
        """Serves requests until the client is done, or one of them ends the connection. Raises `StreamLost`."""
        try:
            await self._serve()
        finally:
            self.alarm.stop()

    async def _serve(self) -> None:
        while True:
            incoming: Incoming1 | None = None
            try:
                head = await self._head()
                if head is None:
                    return
                head.keep = head.keep and head.upgrade != "websocket"
                incoming = Incoming1(self, head)
            except HatchwayError as error:
                await self._refuse_unread(error)
                return
            try:
                if head.upgrade == "websocket":
                    await websocket.serve(self, incoming)
                    return
                await (
                    self.exchanges.flow.shares.turns.take()
                )  # requests that were sent ahead, on however many connections
                await self.exchanges.run(incoming)
            except (Over, TimeoutError):
                self.client.abort()
                return
            if not incoming.may_go_on:
                return
            self._served += 1

    async def refuse(self, judge: "Callable[[RequestHead], HatchwayError]") -> None:
        """Reads one request and answers it with an error. Raises `StreamLost`."""
        try:
            head = await self._head()
        except HatchwayError as error:
            await self._refuse_unread(error)
            return
        if head is not None:
            head.keep = False
            await self.exchanges.refuse(Incoming1(self, head), judge(head))

    async def more(self, within: float) -> bytes:
        """Octets that came, at least one; `b""` at the client's end. Raises `TimeoutError` and `StreamLost`."""
        return await self.alarm.within(within, self.client.read())

    async def _head(self) -> RequestHead | None:
        """The next request's head; None: there is none. Raises a `HatchwayError` for what is no head, too long or too slow."""
        looked = 0
        loop = asyncio.get_running_loop()
        due: float | None = None
        while True:
            if self.data:
                end = heads.end_of_head(self.data, looked)
                if end >= 0:
                    head, self.data = self.data[:end], self.data[end:]
                    return heads.parse_request(head)
                looked = len(self.data)
            if due is None and (self.data or not self._served):
                due = loop.time() + HEAD_WITHIN_S
            try:
                data = await self.more(IDLE_S if due is None else max(0.0, due - loop.time()))
            except TimeoutError:
                if not self.data:
                    return None  # nothing was asked: there is nobody to tell
                raise TooSlow(
                    "head_too_slow",
                    f"The request line and the headers did not come within {HEAD_WITHIN_S:g} s.",
                    "Send them at once.",
                ) from None
            if not data:
                if self.data:
                    raise malformed("it was cut off in the head")
                return None
            self.data += data

    async def _refuse_unread(self, error: HatchwayError) -> None:
        """Answers what could not be read; nothing behind it is looked at any more."""
        self.exchanges.record_unread(error)
        incoming = Incoming1(self, _NO_REQUEST)
        await incoming.refuse(refusals.answer(error))


class Incoming1:
    """One request, and the way back (see `incoming.Incoming`)."""

    def __init__(self, connection: Http1, head: RequestHead) -> None:
        self.head = head
        self.connection = connection
        self._client = connection.client
        self.alarm = connection.alarm
        self._body = framing.of_request(head.length)
        self._first = b""
        self._chunked = False
        self._keep = head.keep
        self._ready = b""
        self._read = 0
        self._waited = 0.0
        self.begun = False

    @property
    def may_go_on(self) -> bool:
        """The next request begins where this one ended."""
        return self._keep and self._body.done

    def body_here(self) -> bytes | None:
        """See `Incoming`."""
        if self._body.done:
            return b""
        if self.connection.data:
            self._first = self._take(self.connection.data)
        if self._body.done and len(self._first) <= MAX_HERE:
            piece, self._first = self._first, b""
            return piece
        return None

    async def piece(self, alarm: Alarm) -> bytes:
        """See `Incoming`."""
        if self._first:
            piece, self._first = self._first, b""
            return piece
        loop = asyncio.get_running_loop()
        while not self._body.done:
            if self._body.ready:
                piece = self._take(b"")
                await asyncio.sleep(0)
            else:
                data, self.connection.data = self.connection.data, b""
                if not data:
                    before = loop.time()
                    data = await self._more(alarm)
                    self._waited += loop.time() - before
                piece = self._take(data)
                self._read += len(piece)
                if self._waited > BODY_IDLE_S and self._read < self._waited * MIN_RATE:
                    raise _slow(f"It comes with less than {MIN_RATE} octets a second.")
            if piece:
                return piece
        return b""

    def go_on(self) -> None:
        """See `Incoming`."""
        if self.head.expects and not self._first and not self.connection.data:
            self._client.write(_CONTINUE)

    def begin(self, status: int, reason: str, answered: Fields, length: int | None, *, bodiless: bool) -> None:
        """See `Incoming`."""
        self.begun = True
        framed = list(answered)
        if not self._body.done:
            self._keep = False
        if not bodiless:
            if length is not None:
                framed.append(("content-length", str(length)))
            elif self.head.version == "1.1":
                framed.append(("transfer-encoding", "chunked"))
                self._chunked = True
            else:
                self._keep = False
        elif length == 0 and status not in _BODILESS and self.head.method != "HEAD":
            framed.append(("content-length", "0"))
        if not self._keep:
            framed.append(("connection", "close"))
        self._ready = head_of(f"HTTP/1.1 {status} {reason}", framed)

    async def send(self, piece: bytes) -> None:
        """See `Incoming`."""
        if self._chunked:
            piece = framing.chunk(piece)
        if self._ready:
            piece, self._ready = self._ready + piece, b""
        self._client.write(piece)
        await self._taken()

    async def finish(self) -> None:
        """See `Incoming`."""
        last = self._ready + (framing.LAST_CHUNK if self._chunked else b"")
        self._ready = b""
        if last:
            self._client.write(last)
        await self._taken()

    async def refuse(self, answer: refusals.Refused) -> None:
        """See `Incoming`. The connection goes on only where it is plain where the next request begins."""
        self._keep = self._keep and self._body.done and answer.status not in (400, 408, 413, 421, 431)
        framed = answer.fields if self._keep else [*answer.fields, ("connection", "close")]
        body = b"" if self.head.method == "HEAD" else answer.body
        self._client.write(head_of(f"HTTP/1.1 {answer.status} {answer.reason}", framed) + body)
        self.begun = True
        await self._taken()

    def break_off(self) -> None:
        """See `Incoming`."""
        self._client.abort()

    def _take(self, data: bytes) -> bytes:
        try:
            piece, self.connection.data = self._body.take(data)
        except Unclear as error:
            raise malformed(str(error)) from error
        return piece

    async def _more(self, alarm: Alarm) -> bytes:
        try:
            data = await alarm.within(BODY_IDLE_S, self._client.read())
        except TimeoutError:
            raise _slow(f"Nothing of it came for {BODY_IDLE_S:g} s.") from None
        if not data:
            raise StreamLost("the client ended in the middle of a body")
        return data

    async def _taken(self) -> None:
        await self.alarm.within(TAKE_WITHIN_S, self._client.drain())


def _slow(why: str) -> TooSlow:
    return TooSlow("body_too_slow", f"The body does not come fast enough. {why}", "Send it without long pauses.")
