"""Who reaches files, sessions and ports of a sandbox is recorded; what cannot be recorded is refused. The real agent, a node process, a real writer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dataplane_fixtures import Opener, agent, opened
from dataplane_harness import WITHIN, Plane
from tests.support.audit_writer import AuditWriter, audit_writer

__all__ = ["agent", "opened"]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[AuditWriter]:
    with audit_writer(tmp_path) as writing:
        yield writing


async def recorded(writer: AuditWriter, kind: str, least: int = 1, **members: Any) -> list[dict[str, Any]]:
    """The node's records of a kind, as soon as there are so many."""
    async with asyncio.timeout(WITHIN):
        while True:
            found = [
                one
                for one in writer.records()
                if one["kind"] == kind and all(one[name] == value for name, value in members.items())
            ]
            if sum(one["count"] for one in found) >= least:
                return found
            await asyncio.sleep(0.02)


def files(plane: Plane, verb: str) -> str:
    return f"{plane.url}/v1/sandboxes/{plane.sandbox_id}/files/{verb}"


async def test_each_access_is_recorded_with_the_key_that_its_token_goes_back_to(
    opened: Opener, writer: AuditWriter, tmp_path: Path
) -> None:
    plane = await opened(audit=str(writer.path))
    token = plane.token(None, scopes=frozenset({"files"}), key_id="k" * 20)
    headers = {"authorization": f"Bearer {token}", "x-request-id": "my-upload"}
    path = str(tmp_path / "secret plans")
    assert (
        await plane.client.put(files(plane, "content"), params={"path": path}, headers=headers, content=b"x")
    ).is_success
    for _ in range(5):
        assert (await plane.client.get(files(plane, "content"), params={"path": path}, headers=headers)).content == b"x"
    moved = {"from": path, "to": f"{path}.old"}
    assert (await plane.client.post(files(plane, "move"), json=moved, headers=headers)).is_success
    assert (await plane.client.get(files(plane, "stat"), params={"path": "/none"}, headers=headers)).status_code == 404
    (written,) = await recorded(writer, "files.written")
    assert (written["actor"], written["sandbox_id"], written["decision"]) == ("k" * 20, plane.sandbox_id, "allowed")
    assert (written["data"]["path"], written["request_id"], written["project"]) == (path, "my-upload", "project")
    read = await recorded(writer, "files.read", 5, decision="allowed")
    assert sum(one["count"] for one in read) == 5
    (went,) = await recorded(writer, "files.moved")
    assert (went["data"]["from"], went["data"]["to"]) == (path, f"{path}.old")
    (failed,) = await recorded(writer, "files.read", decision="failed")
    assert failed["data"]["path"] == "/none"
    assert token not in str(writer.records())


async def test_sessions_and_refused_tokens_are_recorded_and_counted(opened: Opener, writer: AuditWriter) -> None:
    plane = await opened(audit=str(writer.path))
    command = await plane.create("true")
    headers = {"authorization": f"Bearer {plane.token(command.id)}"}
    assert (await plane.client.post(command.url("attach"), headers=headers)).status_code == 200
    (attached,) = await recorded(writer, "session.attached")
    assert attached["data"]["session_id"] == command.id
    assert attached["decision"] == "allowed"
    for _ in range(20):
        assert (await plane.client.post(command.url("attach"))).status_code == 401
    other = {"authorization": f"Bearer {plane.token(None, scopes=frozenset({'files'}))}"}
    assert (await plane.client.post(command.url("attach"), headers=other)).status_code == 403
    missing = await recorded(writer, "token.refused", 20, reason="token_missing")
    assert sum(one["count"] for one in missing) == 20
    assert len(missing) < 20
    (wrong,) = await recorded(writer, "token.refused", reason="wrong_scope")
    assert (wrong["decision"], wrong["sandbox_id"]) == ("denied", plane.sandbox_id)


async def test_what_cannot_be_recorded_is_refused_and_goes_on_when_it_can(
    opened: Opener, writer: AuditWriter, tmp_path: Path
) -> None:
    plane = await opened(audit=str(writer.path), audit_entries=3)
    headers = {"authorization": f"Bearer {plane.token(None, scopes=frozenset({'files'}))}"}
    await asyncio.to_thread(writer.kill)
    answers = []
    for number in range(10):
        params = {"path": str(tmp_path / f"file {number}")}
        answers.append(await plane.client.put(files(plane, "content"), params=params, headers=headers, content=b"x"))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    assert {answer.json()["code"] for answer in refused} == {"audit_unavailable"}
    done = len(answers) - len(refused)
    assert done == 3
    assert len(list(tmp_path.glob("file *"))) == done
    assert (await plane.client.get(f"{plane.url}/healthz")).status_code == 200
    await asyncio.to_thread(writer.start)
    await recorded(writer, "files.written", 3, decision="allowed")
    async with asyncio.timeout(WITHIN):
        while True:
            answer = await plane.client.get(files(plane, "stat"), params={"path": "/"}, headers=headers)
            if answer.status_code == 200:
                break
            await asyncio.sleep(0.05)
