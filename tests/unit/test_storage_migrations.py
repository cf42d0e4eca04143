"""A database of any release, with all that it held, opens in this one: on both databases, from every migration on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, create_engine, insert, select, text
from sqlalchemy.pool import NullPool
from tests.support.databases import empty

from hatchway.domain.lifecycle import State, Verb
from hatchway.domain.shapes import Shape
from hatchway.storage import (
    accepting,
    ending,
    keys,
    migrate,
    migrations,
    operations,
    outbox,
    sandboxes,
    sessions,
    settings,
)
from hatchway.storage.database import Database
from hatchway.storage.tables import metadata
from hatchway.wire.node import Observed

__all__ = ["empty"]

HASH = b"\x01" * 32
RUNNING, GONE, PENDING = "r" * 20, "g" * 20, "p" * 20
OPEN, SESSION, KEY = "o" * 20, "s" * 20, "k" * 20


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def revisions() -> list[str]:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    return [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][::-1]


@contextmanager
def connected(where: str) -> Iterator[Connection]:
    """A connection without anything of ours."""
    url = where.replace("postgresql:", "postgresql+psycopg:", 1) if ":" in where else f"sqlite+pysqlite:///{where}"
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def _sandbox(sandbox_id: str, state: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": sandbox_id, "project": "default", "name": "näme", "state": state, "desired": state, "version": 7, "generation": 2,
        "node_id": "node-one", "observed_sequence": 2**40, "operation_id": None, "template": "seed:latest",
        "template_digest": "sha256:00", "vcpus": 1, "memory_mib": 256, "disk_mib": 1024, "metadata": {"a": "b"}, "env": {"E": "\u20ac"},
        "require_isolation": None, "isolation": "emulated", "boot_id": "boot", "cause": None, "reason": "", "last_process_id": 3,
        "created_at": 1000.5, "updated_at": 1001.5, "deleted_at": None, **changes,
    }  # fmt: skip


def _operation(operation_id: str, target: str, status: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": operation_id, "project": "default", "target": target, "kind": "create", "status": status, "phase": "x",
        "progress": None, "result": None, "error": None, "created_at": 1000.5, "started_at": None, "finished_at": None, **changes,
    }  # fmt: skip


FIRST: dict[str, list[dict[str, Any]]] = {
    "projects": [{"name": "default", "created_at": 1.0}, {"name": "other", "created_at": 2.0}],
    "api_keys": [
        {
            "id": KEY, "project": "default", "name": "first", "prefix": "hw_abcdef", "secret_hash": HASH,
            "scopes": ["read", "write", "admin"], "created_at": 1.0, "expires_at": None, "last_used_at": 5.0, "revoked_at": None,
            "development": False,
        }
    ],
    "sandboxes": [
        _sandbox(RUNNING, "running"),
        _sandbox(GONE, "deleted", deleted_at=1002.0),
        _sandbox(PENDING, "pending", desired="running", operation_id=OPEN, boot_id=None),
    ],
    "operations": [
        _operation(OPEN, PENDING, "running", started_at=1000.7),
        _operation("f" * 20, RUNNING, "failed", error={"code": "x", "cause": "y", "remedy": "z"}, finished_at=1001.0),
    ],
    "sessions": [
        {
            "id": SESSION, "project": "default", "sandbox_id": RUNNING, "process_id": 3, "spec": {"argv": ["true"]},
            "state": "running", "status": None, "created_at": 1000.9, "updated_at": 1000.9,
        }
    ],
    "events": [
        {"project": "default", "kind": "operation.accepted", "subject": RUNNING, "data": {"n": n}, "created_at": 1000.0 + n}
        for n in range(5)
    ],
    "idempotency_keys": [
        {"project": "default", "key": "k", "request_hash": HASH, "answer": {"sandbox": RUNNING}, "created_at": 1.0, "expires_at": 1e12}
    ],
    "nodes": [{"id": "node-one", "address": "unix:x", "info": {"cpus": 2}, "created_at": 1.0, "seen_at": 2.0}],
    "settings": [{"key": "token_key", "value": {"id": "i", "private": "00" * 32}}],
}  # fmt: skip
"""What a control plane of the first release had written."""


def _fill(connection: Connection) -> None:
    found = MetaData()
    found.reflect(connection)
    for table in found.sorted_tables:
        for row in FIRST.get(table.name, []):
            connection.execute(insert(table), _reflected(table, row))


def _reflected(table: Any, row: dict[str, Any]) -> dict[str, Any]:
    """SQLite's reflected tables know JSON as text."""
    return {
        name: json.dumps(value)
        if isinstance(value, dict | list) and "JSON" not in type(table.c[name].type).__name__
        else value
        for name, value in row.items()
    }


@pytest.mark.parametrize("stop", revisions())
async def test_what_the_first_release_wrote_is_there_after_every_way_up(empty: str, stop: str) -> None:
    """Up to any migration, and from there with this release: as whoever skipped releases does it, or did not."""
    with connected(empty) as connection:
        command.upgrade(_config(connection), "0001")
        _fill(connection)
    with connected(empty) as connection:
        command.upgrade(_config(connection), stop)
    if ":" not in empty:
        Path(empty).chmod(0o600)
    opened = await Database.open(empty)
    try:
        assert await opened.read(migrate.current) == migrations.HEAD

        def differences(connection: Connection) -> list[object]:
            return list(compare_metadata(MigrationContext.configure(connection), metadata))

        assert await opened.write(differences) == []
        counts = {
            name: await opened.read(
                lambda connection, name=name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()
            )
            for name in FIRST
        }
        assert counts == {name: len(rows) for name, rows in FIRST.items()}

        row = await opened.read(sandboxes.get, "default", RUNNING)
        assert (row.state, row.env, row.metadata, row.name, row.observed_sequence) == (
            State.RUNNING, {"E": "\u20ac"}, {"a": "b"}, "näme", 2**40,
        )  # fmt: skip
        key = (await opened.read(keys.list_all, "default"))[0]
        assert (key.id, key.last_used_at, {"read", "write", "admin"} <= set(key.scopes)) == (KEY, 5.0, True)
        assert (await opened.read(sessions.get, "default", SESSION)).spec == {"argv": ["true"]}
        failed = await opened.read(operations.get, "default", "f" * 20)
        assert failed.error == {"code": "x", "cause": "y", "remedy": "z"}
        assert await opened.read(settings.get, "token_key") == {"id": "i", "private": "00" * 32}

        # And it goes on from there: what was in hand is ended, what comes next is numbered on.
        unfinished = await opened.read(operations.unfinished)
        assert [one.id for one in unfinished] == [OPEN]
        seen = Observed(
            sandbox_id=PENDING, project="default", generation=2, state="running", sequence=2**41, boot_id="b"
        )
        finished = await opened.write(ending.succeed, unfinished[0], seen, 1.0)
        assert finished is not None
        assert finished.sandbox.state is State.RUNNING
        events = await opened.read(outbox.after, 0, ("default",), 100)
        assert [event.sequence for event in events[:6]] == [1, 2, 3, 4, 5, 6]
        new = accepting.NewSandbox(
            project="default", name=None, node_id="node-one", template="seed:latest", template_digest="sha256:00",
            shape=Shape(), metadata={}, env={}, require_isolation=None,
        )  # fmt: skip
        await opened.write(accepting.accept_create, new, None)
        accepted = await opened.write(accepting.accept_verb, "default", RUNNING, Verb.DELETE, None)
        assert accepted.run
    finally:
        await opened.close()


def test_no_migration_lost_its_place() -> None:
    found = revisions()
    assert found == sorted(found)
    assert found[0] == "0001"
    assert found[-1] == migrations.HEAD


async def test_an_upgrade_that_breaks_off_changes_nothing(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(empty) as connection:
        command.upgrade(_config(connection), "0001")
        _fill(connection)
    if ":" not in empty:
        Path(empty).chmod(0o600)

    def half(config: Config, revision: str) -> None:
        connection = config.attributes["connection"]
        connection.execute(text("DROP TABLE events"))
        raise RuntimeError("the power failed")

    with monkeypatch.context() as broken:
        broken.setattr(command, "upgrade", half)
        with pytest.raises(RuntimeError, match="the power failed"):
            await Database.open(empty)
    with connected(empty) as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0001"
        found = MetaData()
        found.reflect(connection)
        assert len(connection.execute(select(found.tables["events"])).all()) == 5
