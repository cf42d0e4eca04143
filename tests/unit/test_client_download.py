"""What a hostile sandbox sends as a download: nothing is written elsewhere, nothing half appears, everything is bounded."""

import contextlib
import io
import os
import random
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hatchway.client import FileEntry, HatchwayError, Transfer, TransferFailed, UnsafeArchive, receiving
from hatchway.client.archive import stays_inside
from hatchway.client.receiving import Bounds, receiver_for
from hatchway.client.sending import source_of

FOLDER = FileEntry(path="/x", name="x", type="dir", mode=0o755)
FILE = FileEntry(path="/x", name="x", type="file", mode=0o4755)
Add = Callable[[tarfile.TarFile], None]


def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: object) -> Add:
    """Adds one entry to an archive, as it is said."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(content), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return lambda archive: archive.addfile(info, io.BytesIO(content))


def folder(name: str, mode: int = 0o755) -> Add:
    return member(name, tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> Add:
    return member(name, tarfile.SYMTYPE, linkname=target)


def hard(name: str, target: str) -> Add:
    return member(name, tarfile.LNKTYPE, linkname=target)


def packed(*adds: Add, form: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for add in adds:
            add(archive)
    return made.getvalue()


def unpack(archive: bytes, target: Path, piece: int = 10_000, **bounds: int) -> Transfer:
    with receiver_for(FOLDER, target, Bounds(**bounds), None) as receiver:
        for at in range(0, len(archive), piece):
            receiver.feed(archive[at : at + piece])
        return receiver.finish()


def tree(top: Path) -> dict[str, str]:
    """All that is in a folder, with its kind or content."""
    found = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "dir" if path.is_dir() else path.read_text()
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A place that must not be reached: whatever a test does, it stays as it is, and no staging is left beside it."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "canary").write_text("alive")
    yield place
    assert tree(place) == {"canary": "alive"}
    assert [name for _, names, files in os.walk(tmp_path) for name in names + files if ".hatchway-" in name] == []


NAMES = [
    "../outside/canary",
    "a/../../outside/canary",
    "/etc/hatchway-canary",
    "..",
    ".",
    "",
    "a/" * 257 + "b",
    "n" * 256,
    "p/" * 2100,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:24] or "empty")
def test_names_that_lead_elsewhere(tmp_path: Path, outside: Path, name: str) -> None:
    with pytest.raises(UnsafeArchive):
        unpack(packed(folder("a"), member("whole", content=b"x"), member(name, content=b"bad")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_goes_through_a_link_of_the_archive(tmp_path: Path, outside: Path) -> None:
    for target in (str(outside), "inner"):
        archive = packed(folder("inner"), link("a", target), member("a/canary", content=b"bad"))
        with pytest.raises(UnsafeArchive) as caught:
            unpack(archive, tmp_path / "new")
        assert caught.value.code == "archive_unsafe"
    with pytest.raises(UnsafeArchive):
        unpack(packed(link("a", "b"), member("a", content=b"bad")), tmp_path / "new")
    with pytest.raises(UnsafeArchive):
        unpack(packed(link("a", "inner"), folder("a")), tmp_path / "new")


def test_hard_links_to_what_did_not_come(tmp_path: Path, outside: Path) -> None:
    bad = (
        [hard("a", "../outside/canary")],
        [hard("a", str(outside / "canary"))],
        [link("l", "x"), hard("a", "l")],
        [folder("d"), hard("a", "d")],
        [hard("a", "nothing")],
        [hard("a", "")],
    )
    for adds in bad:
        with pytest.raises(UnsafeArchive):
            unpack(packed(*adds), tmp_path / "new")
    done = unpack(packed(folder("d"), member("d/x", content=b"same"), hard("y", "d/x")), tmp_path / "new")
    assert done.files == 2
    assert os.path.samefile(tmp_path / "new/d/x", tmp_path / "new/y")


def test_links_that_lead_out_are_left_out(tmp_path: Path, outside: Path) -> None:
    links = {
        "good": "d/f",
        "d/up": "../good",
        "away": "../outside",
        "root": "/etc/passwd",
        "d/far": "../../x",
        "d/t": "up/../..",
    }
    archive = packed(folder("d"), *(link(name, target) for name, target in links.items()))
    done = unpack(archive, tmp_path / "new")
    assert (done.links, done.skipped) == (2, 4)
    assert tree(tmp_path / "new") == {"d": "dir", "good": "-> d/f", "d/up": "-> ../good"}


@given(st.lists(st.sampled_from(["..", "a", "b", ".", "l"]), min_size=1, max_size=6), st.integers(0, 2))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_link_that_stays_inside_does(tmp_path: Path, steps: list[str], depth: int) -> None:
    """Wherever the links of a folder lead that may stay, resolving one ends inside."""
    top = Path(tempfile.mkdtemp(dir=tmp_path))
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "b").symlink_to("../..")  # one that may stay as well
    place = [top, top / "a", top / "a" / "b"][depth] / "l"
    if stays_inside(depth, "/".join(steps)):
        place.symlink_to("/".join(steps))
        assert os.path.realpath(place).startswith(str(top))


def test_devices_are_left_out_and_bits_dropped(tmp_path: Path, outside: Path) -> None:
    special = [
        member(name, kind) for name, kind in (("c", tarfile.CHRTYPE), ("b", tarfile.BLKTYPE), ("f", tarfile.FIFOTYPE))
    ]
    bits = [member("suid", content=b"x", mode=0o6777, uid=12345, gid=12345), folder("sticky", 0o7000)]
    before = os.umask(0o022)
    try:
        done = unpack(packed(*special, *bits), tmp_path / "new")
    finally:
        os.umask(before)
    assert (done.skipped, done.files, done.dirs) == (3, 1, 1)
    suid, sticky = (tmp_path / "new/suid").stat(), (tmp_path / "new/sticky").stat()
    assert (stat.S_IMODE(suid.st_mode), suid.st_uid) == (0o755, os.geteuid())
    assert stat.S_IMODE(sticky.st_mode) == 0o700


def test_names_that_come_twice(tmp_path: Path, outside: Path) -> None:
    twice = (
        [member("a", content=b"1"), member("a", content=b"2")],
        [folder("a"), folder("a")],
        [member("a"), member("./a")],
    )
    for adds in twice:
        with pytest.raises(UnsafeArchive, match="comes twice"):
            unpack(packed(*adds), tmp_path / "new")
    # Where the file system does not tell case apart, the second one is there already: it is the same error.


def test_members_need_the_folder_that_they_are_in(tmp_path: Path, outside: Path) -> None:
    for adds in ([member("a/b")], [member("a"), member("a/b")]):
        with pytest.raises(UnsafeArchive, match="no folder"):
            unpack(packed(*adds), tmp_path / "new")


def test_links_that_are_there_are_not_followed(tmp_path: Path, outside: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    (target / "d").symlink_to(outside)
    (target / "f").symlink_to(outside / "canary")
    (target / "kept").write_text("kept")
    with pytest.raises(TransferFailed):
        unpack(packed(folder("d"), member("d/canary", content=b"bad")), target)
    done = unpack(packed(member("f", content=b"new"), folder("e"), member("e/x", content=b"y")), target)
    assert done.files == 2
    assert tree(target) == {"d": f"-> {outside}", "f": "new", "kept": "kept", "e": "dir", "e/x": "y"}


def test_a_link_that_appears_on_the_way_is_not_followed(tmp_path: Path, outside: Path) -> None:
    """Somebody on this machine exchanges folders while an archive is unpacked into them."""
    archive = packed(folder("d"), member("d/a", content=b"1"), member("d/canary", content=b"2"))
    middle = archive.index(b"d/canary")  # the header of the last one
    target = tmp_path / "new"
    with receiver_for(FOLDER, target, Bounds(), None) as receiver:
        receiver.feed(archive[:middle])
        staged = next(tmp_path.glob(".hatchway-*/tree"))
        (staged / "d").rename(staged / "moved")
        (staged / "d").symlink_to(outside)
        receiver.feed(archive[middle:])
        receiver.finish()
    assert (target / "moved" / "canary").read_text() == "2"


def test_what_is_there_is_merged_with(tmp_path: Path, outside: Path) -> None:
    target = tmp_path / "there"
    (target / "d" / "old").mkdir(parents=True)
    (target / "d" / "f").write_text("before")
    unpack(
        packed(folder("d"), member("d/f", content=b"after"), folder("d/old"), member("d/old/n", content=b"n")), target
    )
    assert tree(target) == {"d": "dir", "d/f": "after", "d/old": "dir", "d/old/n": "n"}
    for adds in ([member("d", content=b"x")], [folder("f"), member("f/x")]):
        (target / "f").write_text("file")
        with pytest.raises(TransferFailed):
            unpack(packed(*adds), target)
    assert (target / "f").read_text() == "file"


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_cut_off_anywhere_leaves_nothing(tmp_path: Path, outside: Path, form: int) -> None:
    archive = packed(folder("d"), member("d/f", content=bytes(1000)), member("last", content=b"x" * 600), form=form)
    end = archive.rindex(b"x") + 1
    for cut in [0, 1, 511, 512, 513, 1024, 1500, 2048, end, end + 424, end + 424 + 512]:
        with pytest.raises(UnsafeArchive, match="cut off"):
            unpack(archive[:cut], tmp_path / "new", piece=700)
        assert not (tmp_path / "new").exists()


def test_bounds(tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(*(member(f"f{n}", content=bytes(1000)) for n in range(10)))
    for bounds in ({"max_bytes": 9_999}, {"max_entries": 9}):
        with pytest.raises(UnsafeArchive) as caught:
            unpack(archive, tmp_path / "new", **bounds)
        assert caught.value.code == "download_too_large"
    assert unpack(archive, tmp_path / "new", max_bytes=10_000, max_entries=10).bytes == 10_000

    # A size that is only announced is refused before its octets come: 2 PiB by a header of 512.
    info = tarfile.TarInfo("huge")
    info.size = 2**51
    with (
        pytest.raises(TransferFailed) as caught_full,
        receiver_for(FOLDER, tmp_path / "other", Bounds(), None) as receiver,
    ):
        receiver.feed(info.tobuf(tarfile.PAX_FORMAT))
    assert caught_full.value.code == "local_disk_full"
    monkeypatch.setattr(receiving, "RESERVE", 2**60)
    with pytest.raises(TransferFailed, match="no room"):
        unpack(archive, tmp_path / "other")


def test_what_is_no_archive(tmp_path: Path, outside: Path) -> None:
    good = packed(member("a", content=b"x"))
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 2**40
    odd = tarfile.TarInfo("sparse")
    odd.type = tarfile.GNUTYPE_SPARSE
    records = tarfile.TarInfo("x")
    records.type, records.size = tarfile.XHDTYPE, 20
    bad = [
        b"<html>" * 200,
        bytes(512) + b"x" * 512,
        header.tobuf(tarfile.GNU_FORMAT),
        odd.tobuf(tarfile.GNU_FORMAT),
        packed(member("d", tarfile.DIRTYPE, size=5, content=b"12345")),
        records.tobuf() + b"99999999 path=x\n".ljust(512, b"\0"),
        records.tobuf() + b"-1 path=x\n".ljust(512, b"\0"),
        records.tobuf() + b"20 GNU.sparse.m=111\n".ljust(512, b"\0"),
        good + b"more",
        good + bytes(10**6),
        packed(member("\0")),
        packed(member("./", tarfile.DIRTYPE), member("./", tarfile.DIRTYPE)),
    ]
    for archive in bad:
        with pytest.raises(UnsafeArchive):
            unpack(archive, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_memory_does_not_depend_on_what_is_said(tmp_path: Path, outside: Path) -> None:
    """An extended header, a name or a padding that is longer than it may be is refused, not gathered."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 64 * 1024 + 1
    with pytest.raises(UnsafeArchive), receiver_for(FOLDER, tmp_path / "new", Bounds(), None) as receiver:
        receiver.feed(header.tobuf())


@given(st.integers(), st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=12)), max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_archives_stay_inside(tmp_path: Path, seed: int, changes: list[tuple[int, bytes]]) -> None:
    rng = random.Random(seed)
    adds = [
        folder("d"),
        member("d/" + "é" * 80, content=rng.randbytes(700)),
        link("d/l", "x"),
        hard("h", "d/" + "é" * 80),
    ]
    archive = bytearray(packed(*adds))
    for at, octets in changes:
        archive[at : at + len(octets)] = octets
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    with contextlib.suppress(HatchwayError):
        unpack(
            bytes(archive), place / "in" / "new" if rng.random() < 0.1 else place / "new", piece=rng.randint(1, 3000)
        )
    assert {path.name for path in place.iterdir()} <= {"new"}


def test_what_is_sent_comes_back(tmp_path: Path, outside: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    names = ["a b", "-rf", "new\nline", "é" * 120, "~", "\\", "tab\t", os.fsdecode(b"not utf-8 \xff\xfe"), ".hidden"]
    for n, name in enumerate(names):
        (source / name).write_bytes(os.urandom(n * 300))
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "link").symlink_to("../../a b")
    (source / "script").write_text("x")
    (source / "script").chmod(0o755)
    os.mkfifo(source / "fifo")
    os.utime(source / "a b", (10**9, 10**9))
    sent = source_of(source, None)
    archive = b"".join(sent.body.open())  # type: ignore[arg-type]  # not an asynchronous one
    assert sent.skipped == 1
    done = unpack(archive, tmp_path / "back", piece=777)
    assert (done.files, done.dirs, done.links) == (len(names) + 1, 3, 1)
    for name in [*names, "script"]:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert os.readlink(tmp_path / "back/deep/er/link") == "../../a b"
    assert os.access(tmp_path / "back/script", os.X_OK)
    assert (tmp_path / "back" / "a b").stat().st_mtime == 10**9
    with tarfile.open(fileobj=io.BytesIO(archive)) as other:  # and others read it, too
        assert len(other.getnames()) == len(names) + 5


def fetch(entry: FileEntry, target: Path, *pieces: bytes, finish: bool = True) -> None:
    with receiver_for(entry, target, Bounds(), None) as receiver:
        for piece in pieces:
            receiver.feed(piece)
        if finish:
            receiver.finish()


def test_one_file(tmp_path: Path, outside: Path) -> None:
    target = tmp_path / "file"
    before = os.umask(0o022)
    try:
        fetch(FILE, target, b"one", b"two")
    finally:
        os.umask(before)
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"onetwo", 0o755)
    target.chmod(0o600)
    fetch(FILE, target, b"half", finish=False)
    assert target.read_bytes() == b"onetwo"
    fetch(FILE, target, b"new")
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", 0o600)
    (tmp_path / "link").symlink_to("file")
    fetch(FILE, tmp_path / "link", b"through")  # a link of one's own, as a shell's > does it
    assert target.read_bytes() == b"through"
    fetch(FILE, Path("/dev/null"), b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    for bad in (tmp_path, tmp_path / "no" / "such", target / "below"):
        with pytest.raises(TransferFailed):
            fetch(FILE, bad, b"x")
    with pytest.raises(TransferFailed):
        fetch(FOLDER, target)
