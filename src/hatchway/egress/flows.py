"""One connection of a sandbox on its way through the stages of a decision.

```
accept → destination → connect → first octets → ClientHello → TLS with the client ─→ HTTP (`http.seam`), or octets to the upstream
            │             │            │             │
        no such name    denied    neither TLS    another name          each of them: nothing is dialled, the client hears why,
                                  nor HTTP       than the address's    and one record says it
```
The name comes from our own table, by the address that the client connected to; what the client says (ClientHello, `Host`) is only ever compared
with it. What is dialled is the name of the rule, resolved by us. Beside this: `naming` (which name), `requests` (what HTTP sees of a flow), `outward` (its connections to the outside), `telling` (its records).
"""

import asyncio
import logging
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

from hatchway.domain.policy.schema import Ask
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Protocol, Request, TlsMode, Verdict
from hatchway.domain.policy.verdicts import Flow as Connection
from hatchway.egress import peeking, tls
from hatchway.egress.asks import TooManyAsks
from hatchway.egress.client_hello import ClientHello
from hatchway.egress.http.seam import FlowError, Stream, StreamLost
from hatchway.egress.naming import name_of
from hatchway.egress.outward import Outward, policy_changed
from hatchway.egress.peeking import Denied
from hatchway.egress.requests import Requests, still_passes, way_of
from hatchway.egress.streams import TcpStream, join, relay
from hatchway.egress.telling import Teller
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


class Flow:
    """See the module. Made for an accepted socket; `start` begins."""

    def __init__(self, gateway: "Gateway", sock: socket.socket) -> None:
        self.gateway = gateway
        self._sock = sock
        self.address, self.port = _destination(sock)
        self.host = ""
        """The bound name; for a rule for addresses the address itself."""
        self.tls = False
        self.alpn = "http/1.1"
        self.sni = ""
        self.verdict: Verdict | None = None
        """Of the connection, as it was last judged."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.outward = Outward(self, self._counted)
        self.requests = Requests(self)
        self._teller = Teller(self)
        self._client: TcpStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._cut = ""
        self._requests_judge = False
        """HTTP decides each request: the connection as such need only be possible."""
        self._let = False
        self._dialled: tuple[object, ...] = ()
        """How the other side of what is no HTTP was reached."""
        self._rated: Terms | None = None
        self._passed = 0
        self._passed_at = time.monotonic()

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
        self.outward.abort()
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
        gone = (
            not still_passes(self.verdict, verdict)
            or (verdict.protocol, verdict.tls) != (self.verdict.protocol, self.verdict.tls)
            or (not self._requests_judge and (self._way(verdict) != self._dialled or self.outward.refused(verdict)))
        )
        if gone:
            self.cut("policy_changed")
            return
        self.verdict = verdict
        self.requests.rejudge()

    def _way(self, verdict: Verdict) -> tuple[object, ...]:
        """How the other side of what is no HTTP is reached."""
        return *way_of(verdict.terms or Terms()), self.gateway.policy.records.get(self.host)

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
        self.outward.abort()
        if self._client is None:
            self._sock.close()
        elif self._cut:
            self._client.abort()
        else:
            self._client.close()
        if self._let:
            self._teller.ended(self._cut)
        if self._rated is not None:
            self.gateway.rates.disconnect(self._rated)
        self.gateway.done(self)

    async def _run(self) -> None:
        await self.gateway.shares.turns.take()
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
            self._teller.denied(denied)
            peeking.end_denied(client, denied)
        except FlowError as error:
            self._teller.failed(error)
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
        self.host = await name_of(self, client)
        verdict = self.verdict = self._judge()
        if verdict.action is Action.DENY:
            await self._refuse(client, verdict)
            return
        problem = self.gateway.rates.connect(verdict.terms)
        if problem:
            raise Denied("rate_exceeded", problem, verdict)
        self._rated = verdict.terms
        if verdict.protocol is Protocol.TCP:
            await self._tunnel(client, verdict)
        elif verdict.protocol is Protocol.TLS or verdict.tls is TlsMode.PASSTHROUGH:
            await self._tls_rule(client, verdict)
        else:
            await self._http_rule(client, verdict)

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
        self._teller.denied(Denied(verdict.reason, verdict.explanation, verdict))
        try:
            async with asyncio.timeout(DENIED_WITHIN_S):
                hello = await self.hello(client, peeking.DENIED_WITHIN_S)
                stream: Stream = client
                if hello is not None:
                    if not self.gateway.covers(self.host):
                        raise Denied(verdict.reason, verdict.explanation, verdict, tls.ACCESS_DENIED)
                    self._check_name(hello)
                    self.tls = True
                    stream = await self._client_tls(client, ("http/1.1",))
                await self.gateway.http.refuse(stream, self.requests, verdict)
                stream.close()
        except Denied as worse:
            peeking.end_denied(client, worse)

    async def _tls_rule(self, client: TcpStream, verdict: Verdict) -> None:
        """A rule for TLS with whatever inside: passed through as it is, or ended here and begun anew."""
        hello = await self.hello(client)
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
        verdict = self._allow(verdict)
        if passed:
            await self._relay(client, verdict)
            return
        self.tls = True
        inside = await self._client_tls(client, ())
        await join(inside, await self._dial(verdict, tls_upstream=True))

    async def _http_rule(self, client: TcpStream, verdict: Verdict) -> None:
        hello = await self.hello(client)
        stream: Stream = client
        if hello is not None:
            if verdict.tls is TlsMode.NONE:
                raise Denied("tls_not_expected", "the rule is for traffic in clear", verdict, tls.ACCESS_DENIED)
            self._check_name(hello)
            self.tls = True
        elif client.buffered == 0:
            return  # it ended without a word
        await self._approve(verdict)
        self._requests_judge = True
        self._allow(verdict)
        if hello is not None:
            offered = tuple(_ALPN[version] for version in ("2", "1.1") if version in verdict.versions)
            inside = await self._client_tls(client, offered)
            self.alpn = inside.alpn or "http/1.1"
            stream = inside
        try:
            await self.gateway.http.serve(stream, self.requests)
        finally:
            if not self._cut:
                stream.close()

    async def _tunnel(self, client: TcpStream, verdict: Verdict) -> None:
        await self._approve(verdict)
        await self._relay(client, self._allow(verdict))

    async def _relay(self, client: TcpStream, verdict: Verdict) -> None:
        upstream = await self._dial(verdict, tls_upstream=False)
        assert isinstance(upstream, TcpStream)
        await relay(client, upstream)

    async def _approve(self, verdict: Verdict) -> None:
        """Holds a connection until somebody allows it, where the connection as such is asked about. Raises `Denied`."""
        if verdict.action is not Action.ASK:
            return
        if not await self.hold(verdict):
            raise Denied("approval_denied", "nobody allowed it", verdict)

    def _allow(self, verdict: Verdict) -> Verdict:
        """Judges once more, since time went by, and records it before the first octet leaves: what cannot be recorded does not happen."""
        again = self._judge()
        same = (again.protocol, again.tls) == (verdict.protocol, verdict.tls)
        if not self._requests_judge:
            same = same and way_of(again.terms or Terms()) == way_of(verdict.terms or Terms())
        if not same or not still_passes(verdict, again):
            raise Denied("policy_changed", "the policy was changed meanwhile", again)
        self._teller.allowed(verdict)
        self.verdict, self._dialled, self._let = again, self._way(again), True
        return again

    async def _dial(self, verdict: Verdict, *, tls_upstream: bool) -> Stream:
        """The other side of what is no HTTP. While it is dialled, a policy that does not allow it any more cuts the flow."""
        stream, _ = await self.outward.dial(verdict, (), tls=tls_upstream)
        if self.verdict is not None and self.outward.refused(self.verdict, stream):
            raise policy_changed()
        return stream

    # -- the client's first octets

    async def hello(self, client: TcpStream, within: float | None = None) -> ClientHello | None:
        """See `peeking.hello`."""
        hello = await peeking.hello(client, within)
        if hello is not None:
            self.sni = hello.server_name or ""
        await self.gateway.shares.turns.take()
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
            return await tls.handshake(client, context, server_side=True, turn=self.gateway.shares.handshake)
        except ssl.SSLError as error:
            self._teller.tls_failed(error)
            raise

    # -- parts

    async def hold(self, verdict: Verdict, request: Request | None = None) -> bool:
        """Whether somebody allows it: asks, unless an earlier answer holds. The client may leave meanwhile."""
        gateway, client = self.gateway, self._client
        assert client is not None
        asked = gateway.asked(self, verdict, request)
        if gateway.asks.answered(asked.rule, asked.key):
            return True
        try:
            gateway.asks.require_room(gateway.policy.limits.pending_ask)
        except TooManyAsks as error:
            raise FlowError("limit", f"{error}; try again later", 429) from error
        self._teller.asked(verdict, request)
        holding = asyncio.get_running_loop().create_task(gateway.asks.hold(asked, verdict.ask or Ask()))
        client.when_ended(lambda: _cancel(holding))
        try:
            answer = await holding
        except asyncio.CancelledError:
            if client.ended and not self._cut:
                return False
            holding.cancel()
            raise
        return answer is not None and answer.allow

    def give_room(self, room: int) -> None:
        """See `TcpStream.give_room`."""
        for stream in (self._client, *self.outward.streams):
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


def _destination(sock: socket.socket) -> tuple[str, int]:
    """Where the client connected to: the local address, since the listener is transparent."""
    address, port = sock.getsockname()[:2]
    return str(address), int(port)


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
