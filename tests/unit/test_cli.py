"""The command line as far as it goes without a service: help, wrong calls, errors, and what it loads."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hatchway.bench.commands import BENCHES
from hatchway.cli import front, passing
from hatchway.cli.app import app

HATCHWAY = [sys.executable, "-m", "hatchway.cli.main"]
COMMANDS = [
    "run",
    "exec",
    "export",
    "import",
    "sessions",
    "logs",
    "kill",
    "create",
    "set",
    "extend",
    "ls",
    "get",
    "rm",
    "pause",
    "resume",
    "suspend",
    "restore",
    "fork",
    "snapshot",
    "snapshots",
    "exports",
    "pools",
    "tokens",
    "rollback",
    "stop",
    "start",
    "wake",
    "cp",
    "shell",
    "forward",
    "open",
    "operations",
    "templates",
    "keys",
    "policy",
    "projects",
    "events",
    "top",
    "journal",
    "up",
    "down",
    "credentials",
    "doctor",
    "backup",
    "approvals",
    "audit",
    "bench",
    "chaos",
    "redteam",
    "e2b",
]


def hatchway(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HATCHWAY, *arguments],
        env={**os.environ, "HATCHWAY_URL": "http://127.0.0.1:1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command() -> None:
    done = hatchway("--help")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    assert sorted(COMMANDS) == sorted(listed)


def test_help_names_every_bench() -> None:
    named = hatchway("bench", "--help", COLUMNS="300").stdout
    assert f"[{'|'.join(BENCHES)}]..." in named


def test_help_loads_neither_the_http_library_nor_the_terminal_toolkit_nor_the_service() -> None:
    script = (
        "import sys\nfrom hatchway.cli.main import main\nsys.argv = ['hatchway', '--help']\n"
        "try: main()\nexcept SystemExit: pass\nprint('LOADED', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.partition("LOADED")[2].split())
    assert "typer" in loaded
    assert loaded.isdisjoint({"httpx", "rich.console", "asyncio", "sqlalchemy", "fastapi", "hatchway.client"})
    assert {name.split(".")[1] for name in loaded if name.startswith("hatchway.")} == {"cli"}


def test_run_loads_little() -> None:
    script = (
        "import sys\nfrom hatchway.cli.main import main\nsys.argv = ['hatchway', 'run', '--', 'true']\n"
        "try: main()\nexcept SystemExit as end: print('STATUS', end.code)\nprint('LOADED', *sys.modules)"
    )
    environ = {**os.environ, "HATCHWAY_URL": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environ)
    assert "STATUS 125" in done.stdout
    loaded = set(done.stdout.partition("LOADED")[2].split())
    assert "httpx" in loaded
    assert loaded.isdisjoint({"rich.console", "click", "pygments", "typer", "pydantic", "asyncio"})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert done.stderr == ""
    assert f" {command} [OPTIONS]" in done.stdout.splitlines()[0]


MARKED = [
    ("run", ["--", "ls"], {}, ["ls"]),
    ("run", ["ls"], {}, ["ls"]),
    ("run", ["python3", "-c", "x", "--keep", "-h"], {"keep": False}, ["python3", "-c", "x", "--keep", "-h"]),
    ("run", ["--keep", "sh", "-c", "x", "--", "-v"], {"keep": True, "verbose": False}, ["sh", "-c", "x", "--", "-v"]),
    ("run", ["-v", "-t", "a:b", "--", "--keep", "--", "x"], {"template": "a:b", "keep": False}, ["--keep", "--", "x"]),
    (
        "run",
        ["--vcpus=2", "--memory", "512", "--timeout", "0.5", "--", "x"],
        {"vcpus": 2, "memory": 512, "timeout": 0.5},
        ["x"],
    ),
    ("run", ["-e", "A=1", "-e", "B=", "--", "x"], {"env": ["A=1", "B="]}, ["x"]),
    ("exec", ["box", "--", "ls", "-l"], {"sandbox": "box"}, ["ls", "-l"]),
    ("exec", ["box", "-w", "/tmp", "--", "ls"], {"sandbox": "box", "workdir": "/tmp"}, ["ls"]),
    ("exec", ["-w", "/tmp", "box", "--", "ls"], {"sandbox": "box", "workdir": "/tmp"}, ["ls"]),
    ("exec", ["box", "ls", "-v", "--", "x"], {"sandbox": "box", "verbose": False}, ["ls", "-v", "--", "x"]),
    ("exec", ["box", "ls", "-w", "x"], {"sandbox": "box", "workdir": None}, ["ls", "-w", "x"]),
]


@pytest.mark.parametrize(("name", "words", "expected", "argv"), MARKED)
def test_our_options_end_where_the_command_begins(
    name: str, words: list[str], expected: dict[str, object], argv: list[str]
) -> None:
    options, command = passing.parse(passing.parser_of(name), words)
    assert command == argv
    assert {key: getattr(options, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("command", "status"), [(["ls"], 1), (["rm", "x"], 1), (["run", "true"], 125), (["exec", "x", "true"], 125)]
)
def test_no_service_is_an_error_with_a_remedy(command: list[str], status: int) -> None:
    done = hatchway(*command)
    assert done.returncode == status
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: Nobody answers at http://127.0.0.1:1")
    assert lines[1:] == ["  code: connection_failed", "  remedy: Is the service running? Start it with: hatchway up"]


def test_errors_are_json_where_that_is_asked_for() -> None:
    done = hatchway("get", "x", "--json")
    assert done.returncode == 1
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "connection_failed"
    assert "hatchway up" in error["remedy"]


def test_what_a_sandbox_names_is_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b]0;mine\x07\r\u202e\udcff"
    front.show({"cause": f"{name} cannot be written", "code": "local_write_failed", "remedy": ""}, json=False)
    front.note(f"left out: {name}")
    shown = "?]0;mine????"
    told = f"error: {shown} cannot be written\n  code: local_write_failed\nhatchway: left out: {shown}\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["run", "--no-such-option"], 125),
        (["run"], 125),
        (["exec", "x"], 125),
        (["run", "--memory", "much", "--", "true"], 125),
        (["run", "-e", "not set anywhere", "--", "true"], 125),
        (["run", "--timeout", "0", "--", "true"], 125),
        (["run", "--no-such-option", "--", "true"], 125),
        (["exec", "--", "true"], 125),
        (["ls", "--no-such-option"], 2),
        (["create", "-m", "no pair"], 2),
        (["create", "--snapshots", "no json"], 2),
        (["create", "--snapshots", "[]"], 2),
        (["set", "x"], 2),
        (["set", "x", "--timeout-s", "long"], 2),
        (["extend", "x", "long"], 2),
        (["tokens", "revoke"], 2),
        (["run", "--timeout-s", "0", "--", "true"], 125),
        (["no-such-command"], 2),
    ],
)
def test_a_wrong_call(command: list[str], status: int) -> None:
    done = hatchway(*command)
    assert done.returncode == status
    assert "Error: " in done.stderr


def test_a_wrong_url_is_named() -> None:
    done = hatchway("ls", "--url", "nonsense")
    assert done.returncode == 1
    assert "  code: bad_url" in done.stderr
