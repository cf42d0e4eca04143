"""The timer that waits share."""

import asyncio

import pytest

from hatchway.egress.http.waiting import Alarm


async def value() -> int:
    await asyncio.sleep(0)
    return 7


async def test_what_ends_in_time_leaves_the_timer_for_the_next() -> None:
    alarm = Alarm()
    for _ in range(3):
        assert await alarm.within(60, value()) == 7
    alarm.stop()


async def test_what_takes_longer_ends_and_the_next_wait_has_its_own_time() -> None:
    alarm = Alarm()
    assert await alarm.within(60, value()) == 7
    with pytest.raises(TimeoutError):
        await alarm.within(0.01, asyncio.Event().wait())
    assert await alarm.within(60, value()) == 7
    with pytest.raises(TimeoutError):
        await alarm.within(0.01, asyncio.Event().wait())
    alarm.stop()


async def test_a_timer_that_was_set_for_an_earlier_wait_does_not_end_a_later_one() -> None:
    alarm = Alarm()
    done = asyncio.Event()
    assert await alarm.within(0.01, value()) == 7
    asyncio.get_running_loop().call_later(0.05, done.set)
    assert await alarm.within(60, done.wait())
    alarm.stop()


async def test_somebody_elses_cancellation_is_no_timeout() -> None:
    alarm = Alarm()
    task = asyncio.create_task(alarm.within(60, asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    alarm.stop()
