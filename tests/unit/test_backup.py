"""`hatchway backup`: whole copies beside a writer, and their way back."""

import asyncio
import os
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hatchway.domain.errors import HatchwayError, NotFound, Unprocessable
from hatchway.storage import backup, outbox, settings
from hatchway.storage.database import Database
from hatchway.supervisor import backup as copies
from hatchway.supervisor import folder
from hatchway.supervisor.settings import Settings


async def test_a_copy_beside_a_writer_is_whole(tmp_path: Path) -> None:
    source = tmp_path / "a.db"
    opened = await Database.open(str(source))

    async def write() -> None:
        for number in range(300):
            await opened.write(outbox.append, "default", "test", str(number), {"x": "y" * 500})

    try:
        writing = asyncio.create_task(write())
        made = []
        while not writing.done():
            made.append(tmp_path / f"copy-{len(made)}")
            await asyncio.to_thread(backup.copy, source, made[-1])
        await writing
    finally:
        await opened.close()
    assert made
    for one in made:
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
        copied = await Database.open(str(one))
        try:
            events = await copied.read(outbox.after_any, 0, 1000)
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        finally:
            await copied.close()


async def test_what_is_put_back_is_what_there_is_and_what_was_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    opened = await Database.open(str(path))
    await opened.write(settings.put, "n", 1)
    backup.copy(path, tmp_path / "copy")
    await opened.write(settings.put, "n", 2)
    await opened.close()
    backup.put_back(tmp_path / "copy", path)
    opened = await Database.open(str(path))
    assert await opened.read(settings.get, "n") == 1
    await opened.close()
    Path(f"{path}{backup.REPLACED}").rename(tmp_path / "copy")
    backup.put_back(tmp_path / "copy", path)
    opened = await Database.open(str(path))
    assert await opened.read(settings.get, "n") == 2
    await opened.close()


@pytest.mark.parametrize("what", ["empty", "text", "cut", "newer", "altered"])
async def test_what_is_no_copy_is_refused_and_nothing_changes(tmp_path: Path, what: str) -> None:
    path, copied = tmp_path / "a.db", tmp_path / "copy"
    opened = await Database.open(str(path))
    for number in range(200):
        await opened.write(outbox.append, "default", "test", str(number), {"x": "y" * 500})
    await opened.close()
    backup.copy(path, copied)
    if what == "empty":
        copied.write_bytes(b"")
    elif what == "text":
        copied.write_bytes(b"this is no database" * 100)
    elif what == "cut":
        os.truncate(copied, copied.stat().st_size // 2)
    elif what == "newer":
        with closing(sqlite3.connect(copied)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
    else:
        content = bytearray(copied.read_bytes())
        content[8192 : 8192 + 64] = os.urandom(64)
        copied.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(Unprocessable) as refused:
        backup.put_back(copied, path)
    assert refused.value.code == "backup_unusable"
    assert path.read_bytes() == before


def test_there_is_nothing_to_copy(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        backup.copy(tmp_path / "a.db", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def installation(tmp_path: Path) -> Settings:
    """A data folder as `up` leaves it, with a database."""
    made = Settings(data_dir=tmp_path / "data", uid_base=1_900_400_000 if os.geteuid() == 0 else None)
    tmp_path.chmod(0o755)
    from hatchway.supervisor import offline

    offline.create_key(made, "first", ["read"], None)
    return made


def test_the_command_copies_and_restores_an_installation(installation: Settings, tmp_path: Path) -> None:
    from hatchway.supervisor import offline

    target = tmp_path / "backup.db"
    copies.make(installation, target)
    assert (stat.S_IMODE(target.stat().st_mode), target.stat().st_uid) == (0o600, os.geteuid())
    with pytest.raises(HatchwayError) as there:
        copies.make(installation, target)
    assert there.value.code == "backup_exists"
    offline.create_key(installation, "second", ["read"], None)
    assert len(offline.list_keys(installation)) == 2

    lock = folder.Lock(installation)
    lock.take()
    try:
        copies.make(installation, tmp_path / "beside.db")
        with pytest.raises(HatchwayError) as up:
            copies.put_back(installation, target)
        assert up.value.code == "service_is_up"
    finally:
        lock.release()

    copies.put_back(installation, target)
    assert [key["name"] for key in offline.list_keys(installation)] == ["first"]
    assert sorted(path.name for path in installation.control.iterdir() if path.name.startswith("backup")) == []
    with pytest.raises(NotFound):
        copies.put_back(installation, tmp_path / "nowhere")


def test_a_database_on_a_server_is_copied_by_its_own_programs(installation: Settings, tmp_path: Path) -> None:
    there = replace(installation, database_url="postgresql:///x")
    for work in (copies.make, copies.put_back):
        with pytest.raises(Unprocessable) as refused:
            work(there, tmp_path / "copy")
        assert refused.value.code == "backup_on_server"
        assert "pg_dump" in refused.value.remedy
