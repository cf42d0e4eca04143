"""The requests of one client connection, whatever version of HTTP it speaks.

Decide, ask, record, and only then dial and send: of a request that is refused nothing has left.
"""

import asyncio
import contextlib

from hatchway.domain.errors import Forbidden, HatchwayError
from hatchway.domain.policy.verdicts import Action, Request, Verdict
from hatchway.egress.http import judging
from hatchway.egress.http.carrying import REPEATABLE, Carrier
from hatchway.egress.http.heads import RequestHead
from hatchway.egress.http.incoming import Incoming
from hatchway.egress.http.judging import Going
from hatchway.egress.http.lines import Line
from hatchway.egress.http.records import recorded, unread
from hatchway.egress.http.refusals import answer_to, error_of
from hatchway.egress.http.seam import BoundFlow, FlowError
from hatchway.egress.http.terms import TermsBook

KEPT_S = 60.0
FRESH_S = 2.0
"""How long a connection to the outside is kept for this client's next request; and how long for one that cannot be sent twice."""
MAX_KEPT = 4


class Exchanges:
    """The requests of one client connection. Connections to the outside are kept for requests of the same connection, rule and credential."""

    def __init__(self, flow: BoundFlow) -> None:
        self.flow = flow
        self._authority = judging.authority(flow.host, flow.port, tls=flow.tls)
        self._kept: list[Line] = []
        self._busy: set[Line] = set()
        self._policy: object = None
        self._terms = TermsBook()
        flow.when_scarce(self._spare)

    async def run(self, incoming: Incoming) -> None:
        """Carries one request; its client is told all that goes wrong. Raises `Over`."""
        try:
            going = await self.decide(incoming)
        except HatchwayError as error:
            await self.refuse(incoming, error)
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
                    if again.action is Action.ASK and (again.rule, again.ask_key) != (verdict.rule, verdict.ask_key):
                        raise judging.refused(again)
        except HatchwayError as error:
            self._record_refused(error, head, request, verdict)
            raise
        except FlowError as error:
            raise error_of(error) from error
        return going

    async def refuse(self, incoming: Incoming, error: HatchwayError) -> None:
        """Tells the client of a request about an error, in the form that the policy wants."""
        await incoming.refuse(answer_to(incoming.head, error, text=self.flow.policy.deny_reply == "text"))

    def close(self) -> None:
        """Ends all connections to the outside at once: what is in the middle must not look whole there."""
        for line in [*self._busy, *self._kept]:
            line.stream.abort()
        self._busy.clear()
        self._kept.clear()

    def _spare(self) -> None:
        for line in self._kept:
            line.stream.abort()
        self._kept.clear()

    def _judged(self, request: Request, head: RequestHead) -> tuple[Verdict, Going]:
        verdict = self.flow.decide(request)
        terms = self._terms.of(self.flow.policy, verdict)
        if verdict.action is Action.DENY:
            raise judging.refused(verdict)
        going = judging.prepare(request, head, verdict, terms, self.flow.placeholders)
        sent = judging.as_sent(going, head, headers_matter=self.flow.policy.looks_at_headers)
        if sent is not request:
            again = self.flow.judge(sent)
            if again.action is Action.DENY:
                raise judging.refused(again)
            if again.terms != verdict.terms or again.credentials != verdict.credentials:
                raise judging.other_rule(verdict, again)
            verdict, going.request, going.verdict = again, sent, again
        return verdict, going

    # -- carrying

    async def _carry(self, incoming: Incoming, going: Going) -> None:
        carrier = Carrier(self, incoming, going)
        try:
            await carrier.run()
        except HatchwayError as error:
            self.record_failed(error, going)
            await self.refuse(incoming, error)

    async def line(self, going: Going, *, fresh: bool = False) -> Line:
        """A connection to the outside for this request: one that was kept for its like, or a new one. Raises a `HatchwayError`."""
        now = asyncio.get_running_loop().time()
        policy = self.flow.policy
        if policy is not self._policy:
            self._policy = policy
            for kept in self._kept:
                kept.stream.abort()
            self._kept.clear()
        key, patience = going.key, KEPT_S if going.request.method in REPEATABLE else FRESH_S
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
                stream = await self.flow.leg(going.request, going.verdict, going.credential)
            else:
                stream, _ = await self.flow.dial(going.request, going.verdict)
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
