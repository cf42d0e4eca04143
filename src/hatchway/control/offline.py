"""What is done to the API keys while no control process runs: the first key of a production service is made this way.

Runs as control's user, in a process of its own; the database's lock keeps it apart from a service that is up.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hatchway.control import views
from hatchway.control.keys import CreateKey
from hatchway.domain.checking import decode
from hatchway.storage import keys
from hatchway.storage.database import Connection, Database


def create_key(database: Path, name: str, scopes: Sequence[str], expires_in_s: float | None) -> dict[str, Any]:
    """Makes a key of the project `default`; the answer has its secret, this once. Raises what a request's check does."""
    body: dict[str, Any] = {"name": name, "scopes": list(scopes)}
    if expires_in_s is not None:
        body["expires_in_s"] = expires_in_s
    checked = decode(msgspec.json.encode(body), CreateKey)

    def make(connection: Connection) -> dict[str, Any]:
        keys.ensure_project(connection, keys.DEFAULT_PROJECT)
        expires_at = None if checked.expires_in_s is None else time.time() + checked.expires_in_s
        chosen = tuple(sorted(set(checked.scopes), key=keys.SCOPES.index))
        row, secret = keys.create(
            connection, project=keys.DEFAULT_PROJECT, name=checked.name, scopes=chosen, expires_at=expires_at
        )
        return {**views.key_fields(row), "key": secret}

    made: dict[str, Any] = _write(database, make)
    return made


def list_keys(database: Path) -> list[dict[str, Any]]:
    """The keys of the project `default` that work or have expired."""

    def read(connection: Connection) -> list[dict[str, Any]]:
        return [views.key_fields(row) for row in keys.list_all(connection, keys.DEFAULT_PROJECT)]

    found: list[dict[str, Any]] = _write(database, read)
    return found


def revoke_key(database: Path, key_id: str) -> None:
    """Ends a key. Raises `NotFound("unknown_key")`."""
    _write(database, lambda connection: keys.revoke(connection, keys.DEFAULT_PROJECT, key_id))


def revoke_development_keys(database: Path) -> list[str]:
    """Ends every key that was made for development, and removes the file of theirs that is beside the database; returns their ids."""

    def revoke(connection: Connection) -> list[str]:
        found = keys.development_keys(connection)
        for row in found:
            keys.revoke(connection, row.project, row.id)
        return [row.id for row in found]

    revoked: list[str] = _write(database, revoke)
    (database.parent / "dev.key").unlink(missing_ok=True)
    return revoked


def _write(path: Path, transaction: Callable[[Connection], Any]) -> Any:
    async def run() -> Any:
        database = await Database.open(str(path))
        try:
            return await database.write(transaction)
        finally:
            await database.close()

    return asyncio.run(run())
