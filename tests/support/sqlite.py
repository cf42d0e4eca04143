"""A migrated SQLite file for every test that wants one, made once in each process: the migrations take longer than most tests."""

import functools
import shutil
import tempfile
import weakref
from pathlib import Path

from hatchway.storage import dialect, migrate


def migrated(path: Path) -> Path:
    """Puts a file without rows to `path`, as the newest release leaves it; returns it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(shutil.copy(_template(), path))


@functools.cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hw-db-"))
    weakref.finalize(_template, shutil.rmtree, folder, ignore_errors=True)
    store = dialect.Sqlite(str(folder / "migrated.db"))
    store.open_writer()
    (outcome,) = store.write([migrate.upgrade])
    assert outcome.error is None, outcome.error
    store.close_writer()
    return store.path
