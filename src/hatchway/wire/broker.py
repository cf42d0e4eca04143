"""What control plane, node and gateways say to the broker, the one process that has secrets.

```
run/broker.sock       rpc: `METHODS`; the node grants and revokes, the control plane keeps sources. Peers are told apart by their user.
run/broker-leg.sock   one stream for each upstream connection of a request with a credential; gateways alone are served
```
A leg begins with one `Leg` (4-octet big-endian length, MessagePack), answered by one `LegAnswer` in the same form. Then it
carries HTTP/1.1 in both directions: the request as the gateway has checked and written it, without any credential; the broker
checks it against the grant once more, puts the credential in, speaks TLS with the upstream, and scrubs what comes back.
"""

from msgspec import field

from hatchway.wire.message import Empty, Struct

SOCKET = "broker.sock"
LEG_SOCKET = "broker-leg.sock"
MAX_LEG_HEAD = 64 * 1024


class Source(Struct, frozen=True, kw_only=True):
    """Where a secret comes from: `source.put` of the control plane. Exactly one of the kinds is given."""

    project: str
    name: str
    hosts: tuple[str, ...]
    """Names (in the grammar of policies) that this secret may ever be sent to, whatever a policy says."""
    value: bytes | None = None
    """Kept encrypted on the broker's disk; never answered."""
    variable: str | None = None
    """An environment variable of the broker."""
    file: str | None = None
    """A file in the broker's folder of secrets, by its name there."""
    vault: dict[str, str] | None = None
    """`address mount path field`, and `token_file` or `role_id_file` with `secret_id_file`: HashiCorp Vault, KV version 2."""
    version: int = 1


class SourceRef(Struct, frozen=True, kw_only=True):
    """Names a source for `source.delete`, which succeeds when it is gone, and `source.check`."""

    project: str
    name: str


class SourceCheck(Struct, frozen=True, kw_only=True):
    """Answer to `source.check`: whether the secret can be had now; never what it is."""

    available: bool
    error: str = ""


class Injection(Struct, frozen=True, kw_only=True):
    """Where a secret goes: `header` (`name`, `format` with one `{}`), `basic` (user in `name`), `query` (`name`)."""

    where: str
    name: str
    format: str = "{}"


class Binding(Struct, frozen=True, kw_only=True):
    """One credential of a sandbox, as its policy binds it."""

    credential_id: str
    source: str
    placeholder: str
    inject: tuple[Injection, ...]
    rules: tuple[str, ...] = ()
    """Ids of the rules that it is for."""
    hosts: tuple[str, ...] = ()
    """Names of those rules."""
    ports: tuple[int, ...] = (443,)
    methods: tuple[str, ...] = ()
    """None: all."""
    paths: tuple[str, ...] = ()
    scrub: bool = True
    lease_s: float = 3600.0


class Grant(Struct, frozen=True, kw_only=True):
    """`grant.put` of the node: what a sandbox's generation may use until `expires_at`; replaces what it had."""

    sandbox_id: str
    project: str
    generation: int
    revision: int
    bindings: tuple[Binding, ...]


class Granted(Struct, frozen=True, kw_only=True):
    """Answer to `grant.put`."""

    expires_at: float
    """When the node has to ask again (Unix seconds)."""
    unavailable: dict[str, str] = field(default_factory=dict)
    """Credentials that cannot be had now, and why: their routes are denied with `cred_unavailable`."""


class GrantRef(Struct, frozen=True, kw_only=True):
    """`grant.revoke`: at suspend and delete. Open legs are cut before the answer. `generation` 0: all of them."""

    sandbox_id: str
    generation: int = 0


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
    private: bool = False
    """The rule allows private addresses."""
    via: str = ""
    """URL of an upstream proxy; empty: direct."""
    upstream_ca: tuple[str, ...] = ()
    """PEM of authorities that are trusted instead of the system's."""
    tls_min: str = "1.2"


class LegAnswer(Struct, frozen=True, kw_only=True):
    """Whether the upstream is there. `error` is empty, or `cred_unavailable cred_not_bound resolve_failed connect_failed tls_failed`."""

    error: str = ""
    message: str = ""
    peer_address: str = ""
    certificate_sha256: str = ""


METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "source.put": (Source, SourceCheck),
    "source.delete": (SourceRef, Empty),
    "source.check": (SourceRef, SourceCheck),
    "grant.put": (Grant, Granted),
    "grant.revoke": (GrantRef, Empty),
}
"""Method name → (request, answer)."""
