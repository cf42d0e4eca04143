"""What is decided on is what is sent, on the terms of the rule that lets it pass; and nothing tells who asks but what the policy puts in."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.http_flow import OK, PlayedFlow, answering, policy_of, rule, say

from hatchway.domain import auth_names


def request(line: str = "GET / HTTP/1.1", *fields: str) -> bytes:
    """A request for the flow's host."""
    return "\r\n".join([line, "Host: index.example", *fields, "", ""]).encode("latin-1")


def flow_of(*rules: dict[str, Any], **more: Any) -> PlayedFlow:
    return PlayedFlow(policy_of(*rules, **more), answering(*[OK] * 20))


# -- connections to the outside


async def test_g22_what_one_rule_asks_about_and_others_let_pass_shares_no_connection() -> None:
    """The connection is where the terms of the rule lead: another pin, another proxy."""
    asks = {"id": "asks", "to": {"hosts": ["index.example"]}, "action": "ask"}
    here = rule("here", http={"allow": [{"paths": ["/here"]}]}, resolve={"pin": ["203.0.114.1"]})
    there = rule("there", http={"allow": [{"paths": ["/there"]}]}, resolve={"pin": ["203.0.114.2"]})
    flow = flow_of(asks, here, there)
    flow.answers = [True] * 3
    answer = await say(
        flow, request("GET /here HTTP/1.1"), request("GET /there HTTP/1.1"), request("GET /here HTTP/1.1")
    )
    assert answer.count(b"200 OK") == 3
    assert [bytes(line.written).count(b"GET /here") for line in flow.lines] == [2, 0]
    assert [bytes(line.written).count(b"GET /there") for line in flow.lines] == [0, 1]


# -- conditions on headers


def only(headers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A rule that lets requests pass whose headers fit."""
    return rule("only", http={"allow": [{"methods": ["*"], "paths": ["/**"], "headers": headers}], **more})


def never(headers: dict[str, Any]) -> dict[str, Any]:
    """A rule that denies requests of which a header fits."""
    return {
        "id": "never",
        "to": {"hosts": ["index.example"]},
        "action": "deny",
        "http": {"deny": [{"headers": headers}]},
    }


async def answered(flow: PlayedFlow, *fields: str, line: str = "GET / HTTP/1.1") -> str:
    """The status, and the code of what was refused."""
    answer = (await say(flow, request(line, *fields))).decode("latin-1")
    _, _, reason = answer.partition("x-hatchway-reason: ")
    return answer[9:12] + (" " + reason.split("\r\n")[0] if reason else "")


DENIED = "403 header_not_allowed"
CONDITIONS = [
    # what has to be there is there as it is spelled, and goes on
    ("h31-nominated", ["X-Mode: safe", "Connection: x-mode"], DENIED),
    ("h31-nominated-in-part", ["X-Mode: safe", "Connection: close, X-Mode"], DENIED),
    ("h29-other-spelling", ["X_Mode: safe"], DENIED),
    ("h29-both-spellings", ["X-Mode: safe", "X_Mode: evil"], DENIED),
    ("h29-both-spellings-evil-first", ["x_mode: evil", "X-Mode: safe"], DENIED),
    ("h29-two-lines", ["X-Mode: safe", "X-Mode: evil"], DENIED),
    ("h29-two-lines-that-fit-one-by-one", ["X-Mode: safe", "X-Mode: also"], DENIED),
    ("h29-a-list", ["X-Mode: safe, evil"], DENIED),
    ("plain", ["X-Mode: safe"], "200"),
    ("plain-and-nominating-another", ["X-Mode: safe", "Connection: x-other", "X-Other: 1"], "200"),
    ("absent", [], DENIED),
]


@pytest.mark.parametrize(("fields", "said"), [one[1:] for one in CONDITIONS], ids=[one[0] for one in CONDITIONS])
async def test_a_header_that_has_to_be_there_is_one_that_is_sent(fields: list[str], said: str) -> None:
    flow = flow_of(only({"x-mode": ["safe", "also"]}))
    assert await answered(flow, *fields) == said
    assert (b"x-mode: safe" in flow.arrived) == (said == "200")
    assert b"evil" not in flow.arrived


@pytest.mark.parametrize(
    "fields",
    [
        ["X-Mode: evil"],
        ["X_Mode: evil"],
        ["X-Mode: fine, evil"],
        ["X-Mode: fine,evil ,other"],
        ["X-Mode: fine", "X_mode: evil"],
    ],
)
async def test_h29_a_header_that_is_denied_is_denied_in_any_spelling_and_in_lists(fields: list[str]) -> None:
    flow = flow_of(rule(), never({"x-mode": "evil"}))
    assert await answered(flow, *fields) == "403 denied_by_rule"
    assert not flow.lines
    assert await answered(flow, "X-Mode: fine") == "200"


async def test_h29_what_a_rule_puts_in_is_judged_like_what_a_client_sends() -> None:
    sets = rule(http={"allow": [{"methods": ["*"], "paths": ["/**"]}], "request_headers": {"set": {"x-mode": "evil"}}})
    flow = flow_of(sets, never({"x-mode": "evil"}))
    assert await answered(flow) == "403 denied_by_rule"
    assert not flow.lines


async def test_h29_what_a_rule_takes_away_does_not_count_for_another_rules_condition() -> None:
    """Rules of two documents: the closer one gives the terms, and takes away what the other one wants to see."""
    strips = {
        "id": "near",
        "to": {"hosts": ["index.example"]},
        "http": {"allow": [{"paths": ["/a"]}], "request_headers": {"strip": ["x-mode"]}},
    }
    wants = {
        "id": "ask",
        "to": {"hosts": ["index.example"]},
        "action": "deny",
        "http": {"deny": [{"headers": {"x-mode": "evil"}}]},
    }
    flow = flow_of(strips, wants)
    assert await answered(flow, "X-Mode: evil", line="GET /a HTTP/1.1") == "403 denied_by_rule", "as it came, too"
    assert await answered(flow, "X-Mode: fine", line="GET /a HTTP/1.1") == "200"
    assert b"x-mode" not in flow.arrived


async def test_h29_fields_that_never_go_on_satisfy_no_condition() -> None:
    for name in ("x-forwarded-for", "x-http-method-override", "proxy-authorization"):
        flow = flow_of(only({name: "*"}))
        assert (await answered(flow, f"{name}: 1")).startswith("403")
        assert not flow.lines


async def test_the_host_that_is_judged_is_the_one_that_is_written() -> None:
    flow = flow_of(only({"host": "index.example"}))
    answer = await say(flow, b"GET / HTTP/1.1\r\nHost: INDEX.example:443\r\n\r\n")
    assert b"200 OK" in answer
    assert b"host: index.example\r\n" in flow.arrived


# -- who asks

KEY = [
    {"id": "gh", "source": "store:a/b", "inject": [{"where": "header", "name": "authorization", "format": "Bearer {}"}]}
]
PARAMETERS = [
    "key", "token", "auth", "jwt", "api_key", "apiKey", "api-key", "API_KEY", "apikey", "access_token", "accessToken", "access%5Ftoken", "t%256Fken",
    "token[]", "token[0]", "Authorization", "password", "sid", "session", "session_id", "client_secret", "private_token", "job_token", "user_token",
    "x-api-key", "subscription-key", "id_token", "personal_access_token", "api.key", "auth_key", "app_key", "credential", "bearer", "oauth_token",
]  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a02_a_parameter_that_tells_who_asks_is_refused_or_left_out(name: str) -> None:
    flow = flow_of(rule())
    assert await answered(flow, line=f"GET /a?x=1&{name}=mine HTTP/1.1") == "403 client_auth_forbidden"
    assert await answered(flow, line=f"GET /a?x=1;{name}=mine HTTP/1.1") == "403 client_auth_forbidden"
    assert not flow.lines
    flow = flow_of(rule(credentials=["gh"]), credentials=KEY)
    assert await answered(flow, line=f"GET /a?x=1&{name}=mine&y=2 HTTP/1.1") == "200"
    assert flow.arrived.startswith(b"GET /a?x=1&y=2 HTTP/1.1")
    flow = flow_of(rule(client_auth="allow"))
    assert await answered(flow, line=f"GET /a?{name}=mine HTTP/1.1") == "200"


@pytest.mark.parametrize(
    "name",
    ["page_token", "nextPageToken", "keyword", "sort_key", "author", "token_type", "q", "X-Amz-Signature", "sig"],
)
async def test_a_parameter_that_only_looks_like_it_or_signs_one_link_goes_on(name: str) -> None:
    flow = flow_of(rule())
    assert await answered(flow, line=f"GET /a?{name}=1 HTTP/1.1") == "200"


async def test_a02_a_signed_link_stands_for_no_account_beside_the_credential() -> None:
    flow = flow_of(rule(credentials=["gh"]), credentials=KEY)
    line = "GET /a?X-Amz-Signature=1&X-Amz-Credential=2&Signature=3&AWSAccessKeyId=4&x=5 HTTP/1.1"
    assert await answered(flow, line=line) == "200"
    assert flow.arrived.startswith(b"GET /a?x=5 HTTP/1.1")


async def test_requests_of_a_model_context_go_on_with_their_session() -> None:
    flow = flow_of(rule())
    assert await answered(flow, "Mcp-Session-Id: 1", "X-Csrf-Token: 2", "Idempotency-Key: 3") == "200"
    assert all(name in flow.arrived for name in (b"mcp-session-id: 1", b"x-csrf-token: 2", b"idempotency-key: 3"))


PROTOCOLS = [
    "bearer, abc", "base64url.bearer.authorization.k8s.io.YWJj, v4.channel.k8s.io", "realtime, openai-insecure-api-key.sk-abc", "access_token, abc",
    "graphql-ws, eyJhbGciOiJub25lIn0", "chat, ghp_abcdefghij0123456789klmn", "auth-abc", "token.abc", "X-API-Key.abc",
]  # fmt: skip
UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.mark.parametrize("offered", PROTOCOLS)
async def test_a02_a_websocket_brings_no_token_in_the_protocols_that_it_offers(offered: str) -> None:
    chat = rule(protocol="websocket")
    flow = flow_of(chat)
    assert await answered(flow, *UPGRADE, f"Sec-WebSocket-Protocol: {offered}") == "403 client_auth_forbidden"
    assert not flow.lines
    flow = flow_of({**chat, "credentials": ["gh"]}, credentials=KEY)
    assert await answered(flow, *UPGRADE, f"Sec-WebSocket-Protocol: {offered}") == "403 client_auth_forbidden"
    flow = flow_of({**chat, "client_auth": "allow"})
    await answered(flow, *UPGRADE, f"Sec-WebSocket-Protocol: {offered}")
    assert b"sec-websocket-protocol: " + offered.encode() in flow.arrived


@pytest.mark.parametrize(
    "offered",
    ["graphql-transport-ws, graphql-ws", "mqttv3.1", "v4.channel.k8s.io", "openai-beta.realtime-v1", "wamp.2.json"],
)
async def test_protocols_of_websockets_are_not_taken_for_tokens(offered: str) -> None:
    flow = flow_of(rule(protocol="websocket"))
    await answered(flow, *UPGRADE, f"Sec-WebSocket-Protocol: {offered}")
    assert b"sec-websocket-protocol: " + offered.encode() in flow.arrived


async def test_h29_a_condition_on_the_protocols_of_a_websocket_is_about_what_is_offered_outside() -> None:
    chat = rule(protocol="websocket", http={"allow": [{"headers": {"sec-websocket-protocol": "chat"}}]})
    flow = flow_of(chat)
    await answered(flow, *UPGRADE, "Sec-WebSocket-Protocol: chat")
    assert b"sec-websocket-protocol: chat\r\n" in flow.arrived
    flow = flow_of(chat)
    assert await answered(flow, *UPGRADE, "Sec-WebSocket-Protocol: chat", "Sec_WebSocket_Protocol: evil") == DENIED
    assert not flow.lines


def test_h42_a_name_that_is_longer_than_any_is_not_looked_through() -> None:
    assert auth_names.parameter_key("oauth" * 13 + "token") == ""
    assert auth_names.parameter_key("%6b%65%79") == "key"


@given(st.text(st.sampled_from("aZ09-_. []%+;=é²\x00"), max_size=70) | st.text(max_size=70))
@example("Token" * 13)
@example("²")
def test_a_name_of_letters_and_digits_is_looked_up_as_any_other(name: str) -> None:
    assert auth_names.parameter_key(name) == auth_names._key_of_any(name)
