"""HTTP/2 of a client in the sandbox: every stream is a request of its own, checked and decided on like one of HTTP/1.1.

The library speaks the protocol; what it lets through and servers read differently is refused here. Upstream it is HTTP/1.1.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from hatchway.domain.errors import Exhausted, HatchwayError, HeadTooLarge, TooSlow
from hatchway.egress.http import heads, refusals
from hatchway.egress.http.carrying import MAX_HERE
from hatchway.egress.http.exchanges import Exchanges
from hatchway.egress.http.frames import Frames, TooMuch, Unpacker
from hatchway.egress.http.heads import Fields, RequestHead, Unclear
from hatchway.egress.http.http1 import BODY_IDLE_S, HEAD_WITHIN_S, IDLE_S, MIN_RATE, TAKE_WITHIN_S
from hatchway.egress.http.incoming import Over
from hatchway.egress.http.seam import Stream, StreamLost
from hatchway.egress.http.waiting import Alarm
from hatchway.egress.shares import MAX_STREAMS as MAX_STREAMS_OF_SANDBOX

MAX_STREAMS = 64
WINDOW = 64 * 1024
"""Octets of a request's body that wait here at most."""

PADDING_AT_ONCE = 8 * 1024
"""Octets of nothing but padding that wake who waits for a body, so that the window is given back."""

_PSEUDO = (":method", ":scheme", ":authority", ":path")
_PATH = re.compile(r"/[!\"$-~]*", re.ASCII)
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]{1,256}", re.ASCII)
_VALUE = re.compile(r"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")
_LENGTH = re.compile(r"[0-9]{1,15}", re.ASCII)
_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade", "http2-settings"}
)

_CODES = h2.errors.ErrorCodes


def parse_head(raw: "list[tuple[bytes, bytes]]", *, ended: bool, tls: bool = True) -> RequestHead:
    """Takes the header list of a stream apart. Raises `InvalidRequest`, `MethodNotAllowed` and `HeadTooLarge`."""
    if len(raw) > heads.MAX_FIELDS + len(_PSEUDO) or sum(
        len(n) + len(v) + 32 for n, v in raw
    ) > heads.MAX_HEAD + 32 * len(raw):
        raise HeadTooLarge(
            "head_too_large",
            f"There are more than {heads.MAX_FIELDS} headers, or they take more than {heads.MAX_HEAD} octets.",
            "Send fewer or shorter headers.",
            limit=heads.MAX_HEAD,
        )
    try:
        return _parsed(raw, ended=ended, tls=tls)
    except Unclear as error:
        raise heads.malformed(str(error)) from error


def _parsed(raw: "list[tuple[bytes, bytes]]", *, ended: bool, tls: bool) -> RequestHead:
    pseudo: dict[str, str] = {}
    fields: Fields = []
    host = length = None
    cookies: list[str] = []
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name.startswith(":"):
            if name not in _PSEUDO or name in pseudo or fields or cookies:
                raise Unclear("a pseudo-header is unknown, there twice, or behind the others")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name):
            raise Unclear("a header's name has a character that is none of a name in HTTP/2")
        if not _VALUE.fullmatch(value):
            raise Unclear("a header's value has a control character, or space around it")
        if name in _CONNECTION or (name == "te" and value != "trailers"):
            raise Unclear(f"the header {name!r} is none of HTTP/2")
        if "_" in name and name.replace("_", "-") in heads.FRAMING:
            raise Unclear("a header is spelled with `_` that servers may take for one that says where the body ends")
        if name == "host":
            if host is not None:
                raise Unclear("there is more than one Host")
            host = value
        elif name == "content-length":
            if length is not None or not _LENGTH.fullmatch(value):
                raise Unclear("Content-Length is not one number of 1 to 15 digits")
            length = int(value)
        elif name == "cookie":
            cookies.append(value)
            continue
        fields.append((name, value))
    if set(pseudo) != set(_PSEUDO):
        if pseudo.get(":method") in heads.NEVER:
            raise heads.never(pseudo[":method"])
        raise Unclear("it has not each of `:method`, `:scheme`, `:authority` and `:path`")
    method, scheme, authority, path = (pseudo[name] for name in _PSEUDO)
    if method in heads.NEVER:
        raise heads.never(method)
    if not _METHOD.fullmatch(method):
        raise Unclear("the method is not 1 to 32 capital letters")
    if scheme != ("https" if tls else "http"):
        raise Unclear("`:scheme` is not what the connection is")
    if len(path) > heads.MAX_LINE or not _PATH.fullmatch(path):
        raise Unclear("`:path` is not a path that begins with `/`, in visible ASCII")
    if not authority or (host is not None and host.lower() != authority.lower()):
        raise Unclear("`host` and `:authority` are not the same")
    if cookies:
        fields.append(("cookie", "; ".join(cookies)))
    if ended and length:
        raise Unclear("Content-Length announces a body, and there is none")
    head = RequestHead(method, path, "2", fields, authority)
    head.length = 0 if ended else length
    head.expects = any(name == "expect" for name, _ in fields) and head.length != 0
    if not ended and length == 0:
        head.length = None  # what comes is counted against it by the library
    return head


class Http2:
    """One client connection."""

    def __init__(self, client: Stream, exchanges: Exchanges) -> None:
        self.client = client
        self.exchanges = exchanges
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=True)
        )
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: heads.MAX_HEAD,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
            },
        )
        self.h2.decoder = Unpacker()
        self.streams: dict[int, Incoming2] = {}
        self.frames = Frames(exchanges.flow.shares)
        self._shares = exchanges.flow.shares
        self._tasks: set[asyncio.Task[None]] = set()
        self._judge: Callable[[RequestHead], HatchwayError] | None = None
        self._over = False
        self._failed: BaseException | None = None

    async def serve(self) -> None:
        """Serves streams until the client is done. Raises `StreamLost`."""
        self.h2.initiate_connection()
        self.flush()
        try:
            await self._read_on()
        except StreamLost:
            if self._failed is not None:
                raise self._failed from None  # a fault of ours ended it
            raise
        finally:  # what is still in hand is for nobody any more
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def refuse(self, judge: Callable[[RequestHead], HatchwayError]) -> None:
        """Answers every stream with an error, until the client is done. Raises `StreamLost`."""
        self._judge = judge
        await self.serve()

    def flush(self) -> None:
        """Sends what the library has to say."""
        data = self.h2.data_to_send()
        if data:
            self.client.write(data)

    async def _read_on(self) -> None:
        first = True
        while not self._over:
            if self.streams:
                data = await self.client.read()
            else:
                try:
                    async with asyncio.timeout(HEAD_WITHIN_S if first else IDLE_S):
                        data = await self.client.read()
                except TimeoutError:
                    self._go_away(_CODES.NO_ERROR)
                    return
            if not data:
                if self.streams:
                    raise StreamLost("the client ended in the middle of a stream")
                return
            first = False
            try:
                for piece in self.frames.turns(data):
                    await self._shares.turns.take()
                    if not self._feed(piece):
                        await self.client.drain()
                        return
                    # What a client makes us say, and does not take, ends what it can make us do.
                    async with asyncio.timeout(TAKE_WITHIN_S):
                        await self.client.drain()
            except TooMuch as error:
                await self._calm(error)
                return

    async def _calm(self, error: TooMuch) -> None:
        """The client sends more than it may: the connection ends, and says why."""
        self.exchanges.record_unread(
            Exhausted(
                "too_many_frames", f"A connection over HTTP/2 brought {error}.", "Open fewer streams, more slowly."
            )
        )
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.close_connection(_CODES.ENHANCE_YOUR_CALM, str(error).encode())
        self.flush()
        self._over = True
        self._end_streams()
        async with asyncio.timeout(TAKE_WITHIN_S):
            await self.client.drain()

    def _feed(self, data: bytes) -> bool:
        """Takes octets; False: the connection is at its end."""
        try:
            events = self.h2.receive_data(data)
        except (h2.exceptions.ProtocolError, ValueError, IndexError) as error:
            self.exchanges.record_unread(heads.malformed(f"HTTP/2 is broken: {type(error).__name__}"))
            self._end_streams()
            self.flush()
            self._over = True
            return False
        for event in events:
            self._take(event)
            if self._over:
                break
        self.flush()
        return not self._over

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._begin(event)
        elif isinstance(event, h2.events.DataReceived):
            self._data(event)
        elif isinstance(event, h2.events.StreamEnded):
            if event.stream_id in self.streams:
                self.streams[event.stream_id].ended()
        elif isinstance(event, h2.events.StreamReset):
            if event.stream_id in self.streams:
                self.streams[event.stream_id].reset()
        elif isinstance(event, h2.events.WindowUpdated):
            for stream in list(self.streams.values()) if event.stream_id == 0 else [self.streams.get(event.stream_id)]:
                if stream is not None:
                    stream.window.set()
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            for stream in self.streams.values():
                stream.window.set()
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._over = not self.streams

    def _begin(self, event: h2.events.RequestReceived) -> None:
        assert event.stream_id is not None
        if self._shares.streams >= MAX_STREAMS_OF_SANDBOX:
            self._refuse_stream(event.stream_id)
            return
        raw = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        ended = event.stream_ended is not None
        try:
            head = parse_head(raw, ended=ended, tls=self.exchanges.flow.tls)
        except HatchwayError as error:
            self.exchanges.record_unread(error)
            stream = Incoming2(self, event.stream_id, RequestHead("", "/", "2", [], None), ended=ended)
            self._start(stream, self._refused(stream, error))
            return
        stream = Incoming2(self, event.stream_id, head, ended=ended)
        if self._judge is not None:
            self._start(stream, self._refused(stream, self._judge(head)))
        else:
            self._start(stream, self._run(stream))

    def _refuse_stream(self, number: int) -> None:
        """Beyond what the sandbox may have in hand over all its connections: nothing of it was done, and it may be tried again."""
        self.exchanges.record_unread(
            Exhausted(
                "limit", f"{MAX_STREAMS_OF_SANDBOX} streams of this sandbox are in hand.", "Wait until some have ended."
            )
        )
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.reset_stream(number, _CODES.REFUSED_STREAM)

    def _start(self, stream: "Incoming2", work: Coroutine[Any, Any, None]) -> None:
        self.streams[stream.number] = stream
        self._shares.streams += 1
        stream.task = task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def over(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._shares.streams -= 1
            self.streams.pop(stream.number, None)
            stream.leave()
            self.flush()
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failed = error
                self.client.abort()

        task.add_done_callback(over)

    async def _refused(self, stream: "Incoming2", error: HatchwayError) -> None:
        await self._to_end(stream, self.exchanges.refuse(stream, error))

    async def _run(self, stream: "Incoming2") -> None:
        await self._to_end(stream, self.exchanges.run(stream))

    async def _to_end(self, stream: "Incoming2", work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._shares.turns.take()
            await work
        except (Over, StreamLost, TimeoutError):
            stream.break_off()
        finally:
            work.close()  # where it was given up before its turn

    def _data(self, event: h2.events.DataReceived) -> None:
        assert event.stream_id is not None
        size = event.flow_controlled_length or 0
        stream = self.streams.get(event.stream_id)
        if stream is None or stream.gone:
            self.took(event.stream_id, size)
        else:
            stream.feed(event.data or b"", size)

    def took(self, number: int, size: int) -> None:
        """Octets of a body went on: the client may send so many more."""
        if size:
            with contextlib.suppress(h2.exceptions.ProtocolError):  # the stream is closed, and its window with it
                self.h2.acknowledge_received_data(size, number)

    def _go_away(self, code: h2.errors.ErrorCodes) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.close_connection(code)
        self.flush()
        self._over = True

    def _end_streams(self) -> None:
        for stream in list(self.streams.values()):
            stream.reset()


class Incoming2:
    """One stream (see `incoming.Incoming`)."""

    def __init__(self, connection: Http2, number: int, head: RequestHead, *, ended: bool) -> None:
        self.number = number
        self.head = head
        self.window = asyncio.Event()
        self.alarm = Alarm()
        self.task: asyncio.Task[None] | None = None
        self.gone = False
        """Nobody takes its body, or its answer, any more."""
        self._connection = connection
        self._h2 = connection.h2
        self._here = bytearray()
        self._taken = 0
        """Octets of the window that what is here takes."""
        self._ended = ended
        self._came = asyncio.Event()
        self.begun = False
        self._finished = False
        self._waited = 0.0
        self._read = 0

    # -- from the connection

    def feed(self, data: "bytes | bytearray | memoryview", size: int) -> None:
        """Octets of the body came, and took `size` of the window."""
        self._here += data
        self._taken += size
        if self._here or self._taken >= PADDING_AT_ONCE:
            self._came.set()

    def ended(self) -> None:
        """The body is whole."""
        self._ended = True
        self._came.set()

    def reset(self) -> None:
        """The client gave it up, or broke the protocol: whatever is done for it ends, a held request or a silent upstream too."""
        self._give_up()
        if self.task is not None:
            self.task.cancel()

    def _give_up(self) -> None:
        self.gone = True
        self._came.set()
        self.window.set()

    def leave(self) -> None:
        """It is over: what is left of the body makes room in the connection's window."""
        self.gone = True
        self.alarm.stop()
        self._take()
        if not self._ended and self._finished:  # an answer before the end of the body: the rest is not wanted
            self._reset_stream(_CODES.NO_ERROR)

    # -- exchanges.Incoming

    def body_here(self) -> bytes | None:
        """See `Incoming`."""
        if not self._ended or len(self._here) > MAX_HERE:
            return None
        return self._take()

    async def piece(self, alarm: Alarm) -> bytes:
        """See `Incoming`."""
        loop = asyncio.get_running_loop()
        while True:
            if self.gone:
                raise StreamLost("the client gave the stream up")
            if self._taken:
                piece = self._take()
                self._connection.flush()
                self._read += len(piece)
                if self._waited > BODY_IDLE_S and self._read < self._waited * MIN_RATE:
                    raise _slow(f"It comes with less than {MIN_RATE} octets a second.")
                if piece:
                    return piece
                continue
            if self._ended:
                return b""
            self._came.clear()
            before = loop.time()
            try:
                await alarm.within(BODY_IDLE_S, self._came.wait())
            except TimeoutError:
                raise _slow(f"Nothing of it came for {BODY_IDLE_S:g} s.") from None
            self._waited += loop.time() - before

    def go_on(self) -> None:
        """See `Incoming`."""
        if self.head.expects and not self._taken and not self.begun:
            self._headers([(":status", "100")])

    def begin(self, status: int, reason: str, answered: Fields, length: int | None, *, bodiless: bool) -> None:
        """See `Incoming`."""
        framed = [(":status", str(status)), *answered]
        if not bodiless and length is not None:
            framed.append(("content-length", str(length)))
        self.begun = True
        self._headers(framed)

    async def send(self, piece: bytes) -> None:
        """See `Incoming`."""
        at = 0
        while at < len(piece):
            room = await self._room()
            part = piece[at : at + room]
            with _lost_stream():
                self._h2.send_data(self.number, part)
            self._connection.frames.sent(len(part))
            at += len(part)
            self._connection.flush()
            await self.alarm.within(TAKE_WITHIN_S, self._connection.client.drain())

    async def finish(self) -> None:
        """See `Incoming`."""
        if self.gone:
            raise StreamLost("the client gave the stream up")
        with _lost_stream():
            self._h2.end_stream(self.number)
        self._finished = True
        self._connection.flush()

    async def refuse(self, answer: refusals.Refused) -> None:
        """See `Incoming`."""
        self.begin(answer.status, "", answer.fields, None, bodiless=True)
        if self.head.method != "HEAD":
            await self.send(answer.body)
        await self.finish()

    def break_off(self) -> None:
        """See `Incoming`."""
        if not self._finished:
            self._finished = True
            self._reset_stream(_CODES.INTERNAL_ERROR)
        self._give_up()

    def _take(self) -> bytes:
        """All of the body that is here."""
        data, size = bytes(self._here), self._taken
        self._here.clear()
        self._taken = 0
        self._connection.took(self.number, size)
        return data

    def _headers(self, framed: Fields) -> None:
        if not self.gone:
            octets = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in framed]
            with contextlib.suppress(h2.exceptions.ProtocolError):  # it was closed; the body's octets find out
                self._h2.send_headers(self.number, octets)
            self._connection.flush()

    async def _room(self) -> int:
        """How many octets may be sent now, at least one."""
        while True:
            if self.gone:
                raise StreamLost("the client gave the stream up")
            with _lost_stream():
                room = min(self._h2.local_flow_control_window(self.number), self._h2.max_outbound_frame_size)
            if room > 0:
                return room
            self.window.clear()
            await self.alarm.within(TAKE_WITHIN_S, self.window.wait())

    def _reset_stream(self, code: h2.errors.ErrorCodes) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self._h2.reset_stream(self.number, code)
        self._connection.flush()


@contextlib.contextmanager
def _lost_stream() -> Iterator[None]:
    try:
        yield
    except h2.exceptions.ProtocolError as error:
        raise StreamLost(f"the stream is closed: {error}") from error


def _slow(why: str) -> TooSlow:
    return TooSlow("body_too_slow", f"The body does not come fast enough. {why}", "Send it without long pauses.")
