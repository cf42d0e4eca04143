"""What a structure cannot say: how the parts of a document must fit together. Each finding: place, code, cause, remedy."""

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_network

from hatchway.domain.policy.addresses import AddressKind, classify
from hatchway.domain.policy.forms import seconds_of
from hatchway.domain.policy.names import HostPattern
from hatchway.domain.policy.ports import ports_of
from hatchway.domain.policy.schema import BuiltIn, ClientAuth, Credential, Document, RequestHeaders, Rule
from hatchway.domain.policy.suffixes import is_public_suffix
from hatchway.domain.policy.text import Place
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Action, Protocol, TlsMode

Finding = tuple[Place, str, str, str]

_OURS = frozenset(
    {
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "upgrade",
        "te",
        "trailer",
        "expect",
        "proxy-connection",
    }
)
"""Headers that say how the message goes over the wire: the gateway writes them."""
_SECRET = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "private-token", "x-auth-token"})
DNS_PORT = 53
MAX_DESTINATIONS = 4096
LONGEST_OBSERVE_S = 31 * 86400.0
LONGEST_PASSTHROUGH_S = 366 * 86400.0
SPECIAL_PORTS = frozenset({25, 853})


def check(document: Document, now: float | None) -> Iterator[Finding]:
    """All that is wrong with a document whose parts are each well-formed."""
    yield from _dates(document, now)
    yield from _once(document)
    destinations = sum(
        len(hosts_of(document, rule)) + len(networks_of(document, rule)) + len(rule.resolve.within)
        for rule in document.rules
    )
    if destinations > MAX_DESTINATIONS:
        yield (
            ("rules",),
            "too_many",
            f"Its rules have {destinations} hosts and networks, those of groups counted for each rule; {MAX_DESTINATIONS} are the bound.",
            "Split it into several documents.",
        )
    for name, group in document.groups.items():
        if name in set(BuiltIn):
            yield ("groups", name), "reserved", f"`{name}` is a group that is there already.", "Give it another name."
        if not group.hosts and not group.cidrs:
            yield ("groups", name), "empty", "It has neither hosts nor cidrs.", "Fill it, or leave it out."
        yield from _hosts(("groups", name, "hosts"), group.hosts)
    for number, rule in enumerate(document.rules):
        place: Place = ("rules", number)
        yield from _destination(document, rule, place)
        yield from _names(document, rule, place)
        yield from _ports(rule, place)
        yield from _tls(rule, place)
        yield from _conditions(rule, place)
        yield from _headers(rule, place)
        yield from _bound(document, rule, place)
    for number, credential in enumerate(document.credentials):
        yield from _credential(document, credential, ("credentials", number))
    if document.ceiling and (document.credentials or document.default == "ask" or document.mode == "observe"):
        yield (
            ("ceiling",),
            "contradiction",
            "A document that is a ceiling gives nothing, so it has no credentials, no default and is always enforced.",
            "Put these into another document.",
        )


def _dates(document: Document, now: float | None) -> Iterator[Finding]:
    if document.mode == "observe" and document.expires is None:
        yield ("mode",), "observe_without_expiry", "A policy that only observes must end.", "Add `expires` with a date."
    if document.expires is not None and document.mode != "observe":
        yield (
            ("expires",),
            "contradiction",
            "Only a document with `mode: observe` expires as a whole.",
            "Put `expires` on the rules that are to end.",
        )
    if now is None:
        return
    if (
        document.mode == "observe"
        and document.expires is not None
        and seconds_of(document.expires) > now + LONGEST_OBSERVE_S
    ):
        yield (
            ("expires",),
            "too_late",
            "A policy observes for at most 31 days.",
            "Write an earlier date; it can be renewed.",
        )
    dated: list[tuple[Place, str | None]] = [(("expires",), document.expires)]
    for number, rule in enumerate(document.rules):
        if rule.tls.expires is not None and seconds_of(rule.tls.expires) > now + LONGEST_PASSTHROUGH_S:
            yield (
                ("rules", number, "tls", "expires"),
                "too_late",
                "Passthrough is accepted for at most a year.",
                "Write an earlier date; it can be renewed.",
            )
        dated += [(("rules", number, "tls", "expires"), rule.tls.expires), (("rules", number, "expires"), rule.expires)]
    for place, date in dated:
        if date is not None and seconds_of(date) <= now:
            yield place, "expired", f"{date} has passed.", "Write a later date, or leave out what has ended."


def _once(document: Document) -> Iterator[Finding]:
    for kind, ids in (
        ("rules", [rule.id for rule in document.rules]),
        ("credentials", [one.id for one in document.credentials]),
    ):
        seen: set[str] = set()
        for number, one in enumerate(ids):
            if one in seen:
                yield (kind, number, "id"), "twice", f"The id `{one}` is there already.", "Give it another one."
            seen.add(one)


def _hosts(place: Place, hosts: Sequence[str]) -> Iterator[Finding]:
    for number, text in enumerate(hosts):
        pattern = HostPattern.parse(text)
        if pattern.stars and is_public_suffix(pattern.base):
            yield (
                (*place, number),
                "public_suffix",
                f"Anybody can register a name below {pattern.base}.",
                "Name the domains that are meant.",
            )


def _destination(document: Document, rule: Rule, place: Place) -> Iterator[Finding]:
    to = rule.to
    if not (to.hosts or to.cidrs or to.groups):
        yield (*place, "to"), "empty", "The rule has no destination.", "Add `hosts`, `cidrs` or `groups`."
    yield from _hosts((*place, "to", "hosts"), to.hosts)
    for number, name in enumerate(to.groups):
        if name in set(BuiltIn):
            if rule.action is not Action.DENY:
                yield (
                    (*place, "to", "groups", number),
                    "built_in_group",
                    f"`{name}` can only be denied.",
                    "Name the hosts or networks that may be reached.",
                )
        elif name not in document.groups:
            yield (
                (*place, "to", "groups", number),
                "unknown_group",
                f"There is no group `{name}`.",
                "Define it in `groups`.",
            )
    if rule.action is Action.DENY:
        conditional = rule.http.deny or rule.git is not None or rule.protocol is not None
        if conditional and (to.cidrs or any(name in set(BuiltIn) for name in to.groups)):
            yield (
                (*place, "to"),
                "address_without_name",
                "At an address there are no requests to look at.",
                "Leave the conditions out, or name hosts.",
            )
        return
    cidrs = networks_of(document, rule)
    if not cidrs:
        return
    if protocol_of(rule) in HTTP_FAMILY or tls_of(rule) is TlsMode.INTERCEPT:
        yield (
            (*place, "to"),
            "address_without_name",
            "At an address there is no name whose certificate and requests could be checked.",
            "Use hosts (`dns.records` says where one is); addresses go with `protocol: tcp`, or with `tls` and passthrough.",
        )
    if rule.resolve.private == "deny" and any(
        classify(ip_network(cidr).network_address) is AddressKind.PRIVATE for cidr in cidrs
    ):
        yield (
            (*place, "to"),
            "private_address",
            "The rule is for private addresses and does not say so.",
            "Add `resolve: {private: allow}`.",
        )


def _names(document: Document, rule: Rule, place: Place) -> Iterator[Finding]:
    """What a rule says of names that no rule is about, and of where names may be."""
    if rule.resolve.within and rule.action is Action.DENY:
        yield (
            (*place, "resolve", "within"),
            "contradiction",
            "A rule that denies dials nothing.",
            "Deny the addresses with `cidrs`.",
        )
    if (rule.resolve.within or rule.to.by_name) and rule.route.via != "direct":
        yield (
            (*place, "route"),
            "contradiction",
            "An upstream proxy resolves names itself, so where they are would not be looked at.",
            "Leave `route` out, or name the hosts.",
        )
    if not rule.to.by_name:
        return
    here = (*place, "to", "by_name")
    if hosts_of(document, rule) or not networks_of(document, rule):
        yield here, "contradiction", "It is for networks, and for them alone.", "Give the rule `cidrs` and no hosts."
    if protocol_of(rule) is not Protocol.TCP or rule.action is not Action.ALLOW:
        yield (
            here,
            "contradiction",
            "Names that no rule is about are relayed as they are, or not at all.",
            "Use `protocol: tcp` and `action: allow`, or name the hosts.",
        )
    if rule.resolve.pin or rule.resolve.rehome or rule.resolve.within:
        yield here, "contradiction", "Where such a name may be is what `cidrs` say.", "Leave the rest of `resolve` out."


def _ports(rule: Rule, place: Place) -> Iterator[Finding]:
    if rule.action is Action.DENY:
        return
    if not rule.ports and protocol_of(rule) is Protocol.TCP:
        yield (*place, "ports"), "missing_key", "A rule for `tcp` names its ports.", "Add `ports`."
        return
    ports = ports_of(rule)
    if DNS_PORT in ports:
        yield (
            (*place, "ports"),
            "dns_port",
            "Port 53 is answered by the gateway itself, wherever the question goes.",
            "Leave it out; names that a rule is for are resolved.",
        )
    if rule.special_ports is None and any(port in ports for port in SPECIAL_PORTS):
        yield (
            (*place, "ports"),
            "special_port",
            "Ports 25 and 853 carry mail and questions for names past everything else.",
            "Leave them out, or add `special_ports: accepted` (at the tiers platform and project).",
        )


def _tls(rule: Rule, place: Place) -> Iterator[Finding]:
    tls, protocol, mode = rule.tls, protocol_of(rule), tls_of(rule)
    here = (*place, "tls")
    if rule.action is Action.DENY:
        if tls.mode is not None:
            yield here, "contradiction", "A rule that denies holds for every mode of TLS.", "Leave `tls` out."
        if rule.protocol in (Protocol.TCP, Protocol.TLS):
            yield (
                (*place, "protocol"),
                "contradiction",
                f"A rule that denies `{rule.protocol}` would deny whatever runs over it.",
                "Leave `protocol` out to deny the destination.",
            )
        return
    if protocol is Protocol.TCP and mode is not TlsMode.NONE:
        yield here, "contradiction", "`tcp` is relayed as it is.", "Use `protocol: tls` or `http`."
    if protocol is Protocol.TLS and mode is TlsMode.NONE:
        yield here, "contradiction", "A rule for `tls` without TLS means nothing.", "Use `protocol: tcp`."
    if mode is TlsMode.PASSTHROUGH:
        if protocol in HTTP_FAMILY:
            yield (
                here,
                "passthrough_http",
                "What passes through is not looked at, so no condition of HTTP can hold.",
                "Use `protocol: tls` for passthrough, or intercept.",
            )
        if tls.fronting_risk is None:
            yield (
                here,
                "fronting_risk",
                "Through TLS that is not intercepted any other name at the same servers can be reached.",
                "Intercept, or add `fronting_risk: accepted`.",
            )
        if tls.expires is None:
            yield here, "passthrough_without_expiry", "Passthrough must end.", "Add `expires` with a date to `tls`."
    elif tls.fronting_risk is not None or tls.expires is not None or tls.sni == "optional":
        yield (
            here,
            "contradiction",
            "`fronting_risk`, `expires` and `sni: optional` are for passthrough.",
            "Leave them out.",
        )
    if tls.sni == "optional" and rule.to.hosts:
        yield (
            here,
            "contradiction",
            "A rule for names needs the name in the handshake.",
            "Leave `sni` out, or use `cidrs`.",
        )
    if mode is not TlsMode.INTERCEPT and (tls.upstream_ca or tls.upstream_spki):
        yield here, "contradiction", "Only what is intercepted has an upstream certificate to check.", "Leave them out."


def _conditions(rule: Rule, place: Place) -> Iterator[Finding]:
    protocol = rule.protocol if rule.action is Action.DENY else protocol_of(rule)
    opaque = protocol in (Protocol.TCP, Protocol.TLS)
    if opaque and rule.http != type(rule.http)():
        yield (
            (*place, "http"),
            "contradiction",
            f"A rule for `{protocol}` does not see requests.",
            "Use `protocol: http`.",
        )
    if rule.git is not None and protocol is not Protocol.GIT:
        yield (*place, "git"), "contradiction", "`git` has conditions of rules for git.", "Add `protocol: git`."
    if protocol is Protocol.GIT and rule.http.allow:
        yield (
            (*place, "http", "allow"),
            "contradiction",
            "Which requests a git rule is for follows from `git`.",
            "Use `git: {operations, repositories}`.",
        )
    if rule.websocket != type(rule.websocket)() and protocol is not Protocol.WEBSOCKET:
        yield (
            (*place, "websocket"),
            "contradiction",
            "`websocket` is for rules for WebSockets.",
            "Add `protocol: websocket`.",
        )
    if rule.action is Action.DENY and rule.http.allow:
        yield (
            (*place, "http", "allow"),
            "contradiction",
            "A rule that denies allows nothing.",
            "Put what is denied into `http.deny`; leave both out to deny everything.",
        )
    if rule.action is not Action.ASK and rule.ask != type(rule.ask)():
        yield (*place, "ask"), "contradiction", "Only a rule with `action: ask` asks.", "Add `action: ask`."
    for kind, entries in (("allow", rule.http.allow), ("deny", rule.http.deny)):
        for number, entry in enumerate(entries):
            if not rule.http.encoded_slash and kind == "allow" and any("%2F" in path for path in entry.paths):
                yield (
                    (*place, "http", kind, number, "paths"),
                    "encoded_slash",
                    "A path has an encoded slash, which the rule does not admit.",
                    "Add `encoded_slash: true` to `http`.",
                )
    if rule.resolve.pin and rule.resolve.rehome and len(rule.resolve.pin) > 1:
        yield (*place, "resolve"), "contradiction", "A name that is pinned is at one place.", "Pin one address."


def _headers(rule: Rule, place: Place) -> Iterator[Finding]:
    edits = rule.http.request_headers
    for name in edits.set:
        if name in _OURS:
            yield (
                (*place, "http", "request_headers", "set", name),
                "framing_header",
                f"`{name}` belongs to the gateway.",
                "Leave it out.",
            )
        if name in _SECRET:
            yield (
                (*place, "http", "request_headers", "set", name),
                "secret_in_policy",
                f"`{name}` carries secrets, and a policy is no place for them.",
                "Bind a credential.",
            )
    for kind, entries in (("allow", rule.http.allow), ("deny", rule.http.deny)):
        for number, entry in enumerate(entries):
            here = (*place, "http", kind, number, "headers")
            yield from _judged(entry.headers or {}, edits if kind == "allow" else None, here)
    if edits.allow_only is not None and set(edits.allow_only) & set(edits.strip):
        yield (
            (*place, "http", "request_headers"),
            "contradiction",
            "A header is both stripped and allowed.",
            "Keep one.",
        )


def _judged(headers: Mapping[str, object], edits: RequestHeaders | None, place: Place) -> Iterator[Finding]:
    """Headers of a condition that never go on as they come, so that it would be about nothing."""
    for name in headers:
        if name in _OURS and name != "host":
            yield (
                (*place, name),
                "framing_header",
                f"`{name}` belongs to the gateway, which writes it for each connection anew.",
                "Leave it out.",
            )
        if edits is not None and (
            name in edits.strip or (edits.allow_only is not None and name not in edits.allow_only)
        ):
            yield (
                (*place, name),
                "contradiction",
                f"`{name}` is a condition, and the same rule takes it away: what is judged is what is sent.",
                "Keep one.",
            )


def _credential(document: Document, credential: Credential, place: Place) -> Iterator[Finding]:
    rules = {rule.id: rule for rule in document.rules}
    for number, name in enumerate(credential.only.rules):
        if name not in rules:
            yield (
                (*place, "only", "rules", number),
                "unknown_rule",
                f"There is no rule `{name}`.",
                "Name one of this document.",
            )
    for number, injection in enumerate(credential.inject):
        if injection.where == "header" and injection.name.lower() in _OURS:
            yield (
                (*place, "inject", number),
                "framing_header",
                f"`{injection.name}` belongs to the gateway.",
                "Use another.",
            )
        if injection.where == "basic" and injection.name == "authorization":
            yield (*place, "inject", number, "name"), "missing_key", "`basic` needs the user's name.", "Add `name`."
    if not any(credential.id in rule.credentials for rule in document.rules):
        yield place, "unused_credential", "No rule has this credential.", "Add its id to a rule's `credentials`."


def _bound(document: Document, rule: Rule, place: Place) -> Iterator[Finding]:
    """What a rule says of credentials."""
    known = {credential.id for credential in document.credentials}
    for at, name in enumerate(rule.credentials):
        if name not in known:
            yield (
                (*place, "credentials", at),
                "unknown_credential",
                f"There is no credential `{name}`.",
                "Define it in `credentials`.",
            )
    if rule.credentials and (
        rule.action is Action.DENY or protocol_of(rule) not in HTTP_FAMILY or tls_of(rule) is not TlsMode.INTERCEPT
    ):
        yield (
            (*place, "credentials"),
            "credential_without_interception",
            "A credential can only be put into requests over TLS that is intercepted.",
            "Use `protocol: http` with `tls: {mode: intercept}`, or leave the credential out.",
        )
    if rule.credentials and rule.client_auth is ClientAuth.ALLOW:
        yield (
            (*place, "client_auth"),
            "contradiction",
            "Where a credential is put in, the client's own is taken out.",
            "Use `forbid` or `placeholder_only`.",
        )


def hosts_of(document: Document, rule: Rule) -> list[str]:
    """The host patterns of a rule, with those of its groups."""
    return [
        *rule.to.hosts,
        *(host for name in rule.to.groups if name in document.groups for host in document.groups[name].hosts),
    ]


def networks_of(document: Document, rule: Rule) -> list[str]:
    """The networks of a rule, with those of its groups."""
    return [
        *rule.to.cidrs,
        *(cidr for name in rule.to.groups if name in document.groups for cidr in document.groups[name].cidrs),
    ]


def protocol_of(rule: Rule) -> Protocol:
    """What a rule that allows or asks speaks."""
    return rule.protocol or Protocol.HTTP


def tls_of(rule: Rule) -> TlsMode:
    """How a rule treats TLS."""
    return rule.tls.mode or (TlsMode.NONE if protocol_of(rule) is Protocol.TCP else TlsMode.INTERCEPT)
