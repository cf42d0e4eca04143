"""Would this pass, by which rule, with which credential; and why not, and what would have to be in the policy."""

from typing import Any

import msgspec

from hatchway.domain.policy.addresses import parse_address
from hatchway.domain.policy.compiled import Policy
from hatchway.domain.policy.names import NameRefused, canonical_host
from hatchway.domain.policy.paths import PathRefused, canonical_path
from hatchway.domain.policy.verdicts import Flow, Request, Verdict
from hatchway.domain.policy.vocabulary import Action, Protocol, TlsMode

_ADDABLE = frozenset(
    {
        "no_rule",
        "dst_unbound",
        "expired",
        "method_not_allowed",
        "path_not_allowed",
        "query_not_allowed",
        "port_not_allowed",
        "tls_required",
        "clear_required",
        "websocket_not_allowed",
        "protocol_not_allowed",
    }
)
"""Reasons that a further rule would do away with."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants to know."""

    destination: str
    """A name or an address, as it would be written."""
    port: int = 443
    method: str | None = None
    """None: only the connection."""
    target: str = "/"
    """Path and query, as they would be sent."""
    headers: tuple[tuple[str, str], ...] = ()
    websocket: bool = False
    tls: bool | None = None
    """None: as the policy treats this port."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What one stage says."""

    stage: str
    action: str
    reason: str
    explanation: str = ""
    rule: str = ""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: that of the last stage that was reached."""

    action: str
    reason: str
    explanation: str
    rule: str
    stages: tuple[Stage, ...]
    observed: bool = False
    tls: str = ""
    credentials: tuple[dict[str, str], ...] = ()
    """Id, where it comes from, and where it is put."""
    needed: dict[str, Any] | None = None
    """A rule that would let it pass; None where it passes, or no rule can."""


def explain(policy: Policy, question: Question, now: float) -> Explanation:
    """Asks the stages in turn, as a gateway does. `now`: Unix seconds."""
    stages: list[Stage] = []
    try:
        address = str(parse_address(question.destination))
    except ValueError:
        address = None
    if address is None:
        try:
            host = canonical_host(question.destination)
        except NameRefused as error:
            return _refused("name", f"{question.destination!a} is no host name: {error.cause}. {error.remedy}", stages)
        verdict = policy.name(host, now)
        stages.append(_stage("name", verdict))
        if verdict.action is Action.DENY:
            return _answer(policy, question, verdict, stages, host)
        flow = Flow(host=host, port=question.port)
    else:
        host = address
        flow = Flow(address=address, port=question.port)
    verdict = policy.connect(flow, now)
    stages.append(_stage("connect", verdict))
    if verdict.action is Action.DENY or verdict.protocol is not Protocol.HTTP or question.method is None:
        return _answer(policy, question, verdict, stages, host)
    path, _, query = question.target.partition("?")
    try:
        path = canonical_path(path)
    except PathRefused as error:
        return _refused(
            "request", f"The path {question.target!a} is refused whatever rules say: {error.cause}.", stages
        )
    request = Request(
        host=host,
        port=question.port,
        tls=verdict.tls is TlsMode.INTERCEPT if question.tls is None else question.tls,
        method=question.method,
        path=path,
        query=query,
        headers=tuple((name.lower(), value) for name, value in question.headers),
        websocket=question.websocket,
    )
    verdict = policy.request(request, now)
    stages.append(_stage("request", verdict))
    return _answer(policy, question, verdict, stages, host)


def _stage(stage: str, verdict: Verdict) -> Stage:
    return Stage(
        stage=stage,
        action=verdict.action,
        reason=verdict.reason,
        explanation=verdict.explanation,
        rule=str(verdict.rule or ""),
    )


def _refused(stage: str, explanation: str, stages: list[Stage]) -> Explanation:
    said = Stage(stage=stage, action=Action.DENY, reason="not_canonical", explanation=explanation)
    return Explanation(
        action=Action.DENY, reason="not_canonical", explanation=explanation, rule="", stages=(*stages, said)
    )


def _answer(policy: Policy, question: Question, verdict: Verdict, stages: list[Stage], host: str) -> Explanation:
    bound = [policy.credentials[name] for name in verdict.credentials]
    return Explanation(
        action=verdict.action,
        reason=verdict.reason,
        explanation=verdict.explanation,
        rule=str(verdict.rule or ""),
        stages=tuple(stages),
        observed=verdict.observed,
        tls="" if verdict.action is Action.DENY else verdict.tls,
        credentials=tuple(
            {
                "id": one.credential_id,
                "source": one.credential.source,
                "into": ", ".join(f"{where.where} {where.name}" for where in one.credential.inject),
            }
            for one in bound
        ),
        needed=_needed(question, host) if verdict.action is Action.DENY and verdict.reason in _ADDABLE else None,
    )


def _needed(question: Question, host: str) -> dict[str, Any] | None:
    """The narrowest rule that lets this very thing pass, if a rule can."""
    if question.method in ("TRACE", "TRACK", "CONNECT"):
        return None
    try:
        network = parse_address(host)
    except ValueError:
        rule: dict[str, Any] = {"id": "new", "to": {"hosts": [host]}}
    else:
        return {
            "id": "new",
            "to": {"cidrs": [f"{network}/{network.max_prefixlen}"]},
            "ports": [question.port],
            "protocol": "tcp",
        }
    clear = question.tls is False or (question.tls is None and question.port == 80)
    if question.port != (80 if clear else 443):
        rule["ports"] = [question.port]
    if clear:
        rule["tls"] = {"mode": "none"}
    if question.websocket:
        rule["protocol"] = "websocket"
    if question.method is not None:
        path, _, query = question.target.partition("?")
        allow: dict[str, Any] = {"methods": [question.method], "paths": [canonical_path(path).replace("*", "%2A")]}
        if "%2F" in allow["paths"][0]:
            rule["http"] = {"encoded_slash": True}
        if not query:
            allow["query"] = "none"
        rule["http"] = {**rule.get("http", {}), "allow": [allow]}
    return rule
