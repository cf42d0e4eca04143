"""The commands over a sandbox that stays, as a user types them."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import HATCHWAY, Service

pytestmark = pytest.mark.vm


def told(done: "subprocess.CompletedProcess[bytes]") -> Any:
    """What a command told with --json."""
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture
def sandbox(service: Service) -> Iterator[str]:
    """A sandbox that runs."""
    done = service.run("create", "--name", "lab", "--metadata", "for=tests", "--env", "WHERE=inside")
    assert done.returncode == 0, done.stderr.decode()
    sandbox_id = done.stdout.decode().strip()
    yield sandbox_id
    assert service.run("rm", sandbox_id).returncode == 0


def state_of(service: Service, sandbox: str) -> str:
    return str(told(service.run("get", sandbox, "--json"))["state"])


def test_it_is_listed_and_shown(service: Service, sandbox: str) -> None:
    assert sandbox in [one["id"] for one in told(service.run("ls", "--json"))]
    assert [one["id"] for one in told(service.run("ls", "--json", "-m", "for=tests", "--state", "running"))] == [
        sandbox
    ]
    assert told(service.run("ls", "--json", "-m", "for=nothing")) == []
    shown = told(service.run("get", sandbox, "--json"))
    assert (shown["name"], shown["state"], shown["metadata"]) == ("lab", "running", {"for": "tests"})
    assert shown["isolation"] in ("hardware", "emulated")
    assert shown["template_digest"].startswith("sha256:")
    table = service.run("ls").stdout.decode().splitlines()
    assert table[0].split()[:3] == ["SANDBOX", "NAME", "STATE"]
    assert any(line.split()[:3] == [sandbox, "lab", "running"] for line in table[1:])
    assert b"seed" in service.run("get", sandbox).stdout


def test_its_whole_life(service: Service, sandbox: str) -> None:
    assert service.run("exec", sandbox, "--", "sh", "-c", "echo $WHERE > file").returncode == 0
    for verb, state in (
        ("pause", "paused"),
        ("pause", "paused"),
        ("resume", "running"),
        ("resume", "running"),
        ("pause", "paused"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("stop", "stopped"),
        ("start", "running"),
        ("stop", "stopped"),
        ("wake", "running"),
        ("wake", "running"),
    ):
        operation = told(service.run(verb, sandbox, "--json"))
        assert (operation["kind"], operation["status"]) == (verb, "succeeded")
        assert state_of(service, sandbox) == state
    assert service.run("exec", sandbox, "--", "cat", "file").stdout == b"inside\n"


def test_a_server_in_the_background_outlives_its_command(service: Service, sandbox: str) -> None:
    start = "python3 -m http.server 8000 >server.log 2>&1 & echo started"
    assert service.run("exec", sandbox, "--", "sh", "-c", start).stdout == b"started\n"
    asked = service.run("exec", sandbox, "--", "curl", "-sS", "--retry", "30", "--retry-connrefused", "localhost:8000")
    assert asked.returncode == 0, asked.stderr.decode()
    assert b"server.log" in asked.stdout


def test_what_its_state_does_not_admit_is_explained(service: Service, sandbox: str) -> None:
    service.run("stop", sandbox)
    done = service.run("pause", sandbox, "--json")
    assert done.returncode == 1
    error = json.loads(done.stderr)["error"]
    assert error["status"] == 409
    assert "start" in error["remedy"]
    done = service.run("exec", sandbox, "--", "true")
    assert done.returncode == 125
    assert b"remedy: " in done.stderr


def test_commands_are_listed_and_their_output_is_kept(service: Service, sandbox: str) -> None:
    done = service.run("exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.returncode == 3
    (session,) = told(service.run("sessions", sandbox, "--json"))
    assert session["argv"] == ["sh", "-c", "echo out; echo err >&2; exit 3"]
    assert session["exit"]["code"] == 3
    for follow in ([], ["--follow"]):
        logs = service.run("logs", session["id"], *follow)
        assert (logs.returncode, logs.stdout, logs.stderr) == (0, b"out\n", b"err\n")
    events = [json.loads(line) for line in service.run("logs", session["id"], "--json").stdout.splitlines()]
    assert events[0]["event"] == "started"
    assert {"event": "stdout", "offset": 0, "text": "out\n"} in events
    assert [event["code"] for event in events if event["event"] == "exit"] == [3]
    assert session["id"].encode() in service.run("sessions", sandbox).stdout


def test_logs_of_a_command_that_runs(service: Service, sandbox: str) -> None:
    with service.start(
        *HATCHWAY, "exec", sandbox, "--", "sh", "-c", "echo first; read x; echo then $x", stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        (session,) = told(service.run("sessions", sandbox, "--json"))
        assert service.run("logs", session["id"]).stdout == b"first\n"
        with service.start(*HATCHWAY, "logs", "--follow", session["id"]) as logs:
            assert logs.stdout is not None
            assert logs.stdout.readline() == b"first\n"
            process.stdin.write(b"go\n")
            process.stdin.close()
            assert logs.stdout.read() == b"then go\n"
            assert logs.wait(60) == 0
        assert process.stdout.read() == b"then go\n"
        assert process.wait(60) == 0


def test_operations_templates_and_events(service: Service, sandbox: str) -> None:
    (create,) = [one for one in told(service.run("operations", "--json")) if one["target"] == sandbox]
    assert (create["kind"], create["status"]) == ("create", "succeeded")
    assert told(service.run("operations", create["id"], "--json", "--wait")) == create
    assert create["id"].encode() in service.run("operations").stdout
    assert "seed" in [one["name"] for one in told(service.run("templates", "--json"))]
    with service.start(*HATCHWAY, "events", "--json", "--after", "0") as events:
        assert events.stdout is not None
        subjects = []
        while sandbox not in subjects:
            subjects.append(json.loads(events.stdout.readline())["subject"])
        events.terminate()


def test_keys(service: Service, sandbox: str) -> None:
    made = told(service.run("keys", "create", "for tests", "--json"))
    assert made["key"].startswith("hw_")
    with_it = ["ls", "--json", "--key", made["key"]]
    assert sandbox in [one["id"] for one in told(service.run(*with_it))]
    listed = told(service.run("keys", "--json"))
    assert made["id"] in [one["id"] for one in listed]
    assert made["key"] not in json.dumps(listed)
    assert service.run("keys", "rm", made["id"]).returncode == 0
    done = service.run(*with_it)
    assert done.returncode == 1
    assert json.loads(done.stderr)["error"]["status"] == 401


def test_what_is_not_there(service: Service) -> None:
    for command in (["get"], ["rm"], ["pause"], ["sessions"], ["logs"]):
        done = service.run(*command, "a" * 20, "--json")
        assert done.returncode == 1, command
        assert json.loads(done.stderr)["error"]["status"] == 404, command
    assert service.run("exec", "a" * 20, "--", "true").returncode == 125


def test_removing_twice(service: Service) -> None:
    sandbox = told(service.run("create", "--json"))["id"]
    for _ in range(2):
        assert service.run("rm", sandbox).returncode == 0
    assert service.run("exec", sandbox, "--", "true").returncode == 125
