"""The databases that every test of storage and of the control plane runs on."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support import postgres
from tests.support.sqlite import migrated

from hatchway.storage import keys
from hatchway.storage.database import Database

BOTH = ("sqlite", "postgresql")


@pytest.fixture(params=BOTH)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of either kind, as `Database.open` takes it."""
    if request.param == "sqlite":
        yield str(migrated(tmp_path / "a.db"))
    else:
        with postgres.database_url() as url:
            yield url


@pytest.fixture(params=BOTH)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The same without any table."""
    if request.param == "sqlite":
        yield str(tmp_path / "a.db")
    else:
        with postgres.database_url(empty=True) as url:
            yield url


@pytest.fixture
async def database(where: str) -> AsyncIterator[Database]:
    """An open database with two projects."""
    opened = await Database.open(where)
    await opened.write(keys.ensure_project, "default")
    await opened.write(keys.ensure_project, "other")
    yield opened
    await opened.close()
