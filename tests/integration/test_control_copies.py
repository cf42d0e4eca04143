"""Suspend, fork, snapshots and rollback through the API, with a node double."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.domain.ids import new_id

__all__ = ["database_url", "folder", "node", "service"]

WAIT = {"prefer": "wait=20"}


async def do(service: Service, path: str, **body: Any) -> dict[str, Any]:
    answer = await service.http.post(path, json=body, headers=WAIT)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["operation"]["status"] == "succeeded", answer.text
    return found


async def snapshot(service: Service, sandbox_id: str, kind: str = "full") -> str:
    made = await do(service, f"/v1/sandboxes/{sandbox_id}/snapshots", kind=kind, name="mine")
    return str(made["operation"]["result"]["snapshot"])


async def test_a_suspended_sandbox_says_what_it_keeps(service: Service) -> None:
    sandbox = await service.create()
    suspended = await do(service, f"/v1/sandboxes/{sandbox['id']}/suspend")
    assert suspended["sandbox"]["stored_bytes"] == 1_000_000
    restored = await do(service, f"/v1/sandboxes/{sandbox['id']}/restore")
    assert (restored["sandbox"]["state"], restored["sandbox"]["stored_bytes"]) == ("running", None)


async def test_a_fork_makes_sandboxes_that_are_known_from_the_start(service: Service, node: NodeDouble) -> None:
    source = await service.create(metadata={"a": "b"}, env={"K": "V"}, name="one")
    held = asyncio.Event()

    async def hold(_: Any) -> None:
        await held.wait()

    node.hooks["sandbox.fork"] = hold
    answer = await service.http.post(f"/v1/sandboxes/{source['id']}/fork", json={"count": 3, "metadata": {"c": "d"}})
    assert answer.status_code == 202, answer.text
    listed = (await service.http.get("/v1/sandboxes", params={"state": "pending"})).json()["sandboxes"]
    assert [(one["forked_from"], one["operation"]["id"]) for one in listed] == [
        (source["id"], answer.json()["operation"]["id"])
    ] * 3
    held.set()
    ended = await service.operation(answer.json()["operation"]["id"])
    assert ended["status"] == "succeeded"
    assert {one["state"] for one in ended["result"]["branches"]} == {"running"}
    for one in ended["result"]["branches"]:
        branch = await service.get(one["sandbox"])
        assert (branch["state"], branch["metadata"], branch["template"]) == ("running", {"c": "d"}, source["template"])
        assert node.specs[one["sandbox"]].env == {"K": "V"}
        assert node.specs[one["sandbox"]].hostname == one["sandbox"]
    assert (await service.get(source["id"]))["state"] == "running"


async def test_a_fork_that_fails_leaves_branches_that_say_why_and_can_be_deleted(
    service: Service, node: NodeDouble
) -> None:
    source = await service.create()

    async def full(_: Any) -> None:
        raise HostExhausted("host_memory_full", "The host is full.", "Delete some.")

    node.hooks["sandbox.fork"] = full
    answer = await service.http.post(f"/v1/sandboxes/{source['id']}/fork", json={"count": 2}, headers=WAIT)
    assert answer.json()["operation"]["status"] == "failed"
    assert answer.json()["sandbox"]["state"] == "running"
    failed = (await service.http.get("/v1/sandboxes", params={"state": "failed"})).json()["sandboxes"]
    assert [one["reason"] for one in failed] == ["The host is full."] * 2
    for one in failed:
        gone = await service.http.request("DELETE", f"/v1/sandboxes/{one['id']}", headers=WAIT)
        assert gone.json()["sandbox"]["state"] == "deleted"


@pytest.mark.parametrize("count", [0, 101, -1, "2", None])
async def test_a_fork_is_bounded(service: Service, count: Any) -> None:
    source = await service.create()
    answer = await service.http.post(f"/v1/sandboxes/{source['id']}/fork", json={"count": count})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
    assert len((await service.http.get("/v1/sandboxes")).json()["sandboxes"]) == 1


async def test_what_was_in_hand_when_the_control_plane_died_is_done_by_the_next(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    reached = asyncio.Event()

    async def hold(_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with in_process(config) as service:
        await service.ready()
        source, other = await service.create(), await service.create()
        node.hooks["sandbox.fork"] = node.hooks["snapshot.create"] = hold
        forked = await service.http.post(f"/v1/sandboxes/{source['id']}/fork", json={"count": 2})
        kept = await service.http.post(f"/v1/sandboxes/{other['id']}/snapshots", json={"kind": "disk"})
        await asyncio.wait_for(reached.wait(), WITHIN)
    node.hooks.clear()
    async with in_process(config) as service:
        await service.ready()
        ended = await service.operation(forked.json()["operation"]["id"])
        assert {one["state"] for one in ended["result"]["branches"]} == {"running"}
        ended = await service.operation(kept.json()["operation"]["id"])
        shown = await service.http.get(f"/v1/snapshots/{ended['result']['snapshot']}")
        assert shown.json()["snapshot"]["state"] == "ready"


async def test_snapshots_and_the_way_back(service: Service) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    first, second = await snapshot(service, sandbox["id"]), await snapshot(service, sandbox["id"], "disk")
    listed = (await service.http.get(f"{path}/snapshots")).json()["snapshots"]
    assert [(one["id"], one["parent"], one["kind"]) for one in listed] == [
        (second, first, "disk"),
        (first, None, "full"),
    ]
    assert (await do(service, f"{path}/rollback", snapshot=first))["sandbox"]["state"] == "running"
    back = await do(service, f"{path}/rollback", snapshot=second)
    assert (back["sandbox"]["state"], back["sandbox"]["head_snapshot"]) == ("stopped", second)
    assert (await service.http.get("/v1/snapshots", params={"kind": "full"})).json()["snapshots"][0]["id"] == first
    problem = (await service.http.post(f"{path}/snapshots", json={"kind": "full"})).json()
    assert (problem["status"], problem["code"], problem["state"]) == (409, "wrong_state", "stopped")


async def test_a_sandbox_from_a_snapshot(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create(vcpus=2, memory_mib=256, disk_mib=1024)
    kept = await snapshot(service, sandbox["id"])
    await service.http.request("DELETE", f"/v1/sandboxes/{sandbox['id']}", headers=WAIT)
    made = await do(service, "/v1/sandboxes", snapshot=kept, disk_mib=2048)
    shown = made["sandbox"]
    assert (shown["snapshot"], shown["head_snapshot"], shown["template"]) == (kept, kept, "seed:latest")
    assert (shown["vcpus"], shown["memory_mib"], shown["disk_mib"]) == (2, 256, 2048)
    assert node.specs[shown["id"]].snapshot_id == kept
    for body, field in (
        ({"snapshot": kept, "disk_mib": 512}, "disk_mib"),
        ({"snapshot": kept, "memory_mib": 512}, "memory_mib"),
        ({"snapshot": kept, "template": "seed"}, "template"),
        ({}, "template"),
    ):
        answer = await service.http.post("/v1/sandboxes", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    for unknown in (new_id(), "x"):
        answer = await service.http.post("/v1/sandboxes", json={"snapshot": unknown})
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_snapshot")


async def test_a_snapshot_is_deleted_also_when_its_node_comes_back_later(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        kept = await snapshot(service, sandbox["id"])

        async def away(_: Any) -> None:
            raise Unavailable("busy", "Not now.", "")

        node.hooks["snapshot.delete"] = away
        answer = await service.http.request("DELETE", f"/v1/snapshots/{kept}")
        assert (answer.status_code, answer.json()["snapshot"]["state"]) == (202, "deleting")
        refused = await service.http.post("/v1/sandboxes", json={"snapshot": kept})
        assert refused.json()["code"] == "snapshot_not_ready"
        assert kept in node.snapshots
        node.hooks.clear()
        async with asyncio.timeout(WITHIN):
            while kept in node.snapshots:
                await asyncio.sleep(0.01)
            while (await service.http.get(f"/v1/snapshots/{kept}")).json()["snapshot"]["state"] != "deleted":
                await asyncio.sleep(0.01)
        again = await service.http.request("DELETE", f"/v1/snapshots/{kept}")
        assert again.status_code == 200
        assert (await service.http.get("/v1/snapshots")).json()["snapshots"] == []
