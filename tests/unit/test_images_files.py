"""Files that survive crashes, sparse copies, the cache of parts and the build's lock."""

import subprocess
import sys
from pathlib import Path

import pytest

from hatchway.domain.errors import Unavailable
from hatchway.node.images import files
from hatchway.node.images.lock import exclusive
from hatchway.node.images.parts import PartCache, key_of
from hatchway.node.images.progress import BuildProgress, silent


def sparse(path: Path, pieces: dict[int, bytes], size: int) -> Path:
    with path.open("wb") as file:
        for offset, data in pieces.items():
            file.seek(offset)
            file.write(data)
        file.truncate(size)
    return path


def test_sparse_copy_keeps_content_and_holes(tmp_path: Path) -> None:
    source = sparse(tmp_path / "a", {0: b"x" * 5000, 40 << 20: b"y" * 10}, 64 << 20)
    files.sparse_copy(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == source.read_bytes()
    assert files.size_on_disk(tmp_path / "b") < 1 << 20


def test_sparse_digest_depends_on_content_only(tmp_path: Path) -> None:
    holes = sparse(tmp_path / "a", {70_000: b"data", 9 << 20: b"end"}, 10 << 20)
    full = tmp_path / "b"
    full.write_bytes(holes.read_bytes())
    digest = files.sha256_sparse(holes)
    assert files.sha256_sparse(full) == digest
    other = [
        sparse(tmp_path / "c", {70_000: b"data", 9 << 20: b"end"}, (10 << 20) + 1),
        sparse(tmp_path / "d", {70_001: b"data", 9 << 20: b"end"}, 10 << 20),
        sparse(tmp_path / "e", {70_000 + 65_536: b"data", 9 << 20: b"end"}, 10 << 20),
        sparse(tmp_path / "f", {}, 10 << 20),
    ]
    assert digest not in {files.sha256_sparse(path) for path in other}


def test_sparse_digest_of_empty_files(tmp_path: Path) -> None:
    assert files.sha256_sparse(sparse(tmp_path / "a", {}, 0)) != files.sha256_sparse(sparse(tmp_path / "b", {}, 1))


def test_publishing_what_is_there_keeps_the_first(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for content in ("one", "two"):
        made = tmp_path / "made"
        made.mkdir()
        (made / "file").write_text(content)
        files.publish_folder(made, final, file_mode=0o444)
        assert not made.exists()
    assert (final / "file").read_text() == "one"
    assert (final / "file").stat().st_mode & 0o777 == 0o444


def keep(cache: PartCache, kind: str, key: str, content: str) -> None:
    with cache.work() as work:
        made = work / "made"
        made.mkdir()
        (made / "file").write_text(content)
        cache.keep(kind, key, made, {"content": content})


def test_parts_are_found_by_what_they_are_made_of(tmp_path: Path) -> None:
    cache = PartCache(tmp_path)
    cache.clean()
    keep(cache, "base", key_of("a"), "A")
    keep(cache, "kernel", key_of("a"), "K")
    found = cache.find("base", key_of("a"))
    assert found is not None
    assert found.path("file").read_text() == "A"
    assert found.facts == {"content": "A"}
    assert cache.find("base", key_of("b")) is None
    keep(cache, "base", key_of("b"), "B")
    assert cache.find("base", key_of("a")) is None, "one of a kind is kept"
    assert cache.find("kernel", key_of("a")) is not None


def test_a_damaged_part_is_made_again(tmp_path: Path) -> None:
    cache = PartCache(tmp_path)
    cache.clean()
    keep(cache, "base", "0" * 64, "whole")
    found = cache.find("base", "0" * 64)
    assert found is not None
    found.path("file").write_text("hal")
    assert cache.find("base", "0" * 64) is None
    keep(cache, "base", "0" * 64, "whole")
    assert cache.find("base", "0" * 64) is not None


def test_leftovers_of_an_interrupted_build_are_removed(tmp_path: Path) -> None:
    cache = PartCache(tmp_path)
    cache.clean()
    keep(cache, "base", "0" * 64, "whole")
    (tmp_path / "work/tmpabc/root").mkdir(parents=True)
    cache.clean()
    assert list((tmp_path / "work").iterdir()) == []
    assert cache.find("base", "0" * 64) is not None


def test_keys_tell_their_inputs_apart() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("abc", "")}) == 4


HOLDER = """
import sys
from pathlib import Path
from hatchway.node.images.lock import exclusive
from hatchway.node.images.progress import BuildProgress, silent
with exclusive(Path(sys.argv[1]), silent, within_s=5) as report:
    report(BuildProgress(phase="root_tree", fraction=0.25, message="Unpacking git"))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_waiter_sees_what_the_other_builder_does_and_gives_up(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    seen: list[BuildProgress] = []
    with pytest.raises(Unavailable, match="build_busy"), exclusive(tmp_path, seen.append, within_s=0.0):
        pytest.fail("the lock was given twice")
    assert [event.phase for event in seen] == ["waiting"]
    assert seen[0].fraction == 0.25
    assert str(holder.pid) in seen[0].message
    assert "Unpacking git" in seen[0].message


def test_the_lock_of_a_killed_builder_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    with exclusive(tmp_path, silent, within_s=30.0):
        assert True
    assert not (tmp_path / ".building").exists()
