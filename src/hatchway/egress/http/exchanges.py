"""One request from its head to the end of its answer, whatever version of HTTP the client speaks.

Decide, ask, record, and only then dial and send: of a request that is refused nothing has left. The body goes up while the
answer comes down; what ends early ends the connection to the outside with it, so that no octet is taken for the next request.
"""

import asyncio
import contextlib
from typing import Any, Protocol

from hatchway.domain.errors import BadGateway, Exhausted, Forbidden, HatchwayError, TooSlow, Unavailable
from hatchway.domain.policy.verdicts import Action, Request, Verdict
from hatchway.egress.http import fields, judging, placeholders, refusals
from hatchway.egress.http.heads import AnswerHead, Fields, RequestHead
from hatchway.egress.http.judging import Going
from hatchway.egress.http.lines import Line, Stale, no_answer
from hatchway.egress.http.seam import BoundFlow, Exchange, FlowError, StreamLost
from hatchway.egress.http.terms import TermsBook
from hatchway.egress.http.waiting import Alarm

KEPT_S = 60.0
FRESH_S = 2.0
"""How long a connection to the outside is kept for this client's next request; and how long for one that cannot be sent twice."""
MAX_KEPT = 4
MAX_HERE = 64 * 1024
"""Octets of a body that is sent in one go with its head."""
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_RECORDED = 1_024


class Over(Exception):
    """The exchange ended in the middle, and the client's side of it with it: nothing more can be said."""


class Incoming(Protocol):
    """A request as one version of HTTP brings it, and the way back to its client."""

    @property
    def head(self) -> RequestHead:
        """What it asks."""
        ...

    @property
    def alarm(self) -> Alarm:
        """Of the task that carries the request."""
        ...

    @property
    def begun(self) -> bool:
        """The answer began: nothing else can be said any more."""
        ...

    def body_here(self) -> bytes | None:
        """The whole body, when it is here and small; None: it is still to be read by `piece`. Raises `HatchwayError` for a bad one."""
        ...

    async def piece(self, alarm: Alarm) -> bytes:
        """The next octets of the body; `b""` at its end. `alarm` is of the task that calls. Raises `HatchwayError` for a bad or slow one, `StreamLost`."""
        ...

    def go_on(self) -> None:
        """The client may send the body, if it waits to be told."""
        ...

    def begin(self, status: int, reason: str, answered: Fields, length: int | None, *, bodiless: bool) -> None:
        """The answer begins; `length` of its body, None: unknown. `bodiless`: none follows, whatever the fields say."""
        ...

    async def send(self, piece: bytes) -> None:
        """Octets of the answer's body. Raises `StreamLost` and `TimeoutError` when the client does not take them."""
        ...

    async def finish(self) -> None:
        """The answer is whole."""
        ...

    async def refuse(self, answer: refusals.Refused) -> None:
        """An answer of ours instead."""
        ...

    def break_off(self) -> None:
        """Ends it in the middle, in a way that nobody takes for an end."""
        ...


class Exchanges:
    """The requests of one client connection. Connections to the outside are kept for requests of the same connection, rule and credential."""

    def __init__(self, flow: BoundFlow) -> None:
        self.flow = flow
        self._authority = judging.authority(flow.host, flow.port, tls=flow.tls)
        self._kept: list[Line] = []
        self._busy: set[Line] = set()
        self._policy: object = None
        self._terms = TermsBook()

    async def run(self, incoming: Incoming) -> None:
        """Carries one request; its client is told all that goes wrong. Raises `Over`."""
        try:
            going = await self.decide(incoming)
        except HatchwayError as error:
            await incoming.refuse(answer_to(incoming.head, error))
            return
        await self._carry(incoming, going)

    async def decide(self, incoming: Incoming) -> Going:
        """Decides, asks where the policy wants it, and prepares what goes on. Raises a `HatchwayError`, which is recorded, for all else than yes."""
        flow, head = self.flow, incoming.head
        request: Request | None = None
        verdict: Verdict | None = None
        try:
            request = judging.canonical(head, flow.host, flow.port, tls=flow.tls)
            verdict, going = self._judged(request, head)
            if verdict.action is Action.ASK:
                policy, known = flow.policy, flow.placeholders
                if not await flow.ask(verdict, request):
                    raise judging.refused(verdict)
                if flow.policy is not policy or flow.placeholders != known:
                    again, going = self._judged(request, head)
                    if again.action is Action.ASK and again.rule != verdict.rule:
                        raise judging.refused(again)
        except HatchwayError as error:
            self._record_refused(error, head, request, verdict)
            raise
        except FlowError as error:
            raise error_of(error) from error
        return going

    def close(self) -> None:
        """Ends all connections to the outside at once: what is in the middle must not look whole there."""
        for line in [*self._busy, *self._kept]:
            line.stream.abort()
        self._busy.clear()
        self._kept.clear()

    def _judged(self, request: Request, head: RequestHead) -> tuple[Verdict, Going]:
        verdict = self.flow.decide(request)
        terms = self._terms.of(self.flow.policy, verdict)
        if verdict.action is Action.DENY:
            raise judging.refused(verdict)
        return verdict, judging.prepare(request, head, verdict, terms, self.flow.placeholders)

    # -- carrying

    async def _carry(self, incoming: Incoming, going: Going) -> None:
        carrier = _Carrier(self, incoming, going)
        try:
            await carrier.run()
        except HatchwayError as error:
            self.record_failed(error, going)
            await incoming.refuse(answer_to(incoming.head, error))

    async def line(self, going: Going, *, fresh: bool = False) -> Line:
        """A connection to the outside for this request: one that was kept for its like, or a new one. Raises a `HatchwayError`."""
        now = asyncio.get_running_loop().time()
        policy = self.flow.policy
        if policy is not self._policy:
            self._policy = policy
            for kept in self._kept:
                kept.stream.abort()
            self._kept.clear()
        key, patience = going.key, KEPT_S if going.request.method in _REPEATABLE else FRESH_S
        for kept in reversed(self._kept):
            if kept.key == key and not fresh:
                self._kept.remove(kept)
                if kept.fit and now - (kept.idle_since or 0.0) < patience:
                    self._busy.add(kept)
                    return kept
                kept.stream.abort()
                break
        try:
            if going.credential:
                stream = await self.flow.leg(going.verdict, going.credential)
            else:
                stream, _ = await self.flow.dial(going.verdict)
        except FlowError as error:
            raise error_of(error) from error
        line = Line(stream, key)
        self._busy.add(line)
        return line

    def give_back(self, line: Line) -> None:
        """The request on it is over: it is kept, if nothing is left of it and there is room."""
        self._busy.discard(line)
        if not line.fit:
            line.stream.abort()
            return
        line.used, line.idle_since = True, asyncio.get_running_loop().time()
        self._kept.append(line)
        if len(self._kept) > MAX_KEPT:
            self._kept.pop(0).stream.close()

    def drop(self, line: Line) -> None:
        """The request on it ended in the middle."""
        self._busy.discard(line)
        line.stream.abort()

    @property
    def authority(self) -> str:
        """What `Host` says upstream."""
        return self._authority

    # -- records

    def record_allowed(self, going: Going) -> None:
        """Before anything leaves. Raises a `HatchwayError` when it cannot be recorded: then nothing may."""
        decision = "asked" if going.verdict.action is Action.ASK else "allowed"
        data = recorded(going.request)
        if going.credential:
            data["credential"] = going.credential
        try:
            self.flow.record("egress.request", decision, going.verdict, data=data)
        except FlowError as error:
            raise error_of(error) from error

    def _record_refused(
        self, error: HatchwayError, head: RequestHead, request: Request | None, verdict: Verdict | None
    ) -> None:
        data = recorded(request) if request is not None else unread(head)
        with contextlib.suppress(FlowError):  # refused it is anyway
            self.flow.record("egress.request", "denied", verdict, reason=error.code, data=data)

    def record_unread(self, error: HatchwayError) -> None:
        """What came was no request."""
        with contextlib.suppress(FlowError):
            self.flow.record("egress.request", "denied", reason=error.code, data={"cause": error.cause[:200]})

    def record_failed(self, error: HatchwayError, going: Going) -> None:
        """An allowed one came to nothing, or turned out to be none that may go on."""
        decision = "denied" if isinstance(error, Forbidden) else "failed"
        with contextlib.suppress(FlowError):
            self.flow.record("egress.request", decision, going.verdict, reason=error.code, data=recorded(going.request))


class _Carrier:
    """One allowed request on its way."""

    def __init__(self, exchanges: Exchanges, incoming: Incoming, going: Going) -> None:
        self._all = exchanges
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
        incoming, going, every = self._incoming, self._going, self._all
        body = incoming.body_here()
        if body is None and self._scan is not None and 0 < (incoming.head.length or 0) <= MAX_HERE:
            body = await self._gathered()
        if body and self._scan is not None:
            body = self._scan.take(body) + self._scan.rest()
        if body:
            judging.check_size(len(body), going.terms.max_body)
        every.record_allowed(going)
        self._line = line = await every.line(going)
        try:
            self._exchange = every.flow.begin(going.request, going.verdict, self._cut_off)
        except FlowError as error:
            every.drop(line)
            raise error_of(error) from error
        try:
            await self._over(body)
        finally:
            self._exchange.end()
            if self._line is not None:
                every.drop(self._line)

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
            await self._pass_on(answer)
        except (HatchwayError, Stale, StreamLost, TimeoutError, FlowError) as error:
            if upload is not None:
                await _ended(upload)
            if self._cut or self._incoming.begun or isinstance(self._upload_error, StreamLost):
                self._incoming.break_off()
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
            self._all.give_back(line)

    @property
    def _line_now(self) -> Line:
        assert self._line is not None
        return self._line

    def _told(self, error: BaseException) -> HatchwayError:
        """What a client is told about an error before the answer began."""
        cause = self._upload_error if isinstance(self._upload_error, HatchwayError | FlowError) else error
        if isinstance(cause, FlowError):
            return error_of(cause)
        if isinstance(cause, HatchwayError):
            return cause
        return no_answer(str(cause) or "the connection was lost")

    # -- up

    async def _answer_at_once(self, body: bytes) -> AnswerHead:
        """Sends a request whose body is here, a second time where a kept connection had been closed meanwhile and that is harmless."""
        request = self._going.request
        while True:
            line = self._line_now
            self._count_out(len(body))
            line.write_request(
                request.method, self._going.target, self._all.authority, self._going.fields, len(body), body
            )
            try:
                return await line.answer(request.method, self._incoming.alarm)
            except Stale as stale:
                if request.method not in _REPEATABLE:
                    raise no_answer(str(stale)) from stale
                self._all.drop(line)
                self._line = None
                self._line = await self._all.line(self._going, fresh=True)
                if self._cut:
                    raise StreamLost("cut") from stale

    def _start_upload(self) -> "asyncio.Task[None]":
        self._whole = False
        length = self._incoming.head.length
        self._line_now.write_request(
            self._going.request.method, self._going.target, self._all.authority, self._going.fields, length
        )
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
    while piece := await line.piece(incoming.alarm):
        octets += len(piece)
        if octets > going.terms.max_answer:
            raise _answer_too_large(going.terms.max_answer)
        exchange.count(0, len(piece))
        await incoming.send(piece)
    await incoming.finish()


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


def answer_to(head: RequestHead, error: HatchwayError) -> refusals.Refused:
    """The answer that tells the client of this request about an error."""
    accept = agent = ""
    for name, value in head.fields:
        if name == "accept":
            accept = value
        elif name == "user-agent":
            agent = value
    return refusals.answer(error, accept=accept, agent=agent)


_KINDS: dict[int, type[HatchwayError]] = {
    403: Forbidden,
    408: TooSlow,
    429: Exhausted,
    502: BadGateway,
    503: Unavailable,
}


def error_of(error: FlowError) -> HatchwayError:
    """What the gateway says about the other side of a flow, as an error for the client."""
    kind = _KINDS.get(error.status, BadGateway)
    return kind(error.reason, error.explanation, "Look at the policy of this sandbox, and whether the host answers.")


def recorded(request: Request) -> dict[str, Any]:
    """What is kept of a request: no header's value but the client's name, no query but its length."""
    agent = next((value for name, value in request.headers if name == "user-agent"), "")
    data: dict[str, Any] = {
        "host": request.host,
        "port": request.port,
        "tls": request.tls,
        "version": request.version,
        "method": request.method,
        "path": request.path[:_MAX_RECORDED],
        "query_octets": len(request.query),
        "agent": agent[:200],
    }
    if request.websocket:
        data["websocket"] = True
    return data


def unread(head: RequestHead) -> dict[str, Any]:
    """The same of one that never got so far."""
    return {
        "version": head.version,
        "method": head.method,
        "target": head.target[:_MAX_RECORDED],
        "host": (head.host or "")[:255],
    }
