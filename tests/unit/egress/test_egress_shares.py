"""Turns of one sandbox among others: some pieces of work in each round of the loop, in order, whoever gives up meanwhile."""

import asyncio

from hatchway.egress.shares import Turns


async def test_some_pieces_are_done_in_each_round_of_the_loop_in_the_order_in_which_they_came() -> None:
    turns, other, done = Turns(at_once=2), Turns(at_once=2), []

    async def work(number: int) -> None:
        await turns.take()
        done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(9)]
    rounds = []
    async with asyncio.timeout(10):
        while len(done) < 9:
            before = len(done)
            await asyncio.sleep(0)
            rounds.append(len(done) - before)
            await asyncio.wait_for(other.take(), 10)  # of another sandbox: it waits for nobody here
    assert done == list(range(9))
    assert max(rounds) == 2
    await asyncio.gather(*tasks)


async def test_who_gives_up_takes_no_turn_from_who_waits() -> None:
    turns, done = Turns(at_once=1), []

    async def work(number: int) -> None:
        await turns.take()
        done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(6)]
    await asyncio.sleep(0)
    for task in tasks[2:5]:
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 1, 5]


async def test_one_that_is_alone_does_not_wait() -> None:
    turns, rounds = Turns(at_once=1), 0

    def count() -> None:
        nonlocal rounds
        rounds += 1

    for _ in range(10):
        asyncio.get_running_loop().call_soon(count)
        before = rounds
        await turns.take()
        assert rounds == before, "it went on at once"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
