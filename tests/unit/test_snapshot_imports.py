"""Snapshots that archives bring to a node: whole and there, or nothing of them; whoever dies meanwhile."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from hatchway.domain.errors import Conflict, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.node.sessions.seam import Standing
from hatchway.node.snapshots import RECORD, Snapshots
from hatchway.node.vmm import disk as disks
from hatchway.wire.node import Snapshot
from hatchway.wire.small_files import replace_file


def described(kind: str = "disk") -> Snapshot:
    return Snapshot(
        snapshot_id=new_id(),
        sandbox_id=new_id(),
        project="default",
        kind=kind,
        template_digest="sha256:" + "0" * 64,
        shape=Shape(),
    )


async def bring(folder: Path) -> Sequence[Standing]:
    """A disk, as it comes out of an archive."""
    (folder / disks.RAW_TOP).write_bytes(b"d" * 8192)
    replace_file(folder / disks.RECORD, msgspec.json.encode((disks.LayerFile(disks.RAW_TOP, "raw"),)))
    return ()


async def test_what_was_brought_is_a_snapshot_like_any_other(tmp_path: Path) -> None:
    snapshots, wanted = Snapshots(tmp_path / "snapshots"), described()
    made = await snapshots.take_in(wanted, bring)
    assert (made.sandbox_id, made.kind, made.memory_bytes) == (wanted.sandbox_id, "disk", 0)
    assert made.disk_bytes > 0
    assert made.digest.startswith("sha256:")

    async def never(_: Path) -> Sequence[Standing]:
        raise AssertionError("it is there already")

    assert await snapshots.take_in(wanted, never) == made
    later = Snapshots(tmp_path / "snapshots")
    later.load()
    assert later.all() == (made,)
    later.verify(made.snapshot_id)
    (later.folder_of(made.snapshot_id) / disks.RAW_TOP).write_bytes(b"e" * 8192)
    with pytest.raises(Conflict, match="not what was written"):
        later.verify(made.snapshot_id)
    await later.delete(made.snapshot_id)
    assert list((tmp_path / "snapshots").iterdir()) == []


async def test_what_is_not_whole_is_no_snapshot(tmp_path: Path) -> None:
    snapshots, wanted = Snapshots(tmp_path / "snapshots"), described()

    async def broken(folder: Path) -> Sequence[Standing]:
        await bring(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        await snapshots.take_in(wanted, broken)
    assert list((tmp_path / "snapshots").iterdir()) == []

    # A deletion comes while it is unpacked.
    entered = asyncio.Event()

    async def endless(folder: Path) -> Sequence[Standing]:
        await bring(folder)
        entered.set()
        await asyncio.Event().wait()
        return ()

    task = asyncio.create_task(snapshots.take_in(wanted, endless))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list((tmp_path / "snapshots").iterdir()) == []
    with pytest.raises(NotFound):
        snapshots.get(wanted.snapshot_id)

    # The node dies: what has no record was never finished.
    folder = snapshots.folder_of(wanted.snapshot_id)
    folder.mkdir()
    await bring(folder)
    later = Snapshots(tmp_path / "snapshots")
    later.load()
    assert (later.all(), folder.exists()) == ((), False)
    assert (await later.take_in(wanted, bring)).snapshot_id == wanted.snapshot_id
    assert (folder / RECORD).exists()
