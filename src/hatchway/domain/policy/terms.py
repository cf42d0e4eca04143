"""What whoever carries out a decision has to know of the rule that it rests on."""

import msgspec

from hatchway.domain.policy.addresses import Address, Network
from hatchway.domain.policy.schema import (
    ClientAuth,
    Credential,
    Rate,
    RequestHeaders,
    ResponseHeaders,
    Route,
    Sizes,
    WebSocket,
)
from hatchway.domain.policy.vocabulary import Protocol, RuleRef, TlsMode


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms on which something passes: those of one rule, or plain ones where it passes without a rule (observed, asked by default)."""

    rule: RuleRef | None = None
    protocol: Protocol = Protocol.HTTP
    tls: TlsMode = TlsMode.INTERCEPT
    tls_min: str = "1.2"
    upstream_ca: tuple[str, ...] = ()
    """PEM of authorities that are trusted instead of the system's."""
    upstream_spki: tuple[str, ...] = ()
    """SHA-256 of public keys, base64; the upstream's certificate has one of them."""
    sni: str = "required"
    private: tuple[Network, ...] = ()
    """Where private addresses may be dialled."""
    pin: tuple[Address, ...] = ()
    """Dialled instead of what a resolver says."""
    rehome: bool = False
    within: tuple[tuple[Network, ...], ...] = ()
    """An address that is dialled is in some network of each of these."""
    versions: tuple[str, ...] = ("1.1", "2")
    encoded_slash: bool = False
    request_headers: RequestHeaders = RequestHeaders()
    response_headers: ResponseHeaders = ResponseHeaders()
    max: Sizes = Sizes()
    websocket: WebSocket = WebSocket()
    client_auth: ClientAuth = ClientAuth.FORBID
    credentials: tuple[str, ...] = ()
    """Ids (`Policy.credentials`) of all that the rule binds. What one request gets, its verdict says."""
    rate: Rate = Rate()
    route: Route = Route()
    reason: str = ""
    expires: float | None = None
    """Unix seconds at which the rule ends."""
    under: tuple["Terms", ...] = ()
    """Those of the ceilings' rules beneath which it passes, as these say them: what is counted is counted for each."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a sandbox, as its documents together set them; the values here are the defaults."""

    connections: int = 256
    """Open flows."""
    pending_ask: int = 16
    buffer: int = 8 * 1024 * 1024
    """Octets on their way, over all flows."""
    dns_per_s: int = 50
    connections_per_s: int = 200
    max_names: int = 4096
    """Names that have an address."""
    wildcard_names_per_min: int = 60
    """New names under wildcards."""


class BoundCredential(msgspec.Struct, frozen=True, kw_only=True):
    """A credential with the rules that it is for, as the broker binds it."""

    credential_id: str
    """The document's id for it; where a document above has the same, `tier/document/id`."""
    tier: str
    document: str
    credential: Credential
    rules: tuple[str, ...]
    """Ids of the rules of the same document that have it."""
    hosts: tuple[str, ...]
    """Host patterns of those rules."""
    ports: tuple[int | str, ...]
    methods: tuple[str, ...]
    """None: all that the rules allow."""
    paths: tuple[str, ...]
    """None: all that the rules allow."""
