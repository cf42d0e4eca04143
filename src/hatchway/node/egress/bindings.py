"""What a sandbox's policy says of credentials: which it may use, where the guest finds their placeholders, what the broker is told."""

import itertools

import msgspec

from hatchway.domain.policy.assembly import TieredDocument, assemble
from hatchway.domain.policy.rules import CompiledRule
from hatchway.domain.policy.terms import BoundCredential
from hatchway.domain.policy.vocabulary import Action, Protocol
from hatchway.node.egress.identity import Wanted
from hatchway.wire.broker import Allowed, Binding, Injection
from hatchway.wire.egress import EgressSpec

KEEPERS = ("platform", "project")
"""Tiers that only those write who keep the project's secrets too."""
MAX_PORTS = 4_096
"""Ports of one credential; what a wide range has beyond it gets no secret."""

_MENTIONED = '"credentials"'


class Bound(msgspec.Struct, frozen=True):
    """A credential that a sandbox may use, before it has a placeholder."""

    credential_id: str
    """Its name among the documents that there are now: another document may take it over when the policy changes."""
    origin: str
    """Which credential it is, whatever other documents there are: `tier/document/id`."""
    prefix: str
    """What its placeholder begins with."""
    variable: str | None
    """The environment variable in which the guest finds it."""
    bindings: tuple[Binding, ...]
    """What the broker is told, rule by rule; the placeholders are empty."""


def of(egress: EgressSpec) -> tuple[Bound, ...]:
    """The credentials that a policy binds. Takes time where there are many rules. Raises `PolicyError`."""
    if not any(_MENTIONED in document.text for document in egress.documents):
        return ()
    documents = [TieredDocument.stored(one.tier, one.name, one.version, one.text) for one in egress.documents]
    assembled = assemble(documents)
    return tuple(
        _bound(one, assembled.rules)
        for one in assembled.credentials.values()
        if egress.credentials is None or one.credential.id in egress.credentials
    )


def wanted(bound: tuple[Bound, ...]) -> list[Wanted]:
    """Which placeholders have to be made."""
    return [Wanted(one.credential_id, one.origin, one.prefix) for one in bound]


def environment(bound: tuple[Bound, ...], placeholders: dict[str, str]) -> dict[str, str]:
    """The variables that the guest gets. Of two credentials with one variable it finds the one of the lower tier, and in one tier of the document with the later name."""
    return {
        one.variable: placeholders[one.credential_id]
        for one in bound
        if one.variable is not None and one.credential_id in placeholders
    }


def granted(bound: tuple[Bound, ...], placeholders: dict[str, str]) -> tuple[Binding, ...]:
    """What the broker is told."""
    return tuple(
        msgspec.structs.replace(binding, placeholder=placeholders[one.credential_id])
        for one in bound
        if one.credential_id in placeholders
        for binding in one.bindings
    )


def _bound(one: BoundCredential, rules: tuple[CompiledRule, ...]) -> Bound:
    credential = one.credential
    return Bound(
        credential_id=one.credential_id,
        origin=f"{one.tier}/{one.document}/{credential.id}",
        prefix="hwp_" if credential.placeholder == "auto" else credential.placeholder,
        variable=None if credential.expose is None else credential.expose.env,
        bindings=tuple(
            _binding(one, rule)
            for rule in rules
            if rule.action is not Action.DENY
            and (rule.ref.tier, rule.ref.document) == (one.tier, one.document)
            and rule.ref.rule in one.rules
        ),
    )


def _binding(one: BoundCredential, rule: CompiledRule) -> Binding:
    """All that the broker checks and does for one rule. It takes nothing of this from a gateway."""
    credential, terms = one.credential, rule.terms
    return Binding(
        credential_id=one.credential_id,
        source=credential.source.removeprefix("store:"),
        placeholder="",
        inject=tuple(Injection(where=place.where, name=place.name, format=place.format) for place in credential.inject),
        rules=(rule.ref.rule,),
        hosts=tuple(map(str, rule.hosts)),
        ports=_ports(rule),
        methods=one.methods,
        paths=one.paths,
        allow=tuple(
            Allowed(methods=tuple(sorted(entry.methods or ())), paths=tuple(map(str, entry.paths)))
            for entry in rule.entries
        ),
        encoded_slash=terms.encoded_slash,
        websocket=terms.protocol is Protocol.WEBSOCKET,
        private=tuple(map(str, terms.private)),
        # Whoever writes a sandbox's own policy may choose where its traffic goes, and not who vouches for the place that a secret goes to.
        upstream_ca=terms.upstream_ca if rule.ref.tier in KEEPERS else (),
        upstream_spki=terms.upstream_spki,
        tls_min=terms.tls_min,
        scrub=credential.response.scrub,
        set_cookie="set-cookie" not in terms.response_headers.strip,
        lease_s=credential.lease.ttl,
    )


def _ports(rule: CompiledRule) -> tuple[int, ...]:
    found = itertools.chain.from_iterable(range(first, last + 1) for first, last in rule.ports.ranges)
    return tuple(itertools.islice(found, MAX_PORTS))
