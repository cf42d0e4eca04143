"""A repeated request gets its first answer, whatever became meanwhile of what that one needed."""

from typing import Any

from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import Service
from tests.support.node_double import NodeDouble

__all__ = ["database_url", "folder", "node", "service"]

WAIT = {"prefer": "wait=20"}


async def ask(service: Service, key: str, path: str, body: dict[str, Any], method: str = "POST") -> Any:
    return await service.http.request(method, path, json=body, headers={**WAIT, "idempotency-key": key})


async def kept(service: Service, sandbox_id: str) -> str:
    made = await service.http.post(f"/v1/sandboxes/{sandbox_id}/snapshots", json={"kind": "disk"}, headers=WAIT)
    return str(made.json()["operation"]["result"]["snapshot"])


def the_same(first: Any, again: Any) -> None:
    assert first.status_code == 200, first.text
    assert again.status_code == 200, again.text
    assert again.headers["idempotency-replayed"] == "true"
    for name in ("sandbox", "operation"):
        assert first.json()[name]["id"] == again.json()[name]["id"]


async def test_a_create_is_repeated_when_its_snapshot_is_gone(service: Service) -> None:
    source = await service.create()
    snapshot = await kept(service, source["id"])
    body = {"snapshot": snapshot}
    first = await ask(service, "k", "/v1/sandboxes", body)
    assert (await service.http.delete(f"/v1/snapshots/{snapshot}")).status_code == 200
    the_same(first, await ask(service, "k", "/v1/sandboxes", body))
    refused = await ask(service, "other", "/v1/sandboxes", body)
    assert refused.json()["code"] == "snapshot_not_ready"


async def test_a_rollback_is_repeated_when_its_snapshot_is_gone(service: Service) -> None:
    source = await service.create()
    snapshot = await kept(service, source["id"])
    path, body = f"/v1/sandboxes/{source['id']}/rollback", {"snapshot": snapshot}
    first = await ask(service, "k", path, body)
    assert (await service.http.delete(f"/v1/snapshots/{snapshot}")).status_code == 200
    the_same(first, await ask(service, "k", path, body))


async def test_a_create_is_repeated_when_the_project_may_not_use_its_template_any_more(service: Service) -> None:
    body = {"template": "seed"}
    first = await ask(service, "k", "/v1/sandboxes", body)
    changed = await service.http.patch("/v1/projects/default", json={"templates": ["other"]})
    assert changed.status_code == 200, changed.text
    the_same(first, await ask(service, "k", "/v1/sandboxes", body))
    refused = await ask(service, "other", "/v1/sandboxes", body)
    assert refused.json()["code"] == "unknown_template"


async def test_a_create_and_a_verb_are_repeated_while_no_node_is_there(service: Service, node: NodeDouble) -> None:
    body = {"template": "seed"}
    first = await ask(service, "k", "/v1/sandboxes", body)
    path = f"/v1/sandboxes/{first.json()['sandbox']['id']}/pause"
    paused = await ask(service, "p", path, {})
    await node.die()
    the_same(first, await ask(service, "k", "/v1/sandboxes", body))
    the_same(paused, await ask(service, "p", path, {}))


async def test_a_create_out_of_a_pool_is_repeated_when_the_pool_is_gone(service: Service) -> None:
    pool = {"template": "seed", "size": 1}
    assert (await service.http.put("/v1/pools/mine", json=pool)).status_code == 201
    body = {"template": "seed", "pool": "mine"}
    first = await ask(service, "k", "/v1/sandboxes", body)
    assert (await service.http.delete("/v1/pools/mine")).status_code == 202
    the_same(first, await ask(service, "k", "/v1/sandboxes", body))


async def test_a_rotation_is_repeated_when_the_old_key_has_ended(service: Service) -> None:
    made = (await service.http.post("/v1/keys", json={"name": "one", "scopes": ["read"]})).json()["key"]
    path = f"/v1/keys/{made['id']}/rotate"
    first = await ask(service, "k", path, {})
    assert first.status_code == 201, first.text
    again = await ask(service, "k", path, {})
    assert (again.json()["code"], again.json()["key"]) == ("key_already_made", first.json()["key"]["id"])
    refused = await ask(service, "other", path, {})
    assert refused.status_code == 404, refused.text
