"""Streams of a sandbox are cut when it stops running: what is told of it, what is asked, and what may come in between."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hatchway.client import NotFound
from hatchway.client import errors as ours
from hatchway.e2b.envd import connect
from hatchway.e2b.envd.calls import OnStream, OnUnary
from hatchway.e2b.envd.endings import Endings
from hatchway.e2b.envd.requests import Request
from hatchway.e2b.identity import Identity

ONE, OTHER = "a" * 20, "b" * 20
WITHIN_S = 20


class Told:
    """Sandboxes whose changes a test tells. `looks` are those that were asked about."""

    def __init__(self) -> None:
        self.states = {ONE: "running", OTHER: "running"}
        self.looks: list[str] = []
        self.streams = 0
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Event = asyncio.Event()
        self.answers.set()
        self.failure: ours.HatchwayError | None = None

    async def reach(self, sandbox_id: str) -> Any:
        return await self.look(sandbox_id)

    async def look(self, sandbox_id: str) -> Any:
        self.looks.append(sandbox_id)
        state, failure = self.states.get(sandbox_id), self.failure
        await self.answers.wait()
        if failure is not None:
            raise failure
        if state is None:
            raise NotFound("unknown_sandbox", "There is none.", "", status=404)
        return SimpleNamespace(state=state)

    async def changes(self) -> AsyncIterator[tuple[str, str] | None]:
        self.streams += 1
        try:
            while True:
                one = await self.queue.get()
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            self.streams -= 1

    def tell(self, *changes: Any) -> None:
        for change in changes:
            self.queue.put_nowait(change)


@pytest.fixture
async def told() -> Told:
    return Told()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0)


async def test_it_is_told_and_nothing_is_asked_again(told: Told) -> None:
    gone: list[str] = []
    endings = Endings(told, gone=gone.append)
    one, other = endings.watch(ONE), endings.watch(OTHER)
    told.tell(None)
    await until(lambda: sorted(told.looks) == [ONE, OTHER])
    told.tell((OTHER, "running"), (ONE, "suspended"))
    await asyncio.wait_for(one.future, WITHIN_S)
    assert gone == [ONE]
    assert not other.future.done()
    assert len(told.looks) == 2
    one.close()
    other.close()


async def test_what_was_missed_is_asked_for(told: Told) -> None:
    endings = Endings(told)
    one, other = endings.watch(ONE), endings.watch(OTHER)
    told.tell(None)
    await until(lambda: len(told.looks) == 2)
    del told.states[ONE]
    told.tell(ours.StreamLost("It broke.", ""), None)
    await asyncio.wait_for(one.future, WITHIN_S)
    await until(lambda: len(told.looks) == 4)
    assert not other.future.done()
    one.close()
    other.close()


async def test_one_that_was_seen_just_now_is_not_asked_about(told: Told) -> None:
    fresh = {ONE}
    endings = Endings(told, fresh=fresh.__contains__)
    first = endings.watch(ONE)
    told.tell(None)
    await until(lambda: told.looks == [ONE])
    again, other = endings.watch(ONE), endings.watch(OTHER)
    await until(lambda: told.looks == [ONE, OTHER])
    fresh.clear()
    told.states[ONE] = "suspended"  # and the change was told before this one came
    late = endings.watch(ONE)
    await asyncio.wait_for(late.future, WITHIN_S)
    for one in (first, again, other, late):
        one.close()


async def test_an_answer_that_is_older_than_a_change_counts_for_nobody(told: Told) -> None:
    endings = Endings(told)
    first = endings.watch(ONE)
    told.answers.clear()
    told.tell(None)
    await until(lambda: told.looks == [ONE])
    told.states[ONE] = "suspended"
    told.tell((ONE, "suspended"))
    await asyncio.wait_for(first.future, WITHIN_S)
    late = endings.watch(ONE)
    told.answers.set()
    await asyncio.wait_for(late.future, WITHIN_S)
    assert told.looks == [ONE, ONE]


async def test_who_does_not_answer_says_nothing(told: Told) -> None:
    endings = Endings(told)
    told.failure = ours.ConnectionFailed("Nobody is there.")
    one = endings.watch(ONE)
    told.tell(None)
    await until(lambda: told.looks)
    assert not one.future.done()
    told.failure = None
    told.states[ONE] = "failed"
    await asyncio.wait_for(one.future, WITHIN_S)
    one.close()


async def test_nobody_is_listened_to_for_no_stream(told: Told) -> None:
    endings = Endings(told, linger_s=0.05)
    one = endings.watch(ONE)
    await until(lambda: told.streams == 1)
    one.close()
    endings.watch(ONE).close()
    async with asyncio.timeout(WITHIN_S):
        while told.streams:
            await asyncio.sleep(0.01)
    told.states[ONE] = "suspended"
    late = endings.watch(ONE)
    told.tell(None)
    await asyncio.wait_for(late.future, WITHIN_S)
    late.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_of_a_call_ends_it_with_an_error(told: Told, stream: bool) -> None:
    """As an HTTP status where there is one message, and in the last frame where there may be many."""
    octets = connect.frame({}) if stream else b"{}"
    coming = iter([{"type": "http.request", "body": octets, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        if (message := next(coming, None)) is not None:
            return message
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*_: Any) -> object:
        return await asyncio.Event().wait()

    async def silent(*_: Any) -> AsyncGenerator[object, None]:
        yield await never()

    kind = connect.STREAM_TYPE if stream else connect.UNARY_TYPE
    headers = {"content-type": kind, "connect-timeout-ms": "20"}
    endings = Endings(told, linger_s=0.0)
    request = Request({"type": "http"}, receive, headers, ONE, told, Identity(b"s" * 32), endings)
    call = OnStream(silent, {}) if stream else OnUnary(never)
    async with asyncio.timeout(WITHIN_S):
        await call(request, send)
    body = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] == (200 if stream else 504)
    assert b'"code":"deadline_exceeded"' in body
    assert (body[0] == connect.END) == stream
