"""Room that is held for a full disk, on real small file systems."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.node_parts import Node

from hatchway.domain.errors import HostExhausted
from hatchway.node import record as records
from hatchway.storage import settings
from hatchway.storage.database import Database
from hatchway.wire.ballast import PIECE, Ballast

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "small", folder], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=20)


def fill(folder: Path) -> Path:
    """Leaves no octet."""
    file = folder / "filler"
    with file.open("ab", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    return file


def free(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def test_it_is_given_up_by_pieces_and_taken_again(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "ballast", 3 * PIECE - 5)
    assert not ballast.whole
    assert ballast.keep()
    assert ballast.keep()
    assert (tmp_path / "ballast").stat().st_blocks * 512 >= 3 * PIECE - 8192
    assert [ballast.give() for _ in range(4)] == [True, True, True, False]
    assert not ballast.whole
    assert ballast.keep()
    assert Ballast(tmp_path / "ballast", PIECE).keep()
    assert (tmp_path / "ballast").stat().st_size == PIECE


def test_none_is_taken_where_it_cannot_be(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path / "missing" / "ballast", PIECE)
    assert not ballast.keep()
    assert not ballast.give()


@needs_root
def test_a_disk_with_little_room_keeps_it(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(12 << 20))
    ballast = Ballast(small_disk / "ballast", 3 << 20)
    assert not ballast.keep()
    (small_disk / "other").unlink()
    assert ballast.keep()


@needs_root
async def test_a_full_disk_takes_what_makes_room_and_nothing_new(small_disk: Path) -> None:
    database = await Database.open(str(small_disk / "a.db"), ballast=4 << 20)
    try:
        await database.require_room()
        for number in range(30):
            filler = fill(small_disk)
            assert free(small_disk) < 4096
            await database.write(settings.put, f"key{number}", "x" * 20_000)
        with pytest.raises(HostExhausted) as raised:
            await database.require_room()
        assert raised.value.code == "host_disk_full"
        assert raised.value.remedy
        for number in range(400):  # it ends when all is given up
            filler = fill(small_disk)
            try:
                await database.write(settings.put, f"more{number}", "x" * 40_000)
            except HostExhausted:
                break
        else:
            pytest.fail("the disk took more than it has")
        filler.unlink()
        await database.write(settings.put, "last", 1)
        await database.require_room()
        assert await database.read(settings.get, "key29") == "x" * 20_000
    finally:
        await database.close()


@needs_root
async def test_a_nodes_records_say_what_happened_although_the_disk_is_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(small_disk, monkeypatch)
    stopped, deleted = node.spec(), node.spec()
    for spec in (stopped, deleted):
        await node.sandboxes.create(spec)
    assert node.context.ballast.keep()
    fill(small_disk)
    assert (await node.sandboxes.get(stopped.sandbox_id).stop("", 0.1)).state == "stopped"
    known = {record.sandbox_id: record.state for _, record in records.read_all(small_disk) if record is not None}
    assert known[stopped.sandbox_id] == "stopped"
    fill(small_disk)
    assert (await node.sandboxes.get(deleted.sandbox_id).delete()).state == "deleted"
    assert not (small_disk / deleted.sandbox_id).exists()
    # A new one is not worth the last room.
    left = (small_disk / ".ballast").stat().st_size
    fill(small_disk)
    results = await asyncio.gather(node.sandboxes.create(node.spec()), return_exceptions=True)
    assert isinstance(results[0], HostExhausted)
    assert (small_disk / ".ballast").stat().st_size <= left
