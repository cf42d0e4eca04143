"""What a policy answers, stage by stage."""

import json
from ipaddress import ip_address
from typing import Any

import pytest

from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.rules import Entry
from hatchway.domain.policy.schema import ClientAuth
from hatchway.domain.policy.verdicts import Action, Flow, Protocol, Request, TlsMode, Verdict

NOW = 1_900_000_000.0


def policy(*documents: str, **tiers: str) -> Policy:
    """Of documents for the sandbox, or with names that begin with their tier."""
    named = [("sandbox", f"d{number}", text) for number, text in enumerate(documents)]
    named += [(name.partition("_")[0], name, text) for name, text in tiers.items()]
    return compile_policy(
        [TieredDocument(tier=tier, name=name, document=load("version: 1\n" + text, NOW)) for tier, name, text in named]
    )


def get(url: str, method: str = "GET", **fields: Any) -> Request:
    scheme, _, rest = url.partition("://")
    authority, slash, target = rest.partition("/")
    host, _, port = authority.partition(":")
    path, _, query = (slash + target).partition("?")
    tls = scheme in ("https", "wss")
    return Request(
        host=host, port=int(port or (443 if tls else 80)), tls=tls, method=method, path=path or "/", query=query,
        websocket=scheme in ("ws", "wss"), **fields,
    )  # fmt: skip


def said(verdict: Verdict) -> str:
    return verdict.reason if verdict.action is Action.DENY else str(verdict.action)


PACKAGES = """
rules:
  - id: packages
    to: {hosts: [index.example]}
    http: {allow: [{methods: [GET, HEAD], paths: [/simple/**]}]}
"""


def test_without_documents_everything_is_denied() -> None:
    nothing = compile_policy([])
    assert said(nothing.name("index.example", NOW)) == "no_rule"
    assert said(nothing.connect(Flow(host="index.example", port=443), NOW)) == "no_rule"
    assert said(nothing.request(get("https://index.example/"), NOW)) == "no_rule"
    assert said(nothing.connect(Flow(address="192.0.78.1", port=443), NOW)) == "dst_unbound"
    assert nothing.allowed_names(NOW) == ()


@pytest.mark.parametrize(
    ("url", "method", "answer"),
    [
        ("https://index.example/simple/x/", "GET", "allow"),
        ("https://index.example/simple/x/", "HEAD", "allow"),
        ("https://index.example/simple/x/", "POST", "method_not_allowed"),
        ("https://index.example/simple/x/", "DELETE", "method_not_allowed"),
        ("https://index.example/upload", "GET", "path_not_allowed"),
        ("https://index.example/upload", "POST", "path_not_allowed"),
        ("https://index.example:8443/simple/x/", "GET", "port_not_allowed"),
        ("http://index.example:443/simple/x/", "GET", "tls_required"),
        ("wss://index.example/simple/x/", "GET", "websocket_not_allowed"),
        ("https://upload.index.example/simple/x/", "GET", "no_rule"),
        ("https://other.example/simple/x/", "GET", "no_rule"),
        ("https://index.example/simple/@a%2Fb", "GET", "path_ambiguous"),
    ],
)
def test_a01_a_package_index_is_read_and_not_written(url: str, method: str, answer: str) -> None:
    verdict = policy(PACKAGES).request(get(url, method), NOW)
    assert said(verdict) == answer
    assert verdict.explanation or answer == "allow"
    assert (verdict.terms is not None) is (answer == "allow")


def test_stages_of_a_flow() -> None:
    packages = policy(PACKAGES)
    assert packages.name("index.example", NOW).action is Action.ALLOW
    assert said(packages.name("upload.index.example", NOW)) == "no_rule"
    verdict = packages.connect(Flow(host="index.example", port=443), NOW)
    assert (verdict.action, verdict.protocol, verdict.tls) == (Action.ALLOW, Protocol.HTTP, TlsMode.INTERCEPT)
    assert verdict.versions == ("1.1", "2")
    assert said(packages.connect(Flow(host="index.example", port=22), NOW)) == "port_not_allowed"
    assert packages.allowed_names(NOW) == ("index.example",)


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "CONNECT"])
def test_h32_some_methods_never_pass(method: str) -> None:
    everything = policy(
        "default: ask\nrules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: ['*']}]}}, {id: b, to: {hosts: [y.example]}}]"
    )
    for host in ("x.example", "y.example", "z.example"):
        assert said(everything.request(get(f"https://{host}/", method), NOW)) == "method_not_allowed"


def test_g21_http_in_clear_needs_a_rule_of_its_own() -> None:
    clear = policy("rules: [{id: a, to: {hosts: [x.example]}, tls: {mode: none}}]")
    assert said(clear.request(get("http://x.example/"), NOW)) == "allow"
    assert said(clear.request(get("https://x.example:80/"), NOW)) == "clear_required"
    assert clear.connect(Flow(host="x.example", port=80), NOW).tls is TlsMode.NONE
    assert said(policy(PACKAGES).connect(Flow(host="index.example", port=80), NOW)) == "port_not_allowed"


@pytest.mark.parametrize("address", ["203.0.113.9", "192.0.78.1"])
def test_n01_d01_an_address_without_a_name_or_rule_is_denied(address: str) -> None:
    assert said(policy(PACKAGES).connect(Flow(address=address, port=443), NOW)) == "dst_unbound"


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "64:ff9b::a9fe:a9fe",
        "fd00:ec2::254",
        "100.100.100.200",
    ],
)
@pytest.mark.parametrize("tier", ["platform", "project", "template", "sandbox"])
def test_n32_n31_no_tier_lifts_the_floor(tier: str, address: str) -> None:
    wide = """
private_networks: [0.0.0.0/0, '::/0']
rules:
  - {id: all, to: {cidrs: [0.0.0.0/0, '::/0']}, protocol: tcp, ports: [80, 443], resolve: {private: allow}}
  - {id: name, to: {hosts: [x.example]}, resolve: {private: allow}}
"""
    opened = policy(**{tier: wide})
    assert said(opened.connect(Flow(address=address, port=80), NOW)) == "platform_denied"
    passing = opened.connect(Flow(host="x.example", port=443), NOW)
    assert passing.action is Action.ALLOW
    assert said(opened.address(ip_address(address), 443, passing, NOW)) == "platform_denied"


def test_d05_d06_ports_of_names_and_mail_are_closed() -> None:
    rules = "rules: [{id: a, to: {hosts: [x.example]}, protocol: tcp, ports: [25, 853], special_ports: accepted}]"
    for tier, answer in (
        ("platform", "allow"),
        ("project", "allow"),
        ("template", "platform_denied"),
        ("sandbox", "platform_denied"),
    ):
        opened = policy(**{tier: rules})
        assert said(opened.connect(Flow(host="x.example", port=25), NOW)) == answer
        assert said(opened.connect(Flow(host="x.example", port=853), NOW)) == answer
        assert said(opened.connect(Flow(host="x.example", port=53), NOW)) == "platform_denied"


PRIVATE = "rules: [{id: a, to: {hosts: [x.example]}, resolve: {private: allow}}]"


@pytest.mark.parametrize(
    ("documents", "address", "answer"),
    [
        ({"platform": PRIVATE}, "10.1.0.1", "allow"),
        ({"project": PRIVATE}, "10.1.0.1", "allow"),
        ({"template": PRIVATE}, "10.1.0.1", "private_denied"),
        ({"sandbox": PRIVATE}, "10.1.0.1", "private_denied"),
        ({"sandbox": PRIVATE, "project": "private_networks: [10.1.0.0/16]"}, "10.1.0.1", "allow"),
        ({"sandbox": PRIVATE, "project": "private_networks: [10.1.0.0/16]"}, "10.2.0.1", "private_denied"),
        ({"project": PRIVATE, "platform": "private_networks: [10.2.0.0/16]"}, "10.1.0.1", "private_denied"),
        ({"sandbox": PRIVATE, "project": "private_networks: [10.0.0.0/8]", "platform": "private_networks: [10.2.0.0/16]"}, "10.1.0.1", "private_denied"),
        ({"sandbox": PRIVATE, "project": "private_networks: [10.0.0.0/8]", "platform": "private_networks: [10.2.0.0/16]"}, "10.2.0.1", "allow"),
        ({"sandbox": PRIVATE, "project": "private_networks: [10.1.0.0/16]", "platform": "private_networks: [10.2.0.0/16]"}, "10.2.0.1", "private_denied"),
        ({"sandbox": PRIVATE, "template": "private_networks: [10.1.0.0/16]"}, "10.1.0.1", "private_denied"),
        ({"platform": "rules: [{id: a, to: {hosts: [x.example]}}]"}, "10.1.0.1", "private_denied"),
        ({"platform": "rules: [{id: a, to: {hosts: [x.example]}}]"}, "192.0.78.1", "allow"),
    ],
)  # fmt: skip
def test_d10_private_addresses_are_for_who_was_given_them(documents: dict[str, str], address: str, answer: str) -> None:
    asked = policy(**documents)
    passing = asked.request(get("https://x.example/"), NOW)
    assert said(asked.address(ip_address(address), 443, passing, NOW)) == answer


def test_denied_networks_are_denied_to_names_too() -> None:
    asked = policy(
        PACKAGES,
        platform="rules: [{id: no, to: {cidrs: [192.0.78.0/24]}, action: deny}, {id: none, to: {groups: [private]}, action: deny}]",
    )
    passing = asked.connect(Flow(host="index.example", port=443), NOW)
    assert said(asked.address(ip_address("192.0.78.1"), 443, passing, NOW)) == "denied_by_rule"
    assert said(asked.address(ip_address("192.0.79.1"), 443, passing, NOW)) == "allow"
    assert (
        said(asked.address(ip_address("192.0.79.1"), 443, passing, NOW, own={ip_address("192.0.79.1")}))
        == "platform_denied"
    )


def test_g15_deny_beats_ask_beats_allow_in_whatever_order() -> None:
    allow = "{id: allow, to: {hosts: ['**.x.example']}}"
    ask = "{id: ask, to: {hosts: [a.x.example]}, action: ask, http: {allow: [{methods: [POST]}]}}"
    deny = "{id: deny, to: {hosts: ['*.x.example']}, action: deny, http: {deny: [{paths: [/secret/**]}]}, reason: Not for agents}"
    for rules in (f"[{allow}, {ask}, {deny}]", f"[{deny}, {ask}, {allow}]"):
        asked = policy(f"rules: {rules}")
        assert said(asked.request(get("https://a.x.example/"), NOW)) == "allow"
        assert said(asked.request(get("https://a.x.example/", "POST"), NOW)) == "ask"
        assert said(asked.request(get("https://b.x.example/", "POST"), NOW)) == "allow"
        denied = asked.request(get("https://a.x.example/secret/x", "POST"), NOW)
        assert said(denied) == "denied_by_rule"
        assert "Not for agents" in denied.explanation
        assert asked.connect(Flow(host="a.x.example", port=443), NOW).action is Action.ALLOW


def test_what_a_rule_denies_no_other_rule_allows() -> None:
    asked = policy(
        "rules: [{id: a, to: {hosts: [x.example]}, http: {allow: [{methods: ['*']}], deny: [{methods: [DELETE]}]}}, {id: b, to: {hosts: [x.example]}}]"
    )
    assert said(asked.request(get("https://x.example/", "DELETE"), NOW)) == "denied_by_rule"
    assert said(asked.request(get("https://x.example/", "PUT"), NOW)) == "allow"


def test_an_opaque_flow_is_not_a_way_around_what_is_denied_to_requests() -> None:
    opaque = "rules: [{id: a, to: {hosts: [x.example]}, protocol: tcp, ports: [443]}]"
    assert policy(opaque).connect(Flow(host="x.example", port=443), NOW).protocol is Protocol.TCP
    denied = policy(
        opaque, platform="rules: [{id: no, to: {hosts: [x.example]}, action: deny, http: {deny: [{methods: [POST]}]}}]"
    )
    assert said(denied.connect(Flow(host="x.example", port=443), NOW)) == "inspection_required"
    passthrough = "rules: [{id: a, to: {hosts: [x.example]}, protocol: tls, tls: {mode: passthrough, fronting_risk: accepted, expires: 2030-06-30}}]"
    assert policy(passthrough).connect(Flow(host="x.example", port=443), NOW).tls is TlsMode.PASSTHROUGH
    seen = policy(passthrough, project="rules: [{id: a, to: {hosts: [x.example]}}]").connect(
        Flow(host="x.example", port=443), NOW
    )
    assert (seen.protocol, seen.tls) == (Protocol.HTTP, TlsMode.INTERCEPT)


def test_a_tunnel_that_is_asked_about_is_asked_about_as_http_too() -> None:
    tunnel = "rules: [{id: a, to: {hosts: [x.example]}, protocol: tcp, ports: [443], action: ask}]"
    asked = policy("rules: [{id: b, to: {hosts: [x.example]}}]", project=tunnel)
    verdict = asked.connect(Flow(host="x.example", port=443), NOW)
    assert (said(verdict), verdict.protocol, verdict.tls) == ("ask", Protocol.HTTP, TlsMode.INTERCEPT)


def test_addresses_are_for_rules_that_name_them() -> None:
    asked = policy(
        project="rules: [{id: db, to: {cidrs: [10.20.0.0/16]}, protocol: tcp, ports: [5432], resolve: {private: allow}}]"
    )
    verdict = asked.connect(Flow(address="10.20.3.4", port=5432), NOW)
    assert (said(verdict), verdict.protocol, verdict.tls) == ("allow", Protocol.TCP, TlsMode.NONE)
    assert said(asked.address(ip_address("10.20.3.4"), 5432, verdict, NOW)) == "allow"
    assert said(asked.connect(Flow(address="10.20.3.4", port=5433), NOW)) == "dst_unbound"
    assert said(asked.connect(Flow(address="10.21.3.4", port=5432), NOW)) == "dst_unbound"
    assert said(asked.connect(Flow(address="::ffff:10.20.3.4", port=5432), NOW)) == "allow"


def test_d01_rehoming_is_for_rules_that_say_so() -> None:
    asked = policy(
        "rules: [{id: a, to: {hosts: [x.example]}, resolve: {rehome: true}}, {id: b, to: {hosts: [y.example]}}]"
    )
    assert asked.rehomes("x.example", 443, NOW)
    assert not asked.rehomes("x.example", 80, NOW)
    assert not asked.rehomes("y.example", 443, NOW)


QUERY = """
rules:
  - id: a
    to: {hosts: [x.example]}
    http:
      allow:
        - {paths: [/search], query: {q: '*', page: ['', '1*']}}
        - {paths: [/none], query: none}
        - {paths: [/typed], headers: {accept: [text/*]}}
      deny: [{query: {cmd: [delete*]}}, {headers: {x-mode: [admin]}}]
"""


@pytest.mark.parametrize(
    ("target", "headers", "answer"),
    [
        ("/search?q=x", (), "allow"),
        ("/search?q=x&page=12", (), "allow"),
        ("/search?q=x&page=2", (), "query_not_allowed"),
        ("/search", (), "query_not_allowed"),
        ("/search?q=x&other=1", (), "query_not_allowed"),
        ("/search?q=x;other=1", (), "query_not_allowed"),
        ("/search?q=%zz", (), "query_not_allowed"),
        ("/search?q=%ff", (), "query_not_allowed"),
        ("/search?q=x&", (), "query_not_allowed"),
        ("/search?q=x&%63md=delete", (), "denied_by_rule"),
        ("/search?q=x;cmd=deleteall", (), "denied_by_rule"),
        ("/search?cmd=delete+all", (), "denied_by_rule"),
        ("/none", (), "allow"),
        ("/none?x", (), "query_not_allowed"),
        ("/typed", (("accept", "text/html"),), "allow"),
        ("/typed", (("accept", "text/html"), ("accept", "image/png")), "header_not_allowed"),
        ("/typed", (), "header_not_allowed"),
        ("/none", (("x-mode", "admin"),), "denied_by_rule"),
    ],
)  # fmt: skip
def test_queries_and_headers(target: str, headers: tuple[tuple[str, str], ...], answer: str) -> None:
    assert said(policy(QUERY).request(get(f"https://x.example{target}", headers=headers), NOW)) == answer


def test_h28_an_encoded_slash_passes_where_a_rule_admits_it_and_never_past_a_denial() -> None:
    asked = policy("""
rules:
  - {id: npm, to: {hosts: [x.example]}, http: {encoded_slash: true, allow: [{paths: ['/*', '/-/**']}], deny: [{paths: ['/@secret/**']}]}}
""")
    assert said(asked.request(get("https://x.example/@scope%2Fname"), NOW)) == "allow"
    assert said(asked.request(get("https://x.example/@secret%2Fname"), NOW)) == "denied_by_rule"
    assert said(asked.request(get("https://x.example/a/b"), NOW)) == "path_not_allowed"


GIT = """
rules:
  - {id: acme, to: {hosts: [git.example]}, protocol: git, git: {repositories: ['/acme/*']}}
  - {id: tool, to: {hosts: [git.example]}, protocol: git, git: {operations: [fetch, push], repositories: ['/acme/tool']}}
"""


@pytest.mark.parametrize(
    ("url", "method", "answer"),
    [
        ("/acme/x.git/info/refs?service=git-upload-pack", "GET", "allow"),
        ("/acme/x/info/refs?service=git-upload-pack", "GET", "allow"),
        ("/acme/x.git/git-upload-pack", "POST", "allow"),
        ("/acme/x.git/info/refs?service=git-receive-pack", "GET", "query_not_allowed"),
        ("/acme/x.git/git-receive-pack", "POST", "path_not_allowed"),
        ("/acme/tool.git/info/refs?service=git-receive-pack", "GET", "allow"),
        ("/acme/tool/git-receive-pack", "POST", "allow"),
        ("/acme/tool.git/git-receive-pack", "POST", "allow"),
        ("/acme/x.git/info/refs", "GET", "query_not_allowed"),
        ("/acme/x.git/info/refs?service=git-upload-pack&service=git-receive-pack", "GET", "query_not_allowed"),
        ("/acme/x.git/HEAD", "GET", "path_not_allowed"),
        ("/other/x.git/info/refs?service=git-upload-pack", "GET", "path_not_allowed"),
        ("/acme/x.git/info/lfs/objects/batch", "POST", "path_not_allowed"),
        ("/acme/y/x.git/git-upload-pack", "POST", "path_not_allowed"),
    ],
)  # fmt: skip
def test_git_is_fetched_and_pushed_where_each_is_allowed(url: str, method: str, answer: str) -> None:
    assert said(policy(GIT).request(get(f"https://git.example{url}", method), NOW)) == answer


def test_a02_pushing_is_denied_whichever_rule_would_let_it_pass() -> None:
    asked = policy(
        "rules: [{id: all, to: {hosts: [git.example]}}]",
        project="rules: [{id: no-push, to: {hosts: [git.example]}, action: deny, protocol: git, git: {operations: [push]}}]",
    )
    assert said(asked.request(get("https://git.example/a/b.git/git-receive-pack", "POST"), NOW)) == "denied_by_rule"
    assert (
        said(asked.request(get("https://git.example/a/b.git/info/refs?x=1&service=git-receive-pack"), NOW))
        == "denied_by_rule"
    )
    assert said(asked.request(get("https://git.example/a/b.git/git-upload-pack", "POST"), NOW)) == "allow"


def test_h25_websockets_are_opted_into() -> None:
    asked = policy(
        "rules: [{id: ws, to: {hosts: [ws.example]}, protocol: websocket, http: {allow: [{paths: [/chat]}]}, websocket: {max_frame: 1KiB}}]"
    )
    verdict = asked.request(get("wss://ws.example/chat"), NOW)
    assert said(verdict) == "allow"
    assert verdict.terms is not None
    assert verdict.terms.websocket.max_frame == 1024
    assert said(asked.request(get("https://ws.example/chat"), NOW)) == "protocol_not_allowed"
    assert said(asked.request(get("wss://ws.example/other"), NOW)) == "path_not_allowed"


def test_what_expires_ends_when_it_said() -> None:
    asked = policy("rules: [{id: a, to: {hosts: [x.example]}, expires: '2030-03-20T00:00:00Z'}]")
    until = asked.next_change(NOW)
    assert until is not None
    assert said(asked.request(get("https://x.example/"), until - 1)) == "allow"
    for at in (until, until + 1):
        assert said(asked.request(get("https://x.example/"), at)) == "expired"
        assert said(asked.connect(Flow(host="x.example", port=443), at)) == "expired"
        assert asked.name("x.example", at).action is Action.DENY
        assert asked.allowed_names(at) == ()
    assert asked.next_change(until) is None


def test_t18_passthrough_ends_by_itself() -> None:
    asked = policy(
        "rules: [{id: a, to: {hosts: [x.example]}, protocol: tls, tls: {mode: passthrough, fronting_risk: accepted, expires: 2030-03-20}}]"
    )
    until = asked.next_change(NOW)
    assert until is not None
    assert said(asked.connect(Flow(host="x.example", port=443), until - 1)) == "allow"
    assert said(asked.connect(Flow(host="x.example", port=443), until)) == "expired"


OBSERVE = "mode: observe\nexpires: 2030-04-01\nrules: [{id: no, to: {hosts: [bad.example]}, action: deny}]"


def test_g25_observing_lets_pass_what_nobody_else_denies_until_it_ends() -> None:
    asked = policy(OBSERVE, project="rules: [{id: never, to: {hosts: [worse.example]}, action: deny}]")
    for host in ("any.example", "bad.example"):
        connection = asked.connect(Flow(host=host, port=443), NOW)
        assert (said(connection), connection.observed) == ("allow", True)
        request = asked.request(get(f"https://{host}/", "POST"), NOW)
        assert (said(request), request.observed, request.reason) == ("allow", True, "observed")
        assert asked.name(host, NOW).action is Action.ALLOW
    assert said(asked.connect(Flow(host="worse.example", port=443), NOW)) == "denied_by_rule"
    assert said(asked.connect(Flow(host="any.example", port=53), NOW)) == "platform_denied"
    assert said(asked.connect(Flow(address="192.0.78.1", port=443), NOW)) == "dst_unbound"
    assert asked.allowed_names(NOW) is None
    after = asked.next_change(NOW)
    assert after is not None
    assert said(asked.connect(Flow(host="any.example", port=443), after)) == "no_rule"
    assert said(asked.connect(Flow(host="bad.example", port=443), after)) == "denied_by_rule"
    assert asked.allowed_names(after) == ()


def test_what_no_rule_names_may_be_asked_about() -> None:
    asked = policy("default: ask")
    assert asked.connect(Flow(host="any.example", port=443), NOW).action is Action.ALLOW
    request = asked.request(get("https://any.example/x", "POST"), NOW)
    assert (said(request), request.ask_key) == ("ask", "any.example:443 POST /x")
    assert asked.connect(Flow(host="any.example", port=5432), NOW).action is Action.ASK


def test_an_answer_holds_for_what_the_rule_says() -> None:
    asked = policy("""
rules:
  - {id: a, to: {hosts: [x.example]}, action: ask, ask: {scope: session, key: [host, method]}, http: {allow: [{methods: ['*']}]}}
  - {id: t, to: {hosts: [t.example]}, action: ask, protocol: tcp, ports: [22]}
""")
    one, other = (asked.request(get(f"https://x.example/{path}", "POST"), NOW) for path in "ab")
    assert one.ask_key == other.ask_key == "host=x.example method=POST"
    assert asked.request(get("https://x.example/a"), NOW).ask_key != one.ask_key
    assert one.ask is not None
    assert one.ask.scope == "session"
    tunnel = asked.connect(Flow(host="t.example", port=22), NOW)
    assert (said(tunnel), tunnel.ask_key) == ("ask", "host=t.example method= path= port=22")


CREDENTIALS = """
rules:
  - {id: api, to: {hosts: [api.example]}, credentials: [key], http: {allow: [{methods: ['*']}]}}
  - {id: narrow, to: {hosts: [api.example]}, http: {allow: [{paths: [/public/**]}]}}
credentials:
  - {id: key, source: 'store:key', inject: [{where: header}], only: {methods: [GET, POST], paths: ['/repos/acme/**']}}
"""


def test_c17_a_credential_is_for_the_requests_that_it_names() -> None:
    asked = policy(CREDENTIALS)
    assert asked.request(get("https://api.example/repos/acme/x", "POST"), NOW).credentials == ("key",)
    assert asked.request(get("https://api.example/repos/acme/x", "DELETE"), NOW).credentials == ()
    assert asked.request(get("https://api.example/repos/other/x"), NOW).credentials == ()
    assert asked.request(get("https://api.example/public/x"), NOW).credentials == ()
    bound = asked.credentials["key"]
    assert (bound.rules, bound.hosts, bound.ports, bound.methods) == (
        ("api",),
        ("api.example",),
        (443,),
        ("GET", "POST"),
    )
    terms = asked.request(get("https://api.example/repos/acme/x"), NOW).terms
    assert terms is not None
    assert terms.client_auth is ClientAuth.PLACEHOLDER_ONLY


def test_c01_a_document_uses_its_own_credentials_alone() -> None:
    asked = policy(CREDENTIALS.replace("api.example", "evil.example"), project=CREDENTIALS)
    assert asked.request(get("https://api.example/repos/acme/x"), NOW).credentials == ("key",)
    assert asked.request(get("https://evil.example/repos/acme/x"), NOW).credentials == ("sandbox/d0/key",)
    assert asked.credentials["key"].hosts == ("api.example",)
    with pytest.raises(PolicyError):
        load("version: 1\nrules: [{id: a, to: {hosts: [evil.example]}, credentials: [key]}]")


def test_a_ceiling_bounds_what_others_give_and_gives_nothing() -> None:
    ceiling = """
ceiling: true
rules:
  - {id: read, to: {hosts: ['**.corp.example', index.example]}, http: {allow: [{methods: [GET]}]}}
  - {id: db, to: {hosts: [db.example]}, protocol: tcp, ports: [5432]}
"""
    wide = """
mode: observe
expires: 2030-04-01
rules:
  - {id: a, to: {hosts: [index.example, evil.example]}, http: {allow: [{methods: ['*']}]}, client_auth: allow}
  - {id: b, to: {hosts: [a.corp.example]}, protocol: tcp, ports: [443]}
"""
    assert said(policy(project=ceiling).connect(Flow(host="index.example", port=443), NOW)) == "no_rule"
    asked = policy(wide, project=ceiling)
    assert said(asked.request(get("https://index.example/"), NOW)) == "allow"
    terms = asked.request(get("https://index.example/"), NOW).terms
    assert terms is not None
    assert terms.client_auth is ClientAuth.FORBID
    assert said(asked.request(get("https://index.example/", "POST"), NOW)) == "beyond_ceiling"
    assert said(asked.connect(Flow(host="evil.example", port=443), NOW)) == "beyond_ceiling"
    assert said(asked.name("evil.example", NOW)) == "beyond_ceiling"
    assert said(asked.name("any.example", NOW)) == "beyond_ceiling"
    assert said(asked.connect(Flow(host="a.corp.example", port=443), NOW)) == "inspection_required"
    assert said(asked.connect(Flow(host="db.example", port=5432), NOW)) == "allow"


def test_bounds_are_lowered_by_anybody_and_lifted_by_platform_and_project() -> None:
    assert policy("limits: {connections: 4000}").limits.connections == 256
    assert policy("limits: {connections: 10}").limits.connections == 10
    assert policy(project="limits: {connections: 4000}").limits.connections == 4000
    assert (
        policy(project="limits: {connections: 4000}", platform="limits: {connections: 1000}").limits.connections == 1000
    )
    assert policy("limits: {connections: 3000}", project="limits: {connections: 2000}").limits.connections == 2000
    assert policy("dns: {max_names: 10}").limits.max_names == 10


def test_the_form_of_denials_is_that_of_the_lowest_tier_that_says() -> None:
    assert policy().deny_reply == "json"
    assert policy("description: x", project="defaults: {deny_reply: text}").deny_reply == "text"
    assert policy("defaults: {deny_reply: json}", project="defaults: {deny_reply: text}").deny_reply == "json"


def test_records_of_a_lower_tier_move_no_name_of_a_higher_one() -> None:
    records = "dns: {records: {api.example: [192.0.78.66], own.example: [192.0.78.67]}}"
    asked = policy(
        records, project="rules: [{id: a, to: {hosts: [api.example]}}]\ndns: {records: {db.example: [192.0.78.1]}}"
    )
    assert asked.records == {"own.example": (ip_address("192.0.78.67"),), "db.example": (ip_address("192.0.78.1"),)}


def test_names_of_the_authority_are_those_that_may_pass() -> None:
    asked = policy(
        "rules: [{id: a, to: {hosts: [x.example, '*.x.example', '**.y.example']}}, {id: b, to: {hosts: [z.example]}, action: deny}]"
    )
    assert asked.allowed_names(NOW) == ("x.example", "y.example")


@pytest.mark.parametrize(
    ("host", "path", "asked_host"),
    [
        ("h{}.example", "/p/**", "h77.example"),
        ("one.example", "/p/{}/**", "one.example"),
        ("**.h{}.example", "/p/**", "a.b.h77.example"),
        ("*.h{}.example", "/p/**", "a.h77.example"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_g11_a_decision_looks_at_the_rules_that_fit_alone(
    host: str, path: str, asked_host: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    objection = Entry.objection

    def counted(entry: Entry, *asked: Any) -> str | None:
        looked_at.append(entry.rule.ref.rule)
        return objection(entry, *asked)

    monkeypatch.setattr(Entry, "objection", counted)
    for count in (100, 300):
        rules = [
            {
                "id": f"r{number}",
                "to": {"hosts": [host.format(number)]},
                "http": {"allow": [{"paths": [path.format(number)]}]},
            }
            for number in range(count)
        ]
        many = policy(f"rules: {json.dumps(rules)}")
        looked_at.clear()
        where = f"https://{asked_host}/p/77/x"
        assert (many.request(get(where, method), NOW).action is Action.ALLOW) is (method == "GET")
        assert set(looked_at) == {"r77"}
        assert len(looked_at) <= 2
        assert len(list(many._main.gates(asked_host))) == 1


def test_an_unknown_tier_or_text_is_refused() -> None:
    with pytest.raises(PolicyError):
        TieredDocument.stored("sandbox", "x", 1, "{}")
    with pytest.raises(PolicyError):
        compile_policy([TieredDocument(tier="runtime", name="x", document=load("version: 1"))])
    spoilt = TieredDocument.stored("sandbox", "x", 1, '{"version":1,"rules":[{"id":"a","to":{"hosts":["127.1"]}}]}')
    with pytest.raises(PolicyError):
        compile_policy([spoilt])
