"""What is valid and still may not be meant: each finding is a question to whoever wrote the policy."""

from collections.abc import Iterator, Sequence

import msgspec

from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.checks import hosts_of, protocol_of, tls_of
from hatchway.domain.policy.comparing import decide
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.forms import seconds_of
from hatchway.domain.policy.names import HostPattern
from hatchway.domain.policy.paths import PathPattern
from hatchway.domain.policy.ports import PortSet, ports_of
from hatchway.domain.policy.probes import probes
from hatchway.domain.policy.rules import CompiledRule
from hatchway.domain.policy.schema import ClientAuth, Document, Rule
from hatchway.domain.policy.suffixes import shared_suffix_of
from hatchway.domain.policy.text import Place, in_words
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Action, Protocol, TlsMode

READING = frozenset({"GET", "HEAD", "OPTIONS"})
RESOLVERS = frozenset(
    {
        "dns.google",
        "cloudflare-dns.com",
        "one.one.one.one",
        "dns.quad9.net",
        "doh.opendns.com",
        "dns.adguard-dns.com",
        "dns.nextdns.io",
        "doh.cleanbrowsing.org",
        "freedns.controld.com",
        "dns.mullvad.net",
        "doh.dns.sb",
        "dns.alidns.com",
        "doh.pub",
    }
)
"""Public resolvers that answer over HTTPS: whoever may send them requests asks for any name, and so sends anything anywhere."""
RESOLVER_PATHS = ("/dns-query", "/resolve")
_TUNNELS = (22, 23, 1080, 1194, 3128, 8118, 9050)


class Lint(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    document: str
    """`tier/name`."""
    place: str
    code: str
    cause: str
    remedy: str


def lint(documents: Sequence[TieredDocument], now: float) -> tuple[Lint, ...]:
    """Looks at documents that are valid, and at what they are together. `now`: Unix seconds."""
    found: list[Lint] = []
    policy = compile_policy(documents)
    for one in documents:
        for place, code, cause, remedy in (*_document(one.document), *_together(one, policy, now)):
            found.append(
                Lint(document=f"{one.tier}/{one.name}", place=in_words(place), code=code, cause=cause, remedy=remedy)
            )
    return tuple(found)


Finding = tuple[Place, str, str, str]


def _document(document: Document) -> Iterator[Finding]:
    if document.mode == "observe":
        yield (
            ("mode",),
            "observe",
            f"Nothing is held back until {document.expires}.",
            "Enforce it as soon as it says what is needed.",
        )
    if document.default == "ask":
        yield (
            ("default",),
            "asks_by_default",
            "Any name gets an address and any destination is asked about: people come to agree without reading.",
            "Name what is needed.",
        )
    used = {name for rule in document.rules for name in rule.to.groups}
    for name in document.groups:
        if name not in used:
            yield ("groups", name), "unused", "No rule has this group.", "Use it or leave it out."
    for number, rule in enumerate(document.rules):
        if rule.action is not Action.DENY:
            yield from _rule(document, rule, ("rules", number))


def _rule(document: Document, rule: Rule, place: Place) -> Iterator[Finding]:
    if tls_of(rule) is TlsMode.PASSTHROUGH:
        yield (
            (*place, "tls"),
            "passthrough",
            "Other names at the same servers can be reached through this, and no request is seen.",
            "Intercept; give clients that pin certificates the sandbox's authority.",
        )
    if protocol_of(rule) is Protocol.TCP:
        tunnel = any(port in ports_of(rule) for port in _TUNNELS)
        yield (
            (*place, "protocol"),
            "tunnel" if tunnel else "opaque",
            "What passes is not looked at"
            + (": this port is usual for what carries anything else." if tunnel else "."),
            "Use `http` or `git` where that is what is spoken.",
        )
    if rule.client_auth is ClientAuth.ALLOW or (
        rule.client_auth is None and document.defaults.client_auth is ClientAuth.ALLOW
    ):
        yield (
            (*place, "client_auth"),
            "client_auth",
            "The sandbox may use accounts of its own there, and carry anything out under them.",
            "Bind a credential, and forbid the client's own.",
        )
    ports = ports_of(rule)
    if protocol_of(rule) in HTTP_FAMILY:
        clear = tls_of(rule) is TlsMode.NONE
        if (443 if clear else 80) in ports:
            yield (
                (*place, "ports"),
                "unusual_port",
                "Port 443 in clear." if clear else "Port 80 with TLS: what is sent in clear to it is denied.",
                "Give it a rule of its own, with `tls: {mode: none}` for port 80.",
            )
        if clear:
            yield (
                (*place, "tls"),
                "in_clear",
                "Anybody on the way reads and changes it, and nothing proves who answers.",
                "Use TLS where the server has it.",
            )
    if rule.to.by_name:
        yield (
            (*place, "to", "by_name"),
            "any_name",
            "Any name in these networks is reached, whoever owns it, and a question for each goes to the outside.",
            "Name what is needed.",
        )
    yield from _hosts(document, rule, place)
    yield from _requests(rule, place)


def _hosts(document: Document, rule: Rule, place: Place) -> Iterator[Finding]:
    for text in hosts_of(document, rule):
        pattern = HostPattern.parse(text)
        here = (*place, "to")
        if pattern.stars == 2:
            yield here, "wildcard", f"{text} stands for names of any depth.", "Use `*.` for one label, or name them."
        shared = shared_suffix_of(pattern.base)
        if shared is not None and (pattern.stars or pattern.base == shared):
            yield (
                here,
                "shared_host",
                f"{shared} gives names to its customers, an attacker may be one of them.",
                "Name the customers' names that are meant, or bound the paths.",
            )
        resolver = next((name for name in RESOLVERS if HostPattern(name).overlaps(pattern)), None)
        if resolver is not None:
            yield here, "resolver", f"{resolver} resolves any name, which carries data to anywhere.", "Leave it out."


def _requests(rule: Rule, place: Place) -> Iterator[Finding]:
    if protocol_of(rule) not in HTTP_FAMILY or protocol_of(rule) is Protocol.GIT:
        return
    if not rule.http.allow and protocol_of(rule) is Protocol.HTTP:
        yield (
            (*place, "http"),
            "whole_host",
            "Every method and path is allowed.",
            "Say in `http.allow` what is needed; reading alone is `{paths: ['/**']}`.",
        )
    for number, entry in enumerate(rule.http.allow):
        here = (*place, "http", "allow", number)
        patterns = [PathPattern.parse(path) for path in entry.paths]
        writing = [method for method in entry.methods if method not in READING]
        if writing and any(pattern.specificity[0] and len(pattern.segments) == 1 for pattern in patterns):
            yield (
                here,
                "broad_write",
                f"{', '.join(writing)} is allowed on every path.",
                "Name the paths that take it.",
            )
        for path in RESOLVER_PATHS:
            if any(pattern.specificity[0] == 0 and pattern.matches(path) for pattern in patterns):
                yield here, "resolver", f"{path} is where resolvers answer over HTTPS.", "Leave it out."


def _together(one: TieredDocument, policy: Policy, now: float) -> Iterator[Finding]:
    """Rules that make no difference to what the documents together say."""
    by_id = {rule.id: number for number, rule in enumerate(one.document.rules)}
    for rule in policy.rules:
        if (
            (rule.ref.tier, rule.ref.document) != (one.tier, one.name)
            or rule.action is Action.DENY
            or one.document.ceiling
        ):
            continue
        place: Place = ("rules", by_id[rule.ref.rule])
        if not rule.active(now):
            yield place, "expired", "The rule has ended.", "Leave it out."
            continue
        if rule.terms.private == () and one.document.rules[by_id[rule.ref.rule]].resolve.private == "allow":
            yield (
                (*place, "resolve", "private"),
                "no_effect",
                "A document of this tier can allow private addresses only within `private_networks` of a higher one.",
                "Have the platform or the project name the network.",
            )
        answers = [decide(policy, probe, now) for probe in probes([rule])]
        denied = [answer for answer in answers if answer.action is Action.DENY]
        if answers and len(denied) == len(answers):
            yield (
                place,
                "never_matches",
                f"Nothing passes by it: {denied[0].explanation or denied[0].reason}",
                "Leave it out, or change what denies it.",
            )
            continue
        broader = _shadow(rule, policy, now)
        if broader is not None:
            yield (
                place,
                "shadowed",
                f"All of it passes by {broader.ref} as well, on the same terms.",
                "Keep one of them.",
            )
    for name in one.document.dns.records:
        if name not in policy.records:
            yield (
                ("dns", "records", name),
                "no_effect",
                "A rule or record of a higher tier is about this name.",
                "Leave it out.",
            )
    ended = one.document.mode == "observe" and one.document.expires and seconds_of(one.document.expires) <= now
    if ended:
        yield ("mode",), "expired", "It does not observe any more: it is enforced.", "Write `mode: enforce`."


def _shadow(rule: CompiledRule, policy: Policy, now: float) -> CompiledRule | None:
    """Another rule by which all that this one lets pass would pass as well."""
    for other in policy.rules:
        if other is rule or other.action is not rule.action or not other.active(now) or other.expires < rule.expires:
            continue
        if not _covers(other, rule) or not _alike(rule, other):
            continue
        if not (_covers(rule, other) and other.order > rule.order):
            return other
    return None


def _alike(rule: CompiledRule, other: CompiledRule) -> bool:
    return rule.ask == other.ask and all(
        getattr(rule.terms, name) == getattr(other.terms, name)
        for name in rule.terms.__struct_fields__
        if name not in ("rule", "reason", "expires")
    )


def _covers(other: CompiledRule, rule: CompiledRule) -> bool:
    hosts = all(any(pattern.covers(own) for pattern in other.hosts) for own in rule.hosts)
    networks = all(
        any(own.overlaps(network) and own.prefixlen >= network.prefixlen for network in other.networks)
        for own in rule.networks
    )
    if rule.by_name and not other.by_name:
        return False
    if not (hosts and networks and _ports_cover(other.ports, rule.ports)):
        return False
    return all(
        any(
            entry.query is None
            and entry.headers is None
            and entry.exact_query is None
            and (entry.methods is None or (own.methods is not None and own.methods <= entry.methods))
            and all(any(str(path) in ("/**", str(mine)) for path in entry.paths) for mine in own.paths)
            for entry in other.entries
        )
        for own in rule.entries
    )


def _ports_cover(ports: PortSet, other: PortSet) -> bool:
    return ports.all or ports.covers(other)
