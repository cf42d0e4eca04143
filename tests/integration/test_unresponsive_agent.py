"""Commands whose agent is an impostor: the client hears of it in time, through the real node and the SDK, and the command line says it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from dataplane_harness import Command, Plane
from guest_script import GuestEnd, ScriptedGuest

from hatchway.cli.running import status_of
from hatchway.client import AsyncHatchway, Exit, Unavailable
from hatchway.client.aio import AsyncSession
from hatchway.client.calls import Opened
from hatchway.client.models import Access, SessionInfo
from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Tag

WAITS = {"start_s": 0.5, "grace_s": 0.3, "linger_s": 0.05}


@contextlib.asynccontextmanager
async def impostor(folder: Path, agent: Callable[[GuestEnd], object]) -> AsyncIterator[Plane]:
    """A node process whose guest is played."""
    plane = Plane(folder, Path("/nonexistent"), waits=WAITS)
    async with ScriptedGuest(plane.agent_socket) as guest:
        starting = asyncio.create_task(plane.start_node())
        try:
            end = await guest.accept()
            await end.greet()
            await starting
            playing = asyncio.ensure_future(agent(end))  # type: ignore[call-overload]
            yield plane
            playing.cancel()
        finally:
            await plane.stop()


async def run(command: Command) -> Exit:
    """As the SDK runs a command, from its creation on."""
    access = Access(attach_url=command.url("attach"), token=command.plane.token(command.id))
    async with AsyncHatchway(command.plane.url, "hw_x") as client, asyncio.timeout(30):
        session = AsyncSession(client._driver, Opened(SessionInfo(id=command.id), access))
        return await session.wait()


async def _mute(_: GuestEnd) -> None:
    """Greets, and says nothing more."""


async def _says_started(end: GuestEnd) -> None:
    """Answers everything, and never tells of an end."""
    while True:
        kind, number, _, _ = await end.read()
        if kind == FrameType.SPAWN:
            end.answer(number, (Tag.PID, 7))
        elif kind in (FrameType.SIGNAL, FrameType.PING):
            end.answer(number)


@pytest.mark.parametrize("agent", [_mute, _says_started])
async def test_a_command_with_a_timeout_ends_soon_after_it(tmp_path: Path, agent: Callable[[GuestEnd], object]) -> None:
    async with impostor(tmp_path, agent) as plane:
        ended = await run(await plane.create("true", timeout_s=0.2))
    assert (ended.reason, ended.status) == ("agent_unresponsive", 125)
    with pytest.raises(Unavailable, match="agent_unresponsive") as told:
        status_of(ended)
    assert told.value.remedy


async def test_a_command_without_a_timeout_ends_when_its_start_is_not_answered(tmp_path: Path) -> None:
    async with impostor(tmp_path, _mute) as plane:
        assert (await run(await plane.create("true"))).reason == "agent_unresponsive"


async def test_output_that_never_comes_is_a_gap(tmp_path: Path) -> None:
    async def owes(end: GuestEnd) -> None:
        while True:
            kind, number, _, _ = await end.read()
            if kind == FrameType.SPAWN:
                end.answer(number, (Tag.PID, 7))
                end.proc(1, key, state=2, out=2**40)
                return

    async with impostor(tmp_path, lambda end: owes(end)) as plane:
        command = await plane.create("true")
        key = command.id
        ended = await run(command)
    assert (ended.reason, ended.code, ended.stdout_bytes) == ("exited", 0, 2**40)
