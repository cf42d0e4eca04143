"""Explained, compared, looked over."""

import json
from typing import Any

import pytest

from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.comparing import compare
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.explaining import Explanation, Question, explain
from hatchway.domain.policy.linting import lint
from hatchway.domain.policy.reading import load

NOW = 1_900_000_000.0

MINE = """
version: 1
rules:
  - {id: packages, to: {hosts: [index.example]}, http: {allow: [{paths: [/simple/**]}]}}
  - {id: api, to: {hosts: [api.example]}, credentials: [key], http: {allow: [{methods: [GET, POST], paths: ['/repos/**']}]}}
  - {id: db, to: {hosts: [db.example]}, protocol: tcp, ports: [5432]}
credentials:
  - {id: key, source: 'store:team/key', inject: [{where: header, format: 'Bearer {}'}]}
"""


def documents(*texts: str, **tiers: str) -> list[TieredDocument]:
    named = [("sandbox", f"d{number}", text) for number, text in enumerate(texts)] + [
        (tier, tier, text) for tier, text in tiers.items()
    ]
    return [TieredDocument(tier=tier, name=name, document=load(text, NOW)) for tier, name, text in named]


def policy(*texts: str, **tiers: str) -> Policy:
    return compile_policy(documents(*texts, **tiers))


def ask(destination: str, **fields: Any) -> Explanation:
    return explain(policy(MINE), Question(destination=destination, **fields), NOW)


def test_what_passes_is_explained_with_rule_and_credential() -> None:
    answer = ask("api.example", method="POST", target="/repos/x?y=1")
    assert (answer.action, answer.rule, answer.tls) == ("allow", "sandbox/d0/api", "intercept")
    assert answer.credentials == ({"id": "key", "source": "store:team/key", "into": "header authorization"},)
    assert [stage.stage for stage in answer.stages] == ["name", "connect", "request"]
    assert answer.needed is None


def test_what_does_not_is_explained_at_the_stage_that_denies_it() -> None:
    assert [stage.stage for stage in ask("other.example", method="GET").stages] == ["name"]
    assert [stage.stage for stage in ask("index.example", port=22).stages] == ["name", "connect"]
    assert ask("index.example", method="GET", target="/x").reason == "path_not_allowed"
    assert ask("127.0.0.1").reason == "platform_denied"
    assert ask("127.0.0.1").needed is None
    assert ask("0x7f.1").reason == "not_canonical"
    assert ask("index.example", method="GET", target="/simple/../x").reason == "not_canonical"
    assert ask("index.example", method="TRACE").needed is None


@pytest.mark.parametrize(
    "question",
    [
        Question(destination="Other.Example.", method="POST", target="/a/b*c"),
        Question(destination="other.example", method="GET", target="/a?x=1"),
        Question(destination="other.example", port=80, method="GET"),
        Question(destination="other.example", port=8443, method="GET", tls=True),
        Question(destination="other.example", port=8080, method="GET", tls=False),
        Question(destination="index.example", method="DELETE", target="/simple/x"),
        Question(destination="index.example", method="GET", target="/@a%2Fb"),
        Question(destination="index.example", method="GET", target="/chat", websocket=True),
        Question(destination="192.0.78.1", port=5432),
        Question(destination="2600::1", port=22),
        Question(destination="other.example", port=443),
    ],
)
def test_the_rule_that_is_said_to_be_needed_lets_it_pass(question: Question) -> None:
    answer = explain(policy(MINE), question, NOW)
    assert answer.action == "deny"
    assert answer.needed is not None
    more = json.dumps({"version": 1, "rules": [answer.needed]})
    assert explain(policy(MINE, more), question, NOW).action == "allow"


def changes(before: str, after: str) -> set[tuple[str, str, int, str, str]]:
    found = compare(policy(before), policy(after), NOW)
    assert found.complete
    return {(one.change, one.host, one.port, one.method, one.path) for one in found.changes}


def one(rule: str) -> str:
    return f"version: 1\nrules: [{rule}]"


def test_the_same_changes_nothing() -> None:
    assert changes(MINE, MINE) == set()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: [GET], paths: [/a]}]}}",
            "{id: b, to: {hosts: [x.example]}, http: {allow: [{methods: [GET, POST], paths: [/a]}]}}",
            {("allowed", "x.example", 443, "POST", "/a")},
        ),
        (
            "{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: [GET], paths: [/a, /b]}]}}",
            "{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: [GET], paths: [/a]}]}}",
            {("denied", "x.example", 443, "GET", "/b")},
        ),
        (
            "{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: [GET]}]}}",
            "{id: a, to: {hosts: [x.example]}, action: ask, http: {allow: [{methods: [GET]}]}}",
            {("asked", "x.example", 443, "GET", "/**")},
        ),
        (
            "{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: [GET]}]}}",
            "{id: a, to: {hosts: [x.example]}, client_auth: allow, http: {allow: [{methods: [GET]}]}}",
            {("terms", "x.example", 443, "GET", "/**")},
        ),
        (
            "{id: a, to: {cidrs: [192.0.78.0/24]}, protocol: tcp, ports: [22]}",
            "{id: a, to: {cidrs: [192.0.78.0/24]}, protocol: tcp, ports: [23]}",
            {("denied", "192.0.78.0/24", 22, "", ""), ("allowed", "192.0.78.0/24", 23, "", "")},
        ),
    ],
)  # fmt: skip
def test_what_becomes_allowed_or_denied(before: str, after: str, expected: set[tuple[str, str, int, str, str]]) -> None:
    assert changes(one(before), one(after)) == expected


def test_a_comparison_beyond_its_bound_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hatchway.domain.policy.comparing.MAX_PROBES", 2)
    assert not compare(policy(MINE), policy(MINE), NOW).complete


@pytest.mark.parametrize(
    ("text", "place", "code"),
    [
        ("mode: observe\nexpires: 2030-04-01", "mode", "observe"),
        ("default: ask", "default", "asks_by_default"),
        ("groups: {a: {hosts: [x.example]}}", "groups.a", "unused"),
        ("rules: [{id: a, to: {hosts: [x.example]}, protocol: tls, tls: {mode: passthrough, fronting_risk: accepted, expires: 2030-06-30}}]", "rules[0].tls", "passthrough"),
        ("rules: [{id: a, to: {hosts: [x.example]}, protocol: tcp, ports: [22]}]", "rules[0].protocol", "tunnel"),
        ("rules: [{id: a, to: {hosts: [x.example]}, protocol: tcp, ports: [5432]}]", "rules[0].protocol", "opaque"),
        ("rules: [{id: a, to: {hosts: [x.example]}, client_auth: allow}]", "rules[0].client_auth", "client_auth"),
        ("defaults: {client_auth: allow}\nrules: [{id: a, to: {hosts: [x.example]}}]", "rules[0].client_auth", "client_auth"),
        ("rules: [{id: a, to: {hosts: [x.example]}}]", "rules[0].http", "whole_host"),
        ("rules: [{id: a, to: {hosts: [x.example]}, ports: [80]}]", "rules[0].ports", "unusual_port"),
        ("rules: [{id: a, to: {hosts: [x.example]}, tls: {mode: none}}]", "rules[0].tls", "in_clear"),
        ("rules: [{id: a, to: {hosts: ['**.x.example']}}]", "rules[0].to", "wildcard"),
        ("rules: [{id: a, to: {hosts: ['*.github.io']}}]", "rules[0].to", "shared_host"),
        ("rules: [{id: a, to: {hosts: [dns.google]}}]", "rules[0].to", "resolver"),
        ("rules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{paths: [/dns-query]}]}}]", "rules[0].http.allow[0]", "resolver"),
        ("rules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: [POST]}]}}]", "rules[0].http.allow[0]", "broad_write"),
        ("rules: [{id: a, to: {hosts: [x.example]}}, {id: b, to: {hosts: [x.example]}, action: deny}]", "rules[0]", "never_matches"),
        ("rules: [{id: a, to: {hosts: [a.x.example]}}, {id: b, to: {hosts: ['*.x.example']}}]", "rules[0]", "shadowed"),
        ("rules: [{id: a, to: {hosts: [x.example]}, resolve: {private: allow}}]", "rules[0].resolve.private", "no_effect"),
    ],
)  # fmt: skip
def test_d07_g12_what_may_not_be_meant_is_found(text: str, place: str, code: str) -> None:
    found = {(one.place, one.code) for one in lint(documents("version: 1\n" + text), NOW)}
    assert (place, code) in found
    assert all(one.cause and one.remedy for one in lint(documents("version: 1\n" + text), NOW))


def test_a_narrow_policy_gives_nothing_to_say() -> None:
    narrow = "version: 1\nrules: [{id: a, to: {hosts: [index.example]}, http: {allow: [{paths: [/simple/**]}]}}]"
    assert lint(documents(narrow), NOW) == ()


def test_only_one_of_two_rules_that_say_the_same_is_found() -> None:
    same = "version: 1\nrules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{}]}}, {id: b, to: {hosts: [x.example]}, http: {allow: [{}]}}]"
    assert [(one.place, one.code) for one in lint(documents(same.replace("{}", "{paths: [/a]}")), NOW)] == [
        ("rules[1]", "shadowed")
    ]


def test_what_a_ceiling_takes_from_a_lower_tier_is_found() -> None:
    ceiling = "version: 1\nceiling: true\nrules: [{id: c, to: {hosts: [y.example]}}]"
    rule = "version: 1\nrules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{paths: [/a]}]}}]"
    found = [(one.document, one.place, one.code) for one in lint(documents(rule, project=ceiling), NOW)]
    assert ("sandbox/d0", "rules[0]", "never_matches") in found


def test_what_ended_since_it_was_stored_is_found() -> None:
    ended = (
        "version: 1\nrules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{paths: [/a]}]}, expires: 2030-03-20}]"
    )
    assert [one.code for one in lint(documents(ended), NOW + 86400 * 30)] == ["expired"]
