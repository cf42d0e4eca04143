"""The guest's files program, run on this host: archives to and from Python's tarfile and GNU tar, and hostile ones."""

import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.guest_files import NOBODY, Files, built, files, home, needs_root, nobody, peak, plain, quick

__all__ = ["built", "files", "home", "nobody", "plain", "quick"]

slowly = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MTIME = 1_234_567_890

name = st.one_of(
    st.text("ab.é€ =\n", min_size=1, max_size=5).map(os.fsencode),
    st.sampled_from([b"n" * 100, b"n" * 101, b"e" * 255, "é".encode() * 120, b"\xff\xfe", b"\xff" * 130]),
).filter(lambda octets: octets not in (b".", b".."))
leaf = st.one_of(
    st.sampled_from([0, 511, 512, 513, 180_000]).map(lambda size: b"x" * size),
    st.binary(max_size=20),
    st.sampled_from(["target", "../out", "/abs", "t" * 150, "ü", "\udcff"]),
)
Tree = dict[bytes, Any]
trees: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(name, leaf, max_size=4), lambda inner: st.dictionaries(name, inner | leaf, max_size=4)
)


def make(folder: bytes, tree: Tree) -> None:
    """Folders are dicts, files octets, symbolic links text."""
    for number, (one, inner) in enumerate(tree.items()):
        path = folder + b"/" + one
        if isinstance(inner, dict):
            os.mkdir(path)
            make(path, inner)
            os.chmod(path, 0o750)
        elif isinstance(inner, str):
            os.symlink(os.fsencode(inner), path)
        else:
            Path(os.fsdecode(path)).write_bytes(inner)
            os.chmod(path, (0o644, 0o600, 0o755)[number % 3])
        os.utime(path, (MTIME, MTIME), follow_symlinks=False)


def state(folder: bytes, *, times: bool = True) -> dict[bytes, tuple[Any, ...]]:
    """What a tree is, to be compared. The times of links are left out: Python sets none."""
    found: dict[bytes, tuple[Any, ...]] = {}
    for one in os.scandir(folder):
        st_ = one.stat(follow_symlinks=False)
        content: object = None
        if one.is_symlink():
            content = os.readlink(one.path)
        elif one.is_dir():
            content = state(one.path, times=times)
        elif one.is_file():
            content = Path(os.fsdecode(one.path)).read_bytes()
        mode = 0 if one.is_symlink() else stat.S_IMODE(st_.st_mode)
        mtime = int(st_.st_mtime) if times and not one.is_symlink() else 0
        found[one.name] = (stat.S_IFMT(st_.st_mode), mode, mtime, content)
    return found


@pytest.fixture
def fresh(quick: Path) -> Callable[[], tuple[bytes, bytes]]:
    """Two empty folders, for each example of a property."""

    def made() -> tuple[bytes, bytes]:
        for part in ("from", "to"):
            shutil.rmtree(os.fsencode(quick / part), ignore_errors=True)
            (quick / part).mkdir()
        return os.fsencode(quick / "from"), os.fsencode(quick / "to")

    return made


# -- honest archives


@given(tree=trees)
@slowly
def test_what_it_packs_python_and_gnu_tar_unpack(
    files: Files, quick: Path, fresh: Callable[[], tuple[bytes, bytes]], tree: Tree
) -> None:
    source, target = fresh()
    make(source, tree)
    packed = files.run("pack", path=source).data
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = tar.getmembers()
        tar.extractall(os.fsdecode(target), filter="fully_trusted")
    assert state(target) == state(source)
    assert len(members) == len({member.name for member in members})
    fresh_target = fresh()[1]
    subprocess.run(["tar", "-xpf", "-", "-C", fresh_target], input=packed, check=True, stderr=subprocess.DEVNULL)
    make(os.fsencode(quick / "from"), tree)
    assert state(fresh_target) == state(source)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@given(tree=trees)
@slowly
def test_what_python_packs_it_unpacks(
    files: Files, fresh: Callable[[], tuple[bytes, bytes]], form: int, tree: Tree
) -> None:
    source, target = fresh()
    make(source, tree)
    made = io.BytesIO()
    try:
        with tarfile.open(fileobj=made, mode="w", format=form, pax_headers={"comment": "global"}) as tar:
            tar.add(os.fsdecode(source), arcname=".")
    except ValueError:
        assert form == tarfile.USTAR_FORMAT  # too long for it
        return
    files.ok("unpack", path=target, upload=made.getvalue() + b"what stands behind the end")
    assert state(target) == state(source)


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7", "oldgnu"])
def test_what_gnu_tar_packs_it_unpacks(files: Files, fresh: Callable[[], tuple[bytes, bytes]], form: str) -> None:
    source, target = fresh()
    tree: Tree = {b"d": {b"e": {b"f": b"x" * 70_000, b"l": "f"}}, b"empty": {}, b"e": b""}
    if form in ("gnu", "pax", "oldgnu"):
        tree |= {b"n" * 200: {b"m" * 200: b"long"}, b"link": "t" * 300}
    make(source, tree)
    os.link(source + b"/d/e/f", source + b"/second")
    packed = subprocess.run(["tar", f"--format={form}", "-C", source, "-cf", "-", "."], capture_output=True, check=True)
    said = files.ok("unpack", path=target, upload=packed.stdout)
    assert said["skipped"] == 0
    assert state(target) == state(source)
    assert os.stat(target + b"/second").st_ino == os.stat(target + b"/d/e/f").st_ino


@given(tree=trees)
@slowly
def test_it_unpacks_what_it_packs(files: Files, fresh: Callable[[], tuple[bytes, bytes]], tree: Tree) -> None:
    source, target = fresh()
    make(source, tree)
    run = files.run("pack", path=source)
    assert run.ok is not None
    assert run.head is not None
    said = files.ok("unpack", path=target + b"/made/here", parents=1, upload=run.data)
    assert (said["files"], said["bytes"]) == (run.ok["files"], run.ok["bytes"])
    assert state(target + b"/made/here") == state(source)
    files.ok("unpack", path=target + b"/made/here", upload=run.data)  # over itself
    assert state(target + b"/made/here", times=False) == state(source, times=False)


def test_a_single_file_large_numbers_and_hard_links(files: Files) -> None:
    path = files.home / "f"
    path.write_bytes(b"content")
    os.utime(path, ns=(0, -86_400_000_000_000))
    os.link(path, files.home / "g")
    os.mkfifo(files.home / "fifo")
    with tarfile.open(fileobj=io.BytesIO(files.run("pack", path="f").data)) as tar:
        (member,) = tar.getmembers()
        assert (member.name, member.size, member.mtime) == ("f", 7, -86_400)
    run = files.run("pack", path=".")
    assert run.ok == {"files": 2, "bytes": 7, "skipped": 1, "changed": 0}
    with tarfile.open(fileobj=io.BytesIO(run.data)) as tar:
        first, second = tar.getmembers()
        assert second.islnk()
        assert second.linkname == first.name
    empty = files.home / "empty"
    empty.mkdir()
    assert files.run("pack", path="empty").data == bytes(1024)
    assert files.fails("pack", path="fifo") == "EINVAL"


@needs_root
def test_a_file_of_more_than_eight_gibibytes_and_large_owners(files: Files) -> None:
    big = files.home / "big"
    big.touch()
    os.truncate(big, (8 << 30) + 1)
    os.chown(big, 3_000_000, 4_000_000)
    run = files.start("pack", path=".")
    try:
        assert run.process.stdout
        head = run.process.stdout.read(2048)
        with tarfile.open(fileobj=io.BytesIO(head), mode="r|") as tar:
            member = tar.next()
        assert member
        assert (member.size, member.uid, member.gid) == ((8 << 30) + 1, 3_000_000, 4_000_000)
    finally:
        run.kill()


@needs_root
def test_what_may_not_be_read_ends_the_archive(nobody: Files) -> None:
    (nobody.home / "secret").touch(mode=0o600)
    said = nobody.run("pack", path=".")
    assert said.code == "EACCES"
    assert not said.data.endswith(bytes(1024))


def test_files_of_any_size_in_constant_memory(plain: Path, quick: Path) -> None:
    """What goes out comes in again, octet by octet; the memory is that of a small file."""
    used = []
    for size in (1 << 16, 64 << 20):
        content = quick / "content"
        content.write_bytes(random.Random(size).randbytes(size))
        (quick / "d").mkdir()
        (quick / "to").mkdir()
        read = peak(plain, quick, "read", "path=content", stdout=quick / "d" / "read")
        write = peak(plain, quick, "write", "path=d/written", f"size={size}", stdin=content)
        pack = peak(plain, quick, "pack", "path=d", stdout=quick / "tar")
        unpack = peak(plain, quick, "unpack", "path=to", stdin=quick / "tar")
        for path in ("d/read", "d/written", "to/read", "to/written"):
            assert (quick / path).read_bytes() == content.read_bytes(), path
        shutil.rmtree(quick / "d")
        shutil.rmtree(quick / "to")
        used.append((read, write, pack, unpack))
    assert all(large - small < 1024 for small, large in zip(*used, strict=True)), used


# -- owners and modes


def archive(*members: tuple[str | bytes, dict[str, Any]], content: bytes = b"", end: bool = True) -> bytes:
    """Members as they are given, however wrong."""
    made = b""
    for name_, values in members:
        info = tarfile.TarInfo(os.fsdecode(name_))
        for key, value in values.items():
            setattr(info, key, value)
        if info.isreg() and "size" not in values:
            info.size = len(content)
        made += info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")
        made += content.ljust(-len(content) % 512 + len(content), b"\0") if info.isreg() else b""
    return made + bytes(1024) * end


def test_owners_and_privileged_bits_are_dropped_unless_they_are_asked_for(files: Files) -> None:
    octets = archive(("s", {"mode": 0o6755, "uid": 4242, "gid": 4343}), ("d", {"type": b"5", "mode": 0o2775}))
    files.ok("unpack", path=".", upload=octets)
    made = (files.home / "s").stat()
    assert (stat.S_IMODE(made.st_mode), made.st_uid, made.st_gid) == (0o755, os.geteuid(), os.getegid())
    assert stat.S_IMODE((files.home / "d").stat().st_mode) == 0o775
    if os.geteuid() == 0:
        (files.home / "o").mkdir()
        files.ok("unpack", path="o", owners=1, upload=octets)
        made = (files.home / "o" / "s").stat()
        assert (stat.S_IMODE(made.st_mode), made.st_uid, made.st_gid) == (0o6755, 4242, 4343)


@needs_root
def test_as_another_user(nobody: Files) -> None:
    octets = archive(("d", {"type": b"5", "mode": 0o500}), ("d/f", {}), ("d/e/g", {}), ("h", {"mode": 0}))
    assert nobody.fails("unpack", path=".", owners=1, upload=octets) == "EPERM"
    nobody.ok("unpack", path=".", upload=octets)
    assert stat.S_IMODE((nobody.home / "d").stat().st_mode) == 0o500
    assert (nobody.home / "d" / "e" / "g").stat().st_uid == NOBODY
    assert nobody.fails("unpack", path="..", upload=octets) == "EACCES"


def test_what_is_there_is_replaced_and_never_written_through(files: Files) -> None:
    home = files.home
    outside = home / "outside"
    outside.write_bytes(b"canary")
    (home / "in").mkdir()
    (home / "in" / "link").symlink_to(outside)
    os.link(outside, home / "in" / "hard")
    (home / "in" / "full").mkdir()
    (home / "in" / "full" / "x").touch()
    octets = archive(("link", {}), ("hard", {}), content=b"new")
    files.ok("unpack", path="in", upload=octets)
    assert outside.read_bytes() == b"canary"
    assert (home / "in" / "link").read_bytes() == (home / "in" / "hard").read_bytes() == b"new"
    assert not (home / "in" / "link").is_symlink()
    assert files.fails("unpack", path="in", upload=archive(("full", {}))) == "EISDIR"
    assert files.fails("unpack", path="in", upload=archive(("link", {"type": b"5"}))) == "ENOTDIR"
    assert files.fails("unpack", path="in", upload=archive(("link/x", {}))) == "ENOTDIR"
    (home / "in" / "to").symlink_to("full")
    files.ok("unpack", path="in", upload=archive(("to/y", {}), ("to", {"type": b"5"})))
    assert (home / "in" / "full" / "y").exists()


# -- hostile archives

LINK, HARD, DIR, FIFO, CHAR = ({"type": kind} for kind in (b"2", b"1", b"5", b"6", b"3"))
EVIL = [
    ([("../evil", {})], "EBADMSG"),
    ([("/evil", {})], "EBADMSG"),
    ([("a/../../evil", {})], "EBADMSG"),
    ([("..", DIR)], "EBADMSG"),
    ([("", {})], "EBADMSG"),
    ([(".", {})], "EBADMSG"),
    ([("l", LINK | {"linkname": ".."}), ("l/evil", {})], "EBADMSG"),
    ([("l", LINK | {"linkname": "/"}), ("l/evil", {})], "EBADMSG"),
    ([("l", LINK | {"linkname": "/proc/self/cwd"}), ("l/evil", {})], "EBADMSG"),
    ([("d", DIR), ("l", LINK | {"linkname": "d"}), ("d/m", LINK | {"linkname": "../.."}), ("l/m/evil", {})], "EBADMSG"),
    ([("l", LINK | {"linkname": ".."}), ("l/evil", DIR)], "EBADMSG"),
    ([("l", LINK | {"linkname": ".."}), ("l", DIR)], "EBADMSG"),
    ([("l", LINK | {"linkname": ".."}), ("l/evil", LINK | {"linkname": "x"})], "EBADMSG"),
    ([("loop", LINK | {"linkname": "loop"}), ("loop/x", {})], "EBADMSG"),
    ([("h", HARD | {"linkname": "../canary"})], "EBADMSG"),
    ([("h", HARD | {"linkname": "/etc/passwd"})], "EBADMSG"),
    ([("l", LINK | {"linkname": ".."}), ("h", HARD | {"linkname": "l/canary"})], "EBADMSG"),
    ([("d", DIR), ("h", HARD | {"linkname": "d"})], "EBADMSG"),
    ([("h", HARD | {"linkname": "nowhere"})], "ENOENT"),
    ([("f", {}), ("f/x", {})], "ENOTDIR"),
    ([("d", DIR), ("d", {})], "EISDIR"),
    ([("x" * 256, {})], "ENAMETOOLONG"),
    ([("x/" * 2047 + "y", {})], None),
    ([("x/" * 2100 + "y", {})], "EBADMSG"),
    ([("s", {"type": b"S"})], "EOPNOTSUPP"),
    ([("m", {"type": b"M"})], "EOPNOTSUPP"),
    ([("c", CHAR)], None),
]  # fmt: skip


@pytest.mark.parametrize(("members", "code"), EVIL)
def test_hostile_archives_stay_below_the_folder(
    files: Files, quick: Path, members: list[tuple[str, dict[str, Any]]], code: str | None
) -> None:
    files.home = quick
    (quick / "canary").write_bytes(b"canary")
    (quick / "to").mkdir()
    said = files.run("unpack", path="to", upload=archive(*members, content=b"evil"))
    assert said.code == code, said.error
    assert sorted(one.name for one in quick.iterdir()) == ["canary", "to"]
    assert (quick / "canary").read_bytes() == b"canary"
    assert (quick / "canary").stat().st_nlink == 1


def test_a_hard_link_to_a_link_is_the_link_and_opens_nothing(files: Files, quick: Path) -> None:
    files.home = quick
    (quick / "canary").write_bytes(b"canary")
    (quick / "to").mkdir()
    members = [("l", LINK | {"linkname": "../canary"}), ("h", HARD | {"linkname": "l"}), ("h", {})]
    files.ok("unpack", path="to", upload=archive(*members[:2]))
    assert os.readlink(quick / "to" / "h") == "../canary"
    files.ok("unpack", path="to", upload=archive(*members, content=b"evil"))
    assert (quick / "to" / "h").read_bytes() == b"evil"
    assert (quick / "canary").read_bytes() == b"canary"


parts = st.sampled_from(["a", "b", "l", "..", ".", "", "canary"])
paths = st.lists(parts, min_size=1, max_size=4).map("/".join)
member = st.tuples(
    paths,
    st.fixed_dictionaries(
        {"type": st.sampled_from([b"0", b"1", b"2", b"5", b"6", b"3", b"L", b"x"])},
        optional={"linkname": paths, "mode": st.integers(0, 0o7777), "size": st.integers(0, 3000)},
    ),
)


@given(members=st.lists(member, max_size=8), cut=st.integers(0, 9000), flip=st.integers(0, 9000), end=st.booleans())
@settings(slowly, max_examples=200)
def test_no_archive_reaches_the_canary(
    files: Files, fresh: Callable[[], tuple[bytes, bytes]], members: list[Any], cut: int, flip: int, end: bool
) -> None:
    source, target = fresh()
    canary = source + b"/canary"
    Path(os.fsdecode(canary)).write_bytes(b"canary")
    os.symlink(b"../from", target + b"/l")  # a trap that is there already
    before = state(source), os.listdir(os.path.dirname(source))
    octets = bytearray(archive(*members, content=b"evil", end=end))
    if flip < len(octets):
        octets[flip] ^= 0x10
    files.run("unpack", path=target, upload=bytes(octets[: cut or None]))
    assert (state(source), os.listdir(os.path.dirname(source))) == before
    assert os.stat(canary).st_nlink == 1


def test_an_archive_that_is_cut_off_anywhere_is_said(files: Files, quick: Path) -> None:
    files.home = quick
    whole = archive(("d", DIR), ("d/f", {}), ("l", LINK | {"linkname": "x" * 200}), content=b"x" * 700)
    for length in [*range(0, len(whole) - 512, 256), 1, 511, len(whole) - 600, len(whole) - 513, len(whole) - 511]:
        said = files.run("unpack", path=".", upload=whole[:length])
        assert said.code == "EBADMSG", length
    for behind in (b"", b"x", bytes(9000), whole):
        assert files.ok("unpack", path=".", upload=whole + behind)["files"] == 1
    assert files.ok("unpack", path=".", upload=whole[:-512])["files"] == 1


def test_headers_that_lie(files: Files) -> None:
    def pax(*records: bytes) -> bytes:
        return archive(("x", {"type": b"x", "size": sum(map(len, records))}), end=False) + b"".join(records).ljust(
            512, b"\0"
        )

    tail = archive(("f", {}), content=b"x")
    assert files.ok("unpack", path=".", upload=pax(b"9 size=1\n") + tail)["bytes"] == 1
    for records in (
        b"9 size=1",
        b"8 size=1\n",
        b"999 a=b\n",
        b"6 =bc\n",
        b"x a=b\n",
        b"13 path=a\0bc\n",
        b"9 size=-\n",
        b"\n",
        b"0 a=b\n",
    ):
        assert files.fails("unpack", path=".", upload=pax(records) + tail) == "EBADMSG", records
    assert files.fails("unpack", path=".", upload=pax(b"13 path=../e\n") + tail) == "EBADMSG"
    assert files.fails("unpack", path=".", upload=pax(b"22 GNU.sparse.major=1\n") + tail) == "EOPNOTSUPP"
    assert files.fails("unpack", path=".", upload=pax(b"17 size=99999999\n") + tail) == "EBADMSG"
    assert (
        files.fails("unpack", path=".", upload=archive(("x", {"type": b"x", "size": 70_000})) + bytes(80_000))
        == "EBADMSG"
    )
    assert (
        files.fails("unpack", path=".", upload=archive(("x", {"type": b"L", "size": 5_000})) + bytes(8_000))
        == "EBADMSG"
    )
    for at, octets in (
        (124, b"\xff" * 12),
        (124, b"99999999999\0"),
        (148, b"0000000\0"),
        (124, b"\x80" + b"\xff" * 11),
    ):
        bad = bytearray(tail)
        bad[at : at + len(octets)] = octets
        if at != 148:
            bad[148:156] = b" " * 8
            bad[148:155] = b"%06o\0" % sum(bad[:512])
        assert files.fails("unpack", path=".", upload=bytes(bad)) == "EBADMSG", octets
    assert files.fails("unpack", path=".", upload=random.Random(1).randbytes(100_000)) == "EBADMSG"


@needs_root
def test_a_bomb_fills_the_disk_and_says_how_far_it_came(built: Path, home: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("no mount namespace")
    octets = archive(*((f"f{n}", {}) for n in range(100)), content=bytes(50_000))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none . && cd "$PWD" && "$@"', "sh", built, "unpack", "path=."],
        cwd=home,
        input=octets,
        capture_output=True,
        check=False,
    )  # fmt: skip
    assert b'"ENOSPC"' in done.stderr
    assert b'"files":2' in done.stderr or b'"files":1' in done.stderr


def test_a_killed_run_leaves_no_half_file_under_a_members_name(files: Files) -> None:
    content = b"x" * 300_000
    whole = archive(*((f"f{n}", {}) for n in range(20)), content=content)
    chance = random.Random(3)
    for _ in range(30):
        run = files.start("unpack", path=".", stdin=subprocess.PIPE)
        try:
            assert run.process.stdin
            run.process.stdin.write(whole[: chance.randrange(len(whole))])
            run.process.kill()
            run.process.wait(timeout=60)
        finally:
            run.kill()
        for one in files.home.iterdir():
            assert one.read_bytes() == content
            one.unlink()
