"""`hatchway policy` on files: what it prints, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hatchway.cli.app import app

GOOD = "version: 1\nrules:\n  - {id: a, to: {hosts: [index.example]}, http: {allow: [{paths: [/simple/**]}]}}\n"
BAD = "version: 1\nrules:\n  - {id: a, to: {hosts: ['*.com']}, colour: red}\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "floor.yaml").write_text("version: 1\nrules: [{id: no, to: {hosts: [index.example]}, action: deny}]")
    return tmp_path


def hatchway(*words: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["policy", *words], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def said(*words: str) -> Any:
    return json.loads(hatchway(*words, "--json")[1])


@pytest.mark.usefixtures("files")
def test_check() -> None:
    assert hatchway("check", "good.yaml")[:2] == (0, "good.yaml: valid\n")
    status, printed, _ = hatchway("check", "good.yaml", "bad.yaml")
    assert status == 1
    assert "bad.yaml:3: rules[0].to.hosts[0]:" in printed
    assert "bad.yaml:3: rules[0].colour:" in printed
    assert hatchway("check", "-", stdin=GOOD)[0] == 0
    found = said("check", "good.yaml", "bad.yaml")
    assert [one["valid"] for one in found] == [True, False]
    assert {problem["place"] for problem in found[1]["problems"]} == {"rules[0].to.hosts[0]", "rules[0].colour"}
    assert json.loads(found[0]["canonical"])["version"] == 1
    status, _, error = hatchway("check", "missing.yaml")
    assert status == 1
    assert "local_file_failed" in error


@pytest.mark.usefixtures("files")
def test_explain() -> None:
    status, printed, _ = hatchway("explain", "good.yaml", "--host", "index.example", "--path", "/simple/x/")
    assert status == 0
    assert "passes" in printed
    assert "sandbox/good/a" in printed
    status, printed, _ = hatchway(
        "explain", "good.yaml", "--host", "index.example", "--path", "/simple/x/", "--method", "post"
    )
    assert status == 1
    assert "method_not_allowed" in printed
    assert "methods: [POST]" in printed
    answer = said("explain", "good.yaml", "platform:floor.yaml", "--host", "index.example", "--port", "443")
    assert (answer["action"], answer["rule"]) == ("deny", "platform/floor/no")
    assert hatchway("explain", "bad.yaml", "--host", "x.example")[0] == 1
    wrong = ("explain", "good.yaml", "--host", "index.example")
    assert hatchway(*wrong, "--path", "/simple/x", "--header", "none")[0] == 2
    assert hatchway(*wrong, "--at", "tomorrow")[0] == 2
    assert hatchway(*wrong, "--at", "2031-01-01")[0] == 0


@pytest.mark.usefixtures("files")
def test_diff() -> None:
    status, printed, _ = hatchway("diff", "good.yaml", "good.yaml")
    assert (status, printed) == (0, "Nothing changes.\n")
    assert {one["change"] for one in said("diff", "good.yaml", "floor.yaml")["changes"]} == {"denied"}
    assert said("diff", "floor.yaml", "good.yaml", "--with", "platform:floor.yaml")["changes"] == []


@pytest.mark.usefixtures("files")
def test_lint() -> None:
    assert hatchway("lint", "good.yaml", "--strict")[:2] == (0, "")
    status, printed, _ = hatchway("lint", "good.yaml", "platform:floor.yaml", "--strict")
    assert status == 1
    assert "sandbox/good: rules[0]:" in printed
    assert hatchway("lint", "good.yaml", "platform:floor.yaml")[0] == 0
    assert [one["code"] for one in said("lint", "good.yaml", "platform:floor.yaml")] == ["never_matches"]


def test_init(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": str(files), "PATH": "", "PIP_INDEX_URL": "https://index.example/simple/"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hatchway.cli.installers.machine._addresses", lambda host: [])
    assert hatchway("init", "-o", "mine.yaml")[0] == 0
    assert hatchway("check", "mine.yaml")[0] == 0
    assert hatchway("explain", "project:mine.yaml", "--host", "index.example", "--path", "/simple/x/")[0] == 0
    assert (
        hatchway("explain", "project:mine.yaml", "--host", "index.example", "--path", "/simple/x/", "--method", "POST")[
            0
        ]
        == 1
    )
    status, _, error = hatchway("init", "-o", "mine.yaml")
    assert status == 1
    assert "local_file_failed" in error
