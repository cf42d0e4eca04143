"""What the node says to a gateway process (a shard) and hears from it.

Requests and events travel by `wire.rpc` over the shard's Unix socket; `METHODS` names them. Descriptors cannot: the listeners of
a sandbox's network slot come before, over a second socket (SOCK_SEQPACKET, `FDS_SOCKET`), as one JSON datagram `Listeners` with
the descriptors in the order of `LISTENERS`, answered by `ListenersTaken` or `ListenersRefused`. Only the node's user is served on both.

```
run/egress-K.sock   rpc      run/egress-K.fds   descriptors      K = 0 … shards - 1; a project is always on the same one
```
A shard keeps nothing on disk. What it must know again after its end the node tells it anew: the node fetches the listeners
from the launcher, which holds them, so that a connection that waits meanwhile is served by the next process.
"""

import zlib

from msgspec import field

from hatchway.wire.message import Empty, Struct

SOCKET = "egress-{shard}.sock"
FDS_SOCKET = "egress-{shard}.fds"
LISTENERS = ("tcp", "dns_udp", "dns_tcp")
"""What each descriptor is: a transparent TCP listener for every port but 53, a UDP socket and a TCP listener for port 53.

The UDP socket is bound to port 53 and says with each question which address was asked (IP_RECVORIGDSTADDR, IP_PKTINFO): an answer comes
from there when it is sent with IP_PKTINFO whose `ipi_spec_dst` is that address. A connection's `getsockname()` is what the guest dialled.
All are non-blocking; the files behind the descriptors are shared with the launcher and the shim, so nobody changes their modes.
"""

GATEWAY_ADDRESS = "10.200.0.1"
GUEST_ADDRESS = "10.200.0.2"
"""The same in every sandbox, so that any snapshot fits any slot."""
SYNTHETIC_RANGE = "198.18.0.0/15"
"""Where the addresses of names come from: no host is ever there (RFC 2544)."""


def shard_of(project: str, shards: int) -> int:
    """Which shard serves the sandboxes of a project."""
    return zlib.crc32(project.encode()) % shards


class Listeners(Struct, frozen=True, kw_only=True):
    """The datagram that brings the listeners of a sandbox. Kept for a minute for the `gateway.open` that follows."""

    sandbox_id: str
    generation: int


class ListenersTaken(Struct, frozen=True, kw_only=True, tag="taken"):
    """They are held."""


class ListenersRefused(Struct, frozen=True, kw_only=True, tag="refused"):
    """They are closed again. `message` says why."""

    message: str


class PolicyDocument(Struct, frozen=True, kw_only=True):
    """One document of a sandbox's policy, and at which tier it stands."""

    tier: str
    """`platform project template sandbox`."""
    name: str
    version: int
    """As the control plane counts its changes."""
    text: str
    """JSON of the schema of `domain.policy`; it was accepted when it was stored."""


class CredentialSpec(Struct, frozen=True, kw_only=True):
    """A credential that a sandbox may use: its binding and this generation's placeholder, never its value."""

    credential_id: str
    placeholder: str
    """What the guest has in its place; worth nothing anywhere else."""


class EgressSpec(Struct, frozen=True, kw_only=True):
    """All that decides what leaves a sandbox. `revision` grows with every change of any part."""

    revision: int
    documents: tuple[PolicyDocument, ...] = ()
    """None at all: everything is denied."""
    credentials: tuple[str, ...] | None = None
    """Ids of the credentials that it may use, of those that its documents bind; None: all of them."""


class EgressState(Struct, frozen=True, kw_only=True):
    """How far the policy of a sandbox holds, as its node sees it; part of what the node tells of a sandbox."""

    revision: int
    """The newest that is in force: 0 where nothing was ever said, and nothing leaves."""
    conditions: dict[str, str] = field(default_factory=dict)
    """What keeps it from what its policy allows, by code, for people: `network_unavailable` (no slot with a network), `gateway_unavailable`
    (its gateway is not served now), `policy_rejected` (the gateway kept the former one), `credentials_unavailable`. Whichever it is,
    nothing passes that the policy does not allow."""


class GatewaySpec(Struct, frozen=True, kw_only=True):
    """`gateway.open`: begins to serve a sandbox. Asked again with the same generation, it takes the policy and answers the same."""

    sandbox_id: str
    project: str
    generation: int
    egress: EgressSpec
    credentials: tuple[CredentialSpec, ...] = ()
    ca_key: bytes = b""
    """PKCS #8 DER of the key that this sandbox's authority signs with (P-256). Empty: a new one is made and answered."""


class GatewayOpened(Struct, frozen=True, kw_only=True):
    """Answer to `gateway.open` and `gateway.policy`."""

    ca_key: bytes
    ca_certificate: str
    """PEM of the authority that the guest has to trust, constrained to the names that the policy allows. It changes with them."""
    revision: int


class GatewayPolicy(Struct, frozen=True, kw_only=True):
    """`gateway.policy`: replaces policy and credentials; open flows that it does not allow any more are cut before the answer.

    `Unprocessable("invalid_policy")` leaves the former one in force.
    """

    sandbox_id: str
    generation: int
    egress: EgressSpec
    credentials: tuple[CredentialSpec, ...] = ()


class GatewayRef(Struct, frozen=True, kw_only=True):
    """Names a sandbox for `gateway.close` (cuts all flows, forgets; succeeds when it is not there), `gateway.cut` (cuts the flows, goes on) and `gateway.status`."""

    sandbox_id: str
    generation: int


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """Answer to `gateway.status`: counts since it was opened here, and what is open now."""

    sandbox_id: str
    generation: int
    revision: int
    flows: int = 0
    asks: int = 0
    allowed: int = 0
    denied: int = 0
    bytes_out: int = 0
    """To the outside."""
    bytes_in: int = 0
    denied_by: dict[str, int] = field(default_factory=dict)
    """By reason."""


class GatewayList(Struct, frozen=True, kw_only=True):
    """Answer to `gateway.list`: which sandboxes are served here."""

    gateways: tuple[GatewayRef, ...]


class Asked(Struct, frozen=True, kw_only=True):
    """Event `gateway.asked`: a request is held until somebody decides; nothing of it has left. Without an answer it is denied at `expires_at`."""

    ask_id: str
    sandbox_id: str
    project: str
    generation: int
    rule: str
    host: str
    port: int
    protocol: str
    method: str = ""
    path: str = ""
    key: str = ""
    """What an answer for longer than once holds for, in the canonical form of the rule's `ask.key`."""
    reason: str = ""
    asked_at: float = 0.0
    expires_at: float = 0.0


class AskAnswer(Struct, frozen=True, kw_only=True):
    """`gateway.answer`: the decision about an ask. One that is gone is answered the same."""

    ask_id: str
    sandbox_id: str
    generation: int
    allow: bool
    scope: str = "once"
    """`once`, `session` (until the sandbox stops, or its policy changes) or `ttl`."""
    ttl_s: float = 0.0
    approver: str = ""


class AskList(Struct, frozen=True, kw_only=True):
    """Answer to `gateway.asks`: what is held now."""

    asks: tuple[Asked, ...]


class AskEnded(Struct, frozen=True, kw_only=True):
    """Event `gateway.ask_ended`: an ask is no longer held: `timeout`, `client_gone`, `policy_changed`, `closed`."""

    ask_id: str
    sandbox_id: str
    why: str


class GatewayRenewed(Struct, frozen=True, kw_only=True):
    """Event `gateway.renewed`: the authority has another certificate, since half of the former's time is over, or something of the policy ended."""

    sandbox_id: str
    generation: int
    ca_certificate: str


METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "gateway.open": (GatewaySpec, GatewayOpened),
    "gateway.policy": (GatewayPolicy, GatewayOpened),
    "gateway.cut": (GatewayRef, Empty),
    "gateway.close": (GatewayRef, Empty),
    "gateway.status": (GatewayRef, GatewayStatus),
    "gateway.list": (Empty, GatewayList),
    "gateway.asks": (Empty, AskList),
    "gateway.answer": (AskAnswer, Empty),
}
"""Method name → (request, answer). Events: `gateway.asked` (`Asked`), `gateway.ask_ended` (`AskEnded`), `gateway.renewed` (`GatewayRenewed`)."""

FdsAnswer = ListenersTaken | ListenersRefused
