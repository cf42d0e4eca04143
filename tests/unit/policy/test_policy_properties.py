"""What holds of every policy: no order, no tier that lifts what a higher one denies, and the answer of a reading without indices."""

import re
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import compile_policy
from hatchway.domain.policy.reading import canonical, stored
from hatchway.domain.policy.schema import Destination, Document, Http, RequestMatch, Rule
from hatchway.domain.policy.verdicts import Action, Flow, Request
from hatchway.domain.policy.vocabulary import TIERS, Protocol

NOW = 1_900_000_000.0

HOSTS = st.sampled_from(["x.example", "a.x.example", "b.a.x.example", "ax.example"])
HOST_PATTERNS = st.sampled_from(
    ["x.example", "a.x.example", "*.x.example", "**.x.example", "*.a.x.example", "ax.example"]
)
PATHS = st.sampled_from(["/", "/a", "/a/b", "/a/", "/b/a", "/ab"])
PATH_PATTERNS = st.sampled_from(["/**", "/a", "/a/**", "/*/a", "/*", "/**/b", "/a*"])
METHODS = st.sampled_from(["GET", "POST", "PUT"])
PORTS = st.sampled_from([443, 8443])
DATES = st.sampled_from([None, "2029-01-01T00:00:00Z", "2031-01-01T00:00:00Z"])


def several(of: st.SearchStrategy[Any], least: int = 1) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=least, max_size=2, unique=True).map(tuple)


MATCHES = st.builds(RequestMatch, methods=several(st.one_of(METHODS, st.just("*")), 0), paths=several(PATH_PATTERNS))


@st.composite
def rules(draw: st.DrawFn, number: int) -> Rule:
    action = draw(st.sampled_from(Action))
    denies = action is Action.DENY
    entries = draw(several(MATCHES, 0))
    subs = draw(st.one_of(st.just(()), several(MATCHES)))
    opaque = not denies and draw(st.integers(0, 2)) == 0
    return Rule(
        id=f"r{number}",
        to=Destination(hosts=draw(several(HOST_PATTERNS))),
        ports=draw(several(PORTS, 0 if denies else 1)),
        action=action,
        protocol=Protocol.TCP if opaque else None,
        http=Http() if opaque else Http(allow=() if denies else entries, deny=subs),
        expires=draw(DATES),
    )


@st.composite
def documents(draw: st.DrawFn, tiers: tuple[str, ...] = TIERS) -> TieredDocument:
    made = tuple(draw(rules(number)) for number in range(draw(st.integers(1, 3))))
    mode: Any = draw(st.sampled_from(["enforce", "enforce", "observe"]))
    ceiling = mode == "enforce" and draw(st.integers(0, 4)) == 0
    document = Document(
        version=1,
        mode=mode,
        expires=draw(st.sampled_from(["2029-01-01T00:00:00Z", "2031-01-01T00:00:00Z"])) if mode == "observe" else None,
        rules=made,
        ceiling=ceiling,
    )
    return TieredDocument(tier=draw(st.sampled_from(tiers)), name=f"d{draw(st.integers(0, 9))}", document=document)


REQUESTS = st.builds(Request, host=HOSTS, port=PORTS, tls=st.just(True), method=METHODS, path=PATHS)
POLICIES = st.lists(documents(), min_size=1, max_size=3, unique_by=lambda one: (one.tier, one.name))


def host_fits(pattern: str, host: str) -> bool:
    return (
        re.fullmatch(re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)+").replace(r"\*\.", r"[^.]+\."), host)
        is not None
    )


def path_fits(pattern: str, path: str) -> bool:
    made = "".join(
        "(/[^/]*)*" if part == "**" else "/" + re.escape(part).replace(r"\*", "[^/]*")
        for part in pattern[1:].split("/")
    )
    return re.fullmatch(made, path) is not None


def entry_fits(entry: RequestMatch, request: Request, denies: bool) -> bool:
    methods = entry.methods or (("*",) if denies else ("GET", "HEAD"))
    return ("*" in methods or request.method in methods) and any(path_fits(path, request.path) for path in entry.paths)


def about(rule: Rule, host: str, port: int) -> bool:
    live = rule.expires is None or rule.expires > "2030-03"
    return (
        live and any(host_fits(pattern, host) for pattern in rule.to.hosts) and (not rule.ports or port in rule.ports)
    )


def naive(documents: list[TieredDocument], request: Request) -> str:
    """The decision about a request, read off the documents one rule at a time."""
    denied, lifted, observing = False, False, False
    found: set[Action] = set()
    bounds: list[set[Action]] = []
    for one in documents:
        document = one.document
        observes = document.mode == "observe" and str(document.expires) > "2030-03"
        observing |= observes
        within: set[Action] = set()
        for rule in document.rules:
            if not about(rule, request.host, request.port):
                continue
            denies = rule.action is Action.DENY
            if any(entry_fits(entry, request, True) for entry in rule.http.deny) or (denies and not rule.http.deny):
                lifted |= observes
                denied |= not observes
            if denies:
                continue
            if rule.protocol is Protocol.TCP:
                if document.ceiling:
                    within.add(rule.action)
            elif not rule.http.allow or any(entry_fits(entry, request, False) for entry in rule.http.allow):
                within.add(rule.action)
        if document.ceiling:
            bounds.append(within)
        else:
            found |= within
    if denied:
        return "deny"
    if not found and not lifted and not observing:
        return "deny"
    if any(not within for within in bounds):
        return "deny"
    return "ask" if Action.ASK in found or any(within == {Action.ASK} for within in bounds) else "allow"


@given(POLICIES, REQUESTS)
@settings(max_examples=80, deadline=None)
def test_a_decision_is_that_of_a_reading_without_indices(documents: list[TieredDocument], request: Request) -> None:
    assert str(compile_policy(documents).request(request, NOW).action) == naive(documents, request)


@given(POLICIES, REQUESTS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_g15_order_makes_no_difference(documents: list[TieredDocument], request: Request, chance: Any) -> None:
    other = [
        msgspec.structs.replace(
            one,
            document=msgspec.structs.replace(
                one.document, rules=tuple(chance.sample(one.document.rules, len(one.document.rules)))
            ),
        )
        for one in chance.sample(documents, len(documents))
    ]
    first, second = compile_policy(documents), compile_policy(other)
    flow = Flow(host=request.host, port=request.port)
    assert first.request(request, NOW) == second.request(request, NOW)
    assert first.connect(flow, NOW) == second.connect(flow, NOW)
    assert first.name(request.host, NOW) == second.name(request.host, NOW)


HELD = {"denied_by_rule", "platform_denied", "beyond_ceiling"}


@given(
    st.lists(documents(TIERS[:3]), min_size=1, max_size=2, unique_by=lambda one: (one.tier, one.name)),
    documents(TIERS[3:]),
    REQUESTS,
)
@settings(max_examples=80, deadline=None)
def test_g15_a_lower_tier_never_lifts_what_a_higher_one_denies(
    above: list[TieredDocument], below: TieredDocument, request: Request
) -> None:
    before, after = compile_policy(above), compile_policy([*above, below])
    flow = Flow(host=request.host, port=request.port)
    for one, other in (
        (before.request(request, NOW), after.request(request, NOW)),
        (before.connect(flow, NOW), after.connect(flow, NOW)),
    ):
        if one.action is Action.DENY and one.reason in HELD:
            assert other.action is Action.DENY
        if one.action is Action.ASK:
            assert other.action is not Action.ALLOW


@given(POLICIES, REQUESTS)
@settings(max_examples=40, deadline=None)
def test_no_stage_denies_what_a_later_one_would_let_pass(documents: list[TieredDocument], request: Request) -> None:
    seen = [
        msgspec.structs.replace(
            one,
            document=msgspec.structs.replace(
                one.document, rules=tuple(rule for rule in one.document.rules if rule.protocol is None)
            ),
        )
        for one in documents
    ]
    asked = compile_policy(seen)
    if request.port == 443 and asked.request(request, NOW).action is not Action.DENY:
        assert asked.name(request.host, NOW).action is Action.ALLOW
        assert asked.connect(Flow(host=request.host, port=request.port), NOW).action is Action.ALLOW


@given(documents())
@settings(max_examples=40, deadline=None)
def test_what_is_stored_decides_as_what_was_written(one: TieredDocument) -> None:
    assert stored(canonical(one.document)) == one.document
