"""What is done to the database without the API: the first key of a production service is made this way, and backups are.

Runs as control's user, in a process of its own. The lock of a database file keeps what changes it apart from a service that is up;
one on a server is shared anyway.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hatchway.control import views
from hatchway.control.config import ControlConfig
from hatchway.control.keys import CreateKey
from hatchway.domain.checking import decode
from hatchway.storage import backup as copies
from hatchway.storage import keys
from hatchway.storage.database import Connection, Database

BACKUP = "backup.part"
"""Name of a copy on its way, in control's folder."""


def create_key(
    config: ControlConfig, name: str, scopes: Sequence[str], expires_in_s: float | None, *, e2b: bool = False
) -> dict[str, Any]:
    """Makes a key of the project `default`; the answer has its secret, this once. Raises what a request's check does."""
    body: dict[str, Any] = {"name": name, "scopes": list(scopes), "e2b": e2b}
    if expires_in_s is not None:
        body["expires_in_s"] = expires_in_s
    checked = decode(msgspec.json.encode(body), CreateKey)

    def make(connection: Connection) -> dict[str, Any]:
        keys.ensure_project(connection, keys.DEFAULT_PROJECT)
        expires_at = None if checked.expires_in_s is None else time.time() + checked.expires_in_s
        chosen = tuple(sorted(set(checked.scopes), key=keys.SCOPES.index))
        row, secret = keys.create(
            connection,
            project=keys.DEFAULT_PROJECT,
            name=checked.name,
            scopes=chosen,
            expires_at=expires_at,
            e2b=checked.e2b,
        )
        return {**views.key_fields(row), "key": secret}

    made: dict[str, Any] = _write(config, make)
    return made


def list_keys(config: ControlConfig) -> list[dict[str, Any]]:
    """The keys of the project `default` that work or have expired."""

    def read(connection: Connection) -> list[dict[str, Any]]:
        return [views.key_fields(row) for row in keys.list_all(connection, keys.DEFAULT_PROJECT)]

    found: list[dict[str, Any]] = _write(config, read)
    return found


def revoke_key(config: ControlConfig, key_id: str) -> None:
    """Ends a key. Raises `NotFound("unknown_key")`."""
    _write(config, lambda connection: keys.revoke(connection, keys.DEFAULT_PROJECT, key_id))


def revoke_development_keys(config: ControlConfig) -> list[str]:
    """Ends every key that was made for development, and removes the file of theirs that is beside the database; returns their ids."""

    def revoke(connection: Connection) -> list[str]:
        found = keys.development_keys(connection)
        for row in found:
            keys.revoke(connection, row.project, row.id)
        return [row.id for row in found]

    revoked: list[str] = _write(config, revoke)
    config.development_key.unlink(missing_ok=True)
    return revoked


def backup(config: ControlConfig) -> str:
    """Copies the database file, beside whoever works on it, and returns the copy's name in the folder. Raises what `backup.copy` does."""
    made = config.folder / BACKUP
    made.unlink(missing_ok=True)
    copies.copy(Path(config.database), made)
    return made.name


def put_back(config: ControlConfig) -> None:
    """Takes the copy that lies in the folder for the database. Raises `Unprocessable("backup_unusable")`; then nothing has changed."""
    copied = config.folder / BACKUP
    try:
        copies.put_back(copied, Path(config.database))
    finally:
        copied.unlink(missing_ok=True)


def _write(config: ControlConfig, transaction: Callable[[Connection], Any]) -> Any:
    async def run() -> Any:
        database = await Database.open(config.database, password=config.database_password)
        try:
            return await database.write(transaction)
        finally:
            await database.close()

    return asyncio.run(run())
