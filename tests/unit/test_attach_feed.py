"""The order of an attached client's events, and characters that arrive in pieces."""

import json
from pathlib import Path

import pytest

from hatchway.node.dataplane.attach import Feed
from hatchway.node.guest.seam import ExitReason, Proc, ProcessState
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.record import Record
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.spool import Spool, SpoolLimits
from hatchway.node.sessions.surroundings import Limits, Surroundings
from hatchway.wire.node import SessionSpec


class NoTimer:
    def cancel(self) -> None:
        """Nothing to cancel."""


LIMITS = Limits(spool=SpoolLimits(keep=64 * 1024, segment=4096, disk_reserve=0))


@pytest.fixture
def session(tmp_path: Path) -> Session:
    spec = SessionSpec(session_id="s" * 20, sandbox_id="a" * 20, project="p", process_id=1, argv=("x",))
    around = Surroundings(
        limits=LIMITS,
        now=lambda: 0.0,
        later=lambda delay, action: NoTimer(),
        soon=lambda action: None,
        link_of=lambda sandbox_id: None,
        crowded=lambda _: None,
        published=lambda session: None,
    )
    return Session(tmp_path, Record(spec=spec, created_at=0.0), Spool(tmp_path, LIMITS.spool), around)


@pytest.fixture
def follower(session: Session) -> Follower:
    return session.follow()


def tell(session: Session, state: ProcessState, stdout: int = 0, stderr: int = 0) -> None:
    reason = None if state is ProcessState.RUNNING else ExitReason.EXITED
    session.changed(Proc(1, "", state, pid=7, exit_code=0, reason=reason, stdout_total=stdout, stderr_total=stderr))


def drain(feed: Feed) -> list[tuple[str, object]]:
    """Name and content of the events that there are now."""
    found: list[tuple[str, object]] = []
    while (frame := feed.next()) is not None:
        parts = dict(line.split(": ", 1) for line in frame.decode().strip().split("\n"))
        data = json.loads(parts["data"])
        found.append((parts["event"], data.get("text", data.get("base64", data.get("reason", data.get("to"))))))
    return found


async def test_a_character_is_held_back_until_it_is_whole(session: Session, follower: Follower) -> None:
    feed = Feed(session, follower, 100)
    tell(session, ProcessState.RUNNING)
    octets = "né€\N{GRINNING FACE}".encode()
    got = []
    for at in range(len(octets)):
        session.output(1, at, memoryview(octets[at : at + 1]))
        got += [content for name, content in drain(feed) if name == "stdout"]
    assert got == ["n", "é", "€", "\N{GRINNING FACE}"]


async def test_the_border_of_two_files_cuts_no_character(session: Session) -> None:
    text = "x" * 4095 + "\N{GRINNING FACE}" + "y" * 5000
    tell(session, ProcessState.RUNNING)
    for at in range(0, len(text.encode()), 1000):
        session.output(1, at, memoryview(text.encode()[at : at + 1000]))
    session.spool.seal()  # from disk, not from memory
    feed = Feed(session, session.follow(), 3000)
    contents = [content for name, content in drain(feed) if name == "stdout"]
    assert "".join(map(str, contents)) == text


async def test_half_a_character_at_the_end_comes_as_base64(session: Session, follower: Follower) -> None:
    feed = Feed(session, follower, 100)
    tell(session, ProcessState.RUNNING)
    session.output(1, 0, memoryview(b"ab\xe2\x82"))
    assert drain(feed) == [("started", None), ("stdout", "ab")]
    tell(session, ProcessState.CLOSED, stdout=4)
    assert drain(feed) == [("stdout", "4oI="), ("exit", "exited"), ("end", None)]
    assert feed.over


async def test_half_a_character_before_a_gap_comes_as_base64(session: Session, follower: Follower) -> None:
    feed = Feed(session, follower, 100)
    tell(session, ProcessState.RUNNING)
    session.output(1, 0, memoryview(b"\xe2\x82"))
    session.output(1, 10, memoryview(b"z"))
    assert drain(feed) == [("started", None), ("stdout", "4oI="), ("gap", 10), ("stdout", "z")]


async def test_exit_comes_behind_what_the_leader_wrote(session: Session, follower: Follower) -> None:
    feed = Feed(session, follower, 100)
    tell(session, ProcessState.RUNNING)
    session.output(1, 0, memoryview(b"abc"))
    tell(session, ProcessState.EXITED, stdout=6)
    assert drain(feed) == [("started", None), ("stdout", "abc")]
    session.output(1, 3, memoryview(b"def"))
    assert drain(feed) == [("stdout", "def"), ("exit", "exited")]
    session.output(1, 6, memoryview(b"of a child"))
    assert drain(feed) == [("stdout", "of a child")]


async def test_exit_is_not_held_up_by_a_child_that_floods(session: Session, follower: Follower) -> None:
    feed = Feed(session, follower, 10)
    tell(session, ProcessState.RUNNING)
    tell(session, ProcessState.EXITED)
    for number in range(5):
        session.output(1, number * 10, memoryview(b"0123456789"))
    assert [name for name, _ in drain(feed)][:2] == ["started", "exit"]


async def test_both_streams_take_turns(session: Session, follower: Follower) -> None:
    feed = Feed(session, follower, 10)
    tell(session, ProcessState.RUNNING)
    session.output(1, 0, memoryview(bytes(30)))
    session.output(2, 0, memoryview(b"err"))
    assert [name for name, _ in drain(feed)] == ["started", "stdout", "stderr", "stdout", "stdout"]
