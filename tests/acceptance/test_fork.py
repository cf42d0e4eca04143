"""Forks of real machines: branches go on from where the source stands, with identities, entropy and sessions of their own."""

import time
from typing import Any

import pytest
from conftest import Service
from test_suspend import COUNTER, Verbs, verbs

from hatchway.client import Gap, Hatchway, Output, Sandbox

pytestmark = pytest.mark.vm
__all__ = ["verbs"]


def fork(hatchway: Hatchway, verbs: Verbs, source: Sandbox, count: int, **more: Any) -> list[Sandbox]:
    made = source.fork(count, **more)
    assert len(made) == count, source.operation
    return made


def test_branches_have_what_the_source_had_and_go_their_own_ways(service: Service, verbs: Verbs) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256, env={"A": "source"}) as source:
        source.run("echo disk > file; head -c 3000000 /dev/urandom > /dev/shm/value; sync")
        counter = source.start(["python3", "-c", COUNTER])
        for event in counter:
            if isinstance(event, Output) and b"3\n" in event.data:
                break
        value = source.run("sha256sum < /dev/shm/value").stdout
        made = fork(hatchway, verbs, source, 3, env={"A": "branch"}) + fork(hatchway, verbs, source, 1)
        try:
            everyone = [source, *made]
            assert [one.run("cat file; sha256sum < /dev/shm/value").stdout for one in everyone] == [
                f"disk\n{value}"
            ] * 5
            assert [one.run("echo $A").stdout for one in made] == ["branch\n"] * 3 + ["source\n"]
            # What must differ, differs.
            for command in (
                "head -c 16 /dev/urandom | sha256sum",
                "python3 -c 'import random; print(random.random())'",
                "cat /etc/machine-id",
                "hostname",
            ):
                assert len({one.run(command).stdout for one in everyone}) == 5, command
            clocks = [float(one.run("date +%s.%N").stdout) - time.time() for one in everyone]
            assert max(map(abs, clocks)) < 5
            # The process that ran runs on in all of them, under sessions of their own.
            for one in made:
                session = next(info for info in one.sessions() if info.forked_from == counter.id)
                attached = hatchway.sessions.get(session.id)
                first = next(event for event in attached if isinstance(event, Gap | Output))
                assert isinstance(first, Gap)
                assert first.from_ == 0
                text = b""
                for event in attached:
                    if isinstance(event, Output):
                        text += event.data
                        if text.count(b"\n") > 10:
                            break
                numbers = [int(line) for line in text.split(b"\n")[1:-1]]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                attached.kill()
            # Their files are their own.
            for number, one in enumerate(everyone):
                one.run(f"echo {number} > file; sync")
            assert [one.run("cat file").stdout for one in everyone] == [f"{number}\n" for number in range(5)]
            counter.kill()
        finally:
            for one in made:
                one.delete()


def test_forks_of_a_paused_and_of_a_suspended_one(service: Service, verbs: Verbs) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256) as source:
        source.run("echo kept > /dev/shm/kept; echo disk > disk")
        for verb, state in (("pause", "paused"), ("suspend", "suspended")):
            verbs.do(source, verb)
            (branch,) = fork(hatchway, verbs, source, 1)
            with branch:
                assert branch.run("cat /dev/shm/kept disk; echo more > more").stdout == "kept\ndisk\n"
                # A branch is like any other sandbox: it can be suspended, and forked again.
                (child,) = fork(hatchway, verbs, branch, 1)
                with child:
                    verbs.do(branch, "suspend")
                    verbs.do(branch, "restore")
                    assert [one.run("cat more").stdout for one in (branch, child)] == ["more\n"] * 2
            assert source.refresh().state == state
        verbs.do(source, "restore")
        assert source.run("cat /dev/shm/kept; ls more").stdout == "kept\n"
