"""One sandbox: its listeners, its policy, its names, its authority, and its flows.

`open` begins to serve, `change` takes another policy while flows are open, `cut` ends all flows and goes on, `close` ends everything.
A fault of one flow ends that flow; nothing of one gateway is known to another.
"""

import asyncio
import datetime
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hatchway.domain.errors import Unprocessable
from hatchway.domain.policy.addresses import Address
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Request, Verdict
from hatchway.egress.accepting import Acceptor
from hatchway.egress.asks import Asks
from hatchway.egress.auditing import AuditSink, Recorder, cut
from hatchway.egress.authority import Authority, BadKey
from hatchway.egress.bounds import MINUTE, Bucket, Budget
from hatchway.egress.dns import Outcome, Refusal, Responder
from hatchway.egress.dns_server import MAX_TCP, DnsServer
from hatchway.egress.flows import Flow
from hatchway.egress.http.seam import FlowError, Http
from hatchway.egress.peeking import Denied
from hatchway.egress.rates import Rates
from hatchway.egress.shares import MAX_OUTSIDE, Shares
from hatchway.egress.streams import MAX_RECEIVED, TcpStream
from hatchway.egress.synthetic import NamesExhausted, SyntheticNames
from hatchway.egress.upstream import Dialler, Target
from hatchway.wire.broker import Leg
from hatchway.wire.egress import (
    Asked,
    CredentialSpec,
    EgressSpec,
    GatewayOpened,
    GatewayRenewed,
    GatewaySpec,
    GatewayStatus,
)

MAX_REASONS = 64
MIN_ROOM = 16 * 1024
IDLE_CHECK_S = 60.0
UNNAMED = 10
"""How many times as many new names as under wildcards there may be where a rule for networks takes names that no rule is about."""
MAX_ROOM = 2 * MAX_RECEIVED

log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What `gateway.status` tells."""

    allowed: int = 0
    denied: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    denied_by: dict[str, int] = field(default_factory=dict)

    def deny(self, reason: str) -> None:
        """Counts a refusal. Reasons are codes of ours; their number is bounded all the same."""
        self.denied += 1
        if reason not in self.denied_by and len(self.denied_by) >= MAX_REASONS:
            reason = "other"
        self.denied_by[reason] = self.denied_by.get(reason, 0) + 1


class Gateway:
    """See the module. For one event loop."""

    def __init__(
        self,
        spec: GatewaySpec,
        listeners: Sequence[socket.socket],
        *,
        dialler: Dialler,
        http: Http,
        sink: AuditSink,
        tell: Callable[[str, object], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to serve on `listeners` (`wire.egress.LISTENERS`), which are ours from now on when this returns.

        Raises `Unprocessable("invalid_policy")` and `Unprocessable("invalid_ca_key")`.
        """
        self.sandbox_id = spec.sandbox_id
        self.project = spec.project
        self.generation = spec.generation
        self.revision = spec.egress.revision
        self.now = now
        self._clock = clock
        self.policy: Policy = policy_of(spec.egress)
        self.epoch = 0
        """Goes up whenever the policy or its time changes: what was judged in the present one need not be judged again."""
        self.rates = Rates(clock)
        self.dialler = dialler
        self.resolver = dialler.resolver()
        self.http = http
        self.recorder = Recorder(sink, spec.project, spec.sandbox_id, spec.generation, now, clock)
        self.counts = Counts()
        self._tell = tell
        self.asks = Asks(tell, now, clock)
        self.names = SyntheticNames(self.policy.limits.max_names)
        self._exact = exact_names(self.policy)
        self.names.bind_all(self._exact)
        try:
            self._authority = Authority(spec.ca_key, spec.sandbox_id, self.policy.allowed_names(now()), self._date())
        except BadKey as error:
            raise _bad_key(error) from error
        self.placeholders = _placeholders(spec.credentials)
        self._flows: set[Flow] = set()
        self.shares = Shares(clock)
        self.room = 0
        """How much a direction of a stream may hold: the bound on all of them, divided by how many there are."""
        self._shares = 0
        self.rehomes = False
        self._idle_check = clock() + IDLE_CHECK_S
        self._next_change = self.policy.next_change(now())
        self._wildcards = Budget(MINUTE, clock)
        self._unnamed = Budget(MINUTE, clock)
        self._dns_bucket = Bucket(50, 200, clock)
        self._bucket = Bucket(200, 400, clock)
        self._take_limits()
        self._responder = Responder(self.names, self._may_be_named, lambda: self.policy.dns_answer == "nodata")
        self._listening: list[Acceptor] = []
        self._dns: DnsServer | None = None
        self.listen(listeners)
        self._record_policy(spec.egress)

    # -- listeners

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Serves on these from now on, and lets go of former ones."""
        self._stop_listening()
        tcp, dns_udp, dns_tcp = listeners
        self._listening = [
            Acceptor(tcp, self._accepted, self._has_room, self._bucket),
            Acceptor(dns_tcp, self._accepted_dns, self._has_dns_room, self._bucket),
        ]
        self._dns = DnsServer(dns_udp, self._responder, self._dns_bucket, self._seen, self._flooded)

    def _stop_listening(self) -> None:
        for acceptor in self._listening:
            acceptor.close()
        self._listening = []
        if self._dns is not None:
            self._dns.close()
            self._dns = None

    def _has_room(self) -> bool:
        return len(self._flows) < self.policy.limits.connections

    def _has_dns_room(self) -> bool:
        return sum(flow.port == 53 for flow in self._flows) < MAX_TCP

    def _accepted(self, sock: socket.socket) -> None:
        try:
            flow = Flow(self, sock)
        except OSError:
            sock.close()  # it left before it was served
            return
        self._flows.add(flow)
        self._share()
        flow.start()

    _accepted_dns = _accepted

    def done(self, flow: Flow) -> None:
        """A flow ended."""
        self._flows.discard(flow)
        self._share()
        for acceptor in self._listening:
            acceptor.again()

    # -- names

    def _may_be_named(self, name: str) -> Refusal | None:
        verdict = self.policy.name(name, self.now())
        if verdict.action is Action.DENY:
            return Refusal(verdict.reason, verdict.explanation)
        if self.names.address_of(name) is None and name not in self._exact:
            most = self.policy.limits.wildcard_names_per_min
            # What may go to whole networks is not held back by how many names they have: ordinary pages have dozens.
            unnamed = not self.policy.certifies(name, self.now())
            budget, most = (self._unnamed, most * UNNAMED) if unnamed else (self._wildcards, most)
            if not budget.take(1, most):
                return Refusal("names_rate", "too many new names under wildcards within a minute")
        return None

    def bind(self, name: str) -> None:
        """Gives a name its address as the name server does, and within the same bounds. Raises `Denied`."""
        refusal = self._may_be_named(name)
        if refusal is not None:
            raise Denied(refusal.reason, refusal.explanation)
        try:
            self.names.bind(name)
        except NamesExhausted as error:
            raise Denied("names_exhausted", f"{error}; a sandbox gets no more") from error

    def _seen(self, outcome: Outcome) -> bool:
        refusal = outcome.refusal
        if refusal is None:
            return not self.recorder.full
        self.counts.deny(refusal.reason)
        try:
            self.recorder.record(
                "egress.dns", "denied", reason=refusal.reason, data={"name": outcome.name, "type": outcome.type}
            )
        except FlowError:
            return False
        return True

    def _flooded(self) -> None:
        self.counts.deny("dns_rate")
        self.recorder.ended("egress.dns", "denied", reason="dns_rate")

    async def serve_dns_tcp(self, client: TcpStream) -> None:
        """Answers questions over TCP."""
        if self._dns is not None:
            await self._dns.serve_tcp(client)

    # -- policy

    def change(self, egress: EgressSpec, credentials: Sequence[CredentialSpec]) -> GatewayOpened:
        """Takes another policy; what it does not allow of what is open is cut when this returns. An older revision than the present one changes nothing.

        Raises `Unprocessable("invalid_policy")`: the former one stays in force.
        """
        if egress.revision >= self.revision:
            try:
                policy = policy_of(egress)
            except Unprocessable as error:
                told = {"revision": egress.revision, "in_force": self.revision, "cause": error.cause}
                self.recorder.ended("egress.policy", "failed", reason=error.code, data=told)
                raise
            changed = egress.revision > self.revision
            exact = exact_names(policy)
            self._authority.constrain(policy.allowed_names(self.now()), self._date())
            self.policy, self.revision, self._exact = policy, egress.revision, exact
            self._next_change = policy.next_change(self.now())
            self.placeholders = _placeholders(credentials)
            self._take_limits()
            self.names.bind_all(exact)
            if changed:
                self.asks.end_all("policy_changed")
            if changed and policy.on_policy_change == "close_flows":
                for flow in list(self._flows):
                    flow.cut("policy_changed")
            self.rejudge()
            if changed:
                self._record_policy(egress)
            for acceptor in self._listening:
                acceptor.again()
        return self.opened()

    def _record_policy(self, egress: EgressSpec) -> None:
        documents = [f"{one.tier}/{one.name} {one.version}" for one in egress.documents]
        self.recorder.ended("egress.policy", data={"revision": egress.revision, "documents": documents})

    def rejudge(self) -> None:
        """Cuts what the policy does not allow now: it was changed, or time went on."""
        self.epoch += 1
        for flow in list(self._flows):
            flow.rejudge()

    def tick(self) -> None:
        """Looks whether something of the policy has expired since, and whether the authority's certificate soon will."""
        if self._next_change is not None and self.now() >= self._next_change:
            self._next_change = self.policy.next_change(self.now())
            self._authority.constrain(self.policy.allowed_names(self.now()), self._date())
            self.rejudge()
            self._tell_renewed()
        elif self._authority.renewal_due(self._date()):
            self._authority.constrain(self.policy.allowed_names(self.now()), self._date())
            self._tell_renewed()
        if self._clock() >= self._idle_check:
            self._idle_check = self._clock() + IDLE_CHECK_S
            for flow in list(self._flows):
                flow.end_idle(self._clock())

    def _tell_renewed(self) -> None:
        self._tell(
            "gateway.renewed",
            GatewayRenewed(
                sandbox_id=self.sandbox_id, generation=self.generation, ca_certificate=self._authority.certificate
            ),
        )

    def opened(self) -> GatewayOpened:
        """The answer to `gateway.open` and `gateway.policy`."""
        return GatewayOpened(
            ca_key=self._authority.key, ca_certificate=self._authority.certificate, revision=self.revision
        )

    def covers(self, name: str) -> bool:
        """Whether the guest's authority may have a certificate for a name."""
        return self.policy.certifies(name, self.now())

    def leaf(self, name: str, alpn: tuple[str, ...]) -> ssl.SSLContext:
        """What makes us `name` towards the client."""
        return self._authority.context(name, alpn, self._date())

    def _take_limits(self) -> None:
        limits = self.policy.limits
        self.names.change(limits.max_names)
        self._shares = 0
        self._share()
        self.rehomes = any(rule.rehome for rule in self.policy.rules)
        self._dns_bucket.change(limits.dns_per_s, limits.dns_per_s * 4)
        self._bucket.change(limits.connections_per_s, limits.connections_per_s * 2)

    def _share(self) -> None:
        """Divides the buffers anew when there are twice as many flows as they were divided for, or a quarter."""
        flows = max(1, len(self._flows))
        if self._shares // 4 <= flows <= self._shares:
            return
        self._shares = 1 << (flows - 1).bit_length()
        self.room = max(MIN_ROOM, min(MAX_ROOM, self.policy.limits.buffer // (2 * self._shares)))
        for flow in self._flows:
            flow.give_room(self.room)

    def _date(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.now(), datetime.UTC)

    # -- what flows use

    def asked(self, flow: Flow, verdict: Verdict, request: Request | None) -> Asked:
        """The question about a flow, or about one of its requests."""
        return Asked(
            ask_id="",
            sandbox_id=self.sandbox_id,
            project=self.project,
            generation=self.generation,
            rule="" if verdict.rule is None else str(verdict.rule),
            host=flow.host,
            port=flow.port,
            protocol="tcp" if verdict.protocol is None else verdict.protocol.value,
            method="" if request is None else request.method,
            path="" if request is None else str(cut(request.path)),
            key=verdict.ask_key,
            reason=verdict.explanation,
        )

    def target(self, flow: Flow, verdict: Verdict, *, tls: bool) -> Target:
        """Where a flow's connection goes."""

        def judge(address: Address, own: frozenset[Address]) -> Verdict:
            return self.policy.address(address, flow.port, verdict, self.now(), own)

        return Target(
            host=flow.host,
            port=flow.port,
            tls=tls,
            terms=verdict.terms or Terms(),
            judge=judge,
            records=self.policy.records.get(flow.host, ()),
        )

    async def leg(self, flow: Flow, verdict: Verdict, credential: str) -> Leg:
        """The head of a leg of the broker, with the addresses that it may dial. Raises `FlowError`."""
        target = self.target(flow, verdict, tls=True)
        terms = target.terms
        proxy = self.dialler.proxy(terms)
        addresses: tuple[str, ...] = ()
        if proxy is None or not self.dialler.resolves(proxy, target):
            addresses = tuple(map(str, (await self.dialler.vetted(target, self.resolver)).addresses))
        return Leg(
            sandbox_id=self.sandbox_id,
            project=self.project,
            generation=self.generation,
            credential_id=credential,
            rule="" if terms.rule is None else terms.rule.rule,
            host=flow.host,
            port=flow.port,
            addresses=addresses,
            via="" if proxy is None else proxy.url,
        )

    async def take_outside(self) -> None:
        """One more connection to the outside; each is given back by `give_outside`. Raises `FlowError("limit")`."""
        limit = max(MAX_OUTSIDE, 2 * self.policy.limits.connections)
        if self.shares.outside >= limit:
            for flow in self._flows:
                flow.outward.spare()
            await asyncio.sleep(0)  # what was aborted is given back
        if self.shares.outside >= limit:
            raise FlowError(
                "limit", f"this sandbox has {limit} connections to the outside; try again when some have ended", 429
            )
        self.shares.outside += 1

    def give_outside(self) -> None:
        """See `take_outside`."""
        self.shares.outside -= 1

    def status(self) -> GatewayStatus:
        """Counts since it was opened, and what is open now."""
        counts = self.counts
        return GatewayStatus(
            sandbox_id=self.sandbox_id,
            generation=self.generation,
            revision=self.revision,
            flows=len(self._flows),
            asks=len(self.asks),
            allowed=counts.allowed,
            denied=counts.denied,
            bytes_out=counts.bytes_out,
            bytes_in=counts.bytes_in,
            denied_by=dict(counts.denied_by),
        )

    # -- ends

    async def cut(self, reason: str = "closed") -> None:
        """Cuts all flows, denies all that is held, and goes on."""
        self.asks.end_all("closed")
        await self._cut_flows(reason)

    async def close(self, reason: str = "closed") -> None:
        """Cuts all flows and serves no more; whoever holds the listeners still may give them to another. May be repeated."""
        self._stop_listening()
        await self.cut(reason)

    async def _cut_flows(self, reason: str) -> None:
        flows = list(self._flows)
        for flow in flows:
            flow.cut(reason)
        for flow in flows:
            await flow.ended()


def policy_of(egress: EgressSpec) -> Policy:
    """The policy that these documents make. Raises `PolicyError` (`Unprocessable("invalid_policy")`)."""
    return compile_policy(
        [TieredDocument.stored(one.tier, one.name, one.version, one.text) for one in egress.documents]
    )


def exact_names(policy: Policy) -> frozenset[str]:
    """Names that rules name in full, and let pass: they have their addresses before anybody asks."""
    return frozenset(
        pattern.base
        for rule in policy.rules
        if rule.action is not Action.DENY
        for pattern in rule.hosts
        if not pattern.stars
    )


def _placeholders(credentials: Sequence[CredentialSpec]) -> dict[str, str]:
    return {one.placeholder: one.credential_id for one in credentials}


def _bad_key(error: BadKey) -> Unprocessable:
    return Unprocessable("invalid_ca_key", f"{error}.", "Leave it out: a new one is made.")
