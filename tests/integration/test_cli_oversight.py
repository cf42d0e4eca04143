"""The audit journal and approvals by the command line and the SDK, against the real control plane, a real writer and a node double."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.audit_writer import AuditWriter, audit_writer
from tests.support.control_fixtures import folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.audit.verifying import verify_lines
from hatchway.client import AsyncHatchway, Conflict, Hatchway, NotFound
from hatchway.control.main import ControlConfig

__all__ = ["folder", "node"]


@pytest.fixture
def writer(folder: Path) -> Iterator[AuditWriter]:
    with audit_writer(folder) as writing:
        yield writing


@pytest.fixture
async def service(folder: Path, node: NodeDouble, writer: AuditWriter) -> AsyncIterator[Service]:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, audit_socket=writer.path)
    async with in_process(config) as running:
        await running.ready()
        await node.followed()
        yield running


def environment(service: Service) -> dict[str, str]:
    return {**os.environ, "HATCHWAY_URL": service.url, "HATCHWAY_API_KEY": service.key}


async def hatchway(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "hatchway.cli.main", *arguments],
        env=environment(service),
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN * 2,
    )


async def told(service: Service, *arguments: str) -> Any:
    done = await hatchway(service, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_what_happened_is_shown_exported_and_checked(service: Service, tmp_path: Path) -> None:
    sandbox = (await service.create())["id"]
    head = await told(service, "audit", "head")
    shown = await hatchway(service, "audit", "tail", "--sandbox", sandbox, "-n", "2")
    assert [line.split()[3] for line in shown.stdout.splitlines()] == ["operation.succeeded", "sandbox.state_changed"]
    lines = (await hatchway(service, "audit", "tail", "--json", "--kind", "operation.")).stdout.splitlines()
    assert {json.loads(line)["kind"] for line in lines} == {"operation.accepted", "operation.succeeded"}
    whole, part, events = tmp_path / "whole.jsonl", tmp_path / "part.jsonl", tmp_path / "ocsf.jsonl"
    assert (await hatchway(service, "audit", "export", str(whole))).returncode == 0
    assert whole.stat().st_mode & 0o077 == 0
    key, noted = head["public_key"], f"{head['sequence']}:{head['hash']}"
    for arguments in (
        ("--public-key", key, "--head", noted),
        (str(whole), "--public-key", key, "--head", noted),
        (str(whole),),
    ):
        checked = await hatchway(service, "audit", "verify", *arguments)
        assert checked.returncode == 0, checked.stdout
        assert checked.stdout.rstrip().endswith("good")
    assert (await hatchway(service, "audit", "export", str(part), "--kind", "sandbox.")).returncode == 0
    assert (await hatchway(service, "audit", "verify", str(part), "--selection")).returncode == 0
    assert (await hatchway(service, "audit", "verify", str(part))).returncode == 1  # it is not the whole
    whole.write_bytes(whole.read_bytes().replace(b'"operation.accepted"', b'"operation.approved"'))
    changed = await hatchway(service, "audit", "verify", str(whole))
    assert changed.returncode == 1
    assert "changed" in changed.stdout
    assert (await hatchway(service, "audit", "export", str(events), "--format", "ocsf")).returncode == 0
    made = [json.loads(line) for line in events.read_text().splitlines()]
    assert {one["metadata"]["version"] for one in made} == {"1.3.0"}
    assert verify_lines([one["raw_data"].encode() + b"\n" for one in made], key).good


async def test_records_are_followed(service: Service) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hatchway.cli.main", "audit", "tail", "-f", "-n", "0", "--kind", "key.", "--json"),
        env=environment(service),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        reading = asyncio.ensure_future(process.stdout.readline())
        number = 0
        async with asyncio.timeout(WITHIN * 2):
            while not reading.done():  # it follows from some moment on
                await service.http.post("/v1/keys", json={"name": f"key {number}", "scopes": ["read"]})
                number += 1
                await asyncio.wait({reading}, timeout=0.3)
        assert json.loads(await reading)["kind"] == "key.created"
    finally:
        process.kill()
        await process.wait()


async def test_approvals_by_the_command_line(service: Service, node: NodeDouble) -> None:
    await told(service, "projects", "set", "default", "--approval", "delete", "--approval", "export")
    sandbox = (await service.create())["id"]
    watching = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hatchway.cli.main", "approvals", "watch"),
        env=environment(service),
        stdout=subprocess.PIPE,
    )
    assert watching.stdout is not None
    try:
        assert (await hatchway(service, "rm", sandbox, "--no-wait")).returncode == 0
        async with asyncio.timeout(WITHIN * 2):
            line = (await watching.stdout.readline()).decode()
        assert "approval.asked" in line
        assert sandbox in line
        (asked,) = await told(service, "approvals", "ls")
        assert (asked["state"], asked["request"]) == ("pending", {"verb": "delete"})
        assert (
            f"{asked['id']}  denied"
            in (await hatchway(service, "approvals", "deny", asked["id"], "--note", "in use")).stdout
        )
        async with asyncio.timeout(WITHIN):
            line = (await watching.stdout.readline()).decode()
        assert "approval.answered" in line
    finally:
        watching.kill()
        await watching.wait()
    again = await hatchway(service, "approvals", "allow", asked["id"])
    assert again.returncode == 1
    assert "code: already_answered" in again.stderr
    node.ask(sandbox, "ask-one", path="/\x1b[2Jx")
    async with asyncio.timeout(WITHIN):
        while not [one for one in await told(service, "approvals", "ls") if one["id"] == "ask-one"]:
            await asyncio.sleep(0.02)
    shown = (await hatchway(service, "approvals", "ls")).stdout
    assert "POST index.example:443/?[2Jx" in shown
    assert "\x1b" not in shown
    assert (await told(service, "approvals", "allow", "ask-one", "--ttl", "60"))["scope"] == "ttl"
    assert [(one.allow, one.ttl_s) for one in node.answers] == [(True, 60.0)]
    assert (await told(service, "approvals", "ls", "ask-one"))["state"] == "allowed"
    lifted = await told(service, "projects", "set", "default", "--approval", "none")
    assert lifted["approvals"] == []


async def test_both_by_the_sdk(service: Service, node: NodeDouble) -> None:
    sandbox = (await service.create())["id"]
    for name in ("ask-one", "ask-two"):
        node.ask(sandbox, name)
    async with asyncio.timeout(WITHIN):
        while len((await service.http.get("/v1/approvals")).json()["approvals"]) < 2:
            await asyncio.sleep(0.02)

    def blocking() -> None:
        with Hatchway(service.url, service.key) as client:
            assert {one.id for one in client.approvals.list(states=("pending",))} == {"ask-one", "ask-two"}
            assert client.approvals.allow("ask-one", scope="session").delivered
            with pytest.raises(Conflict):
                client.approvals.deny("ask-one")
            with pytest.raises(NotFound):
                client.approvals.get("nothing")
            head = client.audit.head()
            assert verify_lines(client.audit.export(), head.public_key).good
            answered = list(client.audit.list(kinds=("approval.answered",)))
            assert [(one.decision, one.sandbox_id) for one in answered] == [("allowed", sandbox)]
            newest = next(iter(client.audit.list(newest=True)))
            assert newest.sequence >= head.sequence
            followed = client.audit.follow(after=head.sequence - 1)
            assert next(iter(followed)).sequence == head.sequence

    await asyncio.to_thread(blocking)
    async with AsyncHatchway(service.url, service.key) as client:
        assert (await client.approvals.deny("ask-two", note="no")).state == "denied"
        assert [one.id async for one in client.approvals.list(states=("denied",))] == ["ask-two"]
        head = await client.audit.head()
        lines = [line async for line in client.audit.export()]
        assert verify_lines(lines, head.public_key).good
        decisions = [one.decision async for one in client.audit.list(kinds=("approval.answered",), sandbox=sandbox)]
        assert decisions == ["allowed", "denied"]
        async for record in client.audit.follow(kinds=("approval.",), after=0):
            assert record.kind == "approval.asked"
            break
