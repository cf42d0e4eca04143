"""The guest's files program, run on this host: what root does on behalf of an owner, extended attributes, what links lead to, marks."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.guest_files import NOBODY, Files, Run, built, files, home, needs_root, nobody

__all__ = ["built", "files", "home", "nobody"]


@pytest.fixture
def keeps_attributes(home: Path) -> None:
    try:
        os.setxattr(home, "user.probe", b"1")
        os.removexattr(home, "user.probe")
    except OSError:
        pytest.skip("the file system of the temporary folder keeps no extended attributes")


def owned(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_uid, status.st_gid


@needs_root
def test_what_is_made_for_an_owner_is_the_owners_and_so_are_the_folders_above(files: Files) -> None:
    home = files.home
    mine = f"{NOBODY}"
    files.ok("write", path=home / "a/b/new", upload=b"x", parents=1, in_place=1, owner=mine)
    files.ok("write", path=home / "c/whole", upload=b"x", parents=1, owner=mine)
    files.ok("mkdir", path=home / "d/e", parents=1, owner=mine)
    (home / "f").touch()
    files.ok("move", **{"from": home / "f", "to": home / "g/h"}, parents=1, overwrite=1, owner=mine)
    for path in ("a", "a/b", "a/b/new", "c", "c/whole", "d", "d/e", "g"):
        assert owned(home / path) == (NOBODY, NOBODY), path
    assert owned(home / "g/h") == (0, 0)
    assert (home / "a/b/new").stat().st_mode & 0o7777 == 0o644
    assert (home / "a").stat().st_mode & 0o7777 == 0o755


@needs_root
def test_a_file_that_is_there_changes_its_owner_and_keeps_its_links_in_place(files: Files) -> None:
    home = files.home
    (home / "old").write_bytes(b"longer than before")
    os.link(home / "old", home / "second")
    (home / "link").symlink_to("old")
    files.ok("write", path=home / "link", upload=b"new", in_place=1, owner=str(NOBODY))
    assert (home / "second").read_bytes() == b"new"
    assert owned(home / "second") == (NOBODY, NOBODY)
    assert (home / "link").is_symlink()


@needs_root
def test_a_relative_path_starts_at_the_owners_home(files: Files) -> None:
    assert files.run("stat", path=".", owner="root").entry["path"] == os.path.expanduser("~root")
    assert files.run("stat", path="/", owner="root").entry["path"] == "/"


@needs_root
def test_an_owner_must_be_there_and_is_for_root_alone(files: Files, nobody: Files) -> None:
    assert files.fails("stat", path="/", owner="no-such-user-here") == "ESRCH"
    assert nobody.fails("stat", path="/", owner="root") == "EPERM"


@pytest.mark.usefixtures("keeps_attributes")
@pytest.mark.parametrize("how", [{"in_place": 1}, {}])
def test_each_write_replaces_the_attributes_of_its_beginning(files: Files, how: dict[str, Any]) -> None:
    path = files.home / "f"
    path.touch()
    os.setxattr(path, "user.e2b.gone", b"1")
    os.setxattr(path, "user.other", b"stays")
    given = b"author=me\nempty=\nsentence=a = b, \xc3\xa4"
    said = files.ok("write", path=path, upload=b"x", attributes_of="e2b.", attributes=given, **how)
    wanted = {"author": "me", "empty": "", "sentence": "a = b, ä"}
    assert said["entry"]["attributes"] == wanted
    assert files.run("stat", path=path, attributes_of="e2b.").entry["attributes"] == wanted
    assert ("user.other" in os.listxattr(path)) == ("in_place" in how)
    listed = files.run("list", path=files.home, attributes_of="e2b.").lines
    assert [entry["attributes"] for entry in listed] == [wanted]
    assert "attributes" not in files.run("stat", path=path).entry
    files.ok("write", path=path, upload=b"x", attributes_of="e2b.", attributes="", **how)
    assert files.run("stat", path=path, attributes_of="e2b.").entry["attributes"] == {}


@pytest.mark.usefixtures("keeps_attributes")
def test_attributes_that_are_no_text_or_too_much_are_left_out_and_counted(files: Files) -> None:
    path = files.home / "f"
    path.touch()
    os.setxattr(path, "user.a", b"\xff")
    os.setxattr(path, "user.b", b"line\nline")
    # Without a value: what a file system takes as one differs. This one is above what a line of ours tells.
    big = b"x" * 3000
    os.setxattr(path, "user.c", b"kept")
    os.setxattr(path, "user.d", big[:2000])
    entry = files.run("stat", path=path, attributes_of="").entry
    assert entry["attributes"] == {"c": "kept", "d": "x" * 2000}
    assert entry["attributes_left_out"] == 2


@pytest.mark.parametrize(
    "given",
    [b"no value", b"=value", b"a=\x01", b"a=\xff", b"n" * 300 + b"=v", b"a=1\n\nb=2"],
)
def test_attributes_that_are_none_are_refused(files: Files, given: bytes) -> None:
    assert files.fails("write", path="f", upload=b"", attributes_of="e2b.", attributes=given) == "EINVAL"
    assert not (files.home / "f").exists()
    assert files.fails("write", path="f", upload=b"", attributes=b"a=1") == "EINVAL"


def test_a_file_system_without_attributes_is_said(files: Files) -> None:
    memory = Path("/dev/shm") / f"hw-behalf-{os.getpid()}"
    try:
        memory.touch()
        os.setxattr(memory, "user.probe", b"1")
    except OSError:
        pass
    else:
        pytest.skip("the file system in memory keeps attributes here")
    finally:
        memory.unlink(missing_ok=True)
    try:
        given = {"attributes_of": "e2b.", "in_place": 1}
        assert files.fails("write", path=memory, upload=b"", attributes=b"a=1", **given) == "ENOSYS"
        files.ok("write", path=memory, upload=b"x", attributes=b"", **given)
        assert files.run("stat", path=memory, attributes_of="e2b.").entry["attributes"] == {}
    finally:
        memory.unlink(missing_ok=True)


def test_links_tell_what_they_lead_to_in_the_end(files: Files) -> None:
    home = files.home
    (home / "d").mkdir(mode=0o750)
    (home / "d" / "f").touch(mode=0o640)
    (home / "one").symlink_to("d/f")
    (home / "two").symlink_to("one")
    (home / "folder").symlink_to("d")
    (home / "broken").symlink_to("nowhere")
    (home / "loop").symlink_to("loop")
    listed = {entry["name"]: entry for entry in files.run("list", path=".", links=1).lines}
    assert listed["two"]["leads_to"] == {"path": str(home / "d/f"), "type": "file", "mode": 0o640}
    assert listed["two"]["target"] == "one"
    assert listed["folder"]["leads_to"] == {"path": str(home / "d"), "type": "dir", "mode": 0o750}
    for name in ("broken", "loop", "d"):
        assert "leads_to" not in listed[name]
    assert files.run("stat", path="one", links=1).entry["leads_to"]["path"] == str(home / "d/f")
    assert files.run("stat", path="one", links=1, follow=1).entry["type"] == "file"
    assert "leads_to" not in files.run("stat", path="one").entry


def test_the_longest_lines_with_all_that_can_be_asked_are_within_the_bound(files: Files) -> None:
    home = files.home
    part = "\x01" * 255
    deep = home
    # As deep as paths go: each octet of these names takes six in JSON, and is given in base64 beside.
    os.chdir(deep)
    try:
        for _ in range(12):
            os.mkdir(part)
            os.chdir(part)
            deep = deep / part
        os.symlink(("/" + part) * 15, part)
    finally:
        os.chdir("/")
    said = files.run("stat", path=deep / part, links=1, attributes_of="")
    assert said.entry["target_base64"]


class Watching:
    """A watch that marks can be asked of."""

    def __init__(self, files: Files, path: str, **named: Any) -> None:
        self.run: Run = files.start("watch", path=path, marks=1, stdin=subprocess.PIPE, **named)
        self.run.head()

    def until_mark(self) -> list[dict[str, Any]]:
        """What is told up to the next mark."""
        stdin = self.run.process.stdin
        assert stdin
        stdin.write(b".")
        stdin.flush()
        told = []
        while (event := self.run.event())["event"] != "mark":
            told.append(event)
        return told


@pytest.fixture
def watching(files: Files) -> Iterator[Watching]:
    watching = Watching(files, ".", recursive=1, entries=1, links=1, attributes_of="")
    try:
        yield watching
    finally:
        watching.run.kill()


def test_a_mark_comes_behind_all_that_had_happened(watching: Watching, files: Files) -> None:
    assert watching.until_mark() == []
    for round_ in range(20):
        (files.home / f"d{round_}").mkdir()
        (files.home / f"d{round_}" / "inside").touch()
        told = {event["path"] for event in watching.until_mark()}
        assert told == {str(files.home / f"d{round_}"), str(files.home / f"d{round_}" / "inside")}


def test_a_small_upload_in_place_is_told_as_three_events(watching: Watching, files: Files) -> None:
    who = {"owner": str(os.geteuid())} if os.geteuid() == 0 else {}
    for size in (1, 60_000, 200_000):
        files.ok("write", path=files.home / f"f{size}", upload=b"x" * size, in_place=1, **who)
        told = [event["event"] for event in watching.until_mark()]
        assert told == (["create", "chmod", "modify"] if who else ["create", "modify"])


def test_events_tell_the_entry_as_it_is_by_now(watching: Watching, files: Files) -> None:
    (files.home / "f").write_bytes(b"four")
    told = watching.until_mark()
    assert told[-1]["entry"]["size"] == 4
    (files.home / "f").unlink()
    (told,) = watching.until_mark()
    assert told["event"] == "remove"
    assert "entry" not in told
    assert "moved" not in told


def test_what_is_moved_away_is_removed_and_moved(watching: Watching, files: Files) -> None:
    (files.home / "f").touch()
    watching.until_mark()
    outside = files.home.with_name(files.home.name + "-outside")
    (files.home / "f").rename(outside)
    try:
        (told,) = watching.until_mark()
    finally:
        outside.unlink()
    assert (told["event"], told["moved"]) == ("remove", True)


def test_a_rename_within_is_one_event_also_before_a_mark(watching: Watching, files: Files) -> None:
    for round_ in range(20):
        (files.home / f"a{round_}").touch()
        watching.until_mark()
        (files.home / f"a{round_}").rename(files.home / f"b{round_}")
        assert [event["event"] for event in watching.until_mark()] == ["rename"]


def test_the_end_of_those_who_ask_for_marks_does_not_end_the_watch(watching: Watching, files: Files) -> None:
    stdin = watching.run.process.stdin
    assert stdin
    stdin.close()
    (files.home / "f").touch()
    assert watching.run.event()["event"] == "create"
