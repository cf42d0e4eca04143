"""Keys in memory: a revocation holds from the moment in which it was answered."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from hatchway.control.auth import Authenticator
from hatchway.domain.errors import Unauthenticated
from hatchway.storage import keys
from hatchway.storage.database import Database


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(str(tmp_path / "test.db"))
    yield opened
    await opened.close()


def request(secret: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", f"Bearer {secret}".encode())]})


async def test_a_key_that_is_revoked_while_it_is_looked_up_is_not_remembered(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.write(keys.ensure_project, "default")

    def make(connection: Any) -> tuple[Any, str]:
        return keys.create(connection, project="default", name="one", scopes=("read",))

    row, secret = await database.write(make)
    auth = Authenticator(database)
    read = database.read

    async def read_and_revoke(*arguments: Any) -> Any:
        found = await read(*arguments)
        await database.write(keys.revoke, "default", row.id)
        auth.forget(row.id)
        return found

    monkeypatch.setattr(database, "read", read_and_revoke)
    await auth.key_of(request(secret), "read")  # this one came before the revocation
    monkeypatch.setattr(database, "read", read)
    with pytest.raises(Unauthenticated) as caught:
        await auth.key_of(request(secret), "read")
    assert caught.value.code == "key_revoked"
