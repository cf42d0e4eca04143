"""What is asked of a policy, and what it answers. `compiled.Policy` has one method for each stage of a flow.

The stages, in the order in which a gateway asks; a later one can only be stricter, and each is asked anew when the policy changes:

1. `name(host, now)`: may this name be given an address at all? Allowed when any rule that is not for addresses could let a flow to it pass.
2. `connect(Flow, now)`: a TCP connection to a name that was given an address, or to an address as such (`cidrs` rules only).
3. `request(Request, now)`: one HTTP request on an intercepted flow, after it was brought into canonical form.
4. `address(address, port, verdict, now)`: may this address, which the name resolved to, be dialled for that verdict?

Nothing matched means `deny` with the reason `no_rule`. Rules have no order: deny beats ask beats allow, over all tiers; `allow` of a lower tier
never lifts `deny` of a higher one.
"""

import msgspec

from hatchway.domain.policy.schema import Ask
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.vocabulary import Action, Protocol, RuleRef, TlsMode

__all__ = ["Action", "Flow", "Protocol", "Request", "RuleRef", "TlsMode", "Verdict"]


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
    """`paths.canonical_path` of what came, without query: it is matched, and it is what is forwarded."""
    query: str = ""
    """As sent, without `?`."""
    headers: tuple[tuple[str, str], ...] = ()
    """Names in lower case, in the order in which they came: those that go on, none of which belongs to one connection alone."""
    websocket: bool = False
    version: str = "1.1"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, with all that whoever carries it out has to know of the rule that it rests on."""

    action: Action
    reason: str
    """Stable code. Of what passes: `allowed observed ask`. Of what does not: `no_rule denied_by_rule platform_denied method_not_allowed
    path_not_allowed query_not_allowed header_not_allowed port_not_allowed protocol_not_allowed tls_required clear_required version_not_allowed
    websocket_not_allowed path_ambiguous expired beyond_ceiling inspection_required private_denied address_not_allowed dst_unbound`."""
    explanation: str = ""
    """For people: what was looked at, and what would have to be in the policy for it to pass."""
    rule: RuleRef | None = None
    observed: bool = False
    """It would have been denied, and passes because the policy only observes, until `expires`."""
    protocol: Protocol | None = None
    """At `connect`: `http` when requests are to be looked at (whichever of `http websocket git`), else `tls` or `tcp`."""
    tls: TlsMode = TlsMode.INTERCEPT
    credentials: tuple[str, ...] = ()
    """Ids of the credentials that this very request gets."""
    versions: tuple[str, ...] = ()
    """At `connect`, of HTTP: versions that some rule for the flow takes."""
    terms: Terms | None = None
    """On which terms it passes; None when it does not. With `ask`, those that hold once it is allowed."""
    ask: Ask | None = None
    """With `ask`: how it is asked about."""
    ask_key: str = ""
    """With `ask`: what an answer that holds for longer than once holds for."""
