"""What HTTP and the rest of the gateway know of each other.

The gateway accepts a connection, binds it to a name, judges it, ends the client's TLS, and then calls `Http.serve`. HTTP parses, asks
`BoundFlow.decide` for every request, dials by `BoundFlow.dial` or `BoundFlow.leg`, and returns when the client's stream is done. It is cancelled
when the flow is cut (policy narrowed, sandbox suspended): it then writes nothing more; the streams are closed by the gateway.

```
accept → name → connect → ClientHello → TLS │ serve:  parse → decide → ask → begin → dial | leg → relay → end
                                            │ refuse: 403 with the verdict, then close
```
"""

from collections.abc import Callable
from typing import Any, Protocol

from hatchway.domain.policy.compiled import Policy
from hatchway.domain.policy.verdicts import Request, Verdict
from hatchway.egress.shares import Shares


class FlowError(Exception):
    """The other side of a flow cannot be had. `reason` is a stable code, `explanation` and `remedy` are for people; `status` is what HTTP answers.

    `resolve_failed connect_failed tls_failed address_denied proxy_failed cred_unavailable cred_not_bound limit timeout`.
    """

    def __init__(self, reason: str, explanation: str, status: int = 502, remedy: str = "") -> None:
        super().__init__(f"{reason}: {explanation}")
        self.reason = reason
        self.explanation = explanation
        self.status = status
        self.remedy = remedy
        """Empty: the usual one."""


class StreamLost(ConnectionError):
    """The stream ended in the middle: reset, or TLS without a proper end (truncation)."""


class Stream(Protocol):
    """One end of a byte stream, in clear whatever lies under it. One task reads, one writes; they may be two."""

    async def read(self) -> bytes:
        """Returns what has arrived (at least one octet, at most some 256 KiB), or `b""` for good after the peer's proper end.

        Raises `StreamLost` when the stream ended in any other way. The peer is stopped while more than 64 KiB wait here.
        """
        ...

    def unread(self, data: bytes) -> None:
        """Puts octets back: the next `read` returns them first."""
        ...

    def write(self, data: bytes) -> None:
        """Sends, or queues. Nothing is raised: a lost stream is told by `drain` and `read`. Always `drain` between writes of bodies."""
        ...

    async def drain(self) -> None:
        """Waits until less than 64 KiB wait to be sent. Raises `StreamLost`."""
        ...

    def end(self) -> None:
        """Nothing more will be written: FIN, or close_notify. Reading goes on."""
        ...

    def close(self) -> None:
        """Sends what was written (for at most 10 s), then closes. May be repeated."""
        ...

    def abort(self) -> None:
        """Closes at once; a TCP peer gets RST. May be repeated."""
        ...

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls back once when the transport is gone, at once when it is already: what is done for a client that left need not go on."""
        ...

    @property
    def lost(self) -> bool:
        """The transport is gone: nobody reads any more what is written."""
        ...

    @property
    def buffered(self) -> int:
        """Octets that arrived and were not read yet."""
        ...


class Exchange(Protocol):
    """A request in flight. It is judged anew when the policy changes."""

    def count(self, out: int, into: int) -> None:
        """So many octets of its body, or of its messages, are about to go out, and came in. Raises `FlowError("byte_budget", …, 429)` when the
        rule's budget is used up: then they may not go."""
        ...

    def end(self) -> None:
        """It is over. May be repeated."""
        ...


class BoundFlow(Protocol):
    """A connection of a sandbox that is bound to a name, and may speak HTTP."""

    @property
    def sandbox_id(self) -> str:
        """Whose connection it is."""
        ...

    @property
    def project(self) -> str:
        """Whose sandbox it is."""
        ...

    @property
    def generation(self) -> int:
        """The sandbox's generation, which placeholders and leases belong to."""
        ...

    @property
    def host(self) -> str:
        """The canonical name that the gateway bound: `Host` and `:authority` have to be equal to it, the upstream's certificate too."""
        ...

    @property
    def port(self) -> int:
        """Where the client connected to; the upstream is dialled there too."""
        ...

    @property
    def tls(self) -> bool:
        """The client speaks TLS, and so does the upstream."""
        ...

    @property
    def alpn(self) -> str:
        """What was agreed with the client: `h2`, or `http/1.1` (also where nothing was said)."""
        ...

    @property
    def shares(self) -> Shares:
        """What its sandbox may use of the shard. What a client can have done as often as it likes waits for one of its turns."""
        ...

    def when_scarce(self, callback: Callable[[], None]) -> None:
        """`callback` is to close connections to the outside that are kept for later: the sandbox has as many as it may, and wants another."""
        ...

    @property
    def policy(self) -> Policy:
        """The policy of now; look it up anew for each request."""
        ...

    @property
    def placeholders(self) -> dict[str, str]:
        """Placeholder → credential id, for all credentials of the sandbox as of now."""
        ...

    def decide(self, request: Request) -> Verdict:
        """Judges a request under the policy of now. Counts it; does not record it: see `record`."""
        ...

    def judge(self, request: Request) -> Verdict:
        """The same without counting: for a request that was decided on, in the form in which it is sent."""
        ...

    async def ask(self, verdict: Verdict, request: Request) -> bool:
        """Holds a request whose verdict is `ask`, until somebody decides or its time is over. False: it is denied.

        Answered at once where an earlier answer still holds. False also when the client went away, which the end of what it sends counts as here. The asked decision is recorded here.
        """
        ...

    def begin(self, request: Request, verdict: Verdict, cut: Callable[[str], None], stream: Stream) -> Exchange:
        """A request goes upstream, over this stream: to be called for each that it is sent over, before the first octet of it.

        It is judged once more, since time went by. Raises `FlowError("policy_changed", …, 403)` where the policy of now does not let it pass on
        the same terms, or does not let it go where the stream leads. `cut(reason)` is called from the loop when a later policy does not allow
        it any more: it must abort the exchange at once (for HTTP/1.1: abort the client's stream), writing nothing more of it."""
        ...

    async def dial(
        self, request: Request, verdict: Verdict, alpn: tuple[str, ...] = ("http/1.1",)
    ) -> tuple[Stream, str]:
        """Returns a stream to a vetted address of the name, and what ALPN agreed on. TLS (verified for the name) where the flow is TLS.

        Raises `FlowError`. The stream is the caller's to close; it is also aborted when the flow is cut.
        """
        ...

    async def leg(self, request: Request, verdict: Verdict, credential: str) -> Stream:
        """Returns a stream to the broker, on which it serves requests of this rule with this credential (see `wire.broker`). Raises `FlowError`."""
        ...

    def record(
        self,
        kind: str,
        decision: str,
        verdict: Verdict | None = None,
        *,
        reason: str = "",
        data: dict[str, Any] | None = None,
    ) -> None:
        """Records what happened (`egress.request`, `egress.frames`, …). Raises `FlowError("audit_full", …, 503)` when no record can be taken:
        then nothing may go on. Record a request *before* the first octet of it goes upstream."""
        ...


class Http(Protocol):
    """What `egress.http` gives: `egress.http.session.HttpSession` is one."""

    async def serve(self, client: Stream, flow: BoundFlow) -> None:
        """Serves requests until the client is done. Closes no stream of the client; raises nothing that the client or upstream did."""
        ...

    async def refuse(self, client: Stream, flow: BoundFlow, verdict: Verdict) -> None:
        """The connection as such is denied: reads the first request within its bounds and answers it with 403 and the verdict."""
        ...
