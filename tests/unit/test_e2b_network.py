"""E2B's network settings as a policy: what passes is what E2B says passes, as far as there is such a thing here."""

import functools
from datetime import UTC, datetime
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.verdicts import Action, Flow, Protocol, Request, TlsMode
from hatchway.e2b.network import ALL_TRAFFIC, NetworkRefused, denies_all, read, updated
from hatchway.e2b.network_policy import document, remaining

NOW = datetime(2030, 3, 1, tzinfo=UTC)
AT = NOW.timestamp()
BLOCKED = [ip_network(text) for text in ("10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")]  # fmt: skip


def policy(network: dict[str, Any] | None = None, *above: TieredDocument, internet: bool | None = None) -> Policy:
    text = msgspec.json.encode(document(read(network, internet=internet), NOW)).decode()
    own = TieredDocument(tier="sandbox", name="e2b", document=load(text, AT))
    return compile_policy([own, *above])


def by_name(asked: Policy, host: str, address: str, port: int = 8000) -> bool:
    verdict = asked.name(host, AT)
    if verdict.action is Action.ALLOW:
        verdict = asked.connect(Flow(host=host, port=port), AT)
    if verdict.action is Action.ALLOW and verdict.protocol is Protocol.HTTP:
        request = Request(host=host, port=port, tls=port == 443, method="DELETE", path="/any/thing")
        verdict = asked.request(request, AT)
    return verdict.action is Action.ALLOW and asked.address(ip_address(address), port, verdict, AT).action is Action.ALLOW  # fmt: skip


def by_address(asked: Policy, address: str, port: int = 8000) -> bool:
    verdict = asked.connect(Flow(address=address, port=port), AT)
    return verdict.action is Action.ALLOW and asked.address(ip_address(address), port, verdict, AT).action is Action.ALLOW  # fmt: skip


def test_without_settings_the_internet_is_there_and_nothing_else() -> None:
    asked = policy()
    for port in (22, 80, 443, 8000, 65535):
        assert by_name(asked, "any.example", "93.184.216.34", port)
        assert by_address(asked, "93.184.216.34", port)
    for port in (25, 53, 853):
        assert not by_name(asked, "any.example", "93.184.216.34", port)
    for address in ("10.1.2.3", "127.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.1.1", "172.16.0.1"):
        assert not by_name(asked, "any.example", address)
        assert not by_address(asked, address)
    flow = asked.connect(Flow(host="any.example", port=443), AT)
    assert flow.protocol is Protocol.TCP, "TLS is end to end"


@pytest.mark.parametrize("network", [{"denyOut": [ALL_TRAFFIC]}, None])
def test_no_internet(network: dict[str, Any] | None) -> None:
    asked = policy(network, internet=None if network else False)
    assert asked.rules == ()
    assert denies_all(read(network, internet=None if network else False))
    assert not denies_all(read({"denyOut": ["8.8.8.8"]}))


V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
NETWORKS = st.builds(lambda address, length: str(ip_network(f"{address}/{length}", strict=False)), V4, st.integers(0, 32))  # fmt: skip
NEAR = st.sampled_from(["8.8.8.8", "8.8.8.0/24", "8.8.0.0/16", "8.8.8.128/25", ALL_TRAFFIC, "0.0.0.0/1", "10.0.0.0/8"])
LISTS = st.lists(st.one_of(NETWORKS, NEAR), max_size=4)
ADDRESSES = st.one_of(V4, st.sampled_from(["8.8.8.8", "8.8.8.200", "8.8.9.1", "8.9.0.1", "10.0.0.1", "93.184.216.34"]).map(IPv4Address))  # fmt: skip


@functools.cache
def everywhere() -> Policy:
    """What a sandbox without settings may reach."""
    return policy()


@given(LISTS, LISTS, ADDRESSES)
@settings(max_examples=150, deadline=None)
def test_allow_beats_deny_and_private_addresses_are_never_reached(
    allow: list[str], deny: list[str], address: IPv4Address
) -> None:
    asked = policy({"allowOut": allow, "denyOut": deny})
    within = [any(address in ip_network(text, strict=False) for text in texts) for texts in (allow, deny)]
    wanted = (within[0] or not within[1]) and not any(address in network for network in BLOCKED)
    wanted = wanted and by_address(everywhere(), str(address))  # what no policy lifts
    assert by_address(asked, str(address)) == wanted
    assert by_name(asked, "any.example", str(address)) == wanted


@given(LISTS, LISTS)
@settings(max_examples=60, deadline=None)
def test_what_remains_does_not_overlap(allow: list[str], deny: list[str]) -> None:
    left = [one for one in remaining(read({"allowOut": allow, "denyOut": deny})) if one.version == 4]
    assert not any(one.overlaps(other) for at, one in enumerate(left) for other in left[:at])


def test_domains_are_reached_over_http_and_tls_by_their_names_and_nothing_else_is() -> None:
    asked = policy({"allowOut": ["API.Example.", "*.wild.example", "8.8.8.0/24"], "denyOut": [ALL_TRAFFIC]})
    assert by_name(asked, "api.example", "93.184.216.34", 443)
    assert by_name(asked, "api.example", "93.184.216.34", 80)
    assert by_name(asked, "a.b.wild.example", "93.184.216.34", 443)
    assert not by_name(asked, "wild.example", "93.184.216.34", 443)
    assert not by_name(asked, "other.example", "93.184.216.34", 443)
    assert by_name(asked, "other.example", "8.8.8.9", 443), "its address is allowed"
    assert not by_name(asked, "api.example", "93.184.216.34", 8080), "domains are known on 80 and 443 alone"
    assert not by_name(asked, "api.example", "10.0.0.1", 443), "private stays private"
    assert not by_address(asked, "93.184.216.34", 443)
    tls = asked.connect(Flow(host="api.example", port=443), AT)
    assert (tls.protocol, tls.tls) == (Protocol.TLS, TlsMode.PASSTHROUGH)
    clear = Request(host="api.example", port=80, tls=False, method="GET", path="/chat", websocket=True)
    assert asked.request(clear, AT).action is Action.ALLOW
    assert asked.name("evil.example", AT).action is Action.ALLOW, "it may be in 8.8.8.0/24"
    closed = policy({"allowOut": ["api.example"], "denyOut": [ALL_TRAFFIC]})
    assert closed.name("evil.example", AT).action is Action.DENY
    assert closed.name("api.example", AT).action is Action.ALLOW, "whatever name server is asked, 8.8.8.8 too"


def test_any_domain() -> None:
    asked = policy({"allowOut": ["*"], "denyOut": [ALL_TRAFFIC]})
    assert by_name(asked, "any.example", "93.184.216.34", 443)
    assert not by_name(asked, "any.example", "93.184.216.34", 8000)


RULES = {"api.example": [{"transform": {"headers": {"X-Team": "red"}}}, {"transform": {"headers": {"x-more": "1"}}}]}


def test_headers_are_set_where_the_host_is_reached_and_only_there() -> None:
    request = Request(host="api.example", port=443, tls=True, method="POST", path="/x")
    allowed = policy({"allowOut": ["api.example"], "denyOut": [ALL_TRAFFIC], "rules": RULES})
    verdict = allowed.request(request, AT)
    assert verdict.terms is not None
    assert verdict.terms.request_headers.set == {"x-team": "red", "x-more": "1"}
    assert allowed.connect(Flow(host="api.example", port=443), AT).tls is TlsMode.INTERCEPT
    assert by_name(allowed, "api.example", "93.184.216.34", 443)
    denied = policy({"denyOut": [ALL_TRAFFIC], "rules": RULES})
    assert denied.name("api.example", AT).action is Action.DENY, "a rule for it lets nothing pass"
    part = policy({"denyOut": ["93.184.0.0/16"], "rules": RULES})
    assert by_name(part, "api.example", "8.8.8.8", 443)
    assert not by_name(part, "api.example", "93.184.216.34", 443), "no host is a way around what is denied"
    by_default = policy({"rules": RULES}).request(request, AT)
    assert by_default.terms is not None
    assert by_default.terms.request_headers.set["x-team"] == "red"


def test_what_has_names_in_common_with_what_is_looked_into_is_looked_into() -> None:
    asked = policy(
        {"allowOut": ["*.example.test", "other.example.test", "far.test"], "denyOut": [ALL_TRAFFIC], "rules": {"api.example.test": []}}
    )  # fmt: skip
    seen = {host: asked.connect(Flow(host=host, port=443), AT).tls for host in ("api.example.test", "other.example.test", "x.example.test", "far.test")}  # fmt: skip
    assert seen == {
        "api.example.test": TlsMode.INTERCEPT,
        "other.example.test": TlsMode.INTERCEPT,
        "x.example.test": TlsMode.INTERCEPT,
        "far.test": TlsMode.PASSTHROUGH,
    }


def test_a_ceiling_stays() -> None:
    rule = {"id": "ours", "to": {"hosts": ["**.corp.example"]}}
    text = msgspec.json.encode({"version": 1, "ceiling": True, "rules": [rule]}).decode()
    above = TieredDocument(tier="platform", name="floor", document=load(text, AT))
    asked = policy(None, above)
    assert not by_name(asked, "any.example", "93.184.216.34")
    assert not by_address(asked, "93.184.216.34")


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"allowOut": ["api.example"]}, "add 0.0.0.0/0 to denyOut"),
        ({"denyOut": ["api.example"]}, "neither an address nor a CIDR"),
        ({"denyOut": "8.8.8.8"}, "no list"),
        ({"allowOut": [8]}, "no text"),
        ({"allowOut": ["1.2.3"], "denyOut": [ALL_TRAFFIC]}, "1.2.3"),
        ({"allowOut": ["10.0.0.0/33"], "denyOut": [ALL_TRAFFIC]}, "10.0.0.0/33"),
        ({"allowOut": ["a.*.example"], "denyOut": [ALL_TRAFFIC]}, "a.*.example"),
        ({"allowOut": ["*.com"], "denyOut": [ALL_TRAFFIC]}, "one label"),
        ({"allowOut": ["*.co.uk"], "denyOut": [ALL_TRAFFIC]}, "register"),
        ({"allowOut": ["localhost"], "denyOut": [ALL_TRAFFIC]}, "localhost"),
        ({"allowOut": ["bücher.example"], "denyOut": [ALL_TRAFFIC]}, "xn--"),
        ({"allowOut": ["https://api.example/"], "denyOut": [ALL_TRAFFIC]}, "bare name"),
        ({"allowOut": ["1.1.1.1"] * 1001}, "more than 1000"),
        ({"egressProxy": {"address": "proxy.example:1080"}}, "operator's"),
        ({"dnsServers": ["1.1.1.1"], "allowOut": ["api.example"], "denyOut": [ALL_TRAFFIC]}, "answered here"),
        ({"dnsServers": ["resolver.example"]}, "no IPv4 address"),
        ({"dnsServers": ["1.1.1.1"] * 11}, "more than 10"),
        ({"rules": {"api.example": [{"transform": {"headers": {"Authorization": "Bearer x"}}}]}}, "credential"),
        ({"rules": {"api.example": [{"transform": {"headers": {"x-a": "${e2b.identity.tokens.aws}"}}}]}}, "identity"),
        ({"rules": {"api.example": [{"transform": {"headers": {"Host": "other.example"}}}]}}, "belongs to the gateway"),
        ({"rules": {"api.example": [{"transform": {"headers": {"x-a": "b\r\nc: d"}}}]}}, "printable"),
        ({"rules": {"api.example": [{"forward": {}}]}}, "forward"),
        ({"rules": {"1.2.3.4": []}}, "domains"),
        ({"rules": []}, "no object"),
        ({"maskRequestHost": "evil.example\r\nx: y"}, "maskRequestHost"),
        ({"maskRequestHost": 8}, "maskRequestHost"),
        ({"httpsPorts": [0]}, "no port"),
        ({"httpsPorts": [True]}, "no port"),
        ({"allowPublicTraffic": "no"}, "neither true nor false"),
        ({"surprise": 1}, "surprise"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_said(network: dict[str, Any], said: str) -> None:
    with pytest.raises(NetworkRefused) as caught:
        document(read(network), NOW)
    assert said in str(caught.value)


def test_private_ingress_needs_a_secured_sandbox() -> None:
    assert not read({"allowPublicTraffic": False}).allow_public_traffic
    with pytest.raises(NetworkRefused):
        read({"allowPublicTraffic": False}, secure=False)


def test_name_servers_without_domains_have_no_effect_there_either() -> None:
    assert document(read({"dnsServers": ["1.1.1.1"]}), NOW) == document(read(None), NOW)
    assert read({"dnsServers": [], "allowOut": ["api.example"], "denyOut": [ALL_TRAFFIC]}).domains == ("api.example",)


def test_more_than_a_document_holds_is_refused() -> None:
    many = [f"8.{number >> 8}.{number & 255}.0/25" for number in range(1000)]
    scattered = [f"{a}.{b}.{c}.129" for a in (11, 93, 201) for b in range(16, 256, 16) for c in range(1, 250, 12)][:900]
    assert document(read({"denyOut": many[:100]}), NOW)
    with pytest.raises(NetworkRefused) as caught:
        document(read({"denyOut": scattered}), NOW)
    assert "4096" in str(caught.value)


def test_an_update_replaces_all_about_the_way_out_and_keeps_the_way_in() -> None:
    before = {"allowOut": ["1.1.1.1"], "allowPublicTraffic": False, "maskRequestHost": "x.example", "httpsPorts": [443]}
    network, internet = updated(before, {"denyOut": ["8.8.8.8"]})
    assert network == {"denyOut": ["8.8.8.8"], "allowPublicTraffic": False, "maskRequestHost": "x.example", "httpsPorts": [443]}  # fmt: skip
    assert internet is None
    assert updated(before, {"allow_internet_access": False})[1] is False
    assert updated(None, {}) == ({}, None)
    for body in ({"allowPublicTraffic": True}, {"allow_internet_access": "no"}, []):
        with pytest.raises(NetworkRefused):
            updated(before, body)  # type: ignore[arg-type]  # what a caller may send
