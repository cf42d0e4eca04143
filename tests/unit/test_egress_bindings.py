"""What the broker is told of a policy: rule by rule, with everything that decides where a secret goes."""

import json
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority

from hatchway.domain.policy.reading import canonical, load
from hatchway.node.egress import bindings
from hatchway.node.egress.identity import Identity, Wanted, with_placeholders
from hatchway.wire.broker import Allowed, Injection
from hatchway.wire.egress import EgressSpec, PolicyDocument

CREDENTIAL = {
    "id": "gh",
    "source": "store:github/bot",
    "inject": [{"where": "header", "name": "authorization", "format": "token {}"}],
    "expose": {"env": "GITHUB_TOKEN"},
}


def told(
    *rules: dict[str, Any], credential: dict[str, Any] | None = None, tier: str = "project", **more: Any
) -> tuple[bindings.Bound, ...]:
    document = {"version": 1, "rules": list(rules), "credentials": [{**CREDENTIAL, **(credential or {})}], **more}
    text = canonical(load(json.dumps(document)))
    policy = PolicyDocument(tier=tier, name="one", version=1, text=text)
    return bindings.of(EgressSpec(revision=1, documents=(policy,)))


def test_each_rule_has_a_binding_of_its_own() -> None:
    (bound,) = told(
        {
            "id": "api",
            "to": {"hosts": ["api.example"]},
            "credentials": ["gh"],
            "http": {"allow": [{"methods": ["POST"], "paths": ["/repos/*"]}, {"paths": ["/user"]}]},
        },
        {
            "id": "inside",
            "to": {"hosts": ["**.inside.example"]},
            "ports": [8443, "9000-9002"],
            "credentials": ["gh"],
            "resolve": {"private": "allow"},
            "tls": {"min": "1.3"},
            "http": {"encoded_slash": True, "response_headers": {"strip": ["set-cookie"]}},
        },
        {"id": "other", "to": {"hosts": ["other.example"]}},
        {"id": "no", "to": {"hosts": ["api.example"]}, "action": "deny", "http": {"deny": [{"paths": ["/admin/**"]}]}},
        credential={"only": {"methods": ["GET", "POST"]}},
    )
    assert (bound.credential_id, bound.variable) == ("gh", "GITHUB_TOKEN")
    api, inside = bound.bindings
    assert (api.rules, api.hosts, api.ports, api.source) == (("api",), ("api.example",), (443,), "github/bot")
    assert api.inject == (Injection(where="header", name="authorization", format="token {}"),)
    assert api.methods == ("GET", "POST")
    assert api.allow == (
        Allowed(methods=("POST",), paths=("/repos/*",)),
        Allowed(methods=("GET", "HEAD"), paths=("/user",)),
    )
    assert (api.private, api.tls_min, api.encoded_slash, api.set_cookie) == ((), "1.2", False, True)
    assert (inside.rules, inside.hosts) == (("inside",), ("**.inside.example",))
    assert inside.ports == (8443, 9000, 9001, 9002)
    assert (inside.tls_min, inside.encoded_slash, inside.set_cookie) == ("1.3", True, False)
    assert "0.0.0.0/0" in inside.private


def test_only_the_rules_that_the_credential_names() -> None:
    (bound,) = told(
        {"id": "one", "to": {"hosts": ["one.example"]}, "credentials": ["gh"]},
        {"id": "two", "to": {"hosts": ["two.example"]}, "credentials": ["gh"]},
        credential={"only": {"rules": ["two"]}},
    )
    assert [binding.rules for binding in bound.bindings] == [("two",)]


def test_git_and_websockets() -> None:
    (bound,) = told(
        {
            "id": "git",
            "to": {"hosts": ["git.example"]},
            "protocol": "git",
            "git": {"repositories": ["/acme/*"]},
            "credentials": ["gh"],
        },
        {"id": "ws", "to": {"hosts": ["ws.example"]}, "protocol": "websocket", "credentials": ["gh"]},
    )
    git, websocket = bound.bindings
    assert (git.websocket, websocket.websocket) == (False, True)
    paths = {path for allowed in git.allow for path in allowed.paths}
    assert "/acme/*/git-upload-pack" in paths
    assert not any("receive" in path for path in paths)


def test_placeholders_are_put_into_every_binding() -> None:
    bound = told(
        {"id": "one", "to": {"hosts": ["one.example"]}, "credentials": ["gh"]},
        {"id": "two", "to": {"hosts": ["two.example"]}, "credentials": ["gh"]},
    )
    assert bindings.wanted(bound) == [Wanted("gh", "project/one/gh", "hwp_")]
    granted = bindings.granted(bound, {"gh": "hwp_x"})
    assert [(one.rules, one.placeholder) for one in granted] == [(("one",), "hwp_x"), (("two",), "hwp_x")]
    assert bindings.granted(bound, {}) == ()
    assert bindings.environment(bound, {"gh": "hwp_x"}) == {"GITHUB_TOKEN": "hwp_x"}


def test_of_two_credentials_with_one_variable_the_guest_finds_that_of_the_lower_tier_or_later_name() -> None:
    def found(*places: tuple[str, str]) -> str:
        rule = {"id": "api", "to": {"hosts": ["api.example"]}, "credentials": ["gh"]}
        text = canonical(load(json.dumps({"version": 1, "rules": [rule], "credentials": [CREDENTIAL]})))
        documents = tuple(PolicyDocument(tier=tier, name=name, version=1, text=text) for tier, name in places)
        bound = bindings.of(EgressSpec(revision=1, documents=documents))
        return bindings.environment(bound, {one.credential_id: one.origin for one in bound})["GITHUB_TOKEN"]

    assert found(("sandbox", "inline"), ("project", "one")) == "sandbox/inline/gh"
    assert found(("project", "two"), ("project", "one")) == "project/two/gh"


def test_a_placeholder_stays_with_its_credential_when_another_document_takes_over_its_id() -> None:
    one = with_placeholders(Identity(), [Wanted("gh", "project/two/gh", "hwp_")])
    held = one.placeholders["gh"]
    wanted = [Wanted("gh", "project/one/gh", "hwp_"), Wanted("project/two/gh", "project/two/gh", "hwp_")]
    both = with_placeholders(one, wanted, one)
    assert both.placeholders["project/two/gh"] == held
    assert both.placeholders["gh"] != held, "what programs hold would stand for somebody else's secret"
    again = with_placeholders(both, [Wanted("gh", "project/two/gh", "hwp_")], both)
    assert again.placeholders == {"gh": held}
    gone = with_placeholders(both, [Wanted("gh", "project/one/gh", "hwp_")], both)
    assert gone.placeholders == {"gh": both.placeholders["gh"]}
    assert with_placeholders(gone, wanted, gone).placeholders["project/two/gh"] != held, (
        "what was taken away is good never more"
    )


def test_placeholders_that_were_kept_before_their_origins_were_stay() -> None:
    old = Identity(placeholders={"gh": "hwp_1", "project/two/gh": "hwp_2"})
    wanted = [Wanted("gh", "project/one/gh", "hwp_"), Wanted("project/two/gh", "project/two/gh", "hwp_")]
    assert with_placeholders(old, wanted, old).placeholders == old.placeholders


def test_c06_no_policy_of_a_sandbox_says_who_vouches_for_a_secrets_site(tmp_path: Path) -> None:
    """Else it would send a secret that is lent to it wherever it likes: to a server of its own, under an authority of its own."""
    own = Authority(tmp_path, "Of whoever wrote the policy").ca.read_text()
    rule = {
        "id": "api",
        "to": {"hosts": ["api.example"]},
        "credentials": ["gh"],
        "tls": {"upstream_ca": [own]},
        "resolve": {"pin": ["192.0.2.7"]},
    }
    vouched = {
        tier: binding.upstream_ca
        for tier in ("platform", "project", "template", "sandbox")
        for (bound,) in (told(rule, tier=tier),)
        for binding in bound.bindings
    }
    assert vouched == {"platform": (own,), "project": (own,), "template": (), "sandbox": ()}
