"""The bounds of a rule over an hour, whatever connections they come over."""

from hatchway.domain.policy.schema import Rate, WebSocket
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.vocabulary import Protocol
from hatchway.egress.rates import Rates


def test_h25_a_websocket_rule_has_a_budget_of_its_own() -> None:
    now = 0.0
    rates = Rates(lambda: now)
    terms = Terms(protocol=Protocol.WEBSOCKET, websocket=WebSocket(bytes_out_per_hour=100))
    assert rates.send(terms, 90) == ""
    assert "100 octets" in rates.send(terms, 20)
    now = 7200.0
    assert rates.send(terms, 90) == ""


def test_the_lower_of_two_budgets_holds_and_others_have_none() -> None:
    rates = Rates(lambda: 0.0)
    both = Terms(
        protocol=Protocol.WEBSOCKET, rate=Rate(bytes_out_per_hour=50), websocket=WebSocket(bytes_out_per_hour=100)
    )
    assert "50 octets" in rates.send(both, 60)
    http = Terms(protocol=Protocol.HTTP, websocket=WebSocket(bytes_out_per_hour=1))
    assert rates.send(http, 1000) == ""
    assert rates.send(None, 1000) == ""
