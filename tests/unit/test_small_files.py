"""Small files are replaced whole, or stay as they were."""

import errno
import os
from pathlib import Path

import pytest

from hatchway.wire import small_files
from hatchway.wire.small_files import replace_file


@pytest.mark.parametrize("durable", [True, False])
def test_it_replaces_and_sets_the_mode(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "tag"
    path.write_text("a much longer content than the new one")
    before = os.umask(0o077)
    try:
        replace_file(path, b"new", mode=0o644, durable=durable)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_nobody_else_reads_it_where_nothing_is_said(tmp_path: Path) -> None:
    replace_file(tmp_path / "key", b"secret")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_becomes_full_leaves_the_former_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"
    replace_file(path, b"former")
    room = [4]

    def write(fd: int, octets: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        taken = min(room[0], len(octets))
        room[0] -= taken
        return os.pwrite(fd, octets[:taken], 0)

    with monkeypatch.context() as patched:
        patched.setattr(small_files.os, "write", write)
        with pytest.raises(OSError, match="full"):
            replace_file(path, b"what is new")
    assert path.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [path]


def test_what_somebody_put_in_the_way_is_not_written_to(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / ".record.new").symlink_to(other)
    with pytest.raises(OSError, match=r"symbolic|ELOOP|Too many"):
        replace_file(tmp_path / "record", b"ours")
    assert other.read_text() == "not ours"
