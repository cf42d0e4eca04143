"""Documents: read strictly, refused as a whole, with the place and the remedy of everything that is wrong."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy import schema
from hatchway.domain.policy.names import HostPattern
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import canonical, load, stored
from hatchway.domain.policy.vocabulary import Action, TlsMode

NOW = 1_900_000_000.0  # in March 2030


def problems_of(text: str, now: float | None = NOW) -> dict[str, str]:
    """Place → code of what is wrong there first."""
    with pytest.raises(PolicyError) as caught:
        load(text, now)
    assert all(problem.cause and problem.remedy for problem in caught.value.problems)
    assert caught.value.as_dict()["problems"]
    found: dict[str, str] = {}
    for problem in caught.value.problems:
        found.setdefault(problem.place, problem.code)
    return found


def rule(**fields: Any) -> str:
    """A document with one rule."""
    return json.dumps({"version": 1, "rules": [{"id": "one", "to": {"hosts": ["x.example"]}, **fields}]})


FULL = """
version: 1
description: Everything at once
default: ask
defaults: {client_auth: allow, deny_reply: text}
dns: {max_names: 100, records: {Corp.Example.: [10.20.0.5]}}
groups: {model: {hosts: [api.model.example]}}
private_networks: [10.20.0.0/16]
limits: {connections: 16, buffer: 1MiB}
lifecycle: {on_policy_change: close_flows}
rules:
  - id: packages
    to: {hosts: [Index.Example., '*.files.example'], groups: [model]}
    ports: [443, 8000-8010]
    tls: {min: "1.3"}
    resolve: {private: allow, pin: [10.20.0.5]}
    http:
      versions: ["1.1"]
      allow:
        - {methods: [GET, HEAD], paths: [/simple/**], query: {page: '*'}, headers: {Accept: [text/*, '*/*']}}
      deny: [{paths: [/simple/secret/**]}]
      request_headers: {strip: [X-Forwarded-Host], set: {X-From: sandbox}}
      response_headers: {strip: [alt-svc]}
      max: {url: 2048, body: 1MiB}
    action: ask
    ask: {scope: ttl, ttl: 15m, key: [host, path], timeout: 90s}
    rate: {concurrent: 32, bytes_out_per_hour: 20MiB}
    route: {via: 'socks5:office'}
    reason: Packages only
    expires: 2031-12-31
  - {id: push, to: {hosts: [git.example]}, protocol: git, git: {operations: [fetch, push], repositories: [/acme/*]}, credentials: [gh]}
  - {id: chat, to: {hosts: [ws.example]}, protocol: websocket, websocket: {max_frame: 4KiB, text_only: true}}
  - {id: db, to: {cidrs: [10.20.1.0/24]}, ports: [5432], protocol: tcp, resolve: {private: allow}}
  - {id: pinned, to: {hosts: [pin.example]}, protocol: tls, tls: {mode: passthrough, fronting_risk: accepted, expires: '2030-06-30T12:00:00+02:00'}}
  - {id: never, to: {hosts: ['**.bad.example'], groups: [metadata]}, action: deny}
credentials:
  - id: gh
    source: store:github/bot
    expose: {env: GITHUB_TOKEN}
    inject: [{where: header, name: Authorization, format: 'Bearer {}'}]
    only: {methods: [GET], paths: [/acme/**]}
    lease: {ttl: 1h}
"""


def test_everything_that_the_schema_has_is_read() -> None:
    document = load(FULL, NOW)
    packages = document.rules[0]
    assert packages.to.hosts == ("index.example", "*.files.example")
    assert packages.ports == (443, "8000-8010")
    assert packages.expires == "2031-12-31T23:59:59Z"
    assert packages.action is Action.ASK
    assert packages.ask.ttl == 900
    assert packages.ask.timeout == 90
    assert packages.http.max.body == 1024 * 1024
    assert packages.http.request_headers.strip == ("x-forwarded-host",)
    assert packages.http.allow[0].headers == {"accept": ("text/*", "*/*")}
    assert document.rules[4].tls.mode is TlsMode.PASSTHROUGH
    assert document.rules[4].tls.expires == "2030-06-30T10:00:00Z"
    assert document.dns.records == {"corp.example": ("10.20.0.5",)}
    assert document.limits.buffer == 1024 * 1024
    assert document.credentials[0].lease.ttl == 3600


def test_the_canonical_form_is_read_as_the_same_and_stays_as_it_is() -> None:
    document = load(FULL, NOW)
    text = canonical(document)
    assert stored(text) == document
    assert load(text, NOW) == document
    assert canonical(stored(text)) == text
    assert list(json.loads(text)) == sorted(json.loads(text))


def test_a_document_that_says_nothing_more_denies_everything() -> None:
    assert load("version: 1").rules == ()


@pytest.mark.parametrize(
    ("text", "place", "code"),
    [
        ("{}", "", "missing_key"),
        ("version: 2", "version", "invalid_value"),
        ("version: '1'", "version", "invalid_value"),
        ("version: 1\nallow_host: x", "allow_host", "unknown_key"),
        ("version: 1\nrules: []", "rules", "empty"),
        ("version: 1\nrules: {}", "rules", "empty"),
        ("version: 1\nrules: x", "rules", "wrong_type"),
        ("version: 1\ngroups: {a: {}}", "groups.a", "empty"),
        ("version: 1\nlimits: {connections: 0}", "limits.connections", "out_of_range"),
        ("version: 1\nlimits: {connections: yes}", "limits.connections", "wrong_type"),
        ("version: 1\nceiling: yes", "ceiling", "wrong_type"),
        ("version: 1\nuse: [base]", "use", "not_supported"),
        ("version: 1\naudit: {sink: journal}", "audit", "not_supported"),
        (rule(allow_host="y.example"), "rules[0].allow_host", "unknown_key"),
        (rule(to={"hosts": []}), "rules[0].to.hosts", "empty"),
        (rule(to={"host": ["x.example"]}), "rules[0].to.host", "unknown_key"),
        (rule(to={"groups": ["missing"]}), "rules[0].to.groups[0]", "unknown_group"),
        (rule(to={"groups": ["public"]}), "rules[0].to.groups[0]", "built_in_group"),
        (rule(id="Not An Id"), "rules[0].id", "invalid_value"),
        (rule(ports=[0]), "rules[0].ports[0]", "invalid_port"),
        (rule(ports=["9-5"]), "rules[0].ports[0]", "invalid_port"),
        (rule(ports=[True]), "rules[0].ports[0]", "invalid_port"),
        (rule(protocol="tcp"), "rules[0].ports", "missing_key"),
        (rule(protocol="grpc"), "rules[0].protocol", "not_supported"),
        (rule(protocol="postgres"), "rules[0].protocol", "not_supported"),
        (rule(http={"graphql": {}}), "rules[0].http.graphql", "not_supported"),
        (rule(http={"mcp": {}}), "rules[0].http.mcp", "not_supported"),
        (rule(http={"allow": [{"methods": ["get"]}]}), "rules[0].http.allow[0].methods[0]", "invalid_method"),
        (rule(http={"allow": [{"methods": ["TRACE"]}]}), "rules[0].http.allow[0].methods[0]", "invalid_method"),
        (rule(http={"allow": [{"paths": ["/a/../b"]}]}), "rules[0].http.allow[0].paths[0]", "invalid_path"),
        (rule(http={"allow": [{"paths": ["/@*%2F*"]}]}), "rules[0].http.allow[0].paths", "encoded_slash"),
        (rule(http={"allow": [{"query": {}}]}), "rules[0].http.allow[0].query", "empty"),
        (rule(http={"request_headers": {"set": {"Host": "y.example"}}}), "rules[0].http.request_headers.set.host", "framing_header"),
        (rule(http={"request_headers": {"set": {"Authorization": "x"}}}), "rules[0].http.request_headers.set.authorization", "secret_in_policy"),
        (rule(http={"request_headers": {"set": {"x-a": "b\r\nc: d"}}}), "rules[0].http.request_headers.set.x-a", "invalid_header"),
        (rule(http={"max": {"body": "1 MB of it"}}), "rules[0].http.max.body", "invalid_size"),
        (rule(action="deny", http={"allow": [{"methods": ["GET"]}]}), "rules[0].http.allow", "contradiction"),
        (rule(action="deny", protocol="tcp"), "rules[0].protocol", "contradiction"),
        (rule(ask={"scope": "once"}), "rules[0].ask", "contradiction"),
        (rule(git={"operations": ["push"]}), "rules[0].git", "contradiction"),
        (rule(expires="2020-01-01"), "rules[0].expires", "expired"),
        (rule(expires="2031-01-01T00:00:00"), "rules[0].expires", "invalid_date"),
        (rule(expires="soon"), "rules[0].expires", "invalid_date"),
        (rule(route={"via": "http://proxy.example"}), "rules[0].route.via", "invalid_value"),
        (rule(reason="a\x1b[31m"), "rules[0].reason", "invalid_value"),
        (rule(credentials=["gone"]), "rules[0].credentials[0]", "unknown_credential"),
        (rule(to={"cidrs": ["203.0.113.0/24"]}), "rules[0].to", "address_without_name"),
        (rule(to={"cidrs": ["10.0.0.0/8"]}, protocol="tcp", ports=[1]), "rules[0].to", "private_address"),
        (rule(tls={"upstream_ca": ["no certificate"]}), "rules[0].tls.upstream_ca[0]", "invalid_certificate"),
        (rule(tls={"fronting_risk": "accepted"}), "rules[0].tls", "contradiction"),
    ],
)  # fmt: skip
def test_g16_what_is_wrong_is_refused_with_its_place(text: str, place: str, code: str) -> None:
    assert problems_of(text)[place] == code


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f.1", "127.1", "①②⑦.0.0.1", "evil\0.example", "pypi\u200b.example", "bücher.example", "x.example:443", "*x.example",
     "https://x.example", "x.example/path", "a_b.example", "localhost"],
)  # fmt: skip
def test_n02_d15_hosts_that_are_read_in_two_ways_are_refused(host: str) -> None:
    assert problems_of(rule(to={"hosts": [host]})) == {"rules[0].to.hosts[0]": "invalid_host"}


def test_a_host_of_mixed_scripts_is_refused() -> None:
    assert problems_of(rule(to={"hosts": ["xn--pypl-53dc.example"]})) == {"rules[0].to.hosts[0]": "mixed_script"}


@pytest.mark.parametrize("host", ["*.com", "**.com", "*.co.uk", "**.co.uk", "*.test"])
def test_g12_a_wildcard_over_a_public_suffix_is_refused(host: str) -> None:
    assert set(problems_of(rule(to={"hosts": [host]}))) == {"rules[0].to.hosts[0]"}


@pytest.mark.parametrize(
    "cidr", ["10.0.0.0/", "10.0.0.1/8", "10.0.0.0", "10.0.0.0/33", "0x0a.0.0.0/8", "2001:db8::1/32"]
)
def test_g17_a_cidr_with_host_bits_or_without_length_is_refused(cidr: str) -> None:
    found = problems_of(rule(to={"cidrs": [cidr]}, protocol="tcp", ports=[5432]))
    assert found == {"rules[0].to.cidrs[0]": "invalid_cidr"}


@pytest.mark.parametrize(
    ("port", "code"), [(25, "special_port"), (853, "special_port"), (53, "dns_port"), ("1-65535", "dns_port")]
)
def test_g13_special_ports_need_to_be_accepted_and_53_is_never(port: int | str, code: str) -> None:
    assert code in problems_of(rule(ports=[port], protocol="tcp")).values()
    if port in (25, 853):
        load(rule(ports=[port], protocol="tcp", special_ports="accepted"), NOW)


def test_a_rule_without_ports_is_for_those_of_its_protocol() -> None:
    from hatchway.domain.policy.ports import ports_of

    assert str(ports_of(load(rule()).rules[0])) == "443"
    assert str(ports_of(load(rule(tls={"mode": "none"})).rules[0])) == "80"
    assert str(ports_of(load(rule(protocol="git")).rules[0])) == "443"
    assert str(ports_of(load(rule(action="deny")).rules[0])) == "any port"


PASS = {"protocol": "tls", "tls": {"mode": "passthrough", "fronting_risk": "accepted", "expires": "2030-06-30"}}


def two(first: dict[str, Any], second: dict[str, Any]) -> str:
    rules = [{"id": "one", **first}, {"id": "two", **second}]
    return json.dumps({"version": 1, "rules": rules})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"to": {"hosts": ["x.example"]}}, {"to": {"hosts": ["x.example"]}, **PASS}),
        ({"to": {"hosts": ["a.x.example"]}}, {"to": {"hosts": ["*.x.example"]}, **PASS}),
        ({"to": {"hosts": ["**.x.example"]}}, {"to": {"hosts": ["*.b.x.example"]}, **PASS}),
        ({"to": {"hosts": ["x.example"]}, "ports": ["400-500"]}, {"to": {"hosts": ["x.example"]}, **PASS}),
        ({"to": {"hosts": ["x.example"]}}, {"to": {"hosts": ["x.example"]}, "protocol": "tcp", "ports": [443]}),
        ({"to": {"hosts": ["x.example"]}}, {"to": {"hosts": ["x.example"]}, "tls": {"mode": "none"}, "ports": [443]}),
    ],
)  # fmt: skip
def test_intercept_and_passthrough_do_not_overlap(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert problems_of(two(first, second)) == {"rules[1]": "overlap"}
    assert problems_of(two(second, first)) == {"rules[1]": "overlap"}


def test_apart_they_may_stand_beside_each_other() -> None:
    load(two({"to": {"hosts": ["x.example"]}}, {"to": {"hosts": ["*.x.example"]}, **PASS}), NOW)
    load(two({"to": {"hosts": ["x.example"]}}, {"to": {"hosts": ["x.example"]}, "ports": [8443], **PASS}), NOW)
    load(two({"to": {"hosts": ["x.example"]}}, {"to": {"hosts": ["x.example"]}, "action": "deny"}), NOW)


@pytest.mark.parametrize(
    ("tls", "place", "code"),
    [
        ({"mode": "passthrough", "expires": "2030-06-30"}, "rules[0].tls", "fronting_risk"),
        ({"mode": "passthrough", "fronting_risk": "accepted"}, "rules[0].tls", "passthrough_without_expiry"),
        ({"mode": "passthrough", "fronting_risk": "accepted", "expires": "2029-06-30"}, "rules[0].tls.expires", "expired"),
        ({"mode": "passthrough", "fronting_risk": "accepted", "expires": "2040-01-01"}, "rules[0].tls.expires", "too_late"),
    ],
)  # fmt: skip
def test_t18_passthrough_needs_an_accepted_risk_and_an_end(tls: dict[str, Any], place: str, code: str) -> None:
    assert problems_of(rule(protocol="tls", tls=tls))[place] == code


@pytest.mark.parametrize(
    "fields",
    [
        {"protocol": "tls", "tls": PASS["tls"]},
        {"protocol": "tls"},
        {"tls": {"mode": "none"}},
        {"protocol": "tcp", "ports": [443]},
        {"action": "deny"},
    ],
)
def test_c08_a_credential_without_interception_is_refused(fields: dict[str, Any]) -> None:
    text = json.loads(rule(credentials=["key"], **fields))
    text["credentials"] = [{"id": "key", "source": "store:key", "inject": [{"where": "header"}]}]
    assert problems_of(json.dumps(text))["rules[0].credentials"] == "credential_without_interception"


@pytest.mark.parametrize("source", ["env:HOME", "command:id", "file:/etc/shadow", "store:../x", "https://x.example"])
def test_c18_a_credential_comes_from_what_the_operator_registered(source: str) -> None:
    text = json.loads(rule(credentials=["key"]))
    text["credentials"] = [{"id": "key", "source": source, "inject": [{"where": "header"}]}]
    assert problems_of(json.dumps(text)) == {"credentials[0].source": "invalid_value"}


@pytest.mark.parametrize("where", ["sigv4", "body", "hmac", "mtls", "jwt_exchange"])
def test_kinds_of_injection_that_come_later_are_named_as_such(where: str) -> None:
    text = json.loads(rule(credentials=["key"]))
    text["credentials"] = [{"id": "key", "source": "store:key", "inject": [{"where": where}]}]
    assert problems_of(json.dumps(text)) == {"credentials[0].inject[0].where": "not_supported"}


def test_g25_observing_needs_an_end_that_is_near() -> None:
    assert problems_of("version: 1\nmode: observe") == {"mode": "observe_without_expiry"}
    assert problems_of("version: 1\nmode: observe\nexpires: 2029-01-01") == {"expires": "expired"}
    assert problems_of("version: 1\nmode: observe\nexpires: 2031-01-01") == {"expires": "too_late"}
    assert problems_of("version: 1\nexpires: 2031-01-01") == {"expires": "contradiction"}
    load("version: 1\nmode: observe\nexpires: 2030-04-01", NOW)


def test_all_that_is_wrong_is_said_at_once_with_its_line() -> None:
    text = """version: 1
modee: observe
rules:
  - id: a
    to: {hosts: [127.1, x.example], cidrs: [10.0.0.1/8]}
    ports:
      - 443
      - 70000
  - id: b
    to: {hosts: ['*.com']}
"""
    with pytest.raises(PolicyError) as caught:
        load(text)
    assert [(problem.line, problem.place) for problem in caught.value.problems] == [
        (2, "modee"),
        (5, "rules[0].to.hosts[0]"),
        (5, "rules[0].to.cidrs[0]"),
        (8, "rules[0].ports[1]"),
        (10, "rules[1].to.hosts[0]"),
    ]
    assert "`mode`" in caught.value.problems[0].remedy
    assert "10.0.0.0/8" in caught.value.problems[2].cause


@pytest.mark.parametrize(
    "text",
    [
        "", "a: &x 1", "a: *x", "a: !!python/object/apply:os.system [id]", "!!map {}", "a: 1\na: 2", "{\"a\": 1, \"a\": 2}", "<<: {a: 1}",
        "? [a]\n: 1", "a: 1\n---\nb: 2", "a: [", "\x00", "{\"a\": NaN}", "{\"a\": 1" + "0" * 5000 + "}", "[" * 100 + "]" * 100,
        "{\"a\":" * 100 + "1" + "}" * 100, "a: " + "x" * 600_000, "a: {b: {c: {d: {e: {f: {g: {h: {i: {j: {k: {l: {m: {n: {o: {p: {q: 1}}}}}}}}}}}}}}}}",
    ],
)  # fmt: skip
def test_what_no_policy_needs_of_yaml_and_json_is_refused(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load(text)
    assert caught.value.problems[0].code == "unreadable"


def test_words_of_yaml_mean_what_they_look_like() -> None:
    document = load("version: 1\ngroups: {no: {hosts: [no.example]}, on: {hosts: [y.example]}}\ndescription: 'yes'")
    assert sorted(document.groups) == ["no", "on"]


def test_bounds_hold() -> None:
    rules = [{"id": f"r{number}", "to": {"hosts": ["x.example"]}} for number in range(schema.MAX_RULES + 1)]
    assert problems_of(json.dumps({"version": 1, "rules": rules})) == {"rules": "too_many"}
    load(json.dumps({"version": 1, "rules": rules[:-1]}))
    assert problems_of(rule(to={"hosts": ["x.example"] * 257})) == {"rules[0].to.hosts": "too_many"}
    assert problems_of(rule(reason="x" * 501)) == {"rules[0].reason": "too_long"}
    assert len(problems_of(json.dumps({"version": 1, **{f"k{number}": 1 for number in range(500)}}))) == 100


def test_many_hosts_are_bounded_and_compared_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def document(hosts: int) -> str:
        groups = {
            f"g{at}": {"hosts": [f"a{at * 256 + one}.x.example" for one in range(min(256, hosts - at * 256))]}
            for at in range(-(-hosts // 256))
        }
        rules = [
            {"id": "many", "to": {"groups": list(groups)}},
            {"id": "other", "to": {"hosts": ["*.y.example"]}, **PASS},
        ]
        return json.dumps({"version": 1, "groups": groups, "rules": rules})

    compared = 0
    overlaps = HostPattern.overlaps

    def counted(one: HostPattern, other: HostPattern) -> bool:
        nonlocal compared
        compared += 1
        return overlaps(one, other)

    monkeypatch.setattr(HostPattern, "overlaps", counted)
    load(document(4095), NOW)
    assert compared == 0
    assert problems_of(document(4096)) == {"rules": "too_many"}
    load(document(1).replace("*.y.example", "x.example"), NOW)
    assert problems_of(document(1).replace("*.y.example", "*.x.example")) == {"rules[1]": "overlap"}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


WORDS = sorted(
    {
        *keys(json.loads(canonical(load(FULL)))),
        "hosts",
        "x.example",
        "*.x.example",
        "GET",
        "deny",
        "passthrough",
        "15m",
        "grpc",
    }
)
PLAIN = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 70000),
        st.floats(allow_nan=False),
        st.sampled_from(WORDS),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(WORDS), PLAIN, max_size=5))
@settings(max_examples=60, deadline=None)
def test_whatever_is_written_is_read_or_refused_and_what_is_read_is_canonical(parts: dict[str, Any]) -> None:
    try:
        document = load(json.dumps({"version": 1, **parts}), NOW)
    except PolicyError:
        return
    assert stored(canonical(document)) == document


@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(PolicyError):
        document = load(text)
        assert stored(canonical(document)) == document
