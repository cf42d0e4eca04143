"""Puts the documents of all tiers together: rules with their terms, credentials, and what is merged of the rest."""

from collections.abc import Iterator, Sequence

import msgspec

from hatchway.domain.policy.addresses import EVERYWHERE, Address, Network, parse_address, parse_network
from hatchway.domain.policy.ceilings import Ceiling
from hatchway.domain.policy.checks import hosts_of, protocol_of, tls_of
from hatchway.domain.policy.forms import seconds_of
from hatchway.domain.policy.names import HostPattern, NameRefused
from hatchway.domain.policy.narrowing import common
from hatchway.domain.policy.paths import PathRefused
from hatchway.domain.policy.ports import ports_of
from hatchway.domain.policy.problems import PolicyError, Problem
from hatchway.domain.policy.reading import stored
from hatchway.domain.policy.rules import CompiledRule
from hatchway.domain.policy.schema import ClientAuth, Credential, Document, Rule
from hatchway.domain.policy.terms import BoundCredential, Bounds, Terms
from hatchway.domain.policy.vocabulary import TIERS, Action, RuleRef


class TieredDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document and where it stands."""

    tier: str
    name: str
    version: int = 1
    document: Document

    @classmethod
    def stored(cls, tier: str, name: str, version: int, text: str) -> "TieredDocument":
        """Of the text that was stored. Raises `PolicyError`."""
        return cls(tier=tier, name=name, version=version, document=stored(text))


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy is made of."""

    rules: tuple[CompiledRule, ...]
    ceilings: tuple[Ceiling, ...]
    """What the documents that are ceilings admit at most. What they deny is among the rules."""
    observe_until: float
    default_ask: bool
    credentials: dict[str, BoundCredential]
    bounds: Bounds
    dns_answer: str
    records: dict[str, tuple[Address, ...]]
    on_policy_change: str
    deny_reply: str


def assemble(documents: Sequence[TieredDocument]) -> Assembled:
    """Puts them together; their order makes no difference. Raises `PolicyError` for a tier that there is not, or a text that no `load` accepted."""
    for one in documents:
        if one.tier not in TIERS:
            raise PolicyError(
                [
                    Problem(
                        place="",
                        code="unknown_tier",
                        cause=f"There is no tier {one.tier!r}.",
                        remedy=f"Tiers: {', '.join(TIERS)}.",
                    )
                ]
            )
    ordered = sorted(documents, key=lambda one: (TIERS.index(one.tier), one.name, one.version))
    credentials: dict[str, BoundCredential] = {}
    rules: list[CompiledRule] = []
    ceilings: list[Ceiling] = []
    try:
        for one in ordered:
            named = _bind(one, credentials)
            made = tuple(_rules(one, _private(one, ordered), named))
            denials = [rule for rule in made if rule.action is Action.DENY]
            rules += denials if one.document.ceiling else made
            if one.document.ceiling:
                ceilings.append(
                    Ceiling(one.tier, one.name, tuple(rule for rule in made if rule.action is not Action.DENY))
                )
    except (NameRefused, PathRefused, ValueError) as error:
        raise PolicyError(
            [Problem(place="", code="unreadable", cause=f"It is no stored policy: {error}.", remedy="Store it anew.")]
        ) from None
    parts = [one.document for one in ordered]
    return Assembled(
        rules=tuple(rules),
        ceilings=tuple(ceilings),
        observe_until=max(
            (seconds_of(part.expires) for part in parts if part.mode == "observe" and part.expires is not None),
            default=0.0,
        ),
        default_ask=any(part.default == "ask" for part in parts),
        credentials=credentials,
        bounds=_bounds(ordered),
        dns_answer="nodata" if any(part.dns.answer == "nodata" for part in parts) else "synthetic",
        records=_records(ordered),
        on_policy_change="close_flows"
        if any(part.lifecycle.on_policy_change == "close_flows" for part in parts)
        else "recheck_flows",
        deny_reply=next((reply for part in reversed(parts) if (reply := part.defaults.deny_reply)), "json"),
    )


def _rules(one: TieredDocument, private: tuple[Network, ...], credentials: dict[str, str]) -> Iterator[CompiledRule]:
    rank = TIERS.index(one.tier)
    for rule in one.document.rules:
        ref = RuleRef(tier=one.tier, document=one.name, rule=rule.id)
        terms = _terms(one.document, rule, ref, private, credentials)
        yield CompiledRule(one.document, rule, ref, rank, terms, sub_deny=False)
        if rule.action is not Action.DENY and rule.http.deny:
            yield CompiledRule(one.document, rule, ref, rank, terms, sub_deny=True)


def _terms(
    document: Document, rule: Rule, ref: RuleRef, private: tuple[Network, ...], credentials: dict[str, str]
) -> Terms:
    ends = [seconds_of(date) for date in (rule.expires, rule.tls.expires) if date is not None]
    usual = ClientAuth.PLACEHOLDER_ONLY if rule.credentials else document.defaults.client_auth
    return Terms(
        rule=ref,
        protocol=protocol_of(rule),
        tls=tls_of(rule),
        tls_min=rule.tls.min,
        upstream_ca=rule.tls.upstream_ca,
        upstream_spki=rule.tls.upstream_spki,
        sni=rule.tls.sni,
        private=private if rule.resolve.private == "allow" else (),
        pin=tuple(map(parse_address, rule.resolve.pin)),
        rehome=rule.resolve.rehome,
        within=(tuple(map(parse_network, rule.resolve.within)),) if rule.resolve.within else (),
        versions=rule.http.versions,
        encoded_slash=rule.http.encoded_slash,
        request_headers=rule.http.request_headers,
        response_headers=rule.http.response_headers,
        max=rule.http.max,
        websocket=rule.websocket,
        client_auth=rule.client_auth or usual,
        credentials=tuple(credentials[name] for name in rule.credentials if name in credentials),
        rate=rule.rate,
        route=rule.route,
        reason=rule.reason,
        expires=min(ends, default=None),
    )


def _private(one: TieredDocument, documents: Sequence[TieredDocument]) -> tuple[Network, ...]:
    """The private networks that rules of a document may allow: its own tier's decide at the platform, else those above decide.

    The platform: everywhere. A project: within what documents of the platform name, everywhere where none names any. Templates and
    sandboxes: within what both name, nowhere where neither names any.
    """
    named = {
        tier: [
            parse_network(text)
            for other in documents
            if other.tier == tier
            for text in other.document.private_networks or ()
        ]
        for tier in ("platform", "project")
    }
    if one.tier == "platform":
        return EVERYWHERE
    if one.tier == "project":
        return tuple(named["platform"]) or EVERYWHERE
    if not named["project"] or not named["platform"]:
        return tuple(named["project"] or named["platform"])
    return tuple(
        smaller
        for project in named["project"]
        for platform in named["platform"]
        for smaller in common(project, platform)
    )


def _bind(one: TieredDocument, credentials: dict[str, BoundCredential]) -> dict[str, str]:
    """Adds the credentials of a document; answers its ids with those that they have among all."""
    named: dict[str, str] = {}
    for credential in one.document.credentials:
        rules = [
            rule
            for rule in one.document.rules
            if credential.id in rule.credentials and (not credential.only.rules or rule.id in credential.only.rules)
        ]
        qualified = credential.id if credential.id not in credentials else f"{one.tier}/{one.name}/{credential.id}"
        named[credential.id] = qualified
        credentials[qualified] = _bound(one, credential, qualified, rules)
    return named


def _bound(one: TieredDocument, credential: Credential, qualified: str, rules: list[Rule]) -> BoundCredential:
    ports = {port for rule in rules for port in (rule.ports or ((80,) if str(ports_of(rule)) == "80" else (443,)))}
    return BoundCredential(
        credential_id=qualified,
        tier=one.tier,
        document=one.name,
        credential=credential,
        rules=tuple(rule.id for rule in rules),
        hosts=tuple(dict.fromkeys(host for rule in rules for host in hosts_of(one.document, rule))),
        ports=tuple(sorted(ports, key=str)),
        methods=credential.only.methods,
        paths=credential.only.paths,
    )


def _bounds(documents: Sequence[TieredDocument]) -> Bounds:
    """The lowest that is stated; what templates and sandboxes state lowers what holds without it, and never lifts it."""
    merged = msgspec.structs.asdict(Bounds())
    for trusted in (True, False):
        stated: dict[str, list[int]] = {}
        for one in documents:
            if (one.tier in ("platform", "project")) is not trusted:
                continue
            for part in (one.document.limits, one.document.dns):
                for name in merged:
                    value = getattr(part, name, None)
                    if value is not None:
                        stated.setdefault(name, []).append(value)
        for name, values in stated.items():
            merged[name] = min(values) if trusted else min(merged[name], *values)
    return Bounds(**merged)


def _records(documents: Sequence[TieredDocument]) -> dict[str, tuple[Address, ...]]:
    """Of records for one name those of the highest tier; none for a name that a rule of a higher tier is about."""
    records: dict[str, tuple[Address, ...]] = {}
    above: list[HostPattern] = []
    for tier in TIERS:
        here = [one.document for one in documents if one.tier == tier]
        for document in here:
            for name, addresses in document.dns.records.items():
                if name not in records and not any(pattern.matches(name) for pattern in above):
                    records[name] = tuple(map(parse_address, addresses))
        above += [
            HostPattern.parse(host)
            for document in here
            for rule in document.rules
            if rule.action is not Action.DENY
            for host in hosts_of(document, rule)
        ]
    return records
