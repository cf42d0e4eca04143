"""How long an answer about a held request holds: no longer than its rule says, and than whoever answered said."""

import asyncio

import pytest

from hatchway.domain.policy.schema import Ask
from hatchway.egress.asks import ASKS_AT_ONCE, ASKS_PER_S, Asks, TooManyAsks
from hatchway.wire.egress import AskAnswer, Asked

ASKED = Asked(
    ask_id="",
    sandbox_id="s",
    project="p",
    generation=1,
    rule="project/d/r",
    host="x.example",
    port=443,
    protocol="http",
    key="k",
)


@pytest.mark.parametrize(
    ("terms", "scope", "ttl_s", "holds_for"),
    [
        (Ask(), "once", 0.0, 0.0),
        (Ask(), "ttl", 60.0, 60.0),
        (Ask(), "session", 0.0, float("inf")),
        (Ask(scope="once"), "session", 0.0, 0.0),
        (Ask(scope="once"), "ttl", 60.0, 0.0),
        (Ask(scope="ttl", ttl=100.0), "session", 0.0, 100.0),
        (Ask(scope="ttl", ttl=100.0), "ttl", 60.0, 60.0),
        (Ask(scope="ttl", ttl=100.0), "ttl", 600.0, 100.0),
    ],
)
async def test_an_answer_holds_no_longer_than_its_rule_says(
    terms: Ask, scope: str, ttl_s: float, holds_for: float
) -> None:
    clock = [1000.0]
    asks = Asks(lambda event, params: None, lambda: clock[0])
    holding = asyncio.create_task(asks.hold(ASKED, terms))
    while not asks.held() and not holding.done():
        await asyncio.sleep(0)
    (held,) = asks.held()
    assert held.expires_at == 1000.0 + terms.timeout
    asks.answer(AskAnswer(ask_id=held.ask_id, sandbox_id="s", generation=1, allow=True, scope=scope, ttl_s=ttl_s))
    answer = await holding
    assert answer is not None
    assert answer.allow
    assert asks.answered("project/d/r", "k") is (holds_for > 0)
    if holds_for == float("inf"):
        clock[0] += 1e9
        assert asks.answered("project/d/r", "k")
    else:
        clock[0] += holds_for
        assert not asks.answered("project/d/r", "k")
    assert not asks.answered("project/d/other", "k")
    assert not asks.answered("project/d/r", "other")


async def test_asking_is_bounded_whether_anybody_waits_for_the_answer_or_not() -> None:
    clock = [0.0]
    asks = Asks(lambda event, params: None, clock=lambda: clock[0])
    for _ in range(int(ASKS_AT_ONCE)):
        asks.require_room(16)
        holding = asyncio.create_task(asks.hold(ASKED, Ask()))
        while not asks.held():
            await asyncio.sleep(0)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
    assert not asks.held()
    with pytest.raises(TooManyAsks, match="30 times a minute"):
        asks.require_room(16)
    clock[0] += 1 / ASKS_PER_S
    asks.require_room(16)
    with pytest.raises(TooManyAsks):
        asks.require_room(16)
