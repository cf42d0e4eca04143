"""What the control plane records, and how it is asked for: every change with who made it, once, whatever dies meanwhile."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import postgres
from tests.support.audit_writer import AuditWriter, audit_writer
from tests.support.control_fixtures import folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.audit.verifying import verify_folder, verify_lines
from hatchway.control.main import ControlConfig
from hatchway.storage import audit
from hatchway.storage.database import Database

__all__ = ["folder", "node"]

WAIT = {"prefer": "wait=30"}


@pytest.fixture
def writer(folder: Path) -> Iterator[AuditWriter]:
    with audit_writer(folder) as writing:
        yield writing


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    if request.param == "sqlite":
        yield None
    else:
        with postgres.database_url() as url:
            yield url


def config_of(folder: Path, node: NodeDouble, writer: AuditWriter, **more: Any) -> ControlConfig:
    return ControlConfig(folder=folder / "control", node_socket=node.path, audit_socket=writer.path, **more)


@pytest.fixture
async def service(
    folder: Path, node: NodeDouble, writer: AuditWriter, database_url: str | None
) -> AsyncIterator[Service]:
    async with in_process(config_of(folder, node, writer, database_url=database_url)) as running:
        await running.ready()
        yield running


@pytest.fixture
async def plain(folder: Path, node: NodeDouble, writer: AuditWriter) -> AsyncIterator[Service]:
    """On a file alone: where the database makes no difference."""
    async with in_process(config_of(folder, node, writer)) as running:
        await running.ready()
        yield running


async def records(service: Service, **query: Any) -> list[dict[str, Any]]:
    """Everything that matches, page by page."""
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        answer = await service.http.get("/v1/audit", params={**query, **({"cursor": cursor} if cursor else {})})
        assert answer.status_code == 200, answer.text
        found += answer.json()["records"]
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return found


async def development_key_id(service: Service) -> str:
    listed = (await service.http.get("/v1/keys")).json()["keys"]
    return str(next(key["id"] for key in listed if key["name"] == "development"))


async def test_every_change_is_recorded_with_who_made_it_and_in_which_request(service: Service) -> None:
    actor = await development_key_id(service)
    answer = await service.http.post(
        "/v1/sandboxes", json={"template": "seed:latest"}, headers={**WAIT, "x-request-id": "asked-by-me"}
    )
    sandbox = answer.json()["sandbox"]["id"]
    made = await service.http.post("/v1/keys", json={"name": "more", "scopes": ["read"]})
    await service.http.delete(f"/v1/keys/{made.json()['key']['id']}")
    await service.http.post(f"/v1/sandboxes/{sandbox}/tokens", json={"scopes": ["files"]})
    opened = await service.http.post(f"/v1/sandboxes/{sandbox}/sessions", json={"argv": ["true"]})
    await service.http.delete(f"/v1/sandboxes/{sandbox}", headers=WAIT)
    found = await records(service, project="default")
    kinds = [one["kind"] for one in found]
    assert {
        "operation.accepted", "operation.succeeded", "sandbox.state_changed", "key.created", "key.revoked",
        "token.created", "session.created", "token.issued",
    } <= set(kinds)  # fmt: skip
    of_create = [one for one in found if one["request_id"] == "asked-by-me"]
    assert {one["kind"] for one in of_create} >= {"operation.accepted", "operation.succeeded"}
    assert {one["actor"] for one in of_create} == {actor}
    assert {one["sandbox_id"] for one in of_create} == {sandbox}
    issued = next(one for one in found if one["kind"] == "token.issued")
    assert issued["data"]["session"] == opened.json()["session"]["id"]
    # No secret is in any record.
    text = json.dumps(found)
    assert made.json()["key"]["key"] not in text
    assert opened.json()["session"]["token"] not in text
    sequences = [one["sequence"] for one in found]
    assert sequences == sorted(set(sequences))


async def test_refused_keys_are_recorded_and_counted(plain: Service) -> None:
    async with plain.client("hw_" + "x" * 40) as stranger:
        for _ in range(30):
            assert (await stranger.get("/v1/sandboxes")).status_code == 401
    made = await plain.http.post("/v1/keys", json={"name": "reader", "scopes": ["read"]})
    async with plain.client(made.json()["key"]["key"]) as reader:
        assert (await reader.post("/v1/sandboxes", json={"template": "seed:latest"})).status_code == 403
    async with asyncio.timeout(WITHIN):
        while True:
            found = await records(plain, kind="key.refused", decision="denied")
            if len(found) >= 2:
                break
            await asyncio.sleep(0.05)
    assert {one["reason"] for one in found} == {"key_unknown", "scope_missing"}
    lacking = next(one for one in found if one["reason"] == "scope_missing")
    assert lacking["actor"] == made.json()["key"]["id"]
    assert lacking["data"]["path"] == "/v1/sandboxes"


async def test_a_project_sees_its_own_records_and_no_others(plain: Service) -> None:
    await plain.http.post("/v1/projects", json={"name": "theirs"})
    made = await plain.http.post(
        "/v1/keys", json={"name": "a", "scopes": ["read", "write", "admin"], "project": "theirs"}
    )
    await plain.create()
    async with plain.client(made.json()["key"]["key"]) as theirs:
        found = (await theirs.get("/v1/audit", params={"limit": 500})).json()["records"]
        assert found
        assert {one["project"] for one in found} == {"theirs"}
        refused = await theirs.get("/v1/audit", params={"project": "default"})
        assert (refused.status_code, refused.json()["code"]) == (403, "scope_missing")
        exported = await theirs.get("/v1/audit", headers={"accept": "application/x-ndjson"})
        lines = exported.content.splitlines()
        assert {json.loads(line)["project"] for line in lines} == {"theirs"}
        assert verify_lines([line + b"\n" for line in lines], filtered=True).good
    everything = await records(plain)
    assert {"", "default", "theirs"} <= {one["project"] for one in everything}
    reading = await plain.http.post("/v1/keys", json={"name": "r", "scopes": ["read", "write"]})
    async with plain.client(reading.json()["key"]["key"]) as reader:
        assert (await reader.get("/v1/audit")).status_code == 403


async def test_an_export_is_the_journal_itself_and_can_be_checked(plain: Service, writer: AuditWriter) -> None:
    await plain.create()
    head = (await plain.http.get("/v1/audit/head")).json()
    assert head["writable"]
    assert head["behind"] == 0
    exported = await plain.http.get("/v1/audit", headers={"accept": "application/x-ndjson"})
    assert exported.headers["content-type"].startswith("application/x-ndjson")
    lines = [line + b"\n" for line in exported.content.splitlines()]
    checked = verify_lines(lines, head["public_key"], at_least=(head["sequence"], head["hash"]))
    assert checked.good, checked.findings
    assert checked.first == 1
    assert b"".join(lines) in b"".join(path.read_bytes() for path in sorted(writer.folder.glob("*.jsonl")))
    newest = (await plain.http.get("/v1/audit", params={"newest": "true", "limit": 1})).json()["records"]
    assert newest[0]["sequence"] >= checked.last


async def test_what_happens_is_followed(plain: Service) -> None:
    head = (await plain.http.get("/v1/audit/head")).json()
    seen: list[dict[str, Any]] = []

    async def follow() -> None:
        headers = {"accept": "text/event-stream", "last-event-id": str(head["sequence"])}
        async with plain.http.stream("GET", "/v1/audit", headers=headers, params={"kind": "operation."}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line.removeprefix("data: ")))
                    if seen[-1]["kind"] == "operation.succeeded":
                        return

    following = asyncio.create_task(follow())
    sandbox = await plain.create()
    await asyncio.wait_for(following, WITHIN)
    assert [one["kind"] for one in seen] == ["operation.accepted", "operation.succeeded"]
    assert {one["sandbox_id"] for one in seen} == {sandbox["id"]}


async def test_wrong_questions_are_refused(plain: Service) -> None:
    for params, code in (
        ({"cursor": "x"}, "invalid_cursor"),
        ({"limit": "0"}, "invalid_field"),
        ({"kinds": "x"}, "unknown_field"),
        ({"kind": ",".join("a" * 33)}, "invalid_field"),
    ):
        answer = await plain.http.get("/v1/audit", params=params)
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["code"] == code


async def test_nothing_is_lost_or_doubled_when_writer_and_control_plane_die(
    folder: Path, node: NodeDouble, writer: AuditWriter, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.auditing.ASK_WITHIN_S", 0.5)

    async def changes(service: Service, first: int) -> None:
        for number in range(first, first + 10):
            answer = await service.http.post("/v1/keys", json={"name": f"key {number}", "scopes": ["read"]})
            assert answer.status_code == 201

    config = config_of(folder, node, writer, database_url=database_url)
    async with in_process(config) as service:
        await changes(service, 0)
        await asyncio.to_thread(writer.kill)
        await changes(service, 10)  # the journal is behind, and nothing waits for it
        answer = await service.http.get("/v1/audit/head")
        assert (answer.status_code, answer.json()["code"]) == (503, "audit_unavailable")
    await asyncio.to_thread(writer.start)
    async with in_process(config) as service:
        await changes(service, 20)
        found = [one["data"]["name"] for one in await records(service, kind="key.created") if one["project"]]
    assert [name for name in found if name.startswith("key ")] == [f"key {number}" for number in range(30)]
    assert writer.stop() == 0
    checked = verify_folder(writer.folder)
    assert checked.good, checked.findings


async def test_two_control_processes_forward_each_change_once(
    folder: Path, node: NodeDouble, writer: AuditWriter
) -> None:
    with postgres.database_url() as url:
        async with contextlib.AsyncExitStack() as stack:
            services = []
            for name in ("one", "two"):
                config = ControlConfig(
                    folder=folder / name,
                    node_socket=node.path,
                    audit_socket=writer.path,
                    database_url=url,
                    lease_s=1.0,
                )
                services.append(await stack.enter_async_context(in_process(config)))
            for number in range(40):
                answer = await services[number % 2].http.post(
                    "/v1/keys", json={"name": f"key {number}", "scopes": ["read"]}
                )
                assert answer.status_code == 201
            found = [one["data"]["name"] for one in await records(services[1], kind="key.created")]
            assert [name for name in found if name.startswith("key ")] == [f"key {number}" for number in range(40)]


async def test_a_database_that_was_restored_loses_no_record_of_what_follows(
    folder: Path, node: NodeDouble, writer: AuditWriter
) -> None:
    config = config_of(folder, node, writer)
    async with in_process(config) as service:
        await service.http.post("/v1/keys", json={"name": "before", "scopes": ["read"]})
        assert await records(service, kind="key.created")
    stopped = {path.name: path.read_bytes() for path in (folder / "control").glob("hatchway.db*")}
    async with in_process(config) as service:
        for number in range(5):
            await service.http.post("/v1/keys", json={"name": f"lost {number}", "scopes": ["read"]})
        assert len(await records(service, kind="key.created")) == 7
    for path in (folder / "control").glob("hatchway.db*"):
        path.unlink()
    for name, content in stopped.items():
        path = folder / "control" / name
        path.write_bytes(content)
        path.chmod(0o600)
    async with in_process(config) as service:
        for number in range(3):
            await service.http.post("/v1/keys", json={"name": f"after {number}", "scopes": ["read"]})
        names = [one["data"]["name"] for one in await records(service, kind="key.created")]
    assert names[-3:] == ["after 0", "after 1", "after 2"]
    assert len({one["source"] for one in writer.records() if one["source"].startswith("control/")}) >= 2


async def test_what_waits_for_the_journal_is_not_purged_and_too_much_refuses(
    plain: Service, writer: AuditWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(writer.kill)
    monkeypatch.setattr("hatchway.control.auditing.MAX_BEHIND", 20)
    code = 201
    for number in range(200):
        answer = await plain.http.post("/v1/keys", json={"name": f"key {number}", "scopes": ["read"]})
        code = answer.status_code
        if code != 201:
            break
        await asyncio.sleep(0.02)
    assert (code, answer.json()["code"]) == (503, "audit_behind")
    assert answer.json()["remedy"]
    await asyncio.to_thread(writer.start)
    async with asyncio.timeout(WITHIN):
        while (await plain.http.post("/v1/keys", json={"name": "again", "scopes": ["read"]})).status_code != 201:
            await asyncio.sleep(0.05)


async def test_without_a_journal_everything_goes_on_and_nothing_is_kept_for_it(folder: Path, node: NodeDouble) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path)
    async with in_process(config) as service:
        await service.ready()
        await service.create()
        answer = await service.http.get("/v1/audit")
        assert (answer.status_code, answer.json()["code"]) == (503, "audit_disabled")
    database = await Database.open(config.database)
    try:
        assert await database.read(audit.position) is None
    finally:
        await database.close()
