"""What becomes allowed or denied when one policy takes the place of another."""

import itertools
from collections.abc import Iterator

import msgspec

from hatchway.domain.policy.compiled import Policy
from hatchway.domain.policy.probes import Probe, probes
from hatchway.domain.policy.verdicts import Verdict
from hatchway.domain.policy.vocabulary import Action, Protocol

MAX_PROBES = 100_000


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is decided otherwise."""

    change: str
    """`allowed`, `asked`, `denied`, or `terms`: it passes as before, on other terms."""
    host: str
    port: int
    method: str = ""
    path: str = ""
    before: str = ""
    """Reason, and rule."""
    after: str = ""
    terms: tuple[str, ...] = ()
    """Which terms are others."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All changes. `complete`: every example was tried; it is false for policies beyond the bound of examples."""

    changes: tuple[Change, ...]
    complete: bool


def compare(before: Policy, after: Policy, now: float) -> Comparison:
    """Tries examples of all that the rules of both are about, at a time (Unix seconds)."""
    candidates = probes((*before.rules, *after.rules))
    found = dict.fromkeys(_changes(before, after, itertools.islice(candidates, MAX_PROBES), now))
    return Comparison(changes=tuple(found), complete=next(candidates, None) is None)


def _changes(before: Policy, after: Policy, candidates: Iterator[Probe], now: float) -> Iterator[Change]:
    for probe in candidates:
        old, new = decide(before, probe, now), decide(after, probe, now)
        terms = _other_terms(old, new)
        if old.action is new.action and not terms:
            continue
        words = {Action.ALLOW: "allowed", Action.ASK: "asked", Action.DENY: "denied"}
        yield Change(
            change="terms" if old.action is new.action else words[new.action],
            host=probe.host,
            port=probe.port,
            method=probe.method,
            path=probe.path,
            before=_why(old),
            after=_why(new),
            terms=terms,
        )


def decide(policy: Policy, probe: Probe, now: float) -> Verdict:
    """The answer of the last stage that a gateway would ask."""
    if probe.flow.host is not None:
        verdict = policy.name(probe.flow.host, now)
        if verdict.action is Action.DENY:
            return verdict
    verdict = policy.connect(probe.flow, now)
    if verdict.action is Action.DENY or verdict.protocol is not Protocol.HTTP or probe.request is None:
        return verdict
    return policy.request(probe.request, now)


def _why(verdict: Verdict) -> str:
    return f"{verdict.reason} ({verdict.rule})" if verdict.rule else verdict.reason


def _other_terms(old: Verdict, new: Verdict) -> tuple[str, ...]:
    if old.action is Action.DENY or new.action is Action.DENY or old.terms is None or new.terms is None:
        return ()
    names = [
        name
        for name in old.terms.__struct_fields__
        if name not in ("rule", "credentials", "reason", "under")
        and getattr(old.terms, name) != getattr(new.terms, name)
    ]
    if "rate" not in names and [one.rate for one in old.terms.under] != [one.rate for one in new.terms.under]:
        names.append("rate")
    if old.credentials != new.credentials:
        names.append("credentials")
    if old.ask != new.ask:
        names.append("ask")
    return tuple(names)
