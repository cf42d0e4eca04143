"""What control plane, node and gateways say to the broker, the one process that has secrets.

```
run/broker.sock       rpc: `METHODS`; the node grants and revokes, the control plane keeps sources. Peers are told apart by their user.
run/broker-leg.sock   one stream for each upstream connection of a request with a credential; gateways alone are served
```
A leg begins with one `Leg` (4-octet big-endian length, MessagePack), answered by one `LegAnswer` in the same form. Then it
carries HTTP/1.1 in both directions: the request as the gateway has checked and written it, without any credential; the broker
checks it against the grant once more, puts the credential in, speaks TLS with the upstream, and scrubs what comes back.
What the broker itself refuses it answers with a problem document and the header `LEG_ERROR`, which no upstream can send: it is
taken out of every response.

What decides where a secret goes is in the grant, which comes from the node, never in the leg: who holds a gateway process can
ask for what the policy allows, and for nothing else.
"""

from hatchway.wire.message import Empty, Struct

SOCKET = "broker.sock"
LEG_SOCKET = "broker-leg.sock"
MAX_LEG_HEAD = 64 * 1024
LEG_ERROR = "hatchway-leg-error"
"""Header of an answer that is the broker's own: its code. `cred_unavailable cred_not_bound request_refused upstream_failed
response_refused audit_unavailable`."""
MAX_LEASE_S = 3600.0
"""The longest that a grant holds without being renewed."""


class VaultPath(Struct, frozen=True, kw_only=True):
    """One field of a secret in HashiCorp Vault, KV version 2."""

    server: str
    """As the broker's configuration calls it: address, namespace and how to log in are there."""
    mount: str
    path: str
    field: str


class Source(Struct, frozen=True, kw_only=True):
    """Where a secret comes from: `source.put` of the control plane. Exactly one of the kinds is given.

    A later version replaces an earlier one at once, for what is open too. `Conflict("stale_version")` for an earlier one.
    """

    project: str
    name: str
    hosts: tuple[str, ...]
    """Names (in the grammar of policies) that this secret may ever be sent to, whatever a policy says."""
    value: bytes | None = None
    """Kept encrypted on the broker's disk; never answered."""
    variable: str | None = None
    """An environment variable of the broker, one that its configuration lists for the project."""
    file: str | None = None
    """A file in the broker's folder of secrets, by its name there; one that its configuration lists for the project."""
    vault: VaultPath | None = None
    version: int = 1

    def __repr__(self) -> str:
        kind = next(
            (kind for kind in ("value", "variable", "file", "vault") if getattr(self, kind) is not None), "none"
        )
        return f"Source({self.project}/{self.name}, {kind}, version {self.version})"


class SourceRef(Struct, frozen=True, kw_only=True):
    """Names a source for `source.delete`, which succeeds when it is gone, and `source.check`. Without a name: all of the project (delete alone)."""

    project: str
    name: str = ""


class SourceCheck(Struct, frozen=True, kw_only=True):
    """Answer to `source.put` and `source.check`: whether the secret can be had now; never what it is."""

    available: bool
    error: str = ""
    """Why not, for people."""
    version: int = 0
    """Which version of the source the broker has; 0: none."""


class Rotated(Struct, frozen=True, kw_only=True):
    """Answer to `store.rotate`: the sources are sealed with a new master key, and the old one is gone."""

    key_id: str
    sealed: int
    """How many."""


class Injection(Struct, frozen=True, kw_only=True):
    """Where a secret goes: `header` (`name`, `format` with one `{}`), `basic` (user in `name`), `query` (`name`)."""

    where: str
    name: str
    format: str = "{}"


class Allowed(Struct, frozen=True, kw_only=True):
    """Requests that a rule lets pass."""

    methods: tuple[str, ...] = ()
    """None: all."""
    paths: tuple[str, ...] = ()
    """Patterns of paths; none: all."""


class Binding(Struct, frozen=True, kw_only=True):
    """One credential of a sandbox, as its policy binds it.

    A credential whose rules differ in hosts, ports or in how the upstream is reached has a binding for each of them.
    """

    credential_id: str
    source: str
    placeholder: str
    inject: tuple[Injection, ...]
    rules: tuple[str, ...] = ()
    """Ids of the rules that it is for; none: it is for no rule."""
    hosts: tuple[str, ...] = ()
    """Names of those rules, in the grammar of policies."""
    ports: tuple[int, ...] = (443,)
    methods: tuple[str, ...] = ()
    """None: all."""
    paths: tuple[str, ...] = ()
    """Patterns of paths; none: all."""
    allow: tuple[Allowed, ...] = ()
    """What the rules let pass, of which a request has to be one; none: all. `methods` and `paths` hold besides."""
    encoded_slash: bool = False
    """The rule lets `%2F` pass in paths."""
    websocket: bool = False
    """The rule lets a request become a WebSocket."""
    private: tuple[str, ...] = ()
    """Networks whose private addresses the rule allows."""
    upstream_ca: tuple[str, ...] = ()
    """PEM of authorities that are trusted instead of the system's."""
    upstream_spki: tuple[str, ...] = ()
    """SHA-256 of public keys, Base64; the upstream's certificate has one of them. None: any."""
    tls_min: str = "1.2"
    scrub: bool = True
    """The secret is taken out of what comes back."""
    set_cookie: bool = True
    """The upstream may set cookies."""
    lease_s: float = MAX_LEASE_S
    """How long the grant of it holds without being renewed; at most `MAX_LEASE_S`."""


class Grant(Struct, frozen=True, kw_only=True):
    """`grant.put` of the node: what a sandbox's generation may use until `expires_at`; replaces what it had.

    Open legs that it does not allow any more are cut before the answer. `Conflict("stale_generation")` where a later generation was granted.
    """

    sandbox_id: str
    project: str
    generation: int
    revision: int
    bindings: tuple[Binding, ...]


class Granted(Struct, frozen=True, kw_only=True):
    """Answer to `grant.put`."""

    expires_at: float
    """When the first of it ends unless the node asks again before (Unix seconds)."""
    unavailable: dict[str, str] = {}
    """Credentials that cannot be had now, and why: their routes are denied with `cred_unavailable`."""


class GrantRef(Struct, frozen=True, kw_only=True):
    """`grant.revoke`: at suspend and delete. Open legs are cut before the answer. `generation` 0: all of them."""

    sandbox_id: str
    generation: int = 0


class GrantList(Struct, frozen=True, kw_only=True):
    """Answer to `grant.list`: every grant that is in force, for a node that does not know what was granted before it began."""

    grants: tuple[GrantRef, ...] = ()


class Leg(Struct, frozen=True, kw_only=True):
    """The head of a leg: one upstream connection for requests of one rule and credential."""

    sandbox_id: str
    project: str
    generation: int
    credential_id: str
    rule: str
    host: str
    """The canonical name: of the certificate, of `Host`, and of the match."""
    port: int
    addresses: tuple[str, ...]
    """Where the gateway found it, vetted; the broker vets them again and dials no other."""
    via: str = ""
    """URL of an upstream proxy, one that the broker's configuration has too; empty: direct."""


class LegAnswer(Struct, frozen=True, kw_only=True):
    """Whether the upstream is there. `error` is empty, or `cred_unavailable cred_not_bound address_denied connect_failed proxy_failed tls_failed
    limit audit_unavailable`."""

    error: str = ""
    message: str = ""
    remedy: str = ""
    peer_address: str = ""
    certificate_sha256: str = ""


METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "source.put": (Source, SourceCheck),
    "source.delete": (SourceRef, Empty),
    "source.check": (SourceRef, SourceCheck),
    "store.rotate": (Empty, Rotated),
    "grant.put": (Grant, Granted),
    "grant.revoke": (GrantRef, Empty),
    "grant.list": (Empty, GrantList),
}
"""Method name → (request, answer)."""
