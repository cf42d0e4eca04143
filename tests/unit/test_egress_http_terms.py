"""What is decided on is what is sent, on the terms of the rule that lets it pass; and nothing tells who asks but what the policy puts in."""

from typing import Any

from tests.support.http_flow import OK, PlayedFlow, answering, policy_of, rule, say


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
