"""What a ceiling leaves of the terms of rules beneath it."""

import json
from typing import Any

import pytest

from hatchway.domain.policy.addresses import parse_address
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Flow, Request, Verdict
from hatchway.egress.rates import Rates

NOW = 1_900_000_000.0
CA = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
OTHER_CA = "-----BEGIN CERTIFICATE-----\nMAE=\n-----END CERTIFICATE-----\n"
KEY, OTHER_KEY = "A" * 43 + "=", "B" + "A" * 42 + "="


def rule(**more: Any) -> dict[str, Any]:
    return {"id": "r", "to": {"hosts": ["index.example"]}, **more}


def policy(given: dict[str, Any], ceiling: dict[str, Any], *, tier: str = "sandbox", **document: Any) -> Policy:
    """A rule of a tier beneath (or beside) a ceiling of the project."""
    documents = [
        (tier, "given", {"version": 1, "rules": [given], **document}),
        ("project", "top", {"version": 1, "ceiling": True, "rules": [ceiling]}),
    ]
    return compile_policy(
        [TieredDocument(tier=tier, name=name, document=load(json.dumps(text), NOW)) for tier, name, text in documents]
    )


def get(path: str = "/", **more: Any) -> Request:
    return Request(host="index.example", port=443, tls=True, method="GET", path=path, **more)


def terms_of(verdict: Verdict) -> Terms:
    assert verdict.terms is not None, verdict.explanation
    return verdict.terms


ELSEWHERE = [
    pytest.param({"resolve": {"pin": ["203.0.114.66"]}}, "resolve.pin", id="pin"),
    pytest.param({"tls": {"upstream_ca": [CA]}}, "tls.upstream_ca", id="own-authority"),
    pytest.param({"route": {"via": "http:mine"}}, "route.via", id="proxy"),
]


@pytest.mark.parametrize(("said", "key"), ELSEWHERE)
def test_a_ceiling_names_a_site_and_no_rule_beneath_it_puts_another_in_its_place(
    said: dict[str, Any], key: str
) -> None:
    verdict = policy(rule(**said), rule()).request(get(), NOW)
    assert (verdict.action, verdict.reason) == (Action.DENY, "beyond_ceiling")
    assert f"`{key}`" in verdict.explanation
    assert policy(rule(**said), rule(**said)).request(get(), NOW).action is Action.ALLOW, "the ceiling says the same"
    assert policy(rule(**said), rule(), tier="project").request(get(), NOW).action is Action.ALLOW
    assert policy(rule(**said), rule(), tier="platform").request(get(), NOW).action is Action.ALLOW


@pytest.mark.parametrize(("said", "key"), ELSEWHERE)
def test_what_a_ceiling_says_of_the_site_holds_where_rules_are_silent(said: dict[str, Any], key: str) -> None:
    terms = terms_of(policy(rule(), rule(**said)).request(get(), NOW))
    field = key.rpartition(".")[2]
    field = "route" if field == "via" else field
    assert getattr(terms, field) == getattr(terms_of(policy(rule(**said), rule(**said)).request(get(), NOW)), field)


def test_connections_that_are_not_looked_into_are_bounded_by_the_same() -> None:
    tcp = {"protocol": "tcp", "ports": [5432]}
    flow = Flow(host="index.example", port=5432)
    pinned = policy(rule(**tcp, resolve={"pin": ["203.0.114.66"]}), rule(**tcp)).connect(flow, NOW)
    assert (pinned.action, pinned.reason) == (Action.DENY, "beyond_ceiling")
    routed = policy(rule(**tcp, route={"via": "socks5:mine"}), rule(**tcp)).connect(flow, NOW)
    assert (routed.action, routed.reason) == (Action.DENY, "beyond_ceiling")
    assert policy(rule(**tcp), rule(**tcp)).connect(flow, NOW).action is Action.ALLOW
    net = {"to": {"cidrs": ["203.0.114.0/24"]}, **tcp}
    routed = policy({"id": "r", **net, "route": {"via": "http:mine"}}, {"id": "r", **net}).connect(
        Flow(address="203.0.114.7", port=5432), NOW
    )
    assert (routed.action, routed.reason) == (Action.DENY, "beyond_ceiling")


def test_private_addresses_are_those_that_the_ceiling_allows_too() -> None:
    allowed = {"resolve": {"private": "allow"}}
    address = parse_address("10.1.2.3")
    given = {"private_networks": ["10.0.0.0/8"]}

    def verdict(ceiling: dict[str, Any]) -> str:
        documents = [
            ("sandbox", {"version": 1, "rules": [rule(**allowed)]}),
            ("project", {"version": 1, "ceiling": True, "rules": [ceiling], **given}),
        ]
        made = compile_policy(
            [TieredDocument(tier=tier, name="d", document=load(json.dumps(text), NOW)) for tier, text in documents]
        )
        return made.address(address, 443, made.request(get(), NOW), NOW).reason

    assert verdict(rule()) == "private_denied"
    assert verdict(rule(**allowed)) == "allowed"


def test_records_are_none_beneath_a_ceiling_for_the_names_that_it_names() -> None:
    said = {"dns": {"records": {"index.example": ["203.0.114.66"], "other.example": ["203.0.114.66"]}}}
    assert set(policy(rule(), rule(), **said).records) == {"other.example"}
    wild = {"id": "r", "to": {"hosts": ["**.corp.example"]}}
    said = {"dns": {"records": {"a.b.corp.example": ["203.0.114.66"]}}}
    assert policy({"id": "r", "to": {"hosts": ["a.b.corp.example"]}}, wild, **said).records == {}


def test_bounds_and_edits_of_a_ceiling_hold_beneath_it() -> None:
    own = rule(
        http={
            "max": {"url": 100, "body": 500},
            "request_headers": {"strip": ["x-a"], "set": {"x-b": "own", "x-c": "own"}},
        }
    )
    top = rule(
        tls={"min": "1.3"},
        http={
            "max": {"url": 200, "body": 50, "response": 10},
            "request_headers": {"strip": ["x-c", "x-d"], "set": {"x-b": "top"}, "allow_only": ["accept"]},
            "response_headers": {"strip": ["x-r"]},
        },
    )
    terms = terms_of(policy(own, top).request(get(), NOW))
    assert (terms.max.url, terms.max.body, terms.max.response, terms.tls_min) == (100, 50, 10, "1.3")
    assert set(terms.request_headers.strip) == {"x-a", "x-c", "x-d"}
    assert terms.request_headers.set == {"x-b": "top"}
    assert terms.request_headers.allow_only == ("accept",)
    assert terms.response_headers.strip == ("x-r",)


def test_keys_of_a_server_are_those_that_both_name() -> None:
    def spki(*keys: str) -> dict[str, Any]:
        return rule(tls={"upstream_spki": list(keys)})

    assert terms_of(policy(rule(), spki(KEY)).request(get(), NOW)).upstream_spki == (KEY,)
    assert terms_of(policy(spki(KEY, OTHER_KEY), spki(KEY)).request(get(), NOW)).upstream_spki == (KEY,)
    assert policy(spki(OTHER_KEY), spki(KEY), tier="project").request(get(), NOW).reason == "beyond_ceiling"


def test_a_rule_with_a_credential_asks_of_the_server_what_the_ceiling_asks() -> None:
    credential = {"credentials": [{"id": "c", "source": "store:a", "inject": [{"where": "header"}]}]}
    bare, strict = rule(credentials=["c"]), rule(tls={"min": "1.3"})
    assert policy(bare, strict, **credential).request(get(), NOW).reason == "beyond_ceiling"
    both = rule(credentials=["c"], tls={"min": "1.3"})
    assert policy(both, strict, **credential).request(get(), NOW).credentials == ("c",)


def test_the_rule_of_a_ceiling_that_names_a_request_most_closely_says_the_terms() -> None:
    top = {"version": 1, "ceiling": True, "rules": [
        {"id": "wide", "to": {"hosts": ["*.corp.example"]}, "http": {"max": {"body": 10}}},
        {"id": "near", "to": {"hosts": ["a.corp.example"]}, "http": {"max": {"body": 20}}},
    ]}  # fmt: skip
    documents = [("project", top), ("sandbox", {"version": 1, "rules": [rule(to={"hosts": ["**.corp.example"]})]})]
    made = compile_policy(
        [TieredDocument(tier=tier, name="d", document=load(json.dumps(text), NOW)) for tier, text in documents]
    )
    for host, body in (("a.corp.example", 20), ("b.corp.example", 10)):
        request = Request(host=host, port=443, tls=True, method="GET", path="/")
        assert terms_of(made.request(request, NOW)).max.body == body


def test_what_a_higher_ceiling_says_of_the_site_is_not_beyond_a_lower_one() -> None:
    pin = {"resolve": {"pin": ["203.0.114.1"]}}
    documents = [
        ("platform", {"version": 1, "ceiling": True, "rules": [rule(**pin)]}),
        ("project", {"version": 1, "ceiling": True, "rules": [rule()]}),
        ("sandbox", {"version": 1, "rules": [rule()]}),
    ]
    made = compile_policy(
        [TieredDocument(tier=tier, name="d", document=load(json.dumps(text), NOW)) for tier, text in documents]
    )
    assert terms_of(made.request(get(), NOW)).pin == (parse_address("203.0.114.1"),)


def test_a_ceiling_that_asks_about_a_tunnel_is_asked() -> None:
    tcp = {"protocol": "tcp", "ports": [5432]}
    asked = policy(rule(**tcp), rule(**tcp, action="ask"))
    verdict = asked.connect(Flow(host="index.example", port=5432), NOW)
    assert (verdict.action, str(verdict.rule)) == (Action.ASK, "project/top/r")
    http = policy(rule(ports=[5432]), rule(**tcp, action="ask"))
    request = Request(host="index.example", port=5432, tls=True, method="GET", path="/")
    assert http.request(request, NOW).action is Action.ASK


def test_rates_of_a_ceiling_are_counted_over_all_rules_beneath_it() -> None:
    documents = [
        ("project", {"version": 1, "ceiling": True, "rules": [rule(rate={"requests_per_min": 3, "bytes_out_per_hour": 100, "concurrent": 1})]}),
        ("sandbox", {"version": 1, "rules": [rule(http={"allow": [{"paths": [f"/{n}"]}]}) | {"id": f"r{n}"} for n in range(4)]}),
    ]  # fmt: skip
    made = compile_policy(
        [TieredDocument(tier=tier, name="d", document=load(json.dumps(text), NOW)) for tier, text in documents]
    )
    rates = Rates(lambda: 0.0)
    said = [rates.request(made.request(get(f"/{n}"), NOW).terms) for n in range(4)]
    assert said == ["", "", "", "the rule allows 3 requests a minute"]
    sent = [rates.send(made.request(get(f"/{n}"), NOW).terms, 40) for n in range(3)]
    assert sent == ["", "", "the rule allows 100 octets an hour"]
    connection = made.connect(Flow(host="index.example", port=443), NOW).terms
    assert rates.connect(connection) == ""
    assert rates.connect(connection) == "the rule allows 1 connections at a time"
    rates.disconnect(connection)
    assert rates.connect(connection) == ""


def test_equal_terms_beneath_a_ceiling_are_one_object() -> None:
    made = policy(rule(), rule(http={"max": {"body": 5}}))
    assert made.request(get("/a"), NOW).terms is made.request(get("/b"), NOW).terms
