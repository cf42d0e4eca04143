"""One connection of a sandbox on its way through the stages of a decision.

```
accept → destination → connect → first octets → ClientHello → TLS with the client ─→ HTTP (`http.seam`), or octets to the upstream
            │             │            │             │
        no such name    denied    neither TLS    another name          each of them: nothing is dialled, the client hears why,
                                  nor HTTP       than the address's    and one record says it
```
The name comes from our own table, by the address that the client connected to; what the client says (ClientHello, `Host`) is only ever compared
with it. What is dialled is the name of the rule, resolved by us. `Flow` is the `http.seam.BoundFlow` of its connection.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from hatchway.domain.policy.addresses import Address, parse_address
from hatchway.domain.policy.compiled import Policy
from hatchway.domain.policy.schema import Ask
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Protocol, Request, TlsMode, Verdict
from hatchway.domain.policy.verdicts import Flow as Connection
from hatchway.egress import peeking, tls
from hatchway.egress.asks import TooManyAsks
from hatchway.egress.client_hello import ClientHello
from hatchway.egress.http.seam import FlowError, Stream, StreamLost
from hatchway.egress.peeking import Denied
from hatchway.egress.streams import TcpStream, join, relay
from hatchway.egress.synthetic import is_synthetic
from hatchway.egress.tls import TlsStream
from hatchway.egress.upstream import keep_alive

if TYPE_CHECKING:
    from hatchway.egress.gateway import Gateway

IDLE_S = 7200.0
"""A connection that is no HTTP, and over which nothing passes for so long, is cut."""
DENIED_WITHIN_S = 15.0
"""For telling a client why its connection is denied."""
_ALPN = {"1.1": "http/1.1", "2": "h2"}

log = logging.getLogger(__name__)


class _Exchange:
    """A request in flight: `http.seam.Exchange`."""

    def __init__(self, flow: "Flow", request: Request, verdict: Verdict, cut: Callable[[str], None]) -> None:
        self.request = request
        self._terms = verdict.terms
        self.cut = cut
        self._flow = flow

    def end(self) -> None:
        """See `http.seam.Exchange`."""
        self._flow.exchanges.discard(self)

    def count(self, out: int, into: int) -> None:
        """See `http.seam.Exchange`."""
        if problem := self._flow.gateway.rates.send(self._terms, out):
            raise FlowError("byte_budget", problem, 429)


class Flow:
    """See the module. Made for an accepted socket; `start` begins."""

    def __init__(self, gateway: "Gateway", sock: socket.socket) -> None:
        self.gateway = gateway
        self._sock = sock
        self._began = time.monotonic()
        self.address, self.port = _destination(sock)
        self.host = ""
        """The bound name; for a rule for addresses the address itself."""
        self.tls = False
        self.alpn = "http/1.1"
        self.sni = ""
        self.verdict: Verdict | None = None
        """Of the connection, as it was last judged."""
        self.exchanges: set[_Exchange] = set()
        self.upstream: dict[str, str] = {}
        """Where it went: of the last connection to the outside."""
        self.bytes_in = 0
        self.bytes_out = 0
        self._client: TcpStream | None = None
        self._upstreams: set[TcpStream] = set()
        self._dialled: dict[TcpStream, tuple[Address, Verdict]] = {}
        """Where each of those went, and by which verdict."""
        self._task: asyncio.Task[None] | None = None
        self._cut = ""
        self._requests_judge = False
        """HTTP decides each request: the connection as such need only be possible."""
        self._let = False
        self._rated: Terms | None = None
        self._passed = 0
        self._passed_at = self._began

    # -- life

    def start(self) -> None:
        """Begins; `Gateway.done` is called at the end, whatever that is."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._finished)

    def cut(self, reason: str) -> None:
        """Ends it at once: both sides get RST, nothing more is sent. May be repeated."""
        if not self._cut:
            self._cut = reason
        if self._client is not None:
            self._client.abort()
        for stream in list(self._upstreams):
            stream.abort()
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Waits until it is over."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def rejudge(self) -> None:
        """The policy is another, or its time went on: what it does not allow any more is cut before this returns."""
        if self.verdict is None or not self._let:
            return
        verdict = self._judge()
        if (
            verdict.action is Action.DENY
            or verdict.protocol != self.verdict.protocol
            or verdict.tls != self.verdict.tls
        ):
            self.cut("policy_changed")
            return
        if not self._requests_judge and verdict.action is not Action.ALLOW:
            self.cut("policy_changed")
            return
        self.verdict = verdict
        if not self._may_stay(verdict):
            return
        for exchange in list(self.exchanges):
            if self.gateway.policy.request(exchange.request, self.gateway.now()).action is not Action.ALLOW:
                self.exchanges.discard(exchange)
                exchange.cut("policy_changed")

    def _may_stay(self, verdict: Verdict) -> bool:
        """Cuts connections to addresses that may not be dialled any more; False when nothing is left of the flow."""
        for stream, (address, dialled) in list(self._dialled.items()):
            judged = verdict
            if self._requests_judge:
                # Each request had terms of its own: those of its rule, as it is now.
                terms = next((rule.terms for rule in self.gateway.policy.rules if rule.ref == dialled.rule), None)
                judged = verdict if terms is None else msgspec.structs.replace(dialled, terms=terms)
            target = self.gateway.target(self, judged, tls=self.tls)
            if self.gateway.dialler.refused(target, address) is None:
                continue
            if not self._requests_judge:
                self.cut("policy_changed")
                return False
            stream.abort()
        return True

    def end_idle(self, now: float) -> None:
        """Cuts it when nothing has passed since long before; to be called now and then, with the monotonic clock."""
        passed = self.bytes_in + self.bytes_out
        if passed != self._passed:
            self._passed, self._passed_at = passed, now
        elif now - self._passed_at > IDLE_S and not self._requests_judge:
            self.cut("idle")

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a flow of %s failed", self.gateway.sandbox_id, exc_info=error)
            self._cut = self._cut or "internal"
        for stream in list(self._upstreams):
            stream.abort()
        if self._client is None:
            self._sock.close()
        elif self._cut:
            self._client.abort()
        else:
            self._client.close()
        if self._let:
            self.gateway.recorder.ended(
                "egress.connection_ended",
                reason=self._cut,
                data={
                    **self._told(),
                    **self.upstream,
                    "bytes_out": self.bytes_out,
                    "bytes_in": self.bytes_in,
                    "seconds": round(time.monotonic() - self._began, 3),
                },
            )
        if self._rated is not None:
            self.gateway.rates.disconnect(self._rated)
        self.gateway.done(self)

    async def _run(self) -> None:
        try:
            keep_alive(self._sock)
            _, client = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: TcpStream(room=self.gateway.room), self._sock
            )
        except OSError:
            return  # it left before it was served
        self._client = client
        try:
            await self._serve(client)
        except Denied as denied:
            self._deny(client, denied)
        except FlowError as error:
            self._count_denied(error.reason)
            self._record_failed(error)
            client.abort()
        except (StreamLost, ssl.SSLError, OSError, TimeoutError):
            client.abort()

    # -- stages

    async def _serve(self, client: TcpStream) -> None:
        if self.gateway.recorder.full:
            raise FlowError("audit_full", "what happens cannot be recorded now, and so nothing is let through", 503)
        if self.port == 53:
            self.host = "dns"
            await self.gateway.serve_dns_tcp(client)
            return
        self.host = await self._bind(client)
        verdict = self.verdict = self._judge()
        if verdict.action is Action.DENY:
            await self._refuse(client, verdict)
            return
        problem = self.gateway.rates.connect(verdict.terms)
        if problem:
            raise Denied("rate_exceeded", problem, verdict)
        self._rated = verdict.terms
        if verdict.protocol is Protocol.TCP:
            await self._tunnel(client, verdict, tls_upstream=False)
        elif verdict.protocol is Protocol.TLS or verdict.tls is TlsMode.PASSTHROUGH:
            await self._tls_rule(client, verdict)
        else:
            await self._http_rule(client, verdict)

    async def _bind(self, client: TcpStream) -> str:
        """Which name the connection is for: what our table has for the address; a literal address where a rule for addresses may know it."""
        if not is_synthetic(self.address):
            return await self._rehomed(client) if self.gateway.rehomes else self.address
        name = self.gateway.names.name_of(self.address)
        if name is None:
            name = await self._bind_again(client)
        return name

    async def _rehomed(self, client: TcpStream) -> str:
        """The name that the ClientHello or `Host` says, where a rule takes it whatever address was connected to; the address itself otherwise."""
        connection = Connection(address=self.address, port=self.port)
        if self.gateway.policy.connect(connection, self.gateway.now()).action is not Action.DENY:
            return self.address
        try:
            hello = await self._hello(client)
            name = await peeking.host_in_clear(client) if hello is None else hello.server_name
        except (Denied, TimeoutError):
            return self.address
        if name is None or not self.gateway.policy.rehomes(name, self.port, self.gateway.now()):
            return self.address
        return name

    async def _bind_again(self, client: TcpStream) -> str:
        """A program may remember an address from before a restart of ours: if its name would get just this one, it is bound again."""
        hello = await self._hello(client)
        name = None if hello is None else hello.server_name
        if (
            name is None
            or not self.gateway.names.is_home(name, self.address)
            or self.gateway.policy.name(name, self.gateway.now()).action is Action.DENY
        ):
            raise Denied("dst_unbound", "no name was given this address here; the name has to be looked up first")
        self.gateway.names.bind(name)
        return name

    def _judge(self) -> Verdict:
        literal = self.host == self.address
        asked = (
            Connection(address=self.address, port=self.port) if literal else Connection(host=self.host, port=self.port)
        )
        return self.gateway.policy.connect(asked, self.gateway.now())

    async def _refuse(self, client: TcpStream, verdict: Verdict) -> None:
        """The connection is denied. A client that speaks HTTP hears why: inside TLS where the guest's authority covers the name, else by an alert."""
        if self.host == self.address:
            raise Denied(verdict.reason, verdict.explanation, verdict)
        self._count_denied(verdict.reason)
        self._record_denied(Denied(verdict.reason, verdict.explanation, verdict))
        try:
            async with asyncio.timeout(DENIED_WITHIN_S):
                hello = await self._hello(client, peeking.DENIED_WITHIN_S)
                stream: Stream = client
                if hello is not None:
                    if not self.gateway.covers(self.host):
                        raise Denied(verdict.reason, verdict.explanation, verdict, tls.ACCESS_DENIED)
                    self._check_name(hello)
                    self.tls = True
                    stream = await self._client_tls(client, ("http/1.1",))
                await self.gateway.http.refuse(stream, self, verdict)
                stream.close()
        except Denied as worse:
            peeking.end_denied(client, worse)

    async def _tls_rule(self, client: TcpStream, verdict: Verdict) -> None:
        """A rule for TLS with whatever inside: passed through as it is, or ended here and begun anew."""
        hello = await self._hello(client)
        if hello is None:
            raise Denied("protocol_mismatch", "the rule is for TLS, and the connection is none", verdict)
        passed = verdict.tls is TlsMode.PASSTHROUGH
        if passed and hello.ech:
            raise Denied("ech_refused", "Encrypted ClientHello would hide the name", verdict, tls.ACCESS_DENIED)
        if hello.server_name is not None or not (
            passed and (verdict.terms is not None and verdict.terms.sni == "optional")
        ):
            self._check_name(hello)
        await self._approve(verdict)
        self._allow(verdict)
        if passed:
            await self._tunnel(client, verdict, tls_upstream=False, approved=True)
            return
        self.tls = True
        inside = await self._client_tls(client, ())
        upstream, _ = await self.dial(verdict, ())
        await join(inside, upstream)

    async def _http_rule(self, client: TcpStream, verdict: Verdict) -> None:
        hello = await self._hello(client)
        stream: Stream = client
        if hello is not None:
            if verdict.tls is TlsMode.NONE:
                raise Denied("tls_not_expected", "the rule is for traffic in clear", verdict, tls.ACCESS_DENIED)
            self._check_name(hello)
            self.tls = True
        elif client.buffered == 0:
            return  # it ended without a word
        self._requests_judge = True
        self._allow(verdict)
        if hello is not None:
            offered = tuple(_ALPN[version] for version in ("2", "1.1") if version in verdict.versions)
            inside = await self._client_tls(client, offered)
            self.alpn = inside.alpn or "http/1.1"
            stream = inside
        try:
            await self.gateway.http.serve(stream, self)
        finally:
            if not self._cut:
                stream.close()

    async def _tunnel(self, client: TcpStream, verdict: Verdict, *, tls_upstream: bool, approved: bool = False) -> None:
        if not approved:
            await self._approve(verdict)
            self._allow(verdict)
        upstream, _ = await self._dial(verdict, (), tls_upstream=tls_upstream)
        assert isinstance(upstream, TcpStream)
        await relay(client, upstream)

    async def _approve(self, verdict: Verdict) -> None:
        """Holds a connection that is no HTTP until somebody allows it. Raises `Denied`."""
        if verdict.action is not Action.ASK:
            return
        if not await self._hold(verdict):
            raise Denied("approval_denied", "nobody allowed it", verdict)

    def _allow(self, verdict: Verdict) -> None:
        """Judges once more, since time went by, and records it before the first octet leaves: what cannot be recorded does not happen."""
        again = self._judge()
        if again.action is Action.DENY or _way(again) != _way(verdict):
            raise Denied("policy_changed", "the policy was changed meanwhile", again)
        self.gateway.recorder.record("egress.connection", "allowed", verdict, data=self._told())
        self.gateway.counts.allowed += 1
        self._let = True

    # -- the client's first octets

    async def _hello(self, client: TcpStream, within: float | None = None) -> ClientHello | None:
        hello = await peeking.hello(client, within)
        if hello is not None:
            self.sni = hello.server_name or ""
        return hello

    def _check_name(self, hello: ClientHello) -> None:
        if hello.server_name is None:
            raise Denied("sni_missing", "the ClientHello names no server", self.verdict, tls.UNRECOGNIZED_NAME)
        if hello.server_name != self.host:
            raise Denied(
                "authority_mismatch",
                f"the connection is for {self.host}, its ClientHello for {hello.server_name}",
                self.verdict,
                tls.UNRECOGNIZED_NAME,
            )

    async def _client_tls(self, client: TcpStream, alpn: tuple[str, ...]) -> TlsStream:
        context = self.gateway.leaf(self.host, alpn)
        try:
            return await tls.handshake(client, context, server_side=True, turn=self.gateway.turn)
        except ssl.SSLError as error:
            # Mostly a client that does not trust the authority: its owner wants to read that somewhere.
            self._count_denied("tls_client_failed")
            self.gateway.recorder.ended(
                "egress.tls_failed",
                "failed",
                reason="tls_client_failed",
                data={**self._told(), "error": error.reason or str(error)},
                alike=True,
            )
            raise

    # -- denials

    def _deny(self, client: TcpStream, denied: Denied) -> None:
        self._count_denied(denied.reason)
        self._record_denied(denied)
        peeking.end_denied(client, denied)

    def _count_denied(self, reason: str) -> None:
        self.gateway.counts.deny(reason)

    def _record_denied(self, denied: Denied) -> None:
        try:
            self.gateway.recorder.record(
                "egress.connection",
                "denied",
                denied.verdict or self.verdict,
                reason=denied.reason,
                data={**self._told(), "explanation": denied.explanation},
            )
        except FlowError as error:
            log.warning("%s: a denial was not recorded: %s", self.gateway.sandbox_id, error)

    def _record_failed(self, error: FlowError) -> None:
        self.gateway.recorder.ended(
            "egress.connection_failed",
            "failed",
            reason=error.reason,
            data={**self._told(), "explanation": error.explanation},
            alike=True,
        )

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"host": self.host, "port": self.port, "address": self.address}
        if self.sni and self.sni != self.host:
            told["sni"] = self.sni
        return told

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
    def policy(self) -> Policy:
        """See `http.seam.BoundFlow`."""
        return self.gateway.policy

    @property
    def placeholders(self) -> dict[str, str]:
        """See `http.seam.BoundFlow`."""
        return self.gateway.placeholders

    def decide(self, request: Request) -> Verdict:
        """See `http.seam.BoundFlow`."""
        verdict = self.gateway.policy.request(request, self.gateway.now())
        if verdict.action is not Action.DENY and (problem := self.gateway.rates.request(verdict.terms)):
            verdict = Verdict(action=Action.DENY, reason="rate_exceeded", explanation=problem, rule=verdict.rule)
        if verdict.action is Action.DENY:
            self.gateway.counts.deny(verdict.reason)
        elif verdict.action is Action.ALLOW:
            self.gateway.counts.allowed += 1
        return verdict

    async def ask(self, verdict: Verdict, request: Request) -> bool:
        """See `http.seam.BoundFlow`."""
        return await self._hold(verdict, request)

    def begin(self, request: Request, verdict: Verdict, cut: Callable[[str], None]) -> _Exchange:
        """See `http.seam.BoundFlow`."""
        exchange = _Exchange(self, request, verdict, cut)
        self.exchanges.add(exchange)
        return exchange

    async def dial(self, verdict: Verdict, alpn: tuple[str, ...] = ("http/1.1",)) -> tuple[Stream, str]:
        """See `http.seam.BoundFlow`."""
        return await self._dial(verdict, alpn, tls_upstream=self.tls)

    async def _dial(self, verdict: Verdict, alpn: tuple[str, ...], *, tls_upstream: bool) -> tuple[Stream, str]:
        target = self.gateway.target(self, verdict, tls=tls_upstream)
        under: list[TcpStream] = []

        def made(stream: TcpStream) -> None:
            under.append(stream)
            self._made(stream)

        dialled = await self.gateway.dialler.dial(
            target, self.gateway.resolver, alpn=alpn, counted=self._counted, made=made, turn=self.gateway.turn
        )
        if dialled.address and under and under[0] in self._upstreams:
            self._dialled[under[0]] = (parse_address(dialled.address), verdict)
        self.gateway.note_upstream(self, dialled)
        return dialled.stream, dialled.alpn

    async def leg(self, verdict: Verdict, credential: str) -> Stream:
        """See `http.seam.BoundFlow`."""
        if not self.tls:
            raise FlowError("cred_not_bound", "credentials go over TLS that was ended here, and nowhere else", 403)
        leg = await self.gateway.leg(self, verdict, credential)
        stream, _ = await self.gateway.dialler.leg(leg, counted=self._counted, made=self._made)
        return stream

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
        self.gateway.recorder.record(
            kind, decision, verdict, reason=reason, data={"host": self.host, "port": self.port, **(data or {})}
        )

    # -- parts of those

    async def _hold(self, verdict: Verdict, request: Request | None = None) -> bool:
        """Asks, unless an earlier answer holds. The client may leave meanwhile."""
        gateway, client = self.gateway, self._client
        assert client is not None
        asked = gateway.asked(self, verdict, request)
        if gateway.asks.answered(asked.rule, asked.key):
            return True
        kind = "egress.connection" if request is None else "egress.request"
        told = self._told() if request is None else {"host": self.host, "method": request.method, "path": request.path}
        gateway.recorder.record(kind, "asked", verdict, data=told)
        holding = asyncio.get_running_loop().create_task(
            gateway.asks.hold(asked, verdict.ask or Ask(), gateway.policy.limits.pending_ask)
        )
        client.when_ended(lambda: _cancel(holding))
        try:
            answer = await holding
        except TooManyAsks as error:
            raise FlowError("limit", f"{error}; try again when they are decided", 429) from error
        except asyncio.CancelledError:
            if client.ended and not self._cut:
                return False
            holding.cancel()
            raise
        return answer is not None and answer.allow

    def _made(self, stream: TcpStream) -> None:
        if self._cut:
            stream.abort()
            return
        stream.give_room(self.gateway.room)
        self._upstreams.add(stream)
        stream.when_lost(lambda: self._lost(stream))

    def _lost(self, stream: TcpStream) -> None:
        self._upstreams.discard(stream)
        self._dialled.pop(stream, None)

    def give_room(self, room: int) -> None:
        """See `TcpStream.give_room`."""
        for stream in (self._client, *self._upstreams):
            if stream is not None:
                stream.give_room(room)

    def _counted(self, into: int, out: int) -> None:
        self.bytes_in += into
        self.bytes_out += out
        if out and self._rated is not None and not self._requests_judge and self.gateway.rates.send(self._rated, out):
            # The octets are on their way already: nothing comes behind them.
            asyncio.get_running_loop().call_soon(self.cut, "byte_budget")
        counts = self.gateway.counts
        counts.bytes_in += into
        counts.bytes_out += out


def _way(verdict: Verdict) -> tuple[object, ...]:
    """How a connection is treated: another way needs another connection."""
    return verdict.protocol, verdict.tls, verdict.terms and (verdict.terms.upstream_ca, verdict.terms.route)


def _destination(sock: socket.socket) -> tuple[str, int]:
    """Where the client connected to: the local address, since the listener is transparent."""
    address, port = sock.getsockname()[:2]
    return str(address), int(port)


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
