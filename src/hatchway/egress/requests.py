"""The requests of a flow that speaks HTTP, as the rest of the gateway sees them: `Requests` is the `http.seam.BoundFlow` of its connection.

A request is judged when it comes, again when the connection to the outside is there and nothing of it has left yet, and again whenever the
policy or its time changes while it is in flight.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hatchway.domain.policy.compiled import Policy
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Request, Verdict
from hatchway.egress.http.seam import FlowError, Stream
from hatchway.egress.outward import policy_changed
from hatchway.egress.shares import Shares

if TYPE_CHECKING:
    from hatchway.egress.flows import Flow


class InFlight:
    """A request in flight: `http.seam.Exchange`."""

    def __init__(
        self, requests: "Requests", request: Request, verdict: Verdict, cut: Callable[[str], None], stream: Stream
    ) -> None:
        self.request = request
        self.verdict = verdict
        self.cut = cut
        self.stream = stream
        self._requests = requests

    def end(self) -> None:
        """See `http.seam.Exchange`."""
        self._requests.in_flight.discard(self)

    def count(self, out: int, into: int) -> None:
        """See `http.seam.Exchange`."""
        if problem := self._requests.gateway.rates.send(self.verdict.terms, out):
            raise FlowError("byte_budget", problem, 429)


class Requests:
    """See the module."""

    def __init__(self, flow: "Flow") -> None:
        self._flow = flow
        self.gateway = flow.gateway
        self.in_flight: set[InFlight] = set()
        self._judged: tuple[Request, Verdict, int] | None = None
        """What was judged last, and in which epoch of the gateway: mostly, that is what begins."""

    def rejudge(self) -> None:
        """Cuts what the policy of now does not let pass any more. What somebody approved stays approved while the same is asked about."""
        for one in list(self.in_flight):
            again = self.judge(one.request)
            if (
                not still_passes(one.verdict, again)
                or _begun_with(one.verdict) != _begun_with(again)
                or self._flow.outward.refused(again, one.stream)
            ):
                self.in_flight.discard(one)
                one.cut("policy_changed")
            else:
                one.verdict = again

    def _judge(self, request: Request, verdict: Verdict) -> Verdict:
        """The verdict of now on what was let pass. Raises `FlowError("policy_changed")` where it does not pass on the very same terms."""
        last = self._judged
        if last is not None and last[0] is request and last[1] is verdict and last[2] == self.gateway.epoch:
            return verdict
        again = self.judge(request)
        if not still_passes(verdict, again) or again.terms != verdict.terms or again.credentials != verdict.credentials:
            raise policy_changed()
        return again

    # -- http.seam.BoundFlow

    @property
    def sandbox_id(self) -> str:
        """See `http.seam.BoundFlow`."""
        return self.gateway.sandbox_id

    @property
    def project(self) -> str:
        """See `http.seam.BoundFlow`."""
        return self.gateway.project

    @property
    def generation(self) -> int:
        """See `http.seam.BoundFlow`."""
        return self.gateway.generation

    @property
    def host(self) -> str:
        """See `http.seam.BoundFlow`."""
        return self._flow.host

    @property
    def port(self) -> int:
        """See `http.seam.BoundFlow`."""
        return self._flow.port

    @property
    def tls(self) -> bool:
        """See `http.seam.BoundFlow`."""
        return self._flow.tls

    @property
    def alpn(self) -> str:
        """See `http.seam.BoundFlow`."""
        return self._flow.alpn

    @property
    def shares(self) -> Shares:
        """See `http.seam.BoundFlow`."""
        return self.gateway.shares

    def when_scarce(self, callback: Callable[[], None]) -> None:
        """See `http.seam.BoundFlow`."""
        self._flow.outward.when_scarce(callback)

    @property
    def policy(self) -> Policy:
        """See `http.seam.BoundFlow`."""
        return self.gateway.policy

    @property
    def placeholders(self) -> dict[str, str]:
        """See `http.seam.BoundFlow`."""
        return self.gateway.placeholders

    def decide(self, request: Request) -> Verdict:
        """See `http.seam.BoundFlow`."""
        verdict = self.judge(request)
        if verdict.action is not Action.DENY and (problem := self.gateway.rates.request(verdict.terms)):
            verdict = Verdict(action=Action.DENY, reason="rate_exceeded", explanation=problem, rule=verdict.rule)
        if verdict.action is Action.DENY:
            self.gateway.counts.deny(verdict.reason)
        elif verdict.action is Action.ALLOW:
            self.gateway.counts.allowed += 1
        return verdict

    def judge(self, request: Request) -> Verdict:
        """See `http.seam.BoundFlow`."""
        verdict = self.gateway.policy.request(request, self.gateway.now())
        self._judged = request, verdict, self.gateway.epoch
        return verdict

    async def ask(self, verdict: Verdict, request: Request) -> bool:
        """See `http.seam.BoundFlow`."""
        return await self._flow.hold(verdict, request)

    def begin(self, request: Request, verdict: Verdict, cut: Callable[[str], None], stream: Stream) -> InFlight:
        """See `http.seam.BoundFlow`."""
        again = self._judge(request, verdict)
        if self._flow.outward.refused(again, stream):
            raise policy_changed()
        one = InFlight(self, request, again, cut, stream)
        self.in_flight.add(one)
        return one

    async def dial(
        self, request: Request, verdict: Verdict, alpn: tuple[str, ...] = ("http/1.1",)
    ) -> tuple[Stream, str]:
        """See `http.seam.BoundFlow`."""

        def judge() -> None:
            self._judge(request, verdict)

        return await self._flow.outward.dial(verdict, alpn, tls=self._flow.tls, judge=judge)

    async def leg(self, request: Request, verdict: Verdict, credential: str) -> Stream:
        """See `http.seam.BoundFlow`."""
        if not self._flow.tls:
            raise FlowError("cred_not_bound", "credentials go over TLS that was ended here, and nowhere else", 403)

        def judge() -> None:
            self._judge(request, verdict)

        return await self._flow.outward.leg(verdict, credential, judge=judge)

    def record(
        self,
        kind: str,
        decision: str,
        verdict: Verdict | None = None,
        *,
        reason: str = "",
        data: dict[str, Any] | None = None,
    ) -> None:
        """See `http.seam.BoundFlow`."""
        told = {"host": self.host, "port": self.port, **(data or {})}
        self.gateway.recorder.record(kind, decision, verdict, reason=reason, data=told)


def still_passes(before: Verdict, again: Verdict) -> bool:
    """Whether what was let pass would be now. What was approved is, as long as the same rule asks about the same."""
    if again.action is not Action.ASK:
        return again.action is Action.ALLOW
    return before.action is Action.ASK and (before.rule, before.ask_key) == (again.rule, again.ask_key)


def _begun_with(verdict: Verdict) -> tuple[object, ...]:
    """What cannot be changed of a request that has begun: who its server is, and what it was let have."""
    terms = verdict.terms or Terms()
    return verdict.credentials, way_of(terms), terms.client_auth, terms.websocket


def way_of(terms: Terms) -> tuple[object, ...]:
    """How an upstream is reached: another way needs another connection. Where addresses may be is judged by themselves."""
    return terms.route, terms.pin, terms.tls_min, terms.upstream_ca, terms.upstream_spki
