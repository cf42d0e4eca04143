"""Credentials through the API, the SDK and the command line, with a real broker behind: what is shown, and where a value never is."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.broker_world import CANARY, HOST, World, world
from tests.support.control_fixtures import database_url, folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.broker.config import Lent
from hatchway.client import AsyncHatchway, Forbidden, Hatchway, NotFound, Unprocessable
from hatchway.control.main import ControlConfig
from hatchway.storage import credentials
from hatchway.storage.database import Database

__all__ = ["database_url", "folder", "node"]

VALUE = CANARY.decode()
on_sqlite = pytest.mark.parametrize("database_url", [None], ids=["sqlite"])
"""For what has nothing to do with the database."""
STORED = {"source": {"kind": "store", "value": VALUE}, "hosts": [HOST, "*.files.example"]}


@pytest.fixture
async def broker(folder: Path) -> AsyncIterator[World]:
    lent = {"TEAM_TOKEN": Lent(projects=frozenset({"default"}), hosts=(HOST, "**.files.example"))}
    async with world(folder / "world", variables=lent) as made:
        yield made


@pytest.fixture
async def service(folder: Path, node: NodeDouble, database_url: str | None, broker: World) -> AsyncIterator[Service]:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, broker_socket=broker.rpc_path
    )
    async with in_process(config) as running:
        await running.ready()
        yield running


async def put(service: Service, name: str = "github/bot", **changes: Any) -> tuple[int, dict[str, Any]]:
    answer = await service.http.put(f"/v1/credentials/{name}", json={**STORED, **changes})
    assert VALUE not in answer.text
    return answer.status_code, answer.json()


async def test_a_credential_from_its_making_to_its_end(service: Service, broker: World) -> None:
    status, made = await put(service)
    assert status == 201, made
    credential = made["credential"]
    assert credential["name"] == "github/bot"
    assert credential["source"] == {"kind": "store"}
    assert credential["hosts"] == [HOST, "*.files.example"]
    assert (credential["version"], credential["available"], credential["error"]) == (1, True, None)
    assert broker.sources._store.secret("default", "github/bot").reveal() == CANARY

    status, changed = await put(service, hosts=[HOST])
    assert (status, changed["credential"]["version"]) == (200, 2)
    shown = await service.http.get("/v1/credentials/github/bot")
    assert shown.json()["credential"]["available"] is None
    looked = await service.http.get("/v1/credentials/github/bot?check=true")
    assert looked.json()["credential"]["available"] is True
    listed = (await service.http.get("/v1/credentials")).json()["credentials"]
    assert [one["name"] for one in listed] == ["github/bot"]

    assert (await service.http.delete("/v1/credentials/github/bot")).status_code == 204
    assert (await service.http.get("/v1/credentials/github/bot")).json()["code"] == "unknown_credential"
    assert (await service.http.delete("/v1/credentials/github/bot")).status_code == 404
    assert not list(broker.sources._store.all())


async def test_the_value_is_nowhere_but_in_the_broker(
    service: Service, broker: World, folder: Path, caplog: pytest.LogCaptureFixture, database_url: str | None
) -> None:
    """Not in an answer, an event, an idempotency row, the database's files or a log; on the broker's disk only sealed."""
    caplog.set_level(logging.DEBUG)
    await put(service)
    same = {"idempotency-key": "k" * 20}
    await service.http.put("/v1/credentials/other", json=STORED, headers=same)
    await service.http.put("/v1/credentials/other", json={**STORED, "hosts": ["2130706433"]}, headers=same)
    await service.http.put("/v1/credentials/UPPER", json=STORED)
    await service.http.put(
        "/v1/credentials/other", content=json.dumps(STORED)[:-3], headers={"content-type": "application/json"}
    )
    await service.http.put("/v1/credentials/other", json={**STORED, "more": VALUE})
    await service.http.put("/v1/credentials/other", json={"source": {"kind": VALUE}, "hosts": [HOST]})
    database = await Database.open(database_url) if database_url else None
    if database is not None:
        from sqlalchemy import text

        rows = await database.read(
            lambda connection: [
                str(row)
                for table in ("credentials", "events", "idempotency_keys", "settings")
                for row in connection.execute(text(f"SELECT * FROM {table}"))
            ]
        )
        await database.close()
        assert any("github/bot" in row for row in rows)
        assert not any(VALUE in row or "C4n4ry" in row for row in rows)
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(path.suffix == ".sealed" for path in found)
    assert not [path for path, content in found.items() if CANARY in content or b"C4n4ry" in content]
    assert "C4n4ry" not in caplog.text


REFUSED = [
    ({"source": {"kind": "store", "value": "long enough\nx: y"}}, "credential_value"),
    ({"source": {"kind": "store", "value": "short"}}, "credential_value"),
    ({"source": {"kind": "store"}}, "invalid_field"),
    ({"source": {"kind": "store", "value": VALUE, "variable": "X"}}, "invalid_field"),
    ({"source": {"kind": "vault", "server": "x", "mount": "y", "path": "z"}}, "invalid_field"),
    ({"source": {"kind": "vault", "server": "x", "mount": "y", "path": "../z", "field": "f"}}, "vault_path"),
    ({"source": {"kind": "vault", "server": "x", "mount": "y", "path": "z", "field": "f"}}, "not_lent"),
    ({"source": {"kind": "env", "variable": "PATH"}}, "not_lent"),
    ({"source": {"kind": "file", "file": "../../etc/shadow"}}, "not_lent"),
    ({"source": {"kind": "command", "value": VALUE}}, "invalid_field"),
    ({"hosts": []}, "invalid_field"),
    ({"hosts": ["https://api.example"]}, "credential_hosts"),
    ({"hosts": ["*"]}, "credential_hosts"),
    ({"hosts": ["127.0.0.1"]}, "credential_hosts"),
]


@on_sqlite
async def test_c18_what_is_refused_leaves_the_former_one(service: Service, broker: World) -> None:
    await put(service)
    for body, code in REFUSED:
        status, refused = await put(service, **body)
        assert (refused["code"], status) == (code, 403 if code == "not_lent" else 422)
        status, never = await put(service, "never-made", **body)
        assert never["code"] == code
    listed = (await service.http.get("/v1/credentials")).json()["credentials"]
    assert [(one["name"], one["version"]) for one in listed] == [("github/bot", 1)]
    assert broker.sources._store.secret("default", "github/bot").reveal() == CANARY


@on_sqlite
async def test_c18_a_variable_that_the_operator_lends(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"kind": "env", "variable": "TEAM_TOKEN"}
    status, made = await put(service, source=source, hosts=[HOST])
    assert status == 201
    assert made["credential"]["available"] is False
    assert "TEAM_TOKEN is not set" in made["credential"]["error"]
    monkeypatch.setenv("TEAM_TOKEN", VALUE)
    looked = (await service.http.get("/v1/credentials/github/bot?check=true")).json()["credential"]
    assert (looked["available"], looked["source"]) == (True, source)
    status, refused = await put(service, source=source, hosts=["evil.test"])
    assert (status, refused["code"]) == (403, "not_lent")
    made = await service.http.post("/v1/projects", json={"name": "tenant"})
    key = (await service.http.post("/v1/keys", json={"name": "k", "project": "tenant", "scopes": ["admin"]})).json()
    async with service.client(key["key"]["key"]) as client:
        answer = await client.put("/v1/credentials/x", json={"source": source, "hosts": [HOST]})
        assert answer.json()["code"] == "not_lent"


async def test_a_project_sees_its_own_and_takes_it_along(service: Service, broker: World) -> None:
    await put(service)
    await service.http.post("/v1/projects", json={"name": "tenant"})
    key = (await service.http.post("/v1/keys", json={"name": "k", "project": "tenant", "scopes": ["admin"]})).json()
    async with service.client(key["key"]["key"]) as client:
        assert (await client.get("/v1/credentials")).json()["credentials"] == []
        assert (await client.get("/v1/credentials/github/bot")).status_code == 404
        assert (await client.delete("/v1/credentials/github/bot")).status_code == 404
        assert (await client.put("/v1/credentials/github/bot", json=STORED)).status_code == 201
    assert len(list(broker.sources._store.all())) == 2
    refused = (await service.http.delete("/v1/projects/tenant")).json()
    assert (refused["code"], refused["objects"]) == ("project_not_empty", {"credentials": 1})
    await service.http.delete("/v1/projects/tenant?force=true")
    async with asyncio.timeout(WITHIN):
        while (await service.http.get("/v1/projects/tenant")).status_code != 404:
            await asyncio.sleep(0.02)
    assert [one.project for one in broker.sources._store.all()] == ["default"]


async def test_two_changes_at_once_and_one_that_died_in_the_middle(
    service: Service, database_url: str | None, folder: Path
) -> None:
    answers = await asyncio.gather(*(put(service, hosts=[f"h{number}.example"]) for number in range(8)))
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 201, 409}
    assert {body["code"] for status, body in answers if status == 409} <= {"credential_busy"}
    last = (await service.http.get("/v1/credentials/github/bot?check=true")).json()["credential"]
    assert last["available"] is True
    if database_url is None:
        return
    database = await Database.open(database_url)
    await database.write(
        credentials.begin, "default", "github/bot", kind="store", source={}, hosts=[HOST]
    )  # its process dies here
    assert (await put(service))[1]["code"] == "credential_busy"
    now = time.time
    assert (await service.http.delete("/v1/credentials/github/bot")).json()["code"] == "credential_busy"
    try:
        credentials.time.time = lambda: now() + credentials.CHANGES_WITHIN_S + 1  # type: ignore[attr-defined]
        assert (await put(service))[0] == 200
    finally:
        credentials.time.time = now  # type: ignore[attr-defined]
    await database.close()


@on_sqlite
async def test_a_new_master_key(service: Service, broker: World) -> None:
    await put(service)
    before = broker.sources._store.key_id
    answer = await service.http.post("/v1/master-key/rotate")
    assert answer.status_code == 200
    made = answer.json()["master_key"]
    assert made == {"key_id": broker.sources._store.key_id, "sealed": 1}
    assert made["key_id"] != before
    assert (await service.http.get("/v1/credentials/github/bot?check=true")).json()["credential"]["available"]
    key = (await service.http.post("/v1/keys", json={"name": "k", "scopes": ["admin"]})).json()["key"]["key"]
    async with service.client(key) as client:
        assert (await client.post("/v1/master-key/rotate")).json()["code"] == "scope_missing"


async def test_without_a_broker(folder: Path, node: NodeDouble) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, broker_socket=folder / "nobody.sock")
    async with in_process(config) as service:
        status, refused = await put(service)
        assert (status, refused["code"]) == (503, "broker_unavailable")
        assert (await service.http.get("/v1/credentials")).json()["credentials"] == []
        status, refused = await put(service)
        assert refused["code"] == "broker_unavailable"  # and not busy


async def hatchway(service: Service, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "hatchway.cli.main", "credentials", *arguments],
        env={**os.environ, "HATCHWAY_URL": service.url, "HATCHWAY_API_KEY": service.key},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN,
    )


@on_sqlite
async def test_by_the_command_line(service: Service, broker: World) -> None:
    made = await hatchway(
        service,
        "put",
        "github/bot",
        "--host",
        HOST,
        "--host",
        "*.x.example",
        "--from-stdin",
        "--json",
        stdin=VALUE + "\n",
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["hosts"] == [HOST, "*.x.example"]
    assert VALUE not in made.stdout + made.stderr
    assert broker.sources._store.secret("default", "github/bot").reveal() == CANARY
    listed = (await hatchway(service, "ls")).stdout.split("\n")
    assert listed[1].split()[:3] == ["github/bot", "store", f"{HOST},"]
    assert (await hatchway(service, "check", "github/bot")).returncode == 0
    assert (await hatchway(service, "put", "team", "--host", HOST, "--env", "TEAM_TOKEN")).returncode == 0
    checked = await hatchway(service, "check", "team", "--json")
    assert (checked.returncode, json.loads(checked.stdout)["available"]) == (1, False)
    assert (await hatchway(service, "rm", "team")).returncode == 0
    assert "code: unknown_credential" in (await hatchway(service, "show", "team")).stderr
    assert json.loads((await hatchway(service, "rotate", "--json")).stdout)["sealed"] == 1
    for wrong in (
        ("put", "x", "--from-stdin"),
        ("put", "x", "--host", HOST),
        ("put", "x", "--host", HOST, "--env", "A", "--from-stdin"),
        ("put", "x", "--host", HOST, "--vault", "nonsense"),
        ("put", "x", VALUE, "--host", HOST),
    ):
        assert (await hatchway(service, *wrong)).returncode == 2


@on_sqlite
async def test_by_the_sdk(service: Service) -> None:
    def blocking() -> None:
        with Hatchway(service.url, service.key) as client:
            made = client.credentials.put("one", [HOST], value=VALUE)
            assert (made.version, made.available) == (1, True)
            assert VALUE not in repr(made)
            assert client.credentials.get("one", check=True).available
            assert [one.name for one in client.credentials.list()] == ["one"]
            with pytest.raises(Unprocessable):
                client.credentials.put("one", [HOST], value="short")
            with pytest.raises(Forbidden):
                client.credentials.put("one", [HOST], vault={"server": "s", "mount": "m", "path": "p", "field": "f"})
            with pytest.raises(ValueError, match="exactly one"):
                client.credentials.put("one", [HOST], value=VALUE, file="x")

    await asyncio.to_thread(blocking)
    async with AsyncHatchway(service.url, service.key) as client:
        assert [one.name async for one in client.credentials.list()] == ["one"]
        await client.credentials.delete("one")
        with pytest.raises(NotFound):
            await client.credentials.get("one")
