"""Rules for networks with all names in them (`by_name`), and for names that may be in some networks alone (`within`)."""

import json
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy.addresses import classify, parse_network
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.comparing import compare
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.linting import lint
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.verdicts import Action, Flow, Protocol, Request, Verdict

NOW = 1_900_000_000.0
NETWORK = "93.184.216.0/24"
OPEN = {"id": "open", "to": {"cidrs": [NETWORK], "by_name": True}, "ports": ["1-24", "1000-2000"], "protocol": "tcp"}


def one(tier: str, *rules: dict[str, Any], name: str = "doc", **more: Any) -> TieredDocument:
    text = json.dumps({"version": 1, "rules": list(rules), **more})
    return TieredDocument(tier=tier, name=name, document=load(text, NOW))


def policy(*documents: TieredDocument) -> Policy:
    return compile_policy(documents)


def said(verdict: Verdict) -> str:
    return verdict.reason if verdict.action is Action.DENY else str(verdict.action)


def reached(asked: Policy, host: str, port: int, address: str) -> str:
    """The answer of the last stage for a name that resolves to an address."""
    verdict = asked.name(host, NOW)
    if verdict.action is not Action.DENY:
        verdict = asked.connect(Flow(host=host, port=port), NOW)
    if verdict.action is not Action.DENY:
        verdict = asked.address(ip_address(address), port, verdict, NOW)
    return said(verdict)


def test_a_name_that_no_rule_is_about_is_reached_where_it_is_in_the_networks() -> None:
    asked = policy(one("sandbox", OPEN))
    assert reached(asked, "any.example", 1500, "93.184.216.34") == "allow"
    assert reached(asked, "any.example", 1500, "93.184.217.34") == "address_not_allowed"
    assert reached(asked, "any.example", 3000, "93.184.216.34") == "no_rule"
    assert asked.connect(Flow(host="any.example", port=1500), NOW).protocol is Protocol.TCP
    assert said(asked.connect(Flow(address="93.184.216.34", port=1500), NOW)) == "allow"
    assert said(asked.connect(Flow(address="93.184.217.34", port=1500), NOW)) == "dst_unbound"


def test_a_rule_about_the_name_goes_before_it_on_its_ports() -> None:
    named = {"id": "named", "to": {"hosts": ["x.example"]}, "ports": [1500]}
    asked = policy(one("sandbox", OPEN, named))
    assert asked.connect(Flow(host="x.example", port=1500), NOW).protocol is Protocol.HTTP
    assert asked.connect(Flow(host="x.example", port=1501), NOW).protocol is Protocol.TCP


def test_the_authority_of_the_sandbox_is_not_for_such_names() -> None:
    named = {"id": "named", "to": {"hosts": ["x.example"]}}
    asked = policy(one("sandbox", OPEN, named))
    assert asked.allowed_names(NOW) == ("x.example",)
    assert asked.certifies("x.example", NOW)
    assert not asked.certifies("any.example", NOW)


def test_what_denies_goes_before_it() -> None:
    no = {"id": "no", "to": {"hosts": ["**.bad.example"]}, "action": "deny"}
    some = {"id": "some", "to": {"hosts": ["half.example"]}, "http": {"deny": [{"paths": ["/admin/**"]}]}, "ports": [1500]}  # fmt: skip
    address = {"id": "there", "to": {"cidrs": ["93.184.216.34/32"]}, "action": "deny"}
    asked = policy(one("project", no, {**some, "action": "deny"}, address), one("sandbox", OPEN))
    assert reached(asked, "a.bad.example", 1500, "93.184.216.1") == "denied_by_rule"
    assert reached(asked, "half.example", 1500, "93.184.216.1") == "inspection_required"
    assert reached(asked, "any.example", 1500, "93.184.216.34") == "denied_by_rule"
    assert reached(asked, "any.example", 1500, "93.184.216.35") == "allow"


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.1.2.3", "100.64.0.1", "224.0.0.1"])
def test_it_opens_nothing_that_is_not_the_internet(address: str) -> None:
    everywhere = {**OPEN, "to": {"cidrs": ["0.0.0.0/0"], "by_name": True}}
    asked = policy(one("sandbox", everywhere))
    assert reached(asked, "any.example", 1500, address) in ("platform_denied", "private_denied")
    assert reached(asked, "any.example", 25, "93.184.216.34") == "platform_denied"
    assert reached(asked, "any.example", 26, "93.184.216.34") == "no_rule"


def test_a_ceiling_of_names_bars_it_and_one_of_networks_bounds_it() -> None:
    names = {"id": "ours", "to": {"hosts": ["**.corp.example"]}}
    closed = policy(one("project", names, ceiling=True), one("sandbox", OPEN))
    assert said(closed.name("any.example", NOW)) == "beyond_ceiling"
    assert said(closed.connect(Flow(address="93.184.216.34", port=1500), NOW)) == "beyond_ceiling"
    assert reached(closed, "a.corp.example", 1500, "93.184.216.34") == "beyond_ceiling"
    within = {**OPEN, "to": {"cidrs": ["93.184.216.0/28"], "by_name": True}}
    bounded = policy(one("project", within, ceiling=True), one("sandbox", OPEN))
    assert reached(bounded, "any.example", 1500, "93.184.216.1") == "allow"
    assert reached(bounded, "any.example", 1500, "93.184.216.34") == "address_not_allowed"
    named = {"id": "named", "to": {"hosts": ["x.example"]}, "ports": [1500]}
    asked = policy(one("project", within, ceiling=True), one("sandbox", named))
    request = Request(host="x.example", port=1500, tls=True, method="GET", path="/")
    verdict = asked.request(request, NOW)
    assert said(verdict) == "allow"
    assert said(asked.address(ip_address("93.184.216.1"), 1500, verdict, NOW)) == "allow"
    assert said(asked.address(ip_address("93.184.216.34"), 1500, verdict, NOW)) == "address_not_allowed"


def test_within_bounds_where_a_name_may_be() -> None:
    rule = {"id": "a", "to": {"hosts": ["x.example"]}, "resolve": {"within": [NETWORK]}}
    asked = policy(one("sandbox", rule))
    verdict = asked.request(Request(host="x.example", port=443, tls=True, method="GET", path="/"), NOW)
    assert said(asked.address(ip_address("93.184.216.1"), 443, verdict, NOW)) == "allow"
    assert said(asked.address(ip_address("93.184.217.1"), 443, verdict, NOW)) == "address_not_allowed"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"to": {"hosts": ["x.example"], "by_name": True}}, "rules[0].to.by_name"),
        ({"to": {"cidrs": [NETWORK], "hosts": ["x.example"], "by_name": True}}, "rules[0].to.by_name"),
        ({"protocol": "tls", "tls": {"mode": "passthrough", "fronting_risk": "accepted", "expires": "2030-12-31", "sni": "optional"}}, "rules[0].to.by_name"),
        ({"action": "ask"}, "rules[0].to.by_name"),
        ({"action": "deny", "protocol": None}, "rules[0].to.by_name"),
        ({"resolve": {"pin": ["93.184.216.34"]}}, "rules[0].to.by_name"),
        ({"resolve": {"within": [NETWORK]}}, "rules[0].to.by_name"),
        ({"route": {"via": "http:office"}}, "rules[0].route"),
        ({"to": {"hosts": ["x.example"]}, "resolve": {"within": [NETWORK]}, "route": {"via": "http:office"}}, "rules[0].route"),
        ({"to": {"hosts": ["x.example"]}, "resolve": {"within": [NETWORK]}, "action": "deny", "protocol": None}, "rules[0].resolve.within"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(change: dict[str, Any], place: str) -> None:
    rule = {key: value for key, value in {**OPEN, **change}.items() if value is not None}
    with pytest.raises(PolicyError) as caught:
        one("sandbox", rule)
    assert place in {problem.place for problem in caught.value.problems}


def test_what_compares_and_judges_policies_knows_it() -> None:
    closed = {**OPEN, "to": {"cidrs": [NETWORK]}}
    changes = compare(policy(one("sandbox", closed)), policy(one("sandbox", OPEN)), NOW).changes
    assert ("allowed", "any name in 93.184.216.0/24") in {(one.change, one.host) for one in changes}
    assert "any_name" in {found.code for found in lint([one("sandbox", OPEN)], NOW)}


@given(st.integers(0, 2**32 - 1).map(ip_address), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_by_name_and_by_address_the_same_is_reached(address: Any, bases: list[int]) -> None:
    cidrs = [f"{ip_address(base >> 20 << 20)}/12" for base in bases]
    cidrs = [cidr for cidr in cidrs if str(classify(parse_network(cidr).network_address)) != "private"]
    if not cidrs:
        return
    asked = policy(one("sandbox", {**OPEN, "to": {"cidrs": cidrs, "by_name": True}}))
    direct = asked.connect(Flow(address=str(address), port=1500), NOW)
    if direct.action is Action.ALLOW:
        direct = asked.address(address, 1500, direct, NOW)
    assert (direct.action is Action.ALLOW) == (reached(asked, "any.example", 1500, str(address)) == "allow")
