"""The guest's files program, run on this host: folders in pages, and trees that are deep, change meanwhile, or are traps."""

import ctypes
import io
import os
import shutil
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.guest_files import NOBODY, Files, built, files, home, needs_root, nobody, peak, plain, quick

__all__ = ["built", "files", "home", "nobody", "plain", "quick"]

names = st.text("abAB.-é\n", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
trees: st.SearchStrategy[dict[str, object]] = st.recursive(
    st.dictionaries(names, st.none(), max_size=6), lambda inner: st.dictionaries(names, inner | st.none(), max_size=6)
)


def make(folder: Path, tree: dict[str, object]) -> None:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            (folder / name).mkdir()
            make(folder / name, inner)
        else:
            (folder / name).touch()


def walk(tree: dict[str, object], depth: int, before: bytes = b"") -> Iterator[bytes]:
    """The order that docs/protocols/guest-files.md promises."""
    for name in sorted(tree, key=os.fsencode):
        path = before + os.fsencode(name)
        yield path
        inner = tree[name]
        if isinstance(inner, dict) and depth > 1:
            yield from walk(inner, depth - 1, path + b"/")


# -- list


@given(trees, st.integers(1, 5), st.integers(1, 7))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_hold_every_entry_once_and_in_order(
    files: Files, tree: dict[str, object], depth: int, limit: int
) -> None:
    top = files.home / "top"
    try:
        top.mkdir()
        make(top, tree)
        listed = []
        for page in files.pages(path="top", depth=depth, limit=limit):
            assert len(page) <= limit
            listed += [os.fsencode(entry["path"]) for entry in page]
        assert listed == [os.fsencode(top) + b"/" + path for path in walk(tree, depth)]
    finally:
        shutil.rmtree(top)


def test_a_page_goes_on_behind_what_is_gone(files: Files) -> None:
    for name in ("a/x", "a/y", "b/x", "b/y", "c"):
        path = files.home / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [one["name"] for one in files.run("list", path=".", depth=2, after="b").lines] == ["x", "y", "c"]
    shutil.rmtree(files.home / "b")
    assert [one["name"] for one in files.run("list", path=".", depth=2, after="b/x").lines] == ["c"]
    (files.home / "b").touch()
    assert [one["name"] for one in files.run("list", path=".", depth=2, after="b/x").lines] == ["c"]
    assert files.run("list", path=".", depth=2, after="z").lines == []


def test_links_are_told_and_not_followed(files: Files) -> None:
    (files.home / "loop").symlink_to(".")
    (files.home / "d").mkdir()
    lines = files.run("list", path=".", depth=32).lines
    assert [(one["name"], one["type"]) for one in lines] == [("d", "dir"), ("loop", "symlink")]
    assert files.run("list", path="loop").lines[0]["path"] == str(files.home / "loop" / "d")
    assert files.fails("list", path="no") == "ENOENT"
    (files.home / "f").touch()
    assert files.fails("list", path="f") == "ENOTDIR"


@needs_root
def test_a_folder_that_may_not_be_read_is_counted(files: Files, nobody: Files) -> None:
    secret = nobody.home / "secret"
    secret.mkdir(mode=0o700)
    (secret / "x").touch()
    said = nobody.run("list", path=".", depth=3)
    assert [one["name"] for one in said.lines] == ["secret"]
    assert said.ok == {"entries": 1, "skipped": 1}
    assert nobody.fails("list", path="secret") == "EACCES"


def test_a_hundred_thousand_entries_in_constant_memory(files: Files, quick: Path, plain: Path) -> None:
    files.home = quick
    top = files.home / "many"
    top.mkdir()
    for number in range(100_000):
        os.mknod(f"{top}/{number * 7919 % 100_000:05}")
    count, last = 0, ""
    for page in files.pages(path="many", limit=2000):
        assert page[0]["name"] > last
        last = page[-1]["name"]
        count += len(page)
    assert (count, last) == (100_000, "99999")
    few, many = (peak(plain, quick, "list", "path=" + path, "limit=2000") for path in ("/", "many"))
    assert many - few < 1024, (few, many)
    files.ok("remove", path="many", recursive=1)


# -- mkdir, move


def test_mkdir(files: Files) -> None:
    said = files.ok("mkdir", path="a", mode="2750")
    assert said["created"] is True
    assert said["entry"]["mode"] == 0o2750
    assert files.fails("mkdir", path="a") == "EEXIST"
    assert files.fails("mkdir", path="b/c") == "ENOENT"
    assert files.ok("mkdir", path="b/c/", parents=1, mode="0700")["entry"]["mode"] == 0o700
    assert stat.S_IMODE((files.home / "b").stat().st_mode) == 0o755
    again = files.ok("mkdir", path="b/c", parents=1, mode="0777")
    assert again["created"] is False
    assert again["entry"]["mode"] == 0o700
    (files.home / "f").touch()
    assert files.fails("mkdir", path="f", parents=1) == "EEXIST"
    assert files.fails("mkdir", path="f/x", parents=1) == "ENOTDIR"
    (files.home / "dangling").symlink_to("nowhere")
    assert files.fails("mkdir", path="dangling/x", parents=1) in ("ENOENT", "ENOTDIR")


def test_move(files: Files) -> None:
    home = files.home
    (home / "a").write_bytes(b"a")
    (home / "b").write_bytes(b"b")
    (home / "full").mkdir()
    (home / "full" / "x").touch()
    (home / "empty").mkdir()
    assert files.fails("move", **{"from": "a", "to": "b"}) == "EEXIST"
    assert files.fails("move", **{"from": "no", "to": "b", "overwrite": 1}) == "ENOENT"
    assert files.fails("move", **{"from": "a", "to": "full", "overwrite": 1}) == "EISDIR"
    assert files.fails("move", **{"from": "empty", "to": "full", "overwrite": 1}) == "ENOTEMPTY"
    assert files.fails("move", **{"from": "full", "to": "full/x/y"}) in ("EINVAL", "ENOTDIR")
    entry = files.ok("move", **{"from": "a", "to": "b", "overwrite": 1})["entry"]
    assert entry["path"] == str(home / "b")
    assert (home / "b").read_bytes() == b"a"
    files.ok("move", **{"from": "full/", "to": "empty/", "overwrite": 1})
    assert (home / "empty" / "x").exists()
    (home / "link").symlink_to("b")
    assert files.ok("move", **{"from": "link", "to": "moved"})["entry"]["target"] == "b"


def test_a_move_between_file_systems_is_a_whole_copy(files: Files) -> None:
    there = Path("/dev/shm") / files.home.name
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == files.home.stat().st_dev:
        pytest.skip("no other file system")
    there.mkdir()
    try:
        source = files.home / "f"
        source.write_bytes(b"x" * 300_000)
        source.chmod(0o640)
        os.utime(source, ns=(5, 1_000_000_007))
        (files.home / "l").symlink_to("target")
        (files.home / "d").mkdir()
        (there / "taken").touch()
        assert files.fails("move", **{"from": "f", "to": str(there / "taken")}) == "EEXIST"
        files.ok("move", **{"from": "f", "to": str(there / "taken"), "overwrite": 1})
        files.ok("move", **{"from": "l", "to": str(there / "l")})
        assert files.fails("move", **{"from": "d", "to": str(there / "d")}) == "EXDEV"
        moved = there / "taken"
        assert moved.read_bytes() == b"x" * 300_000
        assert (stat.S_IMODE(moved.stat().st_mode), moved.stat().st_mtime_ns) == (0o640, 1_000_000_007)
        assert os.readlink(there / "l") == "target"
        assert [one.name for one in files.home.iterdir()] == ["d"]
        assert {one.name for one in there.iterdir()} == {"taken", "l"}
    finally:
        shutil.rmtree(there)


# -- remove and chmod


def test_remove(files: Files) -> None:
    home = files.home
    make(home, {"d": {"e": {"f": None}, "g": None}, "f": None})
    (home / "d" / "out").symlink_to(home / "f")
    (home / "link").symlink_to("d")
    assert files.fails("remove", path="d") == "ENOTEMPTY"
    assert files.fails("remove", path="no", recursive=1) == "ENOENT"
    assert files.ok("remove", path="link/", recursive=1) == {"removed": 1}
    assert files.ok("remove", path="d", recursive=1) == {"removed": 5}
    assert files.ok("remove", path="f") == {"removed": 1}
    assert list(home.iterdir()) == []


def deep(top: Path, levels: int) -> None:
    """Folders in folders, deeper than any path can name."""
    top.mkdir()
    at = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        at, old = os.open("d", os.O_RDONLY, dir_fd=at), at
        os.close(old)
    os.close(at)


def test_a_tree_of_any_depth_is_removed(files: Files, quick: Path) -> None:
    files.home = quick
    deep(quick / "top", 5000)
    assert files.fails("chmod", path="top", mode="755", recursive=1) == "ENAMETOOLONG"
    assert files.run("pack", path="top").code == "ENAMETOOLONG"
    assert files.ok("remove", path="top", recursive=1) == {"removed": 10_001}
    assert list(files.home.iterdir()) == []


@needs_root
def test_what_may_not_be_removed_is_named(nobody: Files) -> None:
    make(nobody.home, {"d": {"mine": {}, "theirs": {"x": None}}})
    for path in ("d", "d/mine"):
        os.chown(nobody.home / path, NOBODY, NOBODY)
    said = nobody.run("remove", path="d", recursive=1)
    assert said.error is not None
    assert said.error["code"] == "EACCES"
    assert said.error["message"].startswith("d/theirs")
    assert said.error["removed"] in (0, 1)
    assert (nobody.home / "d" / "theirs" / "x").exists()


def test_chmod(files: Files) -> None:
    home = files.home
    make(home, {"d": {"e": {"f": None}}, "out": None})
    (home / "d" / "link").symlink_to(home / "out")
    (home / "link").symlink_to("out")
    (home / "out").chmod(0o600)
    said = files.ok("chmod", path="d", mode="0640", recursive=1)
    assert said["changed"] == 3
    assert said["entry"]["mode"] == 0o640
    assert stat.S_IMODE((home / "out").stat().st_mode) == 0o600
    os.chmod(home / "d", 0o755)
    assert files.ok("chmod", path="link", mode="4711")["entry"]["mode"] == 0o4711
    assert stat.S_IMODE((home / "out").stat().st_mode) == 0o4711


@needs_root
def test_chmod_as_another_user_opens_what_it_may_not_read(nobody: Files) -> None:
    closed = nobody.home / "closed"
    closed.mkdir()
    (closed / "f").touch()
    for path in (closed, closed / "f"):
        os.chown(path, NOBODY, NOBODY)
    closed.chmod(0)
    assert nobody.ok("chmod", path="closed", mode="0755", recursive=1)["changed"] == 2
    assert stat.S_IMODE((closed / "f").stat().st_mode) == 0o755
    (nobody.home / "roots").touch()
    assert nobody.fails("chmod", path="roots", mode="0777") == "EPERM"


WIDTH = 40
AT_FDCWD, EXCHANGE = -100, 2


@contextmanager
def exchanging(top: Path, traps: Path) -> Iterator[None]:
    """Folders that are again and again links to another one; at no instant is there nothing."""
    pairs = [(os.fsencode(top / f"x{n}"), os.fsencode(traps / f"x{n}")) for n in range(WIDTH)]
    libc = ctypes.CDLL(None)
    end = threading.Event()

    def exchange() -> None:
        while not end.is_set():
            for one, other in pairs:
                libc.renameat2(AT_FDCWD, one, AT_FDCWD, other, EXCHANGE)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("work", ["remove", "chmod", "pack", "list", "unpack"])
def test_renames_meanwhile_lead_nowhere_else(files: Files, quick: Path, work: str) -> None:
    """Folders of the tree turn into links to the canary and back while the tree is worked on."""
    files.home = quick
    canary = quick / "canary"
    canary.mkdir()
    for name in ("secret1", "secret2"):
        (canary / name).write_bytes(b"canary")
        (canary / name).chmod(0o600)
    before = state(canary)
    ways: dict[str, Callable[[], bytes]] = {
        "remove": lambda: files.run("remove", path="top", recursive=1).data,
        "chmod": lambda: files.run("chmod", path="top", mode="0777", recursive=1).data,
        "pack": lambda: files.run("pack", path="top").data,
        "list": lambda: files.run("list", path="top", depth=5).data,
        "unpack": lambda: files.run("unpack", path="top", upload=archive()).data,
    }
    for _ in range(25):
        top, traps = quick / "top", quick / "traps"
        make(quick, {"top": {f"x{n}": {"f": None} for n in range(WIDTH)}, "traps": {}})
        for n in range(WIDTH):
            (traps / f"x{n}").symlink_to(canary)
        with exchanging(top, traps):
            data = ways[work]()
        assert b"secret" not in data or work == "unpack"
        assert state(canary) == before
        shutil.rmtree(traps)
        shutil.rmtree(top, ignore_errors=True)


def archive() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for n in range(WIDTH):
            for name in (f"x{n}/secret1", f"x{n}/new", f"x{n}/y/z"):
                tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return made.getvalue()


def state(folder: Path) -> list[tuple[str, int, bytes]]:
    return sorted(
        (one.name, one.lstat().st_mode, one.read_bytes() if one.is_file() else b"") for one in folder.rglob("*")
    )
