"""Documents that give nothing and bound what others give: whether they admit something, and on which terms it passes beneath them."""

from collections.abc import Mapping, Sequence

import msgspec

from hatchway.domain.policy.addresses import parse_address
from hatchway.domain.policy.matching import Matcher
from hatchway.domain.policy.narrowing import Beyond, counted, elsewhere, narrowed
from hatchway.domain.policy.networks import as_names
from hatchway.domain.policy.rules import Asked, CompiledRule, Entry
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Verdict
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, TIERS, Action, RuleRef, TlsMode

OPACITY = {TlsMode.INTERCEPT: 1, TlsMode.PASSTHROUGH: 2, TlsMode.NONE: 3}
"""Of what is not HTTP: how little is seen of it."""
_MAX_MADE = 1024


class Ceiling:
    """One such document. A rule of it that names a thing most closely says the terms, as among rules that give."""

    def __init__(self, tier: str, document: str, rules: Sequence[CompiledRule]) -> None:
        """`rules`: those that do not deny."""
        self.name = f"{tier}/{document}"
        self.rules = tuple(rules)
        self._rank = TIERS.index(tier)
        self._matcher = Matcher(rules)
        self._networks: dict[tuple[int, ...], CompiledRule] = {}
        self._made: dict[tuple[int, int], tuple[Terms, Terms, Terms | Beyond]] = {}

    def admits(self, host: str, now: float, port: int | None = None) -> bool:
        """Whether a connection to a name, or an address as text, is admitted at all; what is done over it is another question."""
        return bool(self._gates(host, port, now))

    def admits_opaque(self, host: str, port: int, opacity: int, now: float) -> bool:
        """Whether it may be seen as little of a connection as `OPACITY` says."""
        return bool(self._opaque(host, port, opacity, now))

    def bound_connection(
        self, verdict: Verdict, own: Terms | None, host: str, port: int, now: float, values: Mapping[str, str]
    ) -> Verdict:
        """The verdict on a connection that this admits. `host`: a name, or an address as text. `own`: as for requests."""
        if verdict.protocol in HTTP_FAMILY:
            gates = self._gates(host, port, now)
            if verdict.terms is None or not gates:
                return verdict
            return msgspec.structs.replace(verdict, terms=counted(verdict.terms, gates[0].terms))
        gates = self._opaque(host, port, OPACITY[verdict.tls], now)
        return self._bound(verdict, own, gates, f"{host}:{port}", values)

    def bound_request(
        self, verdict: Verdict, own: Terms | None, asked: Asked, what: str, now: float, values: Mapping[str, str]
    ) -> Verdict:
        """The verdict on a request: denied where no rule admits it, asked where all ask. `own`: terms of the rule that gives it."""
        request = asked.request
        entries: list[tuple[int, Entry]] = [
            (distance, entry) for distance, entry in self._matcher.entries(asked) if entry.objection(asked, now) is None
        ]
        entries.sort(key=lambda one: (one[0], one[1].specificity, one[1].rule.order))
        admitting = [entry.rule for _, entry in entries]
        admitting += self._opaque(request.host, request.port, 0, now)
        return self._bound(verdict, own, admitting, what, values)

    def _bound(
        self,
        verdict: Verdict,
        own: Terms | None,
        admitting: Sequence[CompiledRule],
        what: str,
        values: Mapping[str, str],
    ) -> Verdict:
        if not admitting:
            return _beyond(f"{what} is beyond what {self.name} admits at most.", verdict.rule)
        rule = next((one for one in admitting if one.action is Action.ALLOW), admitting[0])
        if own is not None and verdict.terms is not None:
            terms = self._narrowed(verdict.terms, rule.terms)
            key = "" if self._vouches(own) else elsewhere(own, rule.terms)
            if key or isinstance(terms, Beyond):
                key = terms.key if isinstance(terms, Beyond) else key
                return _beyond(
                    f"{what}: what {own.rule} says in `{key}` is beyond {rule.ref} of the ceiling {self.name}, which would have to say it.",
                    own.rule,
                )
            assert isinstance(terms, Terms)
            if verdict.credentials and _checked(terms) != _checked(own):
                return _beyond(
                    f"{what}: {rule.ref} of the ceiling {self.name} asks for more of the server's TLS than {own.rule}, which has a "
                    "credential and would have to ask for the same.",
                    own.rule,
                )
            verdict = msgspec.structs.replace(verdict, terms=terms)
        if rule.action is Action.ASK and verdict.action is Action.ALLOW:
            return asked_about(verdict, rule, values)
        return verdict

    def _vouches(self, terms: Terms) -> bool:
        return terms.rule is not None and TIERS.index(terms.rule.tier) <= self._rank

    def _narrowed(self, terms: Terms, bound: Terms) -> Terms | Beyond:
        """Made once for each pair, so that equal terms mostly are one object."""
        key = id(terms), id(bound)
        known = self._made.get(key)
        if known is not None:
            return known[2]
        made = narrowed(terms, bound, vouched=self._vouches(terms))
        if len(self._made) >= _MAX_MADE:
            self._made.clear()
        self._made[key] = terms, bound, made  # which keeps both, so that their ids are nobody else's
        return made

    def _gates(self, host: str, port: int | None, now: float) -> list[CompiledRule]:
        """What is admitted of connections to a name or an address, most closely named first; by its networks where no rule has the name."""
        try:
            found = self._matcher.at_address(parse_address(host))
        except ValueError:
            named = [gate for gate in self._matcher.gates(host) if _now(gate, port, now)]
            return named or self._unnamed(port, now)
        return [gate for gate in found if _now(gate, port, now)]

    def _unnamed(self, port: int | None, now: float) -> list[CompiledRule]:
        rules = self._matcher.by_name(port, now)
        if not rules:
            return []
        key = tuple(map(id, rules))
        if key not in self._networks:
            if len(self._networks) >= _MAX_MADE:
                self._networks.clear()
            self._networks[key] = as_names(rules)
        return [self._networks[key]]

    def _opaque(self, host: str, port: int, opacity: int, now: float) -> list[CompiledRule]:
        return [
            gate
            for gate in self._gates(host, port, now)
            if gate.protocol not in HTTP_FAMILY and OPACITY[gate.tls or TlsMode.NONE] >= opacity
        ]


def _now(gate: CompiledRule, port: int | None, now: float) -> bool:
    return gate.active(now) and (port is None or port in gate.ports)


def asked_about(verdict: Verdict, rule: CompiledRule, values: Mapping[str, str]) -> Verdict:
    """The verdict, once somebody agrees whom `rule` wants to be asked."""
    said = {**values, "rule": str(rule.ref)}
    key = " ".join(f"{name}={said.get(name, '')}" for name in sorted(rule.ask.key))
    return msgspec.structs.replace(
        verdict, action=Action.ASK, reason="ask", explanation=rule.reason, rule=rule.ref, ask=rule.ask, ask_key=key
    )


def _checked(terms: Terms) -> tuple[object, ...]:
    """What is checked of a server. Where a secret goes the broker checks it, which knows a rule's own terms alone."""
    return terms.tls_min, terms.upstream_ca, terms.upstream_spki


def _beyond(explanation: str, rule: RuleRef | None) -> Verdict:
    return Verdict(
        action=Action.DENY, reason="beyond_ceiling", explanation=explanation[:1].upper() + explanation[1:], rule=rule
    )
