"""Conditions on headers: what they may be about."""

import json
from typing import Any

import pytest

from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import load


def problems(http: dict[str, Any], action: str = "allow") -> list[tuple[str, str]]:
    rule = {"id": "r", "to": {"hosts": ["index.example"]}, "action": action, "http": http}
    try:
        load(json.dumps({"version": 1, "rules": [rule]}))
    except PolicyError as error:
        return [(one.place, one.code) for one in error.problems]
    return []


@pytest.mark.parametrize("name", ["connection", "transfer-encoding", "content-length", "te", "upgrade", "expect"])
def test_a_field_of_one_connection_is_no_condition(name: str) -> None:
    place = f"rules[0].http.{{}}[0].headers.{name}"
    assert problems({"allow": [{"headers": {name: "x"}}]}) == [(place.format("allow"), "framing_header")]
    assert problems({"deny": [{"headers": {name: "x"}}]}, "deny") == [(place.format("deny"), "framing_header")]


def test_the_host_may_be_one() -> None:
    assert problems({"allow": [{"headers": {"host": "index.example"}}]}) == []


def test_a_rule_does_not_take_away_what_it_requires() -> None:
    wants = [{"headers": {"x-mode": "safe"}}]
    place = "rules[0].http.allow[0].headers.x-mode"
    assert problems({"allow": wants, "request_headers": {"strip": ["x-mode"]}}) == [(place, "contradiction")]
    assert problems({"allow": wants, "request_headers": {"allow_only": ["accept"]}}) == [(place, "contradiction")]
    assert problems({"allow": wants, "request_headers": {"allow_only": ["accept", "x-mode"]}}) == []
    assert problems({"deny": wants, "request_headers": {"strip": ["x-mode"]}}) == [], "what came is judged, too"
