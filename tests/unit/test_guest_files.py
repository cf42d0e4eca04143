"""The guest's files program, run on this host: reading, writing, listing, and what happens to trees that change or are hostile."""

import base64
import os
import random
import resource
import signal
import stat
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.guest_files import NOBODY, Files, build, built, files, home, needs_root, nobody, parse, until

__all__ = ["built", "files", "home", "nobody"]


def b64(path: bytes) -> str:
    return base64.b64encode(path).decode()


# -- arguments


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["nothing"], "ENOSYS"),
        (["stat"], "EINVAL"),
        (["stat", "path="], "EINVAL"),
        (["stat", "path"], "EINVAL"),
        (["stat", "path=a", "path=b"], "EINVAL"),
        (["stat", "path=a", "path_base64=Yg=="], "EINVAL"),
        (["stat", "path_base64=Y"], "EINVAL"),
        (["stat", "path_base64=Y*=="], "EINVAL"),
        (["stat", "path_base64=AA=="], "EINVAL"),
        (["stat", "path=a", "size=1"], "EINVAL"),
        (["stat", "path=a", "follow=2"], "EINVAL"),
        (["stat", "path=" + "x" * 5000], "ENAMETOOLONG"),
        (["stat", "path=" + "x" * 300], "ENAMETOOLONG"),
        (["read", "path=a", "offset=-1"], "EINVAL"),
        (["read", "path=a", "offset=99999999999999999999"], "EINVAL"),
        (["read", "path=a", "tail=1", "offset=0"], "EINVAL"),
        (["write", "path=a", "mode=888"], "EINVAL"),
        (["write", "path=a", "mode=17777"], "EINVAL"),
        (["write", "path=a", "append=1", "offset=1"], "EINVAL"),
        (["list", "path=.", "limit=0"], "EINVAL"),
        (["list", "path=.", "limit=2001"], "EINVAL"),
        (["list", "path=.", "depth=33"], "EINVAL"),
        (["list", "path=.", "after=../x"], "EINVAL"),
        (["chmod", "path=."], "EINVAL"),
        (["remove", "path=/"], "EINVAL"),
        (["remove", "path=a/.."], "EINVAL"),
    ],
)
def test_arguments_that_are_wrong_are_refused(files: Files, argv: list[str], code: str) -> None:
    assert files.fails(*argv) == code


@given(st.binary(min_size=1, max_size=40).filter(lambda name: not {0, 47} & set(name) and name not in (b".", b"..")))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_of_any_octets_are_taken_and_told_exactly(files: Files, name: bytes) -> None:
    files.ok("write", path_base64=b64(name), upload=b"x")
    (entry,) = files.run("list", path=".").lines
    told = base64.b64decode(entry["name_base64"]) if "name_base64" in entry else entry["name"].encode()
    assert told == name
    assert ("name_base64" in entry) == (name.decode(errors="ignore").encode() != name)
    path = base64.b64decode(entry["path_base64"]) if "path_base64" in entry else entry["path"].encode()
    assert path == os.fsencode(files.home) + b"/" + name
    files.ok("remove", path_base64=b64(name))


def test_the_longest_lines_are_within_the_bound(files: Files) -> None:
    """Every octet of path, name and target takes the most room that it can."""
    files.home.joinpath("long").mkdir()
    at = os.open(files.home / "long", os.O_RDONLY)
    length = len(os.fsencode(files.home)) + len("/long")
    path = b"long"
    while length + 256 < 4095:
        os.mkdir(b"\x01" * 255, dir_fd=at)
        at, old = os.open(b"\x01" * 255, os.O_RDONLY, dir_fd=at), at
        os.close(old)
        length += 256
        path += b"/" + b"\x01" * 255
    os.symlink(b"\x02\xff" * 2047, b"\xfe" * 200, dir_fd=at)
    os.close(at)
    entry = files.run("list", path_base64=b64(path)).lines[0]
    assert base64.b64decode(entry["name_base64"]) == b"\xfe" * 200
    assert base64.b64decode(entry["path_base64"]).endswith(path + b"/" + b"\xfe" * 200)
    assert base64.b64decode(entry["target_base64"]) == b"\x02\xff" * 2047


# -- stat


def test_stat_tells_every_kind(files: Files) -> None:
    home = files.home
    (home / "file").write_bytes(b"12345")
    (home / "file").chmod(0o4751)
    (home / "dir").mkdir()
    (home / "link").symlink_to("file")
    (home / "dangling").symlink_to("nowhere")
    os.mkfifo(home / "fifo")
    os.utime(home / "file", ns=(1, 1_234_567_890_123_456_789))
    entry = files.run("stat", path="file").entry
    assert entry["path"] == str(home / "file")
    assert (entry["name"], entry["type"], entry["size"], entry["mode"]) == ("file", "file", 5, 0o4751)
    assert entry["mtime_ns"] == 1_234_567_890_123_456_789
    assert (entry["uid"], entry["gid"]) == (os.geteuid(), os.getegid())
    assert "target" not in entry
    assert files.run("stat", path="./dir//").entry["path"] == str(home / "dir")
    link = files.run("stat", path="link").entry
    assert (link["type"], link["target"]) == ("symlink", "file")
    followed = files.run("stat", path="link", follow=1).entry
    assert (followed["type"], followed["name"], followed["size"]) == ("file", "link", 5)
    assert files.run("stat", path="dangling").entry["target"] == "nowhere"
    assert files.fails("stat", path="dangling", follow=1) == "ENOENT"
    assert files.run("stat", path="fifo").entry["type"] == "fifo"
    assert files.run("stat", path="/dev/null").entry["type"] == "char"
    assert files.run("stat", path="/").entry["path"] == "/"
    assert files.fails("stat", path="file/x") == "ENOTDIR"


@needs_root
def test_names_of_accounts(files: Files) -> None:
    (files.home / "x").touch()
    os.chown(files.home / "x", 0, 123_456)
    entry = files.run("stat", path="x").entry
    assert (entry["user"], entry["group"]) == ("root", "123456")


# -- read


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_000_003])
def test_ranges(files: Files, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (files.home / "f").write_bytes(content)
    for offset, length in [
        (0, None),
        (0, 0),
        (0, 10),
        (size // 2, None),
        (size // 3, 70_000),
        (size, None),
        (size + 5, 3),
    ]:
        named = {"offset": offset} if length is None else {"offset": offset, "length": length}
        said = files.run("read", path="f", **named)
        wanted = content[offset : size if length is None else offset + length]
        assert said.data == wanted
        assert said.head is not None
        assert (said.head["offset"], said.head["length"]) == (offset, len(wanted))
        assert said.head["entry"]["size"] == size
        assert said.ok == {"bytes": len(wanted)}
    for tail in (0, 1, 70_000, size + 1):
        said = files.run("read", path="f", tail=tail)
        assert said.data == (content[-tail:] if tail else b"")


def test_what_the_kernel_makes_up_has_its_size_when_it_is_short(files: Files) -> None:
    said = files.run("read", path="/proc/self/limits")
    assert said.head is not None
    assert said.head["length"] == len(said.data) == said.head["entry"]["size"] > 0
    said = files.run("read", path="/proc/kallsyms")
    assert said.head is not None
    assert said.head["length"] is None
    assert said.data.count(b"\n") > 1000


def test_only_regular_files_are_read(files: Files) -> None:
    os.mkfifo(files.home / "fifo")
    (files.home / "loop").symlink_to("loop")
    assert files.fails("read", path="fifo") == "EINVAL"
    assert files.fails("read", path="/dev/zero") == "EINVAL"
    assert files.fails("read", path=".") == "EISDIR"
    assert files.fails("read", path="loop") == "ELOOP"


def test_a_file_that_becomes_shorter_is_said(files: Files) -> None:
    path = files.home / "f"
    path.write_bytes(bytes(8 << 20))
    run = files.start("read", path="f")
    try:
        assert run.head()["length"] == 8 << 20
        assert run.process.stdout
        first = os.read(run.process.stdout.fileno(), 65536)
        os.truncate(path, 1 << 20)
        data, said = run.process.communicate(timeout=60)
        assert b'"ESTALE"' in said
        assert len(first) + len(data) < 8 << 20
    finally:
        run.kill()


def test_a_reader_that_goes_away_ends_it(files: Files) -> None:
    (files.home / "f").write_bytes(bytes(8 << 20))
    run = files.start("read", path="f")
    try:
        assert run.process.stdout
        run.process.stdout.close()
        assert run.process.wait(timeout=60) == 1
    finally:
        run.kill()


# -- write


def test_a_new_file_and_its_replacement(files: Files) -> None:
    path = files.home / "a" / "b" / "f"
    said = files.ok("write", path="a/b/f", parents=1, size=3, upload=b"one")
    assert said["created"] is True
    assert said["bytes"] == said["entry"]["size"] == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    path.chmod(0o600)
    os.link(path, files.home / "other")
    said = files.ok("write", path="a/b/f", upload=b"")
    assert said["created"] is False
    assert path.read_bytes() == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (files.home / "other").read_bytes() == b"one"
    files.ok("write", path="a/b/f", mode="4755", upload=b"two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o4755
    files.ok("write", path="a/b/f", upload=b"three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755, "a write takes set-user-id away"
    assert [one.name for one in path.parent.iterdir()] == ["f"]


@pytest.mark.parametrize(
    ("size", "upload"), [(0, b"x"), (1, b""), (5, b"1234"), (70_000, bytes(70_001)), (2 << 20, bytes(10))]
)
def test_another_size_than_announced_replaces_nothing(files: Files, size: int, upload: bytes) -> None:
    (files.home / "f").write_bytes(b"old")
    said = files.run("write", path="f", size=size, upload=upload)
    assert said.code == "EMSGSIZE"
    assert files.fails("write", path="g", size=size, upload=upload) == "EMSGSIZE"
    assert {one.name for one in files.home.iterdir()} == {"f"}
    assert (files.home / "f").read_bytes() == b"old"


PIECE = 1 << 18
"""What is written past the kernel's cache at a time, of files from a MiB on."""


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 5 * PIECE - 1, 6 * PIECE, 7 * PIECE + 4096 + 5])
@pytest.mark.parametrize("start", [None, 0, 5, 4096])
def test_a_large_file_arrives_octet_for_octet(files: Files, size: int, start: int | None) -> None:
    content = random.Random(size).randbytes(size)
    before = b"" if start is None else bytes(8192)
    place: dict[str, object] = {} if start is None else {"offset": start}
    if before:
        (files.home / "f").write_bytes(before)
    assert files.ok("write", path="f", size=size, upload=content, **place)["bytes"] == size
    wanted = content if start is None else before[:start] + content
    assert (files.home / "f").read_bytes() == wanted
    files.ok("write", path="f", size=size, append=1, upload=content)
    assert (files.home / "f").read_bytes() == wanted + content


@pytest.mark.parametrize("way", [{"in_place": 1}, {"append": 1}, {}])
def test_a_large_file_fails_where_no_more_can_be_written(files: Files, way: dict[str, int]) -> None:
    size = 4 << 20
    bounded = replace(files, wrapper=["sh", "-c", "trap '' XFSZ; ulimit -f 4096; exec \"$@\"", "sh"])
    (files.home / "f").write_bytes(b"old")
    assert bounded.fails("write", path="f", size=size, upload=bytes(size), **way) == "EFBIG"
    assert {one.name for one in files.home.iterdir()} == {"f"}
    assert (files.home / "f").stat().st_size == (2 << 20 if way else 3)


def test_a_link_at_the_end_is_followed_and_stays(files: Files) -> None:
    home = files.home
    (home / "d").mkdir()
    (home / "d" / "target").write_bytes(b"old")
    (home / "one").symlink_to("two")
    (home / "two").symlink_to(home / "d" / "target")
    (home / "new").symlink_to("d/made")
    (home / "loop").symlink_to("loop")
    (home / "folder").symlink_to("d/")
    (home / "up").symlink_to("..")
    files.ok("write", path="one", upload=b"new")
    assert (home / "d" / "target").read_bytes() == b"new"
    assert (home / "one").is_symlink()
    assert files.ok("write", path="new", upload=b"made")["created"] is True
    assert (home / "d" / "made").read_bytes() == b"made"
    assert files.fails("write", path="loop", upload=b"") == "ELOOP"
    assert files.fails("write", path="folder", upload=b"") == "EISDIR"
    assert files.fails("write", path="up", upload=b"") == "EISDIR"
    assert files.fails("write", path="/proc/self/exe", upload=b"") == "EINVAL"


def test_what_is_no_file_is_not_replaced(files: Files) -> None:
    os.mkfifo(files.home / "fifo")
    assert files.fails("write", path="fifo", upload=b"") == "EINVAL"
    assert files.fails("write", path="fifo", upload=b"", append=1) == "EINVAL"
    assert files.fails("write", path=".", upload=b"") == "EINVAL"
    assert files.fails("write", path="/etc", upload=b"") == "EISDIR"
    assert files.fails("write", path="no/f", upload=b"") == "ENOENT"
    assert files.fails("write", path="fifo/f", upload=b"", parents=1) == "ENOTDIR"


def test_in_place_at_an_offset_and_at_the_end(files: Files) -> None:
    path = files.home / "f"
    path.write_bytes(b"0123456789")
    inode = path.stat().st_ino
    files.ok("write", path="f", offset=2, upload=b"ab")
    files.ok("write", path="f", append=1, upload=b"end")
    assert path.read_bytes() == b"01ab456789end"
    files.ok("write", path="f", in_place=1, upload=b"short")
    assert path.read_bytes() == b"short"
    assert path.stat().st_ino == inode
    said = files.run("write", path="f", in_place=1, size=9, upload=b"1234")
    assert said.error is not None
    assert (said.error["code"], said.error["bytes"]) == ("EMSGSIZE", 4)
    assert files.ok("write", path="g", offset=3, upload=b"x")["created"] is True
    assert (files.home / "g").read_bytes() == b"\0\0\0x"
    assert stat.S_IMODE((files.home / "g").stat().st_mode) == 0o644


@needs_root
def test_owners_are_kept_or_it_is_refused(files: Files, nobody: Files) -> None:
    theirs = nobody.home / "theirs"
    theirs.write_bytes(b"old")
    os.chown(theirs, 1234, 4321)
    theirs.chmod(0o666)
    assert nobody.fails("write", path="theirs", upload=b"new") == "EPERM"
    assert theirs.read_bytes() == b"old"
    nobody.ok("write", path="theirs", in_place=1, upload=b"in place")
    files.ok("write", path="nobody/theirs", upload=b"by root")
    assert (theirs.stat().st_uid, theirs.stat().st_gid) == (1234, 4321)
    theirs.chmod(0o644)
    assert nobody.fails("write", path="theirs", upload=b"new") == "EACCES"
    assert nobody.fails("write", path="../f", upload=b"new") == "EACCES"
    assert nobody.ok("write", path="own", upload=b"x")["entry"]["uid"] == NOBODY
    assert [one.name for one in nobody.home.iterdir() if one.name.startswith(".")] == []


@needs_root
def test_a_link_of_another_user_in_a_sticky_folder_is_not_followed(files: Files) -> None:
    (files.home / "victim").write_bytes(b"old")
    tmp = files.home / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    (tmp / "trap").symlink_to(files.home / "victim")
    os.lchown(tmp / "trap", NOBODY, NOBODY)
    assert files.fails("write", path="tmp/trap", upload=b"new") == "EACCES"
    assert (files.home / "victim").read_bytes() == b"old"


@pytest.fixture(scope="module")
def built_named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("named"), "files-named")


@pytest.mark.parametrize("program", ["built", "built_named"])
def test_a_write_killed_at_any_instant_leaves_the_old_file_or_the_new_one(
    request: pytest.FixtureRequest, home: Path, program: str
) -> None:
    files = Files(request.getfixturevalue(program), home)
    old, new = b"o" * 300_000, b"n" * 400_000
    chance = random.Random(1)
    seen = set()
    for _ in range(60):
        (home / "f").write_bytes(old)
        run = files.start("write", path="f", size=len(new), stdin=subprocess.PIPE)
        try:
            assert run.process.stdin
            part = chance.choice([0, 1, 70_000, 399_999, 400_000, 400_000, 400_000])
            run.process.stdin.write(new[:part])
            run.process.stdin.flush()
            if part == len(new):
                run.process.stdin.close()
                threading.Event().wait(chance.random() * 0.03)
            run.process.kill()
            run.process.wait(timeout=60)
        finally:
            run.kill()
        content = (home / "f").read_bytes()
        assert content in (old, new)
        seen.add(content == new)
    assert False in seen
    files.ok("write", path="f", upload=b"swept")
    assert [one.name for one in home.iterdir()] == ["f"]


def test_an_upload_file_with_a_name_goes_with_its_run_and_others_are_left_alone(built_named: Path, home: Path) -> None:
    files = Files(built_named, home)
    living = files.start("write", path="living", stdin=subprocess.PIPE)
    ended = files.start("write", path="ended", stdin=subprocess.PIPE)
    try:
        until(lambda: len(list(home.iterdir())) == 2)
        ended.process.send_signal(signal.SIGTERM)
        ended.process.wait(timeout=60)
        (name,) = [one.name for one in home.iterdir()]
        (home / f"{name[:-1]}{'0' if name[-1] != '0' else '1'}").write_bytes(b"left by a run that was killed")
        files.ok("write", path="f", upload=b"")
        assert {one.name for one in home.iterdir()} == {name, "f"}
        data, said = living.process.communicate(b"whole", timeout=60)
        assert parse(data, said, 0).ok is not None
        assert (home / "living").read_bytes() == b"whole"
    finally:
        living.kill()
        ended.kill()


@needs_root
def test_a_full_disk_is_said_and_replaces_nothing(built: Path, home: Path) -> None:
    script = 'mount -t tmpfs -o size=1m none . && cd . && cd "$PWD" && echo old >f && "$@"; code=$?; cat f >&2; ls -A >&2; exit $code'
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("no mount namespace")
    for size in ({}, {"size": 5 << 20}):
        argv = [str(built), "write", "path=f", *(f"{key}={value}" for key, value in size.items())]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", *argv],
            cwd=home,
            input=bytes(5 << 20),
            capture_output=True,
            check=False,
        )
        assert done.stderr.splitlines()[-2:] == [b"old", b"f"], done.stderr
        said = parse(b"", done.stderr.splitlines(keepends=True)[0], done.returncode)
        assert said.code == "ENOSPC"


def test_a_bound_on_the_size_of_files_is_an_error(files: Files) -> None:
    run = subprocess.run(
        [files.binary, "write", "path=f"],
        cwd=files.home,
        input=bytes(100_000),
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
        check=False,
    )
    assert parse(b"", run.stderr, run.returncode).code == "EFBIG"
    assert list(files.home.iterdir()) == []
