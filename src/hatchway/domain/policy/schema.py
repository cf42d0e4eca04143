"""The schema of a policy document, version 1. docs/policy.md explains every field.

The structures say what there is, within which bounds; `reading` makes them from text and says all that is wrong with it;
`checks` holds what a structure cannot say. Text that stands for something is kept in its canonical form: names in lower case,
durations in seconds, sizes in octets, dates in UTC. `Meta(extra={"form": …})` names the reader of such a field (`forms`).
"""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from hatchway.domain.policy.vocabulary import Action, Protocol, TlsMode

MAX_RULES = 1000
MAX_CREDENTIALS = 64

Id = Annotated[str, Meta(pattern="^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?$", max_length=64, extra={"form": "id"})]
Host = Annotated[str, Meta(max_length=256, extra={"form": "host"})]
Name = Annotated[str, Meta(max_length=254, extra={"form": "name"})]
Cidr = Annotated[str, Meta(max_length=64, extra={"form": "cidr"})]
Address = Annotated[str, Meta(max_length=64, extra={"form": "address"})]
Port = Annotated[int | str, Meta(extra={"form": "port"})]
Path = Annotated[str, Meta(max_length=2048, extra={"form": "path"})]
Method = Annotated[str, Meta(max_length=32, extra={"form": "method"})]
Header = Annotated[str, Meta(max_length=64, extra={"form": "header"})]
HeaderValue = Annotated[str, Meta(max_length=4096, extra={"form": "header_value"})]
ValuePattern = Annotated[str, Meta(max_length=1024, extra={"form": "value"})]
Seconds = Annotated[float, Meta(ge=1, le=366 * 24 * 3600.0, extra={"form": "duration"})]
Octets = Annotated[int, Meta(ge=0, le=2**50, extra={"form": "size"})]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Date = Annotated[str, Meta(max_length=40, extra={"form": "date"})]
Pem = Annotated[str, Meta(max_length=16384, extra={"form": "pem"})]
Spki = Annotated[str, Meta(max_length=64, extra={"form": "spki"})]
Text = Annotated[str, Meta(max_length=500, extra={"form": "text"})]
Variable = Annotated[str, Meta(max_length=128, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Values = Annotated[tuple[ValuePattern, ...], Meta(max_length=32, extra={"form": "values"})]


class Base(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All parts of a document: unknown keys are refused, what is left out has a default that is not written either."""


class BuiltIn(StrEnum):
    """Groups of addresses that are there without being defined; for rules that deny."""

    PUBLIC = "public"
    PRIVATE = "private"
    LINK_LOCAL = "link_local"
    METADATA = "metadata"


class Group(Base, frozen=True, kw_only=True):
    """A set of destinations under a name."""

    hosts: Annotated[tuple[Host, ...], Meta(max_length=256)] = ()
    cidrs: Annotated[tuple[Cidr, ...], Meta(max_length=256)] = ()


class Destination(Base, frozen=True, kw_only=True):
    """`to`: where a rule is about. Names and addresses in one rule are alternatives."""

    hosts: Annotated[tuple[Host, ...], Meta(max_length=256)] = ()
    cidrs: Annotated[tuple[Cidr, ...], Meta(max_length=256)] = ()
    groups: Annotated[tuple[Id, ...], Meta(max_length=32)] = ()
    by_name: bool = False
    """Names that no rule is about may be reached too, where what they resolve to is in `cidrs`."""


class Tls(Base, frozen=True, kw_only=True):
    """How TLS is treated, and what is required of the upstream."""

    mode: TlsMode | None = None
    """Left out: `intercept`, or `none` for the protocol `tcp`."""
    min: Literal["1.2", "1.3"] = "1.2"
    upstream_ca: Annotated[tuple[Pem, ...], Meta(max_length=8)] = ()
    """Certificates of authorities that are trusted for this rule instead of the system's."""
    upstream_spki: Annotated[tuple[Spki, ...], Meta(max_length=8)] = ()
    """SHA-256 of a public key that the upstream's certificate must have one of, base64."""
    sni: Literal["required", "optional"] = "required"
    fronting_risk: Literal["accepted"] | None = None
    expires: Date | None = None


class Resolve(Base, frozen=True, kw_only=True):
    """How the name becomes an address to dial."""

    private: Literal["deny", "allow"] = "deny"
    pin: Annotated[tuple[Address, ...], Meta(max_length=16)] = ()
    """Dial one of these instead of asking a resolver."""
    rehome: bool = False
    """A connection to an address that no name was given is taken for one to the name that its SNI or `Host` says, if this rule is for it."""
    within: Annotated[tuple[Cidr, ...], Meta(max_length=4096)] = ()
    """Of the addresses that the name resolves to, those in one of these networks alone are dialled."""


class RequestMatch(Base, frozen=True, kw_only=True):
    """An entry of `http.allow` or `http.deny`: all that is given must hold."""

    methods: Annotated[tuple[Method, ...], Meta(max_length=32)] = ()
    """Left out: GET and HEAD where it allows, all where it denies. `*`: all but TRACE, TRACK and CONNECT, which never pass."""
    paths: Annotated[tuple[Path, ...], Meta(max_length=256)] = ("/**",)
    query: Annotated[dict[ValuePattern, Values], Meta(max_length=64)] | Literal["none"] | None = None
    """Allows when every parameter is named here (or by `*`) and fits; denies when one of those named fits. `none`: no query at all."""
    headers: Annotated[dict[Header, Values], Meta(max_length=32)] | None = None
    """Allows when each is there and all its values fit; denies when a value of one of them fits."""


class RequestHeaders(Base, frozen=True, kw_only=True):
    """What becomes of the request's header on its way out."""

    strip: Annotated[tuple[Header, ...], Meta(max_length=64)] = ()
    set: Annotated[dict[Header, HeaderValue], Meta(max_length=32)] = {}
    allow_only: Annotated[tuple[Header, ...], Meta(max_length=128)] | None = None


class ResponseHeaders(Base, frozen=True, kw_only=True):
    """What becomes of the response's header on its way in."""

    strip: Annotated[tuple[Header, ...], Meta(max_length=64)] = ()


class Sizes(Base, frozen=True, kw_only=True):
    """Largest requests, in octets. Left out: what the gateway takes at all."""

    url: Octets | None = None
    head: Octets | None = None
    body: Octets | None = None
    response: Octets | None = None


class Http(Base, frozen=True, kw_only=True):
    """Conditions of a rule for `http`, `websocket` or `git`."""

    versions: Annotated[tuple[Literal["1.1", "2"], ...], Meta(max_length=2)] = ("1.1", "2")
    allow: Annotated[tuple[RequestMatch, ...], Meta(max_length=128)] = ()
    """Left out: every request but TRACE, TRACK and CONNECT."""
    deny: Annotated[tuple[RequestMatch, ...], Meta(max_length=128)] = ()
    """Denied to these destinations, whatever other rules allow."""
    encoded_slash: bool = False
    """`%2F` may stand in a path."""
    request_headers: RequestHeaders = RequestHeaders()
    response_headers: ResponseHeaders = ResponseHeaders()
    max: Sizes = Sizes()


class WebSocket(Base, frozen=True, kw_only=True):
    """Bounds of a rule for `websocket`."""

    max_frame: Octets = 65536
    text_only: bool = False
    bytes_out_per_hour: Octets | None = None


class Git(Base, frozen=True, kw_only=True):
    """Conditions of a rule for `git`: smart HTTP."""

    operations: Annotated[tuple[Literal["fetch", "push"], ...], Meta(max_length=2)] = ("fetch",)
    repositories: Annotated[tuple[Path, ...], Meta(max_length=256)] = ("/**",)
    """Paths, with or without `.git` at their end."""


class ClientAuth(StrEnum):
    """Whether requests may carry credentials of the client's own."""

    FORBID = "forbid"
    PLACEHOLDER_ONLY = "placeholder_only"
    """Placeholders of this sandbox, where they are exchanged, and nothing else."""
    ALLOW = "allow"


class Ask(Base, frozen=True, kw_only=True):
    """How a held request is asked about."""

    scope: Literal["once", "session", "ttl"] = "session"
    """How long an answer may hold at most: for this request, until the sandbox stops or its policy changes, or `ttl`. Who answers chooses within it."""
    ttl: Seconds = 900.0
    key: Annotated[tuple[Literal["host", "port", "method", "path", "query", "rule"], ...], Meta(max_length=6)] = (
        "host",
        "port",
        "method",
        "path",
    )
    """What must be the same for an answer to hold for another request."""
    timeout: Annotated[float, Meta(ge=1, le=3600.0, extra={"form": "duration"})] = 120.0


class Rate(Base, frozen=True, kw_only=True):
    """Bounds of a rule, for each sandbox."""

    connections_per_min: Count | None = None
    requests_per_min: Count | None = None
    concurrent: Count | None = None
    bytes_out_per_hour: Octets | None = None


class Route(Base, frozen=True, kw_only=True):
    """By which way it leaves. Others than `direct` are defined by the operator of the gateway, under a name."""

    via: Annotated[str, Meta(max_length=80, pattern="^(direct|(socks5|http):[a-z0-9][a-z0-9._-]{0,63})$")] = "direct"


class Rule(Base, frozen=True, kw_only=True):
    """One rule."""

    id: Id
    to: Destination
    ports: Annotated[tuple[Port, ...], Meta(max_length=64)] = ()
    """Left out: 443 (80 with `tls.mode: none`) for what is HTTP, 443 for `tls`; all for a rule that denies. `tcp` names them."""
    special_ports: Literal["accepted"] | None = None
    """25 and 853 are meant."""
    protocol: Protocol | None = None
    """Left out: `http`; any for a rule that denies."""
    tls: Tls = Tls()
    resolve: Resolve = Resolve()
    http: Http = Http()
    websocket: WebSocket = WebSocket()
    git: Git | None = None
    client_auth: ClientAuth | None = None
    """Left out: as `defaults` says."""
    credentials: Annotated[tuple[Id, ...], Meta(max_length=16)] = ()
    action: Action = Action.ALLOW
    ask: Ask = Ask()
    rate: Rate = Rate()
    route: Route = Route()
    reason: Text = ""
    """Shown to whoever is denied by it."""
    expires: Date | None = None


class Injection(Base, frozen=True, kw_only=True):
    """Where the secret goes."""

    where: Literal["header", "basic", "query"]
    name: Annotated[str, Meta(max_length=128, pattern="^[A-Za-z0-9._~-]+$")] = "authorization"
    """Of the header or parameter; the user of `basic`."""
    format: Annotated[str, Meta(max_length=256, extra={"form": "format"})] = "{}"


class Expose(Base, frozen=True, kw_only=True):
    """Where the guest finds the placeholder."""

    env: Variable
    """A variable of the environment of all that runs in the sandbox."""


class Only(Base, frozen=True, kw_only=True):
    """Narrows the requests that get the secret."""

    rules: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    methods: Annotated[tuple[Method, ...], Meta(max_length=32)] = ()
    paths: Annotated[tuple[Path, ...], Meta(max_length=256)] = ()


class Response(Base, frozen=True, kw_only=True):
    """What becomes of answers to requests that got the secret."""

    scrub: bool = True


class Lease(Base, frozen=True, kw_only=True):
    """How long the secret is lent at a time."""

    ttl: Seconds = 3600.0


class Credential(Base, frozen=True, kw_only=True):
    """A secret that requests get on their way out. Where it is comes from the operator; its value is never here."""

    id: Id
    source: Annotated[str, Meta(max_length=160, pattern="^store:[a-z0-9][a-z0-9._/-]{0,127}$")]
    inject: Annotated[tuple[Injection, ...], Meta(min_length=1, max_length=8)]
    placeholder: Annotated[str, Meta(max_length=32, pattern="^(auto|[A-Za-z0-9_-]{1,32})$")] = "auto"
    """`auto`, or what the placeholder begins with, for clients that look at the form of a token."""
    expose: Expose | None = None
    only: Only = Only()
    response: Response = Response()
    lease: Lease = Lease()


class Defaults(Base, frozen=True, kw_only=True):
    """What rules have that do not say otherwise."""

    client_auth: ClientAuth = ClientAuth.FORBID
    deny_reply: Literal["json", "text"] | None = None
    """How a denied request is answered that asks for neither. Left out: `json`."""


class Dns(Base, frozen=True, kw_only=True):
    """Answers to the guest's questions."""

    answer: Literal["synthetic", "nodata"] = "synthetic"
    max_names: Annotated[int, Meta(ge=1, le=65536)] | None = None
    wildcard_names_per_min: Count | None = None
    """New names under wildcards, so that questions carry little out."""
    records: Annotated[dict[Name, Annotated[tuple[Address, ...], Meta(max_length=16)]], Meta(max_length=256)] = {}
    """Where names are, instead of asking a resolver; the addresses are judged all the same."""


class Limits(Base, frozen=True, kw_only=True):
    """Bounds of a sandbox. Of several documents the lowest holds; above the defaults only the platform and the project can go."""

    connections: Annotated[int, Meta(ge=1, le=4096)] | None = None
    pending_ask: Annotated[int, Meta(ge=1, le=256)] | None = None
    buffer: Annotated[int, Meta(ge=65536, le=2**30, extra={"form": "size"})] | None = None
    dns_per_s: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    connections_per_s: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class Lifecycle(Base, frozen=True, kw_only=True):
    """What becomes of open flows."""

    on_policy_change: Literal["recheck_flows", "close_flows"] = "recheck_flows"
    on_suspend: Literal["close_flows"] = "close_flows"
    on_fork: Literal["new_identity"] = "new_identity"


class Document(Base, frozen=True, kw_only=True):
    """A policy document."""

    version: Literal[1]
    description: Text = ""
    mode: Literal["enforce", "observe"] = "enforce"
    """`observe`: what it and the lack of a rule would deny passes and is recorded, until `expires`."""
    expires: Date | None = None
    default: Literal["deny", "ask"] = "deny"
    ceiling: bool = False
    """Its rules give nothing; they bound what others give: what they do not allow, no document can."""
    private_networks: Annotated[tuple[Cidr, ...], Meta(max_length=64)] | None = None
    """Private networks that documents of lower tiers may allow."""
    defaults: Defaults = Defaults()
    dns: Dns = Dns()
    groups: Annotated[dict[Id, Group], Meta(max_length=64)] = {}
    rules: Annotated[tuple[Rule, ...], Meta(max_length=MAX_RULES)] = ()
    credentials: Annotated[tuple[Credential, ...], Meta(max_length=MAX_CREDENTIALS)] = ()
    limits: Limits = Limits()
    lifecycle: Lifecycle = Lifecycle()


LATER: dict[str, str] = {
    "use": "Store the documents as policies of their own; tiers put them together.",
    "tier": "The tier is where a document is stored, not what it says of itself.",
    "inference": "Use a rule with a credential for the model's host.",
    "audit": "What the audit log holds is the operator's choice.",
    "graphql": "Bound the paths and methods instead.",
    "jsonrpc": "Bound the paths and methods instead.",
    "mcp": "Bound the paths and methods instead.",
    "grpc": "Use `http` with paths: a gRPC method is a path.",
    "postgres": "Use `tcp` with the server's name and port.",
    "ssh": "Use `tcp`, which is a whole tunnel, or `git` over HTTPS.",
    "sigv4": "Let a service beside the sandbox sign.",
    "oauth": "Keep a token that was made elsewhere as the source.",
    "service": "Name the host or the network.",
    "body": "Use `header`, `basic` or `query`.",
    "ws_text": "Use `header`, `basic` or `query`.",
    "hmac": "Let a service beside the sandbox sign.",
    "jwt_exchange": "Keep a token that was made elsewhere as the source.",
    "mtls": "Let a service beside the sandbox speak for it.",
    "on_violation": "A placeholder where it is not exchanged always ends the request, and is recorded.",
    "approvers": "Who may approve is a matter of keys.",
    "log": "Every decision is recorded, and no body.",
    "file": "Use `env`.",
    "seal": "Do not let the paths pass that answer secrets.",
}
"""Keys and values of the language that this version has not, with what to do instead."""
