"""Connections of HTTP/1.1 through the gateway, octets in and octets out: what is refused has not arrived anywhere."""

import asyncio
import base64
import json
from typing import Any

import pytest
from tests.support.http_flow import ALL, HOST, OK, Played, PlayedFlow, PlayedStream, answering, policy_of, rule, say

from hatchway.egress.http import http1
from hatchway.egress.http.seam import FlowError

GET = b"GET /a HTTP/1.1\r\nHost: index.example\r\n\r\n"


def request(first: str = "GET /a HTTP/1.1", *lines: str, body: bytes = b"", host: str | None = HOST) -> bytes:
    named = [] if host is None else [f"Host: {host}"]
    return "\r\n".join([first, *named, *lines, "", ""]).encode("latin-1") + body


def flow_of(*rules: dict[str, Any], answers: tuple[bytes, ...] = (OK,) * 4, **more: Any) -> PlayedFlow:
    return PlayedFlow(
        policy_of(*(rules or (ALL,)), credentials=more.pop("credentials", None)), answering(*answers), **more
    )


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def code(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head
    document = json.loads(body)
    assert document["cause"]
    assert document["code"].encode() in head.split(b"\r\n")[0]
    return str(document["code"])


def test_what_is_decided_is_what_is_sent() -> None:
    """Written anew: the gateway's own Host, plain names, a canonical path, and nothing of this connection."""

    async def run() -> None:
        flow = flow_of()
        answer = await say(
            flow,
            request(
                "POST /%61/b%c3%a9?q=%41 HTTP/1.1",
                "Accept:  */* ",
                "X-A: 1",
                "Connection: keep-alive",
                "Content-Length: 2",
                body=b"hi",
                host="INDEX.example.",
            ),
        )
        assert answer == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        assert (
            flow.arrived
            == b"POST /a/b%C3%A9?q=%41 HTTP/1.1\r\nhost: index.example\r\naccept: */*\r\nx-a: 1\r\ncontent-length: 2\r\n\r\nhi"
        )
        assert flow.records[0][:3] == ("egress.request", "allowed", "allowed")
        assert not flow.exchanges

    asyncio.run(run())


HOSTILE = [
    ("h01", request(host="other.example"), 421, "authority_mismatch"),
    ("h01", request(host="index.example:8443"), 421, "authority_mismatch"),
    ("h01", request(host="index.example."[:-1] + ".."), 421, "authority_mismatch"),
    ("h01", request(host=""), 421, "authority_mismatch"),
    ("h01", request(host="user@index.example"), 421, "authority_mismatch"),
    ("h01", request(host="index.example,other.example"), 421, "authority_mismatch"),
    ("h01", request(host="index.example\tother.example"), 421, "authority_mismatch"),
    ("h02", request("GET http://other.example/ HTTP/1.1"), 400, "malformed_request"),
    ("h02", request("GET http://index.example/ HTTP/1.1"), 400, "malformed_request"),
    ("h03", request("GET / HTTP/1.1", "Host: index.example"), 400, "malformed_request"),
    ("h05", request(host=None), 400, "malformed_request"),
    ("h05", request("GET / HTTP/1.2"), 400, "malformed_request"),
    ("h05", b"GET /\r\n\r\n", 400, "malformed_request"),
    (
        "h08",
        request("POST / HTTP/1.1", "Content-Length: 6", "Transfer-Encoding: chunked", body=b"0\r\n\r\nX"),
        400,
        "malformed_request",
    ),
    (
        "h08",
        request("POST / HTTP/1.1", "Transfer-Encoding: chunked", "Transfer-encoding: identity", body=b"0\r\n\r\n"),
        400,
        "malformed_request",
    ),
    ("h10", request("POST / HTTP/1.1", "Content-Length: 1, 1", body=b"x"), 400, "malformed_request"),
    ("h10", request("POST / HTTP/1.1", "Content-Length: +1", body=b"x"), 400, "malformed_request"),
    ("h11", request("GET / HTTP/1.1", "X-A: 1", " Host: other.example"), 400, "malformed_request"),
    ("h12", b"GET / HTTP/1.1\nHost: index.example\n\n", 400, "malformed_request"),
    ("h13", request("GET / HTTP/1.1", "X-A : 1"), 400, "malformed_request"),
    ("h13", request("GET / HTTP/1.1", "X-A: \x00"), 400, "malformed_request"),
    ("h23", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed_request"),
    ("h27", request("GET /a?_method=DELETE HTTP/1.1"), 403, "method_override"),
    ("h27", request("GET /a?x=1&%5fMethod=DELETE HTTP/1.1"), 403, "method_override"),
    ("h27", request("GET /a?x=1;_method=DELETE HTTP/1.1"), 403, "method_override"),
    (
        "h27",
        request(
            "POST /a HTTP/1.1",
            "Content-Type: application/x-www-form-urlencoded",
            "Content-Length: 14",
            body=b"_method=DELETE",
        ),
        403,
        "method_override",
    ),
    ("h28", request("GET /a/../b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /a/%2e%2E/b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /a//b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /a/..;x/b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /a\\..\\b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /%252e%252e/b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /%c0%ae%c0%ae/b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /a%00b HTTP/1.1"), 400, "path_ambiguous"),
    ("h28", request("GET /a?b=%zz HTTP/1.1"), 400, "malformed_request"),
    ("h32", request("TRACE / HTTP/1.1"), 405, "method_never_allowed"),
    ("h32", b"CONNECT other.example:443 HTTP/1.1\r\nHost: other.example:443\r\n\r\n", 405, "method_never_allowed"),
    ("h36", request("GET / HTTP/1.1", *["X: 1"] * 100), 431, "head_too_large"),
    ("h36", b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000, 431, "head_too_large"),
    ("a02", request("GET / HTTP/1.1", "Authorization: Bearer mine"), 403, "client_auth_forbidden"),
    ("a02", request("GET / HTTP/1.1", "X-Api-Key: mine"), 403, "client_auth_forbidden"),
    ("a02", request("GET / HTTP/1.1", "PRIVATE-TOKEN: mine"), 403, "client_auth_forbidden"),
    ("a02", request("GET / HTTP/1.1", "X_Api_Key: mine"), 403, "client_auth_forbidden"),
    ("a02", request("GET /?access_token=mine HTTP/1.1"), 403, "client_auth_forbidden"),
    (
        "a07",
        request("POST /v1/files HTTP/1.1", "api-key: mine", "Content-Length: 1", body=b"x"),
        403,
        "client_auth_forbidden",
    ),
]


@pytest.mark.parametrize(
    ("row", "octets", "expected", "reason"), HOSTILE, ids=[f"{row}-{n}" for n, (row, *_) in enumerate(HOSTILE)]
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
async def test_hostile_requests_arrive_nowhere(
    row: str, octets: bytes, expected: int, reason: str, split: bool
) -> None:
    """Each row of the catalogue, whole and octet by octet: the answer says why, one record does too, and the outside has seen nothing."""
    flow = flow_of()
    pieces = [octets[at : at + 1] for at in range(min(len(octets), 300))] + [octets[300:]] if split else [octets]
    answer = await say(flow, *[piece for piece in pieces if piece])
    assert (status(answer), code(answer)) == (expected, reason)
    assert not flow.lines
    assert flow.reasons("denied") == [reason]
    assert flow.reasons("allowed") == []


async def test_h06_every_request_of_a_connection_is_decided() -> None:
    flow = flow_of(rule(http={"allow": [{"methods": ["GET"], "paths": ["/a"]}]}))
    answer = await say(flow, GET, request("GET /b HTTP/1.1"), GET, request(host="other.example"), GET)
    assert [int(part.split(b" ")[0]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 403, 200, 421]
    assert flow.arrived.count(b"HTTP/1.1") == 2
    assert b"other" not in flow.arrived
    assert len(flow.lines) == 1


async def test_h07_requests_sent_ahead_are_taken_one_after_the_other() -> None:
    """A second request in what follows a body is a request, not a body."""
    flow = flow_of(rule(http={"allow": [{"methods": ["GET", "POST"], "paths": ["/a"]}]}))
    hidden = request("POST /a HTTP/1.1", "Content-Length: 2", body=b"hi") + request("GET /secret HTTP/1.1") + GET
    answer = await say(flow, hidden)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b"HTTP/1.1 403 ") == 1
    assert b"secret" not in flow.arrived
    assert (
        flow.arrived
        == b"POST /a HTTP/1.1\r\nhost: index.example\r\ncontent-length: 2\r\n\r\nhi"
        + b"GET /a HTTP/1.1\r\nhost: index.example\r\n\r\n"
    )


async def test_h05_http_10_is_given_a_host_and_no_chunks() -> None:
    flow = flow_of(answers=(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",))
    answer = await say(flow, request("GET /a HTTP/1.0", host=None), end=False)
    assert flow.arrived == b"GET /a HTTP/1.1\r\nhost: index.example\r\n\r\n"
    assert answer == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nok"


async def test_a_rule_for_clear_text_is_held_to_the_same() -> None:
    clear = rule(tls={"mode": "none"}, ports=[80])
    flow = flow_of(clear, port=80, tls=False)
    assert status(await say(flow, GET)) == 200
    flow = flow_of(clear, port=80, tls=False)
    assert status(await say(flow, request(host="index.example:443"))) == 421
    assert status(await say(flow, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) == 400
    assert not flow.lines
    flow = flow_of(ALL, port=80, tls=False)
    assert status(await say(flow, GET)) == 403, "a rule for TLS lets nothing pass in clear"


async def test_h15_the_gateway_says_continue_itself() -> None:
    flow = flow_of()
    played = Played(flow)
    played.client.feed(request("PUT /a HTTP/1.1", "Expect: 100-continue", "Content-Length: 2"))
    await played.client.until(lambda client: b"100 Continue\r\n\r\n" in client.written)
    assert b"expect" not in flow.arrived
    played.client.feed(b"hi")
    played.client.feed_end()
    await played.ended()
    assert played.client.written.endswith(b"ok")
    assert flow.arrived.endswith(b"\r\n\r\nhi")
    await played.over()


async def test_h15_a_denied_body_is_not_asked_for() -> None:
    flow = flow_of(rule(http={"allow": [{"methods": ["GET"]}]}))
    answer = await say(flow, request("PUT /a HTTP/1.1", "Expect: 100-continue", "Content-Length: 99"), end=False)
    assert status(answer) == 403
    assert b"100" not in answer.split(b"\r\n")[0]
    assert b"connection: close" in answer
    assert not flow.lines


async def test_h15_an_answer_before_the_end_of_a_body_ends_the_connection() -> None:
    """What of the body comes later is no request."""

    async def early(line: PlayedStream) -> None:
        await line.until(lambda one: b"hello" in one.written)
        line.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")

    flow = PlayedFlow(policy_of(ALL), early)
    played = Played(flow)
    played.client.feed(request("POST /a HTTP/1.1", "Content-Length: 100", body=b"hello"))
    await played.client.until(lambda client: client.written.endswith(b"no"))
    await played.ended()
    assert b"connection: close" in played.client.written
    assert flow.lines[0].aborted
    assert len(flow.lines) == 1
    await played.over()


@pytest.mark.parametrize("upgrade", ["h2c", "foo", "h2c, websocket", "TLS/1.0"])
async def test_h26_no_upgrade_but_to_websocket(upgrade: str) -> None:
    """H23 too: the request goes on without it, and an upstream that agrees to what nobody asked is cut off."""
    flow = flow_of(answers=(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: foo\r\nConnection: upgrade\r\n\r\nraw",))
    answer = await say(
        flow,
        request("GET /a HTTP/1.1", f"Upgrade: {upgrade}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAA"),
    )
    assert (status(answer), code(answer)) == (502, "upstream_bad_answer")
    assert flow.arrived == b"GET /a HTTP/1.1\r\nhost: index.example\r\n\r\n"
    assert b"raw" not in answer


async def test_h27_h30_headers_that_mean_another_request_end_here() -> None:
    named = [
        "X-HTTP-Method-Override: DELETE",
        "X-HTTP-Method: DELETE",
        "X_Method_Override: DELETE",
        "X-Forwarded-Host: other.example",
        "X_Forwarded_Host: other.example",
        "Forwarded: host=other.example",
        "X-Original-URL: /secret",
        "X-Rewrite-URL: /secret",
        "X-Host: other.example",
        "X-Forwarded-For: 127.0.0.1",
        "Early-Data: 1",
        "Proxy-Authorization: Basic eDp5",
    ]
    flow = flow_of()
    answer = await say(flow, request("GET /a HTTP/1.1", *named, "X-Kept: 1"))
    assert status(answer) == 200
    assert flow.arrived == b"GET /a HTTP/1.1\r\nhost: index.example\r\nx-kept: 1\r\n\r\n"


async def test_h31_headers_that_connection_names_end_here() -> None:
    flow = flow_of(rule(http={"allow": [{"methods": ["GET"]}], "request_headers": {"set": {"X-Guard": "on"}}}))
    await say(
        flow,
        request(
            "GET /a HTTP/1.1",
            "Connection: x-guard, x-hop, host, content-length",
            "X-Hop: 1",
            "X-Guard: off",
            "Keep-Alive: 5",
            "TE: trailers",
        ),
    )
    assert flow.arrived == b"GET /a HTTP/1.1\r\nhost: index.example\r\nx-guard: on\r\n\r\n"


async def test_h33_redirects_are_the_clients() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: https://other.example/\r\nContent-Length: 0\r\n\r\n"
    flow = flow_of(answers=(moved,))
    answer = await say(flow, GET)
    assert b"location: https://other.example/" in answer
    assert len(flow.lines) == 1


async def test_h35_sizes_and_headers_are_as_the_rule_says() -> None:
    bounded = rule(
        http={
            "allow": [{"methods": ["*"]}],
            "max": {"url": 20, "body": 4},
            "request_headers": {"allow_only": ["accept"], "strip": ["x-b"]},
        }
    )
    for octets, reason in (
        (request("GET /" + "a" * 30 + " HTTP/1.1"), "url_too_long"),
        (request("GET /a?" + "a" * 30 + " HTTP/1.1"), "url_too_long"),
        (request("POST /a HTTP/1.1", "Content-Length: 5", body=b"hello"), "body_too_large"),
        (request("POST /a HTTP/1.1", "Transfer-Encoding: chunked", body=b"5\r\nhello\r\n0\r\n\r\n"), "body_too_large"),
    ):
        flow = flow_of(bounded)
        assert code(await say(flow, octets)) == reason
        assert b"hello" not in flow.arrived
    flow = flow_of(bounded)
    await say(flow, request("GET /a HTTP/1.1", "Accept: x", "User-Agent: data", "X-B: 1"))
    assert flow.arrived == b"GET /a HTTP/1.1\r\nhost: index.example\r\naccept: x\r\n\r\n"


async def test_h35_a_body_that_grows_too_large_is_not_whole_anywhere() -> None:
    flow = flow_of(rule(http={"allow": [{"methods": ["*"]}], "max": {"body": 6}}), answers=())
    played = Played(flow)
    played.client.feed(request("POST /a HTTP/1.1", "Transfer-Encoding: chunked", body=b"5\r\nhello\r\n"))
    await asyncio.wait_for(_arrived(flow, b"hello"), 10)
    played.client.feed(b"5\r\nworld\r\n0\r\n\r\n")
    await played.ended()
    assert status(bytes(played.client.written)) == 413
    assert b"world" not in flow.arrived
    assert not flow.arrived.endswith(b"0\r\n\r\n")
    assert flow.lines[0].aborted
    assert flow.reasons("failed") == ["body_too_large"]
    await played.over()


@pytest.mark.parametrize(
    "octets",
    [request("POST /a HTTP/1.1", "Content-Length: 500", body=b"x" * 500), request("GET /?" + "x" * 500 + " HTTP/1.1")],
)
async def test_h35_a_budget_that_is_used_up_lets_nothing_more_out(octets: bytes) -> None:
    """Octets of paths and headers are of the budget too."""
    flow = flow_of()
    flow.budget = 400
    answer = await say(flow, octets)
    assert (status(answer), code(answer)) == (429, "byte_budget")
    assert flow.arrived == b""


@pytest.mark.parametrize("part", [b"GET /a HT", request("POST /a HTTP/1.1", "Content-Length: 9", body=b"x")])
async def test_h37_what_comes_too_slowly_is_given_up(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN_S", 0.05)
    monkeypatch.setattr(http1, "BODY_IDLE_S", 0.05)
    flow = flow_of()
    answer = await say(flow, part, end=False)
    assert status(answer) == 408
    assert code(answer) in ("head_too_slow", "body_too_slow")


async def test_h37_a_body_needs_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "BODY_IDLE_S", 0.05)
    monkeypatch.setattr(http1, "MIN_RATE", 1_000_000)
    flow = flow_of()
    played = Played(flow)
    played.client.feed(request("POST /a HTTP/1.1", "Content-Length: 100000"))
    dripping = asyncio.create_task(_drip(played.client))
    await played.ended()
    dripping.cancel()
    assert code(bytes(played.client.written)) == "body_too_slow"
    assert flow.lines[0].aborted
    await played.over()


async def test_h37_a_silent_connection_is_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN_S", 0.01)
    assert await say(flow_of(), end=False) == b""


async def test_h37_an_answer_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "TAKE_WITHIN_S", 0.01)
    flow = flow_of()
    played = Played(flow)
    full = asyncio.Event()

    async def drain() -> None:
        await full.wait()

    played.client.drain = drain  # type: ignore[method-assign]  # a client that does not read
    played.client.feed(GET)
    await played.ended()
    assert played.client.aborted
    await played.over()


async def test_h38_nothing_is_inflated() -> None:
    """A bomb costs as many octets as it has."""
    bomb = base64.b64decode("H4sIAAAAAAAAA+3BMQEAAADCoPVPbQwfoAAAAAAAAAAAAAAAAAAAAIC3AYbSVKsAQAAA")
    flow = flow_of(
        answers=(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb,)
    )
    answer = await say(
        flow, request("POST /a HTTP/1.1", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}", body=bomb)
    )
    assert answer.endswith(bomb)
    assert flow.arrived.endswith(bomb)


async def test_h40_no_hints_at_other_ports_and_protocols() -> None:
    flow = flow_of(
        answers=(
            b'HTTP/1.1 200 OK\r\nAlt-Svc: h3=":443"\r\nAlternate-Protocol: x\r\nConnection: x-hop\r\nX-Hop: 1\r\nX-B: 1\r\nContent-Length: 0\r\n\r\n',
        )
    )
    assert await say(flow, GET) == b"HTTP/1.1 200 OK\r\nx-b: 1\r\ncontent-length: 0\r\n\r\n"


BAD_ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"SSH-2.0-x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
]


@pytest.mark.parametrize("bad", BAD_ANSWERS, ids=range(len(BAD_ANSWERS)))
async def test_h41_a_bad_answer_is_not_passed_on(bad: bytes) -> None:
    flow = flow_of(answers=(bad,))
    answer = await say(flow, GET)
    assert (status(answer), code(answer)) == (502, "upstream_bad_answer")
    assert flow.lines[0].aborted
    assert flow.reasons("failed") == ["upstream_bad_answer"]


async def test_h41_what_comes_unasked_is_not_the_next_answer() -> None:
    """Smuggled behind an answer: the connection to the outside is not used again."""
    flow = flow_of(answers=(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged", OK))
    played = Played(flow)
    played.client.feed(GET)
    await played.client.until(lambda client: client.written.endswith(b"ok"))
    played.client.feed(GET)
    played.client.feed_end()
    await played.ended()
    assert b"forged" not in played.client.written
    assert len(flow.lines) == 2
    assert flow.lines[0].aborted
    await played.over()


async def test_h41_interim_answers_end_here() -> None:
    flow = flow_of(answers=(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK,))
    assert await say(flow, GET) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_h41_requests_of_other_rules_have_connections_of_their_own() -> None:
    """G22: nothing is shared over the border of a rule."""
    flow = flow_of(rule("a", http={"allow": [{"paths": ["/a"]}]}), rule("b", http={"allow": [{"paths": ["/b"]}]}))
    await say(flow, GET, request("GET /b HTTP/1.1"), GET)
    assert [bytes(line.written).count(b"HTTP/1.1") for line in flow.lines] == [2, 1]


async def test_t23_an_answer_that_is_cut_off_is_not_taken_for_whole() -> None:
    async def cut(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        line.feed_end()

    flow = PlayedFlow(policy_of(ALL), cut)
    played = Played(flow)
    played.client.feed(GET)
    await played.ended()
    assert played.client.aborted
    assert not played.client.written.endswith(b"0\r\n\r\n")
    await played.over()


async def test_t23_a_request_that_is_cut_off_is_whole_nowhere() -> None:
    flow = flow_of(answers=())
    played = Played(flow)
    played.client.feed(request("POST /a HTTP/1.1", "Transfer-Encoding: chunked", body=b"5\r\nhello\r\n"))
    await asyncio.wait_for(_arrived(flow, b"hello"), 10)
    played.client.feed_end()
    await played.ended()
    assert flow.lines[0].aborted
    assert not flow.arrived.endswith(b"0\r\n\r\n")
    await played.over()


async def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async def to_end(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(b"HTTP/1.1 200 OK\r\n\r\nhello")
        line.feed_end()

    flow = PlayedFlow(policy_of(ALL), to_end)
    answer = await say(flow, request("GET /a HTTP/1.1"))
    assert answer == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


async def test_answers_without_a_body_say_what_it_would_be() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"
    flow = flow_of(
        answers=(head, b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n", OK)
    )
    answer = await say(flow, request("HEAD /a HTTP/1.1"), GET, GET, GET)
    assert (
        answer
        == b"HTTP/1.1 200 OK\r\ncontent-length: 77\r\n\r\nHTTP/1.1 304 Not Modified\r\netag: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    )
    assert len(flow.lines) == 1


async def test_bodies_stream_both_ways_at_once() -> None:
    """An upstream that answers as it reads is heard while it is written to."""

    async def echo(line: PlayedStream) -> None:
        await line.until(lambda one: b"first" in one.written)
        line.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nheard\r\n")
        await line.until(lambda one: one.written.endswith(b"0\r\n\r\n"))
        line.feed(b"3\r\nall\r\n0\r\n\r\n")

    flow = PlayedFlow(policy_of(ALL), echo)
    played = Played(flow)
    played.client.feed(request("POST /a HTTP/1.1", "Transfer-Encoding: chunked", body=b"5\r\nfirst\r\n"))
    await played.client.until(lambda client: b"heard" in client.written)
    played.client.feed(b"6\r\nsecond\r\n0\r\n\r\n")
    await played.client.until(lambda client: client.written.endswith(b"3\r\nall\r\n0\r\n\r\n"))
    head = flow.arrived.partition(b"\r\n\r\n")[0]
    assert (flow.out, flow.into) == (len(head) + 4 + 11, 8), "what goes out is the head and the body without its chunks"
    played.client.feed_end()
    await played.ended()
    await played.over()


async def test_a_kept_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    async def once(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(OK)
        seen = len(line.written)
        await line.until(lambda one: len(one.written) > seen or one.over)
        line.feed_end()

    flow = PlayedFlow(policy_of(ALL), once)
    answer = await say(flow, GET, GET)
    assert answer.count(b"200 OK") == 2
    assert len(flow.lines) == 2


async def test_a_request_that_may_have_happened_is_not_sent_twice() -> None:
    async def once(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(OK)
        seen = len(line.written)
        await line.until(lambda one: len(one.written) > seen or one.over)
        line.feed_end()

    flow = PlayedFlow(policy_of(ALL), once)
    answer = await say(flow, GET, request("POST /a HTTP/1.1", "Content-Length: 2", body=b"hi"))
    assert answer.count(b"HTTP/1.1 502 ") == 1
    assert flow.arrived.count(b"POST") == 1


# -- deciding


async def test_a_denial_says_why_in_the_clients_own_form() -> None:
    denied = rule(http={"allow": [{"methods": ["GET"], "paths": ["/simple/**"]}]})
    answer = await say(flow_of(denied), request("PUT /simple/x HTTP/1.1"))
    first, _, body = answer.partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 403 Forbidden - Hatchway: method_not_allowed: ")
    assert b"x-hatchway-reason: method_not_allowed" in body
    document = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert document["rule"] == "all"
    assert document["error"].startswith("method_not_allowed: ")
    assert document["status"] == 403
    for lines in (["User-Agent: git/2.39.5", "Accept: */*"], ["Accept: text/plain"]):
        answer = await say(flow_of(denied), request("PUT /simple/x HTTP/1.1", *lines))
        assert b"content-type: text/plain" in answer
        assert b"\r\n\r\nHatchway: method_not_allowed: " in answer
    flow = PlayedFlow(policy_of(denied, defaults={"deny_reply": "text"}), answering())
    assert b"content-type: text/plain" in await say(flow, request("PUT /simple/x HTTP/1.1"))
    answer = await say(flow_of(denied), request("HEAD /x HTTP/1.1"))
    assert answer.endswith(b"\r\n\r\n")


async def test_nothing_of_a_denial_breaks_its_lines() -> None:
    answer = await say(flow_of(), request(host="a\x80\xff\t'\"b"))
    first = answer.split(b"\r\n")[0]
    assert first.isascii()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "authority_mismatch"


async def test_a_request_that_cannot_be_recorded_does_not_happen() -> None:
    flow = flow_of()
    flow.record_error = FlowError("audit_full", "no record can be taken", 503)
    answer = await say(flow, GET)
    assert (status(answer), code(answer)) == (503, "audit_full")
    assert not flow.lines


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("resolve_failed", 502), ("connect_failed", 502), ("tls_failed", 502), ("cred_unavailable", 503), ("limit", 429)],
)
async def test_a_host_that_cannot_be_had_is_said(reason: str, expected: int) -> None:
    flow = flow_of()
    flow.dial_error = FlowError(reason, "it does not work", expected)
    answer = await say(flow, GET, GET)
    assert answer.count(f"HTTP/1.1 {expected} ".encode()) == 2
    assert flow.reasons("failed") == [reason, reason]


ASK = rule(action="ask", ask={"timeout": "1m"})


async def test_a_held_request_has_left_nothing_until_it_is_allowed() -> None:
    flow = flow_of(ASK)
    flow.held, flow.answers = asyncio.Event(), [True]
    played = Played(flow)
    played.client.feed(request("POST /a HTTP/1.1", "Content-Length: 2", body=b"hi"))
    async with asyncio.timeout(10):
        while not flow.asked:
            await asyncio.sleep(0)
    assert not flow.lines
    assert not played.client.written
    flow.held.set()
    played.client.feed_end()
    await played.ended()
    assert played.client.written.endswith(b"ok")
    assert flow.asked[0].path == "/a"
    await played.over()


async def test_a_held_request_that_is_refused_leaves_nothing() -> None:
    flow = flow_of(ASK)
    flow.answers = [False]
    answer = await say(flow, GET)
    assert (status(answer), code(answer)) == (403, "approval_denied")
    assert not flow.lines
    assert flow.reasons("denied") == ["approval_denied"]


async def test_g03_a_policy_that_narrows_while_a_request_is_held_decides() -> None:
    flow = flow_of(ASK)
    flow.held, flow.answers = asyncio.Event(), [True]
    played = Played(flow)
    played.client.feed(GET)
    async with asyncio.timeout(10):
        while not flow.asked:
            await asyncio.sleep(0)
    flow.policy = policy_of(rule("other", "other.example"))
    flow.held.set()
    played.client.feed_end()
    await played.ended()
    assert status(bytes(played.client.written)) == 403
    assert not flow.lines
    await played.over()


async def test_g03_a_request_in_flight_is_cut_when_the_policy_narrows() -> None:
    async def endless(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await line.until(lambda one: one.over)

    flow = PlayedFlow(policy_of(ALL), endless)
    played = Played(flow)
    played.client.feed(GET)
    await played.client.until(lambda client: b"hello" in client.written)
    for exchange in list(flow.exchanges):
        exchange.cut("policy_changed")
    await played.ended()
    assert played.client.aborted
    assert flow.lines[0].aborted
    assert not flow.exchanges
    await played.over()


async def test_g03_a_cut_request_is_not_sent_again_over_another_connection() -> None:
    async def once(line: PlayedStream) -> None:
        await line.until(lambda one: b"\r\n\r\n" in one.written)
        line.feed(OK)
        await line.until(lambda one: one.over)

    flow = PlayedFlow(policy_of(ALL), once)
    played = Played(flow)
    played.client.feed(GET)
    await played.client.until(lambda client: client.written.endswith(b"ok"))
    played.client.feed(GET)
    async with asyncio.timeout(10):
        while flow.arrived.count(b"GET") < 2:
            await asyncio.sleep(0)
    for exchange in list(flow.exchanges):
        exchange.cut("policy_changed")
    await played.ended()
    assert len(flow.lines) == 1
    await played.over()


async def test_g03_connections_of_an_old_policy_are_not_used_again() -> None:
    flow = flow_of()
    played = Played(flow)
    played.client.feed(GET)
    await played.client.until(lambda client: client.written.endswith(b"ok"))
    flow.policy = policy_of(ALL)
    played.client.feed(GET)
    played.client.feed_end()
    await played.ended()
    assert len(flow.lines) == 2
    assert flow.lines[0].aborted
    await played.over()


async def test_a_client_that_leaves_ends_what_is_done_for_it() -> None:
    async def silent(line: PlayedStream) -> None:
        await line.until(lambda one: one.over)

    flow = PlayedFlow(policy_of(ALL), silent)
    played = Played(flow)
    played.client.feed(GET)
    await asyncio.wait_for(_arrived(flow, b"\r\n\r\n"), 10)
    played.client.lose()
    await played.ended()
    assert flow.lines[0].aborted
    await played.over()


# -- credentials

GIT_TOKEN = "hwp_0123456789abcdef0123456789abcdef"
CREDENTIAL = {
    "id": "gh",
    "source": "store:bot",
    "inject": [{"where": "header", "name": "authorization", "format": "Bearer {}"}],
    "only": {"paths": ["/repos/**"]},
}
WITH = rule("api", credentials=["gh"], client_auth="placeholder_only")
OTHER = rule("other", "other.example")


def credentialed(
    *rules: dict[str, Any], host: str = HOST, inject: list[dict[str, Any]] | None = None, **more: Any
) -> PlayedFlow:
    credential = {**CREDENTIAL, "inject": inject or CREDENTIAL["inject"]}
    flow = PlayedFlow(
        policy_of(*(rules or (WITH, OTHER)), credentials=[credential]), answering(OK, OK), host=host, **more
    )
    flow.placeholders = {GIT_TOKEN: "gh"}
    return flow


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("auth", [f"Bearer {GIT_TOKEN}", basic("x", GIT_TOKEN), None])
async def test_c01_a_credentialed_request_goes_to_the_broker_without_any_credential(auth: str | None) -> None:
    flow = credentialed()
    lines = [] if auth is None else [f"Authorization: {auth}"]
    assert status(await say(flow, request("GET /repos/x?per_page=1 HTTP/1.1", *lines, "X-Kept: 1"))) == 200
    assert [credential for credential, _ in flow.legs] == ["gh"]
    assert flow.arrived == b"GET /repos/x?per_page=1 HTTP/1.1\r\nhost: index.example\r\nx-kept: 1\r\n\r\n"


async def test_c01_auth_of_the_clients_own_is_taken_off_a_credentialed_route() -> None:
    """Whatever it is: nothing beside the injected one tells who asks."""
    flow = credentialed(rule("api", credentials=["gh"], client_auth="forbid"))
    lines = [
        "Authorization: Bearer mine",
        "Cookie: a=b",
        "X-Api-Key: mine",
        "Private-Token: mine",
        "X-Amz-Security-Token: mine",
        "Proxy-Authorization: x",
    ]
    assert status(await say(flow, request("GET /repos/x?access_token=mine&a=1 HTTP/1.1", *lines))) == 200
    assert flow.arrived == b"GET /repos/x?a=1 HTTP/1.1\r\nhost: index.example\r\n\r\n"


PLACES = [
    ("c01", request("GET / HTTP/1.1", f"Authorization: Bearer {GIT_TOKEN}", host="other.example"), "other.example"),
    (
        "c01",
        request("GET / HTTP/1.1", f"Authorization: {basic('x', GIT_TOKEN)}", host="other.example"),
        "other.example",
    ),
    ("c01", request("GET /users HTTP/1.1", f"Authorization: Bearer {GIT_TOKEN}"), HOST),
    ("c02", request(f"GET /repos/{GIT_TOKEN} HTTP/1.1"), HOST),
    ("c02", request(f"GET /repos/x?q={GIT_TOKEN} HTTP/1.1"), HOST),
    ("c02", request("GET /repos/x HTTP/1.1", f"User-Agent: {GIT_TOKEN}"), HOST),
    ("c02", request("GET /repos/x HTTP/1.1", f"X-{GIT_TOKEN}: 1"), HOST),
    (
        "c02",
        request(
            "POST /repos/x HTTP/1.1", f"Content-Length: {len(GIT_TOKEN) + 4}", body=b"ab" + GIT_TOKEN.encode() + b"cd"
        ),
        HOST,
    ),
    ("c03", request(f"GET /repos/x?q=%68{GIT_TOKEN[1:]} HTTP/1.1"), HOST),
    ("c03", request(f"GET /repos/x?q=%2568{GIT_TOKEN[1:]} HTTP/1.1"), HOST),
    ("c03", request("GET /repos/x HTTP/1.1", f"X-Basic: {basic('u', GIT_TOKEN)}"), HOST),
    ("c03", request("GET / HTTP/1.1", f"Cookie: t=%68{GIT_TOKEN[1:]}", host="other.example"), "other.example"),
]


@pytest.mark.parametrize(("row", "octets", "host"), PLACES, ids=[f"{row}-{n}" for n, (row, *_) in enumerate(PLACES)])
async def test_c01_c02_c03_a_placeholder_elsewhere_does_not_leave(row: str, octets: bytes, host: str) -> None:
    flow = credentialed(host=host)
    answer = await say(flow, octets)
    assert (status(answer), code(answer)) == (403, "placeholder_misplaced")
    assert GIT_TOKEN.encode() not in flow.arrived
    assert not flow.lines
    assert GIT_TOKEN not in repr(flow.records[0][3]) or row == "c02"
    assert flow.reasons("denied")[-1] == "placeholder_misplaced"


async def test_c03_a_placeholder_in_pieces_is_found_over_their_borders() -> None:
    """Over chunks and reads: not an octet of it that could be told for one leaves."""
    for cut in (1, 7, len(GIT_TOKEN) - 1):
        flow = credentialed()
        played = Played(flow)
        first, second = GIT_TOKEN[:cut].encode(), GIT_TOKEN[cut:].encode()
        played.client.feed(
            request(
                "POST /repos/x HTTP/1.1",
                "Transfer-Encoding: chunked",
                body=b"%x\r\nabc%b\r\n" % (3 + len(first), first),
            )
        )
        await asyncio.wait_for(_arrived(flow, b"abc"), 10)
        played.client.feed(b"%x\r\n%b\r\n0\r\n\r\n" % (len(second), second))
        played.client.feed_end()
        await played.ended()
        assert code(bytes(played.client.written)) == "placeholder_misplaced"
        assert not flow.arrived.rstrip(b"\r\n").endswith(first)
        assert flow.lines[0].aborted
        await played.over()


async def test_what_only_looks_like_the_beginning_of_a_placeholder_goes_on() -> None:
    flow = credentialed()
    body = GIT_TOKEN[:20].encode()
    assert status(await say(flow, request("POST /repos/x HTTP/1.1", "Content-Length: 20", body=body))) == 200
    assert flow.arrived.endswith(b"\r\n\r\n" + body)
    flow = credentialed()
    played = Played(flow)
    played.client.feed(request("POST /repos/x HTTP/1.1", "Transfer-Encoding: chunked", body=b"14\r\n" + body + b"\r\n"))
    await asyncio.wait_for(_arrived(flow, b"\r\n\r\n"), 10)
    played.client.feed(b"5\r\n12345\r\n0\r\n\r\n")
    played.client.feed_end()
    await played.ended()
    assert flow.arrived.endswith(body + b"12345\r\n0\r\n\r\n")
    await played.over()


async def test_a_slot_in_the_query_is_left_to_the_broker() -> None:
    flow = credentialed(inject=[{"where": "query", "name": "key"}])
    assert status(await say(flow, request(f"GET /repos/x?a=1&key={GIT_TOKEN}&b HTTP/1.1"))) == 200
    assert flow.arrived.startswith(b"GET /repos/x?a=1&b HTTP/1.1\r\n")


async def test_a_slot_in_another_header_is_left_to_the_broker() -> None:
    flow = credentialed(inject=[{"where": "header", "name": "X-Access"}])
    assert status(await say(flow, request("GET /repos/x HTTP/1.1", f"X-Access: {GIT_TOKEN}"))) == 200
    assert b"x-access" not in flow.arrived


async def test_a02_placeholder_only_lets_nothing_else_pass() -> None:
    flow = credentialed()
    assert (
        code(await say(flow, request("GET /repos/x HTTP/1.1", "Authorization: Bearer mine"))) == "client_auth_forbidden"
    )
    assert not flow.lines


async def test_a02_cookies_do_not_leave_and_auth_may_where_the_rule_says_so() -> None:
    flow = flow_of()
    assert status(await say(flow, request("GET /a HTTP/1.1", "Cookie: a=b"))) == 200
    assert b"cookie" not in flow.arrived
    flow = flow_of(rule(client_auth="allow"))
    assert (
        status(await say(flow, request("GET /a?token=x HTTP/1.1", "Cookie: a=b", "Authorization: Bearer mine"))) == 200
    )
    assert b"cookie: a=b\r\nauthorization: Bearer mine\r\n" in flow.arrived


async def test_h31_c01_a_nominated_header_cannot_take_the_injected_one_away() -> None:
    """`Connection` is the gateway's own upstream: the broker's field is not among what it names."""
    flow = credentialed()
    await say(flow, request("GET /repos/x HTTP/1.1", "Connection: authorization", f"Authorization: Bearer {GIT_TOKEN}"))
    assert b"connection" not in flow.arrived
    assert [credential for credential, _ in flow.legs] == ["gh"]


async def test_requests_with_and_without_a_credential_share_no_connection() -> None:
    flow = credentialed(rule("api", credentials=["gh"]))
    await say(flow, request("GET /repos/x HTTP/1.1"), request("GET /users HTTP/1.1"), request("GET /repos/y HTTP/1.1"))
    assert [bytes(line.written).count(b"HTTP/1.1") for line in flow.lines] == [2, 1]
    assert len(flow.legs) == 1


# -- refusing a connection as such


async def test_a_denied_connection_is_answered_with_the_verdict() -> None:
    from hatchway.domain.policy.verdicts import Flow
    from hatchway.egress.http.session import HttpSession

    flow = flow_of(OTHER)
    verdict = flow.policy.connect(Flow(host=HOST, port=443), 0.0)
    client = PlayedStream()
    client.feed(request("POST /a HTTP/1.1", "Content-Length: 5"))
    await HttpSession().refuse(client, flow, verdict)
    assert (status(bytes(client.written)), code(bytes(client.written))) == (403, "no_rule")
    assert not flow.lines


async def _arrived(flow: PlayedFlow, octets: bytes) -> None:
    while octets not in flow.arrived:
        await asyncio.sleep(0)


async def _drip(client: PlayedStream) -> None:
    while True:
        client.feed(b"x")
        await asyncio.sleep(0.005)
