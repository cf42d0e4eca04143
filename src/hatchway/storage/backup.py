"""Copies of an SQLite database, made beside the process that works on it, and their way back."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory

from hatchway.domain.errors import NotFound, Unavailable, Unprocessable
from hatchway.storage import migrations

REPLACED = ".replaced"
"""What a restored database replaced is kept under this ending, until the next time."""


def copy(source: Path, target: Path) -> None:
    """Writes the state of this moment into a new file, whole and by itself; writers are not held up.

    Raises `NotFound("no_database")`, `Unavailable("database_unusable")`, `OSError`.
    """
    if not source.exists():
        raise NotFound("no_database", f"There is no database {source}.", "`hatchway up` makes one.")
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        with closing(sqlite3.connect(source)) as original, closing(sqlite3.connect(target)) as made:
            original.backup(made)
            made.execute("PRAGMA journal_mode = DELETE")
        check(target)
    except sqlite3.DatabaseError as error:
        target.unlink(missing_ok=True)
        raise Unavailable("database_unusable", f"{source} cannot be copied: {error}.", "Look at the disk.") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def check(path: Path) -> None:
    """Raises `Unprocessable("backup_unusable")` for a file that is no whole database of this release or an earlier one."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            verdict = connection.execute("PRAGMA integrity_check").fetchone()[0]
            stands_at = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.DatabaseError as error:
        raise _unusable(str(error)) from error
    if verdict != "ok":
        raise _unusable(verdict)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if stands_at is None or stands_at[0] not in known:
        raise _unusable("it was written by a release that this one does not know")


def put_back(copied: Path, database: Path) -> None:
    """Replaces a database that no process works on by a copy, which was checked and is used up. What was there is kept beside it."""
    check(copied)
    for ending in ("-wal", "-shm"):
        if database.exists() and Path(f"{database}{ending}").exists():
            with closing(sqlite3.connect(database)) as connection:  # so that what is kept is whole
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        Path(f"{database}{ending}").unlink(missing_ok=True)
    if database.exists():
        database.replace(f"{database}{REPLACED}")
    _sync(copied)
    copied.replace(database)
    _sync(database.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unusable(why: str) -> Unprocessable:
    return Unprocessable("backup_unusable", f"The copy cannot be used: {why}.", "Take another one.")
