"""Pools through the API, with a node double."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.errors import HostExhausted, Internal

__all__ = ["database_url", "folder", "node", "service"]


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN):
        while not await look():
            await asyncio.sleep(0.02)


async def put(service: Service, name: str = "warm", **settings: Any) -> dict[str, Any]:
    answer = await service.http.put(f"/v1/pools/{name}", json={"template": "seed:latest", "size": 2, **settings})
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()["pool"]
    return found


async def show(service: Service, name: str = "warm") -> dict[str, Any]:
    found: dict[str, Any] = (await service.http.get(f"/v1/pools/{name}")).json()["pool"]
    return found


async def filled(service: Service, ready: int = 2, name: str = "warm") -> None:
    async def look() -> bool:
        pool = await show(service, name)
        return (pool["ready"], pool["making"]) == (ready, 0)

    await until(look)


async def created(service: Service, **body: Any) -> dict[str, Any]:
    answer = await service.http.post(
        "/v1/sandboxes", json={"template": "seed:latest", **body}, headers={"prefer": "wait=20"}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["sandbox"]["state"] == "running", answer.text
    return found


async def test_a_creation_claims_a_member_with_all_that_it_asks_for_and_the_pool_fills_up_behind_it(
    service: Service, node: NodeDouble
) -> None:
    await put(service)
    await filled(service)
    members = set(node.boxes)
    # Nobody sees them: not in lists, not by id, not in operations or events.
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []
    assert (await service.http.get("/v1/operations")).json()["operations"] == []
    for member in members:
        assert (await service.http.get(f"/v1/sandboxes/{member}")).status_code == 404
        assert (await service.http.delete(f"/v1/sandboxes/{member}")).status_code == 404
    made = await created(service, name="mine", env={"A": "b"}, metadata={"c": "d"}, timeout_s=1000)
    sandbox = made["sandbox"]
    assert sandbox["id"] in members
    assert made["operation"]["result"]["pool"] == "warm"
    assert (sandbox["name"], sandbox["metadata"], sandbox["timeout_s"]) == ("mine", {"c": "d"}, 1000)
    assert sandbox["expires_at"] is not None
    assert (node.specs[sandbox["id"]].hostname, node.specs[sandbox["id"]].env) == ("mine", {"A": "b"})
    assert [one["id"] for one in (await service.http.get("/v1/sandboxes")).json()["sandboxes"]] == [sandbox["id"]]
    await filled(service)
    assert len(node.boxes) == 3


async def test_who_does_not_fit_or_does_not_want_to_gets_a_sandbox_made_for_him(
    service: Service, node: NodeDouble
) -> None:
    await put(service)
    await filled(service)
    members = set(node.boxes)
    for body in ({"pool": "never"}, {"memory_mib": 768}, {"disk_mib": 9000}):
        made = await created(service, **body)
        assert made["sandbox"]["id"] not in members
        assert "pool" not in made["operation"]["result"]
    other = await service.http.post(
        "/v1/sandboxes", json={"template": "seed:latest", "pool": "warm", "memory_mib": 768}
    )
    assert (other.status_code, other.json()["code"]) == (409, "pool_does_not_fit")
    unknown = await service.http.post("/v1/sandboxes", json={"template": "seed:latest", "pool": "cold"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_pool")
    await put(service, "empty", size=0)
    assert "pool" not in (await created(service, pool="empty"))["operation"]["result"]


async def test_no_member_is_claimed_twice(service: Service, node: NodeDouble) -> None:
    await put(service, size=3)
    await filled(service, 3)
    members = set(node.boxes)
    made = await asyncio.gather(*(created(service) for _ in range(8)))
    ids = [one["sandbox"]["id"] for one in made]
    assert len(set(ids)) == 8
    assert members <= set(ids)
    await filled(service, 3)


async def test_a_member_that_cannot_go_on_is_made_anew(service: Service, node: NodeDouble) -> None:
    await put(service, size=1)
    await filled(service, 1)

    async def fail(_: Any) -> None:
        raise Internal("vmm_died", "It is dead.", "")

    node.hooks["sandbox.claim"] = fail
    made = await created(service, name="mine")
    assert "pool" not in made["operation"]["result"]
    assert node.specs[made["sandbox"]["id"]].hostname == "mine"


async def test_members_are_replaced_when_what_they_are_made_of_moves_on(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.poolkeeper.RESOLVE_EVERY_S", 0.1)
    monkeypatch.setattr("hatchway.control.poolkeeper.EVERY_S", 0.1)
    await put(service)
    await filled(service)
    before = set(node.boxes)
    digest = "sha256:" + "0123" * 16
    monkeypatch.setattr("tests.support.node_double.DIGEST", digest)

    async def replaced() -> bool:
        return not before & set(node.boxes) and len(node.boxes) == 2

    await until(replaced)
    assert {node.specs[one].template_digest for one in node.boxes} == {digest}
    assert (await show(service))["template_digest"] == digest
    await put(service, memory_mib=768)
    await until(lambda: _all(node, 768))


async def _all(node: NodeDouble, memory_mib: int) -> bool:
    sizes = [node.specs[one].shape.memory_mib for one in node.boxes]
    return sizes == [memory_mib] * 2


async def test_a_pool_runs_dry_when_it_is_deleted_and_claimed_ones_stay(service: Service, node: NodeDouble) -> None:
    await put(service)
    await filled(service)
    mine = (await created(service))["sandbox"]["id"]
    answer = await service.http.delete("/v1/pools/warm")
    assert (answer.status_code, answer.json()["pool"]["state"]) == (202, "draining")

    async def gone() -> bool:
        return (await service.http.get("/v1/pools/warm")).status_code == 404

    await until(gone)
    assert set(node.boxes) == {mine}
    assert (await service.http.get("/v1/pools")).json()["pools"] == []


async def test_a_full_host_bounds_a_pool_and_it_says_so(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.poolkeeper.RETRY_S", 0.5)

    async def full(_: Any) -> None:
        if node.boxes:
            raise HostExhausted("host_memory_full", "The host is full.", "Delete some.")

    node.hooks["sandbox.prepare"] = full
    await put(service, size=3)

    async def said() -> bool:
        return (await show(service))["condition"] == "The host is full."

    await until(said)
    assert (await show(service))["ready"] == 1
    node.hooks.clear()
    await filled(service, 3)


async def test_the_quota_of_the_project_holds_for_members_too(service: Service) -> None:
    await service.http.patch("/v1/projects/default", json={"quotas": {"sandboxes": 1}})
    await put(service)

    async def said() -> bool:
        pool = await show(service)
        return pool["ready"] == 1 and "quota" in (pool["condition"] or "")

    await until(said)
    # The one that there is can be claimed: it was counted when it was made.
    assert (await created(service))["operation"]["result"]["pool"] == "warm"


async def test_a_control_plane_that_died_makes_no_member_too_many(
    folder: Any, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    reached = asyncio.Event()

    async def hold(_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with in_process(config) as service:
        await service.ready()
        node.hooks["sandbox.prepare"] = hold
        await put(service)
        await asyncio.wait_for(reached.wait(), WITHIN)
    node.hooks.clear()
    async with in_process(config) as service:
        await service.ready()
        await filled(service)
        assert len(node.boxes) == 2


@pytest.mark.parametrize(
    "body", [{"size": -1}, {"size": 1001}, {"size": 1, "template": "Not A Name"}, {"size": 1, "vcpus": 0}, {}]
)
async def test_a_pool_that_makes_no_sense_is_refused(service: Service, body: dict[str, Any]) -> None:
    answer = await service.http.put("/v1/pools/x", json={"template": "seed:latest", **body})
    assert answer.status_code == 422, answer.text
    reserved = await service.http.put("/v1/pools/auto", json={"template": "seed:latest", "size": 1})
    assert (reserved.status_code, reserved.json()["code"]) == (422, "invalid_field")
    unknown = await service.http.put("/v1/pools/x", json={"template": "nope", "size": 1})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "unknown_template")
