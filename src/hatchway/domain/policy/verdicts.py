"""What is asked of a policy, and what it answers. `compiled.Policy` has one method for each stage of a flow.

The stages, in the order in which a gateway asks; a later one can only be stricter, and each is asked anew when the policy changes:

1. `name(host, now)`: may this name be given an address at all? Allowed when any rule that is not for addresses could let a flow to it pass.
2. `connect(Flow, now)`: a TCP connection to a name that was given an address, or to an address as such (`cidrs` rules only).
3. `request(Request, now)`: one HTTP request on an intercepted flow, after it was brought into canonical form.

Nothing matched means `deny` with the reason `no_rule`. Rules have no order: deny beats ask beats allow, over all tiers; `allow` of a lower tier
never lifts `deny` of a higher one.
"""

from enum import StrEnum

import msgspec


class Action(StrEnum):
    """What is done, the strictest last."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


class Protocol(StrEnum):
    """What a rule speaks; later ones (`grpc graphql mcp postgres …`) are further members."""

    TCP = "tcp"
    TLS = "tls"
    HTTP = "http"
    WEBSOCKET = "websocket"
    GIT = "git"


class TlsMode(StrEnum):
    """Whether the gateway ends TLS itself."""

    INTERCEPT = "intercept"
    PASSTHROUGH = "passthrough"
    NONE = "none"
    """The rule is for traffic in clear."""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection. Exactly one of `host` and `address` is set: the canonical name that the gateway bound, or a literal address."""

    host: str | None = None
    address: str | None = None
    port: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request in canonical form (see `domain.policy.paths`)."""

    host: str
    port: int
    tls: bool
    method: str
    path: str
    """Decoded once where that is safe, without query; begins with `/`."""
    query: str = ""
    """As sent, without `?`."""
    headers: tuple[tuple[str, str], ...] = ()
    """Names in lower case, in the order in which they came."""
    websocket: bool = False
    version: str = "1.1"


class RuleRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rule stands."""

    tier: str
    document: str
    rule: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, with all that whoever carries it out has to know of the rule that it rests on."""

    action: Action
    reason: str
    """Stable code: `allowed no_rule denied_by_rule platform_denied method_not_allowed path_not_allowed port_not_allowed tls_required
    passthrough expired observed ask …`."""
    explanation: str = ""
    """For people: what was looked at, and what would have to be in the policy for it to pass."""
    rule: RuleRef | None = None
    observed: bool = False
    """It would have been denied, and passes because the policy only observes, until `expires`."""
    protocol: Protocol | None = None
    tls: TlsMode = TlsMode.INTERCEPT
    credentials: tuple[str, ...] = ()
    """Ids of the credentials that this very request gets."""
