"""Sessions: their states, the linger on fake time, recovery of their records, retention."""

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hatchway.domain.errors import Conflict, Exhausted, NotFound, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.node.dataplane.attach import Feed
from hatchway.node.guest.seam import (
    AgentHello,
    ExitReason,
    GuestError,
    LinkLost,
    Proc,
    ProcessLimits,
    ProcessSink,
    ProcessState,
    Spawn,
)
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.sessions.spool import Gap, SpoolLimits
from hatchway.node.sessions.surroundings import Limits
from hatchway.wire.node import SessionLimits, SessionSpec, SessionStatus

SANDBOX = "a" * 20
LIMITS = Limits(spool=SpoolLimits(keep=64 * 1024, segment=4096, disk_reserve=0), followers=3, per_sandbox=5)


@dataclass
class Clock:
    """Time that passes when told, with the timers that wait for it."""

    now: float = 1_000_000.0
    timers: list["Timer"] = field(default_factory=list)

    def later(self, delay: float, action: Callable[[], None]) -> "Timer":
        timer = Timer(self.now + delay, action, self)
        self.timers.append(timer)
        return timer

    async def pass_(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.due <= self.now]:
            self.timers.remove(timer)
            timer.action()
        await settle()


@dataclass
class Timer:
    due: float
    action: Callable[[], None]
    clock: Clock

    def cancel(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.remove(self)


async def chores(house: "House") -> None:
    """Waits for what is removed in the background."""
    while house.sessions._chores:
        await asyncio.wait(house.sessions._chores)


async def settle() -> None:
    """Lets everything run that can run."""
    for _ in range(20):
        await asyncio.sleep(0)


class Agent:
    """A guest agent as a link shows it, played by the test: what a session does with what it hears is the matter here."""

    def __init__(self, boot_id: str = "boot-1") -> None:
        self.hello = AgentHello(boot_id, "test", 0, ())
        self.spawned: list[Spawn] = []
        self.known: dict[int, Proc] = {}
        self.sinks: dict[int, ProcessSink] = {}
        self.closed: list[int] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuses: Exception | None = None
        self.outlived: set[int] = set()
        """Processes that left a child with streams of its own."""
        self.ran_s = 0.0
        self.signals: list[tuple[int, int, bool]] = []

    async def spawn(self, spawn: Spawn, sink: ProcessSink) -> int | None:
        if self.refuses is not None:
            raise self.refuses
        self.spawned.append(spawn)
        self.sinks[spawn.number] = sink
        await self.answers.wait()
        self.known.setdefault(spawn.number, Proc(spawn.number, spawn.key, ProcessState.RUNNING, pid=77))
        return 77

    def attach(self, number: int, sink: ProcessSink) -> bool:
        if number not in self.known:
            return False
        self.sinks[number] = sink
        sink.changed(self.known[number])
        return True

    async def ping(self) -> int:
        await self.answers.wait()
        return 0

    def ran(self) -> float:
        return self.ran_s

    async def signal(self, number: int, signal: int, *, leader_only: bool = False) -> None:
        self.signals.append((number, signal, leader_only))
        await self.answers.wait()

    async def close_process(self, number: int, *, if_over: bool = False) -> None:
        await self.answers.wait()
        if if_over and number in self.outlived:
            raise GuestError(errno.EBUSY, "something of it lives")
        self.closed.append(number)
        self.known.pop(number, None)

    def tell(self, number: int, state: ProcessState, stdout: int = 0, stderr: int = 0, **more: object) -> None:
        known = Proc(
            number,
            "",
            state,
            pid=77,
            exit_code=0 if state is not ProcessState.RUNNING else None,
            reason=ExitReason.EXITED if state is not ProcessState.RUNNING else None,
            stdout_total=stdout,
            stderr_total=stderr,
        )
        self.known[number] = known
        self.sinks[number].changed(known)

    def write(self, number: int, fd: int, offset: int, data: bytes) -> None:
        self.sinks[number].output(fd, offset, memoryview(data))


@dataclass
class House:
    """Sessions of one node in a folder, on fake time."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    heard: list[SessionStatus] = field(default_factory=list)
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """As a node that starts; a former one is taken for killed."""
        self.sessions = Sessions(
            self.folder, self.heard.append, limits=self.limits, now=lambda: self.clock.now, later=self.clock.later
        )
        self.sessions.load()

    async def create(self, number: int = 1, **more: object) -> Session:
        spec = SessionSpec(
            session_id=new_id(),
            sandbox_id=SANDBOX,
            project="p",
            process_id=number,
            argv=("true",),
            **more,  # type: ignore[arg-type]
        )
        await self.sessions.create(spec)
        return self.sessions.session(spec.session_id)

    async def running(self, agent: Agent, number: int = 1, **more: object) -> Session:
        session = await self.create(number, **more)
        await self.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
        await session.start(agent)  # type: ignore[arg-type]
        return session

    def again(self, session: Session) -> Session:
        return self.sessions.session(session.id)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "sessions")


@pytest.fixture
def agent() -> Agent:
    return Agent()


def states(house: House) -> list[str]:
    return [status.state for status in house.heard]


async def test_a_process_from_creation_to_end(house: House, agent: Agent) -> None:
    session = await house.create(retain_s=60.0)
    assert session.status().state == "created"
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    await session.start(agent)  # type: ignore[arg-type]
    assert (session.status().state, session.status().pid) == ("running", 77)
    await settle()
    agent.write(1, 1, 0, b"hello")
    agent.tell(1, ProcessState.EXITED, stdout=5)
    agent.tell(1, ProcessState.CLOSED, stdout=5)
    await settle()
    status = session.status()
    assert status.state == "ended"
    assert status.exit is not None
    assert (status.exit.reason, status.exit.code, status.exit.stdout_bytes) == ("exited", 0, 5)
    assert status.retain_until == status.ended_at + 60.0 == house.clock.now + 60.0
    assert states(house) == ["running", "ended"]  # the exit came in the same turn
    assert agent.closed == [1]
    assert house.clock.timers == []


async def test_concurrent_attaches_start_one_process(house: House, agent: Agent) -> None:
    session = await house.create()
    agent.answers.clear()
    starts = [asyncio.ensure_future(session.start(agent)) for _ in range(5)]  # type: ignore[arg-type]
    await settle()
    starts[0].cancel()  # its client went away
    agent.answers.set()
    await asyncio.gather(*starts[1:])
    assert len(agent.spawned) == 1
    assert agent.spawned[0].key == session.id


async def test_it_ends_a_linger_after_the_leader_and_the_child_goes_on(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.write(1, 1, 0, b"out")
    agent.tell(1, ProcessState.EXITED, stdout=3)
    await house.clock.pass_(1.9)
    assert session.status().state == "exited"
    await house.clock.pass_(0.2)
    assert session.status().state == "ended"
    agent.write(1, 1, 3, b"later output of the child")
    assert session.stored() == (28, 0)  # taken from the child, so that it never blocks
    assert session.status().stdout_bytes == 3
    assert agent.closed == []  # it would kill the child
    agent.tell(1, ProcessState.CLOSED, stdout=28)
    await settle()
    assert agent.closed == [1]


async def test_a_child_with_streams_of_its_own_goes_on_and_is_forgotten_when_it_ends(
    house: House, agent: Agent
) -> None:
    agent.outlived.add(1)
    session = await house.running(agent)
    agent.tell(1, ProcessState.CLOSED)
    await settle()
    assert session.status().state == "ended"
    assert session.living
    assert [one.spec.process_id for one in house.sessions.standing(SANDBOX)] == [1]  # a fork has it, too
    house.sessions.sweep()
    await settle()
    assert agent.closed == []
    agent.outlived.clear()
    house.sessions.sweep()
    await settle()
    assert agent.closed == [1]
    assert not session.living


async def test_deleting_kills_a_child_with_streams_of_its_own(house: House, agent: Agent) -> None:
    agent.outlived.add(1)
    session = await house.running(agent)
    agent.answers.clear()
    agent.tell(1, ProcessState.CLOSED)
    await settle()  # it is being asked for
    deleting = asyncio.create_task(house.sessions.delete(session.id))
    await settle()
    agent.answers.set()
    await deleting
    await wait_until(lambda: agent.closed == [1])
    await wait_until(lambda: not (house.folder / SANDBOX).exists())


async def test_a_paused_guest_does_not_end_by_lingering(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.tell(1, ProcessState.EXITED)
    agent.answers.clear()
    await house.clock.pass_(3600)
    assert session.status().state == "exited"
    agent.answers.set()
    await settle()
    assert session.status().state == "ended"


async def test_lingering_waits_for_output_that_the_agent_had_read(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.tell(1, ProcessState.EXITED, stdout=4)
    await house.clock.pass_(2)
    assert session.status().state == "exited"
    agent.write(1, 1, 0, b"late")
    await house.clock.pass_(2)
    assert session.status().state == "ended"
    assert session.status().stdout_bytes == 4


async def test_an_agent_that_owes_output_for_ever_is_not_waited_for_for_ever(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.tell(1, ProcessState.CLOSED, stdout=1000)
    for _ in range(20):
        await house.clock.pass_(2)
    assert session.status().state == "ended"
    assert session.status().stdout_bytes == 1000
    follower = session.follow()
    feed = Feed(session, follower, 1000)
    frames = []
    while (frame := feed.next()) is not None:
        frames.append(frame)
    follower.close()
    assert [b'"cause":"lost"' in frame for frame in frames] == [False, True, False, False]
    assert feed.over


async def test_closed_waits_for_the_output_that_follows(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.tell(1, ProcessState.EXITED, stdout=3)
    agent.tell(1, ProcessState.CLOSED, stdout=6)
    assert session.status().state == "exited"
    agent.write(1, 1, 0, b"abcdef")
    assert session.status().state == "ended"


async def test_spawn_failure_ends_with_the_reason(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    session.changed(Proc(1, "", ProcessState.EXITED, reason=ExitReason.SPAWN_FAILED, message="no such file"))
    status = session.status()
    assert status.state == "ended"
    assert status.exit is not None
    assert (status.exit.reason, status.exit.message) == ("spawn_failed", "no such file")


async def test_a_refused_spawn_can_be_tried_again(house: House, agent: Agent) -> None:
    session = await house.create()
    agent.refuses = GuestError(errno.EAGAIN, "256 processes")
    with pytest.raises(Exhausted, match="too_many_processes"):
        await session.start(agent)  # type: ignore[arg-type]
    agent.refuses = ValueError("a NUL in the command")
    with pytest.raises(Unprocessable, match="spawn_refused"):
        await session.start(agent)  # type: ignore[arg-type]
    agent.refuses = None
    await session.start(agent)  # type: ignore[arg-type]
    assert session.status().state == "running"


async def test_sandbox_lost_ends_what_runs_and_keeps_what_ended(house: House, agent: Agent) -> None:
    running = await house.running(agent, 1)
    ended = await house.running(agent, 2)
    agent.tell(2, ProcessState.CLOSED)
    created = await house.create(3)
    house.sessions.sandbox_lost(SANDBOX, "The VM died.")
    assert running.status().exit is not None
    assert (running.status().exit.reason, running.status().exit.message) == ("sandbox_lost", "The VM died.")
    assert ended.status().exit is not None
    assert ended.status().exit.reason == "exited"
    assert created.status().state == "created"


async def test_restart_goes_on_where_it_was(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.write(1, 1, 0, b"abc")
    await settle()
    house.open()
    session = house.again(session)
    assert session.stored() == (3, 0)
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    assert (session.status().state, session.status().pid) == ("running", 77)
    agent.write(1, 1, 3, b"def")
    agent.tell(1, ProcessState.CLOSED, stdout=6)
    await settle()
    house.open()
    session = house.again(session)
    assert session.status().state == "ended"
    assert session.status().stdout_bytes == 6


async def test_restart_with_a_process_that_the_agent_lost(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    await settle()
    house.open()
    await house.sessions.link_up(SANDBOX, Agent("boot-2"))  # type: ignore[arg-type]
    status = house.again(session).status()
    assert status.state == "ended"
    assert status.exit is not None
    assert status.exit.reason == "sandbox_lost"


@pytest.mark.parametrize("arrived", [True, False])
async def test_death_in_the_middle_of_a_start_starts_it_once(house: House, agent: Agent, arrived: bool) -> None:
    session = await house.create()
    agent.answers.clear()
    start = asyncio.ensure_future(session.start(agent))  # type: ignore[arg-type]
    await settle()
    start.cancel()
    if arrived:
        agent.known[1] = Proc(1, session.id, ProcessState.RUNNING, pid=77)
    house.open()  # killed between SPAWN and its answer
    agent.answers.set()
    session = house.again(session)
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    assert session.status().state == ("running" if arrived else "created")
    await session.start(agent)  # type: ignore[arg-type]
    assert session.status().state == "running"
    assert len(agent.spawned) == (1 if arrived else 2)


async def test_death_in_the_middle_of_a_start_and_a_cold_boot_do_not_start_it_again(house: House, agent: Agent) -> None:
    session = await house.create()
    agent.answers.clear()
    start = asyncio.ensure_future(session.start(agent))  # type: ignore[arg-type]
    await settle()
    start.cancel()
    house.open()
    await house.sessions.link_up(SANDBOX, Agent("boot-2"))  # type: ignore[arg-type]
    status = house.again(session).status()
    assert status.exit is not None
    assert status.exit.reason == "sandbox_lost"


async def test_limits_reach_the_agent_in_its_units_and_survive_a_restart(house: House, agent: Agent) -> None:
    limits = SessionLimits(memory_mib=64, cpu_s=0.25, open_files=32, processes=8, file_size_mib=0)
    session = await house.create(limits=limits)
    house.open()
    session = house.again(session)
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    await session.start(agent)  # type: ignore[arg-type]
    assert agent.spawned[0].limits == ProcessLimits(
        memory_bytes=64 * 2**20, cpu_ms=250, nofile=32, pids=8, fsize_bytes=0
    )


async def test_create_is_idempotent_and_other_specs_conflict(house: House) -> None:
    session = await house.create()
    assert await house.sessions.create(session.record.spec) == session.status()
    house.open()
    assert await house.sessions.create(session.record.spec) == session.status()
    other = SessionSpec(session_id=session.id, sandbox_id=SANDBOX, project="p", process_id=2, argv=("false",))
    with pytest.raises(Conflict, match="session_exists"):
        await house.sessions.create(other)


async def test_bounds_have_clear_errors(house: House) -> None:
    session = await house.create()
    followers = [session.follow() for _ in range(3)]
    with pytest.raises(Exhausted, match="too_many_followers"):
        session.follow()
    followers[0].close()
    session.follow().close()
    with pytest.raises(Unprocessable, match="offset_beyond_end"):
        session.follow(stdout=1)
    for number in range(2, 6):
        await house.create(number)
    with pytest.raises(Exhausted, match="too_many_sessions"):
        await house.create(6)


async def finished(house: House, agent: Agent, number: int, octets: bytes = b"") -> Session:
    session = await house.running(agent, number)
    for at in range(0, len(octets), 4096):
        agent.write(number, 1, at, octets[at : at + 4096])
    agent.tell(number, ProcessState.EXITED, stdout=len(octets))
    agent.tell(number, ProcessState.CLOSED, stdout=len(octets))
    await settle()
    assert session.ended
    return session


async def test_the_oldest_that_ended_makes_room_for_a_new_session(house: House, agent: Agent) -> None:
    running = await house.running(agent, 1)
    read, old, kept = [await finished(house, agent, number) for number in (2, 3, 4)]
    follower = read.follow()
    await house.create(5)
    await house.create(6)
    await chores(house)
    with pytest.raises(NotFound, match="unknown_session"):
        house.again(old)
    assert not old.folder.exists()
    assert [house.again(one).status().state for one in (running, read, kept)] == ["running", "ended", "ended"]
    await house.create(7)
    assert follower.stopped == ""
    await house.create(8)  # nothing else is left that ended
    assert follower.stopped == "expired"
    with pytest.raises(Exhausted, match="too_many_sessions"):
        await house.create(9)
    await chores(house)
    house.open()
    assert len(house.sessions.of_sandbox(SANDBOX)) == 5


async def test_all_sessions_of_a_sandbox_share_a_budget_of_output(house: House, agent: Agent) -> None:
    house.limits = replace(LIMITS, kept_per_sandbox=96 * 1024)
    house.open()
    old = await finished(house, agent, 1, bytes(40 * 1024))
    new = await finished(house, agent, 2, bytes(40 * 1024))
    running = await house.running(agent, 3)
    for at in range(0, 60 * 1024, 4096):
        agent.write(3, 1, at, bytes(4096))
        assert sum(one.spool.kept for one in (old, new, running)) <= 96 * 1024
    # The oldest output of the oldest that ended went, and is a gap to its end.
    assert old.spool.kept == 0
    assert old.spool.streams[1].locate(0) == Gap(0, 40 * 1024, "bound")
    assert 0 < new.spool.kept < 40 * 1024
    assert running.spool.kept == 60 * 1024
    for at in range(60 * 1024, 400 * 1024, 4096):
        agent.write(3, 1, at, bytes(4096))
        assert sum(one.spool.kept for one in (old, new, running)) <= 96 * 1024
    assert (new.spool.kept, running.spool.kept) == (32 * 1024, 64 * 1024)  # its own bound came first
    # A restart counts what is there, and what is deleted counts no more.
    house.open()
    kept = house.again(running).spool.kept
    assert 0 < kept <= 64 * 1024
    await house.sessions.delete(running.id)
    other = await finished(house, agent, 4, bytes(60 * 1024))
    assert other.spool.kept == 60 * 1024


async def test_retention(house: House, agent: Agent) -> None:
    session = await house.running(agent, retain_s=100.0)
    agent.write(1, 1, 0, b"abc")
    agent.tell(1, ProcessState.CLOSED, stdout=3)
    await settle()
    await house.clock.pass_(99)
    house.sessions.sweep()
    assert house.sessions.get(session.id).state == "ended"
    await house.clock.pass_(2)
    house.sessions.sweep()
    with pytest.raises(NotFound):
        house.sessions.get(session.id)
    await wait_until(lambda: not (house.folder / SANDBOX).exists())


async def test_retention_passes_over_what_runs(house: House, agent: Agent) -> None:
    session = await house.running(agent, retain_s=1.0)
    await house.clock.pass_(10_000_000)
    house.sessions.sweep()
    assert house.sessions.get(session.id).state == "running"


async def test_a_child_that_outlives_the_retention_is_not_killed(house: House, agent: Agent) -> None:
    session = await house.running(agent, retain_s=10.0)
    agent.write(1, 1, 0, b"abc")
    agent.tell(1, ProcessState.EXITED, stdout=3)
    await house.clock.pass_(2)
    await house.clock.pass_(11)
    house.sessions.sweep()
    with pytest.raises(NotFound):
        house.sessions.get(session.id)
    await wait_until(lambda: [path.name for path in session.folder.iterdir()] == ["session.jsonl"])
    agent.write(1, 1, 3, b"still here")  # it never blocks
    assert agent.closed == []
    house.open()  # not even after a restart
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    agent.write(1, 1, 13, b"and here")
    agent.tell(1, ProcessState.CLOSED, stdout=21)
    await wait_until(lambda: not (house.folder / SANDBOX).exists())
    assert agent.closed == [1]


async def test_delete_kills_and_removes_and_is_idempotent(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    agent.write(1, 1, 0, b"abc")
    follower = session.follow()
    await house.sessions.delete(session.id)
    await house.sessions.delete(session.id)
    await house.sessions.delete(new_id())
    assert agent.closed == [1]
    with pytest.raises(NotFound):
        house.sessions.get(session.id)
    assert session.ended  # the follower's stream ends
    follower.close()
    await wait_until(lambda: not (house.folder / SANDBOX).exists())


async def test_delete_while_nobody_can_be_asked_kills_later(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    await settle()
    house.open()  # the link is not up yet
    await house.sessions.delete(session.id)
    assert house.sessions.of_sandbox(SANDBOX) == ()
    house.open()
    await house.sessions.link_up(SANDBOX, agent)  # type: ignore[arg-type]
    await wait_until(lambda: agent.closed == [1])
    await wait_until(lambda: not (house.folder / SANDBOX).exists())


async def test_sandbox_deleted_leaves_nothing(house: House, agent: Agent) -> None:
    await house.running(agent, 1)
    await house.create(2)
    await house.sessions.sandbox_deleted(SANDBOX)
    assert house.sessions.of_sandbox(SANDBOX) == ()
    assert list(house.folder.iterdir()) == []


async def test_a_lost_close_is_tried_again(house: House, agent: Agent) -> None:
    session = await house.running(agent)
    close = agent.close_process

    async def fails(number: int, *, if_over: bool = False) -> None:
        raise LinkLost("silent")

    agent.close_process = fails  # type: ignore[method-assign]
    agent.tell(1, ProcessState.CLOSED)
    await settle()
    assert session.record.agent_open
    agent.close_process = close  # type: ignore[method-assign]
    house.sessions.sweep()
    await settle()
    assert agent.closed == [1]


async def test_half_made_folders_go_and_unreadable_records_stay(house: House) -> None:
    half = house.folder / SANDBOX / new_id()
    half.mkdir(parents=True)
    (half / "stdout.00000000000000000000").write_bytes(b"x")
    strange = house.folder / SANDBOX / new_id()
    strange.mkdir()
    (strange / "session.jsonl").write_text("{}\n{}\n")
    house.open()
    assert not half.exists()
    assert strange.exists()


async def test_what_cannot_be_read_keeps_no_session_from_being_found(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, kept = await house.create(1), await house.create(2)
    (house.folder / "stray").write_text("no folder of a sandbox")
    (house.folder / SANDBOX / "stray").write_text("no folder of a session")
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.parent.name == broken.id:
            raise OSError(errno.EIO, "the disk is failing")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    house.open()
    assert house.again(kept).id == kept.id
    with pytest.raises(NotFound):
        house.again(broken)
    monkeypatch.undo()
    house.open()
    assert house.again(broken).id == broken.id


@pytest.mark.parametrize("torn", [b"{", b'{"state":"running"', b'{"state":"nonsense"}'])
async def test_a_line_that_was_not_finished_does_not_count(house: House, agent: Agent, torn: bytes) -> None:
    session = await house.running(agent)
    agent.write(1, 1, 0, b"abc")
    agent.tell(1, ProcessState.CLOSED, stdout=3)
    await settle()
    path = session.folder / "session.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + torn)
    house.open()
    assert house.sessions.get(session.id).state == "ended"
    assert path.read_bytes() == before


async def test_a_creation_that_was_not_finished_never_was(house: House) -> None:
    session = await house.create()
    path = session.folder / "session.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n{")
    house.open()
    assert house.sessions.of_sandbox(SANDBOX) == ()
    assert not session.folder.exists()


async def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what a thread does."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
