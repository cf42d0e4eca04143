"""The SDK against a service whose connections break: nothing is lost, nothing comes twice, nothing hangs.

Every case runs with the blocking client and with the asyncio one.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stream_double import SANDBOX, SESSION, Script, StreamDouble

from hatchway.client import (
    AsyncHatchway,
    ConnectionFailed,
    Gap,
    Gone,
    Hatchway,
    OperationFailed,
    Output,
    OutputLimit,
    Result,
    StreamLost,
    WaitTimeout,
    streams,
)

Run = Callable[..., Result]
CONTENT = bytes(range(256)) * 40


def run_blocking(url: str, *args: Any, **options: Any) -> Result:
    with Hatchway(url, "hw_x") as client:
        return client.sandboxes.get(SANDBOX).run(*args, **options)


def run_async(url: str, *args: Any, **options: Any) -> Result:
    async def body() -> Result:
        async with AsyncHatchway(url, "hw_x") as client:
            return await (await client.sandboxes.get(SANDBOX)).run(*args, **options)

    return asyncio.run(body())


@pytest.fixture(params=[run_blocking, run_async], ids=["blocking", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]  # one of the two above


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BACKOFF_S", (0.001, 0.002, 0.003, 0.004))


def test_a_command_in_two_requests(run: Run) -> None:
    with StreamDouble(Script(stdout=CONTENT, stderr=b"err")) as double:
        result = run(double.url, ["true"], env={"A": "b"}, cwd="/tmp", user="root", timeout=5)
        assert (result.exit_code, result.stdout_octets, result.stderr) == (0, CONTENT, "err")
        assert result.ok
        assert [f"{seen.method} {seen.path}" for seen in double.seen[1:]] == [
            f"POST /v1/sandboxes/{SANDBOX}/sessions",
            f"POST /v1/sessions/{SESSION}/attach",
        ]
        sent = json.loads(double.seen[1].body)
        assert sent == {
            "argv": ["true"],
            "env": {"A": "b"},
            "cwd": "/tmp",
            "user": "root",
            "timeout_s": 5,
            "stdin": False,
        }


def test_a_stream_that_breaks_anywhere_goes_on_where_it_was(run: Run) -> None:
    cuts = [0, 1, 40, 90, 1500, 3000, 1700, 5000, 2000]
    with StreamDouble(Script(stdout=CONTENT, stderr=b"some errors", cuts=list(cuts))) as double:
        result = run(double.url, "true")
        assert result.stdout_octets == CONTENT
        assert result.stderr == "some errors"
        assert result.gaps == ()
        attaches = double.requests("POST .*/attach")
        assert len(attaches) == len(cuts) + 1
        ids = [seen.headers.get("last-event-id") for seen in attaches]
        assert ids[0] is None
        offsets = [int(at.split(".")[1]) for at in ids if at is not None]
        assert offsets == sorted(offsets)
        assert offsets[-1] > 5000


def test_a_stream_that_never_gets_further_is_lost(run: Run) -> None:
    with StreamDouble(Script(stdout=CONTENT, cuts=[100] * 1000)) as double:
        with pytest.raises(StreamLost, match="4 attempts"):
            run(double.url, "true")
        # The first one brought `started`; four without progress followed.
        assert len(double.requests("POST .*/attach")) == 5
        assert double.signals == ["KILL"]


def test_a_service_that_is_away_for_a_moment_is_waited_for(run: Run) -> None:
    with StreamDouble(Script(stdout=b"x", refusals=[(503, "node_restarting"), (503, "node_restarting")])) as double:
        assert run(double.url, "true").stdout == "x"


def test_a_refusal_is_not_repeated(run: Run) -> None:
    with StreamDouble(Script(refusals=[(410, "session_gone")])) as double:
        with pytest.raises(Gone, match="session_gone"):
            run(double.url, "true")
        assert len(double.requests("POST .*/attach")) == 1


def test_an_expired_token_is_renewed(run: Run) -> None:
    with StreamDouble(Script(stdout=b"x", expired_tokens=1)) as double:
        assert run(double.url, "true").stdout == "x"
        assert len(double.requests("POST .*/token")) == 1


def test_a_token_that_stays_invalid_is_an_error(run: Run) -> None:
    with StreamDouble(Script(expired_tokens=1000)) as double, pytest.raises(Exception, match="token_expired"):
        run(double.url, "true")


def test_lost_octets_are_told(run: Run) -> None:
    with StreamDouble(Script(stdout=CONTENT, kept_from=4000, cuts=[300])) as double:
        result = run(double.url, "true")
        assert result.gaps == (Gap(stream="stdout", from_=0, to=4000),)
        assert result.stdout_octets == CONTENT[4000:]
        assert not result.ok


@pytest.mark.parametrize("size", [0, 1, 300_000, 1_000_000])
def test_input_is_written_once_although_answers_are_lost(run: Run, size: int) -> None:
    data = os.urandom(size)
    with StreamDouble(Script(stdin_cuts=3)) as double:
        run(double.url, "cat", stdin=data)
        assert double.stdin == data
        assert double.stdin_ended


def test_too_much_output_is_an_error_and_kills(run: Run) -> None:
    with StreamDouble(Script(stdout=CONTENT)) as double:
        with pytest.raises(OutputLimit, match="more than 5000 octets to stdout"):
            run(double.url, "true", max_output=5000)
        assert double.signals == ["KILL"]
        assert run(double.url, "true", max_output=len(CONTENT)).stdout_octets == CONTENT


def test_iteration_goes_on_after_a_break() -> None:
    with StreamDouble(Script(stdout=CONTENT, cuts=[4000])) as double, Hatchway(double.url, "hw_x") as client:
        session = client.sandboxes.get(SANDBOX).start("true")
        got = b""
        for event in session:
            if isinstance(event, Output):
                got += event.data
                break
        assert 0 < len(got) < len(CONTENT)
        session.close()
        for event in session:
            if isinstance(event, Output):
                got += event.data
        assert got == CONTENT
        assert list(session) == []
        assert session.wait().status == 0


@pytest.mark.parametrize("cuts", [[], [0, 1, 5000, 0, 100]])
def test_raw_output_goes_on_where_it_was(cuts: list[int]) -> None:
    with StreamDouble(Script(stdout=CONTENT, stderr=b"e", cuts=cuts)) as double, Hatchway(double.url, "hw_x") as client:
        session = client.sessions.get(SESSION)
        assert b"".join(session.output("stdout", 100)) == CONTENT[100:]
        assert b"".join(session.output("stderr")) == b"e"


def test_raw_output_that_is_not_kept_is_an_error() -> None:
    with StreamDouble(Script(stdout=CONTENT, kept_from=50)) as double, Hatchway(double.url, "hw_x") as client:
        session = client.sessions.get(SESSION)
        with pytest.raises(Gone, match="output_dropped"):
            list(session.output())
        assert b"".join(session.output(from_=50)) == CONTENT[50:]


def test_the_input_of_a_session_that_others_fed_goes_on() -> None:
    with StreamDouble(Script()) as double, Hatchway(double.url, "hw_x") as client:
        double.stdin = b"before "
        session = client.sessions.get(SESSION)
        session.write_stdin("after")
        session.write_stdin(" end", eof=True)
        assert double.stdin == b"before after end"


def test_a_create_whose_answer_is_lost_makes_one_sandbox() -> None:
    with StreamDouble(Script(creates_unanswered=2, operation_polls=3)) as double:
        with Hatchway(double.url, "hw_x") as client, client.sandboxes.create(name="n") as sandbox:
            assert sandbox.id == SANDBOX
            assert sandbox.state == "running"
        assert len(double.requests("POST /v1/sandboxes")) == 3
        assert len(double.created) == 1
        assert double.deleted == [SANDBOX]
        first = double.seen[0]
        assert first.headers["authorization"] == "Bearer hw_x"
        assert first.headers["prefer"] == "wait=30"
        assert json.loads(first.body) == {"template": "seed:latest", "name": "n"}


def test_an_operation_that_fails_tells_why() -> None:
    error = {"code": "no_memory", "cause": "The host is full.", "remedy": "Delete something."}
    with StreamDouble(Script(operation_error=error)) as double, Hatchway(double.url, "hw_x") as client:
        with pytest.raises(OperationFailed, match="no_memory: The host is full") as caught:
            client.sandboxes.create()
        assert caught.value.sandbox_id == SANDBOX
        assert caught.value.remedy == "Delete something."


def test_waiting_is_bounded() -> None:
    with StreamDouble(Script(operation_polls=10**9)) as double, Hatchway(double.url, "hw_x") as client:
        began = time.monotonic()
        with pytest.raises(WaitTimeout) as caught:
            client.sandboxes.create(timeout=0.3)
        assert caught.value.sandbox_id == SANDBOX
        assert time.monotonic() - began < 20


def test_nobody_there(run: Run) -> None:
    with pytest.raises(ConnectionFailed, match="hatchway up"):
        run("http://127.0.0.1:1", "true")


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with StreamDouble(Script(stdout=b"x")) as double:
        assert run(double.url, "true").stdout == "x"


def hatchway(double: StreamDouble, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "HATCHWAY_URL": double.url, "HATCHWAY_API_KEY": "hw_x"}
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    return subprocess.run(
        [sys.executable, "-m", "hatchway.cli.main", *arguments],
        env=environ,
        capture_output=True,
        timeout=60,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ({"reason": "exited", "code": 0}, 0),
        ({"reason": "exited", "code": 2}, 2),
        ({"reason": "exited", "code": 255}, 255),
        ({"reason": "signaled", "signal": 9}, 137),
        ({"reason": "timeout", "signal": 9}, 124),
        ({"reason": "spawn_failed", "message": "no such file"}, 127),
        ({"reason": "sandbox_lost", "message": "the VMM died"}, 125),
    ],
)
def test_run_passes_on_output_and_status_and_cleans_up(end: dict[str, Any], status: int) -> None:
    script = Script(stdout=CONTENT, stderr=b"\xff\x00err", cuts=[3000], end=end)
    with StreamDouble(script) as double:
        done = hatchway(double, "run", "--", "anything", "--json", "-v")
        assert done.returncode == status
        assert done.stdout == CONTENT
        assert done.stderr.startswith(b"\xff\x00err")
        assert double.deleted == [SANDBOX]
        sent = json.loads(double.requests("POST .*/sessions")[0].body)
        assert sent["argv"] == ["anything", "--json", "-v"]
        assert double.stdin_ended  # /dev/null is at its end


@pytest.mark.parametrize("data", [b"", b"text\n", os.urandom(700_000)], ids=["none", "text", "binary"])
def test_run_passes_on_input_to_its_end(data: bytes) -> None:
    with StreamDouble(Script(until="stdin", stdin_cuts=2, stdout=b"done")) as double:
        done = hatchway(double, "run", "-e", "A=1", "--", "cat", input=data)
        assert (done.returncode, done.stdout) == (0, b"done")
        assert double.stdin == data
        sent = json.loads(double.requests("POST .*/sessions")[0].body)
        assert sent["stdin"] is True
        assert sent["env"] == {"A": "1"}


def test_run_keeps_what_it_shall_keep() -> None:
    with StreamDouble(Script()) as double:
        done = hatchway(double, "run", "--keep", "--", "true")
        assert done.returncode == 0
        assert double.deleted == []
        assert SANDBOX.encode() in done.stderr


def test_run_cleans_up_what_could_not_be_made() -> None:
    error = {"code": "no_memory", "cause": "The host is full.", "remedy": "Delete something."}
    with StreamDouble(Script(operation_error=error)) as double:
        done = hatchway(double, "run", "--", "true")
        assert done.returncode == 125
        assert b"error: The host is full.\n  code: no_memory\n  remedy: Delete something." in done.stderr
        assert double.deleted == [SANDBOX]


@contextlib.contextmanager
def running(double: StreamDouble, until: str) -> Iterator[subprocess.Popen[bytes]]:
    """A `hatchway run` that has made a request that matches `until`."""
    environ = {**os.environ, "HATCHWAY_URL": double.url, "HATCHWAY_API_KEY": "hw_x"}
    command = [sys.executable, "-m", "hatchway.cli.main", "run", "--", "true"]
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where these tests run under nohup
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=heard
    ) as process:
        try:
            wait_for(lambda: bool(double.requests(until)))
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_sandbox_is_made_cleans_up(number: signal.Signals) -> None:
    with StreamDouble(Script(operation_polls=10**9)) as double, running(double, "GET /v1/operations/.*") as process:
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert double.deleted == [SANDBOX]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM")])
def test_a_signal_goes_to_the_command(number: signal.Signals, name: str) -> None:
    end = {"reason": "signaled", "signal": int(number)}
    with StreamDouble(Script(until=name, end=end)) as double, running(double, "POST .*/stdin.*") as process:
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert double.signals == [name]
        assert double.deleted == [SANDBOX]


def test_a_second_interrupt_ends_what_does_not_mind_the_first() -> None:
    with StreamDouble(Script(until="KILL")) as double, running(double, "POST .*/stdin.*") as process:
        process.send_signal(signal.SIGINT)
        wait_for(lambda: double.signals == ["INT"])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert double.signals == ["INT", "KILL"]
        assert double.deleted == [SANDBOX]


def test_a_reader_that_goes_away_ends_the_command() -> None:
    with StreamDouble(Script(stdout=CONTENT * 40)) as double:
        environ = {**os.environ, "HATCHWAY_URL": double.url, "HATCHWAY_API_KEY": "hw_x"}
        command = [sys.executable, "-m", "hatchway.cli.main", "run", "--", "yes"]
        with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(10)
            process.stdout.close()
            assert process.wait(30) == 141
        assert double.signals == ["KILL"]
        assert double.deleted == [SANDBOX]


def test_a_folder_is_copied_in(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "job.py").write_bytes(b"print(1)\n")
    (folder / "job.py").chmod(0o4755)
    (folder / "sub" / "data.bin").write_bytes(os.urandom(1_500_000))
    (folder / ("long-" * 40)).write_bytes(b"")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "sub" / "up").symlink_to("../job.py")
    os.mkfifo(folder / "pipe")
    with StreamDouble(Script()) as double:
        done = hatchway(double, "run", "--copy", str(folder), "--workdir", "/srv/a b", "--", "true")
        assert done.returncode == 0, done.stderr
        assert b"left out: 1 " in done.stderr
        (command,) = (json.loads(seen.body) for seen in double.requests("POST .*/sessions"))
        assert command["cwd"] == "/srv/a b"
        archive = double.archives["/srv/a b"]
        target = tmp_path / "target"
        target.mkdir()
        subprocess.run(["tar", "--extract", "--file=-", f"--directory={target}"], input=archive, check=True)
    os.unlink(folder / "pipe")
    comparison = subprocess.run(
        ["diff", "--recursive", "--no-dereference", folder, target], capture_output=True, check=False
    )
    assert comparison.returncode == 0, comparison.stdout
    assert (target / "job.py").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(target / "link") == "/etc/passwd"


def test_a_folder_that_cannot_be_unpacked_is_an_error(tmp_path: Path) -> None:
    with StreamDouble(Script(archive_refusal="sandbox_disk_full")) as double:
        done = hatchway(double, "run", "--copy", str(tmp_path), "--", "true")
        assert done.returncode == 125
        assert b"sandbox_disk_full" in done.stderr
        assert double.deleted == [SANDBOX]
        assert double.requests("POST .*/sessions") == []
