"""What a node does for requests that need a sandbox which does not run, and what it knows of its use."""

import asyncio

import pytest

from hatchway.domain.errors import Conflict, Unavailable
from hatchway.node.activity import Uses
from hatchway.node.events import Events
from hatchway.node.waking import Waker
from hatchway.wire.node import Event, Observed

BOX = "b" * 20


class House:
    """One sandbox, and a control plane that listens or not."""

    def __init__(self, *, heard: bool = True, within_s: float = 30.0) -> None:
        self.events = Events()
        self.running = False
        self.wakes: list[str] = []
        self.waker = Waker(self.events, lambda _: self.running, lambda _: not self.running, within_s=within_s)
        if heard:
            self.events.subscribe(self._hear, 0)

    def _hear(self, event: Event) -> None:
        if event.wake is not None:
            self.wakes.append(event.wake.sandbox_id)

    def runs(self) -> None:
        """It runs, and that is told."""
        self.running = True
        self.events.observed(Observed(sandbox_id=BOX, project="p", generation=1, state="running"))

    async def asked(self) -> None:
        """Until the control plane was asked."""
        async with asyncio.timeout(20):
            while not self.wakes:
                await asyncio.sleep(0.001)


async def test_any_number_of_requests_ask_once_and_go_on_together() -> None:
    house = House()
    waiting = [asyncio.create_task(house.waker.awake(BOX)) for _ in range(20)]
    await house.asked()
    assert not any(task.done() for task in waiting)
    house.runs()
    await asyncio.gather(*waiting)
    assert house.wakes == [BOX]
    await house.waker.awake(BOX)  # it runs: nobody is asked
    assert house.wakes == [BOX]


async def test_a_client_that_goes_away_leaves_the_others_waiting() -> None:
    house = House()
    first, second = (asyncio.create_task(house.waker.awake(BOX)) for _ in range(2))
    await house.asked()
    first.cancel()
    await asyncio.wait([first])
    house.runs()
    await second
    assert first.cancelled()


async def test_nobody_waits_where_nobody_will_wake_it() -> None:
    await House(heard=False).waker.awake(BOX)
    house = House()
    waiting = asyncio.create_task(house.waker.awake(BOX))
    await house.asked()
    house.waker.stay(BOX, None)
    await waiting
    await house.waker.awake(BOX)  # the answer holds for a while
    assert house.wakes == [BOX]


async def test_who_waits_in_vain_is_told_why() -> None:
    house = House()
    waiting = asyncio.create_task(house.waker.awake(BOX))
    await house.asked()
    house.waker.stay(BOX, {"code": "host_memory_full", "cause": "The host is full.", "remedy": "Delete some."})
    with pytest.raises(Conflict) as caught:
        await waiting
    assert (caught.value.code, caught.value.remedy) == ("wake_failed", "Delete some.")
    assert "The host is full." in caught.value.cause
    house = House(within_s=0.05)
    with pytest.raises(Unavailable) as late:
        await house.waker.awake(BOX)
    assert late.value.code == "wake_timeout"


async def test_a_control_plane_that_was_restarted_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hatchway.node.waking.ASK_AGAIN_S", 0.01)
    house = House()
    waiting = asyncio.create_task(house.waker.awake(BOX))
    async with asyncio.timeout(20):
        while len(house.wakes) < 3:
            await asyncio.sleep(0.001)
    house.runs()
    await waiting


def test_use_is_a_request_in_hand_and_the_time_since_the_last() -> None:
    now = 100.0
    uses = Uses(lambda: now)
    now = 110.0
    assert (uses.of(BOX).idle_s, uses.of(BOX).busy) == (10.0, False)  # since the node began
    with uses.during(BOX), uses.during(BOX):
        now = 150.0
        assert uses.of(BOX).busy
    now = 153.0
    assert (uses.of(BOX).idle_s, uses.of(BOX).busy) == (3.0, False)
    uses.note(BOX)
    assert uses.of(BOX).idle_s == 0.0
    uses.forget(BOX)
    assert uses.of(BOX).idle_s == 53.0
