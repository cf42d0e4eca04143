"""What `hatchway cp`, `shell` and `forward` make of their arguments, without a service."""

import itertools
import os
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pseudo_terminal import Person

from hatchway.cli import copying, passing, progress
from hatchway.cli.copying import Copier, Place, place
from hatchway.cli.escapes import Escapes
from hatchway.cli.forward import ports_of
from hatchway.cli.front import Front
from hatchway.cli.progress import patience, shown
from hatchway.client import FileEntry, InvalidRequest, NotFound, Transfer

BOX = "abcdefghij0123456789"
HATCHWAY = [sys.executable, "-m", "hatchway.cli.main"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{BOX}:path", Place("path", BOX)),
        (f"{BOX}:/a:b", Place("/a:b", BOX)),
        (f"{BOX}:", Place(".", BOX)),
        (f"./{BOX}:path", Place(f"./{BOX}:path")),
        ("name:path", Place("name:path")),
        ("C:\\x", Place("C:\\x")),
        ("-", Place("-")),
        ("./-", Place("./-")),
        (f"{BOX.upper()}:x", Place(f"{BOX.upper()}:x")),
        (f"{BOX}:a\nb", Place("a\nb", BOX)),
    ],
)
def test_places(text: str, expected: Place) -> None:
    assert place(text) == expected
    assert place(text).is_pipe == (text == "-")


class Recorded:
    """Files of sandboxes that only remember what they were asked for."""

    def __init__(self, folders: set[str]) -> None:
        self.folders = folders
        self.done: list[tuple[str, str, str]] = []

    def stat(self, path: str, *, user: str | None) -> FileEntry:
        if path in self.folders:
            return FileEntry(path=path, name=path, type="dir")
        if path.endswith("missing"):
            raise NotFound("file_not_found", "x")
        return FileEntry(path=path, name=path, type="file", size=3)

    def upload(self, local: str, remote: str, **_: object) -> Transfer:
        self.done.append(("up", local, remote))
        return Transfer(files=1)

    def download(self, remote: str, local: str, **_: object) -> Transfer:
        self.done.append(("down", remote, local))
        return Transfer(files=1)

    def stream(self, path: str, *, user: str | None) -> Iterator[bytes]:
        yield b"abc"

    def write(self, path: str, body: object, **_: object) -> FileEntry:
        self.done.append(("write", "", path))
        return FileEntry(path=path, name=path, type="file", size=3)


@pytest.mark.parametrize(
    ("words", "done"),
    [
        (["here/f", f"{BOX}:missing"], ("up", "here/f", "missing")),
        (["here/f", f"{BOX}:dir"], ("up", "here/f", "dir/f")),
        (["here", f"{BOX}:dir/"], ("up", "here", "dir/here")),
        (["here/.", f"{BOX}:dir"], ("up", "here/.", "dir")),
        (["here", f"{BOX}:missing"], ("up", "here", "missing")),
        ([f"{BOX}:a/f", "new"], ("down", "a/f", "new")),
        ([f"{BOX}:a/f", "here"], ("down", "a/f", "here/f")),
        ([f"{BOX}:dir", "here"], ("down", "dir", "here/dir")),
        ([f"{BOX}:dir/.", "here"], ("down", "dir/.", "here")),
        ([f"{BOX}:a/f", f"{BOX[::-1]}:dir"], ("write", "", "dir/f")),
    ],
)
def test_where_a_copy_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], done: tuple[str, str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "f").write_text("x")
    files = Recorded({"dir", "dir/", "dir/."})
    monkeypatch.setattr(Copier, "files", lambda _self, _sandbox: files)
    front = Front(None, None, True)
    assert copying.copy(front, words, recursive=True, user=None, max_bytes=None) == 0
    assert files.done == [done]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["a", "b"], "no_sandbox"),
        (["-", "-"], "no_sandbox"),
        (["a"], "no_target"),
        (["here", f"{BOX}:missing"], "is_folder"),
        ([f"{BOX}:dir", "new"], "is_folder"),
        ([f"{BOX}:dir", "-"], "is_folder"),
        (["here/f", f"{BOX}:missing/"], "no_folder"),
        (["here/f", "here/f", f"{BOX}:missing"], "no_folder"),
        ([f"{BOX}:f", f"{BOX}:g", "here/f"], "no_folder"),
    ],
)
def test_copies_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "f").write_text("x")
    monkeypatch.setattr(Copier, "files", lambda _self, _sandbox: Recorded({"dir"}))
    monkeypatch.setattr(Recorded, "stat", lambda self, path, user: _stat(self, path.rstrip("/")))
    with pytest.raises(InvalidRequest) as caught:
        copying.copy(Front(None, None, True), words, recursive=False, user=None, max_bytes=None)
    assert caught.value.code == code


def _stat(files: Recorded, path: str) -> FileEntry:
    if path.endswith("missing"):
        raise NotFound("file_not_found", "x")
    return FileEntry(path=path, name=path, type="dir" if path in files.folders else "file")


@pytest.mark.parametrize(
    ("typed", "passed", "left"),
    [
        ([b"ls\r", b"~."], b"ls\r", True),
        ([b"~", b"."], b"", True),
        ([b"~.after"], b"", True),
        ([b"a~."], b"a~.", False),
        ([b"~~."], b"~.", False),
        ([b"~x"], b"~x", False),
        ([b"~?ls"], b"ls", False),
        ([b"\x03~."], b"\x03", True),
        ([b"x\n~~\n~."], b"x\n~\n", True),
        ([b"~\r~."], b"~\r", True),
    ],
)
def test_the_escape(typed: list[bytes], passed: bytes, left: bool) -> None:
    escapes = Escapes()
    assert b"".join(map(escapes.feed, typed)) == passed
    assert escapes.detached is left


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_how_input_is_cut_changes_nothing(typed: bytes, cuts: list[int]) -> None:
    whole, parts = Escapes(), Escapes()
    expected = whole.feed(typed)
    ends = [0, *sorted(cut for cut in cuts if cut <= len(typed)), len(typed)]
    got = b""
    for begin, end in itertools.pairwise(ends):
        if not parts.detached:
            got += parts.feed(typed[begin:end])
    assert (got, parts.detached) == (expected, whole.detached)
    if b"~" not in typed:
        assert expected == typed


def test_ports() -> None:
    assert ports_of("8080:80") == (8080, 80)
    assert ports_of("80") == (80, 80)
    assert ports_of("0:80") == (0, 80)
    for bad in ("", ":", "a:80", "80:", ":80", "1:2:3", "123456:1", "-1:80", "８０"):
        with pytest.raises(InvalidRequest):
            ports_of(bad)


def test_names_are_shown_without_what_a_terminal_obeys() -> None:
    assert shown("a\x1b[2Jb\n\u202e") == "a?[2Jb??"
    assert shown(os.fsdecode(b"\xff")) == "\ufffd"


def test_limits_of_exec() -> None:
    words = [
        "box",
        "--memory",
        "64",
        "--cpu-time",
        "1.5",
        "--processes",
        "9",
        "--open-files",
        "20",
        "--file-size",
        "0",
        "--",
        "x",
    ]
    options, _ = passing.parse(passing.parser_of("exec"), words)
    limits = passing._limits(options)
    assert limits is not None
    assert limits.as_dict() == {"memory_mib": 64, "cpu_s": 1.5, "processes": 9, "open_files": 20, "file_size_mib": 0}
    assert passing._limits(passing.parse(passing.parser_of("exec"), ["box", "x"])[0]) is None


def test_a_terminal_is_as_before_when_nobody_answers() -> None:
    environ = {**os.environ, "HATCHWAY_URL": "http://127.0.0.1:1", "HATCHWAY_API_KEY": "hw_x"}
    with Person([*HATCHWAY, "shell", BOX], environ) as person:
        assert person.ended() == 125
        assert b"connection_failed" in person.shown
        assert person.settings_now() == person.settings
        assert isinstance(termios.tcgetattr(person.master), list)


def test_a_copy_without_a_service_fails_with_its_status(tmp_path: Path) -> None:
    environ = {**os.environ, "HATCHWAY_URL": "http://127.0.0.1:1", "HATCHWAY_API_KEY": "hw_x"}
    done = subprocess.run(
        [*HATCHWAY, "cp", f"{BOX}:x", str(tmp_path / "x")], env=environ, capture_output=True, check=False
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert b"connection_failed" in done.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_who_waits_at_a_terminal_is_told_why(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    told = threading.Event()
    texts: list[str] = []
    monkeypatch.setattr(progress, "note", lambda text: (texts.append(text), told.set()))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with patience("being made", after_s=0):
        assert told.wait(10 if terminal else 0) is terminal
    assert texts == ["being made"] * terminal


def test_who_need_not_wait_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(progress, "note", texts.append)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    before = set(threading.enumerate())
    with patience("being made", after_s=3600):
        ours = set(threading.enumerate()) - before
    for thread in ours:
        thread.join(10)
        assert not thread.is_alive()
    assert len(ours) == 1
    assert texts == []
