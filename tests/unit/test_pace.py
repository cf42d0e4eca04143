"""How fast a client has to be, on a clock that the tests move."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hatchway.domain.errors import InvalidRequest
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.pace import PIECE, Pace

LIMITS = PlaneLimits(client_rate=1_000, client_grace_s=60.0)


class Client:
    """Takes an answer, or gives a body; each call takes it `pause_s` of a clock that nobody else moves."""

    def __init__(self, limits: PlaneLimits = LIMITS) -> None:
        self.now = 0.0
        self.pause_s = 0.0
        self.taken: list[Any] = []
        self.aborted = 0
        self.pace = Pace(limits, lambda: self.now)
        self.scope = {"extensions": {"hatchway.abort": self._abort}}
        self.answer = self.pace.sending(self.scope, self._take)

    def _abort(self) -> None:
        self.aborted += 1

    async def _take(self, message: Any) -> None:
        self.now += self.pause_s
        self.taken.append(message)

    async def give(self, *chunks: bytes) -> AsyncIterator[bytes]:
        for chunk in chunks:
            self.now += self.pause_s
            yield chunk

    async def send(self, octets: int, *, more: bool = True) -> None:
        await self.answer({"type": "http.response.body", "body": bytes(octets), "more_body": more})


async def test_a_slow_client_that_goes_on_is_borne_for_as_long_as_it_likes() -> None:
    client = Client()
    client.pause_s = 1.0
    for _ in range(100_000):
        await client.send(1_000)
    assert client.now == 100_000


async def test_a_client_that_takes_an_octet_a_minute_is_broken_off() -> None:
    client = Client()
    client.pause_s = 59.0
    await client.send(1)
    with pytest.raises(InvalidRequest) as caught:
        await client.send(1)
    assert caught.value.code == "client_too_slow"
    assert client.aborted == 1


async def test_who_was_fast_may_stand_still_for_no_longer_than_others() -> None:
    client = Client()
    for _ in range(1_000):
        await client.send(10**6)
    client.pause_s = 61.0
    with pytest.raises(InvalidRequest):
        await client.send(1)


async def test_the_time_that_others_take_is_not_the_clients() -> None:
    client = Client()
    for _ in range(100):
        client.now += 1_000.0  # the guest reads
        await client.send(1)
    assert client.aborted == 0


async def test_one_that_never_takes_anything_is_not_waited_for() -> None:
    client = Client(PlaneLimits(client_rate=1_000, client_grace_s=0.01))

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    answer = client.pace.sending(client.scope, never)
    with pytest.raises(InvalidRequest):
        await answer({"type": "http.response.body", "body": b"x"})
    assert client.aborted == 1


@pytest.mark.parametrize("octets", [0, 1, PIECE, PIECE + 1, 5 * PIECE])
@pytest.mark.parametrize("more", [True, False])
async def test_large_pieces_are_handed_on_in_small_ones_and_end_once(octets: int, more: bool) -> None:
    client = Client()
    await client.answer({"type": "http.response.start", "status": 200, "headers": []})
    await client.send(octets, more=more)
    start, *bodies = client.taken
    assert start["type"] == "http.response.start"
    assert sum(len(one["body"]) for one in bodies) == octets
    assert all(len(one["body"]) <= PIECE for one in bodies)
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [more]


async def test_a_body_has_to_come_in_time_too() -> None:
    client = Client()
    client.pause_s = 1.0
    taken = [chunk async for chunk in client.pace.receiving(client.give(*[bytes(1_000)] * 500))]
    assert len(taken) == 500
    client.pause_s = 25.0
    with pytest.raises(InvalidRequest) as caught:
        [chunk async for chunk in client.pace.receiving(client.give(*[b"x"] * 500))]
    assert caught.value.code == "body_too_slow"
