"""The guest's files program, run on this host: what it tells of changes, and that it says when it cannot."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.guest_files import Files, Run, built, files, home, needs_root, nobody, quick, until

FUSE = Path(__file__).parents[1] / "support" / "own_fuse.py"

__all__ = ["built", "files", "home", "nobody", "quick"]


@contextmanager
def watching(files: Files, path: str, **named: Any) -> Iterator[Run]:
    run = files.start("watch", path=path, **named)
    try:
        run.head()
        yield run
    finally:
        run.kill()


def until_event(run: Run, event: str, path: Path) -> dict[str, Any]:
    """The next event of this kind; others (a modify may come twice) are passed over."""
    while True:
        told = run.event()
        if (told["event"], told["path"]) == (event, str(path)):
            return told


def test_what_happens_to_files(files: Files) -> None:
    home = files.home
    with watching(files, ".") as run:
        (home / "f").touch()
        assert until_event(run, "create", home / "f") == {
            "event": "create", "path": str(home / "f"), "name": "f", "dir": False,
        }  # fmt: skip
        (home / "f").write_bytes(b"x")
        until_event(run, "modify", home / "f")
        (home / "f").chmod(0o600)
        until_event(run, "chmod", home / "f")
        (home / "f").rename(home / "g")
        assert until_event(run, "rename", home / "g")["from"] == str(home / "f")
        (home / "g").unlink()
        until_event(run, "remove", home / "g")
        (home / "d").mkdir()
        assert until_event(run, "create", home / "d")["dir"] is True
        (home / "d" / "unseen").touch()
        os.mknod(os.fsencode(home) + b"/\xff\n")
        assert run.event()["path_base64"]


def test_moves_across_the_border_are_comings_and_goings(files: Files) -> None:
    home = files.home
    (home / "in").mkdir()
    (home / "f").touch()
    with watching(files, "in") as run:
        (home / "f").rename(home / "in" / "f")
        until_event(run, "create", home / "in" / "f")
        (home / "in" / "f").rename(home / "f")
        until_event(run, "remove", home / "in" / "f")


@needs_root
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="there is no FUSE here")
def test_a_file_system_that_others_may_change_is_watched_only_where_that_is_wanted(files: Files) -> None:
    mounted = files.home / "mounted"
    mounted.mkdir()
    within = ["unshare", "--mount", "--propagation", "private", sys.executable, str(FUSE), str(mounted)]
    inside = replace(files, wrapper=within)
    assert inside.fails("watch", path="mounted", local=1) == "EREMOTE"
    with watching(inside, "mounted", local=0):
        pass
    with watching(files, "mounted", local=1):
        pass


def test_folders_that_come_are_watched_and_renamed_ones_keep_their_paths_right(files: Files) -> None:
    home = files.home
    (home / "a" / "b").mkdir(parents=True)
    with watching(files, ".", recursive=1) as run:
        (home / "a" / "b" / "f").touch()
        until_event(run, "create", home / "a" / "b" / "f")
        (home / "x" / "y" / "z").mkdir(parents=True)
        (home / "x" / "y" / "z" / "early").touch()
        until_event(run, "create", home / "x" / "y" / "z" / "early")
        (home / "a").rename(home / "x" / "c")
        assert until_event(run, "rename", home / "x" / "c")["from"] == str(home / "a")
        (home / "x" / "c" / "b" / "g").touch()
        until_event(run, "create", home / "x" / "c" / "b" / "g")
        outside = home.with_name(home.name + "-outside")
        try:
            (home / "x" / "c").rename(outside)
            until_event(run, "remove", home / "x" / "c")
            (outside / "b" / "unseen").touch()
            outside.rename(home / "back")
            until_event(run, "create", home / "back")
            until_event(run, "create", home / "back" / "b" / "g")
            (home / "back" / "b" / "seen").touch()
            until_event(run, "create", home / "back" / "b" / "seen")
        finally:
            shutil.rmtree(outside, ignore_errors=True)
        shutil.rmtree(home / "x")
        until_event(run, "remove", home / "x")


@pytest.mark.parametrize("how", ["removed", "moved"])
@pytest.mark.parametrize("kind", ["file", "folder", "tree"])
def test_it_ends_with_what_it_watches(files: Files, kind: str, how: str) -> None:
    path = files.home / "it"
    path.touch() if kind == "file" else path.mkdir()
    with watching(files, "it", recursive=int(kind == "tree")) as run:
        if how == "moved":
            path.rename(files.home / "away")
        elif kind == "file":
            with path.open():
                path.unlink()  # somebody holds it open
                assert run.last() == {"ok": {"ended": "removed"}}
            return
        else:
            path.rmdir()
        assert run.last() == {"ok": {"ended": how}}


def test_a_file_that_is_replaced_is_said_to_be_gone(files: Files) -> None:
    (files.home / "f").touch()
    with watching(files, "f") as run:
        files.ok("write", path="f", upload=b"new")
        assert run.last() == {"ok": {"ended": "removed"}}


def test_a_reader_that_is_too_slow_is_told_that_events_were_lost(files: Files, quick: Path) -> None:
    files.home = quick
    with watching(files, ".", recursive=1) as run:
        for number in range(15_000):
            os.mknod(f"{quick}/{number:05}")
            os.unlink(f"{quick}/{number:05}")
        (files.home / "unseen").mkdir()
        while run.event()["event"] != "overflow":
            pass
        (files.home / "unseen" / "seen").touch()  # folders that came meanwhile are watched
        until_event(run, "create", files.home / "unseen" / "seen")


def test_more_folders_than_can_be_watched(files: Files, quick: Path) -> None:
    files.home = quick
    for number in range(8200):
        (files.home / f"{number}").mkdir()
    said = files.run("watch", path=".", recursive=1)
    assert said.code == "EMFILE"
    for number in range(10):
        (files.home / f"{number}").rmdir()
    with watching(files, ".", recursive=1) as run:
        for number in range(10):
            (files.home / f"{number}").mkdir()
        while (told := run.event())["event"] != "overflow":
            pass
        assert told["reason"] == "watches"
        assert told["path"].startswith(str(files.home))


@needs_root
def test_folders_that_may_not_be_read(nobody: Files) -> None:
    (nobody.home / "secret").mkdir(mode=0o700)
    run = nobody.start("watch", path=".", recursive=1)
    try:
        head = run.head()
        assert (head["watches"], head["unreadable"]) == (1, 1)
        (nobody.home / "another").mkdir(mode=0o700)
        until_event(run, "create", nobody.home / "another")
        assert run.event() == {"event": "overflow", "reason": "unreadable", "path": str(nobody.home / "another")}
    finally:
        run.kill()
    assert nobody.fails("watch", path="secret") == "EACCES"


def test_it_ends_when_nobody_reads(files: Files) -> None:
    with watching(files, ".") as run:
        assert run.process.stdout
        run.process.stdout.close()
        until(lambda: run.process.poll() is not None)
