"""A sandbox's policy as a whole: the documents of all tiers, made into one thing that answers.

What holds whatever documents say (the floor): no loopback, link-local, metadata, multicast, reserved or embedded address; no private
address that a rule does not allow; no port 53, which the gateway answers itself; ports 25 and 853 only where a rule of the platform
or the project accepts them; no TRACE, TRACK or CONNECT.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from hatchway.domain.policy.addresses import NEVER, Address, AddressKind, classify, parse_address, refusal
from hatchway.domain.policy.assembly import Assembled, TieredDocument, assemble
from hatchway.domain.policy.ceilings import OPACITY, asked_about
from hatchway.domain.policy.checks import DNS_PORT, SPECIAL_PORTS
from hatchway.domain.policy.matching import Matcher
from hatchway.domain.policy.networks import as_names
from hatchway.domain.policy.paths import PathIndex, PathPattern
from hatchway.domain.policy.rules import Asked, CompiledRule, Entry
from hatchway.domain.policy.schema import Ask, ClientAuth
from hatchway.domain.policy.terms import BoundCredential, Bounds, Terms
from hatchway.domain.policy.verdicts import Flow, Request, Verdict
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Action, Protocol, RuleRef, TlsMode

HTTP_PORTS = {443: TlsMode.INTERCEPT, 80: TlsMode.NONE}
"""How a connection is taken that passes without a rule (observed, asked by default)."""


def compile_policy(documents: Sequence[TieredDocument]) -> "Policy":
    """Puts the documents together. Their order makes no difference. None at all: everything is denied."""
    return Policy(assemble(documents))


class Policy:
    """Answers what `verdicts` describes. It holds no clock: `now` is Unix seconds, and what has expired by then counts no more."""

    def __init__(self, assembled: Assembled) -> None:
        self._main = Matcher(assembled.rules)
        self._ceilings = assembled.ceilings
        self._observe_until = assembled.observe_until
        self._default_ask = assembled.default_ask
        self.credentials: dict[str, BoundCredential] = assembled.credentials
        """By credential id."""
        self._only = {
            name: PathIndex.of(map(PathPattern.parse, bound.paths))
            for name, bound in self.credentials.items()
            if bound.paths
        }
        self.limits: Bounds = assembled.bounds
        self.dns_answer: str = assembled.dns_answer
        """`synthetic`, or `nodata`: names exist without addresses."""
        self.records: dict[str, tuple[Address, ...]] = assembled.records
        """Where names are, instead of what a resolver says; judged like that."""
        self.on_policy_change: str = assembled.on_policy_change
        """`recheck_flows` or `close_flows`."""
        self.deny_reply: str = assembled.deny_reply
        """`json` or `text`: how a denied request is answered."""
        self.looks_at_headers: bool = any(entry.headers is not None for rule in self.rules for entry in rule.entries)
        """Whether a decision about a request depends on its headers."""

    @property
    def rules(self) -> tuple[CompiledRule, ...]:
        """All rules, in an order that does not depend on that of the documents."""
        return self._main.rules + tuple(rule for ceiling in self._ceilings for rule in ceiling.rules)

    def allowed_names(self, now: float) -> tuple[str, ...] | None:
        """The domains below which all names are that a rule lets pass: the permitted subtrees of a sandbox's authority.

        None: any name may pass, because the policy observes or asks by default. Empty: none.
        """
        if self._default_ask or now < self._observe_until:
            return None
        bases = {
            pattern.base
            for rule in self._main.rules
            if rule.action is not Action.DENY and rule.active(now)
            for pattern in rule.hosts
        }
        return tuple(sorted(base for base in bases if not any(base.endswith("." + other) for other in bases)))

    def next_change(self, now: float) -> float | None:
        """When the next thing expires, so that open flows must be judged anew; None: nothing will."""
        ends = [end for rule in self.rules for end in (rule.expires, rule.observe_until) if now < end < float("inf")]
        if now < self._observe_until:
            ends.append(self._observe_until)
        return min(ends, default=None)

    def name(self, host: str, now: float) -> Verdict:
        """Stage 1: whether a canonical name may be given an address. No address is looked up for that."""
        gates = [gate for gate in self._main.gates(host) if gate.active(now)]
        denial = _first(gate for gate in gates if _denies_all(gate, now) and gate.ports.all)
        if denial is not None:
            return _denied_by(denial, host)
        bounds = self._beyond_ceiling(host, now)
        if bounds is not None:
            return bounds
        passing = _first(gate for gate in gates if gate.action is not Action.DENY)
        if passing is None:
            passing = _first(iter(self._main.by_name(None, now)))
        if passing is not None:
            return Verdict(action=Action.ALLOW, reason="allowed", rule=passing.ref, terms=passing.terms)
        return self._without_rule(f"{host} could be reached", now, Protocol.HTTP, TlsMode.INTERCEPT, later=True)

    def certifies(self, host: str, now: float) -> bool:
        """Whether the sandbox's authority is for a name: one that may be given an address, and not by a rule for networks alone."""
        if self.name(host, now).action is Action.DENY:
            return False
        named = any(gate.active(now) and gate.action is not Action.DENY for gate in self._main.gates(host))
        return named or self.allowed_names(now) is None

    def connect(self, flow: Flow, now: float) -> Verdict:
        """Stage 2: a connection. One for HTTP passes when some request might: rules for HTTP ask for each request, others here."""
        if flow.host is None:
            return self._connect_address(parse_address(flow.address or ""), flow.port, now)
        host, port = flow.host, flow.port
        gates = [gate for gate in self._main.gates(host) if port in gate.ports]
        floor = _floor(port, [*gates, *self._main.by_name(port, now)])
        if floor is not None:
            return floor
        active = [gate for gate in gates if gate.active(now)]
        denial = _first(gate for gate in active if _denies_all(gate, now))
        if denial is not None:
            return _denied_by(denial, f"{host}:{port}")
        bounds = self._beyond_ceiling(host, now, port)
        if bounds is not None:
            return bounds
        verdict = self._treated(active, f"{host}:{port}", (host, port), now, gates)
        return self._bounded_connection(verdict, host, port, now)

    def _connect_address(self, address: Address, port: int, now: float) -> Verdict:
        what = f"{address} port {port}"
        if classify(address) in NEVER:
            return _deny("platform_denied", f"{refusal(address)}.")
        gates = [gate for gate in self._main.at_address(address) if port in gate.ports]
        floor = _floor(port, gates)
        if floor is not None:
            return floor
        active = [gate for gate in gates if gate.active(now)]
        denial = _first(gate for gate in active if _denies_all(gate, now))
        if denial is not None:
            return _denied_by(denial, what)
        passing = [gate for gate in active if gate.action is not Action.DENY]
        if not passing:
            return _deny(
                "expired" if any(gate.action is not Action.DENY for gate in gates) else "dst_unbound",
                f"No name was given the address {address}, and no rule names it. Connect by name, or add a rule with `cidrs` and `ports`.",
            )
        for ceiling in self._ceilings:
            if not ceiling.admits(str(address), now, port):
                return _deny("beyond_ceiling", f"{what} is beyond what {ceiling.name} admits at most.")
        verdict = self._treated(active, what, (str(address), port), now, gates)
        return self._bounded_connection(verdict, str(address), port, now)

    def _treated(
        self, active: list[CompiledRule], what: str, key: tuple[str, int], now: float, gates: list[CompiledRule]
    ) -> Verdict:
        """How a connection is treated that no rule denies as a whole: the treatment that sees the most wins."""
        passing = [gate for gate in active if gate.action is not Action.DENY]
        lifted = any(gate.action is Action.DENY and not gate.conditional for gate in active)
        unnamed = [] if passing else self._main.by_name(key[1], now)
        if unnamed:
            passing = [as_names(unnamed)]
        if not passing:
            protocol, tls = _guess(key[1])
            if lifted and not (protocol is Protocol.TCP and self._opaque_beyond(key, OPACITY[tls], now)):
                return _observed(protocol, tls, f"{what} would be denied by a rule of a document that only observes.")
            reason = "expired" if any(gate.action is not Action.DENY for gate in gates) else None
            if reason is None and any(gate.action is not Action.DENY for gate in self._main.gates(key[0])):
                reason = "port_not_allowed"
            later = protocol is Protocol.HTTP
            if not later and self._opaque_beyond(key, OPACITY[tls], now):
                return _deny(
                    "inspection_required", f"{what} would be seen less of than the ceiling admits. Allow it as `http`."
                )
            return self._without_rule(
                f"{what} can be reached", now, protocol, tls, reason or "no_rule", f"{key[0]}:{key[1]}", later=later
            )
        requests = [gate for gate in passing if gate.protocol in HTTP_FAMILY]
        if requests:
            tls = TlsMode.INTERCEPT if any(gate.tls is TlsMode.INTERCEPT for gate in requests) else TlsMode.NONE
            chosen = next(gate for gate in requests if gate.tls is tls)
            seen = Verdict(
                action=Action.ALLOW,
                reason="observed" if lifted else "allowed",
                observed=lifted,
                rule=chosen.ref,
                protocol=Protocol.HTTP,
                tls=tls,
                versions=tuple(
                    version for version in ("1.1", "2") if any(version in gate.versions for gate in requests)
                ),
                terms=chosen.terms,
            )
            asking = _first(gate for gate in passing if gate.action is Action.ASK and gate.protocol not in HTTP_FAMILY)
            return seen if asking is None else asked_about(seen, asking, {"host": key[0], "port": str(key[1])})
        least = min(_opacity(gate) for gate in passing)
        alike = [gate for gate in passing if _opacity(gate) == least]
        hidden = _first(gate for gate in active if gate.conditional and not now < gate.observe_until)
        if hidden is not None:
            return _deny(
                "inspection_required",
                f"{what} would pass without being looked at, while {hidden.ref} denies some requests to it. Allow it as `http`.",
                alike[0].ref,
            )
        if self._opaque_beyond(key, least, now):
            return _deny(
                "inspection_required",
                f"{what} would be seen less of than the ceiling admits. Allow it as `http`.",
                alike[0].ref,
            )
        asking = _first(gate for gate in passing if gate.action is Action.ASK)
        granting = _first(gate for gate in alike if gate.action is Action.ALLOW) or alike[0]
        terms = granting.terms
        verdict = Verdict(
            action=Action.ALLOW,
            reason="observed" if lifted else "allowed",
            observed=lifted,
            rule=granting.ref,
            protocol=terms.protocol,
            tls=terms.tls,
            terms=terms,
        )
        return verdict if asking is None else asked_about(verdict, asking, {"host": key[0], "port": str(key[1])})

    def request(self, request: Request, now: float) -> Verdict:
        """Stage 3: one request in canonical form."""
        asked = Asked(request)
        denial: CompiledRule | None = None
        lifted = False
        best: dict[Action, tuple[Any, Entry]] = {}
        for distance, entry in self._main.entries(asked):
            if entry.objection(asked, now) is not None:
                continue
            rule = entry.rule
            if rule.action is Action.DENY:
                if now < rule.observe_until:
                    lifted = True
                elif denial is None or rule.order < denial.order:
                    denial = rule
                continue
            key = (distance, entry.specificity, rule.order)
            if rule.action not in best or key < best[rule.action][0]:
                best[rule.action] = (key, entry)
        what = f"{request.method} {request.path} at {request.host}"
        gates = [gate for gate in self._main.gates(request.host) if request.port in gate.ports]
        if denial is None:
            denial = _first(gate for gate in gates if gate.active(now) and _denies_all(gate, now))
        if denial is not None:
            return _denied_by(denial, what)
        floor = _floor(request.port, gates)
        if floor is not None:
            return floor
        lifted = lifted or any(_lifted(gate, now) for gate in gates)
        verdict = self._granted(best, asked, what, lifted, now)
        return verdict if verdict.action is Action.DENY else self._bounded(verdict, asked, what, now)

    def _granted(
        self, best: dict[Action, tuple[Any, Entry]], asked: Asked, what: str, lifted: bool, now: float
    ) -> Verdict:
        request = asked.request
        if not best:
            protocol, tls = Protocol.HTTP, TlsMode.INTERCEPT if request.tls else TlsMode.NONE
            if lifted and request.method not in ("TRACE", "TRACK", "CONNECT"):
                return _observed(protocol, tls, f"{what} would be denied by a rule of a document that only observes.")
            reason, rule = self._why_not(asked, now)
            if request.method in ("TRACE", "TRACK", "CONNECT"):
                return _deny("method_not_allowed", f"{request.method} never passes.")
            key = f"{request.host}:{request.port} {request.method} {request.path}"
            without = self._without_rule(f"{what} may pass", now, protocol, tls, reason, key, later=False)
            return msgspec.structs.replace(without, rule=rule) if without.action is Action.DENY else without
        entry = best[Action.ALLOW][1] if Action.ALLOW in best else best[Action.ASK][1]
        terms = entry.rule.terms
        verdict = Verdict(
            action=Action.ALLOW,
            reason="observed" if lifted else "allowed",
            observed=lifted,
            rule=entry.rule.ref,
            protocol=terms.protocol,
            tls=terms.tls,
            credentials=tuple(name for name in terms.credentials if self._applies(name, asked)),
            terms=terms,
        )
        if Action.ASK not in best:
            return verdict
        return asked_about(verdict, best[Action.ASK][1].rule, _values(request))

    def _applies(self, credential_id: str, asked: Asked) -> bool:
        bound = self.credentials[credential_id]
        if bound.methods and "*" not in bound.methods and asked.request.method not in bound.methods:
            return False
        only = self._only.get(credential_id)
        return only is None or any(only.find(asked.segments))

    def _bounded(self, verdict: Verdict, asked: Asked, what: str, now: float) -> Verdict:
        """The verdict within the ceilings: what one of them does not admit is denied, what one asks about is asked."""
        values, own = _values(asked.request), verdict.terms
        for ceiling in self._ceilings:
            verdict = ceiling.bound_request(verdict, own, asked, what, now, values)
            if verdict.action is Action.DENY:
                break
        return verdict

    def _bounded_connection(self, verdict: Verdict, host: str, port: int, now: float) -> Verdict:
        """The same for a connection that each of them admits."""
        own = verdict.terms
        for ceiling in self._ceilings:
            if verdict.action is Action.DENY:
                break
            verdict = ceiling.bound_connection(verdict, own, host, port, now, {"host": host, "port": str(port)})
        return verdict

    def address(
        self, address: Address, port: int, verdict: Verdict, now: float, own: Collection[Address] = ()
    ) -> Verdict:
        """Stage 4: whether an address that the name resolved to may be dialled for what `verdict` lets pass."""
        terms = verdict.terms or Terms()
        if not all(any(address in network for network in networks) for networks in terms.within):
            return _deny("address_not_allowed", f"{address} is in no network that the rule allows.", verdict.rule)
        # Before what no policy lifts: that the operator may offer all the same, and a rule still denies it.
        rules = [rule for rule in self._main.at_address(address) if port in rule.ports and rule.active(now)]
        denial = _first(rule for rule in rules if _denies_all(rule, now))
        if denial is not None:
            return _denied_by(denial, f"{address}")
        why = refusal(address, private=terms.private, own=own)
        if why is None:
            return verdict
        private = classify(address) is AddressKind.PRIVATE and address not in own
        return _deny("private_denied" if private else "platform_denied", f"{why}.", verdict.rule)

    def rehomes(self, host: str, port: int, now: float) -> bool:
        """Whether a connection to an address that no name has may be taken for one to this name."""
        return any(
            gate.rehome and port in gate.ports and gate.active(now) and gate.action is not Action.DENY
            for gate in self._main.gates(host)
        )

    def _without_rule(
        self,
        what: str,
        now: float,
        protocol: Protocol,
        tls: TlsMode,
        reason: str = "no_rule",
        key: str = "",
        *,
        later: bool,
    ) -> Verdict:
        """What becomes of that which no rule lets pass. `later`: each request is asked about, not the connection."""
        terms = Terms(
            protocol=protocol, tls=tls, client_auth=ClientAuth.ALLOW if now < self._observe_until else ClientAuth.FORBID
        )
        if self._default_ask:
            if later:
                return Verdict(
                    action=Action.ALLOW, reason="ask", protocol=protocol, tls=tls, versions=("1.1", "2"), terms=terms
                )
            return Verdict(
                action=Action.ASK, reason="ask", protocol=protocol, tls=tls, terms=terms, ask=Ask(), ask_key=key
            )
        if now < self._observe_until:
            return _observed(protocol, tls, f"No rule says that {what}.")
        return _deny(reason, _EXPLANATIONS.get(reason, _EXPLANATIONS["no_rule"]).format(what=what))

    def _why_not(self, asked: Asked, now: float) -> tuple[str, RuleRef | None]:
        """The most telling reason why no rule fits, and the rule that came closest.

        Looked at are the entries whose path fits; where none does, what the rules about this host are for connections.
        """
        request = asked.request
        near = [
            (_CLOSENESS.index(entry.objection(asked, now) or "expired"), entry.rule.order, entry.rule.ref)
            for _, entry in self._main.entries(asked)
            if entry.rule.action is not Action.DENY
        ]
        for gate in () if near else self._main.gates(request.host):
            if gate.action is Action.DENY:
                continue
            near.append((_CLOSENESS.index(_gate_objection(gate, request, now)), gate.order, gate.ref))
        if not near:
            return "no_rule", None
        closest = min(near, key=lambda one: one[:2])
        return _CLOSENESS[closest[0]], closest[2]

    def _beyond_ceiling(self, host: str, now: float, port: int | None = None) -> Verdict | None:
        for ceiling in self._ceilings:
            if not ceiling.admits(host, now, port):
                where = host if port is None else f"{host}:{port}"
                return _deny("beyond_ceiling", f"{where} is beyond what {ceiling.name} admits at most.")
        return None

    def _opaque_beyond(self, key: tuple[str, int], opacity: int, now: float) -> bool:
        """Whether a ceiling wants to see more of a connection than its treatment shows."""
        return not all(ceiling.admits_opaque(*key, opacity, now) for ceiling in self._ceilings)


_CLOSENESS = (
    "expired",
    "header_not_allowed",
    "query_not_allowed",
    "method_not_allowed",
    "path_ambiguous",
    "version_not_allowed",
    "path_not_allowed",
    "websocket_not_allowed",
    "protocol_not_allowed",
    "tls_required",
    "clear_required",
    "port_not_allowed",
)
"""Reasons, the most telling first."""
_EXPLANATIONS = {
    "no_rule": "No rule says that {what}. Add one that allows it.",
    "expired": "The rule by which {what} has expired. Give it a later `expires`.",
    "method_not_allowed": "No rule says that {what} with this method. Add the method to `http.allow`.",
    "path_not_allowed": "No rule says that {what}: the path is none of those in `http.allow`. Add it.",
    "query_not_allowed": "No rule says that {what} with this query. Admit its parameters in `http.allow`.",
    "header_not_allowed": "No rule says that {what} with this header. Admit it in `http.allow`.",
    "port_not_allowed": "No rule says that {what} at this port. Add the port to the rule's `ports`.",
    "path_ambiguous": "No rule says that {what} with an encoded slash. Add `encoded_slash: true` to the rule's `http`.",
    "version_not_allowed": "No rule says that {what} in this version of HTTP. Add it to `http.versions`.",
    "websocket_not_allowed": "No rule says that {what} as a WebSocket. Add one with `protocol: websocket`.",
    "protocol_not_allowed": "{what} by another protocol only. Add a rule with `protocol: http`.",
    "tls_required": "{what} over TLS only.",
    "clear_required": "{what} without TLS only.",
}


def _gate_objection(gate: CompiledRule, request: Request, now: float) -> str:
    """Why a rule none of whose paths fits does not let a request pass."""
    if request.port not in gate.ports:
        return "port_not_allowed"
    if not gate.active(now):
        return "expired"
    if gate.protocol not in HTTP_FAMILY:
        return "protocol_not_allowed"
    if request.tls != (gate.tls is TlsMode.INTERCEPT):
        return "clear_required" if request.tls else "tls_required"
    return "path_not_allowed"


def _first(rules: Iterator[CompiledRule]) -> CompiledRule | None:
    return min(rules, key=lambda rule: rule.order, default=None)


def _denies_all(rule: CompiledRule, now: float) -> bool:
    """Whether it denies the whole connection, and does not only observe."""
    return rule.action is Action.DENY and not rule.conditional and not now < rule.observe_until


def _lifted(rule: CompiledRule, now: float) -> bool:
    """Whether it would deny the whole connection, and only observes."""
    return rule.action is Action.DENY and not rule.conditional and rule.active(now) and now < rule.observe_until


def _floor(port: int, gates: Sequence[CompiledRule]) -> Verdict | None:
    if port == DNS_PORT:
        return _deny("platform_denied", "Port 53 is answered by the gateway itself.")
    if port in SPECIAL_PORTS and not any(gate.special_ports and gate.action is not Action.DENY for gate in gates):
        return _deny(
            "platform_denied",
            f"Port {port} is closed. A rule of the platform or the project opens it with `special_ports: accepted`.",
        )
    return None


def _guess(port: int) -> tuple[Protocol, TlsMode]:
    tls = HTTP_PORTS.get(port)
    return (Protocol.TCP, TlsMode.NONE) if tls is None else (Protocol.HTTP, tls)


def _opacity(rule: CompiledRule) -> int:
    return OPACITY[rule.tls or TlsMode.NONE]


def _deny(reason: str, explanation: str, rule: RuleRef | None = None) -> Verdict:
    return Verdict(action=Action.DENY, reason=reason, explanation=explanation[:1].upper() + explanation[1:], rule=rule)


def _denied_by(rule: CompiledRule, what: str) -> Verdict:
    said = f": {rule.reason}" if rule.reason else "."
    return _deny("denied_by_rule", f"{what} is denied by {rule.ref}{said}", rule.ref)


def _observed(protocol: Protocol, tls: TlsMode, explanation: str) -> Verdict:
    return Verdict(
        action=Action.ALLOW,
        reason="observed",
        observed=True,
        explanation=explanation,
        protocol=protocol,
        tls=tls,
        versions=("1.1", "2"),
        terms=Terms(protocol=protocol, tls=tls, client_auth=ClientAuth.ALLOW),
    )


def _values(request: Request) -> dict[str, str]:
    """What an approval of a request may hold for."""
    return {
        "host": request.host,
        "port": str(request.port),
        "method": request.method,
        "path": request.path,
        "query": request.query,
    }
