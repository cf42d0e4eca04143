"""What a user of E2B's SDK does with sandboxes: make, look, pause, resume, time, fork, keep, kill."""

import asyncio
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from conftest import boot_id, said, state, until
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
)

New = Callable[..., Sandbox]


def left(sandbox_id: str) -> timedelta:
    return Sandbox.get_info(sandbox_id).end_at - datetime.now(UTC)


def test_make_look_and_kill(new: New) -> None:
    mark = uuid.uuid4().hex
    sandbox = new(timeout=600, metadata={"mark": mark, "k y": "v&1"}, envs={"A": "1"})
    info = sandbox.get_info()
    assert (info.sandbox_id, info.template_id, info.name) == (sandbox.sandbox_id, "base", "base")
    assert (info.state, info.metadata) == (SandboxState.RUNNING, {"mark": mark, "k y": "v&1"})
    assert info.started_at < datetime.now(UTC) < info.end_at
    assert info.cpu_count > 0
    assert info.memory_mb > 0
    assert info.lifecycle == {"on_timeout": "kill", "auto_resume": False}
    found = Sandbox.list(query=SandboxQuery(metadata={"mark": mark, "k y": "v&1"}))
    assert [one.sandbox_id for one in found.next_items()] == [sandbox.sandbox_id]
    assert not found.has_next
    assert Sandbox.list(query=SandboxQuery(metadata={"mark": "another"})).next_items() == []
    assert Sandbox.kill(sandbox.sandbox_id) is True
    assert Sandbox.kill(sandbox.sandbox_id) is False
    with pytest.raises(NotFoundException):
        Sandbox.get_info(sandbox.sandbox_id)


def test_lists_page_newest_first(new: New) -> None:
    mark = uuid.uuid4().hex
    ids = [new(metadata={"mark": mark}).sandbox_id for _ in range(3)]
    Sandbox.pause(ids[0])
    query = SandboxQuery(metadata={"mark": mark})
    pages = Sandbox.list(query=query, limit=2)
    first, second = pages.next_items(), pages.next_items()
    assert [one.sandbox_id for one in first + second] == ids[::-1]
    assert not pages.has_next
    oldest = Sandbox.list(query=query, order="asc").next_items()
    assert [one.sandbox_id for one in oldest] == ids
    paused = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])).next_items()
    assert [one.sandbox_id for one in paused] == ids[:1]
    later = SandboxQuery(metadata={"mark": mark}, started_after=oldest[1].started_at)
    assert [one.sandbox_id for one in Sandbox.list(query=later).next_items()] == ids[:0:-1]


def test_rounds_of_pause_keep_memory_files_and_token(new: New) -> None:
    sandbox = new(timeout=600)
    sandbox_id, booted = sandbox.sandbox_id, boot_id(sandbox.sandbox_id)
    token = sandbox.connection_config.sandbox_headers.get("X-Access-Token")
    said(sandbox, "mkdir /dev/shm/t; sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > /dev/shm/t/pid")
    for number in range(3):
        said(sandbox, f"echo {number} > /home/user/{number}; echo {number} > /dev/shm/t/{number}")
        started = Sandbox.get_info(sandbox_id).started_at
        assert Sandbox.pause(sandbox_id) is True
        assert Sandbox.pause(sandbox_id) is False
        info = Sandbox.get_info(sandbox_id)
        assert (info.state, info.started_at, info.template_id) == (SandboxState.PAUSED, started, "base")
        assert info.end_at <= datetime.now(UTC)
        resumed = Sandbox.connect(sandbox_id, timeout=300)
        assert resumed.connection_config.sandbox_headers.get("X-Access-Token") == token
        kept = said(resumed, "cat /home/user/[0-9] /dev/shm/t/[0-9]; kill -0 $(cat /dev/shm/t/pid) && echo there")
        assert kept.split() == [*map(str, range(number + 1))] * 2 + ["there"]
        assert boot_id(sandbox_id) == booted
        assert timedelta(seconds=200) < left(sandbox_id) <= timedelta(seconds=300)


def test_a_pause_of_the_filesystem_boots_anew(new: New) -> None:
    sandbox = new(timeout=600)
    booted = boot_id(sandbox.sandbox_id)
    said(sandbox, "echo kept > /home/user/a; echo lost > /dev/shm/b")
    assert sandbox.pause(mode="filesystem") is True
    sandbox.connect(timeout=600)
    assert said(sandbox, "cat /home/user/a; ls /dev/shm") == "kept\n"
    again = boot_id(sandbox.sandbox_id)
    assert again != booted
    # And whoever resumes can leave the memory that was kept.
    sandbox.pause()
    sandbox.connect(timeout=600, on_resume="reboot")
    assert boot_id(sandbox.sandbox_id) != again


def test_connect_only_extends_and_set_timeout_does_both(new: New) -> None:
    sandbox = new(timeout=600)
    before = sandbox.get_info().end_at
    Sandbox.connect(sandbox.sandbox_id, timeout=60)
    assert sandbox.get_info().end_at == before
    Sandbox.connect(sandbox.sandbox_id, timeout=3000)
    assert left(sandbox.sandbox_id) > timedelta(seconds=2500)
    sandbox.set_timeout(120)
    assert left(sandbox.sandbox_id) <= timedelta(seconds=120)


def test_at_its_end_it_is_killed(new: New) -> None:
    sandbox = new(timeout=600)
    sandbox.set_timeout(1)
    until(lambda: state(sandbox.sandbox_id) == "gone")
    with pytest.raises(SandboxException, match=r"being killed|not found"):
        Sandbox.connect(sandbox.sandbox_id)


def test_at_its_end_it_is_paused_again_and_again(new: New) -> None:
    """With all that was written, whichever round it was in."""
    sandbox = new(timeout=600, lifecycle={"on_timeout": "pause"})
    for number in range(3):
        sandbox.files.write(f"kept/{number}", f"round {number}")
        sandbox.set_timeout(0)
        until(lambda: state(sandbox.sandbox_id) == "paused")
        Sandbox.connect(sandbox.sandbox_id, timeout=600)
        info = sandbox.get_info()
        assert (info.state, info.lifecycle["on_timeout"]) == (SandboxState.RUNNING, "pause")
        kept = [sandbox.files.read(f"kept/{earlier}") for earlier in range(number + 1)]
        assert kept == [f"round {earlier}" for earlier in range(number + 1)]


def test_forks_go_on_from_where_it_stands(new: New, made: list[str]) -> None:
    source = new(timeout=600, metadata={"a": "b"})
    said(source, "echo memory > /dev/shm/a; echo disk > /home/user/b")
    forks = source.fork(count=2, timeout=300)
    children = [one for one in forks if isinstance(one, Sandbox)]
    made += [one.sandbox_id for one in children]
    assert len({source.sandbox_id, *(one.sandbox_id for one in children)}) == 3, forks
    for child in children:
        assert said(child, "cat /dev/shm/a /home/user/b") == "memory\ndisk\n"
        assert child.get_info().metadata == {"a": "b"}
        assert left(child.sandbox_id) <= timedelta(seconds=300)
    assert source.get_info().state == SandboxState.RUNNING
    assert left(source.sandbox_id) > timedelta(seconds=300)


def test_snapshots_are_templates(new: New) -> None:
    source = new(timeout=600)
    said(source, "echo memory > /dev/shm/a; echo disk > /home/user/b")
    name = f"kept-{uuid.uuid4().hex[:8]}"
    kept = source.create_snapshot(name=name)
    try:
        assert kept.names == [f"{name}:default"]
        assert source.get_info().state == SandboxState.RUNNING
        listed = source.list_snapshots()
        assert [one.snapshot_id for one in listed.next_items()] == [kept.snapshot_id]
        assert not listed.has_next
        source.kill()
        for template in (kept.snapshot_id, name):
            copy = new(template)
            assert said(copy, "cat /dev/shm/a /home/user/b") == "memory\ndisk\n"
            assert copy.get_info().template_id == kept.snapshot_id
            copy.kill()
    finally:
        assert Sandbox.delete_snapshot(kept.snapshot_id) is True
    assert Sandbox.delete_snapshot(kept.snapshot_id) is False
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(name)


def test_metrics_are_there_soon(new: New) -> None:
    sandbox = new(timeout=600)
    (sample,) = sandbox.get_metrics()
    assert sample.cpu_count > 0
    assert 0 <= sample.cpu_used_pct <= 100
    assert 0 < sample.mem_used < sample.mem_total
    assert 0 < sample.mem_cache < sample.mem_total
    assert 0 < sample.disk_used < sample.disk_total
    assert abs(sample.timestamp - datetime.now(UTC)) < timedelta(minutes=5)


def test_the_network_can_be_changed(new: New) -> None:
    sandbox = new(timeout=600, network={"deny_out": ["8.8.8.8"]})
    assert sandbox.get_info().network == {"deny_out": ["8.8.8.8"]}
    sandbox.update_network({"allow_internet_access": False})
    info = sandbox.get_info()
    assert info.allow_internet_access is False


def test_mistakes_are_the_sdks_own_errors(new: New) -> None:
    nobody = "0" * 20
    for call in (
        lambda: Sandbox.get_info(nobody),
        lambda: Sandbox.connect(nobody),
        lambda: Sandbox.pause(nobody),
        lambda: Sandbox.set_timeout(nobody, 5),
        lambda: Sandbox.fork(nobody),
        lambda: Sandbox.create_snapshot(nobody),
        lambda: Sandbox.get_metrics(nobody),
        lambda: Sandbox.update_network(nobody, {}),
    ):
        with pytest.raises(NotFoundException):
            call()
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("no-such-template")
    with pytest.raises(SandboxException, match="400"):
        Sandbox.create(timeout=0)
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    sandbox = new(timeout=600)
    sandbox.pause()
    with pytest.raises(SandboxException, match="409"):
        sandbox.set_timeout(5)


def test_a_repeated_creation_is_one(new: New, made: list[str]) -> None:
    key = uuid.uuid4().hex
    first = new(timeout=600, idempotency_key=key)
    assert Sandbox.create(timeout=600, idempotency_key=key).sandbox_id == first.sandbox_id


def test_many_at_once() -> None:
    async def many() -> None:
        mark = uuid.uuid4().hex
        made = await asyncio.gather(*(AsyncSandbox.create(timeout=600, metadata={"mark": mark}) for _ in range(4)))
        try:
            await asyncio.gather(*(one.pause() for one in made))
            await asyncio.gather(*(one.connect(timeout=600) for one in made))
            found = await AsyncSandbox.list(query=SandboxQuery(metadata={"mark": mark})).next_items()
            assert {one.sandbox_id for one in found} == {one.sandbox_id for one in made}
            assert all(one.state == SandboxState.RUNNING for one in found)
        finally:
            assert all(await asyncio.gather(*(one.kill() for one in made)))

    asyncio.run(many())
