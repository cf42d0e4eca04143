"""The Python SDK against the real service, blocking and asyncio."""

import asyncio
import os
import threading
import time

import pytest
from conftest import Service

from hatchway.client import (
    AsyncHatchway,
    CommandFailed,
    Conflict,
    Exit,
    Hatchway,
    NotFound,
    OperationFailed,
    Output,
    Started,
    Unauthenticated,
    Unprocessable,
)

pytestmark = pytest.mark.vm


def test_the_readme(service: Service) -> None:
    with service.client() as hatchway:
        with hatchway.sandboxes.create(template="seed:latest") as sandbox:
            result = sandbox.run(["python3", "-c", "print(6*7)"])
            assert result.stdout == "42\n"
            assert result.ok
            assert result.usage.wall_s > 0
        assert hatchway.sandboxes.get(sandbox.id).state == "deleted"


def test_it_finds_the_service_by_itself(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HATCHWAY_DATA_DIR", str(service.data_dir))
    monkeypatch.delenv("HATCHWAY_URL", raising=False)
    monkeypatch.delenv("HATCHWAY_API_KEY", raising=False)
    with Hatchway() as hatchway:
        assert "seed" in [template.name for template in hatchway.templates.list()]


def test_one_sandbox_many_ways(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create(metadata={"k": "v"}) as sandbox:
        assert [one.id for one in hatchway.sandboxes.list(metadata={"k": "v"})] == [sandbox.id]
        # A string goes through the shell, a list does not.
        assert sandbox.run("echo $HOME; echo oops >&2; exit 4").exit_code == 4
        assert sandbox.run(["echo", "$HOME"]).stdout == "$HOME\n"
        with pytest.raises(CommandFailed, match="oops"):
            sandbox.run("echo oops >&2; exit 4").check()
        result = sandbox.run("cat; echo $A; pwd; id -un", stdin=b"\x00\xff", env={"A": "b"}, cwd="/tmp", user="root")
        assert result.stdout_octets == b"\x00\xffb\n/tmp\nroot\n"
        assert sandbox.run("sleep 100", timeout=0.5).reason == "timeout"
        assert sandbox.run(["no-such-command"]).reason == "spawn_failed"
        assert sandbox.run("kill -9 $$").exit_code == 137
        data = os.urandom(3_000_000)
        assert sandbox.run("cat", stdin=data).stdout_octets == data
        sandbox.update(name="renamed", metadata={"k": "w"})
        assert (sandbox.refresh().name, sandbox.info.metadata) == ("renamed", {"k": "w"})
        sandbox.update(name=None)
        assert (sandbox.refresh().name, sandbox.info.metadata) == (None, {"k": "w"})
        assert len(list(sandbox.sessions())) == 8


def test_a_session_step_by_step(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        with sandbox.start(["cat"]) as session:
            events = iter(session)
            assert isinstance(next(events), Started)
            session.write_stdin("one\n")
            assert next(events) == Output("stdout", 0, b"one\n")
            session.write_stdin("two\n")
            session.close_stdin()
            assert next(events) == Output("stdout", 4, b"two\n")
            assert session.wait().status == 0
        again = hatchway.sessions.get(session.id)
        assert again.info.state in ("exited", "ended")
        assert b"".join(again.output("stdout", 4)) == b"two\n"
        assert next(again) == next(iter(hatchway.sessions.get(session.id)))
        again.delete()

        with sandbox.start("trap 'exit 5' USR1; echo up; while :; do sleep 0.05; done") as session:
            for event in session:
                if isinstance(event, Output):
                    session.send_signal("USR1", scope="leader")
                if isinstance(event, Exit):
                    assert event.code == 5
        with sandbox.start(["sleep", "1000"]) as session:
            session.kill()
            assert session.wait().signal == 9


def test_a_terminal(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        with sandbox.start("stty size; read x; stty size", pty=(30, 100)) as session:
            shown = b""
            for event in session:
                if isinstance(event, Output):
                    shown += event.data
                    if shown == b"30 100\r\n":
                        session.resize(40, 120)
                        session.write_stdin("\n")
        assert shown.replace(b"\r\n\r\n", b"\r\n") == b"30 100\r\n40 120\r\n"


def test_the_lifecycle(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        sandbox.run("echo kept > file").check()
        assert sandbox.pause().status == "succeeded"
        assert sandbox.state == "paused"
        with pytest.raises(Conflict):
            sandbox.run("true")
        sandbox.resume()
        sandbox.stop()
        assert sandbox.refresh().state == "stopped"
        sandbox.start_vm()
        assert sandbox.run("cat file").stdout == "kept\n"
        operation = sandbox.pause(wait=False)
        assert hatchway.operations.wait(operation.id).status == "succeeded"
        sandbox.wake()
        assert sandbox.state == "running"


def test_errors_have_their_class(service: Service) -> None:
    with service.client() as hatchway:
        with pytest.raises(NotFound) as caught:
            hatchway.sandboxes.get("a" * 20)
        assert caught.value.code
        assert caught.value.remedy
        with pytest.raises(Unprocessable):
            hatchway.sandboxes.create(memory_mib=1)
        with pytest.raises((NotFound, Unprocessable, OperationFailed)):
            hatchway.sandboxes.create("no-such-template")
    with Hatchway(service.url, "hw_wrong") as stranger, pytest.raises(Unauthenticated):
        stranger.sandboxes.get("a" * 20)


def test_many_threads_share_a_client(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        seen: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: seen.append(sandbox.run(["echo", str(n)]).stdout)) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(seen) == sorted(f"{n}\n" for n in range(8))


async def test_the_same_with_asyncio(service: Service) -> None:
    async with AsyncHatchway(service.url, service.key) as hatchway:
        async with await hatchway.sandboxes.create() as sandbox:
            results = await asyncio.gather(*(sandbox.run(f"sleep 0.1; echo {n}; cat", stdin=b"x") for n in range(4)))
            assert [result.stdout for result in results] == [f"{n}\nx" for n in range(4)]
            session = await sandbox.start(["sh", "-c", "echo a; read x; echo $x"])
            got = b""
            async for event in session:
                if isinstance(event, Output):
                    got += event.data
                    if got == b"a\n":
                        await session.write_stdin(b"b\n", eof=True)
            assert got == b"a\nb\n"
            assert [piece async for piece in session.output()] == [b"a\nb\n"]
            assert session.id in [one.id async for one in sandbox.sessions()]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sandbox.run(["sleep", "1000"]), 0.5)
            # Given up here means killed there.
            assert (await sandbox.run("pgrep -x sleep")).stdout == ""
        assert (await hatchway.sandboxes.get(sandbox.id)).state == "deleted"


def test_events_tell_of_a_sandbox(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        deadline = time.monotonic() + 30
        for event in hatchway.events(after="0"):
            if event.subject == sandbox.id:
                break
            assert time.monotonic() < deadline
