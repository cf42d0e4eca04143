"""E2B's command line, as it is published, against the real service. It is not installed by itself: `scripts/setup-e2b-sdks cli`."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Service
from tests.support.pseudo_terminal import Person

FOLDER = ROOT / "build" / "e2b-sdks" / "cli"
COMMAND = [str(FOLDER / "node"), str(FOLDER / "node_modules" / ".bin" / "e2b")]
WITHIN_S = 120

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        not (FOLDER / ".installed").exists(),
        reason="E2B's command line is not installed (60 MB of Node.js packages): scripts/setup-e2b-sdks cli",
    ),
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environ(service: Service, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What docs/e2b.md says, and a home without settings."""
    url = str(json.loads((service.data_dir / "endpoint.json").read_text())["e2b"])
    service.bake()
    with service.client() as hatchway:
        key = hatchway.keys.create("e2b-cli", e2b=True).key
    home = tmp_path_factory.mktemp("home")
    return {**service.environ, "HOME": str(home), "E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}


@pytest.fixture
def run(environ: dict[str, str]) -> Run:
    """Runs `e2b ARGUMENTS`."""

    def run(*arguments: str, given: str = "", fails: bool = False) -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, *arguments]
        done = subprocess.run(
            command, env=environ, input=given, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )
        assert fails or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def sandbox(run: Run) -> Iterator[str]:
    """Made by the command line."""
    made = run("sandbox", "create", "--detach").stdout.split()[-1]
    yield made
    run("sandbox", "kill", made)


def test_sandboxes_are_made_shown_paused_and_killed(run: Run, sandbox: str) -> None:
    def listed(*more: str) -> list[str]:
        return [one["sandboxId"] for one in json.loads(run("sandbox", "list", "--format", "json", *more).stdout)]

    assert sandbox in listed()
    shown = run("sandbox", "info", sandbox).stdout
    assert f"Sandbox ID: {sandbox}" in shown
    assert "State: running" in shown
    assert "has been paused" in run("sandbox", "pause", sandbox).stdout
    assert sandbox not in listed()
    assert sandbox in listed("--state", "paused")
    assert "has been resumed" in run("sandbox", "resume", sandbox).stdout
    assert "CPU" in run("sandbox", "metrics", sandbox).stdout
    kept = run("sandbox", "snapshot", "create", sandbox).stdout.split()[2]
    assert kept in run("sandbox", "snapshot", "list").stdout
    assert "has been deleted" in run("sandbox", "snapshot", "delete", kept).stdout
    assert "has been killed" in run("sandbox", "kill", sandbox).stdout


def test_commands_and_a_terminal(run: Run, sandbox: str, environ: dict[str, str]) -> None:
    done = run("sandbox", "exec", sandbox, "sh", "-c", "cat; exit 3", given="piped\n", fails=True)
    assert (done.stdout, done.returncode) == ("piped\n", 3)
    told = run("sandbox", "exec", "-u", "root", "-c", "/tmp", "-e", "A=1", sandbox, "sh", "-c", "id -un; pwd; echo $A")
    assert told.stdout == "root\n/tmp\n1\n"
    with Person([*COMMAND, "sandbox", "connect", sandbox], environ) as person:
        person.until(b"$ ")
        person.press(b"echo in-$((6*7))\n")
        person.until(b"in-42")
        person.press(b"exit\n")
        assert person.ended() == 0


def test_templates_are_listed_and_what_is_not_offered_is_said(run: Run, sandbox: str, tmp_path: Path) -> None:
    assert "base" in run("template", "list").stdout
    for command in (("sandbox", "logs", sandbox), ("template", "publish", "--yes", "base")):
        done = run(*command, fails=True)
        assert done.returncode != 0, command
        assert "not supported here" in done.stdout + done.stderr, command
