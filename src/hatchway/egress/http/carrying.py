"""An allowed request on its way: its body goes up while the answer comes down.

What ends early ends the connection to the outside with it, so that no octet there is taken for the next request, or for a whole one.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from hatchway.domain.errors import BadGateway, HatchwayError
from hatchway.egress.http import fields, judging, placeholders
from hatchway.egress.http.heads import AnswerHead
from hatchway.egress.http.incoming import Incoming, Over
from hatchway.egress.http.judging import Going
from hatchway.egress.http.lines import Line, Stale, no_answer, no_broker, request_head
from hatchway.egress.http.refusals import error_of, of_broker
from hatchway.egress.http.seam import Exchange, FlowError, StreamLost
from hatchway.egress.http.waiting import Alarm
from hatchway.wire.broker import LEG_ERROR

if TYPE_CHECKING:
    from hatchway.egress.http.exchanges import Exchanges

MAX_HERE = 64 * 1024
"""Octets of a body that is sent in one go with its head."""
REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods of requests that may be sent a second time, when it is not known whether the first one was heard."""


class Carrier:
    """One allowed request on its way."""

    def __init__(self, exchanges: "Exchanges", incoming: Incoming, going: Going) -> None:
        self._exchanges = exchanges
        self._incoming = incoming
        self._going = going
        self._cut = False
        self._line: Line | None = None
        self._exchange: Exchange | None = None
        self._upload_error: BaseException | None = None
        known = exchanges.flow.placeholders
        self._scan = (
            placeholders.Scan(known, going.needles) if incoming.head.length != 0 and (known or going.needles) else None
        )
        self._sent = 0

    async def run(self) -> None:
        """Carries it. Raises `HatchwayError` when nothing was answered yet, else `Over`."""
        incoming, going, every = self._incoming, self._going, self._exchanges
        body = incoming.body_here()
        if body is None and self._scan is not None and 0 < (incoming.head.length or 0) <= MAX_HERE:
            body = await self._gathered()
        if body and self._scan is not None:
            body = self._scan.take(body) + self._scan.rest()
        if body:
            judging.check_size(len(body), going.terms.max_body)
        every.record_allowed(going)
        self._begin_on(await every.line(going))
        try:
            await self._over(body)
        finally:
            if self._exchange is not None:
                self._exchange.end()
            if self._line is not None:
                every.drop(self._line)

    def _begin_on(self, line: Line) -> None:
        """From here on a change of the policy is told to `_cut_off`. Raises a `HatchwayError` where one came while the line was made."""
        going, flow = self._going, self._exchanges.flow
        try:
            self._exchange = flow.begin(going.request, going.verdict, self._cut_off, line.stream)
        except FlowError as error:
            self._exchanges.drop(line)
            raise error_of(error) from error
        self._line = line

    async def _gathered(self) -> bytes:
        """A small body that has to be looked through: of what is refused for it, not even the head has left."""
        self._incoming.go_on()
        pieces = []
        try:
            while piece := await self._incoming.piece(self._incoming.alarm):
                pieces.append(piece)
        except StreamLost as error:
            raise Over from error
        return b"".join(pieces)

    def _cut_off(self, reason: str) -> None:
        """A later policy does not allow it: ends at once, in the middle."""
        self._cut = True
        if self._line is not None:
            self._line.stream.abort()
        self._incoming.break_off()

    async def _over(self, body: bytes | None) -> None:
        upload = None
        try:
            if body is None:
                upload = self._start_upload()
                answer = await self._line_now.answer(self._going.request.method, self._incoming.alarm)
            else:
                answer = await self._answer_at_once(body)
            if self._going.credential:
                await self._heed_broker(answer)
            await self._pass_on(answer)
        except (HatchwayError, Stale, StreamLost, TimeoutError, FlowError) as error:
            if upload is not None:
                await _ended(upload)
            if self._cut or self._incoming.begun or isinstance(self._upload_error, StreamLost):
                self._incoming.break_off()
                if not self._cut and isinstance(error, AnswerCut):
                    self._exchanges.record_failed(self._told(error), self._going)
                raise Over from error
            raise self._told(error) from error
        except BaseException:
            self._incoming.break_off()
            raise
        finally:
            if upload is not None and not upload.done():  # an answer before the end of the body
                await _ended(upload)
        if upload is None or self._upload_error is None:
            line, self._line = self._line_now, None
            if upload is not None and not self._whole:
                line.reusable = False
            self._exchanges.give_back(line)

    @property
    def _line_now(self) -> Line:
        assert self._line is not None
        return self._line

    def _told(self, error: BaseException) -> HatchwayError:
        """What a client is told about an error before the answer began."""
        cause = self._upload_error if isinstance(self._upload_error, HatchwayError | FlowError) else error
        if isinstance(cause, FlowError):
            return error_of(cause)
        # Behind a leg it is the broker that gives no answer: what an upstream does not say, it says itself.
        silent = isinstance(cause, Stale | StreamLost) or getattr(cause, "code", "") == "upstream_no_answer"
        if self._going.credential and silent:
            return no_broker()
        if isinstance(cause, HatchwayError):
            return cause
        return no_answer(str(cause) or "the connection was lost")

    # -- up

    async def _answer_at_once(self, body: bytes) -> AnswerHead:
        """Sends a request whose body is here, a second time where a kept connection had been closed meanwhile and that is harmless."""
        request = self._going.request
        while True:
            line = self._line_now
            self._begin_request(line, len(body), body)
            try:
                return await line.answer(request.method, self._incoming.alarm)
            except Stale as stale:
                if self._cut:
                    raise StreamLost("the request was cut") from stale
                if request.method not in REPEATABLE:
                    raise no_broker() if self._going.credential else no_answer(str(stale)) from stale
                self._exchanges.drop(line)
                self._line = None
                fresh = await self._exchanges.line(self._going, fresh=True)
                if self._cut:
                    self._exchanges.drop(fresh)
                    raise StreamLost("the request was cut") from stale
                if self._exchange is not None:
                    self._exchange.end()
                self._begin_on(fresh)

    def _begin_request(self, line: Line, length: int | None, body: bytes = b"") -> None:
        going = self._going
        head = request_head(going.request.method, going.target, self._exchanges.authority, going.fields, length)
        self._count_out(len(head) + len(body))
        line.write_request(head + body)

    def _start_upload(self) -> "asyncio.Task[None]":
        self._whole = False
        length = self._incoming.head.length
        self._begin_request(self._line_now, length)
        self._incoming.go_on()
        return asyncio.get_running_loop().create_task(self._upload(self._line_now, chunked=length is None))

    async def _upload(self, line: Line, *, chunked: bool) -> None:
        """Sends the body as it comes. What is wrong with it ends the connection to the outside, so that nobody there takes it for whole."""
        alarm = Alarm()
        try:
            while piece := await self._incoming.piece(alarm):
                self._sent += len(piece)
                judging.check_size(self._sent, self._going.terms.max_body)
                if self._scan is not None:
                    piece = self._scan.take(piece)
                if piece:
                    self._count_out(len(piece))
                    if not await self._to_line(line, piece, alarm, chunked=chunked):
                        return
            rest = self._scan.rest() if self._scan is not None else b""
            if rest:
                self._count_out(len(rest))
                if not await self._to_line(line, rest, alarm, chunked=chunked):
                    return
            if chunked:
                line.end_chunks()
            self._whole = True
        except (HatchwayError, FlowError, StreamLost) as error:
            self._upload_error = error
            line.stream.abort()
        finally:
            alarm.stop()

    async def _to_line(self, line: Line, piece: bytes, alarm: Alarm, *, chunked: bool) -> bool:
        """False: the other side takes no more; what it answered, if anything, is read by the other direction."""
        line.write_piece(piece, chunked=chunked)
        try:
            await line.drain(alarm)
        except TimeoutError:
            line.stream.abort()
            return False
        except StreamLost:
            return False
        return True

    def _count_out(self, octets: int) -> None:
        if octets and self._exchange is not None:
            self._exchange.count(octets, 0)

    # -- down

    async def _heed_broker(self, answer: AnswerHead) -> None:
        """Raises what the broker says in the upstream's stead."""
        code = next((value for name, value in answer.fields if name == LEG_ERROR), "")
        if code:
            said = bytearray()
            while len(said) < MAX_HERE and (piece := await self._line_now.piece(self._incoming.alarm)):
                said += piece
            raise of_broker(code, answer.status, bytes(said))

    async def _pass_on(self, answer: AnswerHead) -> None:
        assert self._exchange is not None
        await pass_on(self._incoming, self._line_now, self._exchange, self._going, answer)


async def pass_on(incoming: Incoming, line: Line, exchange: Exchange, going: Going, answer: AnswerHead) -> None:
    """Passes on an answer whose head came. Raises when it is cut off on either side."""
    if answer.length is not None and answer.length > going.terms.max_answer:
        raise _answer_too_large(going.terms.max_answer)
    octets = 0
    passed = fields.for_client(answer.fields, nominated=answer.nominated, strip=going.terms.strip_answer)
    bodiless = line.whole
    if bodiless and (going.request.method == "HEAD" or answer.status == 304):
        passed += [field for field in answer.fields if field[0] == "content-length"]
    incoming.begin(answer.status, answer.reason, passed, answer.length, bodiless=bodiless)
    while piece := await _piece(line, incoming):
        octets += len(piece)
        if octets > going.terms.max_answer:
            raise _answer_too_large(going.terms.max_answer)
        exchange.count(0, len(piece))
        await incoming.send(piece)
    await incoming.finish()


class AnswerCut(StreamLost):
    """The other side ended in the middle of an answer of which a part was passed on."""


async def _piece(line: Line, incoming: Incoming) -> bytes:
    try:
        return await line.piece(incoming.alarm)
    except StreamLost as error:
        raise AnswerCut(str(error)) from error


def _answer_too_large(limit: int) -> BadGateway:
    return BadGateway(
        "answer_too_large",
        f"The answer takes more than the {limit} octets that the rule allows.",
        "Ask for less at a time.",
        limit=limit,
    )


async def _ended(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
