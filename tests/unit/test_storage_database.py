"""A database: migrations, transactions, durability; of a file also its lock and who may read it."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError
from tests.support.databases import empty, where

from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.storage import migrate, migrations, outbox, settings
from hatchway.storage.database import Database, answers
from hatchway.storage.tables import metadata

__all__ = ["empty", "where"]


def _differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), metadata))


async def test_migrations_from_empty_make_the_tables_of_the_code(empty: str) -> None:
    database = await Database.open(empty)
    try:
        assert await database.read(migrate.current) == migrations.HEAD
        assert await database.write(_differences) == []
    finally:
        await database.close()


def test_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_current_head() == migrations.HEAD


async def test_an_open_after_the_first_changes_nothing_and_keeps_what_was_written(where: str) -> None:
    database = await Database.open(where)
    await database.write(settings.put, "name", {"a": [1, 2]})
    await database.close()
    database = await Database.open(where)
    try:
        assert await database.read(settings.get, "name") == {"a": [1, 2]}
    finally:
        await database.close()


async def test_a_database_of_a_newer_release_is_refused(empty: str) -> None:
    database = await Database.open(empty)
    await database.write(lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    await database.close()
    with pytest.raises(Unavailable) as raised:
        await Database.open(empty)
    assert raised.value.code == "database_too_new"
    # The refusal gave the lock back.
    with pytest.raises(Unavailable, match="database_too_new"):
        await Database.open(empty)


async def test_a_second_process_on_the_same_database_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    database = await Database.open(path)
    try:
        with pytest.raises(Unavailable) as raised:
            await Database.open(path)
        assert raised.value.code == "database_in_use"
    finally:
        await database.close()
    await (await Database.open(path)).close()


async def test_the_file_is_private_and_one_that_is_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    previous = os.umask(0)
    try:
        await (await Database.open(str(path))).close()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o660)
    with pytest.raises(Unavailable) as raised:
        await Database.open(str(path))
    assert raised.value.code == "database_insecure"


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"this is no database" * 1000)
    path.chmod(0o600)
    with pytest.raises(Unavailable) as raised:
        await Database.open(str(path))
    assert raised.value.code == "database_unusable"


def _pragmas(connection: Connection) -> dict[str, object]:
    names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    return {name: connection.execute(text(f"PRAGMA {name}")).scalar() for name in names}


async def test_commits_are_durable_and_keys_are_checked(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "a.db"))
    try:
        found = await database.write(_pragmas)
        assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
    finally:
        await database.close()


async def test_an_exception_rolls_the_whole_transaction_back(where: str) -> None:
    database = await Database.open(where)
    heard: list[None] = []
    database.on_commit.add(lambda: heard.append(None))

    def half(connection: Connection) -> None:
        settings.put(connection, "a", 1)
        raise ValueError("in the middle")

    try:
        with pytest.raises(ValueError, match="in the middle"):
            await database.write(half)
        assert await database.read(settings.get, "a") is None
        assert heard == [] or database.shared, "a server also says that it listens"
        heard.clear()
        await database.write(settings.put, "a", 2)
        assert heard
    finally:
        await database.close()


async def test_readers_cannot_write_and_do_not_wait_for_a_writer(where: str) -> None:
    database = await Database.open(where)
    loop = asyncio.get_running_loop()
    inside, leave = asyncio.Event(), asyncio.Event()

    def long(connection: Connection) -> None:
        settings.put(connection, "a", 1)
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(30)

    try:
        writing = asyncio.create_task(database.write(long))
        await asyncio.wait_for(inside.wait(), 30)
        assert await asyncio.wait_for(database.read(settings.get, "a"), 30) is None
        leave.set()
        await writing
        assert await database.read(settings.get, "a") == 1
        with pytest.raises(Unavailable):
            await database.read(settings.put, "a", 3)
    finally:
        leave.set()
        await database.close()


async def test_writers_that_wait_share_a_commit_and_fail_alone(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "a.db"))
    commits: list[None] = []
    database.on_commit.add(lambda: commits.append(None))

    def one(connection: Connection, number: int) -> int:
        settings.put(connection, f"n{number}", number)
        if number % 10 == 3:
            raise ValueError(f"number {number}")
        if number % 10 == 7:
            connection.execute(text("INSERT INTO projects (name, created_at) VALUES ('default', NULL)"))
        return number

    try:
        outcomes = await asyncio.gather(*(database.write(one, n) for n in range(100)), return_exceptions=True)
        assert len(commits) < 20
        for number, outcome in enumerate(outcomes):
            kept = await database.read(settings.get, f"n{number}")
            if number % 10 == 3:
                assert isinstance(outcome, ValueError)
                assert str(outcome) == f"number {number}"
                assert kept is None
            elif number % 10 == 7:
                assert isinstance(outcome, IntegrityError)
                assert kept is None
            else:
                assert outcome == kept == number
    finally:
        await database.close()


async def test_a_cancelled_writer_leaves_the_others_alone_and_close_waits_for_what_is_in_hand(where: str) -> None:
    database = await Database.open(where)
    first = asyncio.create_task(database.write(settings.put, "first", 1))
    second = asyncio.create_task(database.write(settings.put, "second", 2))
    await asyncio.sleep(0)
    first.cancel()
    await database.close()
    await second
    with pytest.raises(Unavailable, match="database_closed"):
        await database.write(settings.put, "third", 3)
    database = await Database.open(where)
    try:
        assert await database.read(settings.get, "second") == 2
    finally:
        await database.close()


async def test_a_full_disk_changes_nothing_and_goes_by(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "a.db"))

    def limit(connection: Connection, pages: int) -> None:
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))

    try:
        await database.write(limit, 1)  # SQLite takes the size that it has
        with pytest.raises(HostExhausted) as raised:
            await database.write(settings.put, "large", "x" * 1_000_000)
        assert raised.value.code == "host_disk_full"
        assert await database.read(settings.get, "large") is None
        await database.write(limit, 1_000_000)
        await database.write(settings.put, "large", "x" * 1_000_000)
        assert await database.read(settings.get, "large") == "x" * 1_000_000
    finally:
        await database.close()


_WRITER = """
import asyncio, sys
from hatchway.storage import outbox
from hatchway.storage.database import Database
async def main():
    database = await Database.open(sys.argv[1])
    number = 0
    while True:
        number += 1
        await database.write(outbox.append, "default", "test", str(number), {})
        print(number, flush=True)
asyncio.run(main())
"""


async def test_what_was_committed_survives_a_kill_at_any_moment(where: str) -> None:
    last = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, where], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            for _ in range(20):
                line = await asyncio.to_thread(process.stdout.readline)
                last = int(line)
        finally:
            process.kill()
            rest = process.stdout.read().split() if process.stdout else []
            process.wait()
        last = int(rest[-1]) if rest else last
        database = await Database.open(where)
        try:
            events = await database.read(outbox.after, 0, ("default",), 100_000)
            # Each process counts from 1; what it said to have written is there, at most one more is.
            assert int(events[-1].subject) in (last, last + 1)
            sequences = [event.sequence for event in events]
            assert sequences == sorted(set(sequences))
            if not database.shared:
                assert sequences == list(range(1, len(events) + 1))
        finally:
            await database.close()


async def test_a_listener_that_fails_does_not_stop_the_writing(where: str) -> None:
    database = await Database.open(where)

    def fail() -> None:
        raise ValueError("a mistake of ours")

    database.on_commit.add(fail)
    await database.write(answers)
    await database.write(answers)
    await database.close()
