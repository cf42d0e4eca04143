"""Sessions whose agent does not say what it should: the host's own deadlines, on fake time."""

import asyncio
import signal
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest
from test_sessions import LIMITS, SANDBOX, Agent, House, settle

from hatchway.domain.errors import Conflict
from hatchway.node.guest.seam import ExitReason, Proc, ProcessState
from hatchway.node.sessions.session import Session

START_S, GRACE_S = LIMITS.start_s, LIMITS.grace_s


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "sessions")


@pytest.fixture
def agent() -> Agent:
    return Agent()


async def runs(house: House, agent: Agent, seconds: float) -> None:
    """The guest runs for so long."""
    agent.ran_s += seconds
    await house.clock.pass_(seconds)


def reason(session: Session) -> str | None:
    exit_ = session.status().exit
    return None if exit_ is None else exit_.reason


async def test_an_agent_that_never_tells_of_an_end_is_asked_to_kill_and_then_given_up_on(
    house: House, agent: Agent
) -> None:
    session = await house.running(agent, timeout_s=15.0)
    await runs(house, agent, 15 + GRACE_S - 0.1)
    assert agent.signals == []
    await runs(house, agent, 0.2)
    assert agent.signals == [(1, signal.SIGKILL, False)]
    assert session.status().state == "running"
    await runs(house, agent, GRACE_S)
    assert (session.status().state, reason(session)) == ("ended", "agent_unresponsive")
    assert house.clock.timers == []
    assert agent.closed == [1]  # killed, whatever was left of it, by whoever answers


async def test_an_agent_that_is_only_slow_still_ends_it_with_its_timeout(house: House, agent: Agent) -> None:
    session = await house.running(agent, timeout_s=15.0, timeout_scope="leader")
    await runs(house, agent, 15 + GRACE_S)
    assert agent.signals == [(1, signal.SIGKILL, True)]
    killed = Proc(1, "", ProcessState.CLOSED, pid=77, exit_signal=9, reason=ExitReason.SIGNALED)
    agent.sinks[1].changed(killed)
    await settle()
    assert (session.status().state, reason(session)) == ("ended", "timeout")
    await runs(house, agent, 1000)
    assert reason(session) == "timeout"


async def test_time_in_which_the_guest_stands_still_does_not_count(house: House, agent: Agent) -> None:
    session = await house.running(agent, timeout_s=15.0)
    await house.clock.pass_(3600)  # paused
    assert session.status().state == "running"
    house.sessions.link_down(SANDBOX)  # suspended
    await house.clock.pass_(3600)
    assert house.clock.timers == []
    restored = Agent()
    restored.known = agent.known
    await house.sessions.link_up(SANDBOX, restored)  # type: ignore[arg-type]
    await runs(house, restored, 15 + GRACE_S)
    assert restored.signals
    await runs(house, restored, GRACE_S)
    assert reason(session) == "agent_unresponsive"


async def test_what_was_used_up_before_a_suspension_is_used_up(house: House, agent: Agent) -> None:
    await house.running(agent, timeout_s=15.0)
    await runs(house, agent, 14 + GRACE_S)
    house.sessions.link_down(SANDBOX)
    restored = Agent()
    restored.known = agent.known
    await house.sessions.link_up(SANDBOX, restored)  # type: ignore[arg-type]
    await runs(house, restored, 1.1)
    assert restored.signals


@pytest.mark.parametrize(("timeout", "within"), [(None, START_S + GRACE_S), (2.0, 2 + GRACE_S)])
async def test_a_start_that_is_never_answered_ends_for_who_waits_for_it(
    house: House, agent: Agent, timeout: float | None, within: float
) -> None:
    session = await house.create(timeout_s=timeout)
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    agent.answers.clear()
    starts = [asyncio.ensure_future(session.start(agent)) for _ in range(2)]  # type: ignore[arg-type]
    await settle()
    await runs(house, agent, within - 0.1)
    assert not any(start.done() for start in starts)
    await runs(house, agent, 0.2)
    await asyncio.gather(*starts)
    assert (session.status().state, reason(session)) == ("ended", "agent_unresponsive")
    agent.answers.set()
    await settle()
    assert agent.closed == [1]  # should it have been started after all


async def test_a_process_without_a_timeout_may_run_for_ever(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    assert house.clock.timers == []
    await runs(house, agent, 1e6)
    assert session.status().state == "running"


async def test_what_is_owed_after_the_end_is_waited_for_within_bounds_although_nobody_answers(
    house: House, agent: Agent
) -> None:
    session = await house.running(agent)
    agent.tell(1, ProcessState.EXITED, stdout=2**40)
    agent.answers.clear()
    for _ in range(50):
        await runs(house, agent, 2)
    assert (session.status().state, reason(session)) == ("ended", "exited")
    assert session.status().stdout_bytes == 2**40  # a gap, for whoever reads it


async def test_who_feeds_a_process_that_is_given_up_on_is_told(
    house: House, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await house.running(agent, timeout_s=1.0)

    def never(*_: object, **__: object) -> Awaitable[int]:
        return asyncio.get_running_loop().create_future()

    monkeypatch.setattr(agent, "send_input", never, raising=False)
    feeding = session.feeding(agent, 0, b"data")  # type: ignore[arg-type]
    await settle()
    await runs(house, agent, 1 + GRACE_S)
    await runs(house, agent, GRACE_S)
    with pytest.raises(Conflict, match="process_ended"):
        await feeding


async def test_a_node_that_was_started_anew_gives_the_whole_time_once_more(house: House, agent: Agent) -> None:
    session = await house.running(agent, timeout_s=15.0)
    await runs(house, agent, 20)
    house.clock.timers.clear()
    house.limits = replace(LIMITS)
    house.open()
    again = house.again(session)
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    await runs(house, agent, 15 + GRACE_S - 0.1)
    assert agent.signals == []
    await runs(house, agent, 0.2)
    await runs(house, agent, GRACE_S)
    assert reason(again) == "agent_unresponsive"
