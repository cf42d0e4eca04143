"""Projects, quotas, keys and tokens through the API, with a node double."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import WITHIN, ControlProcess, Service, in_process
from tests.support.node_double import DIGEST, NodeDouble

from hatchway.control import auth
from hatchway.control.main import ControlConfig
from hatchway.domain.errors import Unavailable
from hatchway.storage.keys import SCOPES

__all__ = ["database_url", "folder", "node", "service"]

WAIT = {"prefer": "wait=20"}
ALL_OF_A_PROJECT = ["read", "exec", "write", "admin"]


@contextlib.asynccontextmanager
async def tenant(service: Service, name: str = "tenant", **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A project, and a client with a key of it that may do everything in it."""
    made = await service.http.post("/v1/projects", json={"name": name, **settings})
    assert made.status_code == 201, made.text
    key = await service.http.post("/v1/keys", json={"name": "all", "project": name, "scopes": ALL_OF_A_PROJECT})
    async with service.client(key.json()["key"]["key"]) as client:
        yield client


async def key(service: Service, *scopes: str, **more: Any) -> dict[str, Any]:
    answer = await service.http.post("/v1/keys", json={"name": "k", "scopes": scopes, **more})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()["key"]
    return made


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text
    found: dict[str, Any] = answer.json()
    assert found["remedy"]
    return found


async def create(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/sandboxes", json={"template": "seed", **more}, headers=WAIT)


# -- projects


async def test_a_project_is_made_bounded_and_shown(service: Service) -> None:
    settings = {"quotas": {"sandboxes": 2}, "caps": {"memory_mib": 1024}, "templates": ["seed"]}
    async with tenant(service, require_isolation="emulated", **settings) as client:
        assert (await create(client)).status_code == 200
        shown = (await client.get("/v1/projects/tenant")).json()["project"]
        assert shown["usage"] == {
            "sandboxes": 1,
            "running_vcpus": 1,
            "running_memory_mib": 512,
            "disk_mib": 4096,
            "snapshots": 0,
            "snapshot_bytes": 0,
            "sessions": 0,
            "creates_last_minute": 1,
        }
        assert shown == {**shown, **settings, "state": "active", "require_isolation": "emulated"}
        assert [one["name"] for one in (await client.get("/v1/projects")).json()["projects"]] == ["tenant"]
        both = (await service.http.get("/v1/projects")).json()["projects"]
        assert [one["name"] for one in both] == ["default", "tenant"]
        problem(await service.http.post("/v1/projects", json={"name": "tenant"}), 409, "project_exists")
        changed = await service.http.patch("/v1/projects/tenant", json={"quotas": {}, "templates": None})
        assert (changed.json()["project"]["quotas"], changed.json()["project"]["templates"]) == ({}, None)
        assert changed.json()["project"]["caps"] == {"memory_mib": 1024}


async def test_a_project_does_not_raise_its_own_bounds(service: Service) -> None:
    async with tenant(service) as client:
        for body in ({"quotas": {}}, {"caps": {}}, {"templates": None}):
            assert problem(await client.patch("/v1/projects/tenant", json=body), 403, "scope_missing")
        assert (await client.patch("/v1/projects/tenant", json={"require_isolation": "emulated"})).status_code == 200
        for method, path in (("POST", "/v1/projects"), ("DELETE", "/v1/projects/tenant")):
            answer = await client.request(method, path, json={"name": "x"} if method == "POST" else None)
            assert problem(answer, 403, "scope_missing")["scope"] == "installation"
        # Nor by a key that could: it is not made.
        made = await client.post("/v1/keys", json={"name": "more", "scopes": ["installation"]})
        problem(made, 403, "scope_missing")


async def test_caps_and_templates_hold_for_what_is_made(service: Service) -> None:
    async with tenant(service, caps={"vcpus": 1, "disk_mib": 2048}, templates=["seed:latest"]) as client:
        for more, most in (({"vcpus": 2, "disk_mib": 2048}, 1), ({}, 2048)):
            found = problem(await create(client, **more), 422, "invalid_field")
            assert found["allowed"]["maximum"] == most
        made = (await create(client, disk_mib=1024)).json()["sandbox"]
        kept = await client.post(f"/v1/sandboxes/{made['id']}/snapshots", json={"kind": "disk"}, headers=WAIT)
        snapshot = kept.json()["operation"]["result"]["snapshot"]
        bigger = await client.post("/v1/sandboxes", json={"snapshot": snapshot, "disk_mib": 4096})
        assert problem(bigger, 422, "invalid_field")["field"] == "disk_mib"
        assert (await client.get("/v1/templates/seed")).status_code == 200
        await service.http.patch("/v1/projects/tenant", json={"templates": [f"seed@{DIGEST[:-1]}0"]})
        # What may not be used is not there: the same answers as for one that nobody has.
        assert (await client.get("/v1/templates")).json()["templates"] == []
        for path in ("seed", "none"):
            problem(await client.get(f"/v1/templates/{path}"), 404, "unknown_template")
        for template in ("seed", "none"):
            answer = await client.post("/v1/sandboxes", json={"template": template, "disk_mib": 1024})
            problem(answer, 422, "unknown_template")
        problem(await client.post("/v1/sandboxes", json={"snapshot": snapshot}), 422, "unknown_template")


async def test_what_a_project_requires_holds_for_sandboxes_from_snapshots(service: Service) -> None:
    sandbox = await service.create()
    kept = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/snapshots", json={"kind": "disk"}, headers=WAIT)
    snapshot = kept.json()["operation"]["result"]["snapshot"]
    await service.http.patch("/v1/projects/default", json={"require_isolation": "hardware"})
    problem(await service.http.post("/v1/sandboxes", json={"snapshot": snapshot}), 422, "isolation_unavailable")


async def test_a_project_with_objects_goes_by_force_only(service: Service, node: NodeDouble) -> None:
    async with tenant(service) as client:
        made = [(await create(client)).json()["sandbox"]["id"] for _ in range(2)]
        kept = await client.post(f"/v1/sandboxes/{made[0]}/snapshots", json={"kind": "full"}, headers=WAIT)
        assert kept.json()["operation"]["status"] == "succeeded"
        await client.post(f"/v1/sandboxes/{made[1]}/stop", headers=WAIT)
        exported = await client.post(f"/v1/sandboxes/{made[1]}/export", json={}, headers=WAIT)
        assert exported.json()["operation"]["status"] == "succeeded"
        found = problem(await service.http.delete("/v1/projects/tenant"), 409, "project_not_empty")
        assert found["objects"] == {"sandboxes": 2, "snapshots": 1, "exports": 1}
        assert (await client.get("/v1/sandboxes")).status_code == 200  # a refusal changed nothing
        answer = await service.http.delete("/v1/projects/tenant", params={"force": "true"})
        assert answer.status_code == 202
        assert answer.json()["project"]["state"] == "deleting"
        refused = await client.get("/v1/sandboxes")
        problem(refused, 401, "key_revoked" if refused.json()["code"] == "key_revoked" else "key_unknown")
        await gone(service, "tenant")
        assert (node.boxes, node.snapshots) == ({}, {})
        assert "export.delete" in node.calls
        problem(await client.get("/v1/sandboxes"), 401, "key_unknown")
    async with tenant(service) as client:
        for path in ("sandboxes", "operations", "snapshots"):
            assert (await client.get(f"/v1/{path}")).json()[path] == []
        assert (await service.http.delete("/v1/projects/tenant")).status_code == 204
    problem(await service.http.delete("/v1/projects/default"), 409, "project_is_default")


async def test_a_project_takes_its_pools_with_it(service: Service, node: NodeDouble) -> None:
    async with tenant(service) as client:
        made = await client.put("/v1/pools/warm", json={"template": "seed", "size": 2})
        assert made.status_code == 201, made.text
        async with asyncio.timeout(WITHIN):
            while sum(one.state == "paused" for one in node.boxes.values()) < 2:
                await asyncio.sleep(0.02)
        problem(await service.http.delete("/v1/projects/tenant"), 409, "project_not_empty")
        assert (await service.http.delete("/v1/projects/tenant", params={"force": "true"})).status_code == 202
        await gone(service, "tenant")
        assert node.boxes == {}


async def gone(service: Service, name: str) -> None:
    async with asyncio.timeout(WITHIN):
        while (await service.http.get(f"/v1/projects/{name}")).status_code != 404:
            await asyncio.sleep(0.02)


async def test_the_end_of_a_project_survives_the_process_and_waits_for_the_node(folder: Path, node: NodeDouble) -> None:
    process = ControlProcess(folder / "control", folder / "node.sock")
    service = await process.start()
    try:
        await service.ready()
        async with tenant(service) as client:
            assert (await create(client)).status_code == 200

        async def refuse(_: Any) -> None:
            raise Unavailable("launcher_unavailable", "It is being restarted.", "")

        node.hooks["sandbox.delete"] = refuse
        answer = await service.http.delete("/v1/projects/tenant", params={"force": "true"})
        assert answer.status_code == 202
        process.kill()
        await service.http.aclose()
        service = await process.start()
        shown = (await service.http.get("/v1/projects/tenant")).json()["project"]
        assert shown["state"] == "deleting"
        made = await service.http.post("/v1/keys", json={"name": "k", "project": "tenant"})
        problem(made, 409, "project_deleting")
        del node.hooks["sandbox.delete"]
        await gone(service, "tenant")
        assert node.boxes == {}
    finally:
        process.kill()
        await service.http.aclose()


# -- quotas


async def test_a_quota_says_which_and_how_much_and_what_to_do(service: Service, node: NodeDouble) -> None:
    async with tenant(service, quotas={"sandboxes": 3, "creates_per_minute": 4}) as client:
        first = (await create(client)).json()["sandbox"]["id"]
        fork = f"/v1/sandboxes/{first}/fork"
        found = problem(await client.post(fork, json={"count": 3}), 403, "quota_exceeded")
        assert {name: found[name] for name in ("quota", "limit", "used", "wanted")} == {
            "quota": "sandboxes",
            "limit": 3,
            "used": 1,
            "wanted": 3,
        }
        assert (await client.post(fork, json={"count": 2}, headers=WAIT)).status_code == 200
        assert len(node.boxes) == 3
        await client.delete(f"/v1/sandboxes/{first}", headers=WAIT)
        assert (await create(client)).status_code == 200
        await client.delete(f"/v1/sandboxes/{next(iter(node.boxes))}", headers=WAIT)
        answer = await create(client)
        found = problem(answer, 429, "create_rate_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert int(answer.headers["retry-after"]) >= found["retry_after_s"]


async def test_requests_at_once_do_not_pass_a_quota_together(service: Service, node: NodeDouble) -> None:
    async with tenant(service, quotas={"running_memory_mib": 5 * 512}) as client:
        answers = await asyncio.gather(*(create(client) for _ in range(12)))
        assert sorted(one.status_code for one in answers) == [200] * 5 + [403] * 7
        assert len(node.boxes) == 5


# -- scopes


async def test_a_key_that_may_only_exec_does_nothing_else(service: Service) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    async with service.client((await key(service, "exec"))["key"]) as client:
        session = await client.post(f"{path}/sessions", json={"argv": ["true"]})
        assert session.status_code == 201
        assert (await client.post(f"{path}/tokens", json={"scopes": ["files"]})).status_code == 201
        for method, at in (
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/pause"),
            ("POST", "/v1/sandboxes"),
            ("POST", f"{path}/fork"),
            ("GET", "/v1/keys"),
            ("GET", "/v1/events"),
        ):
            problem(await client.request(method, at), 403, "scope_missing")
        at = f"/v1/sessions/{session.json()['session']['id']}"
        assert (await client.post(f"{at}/token")).status_code == 200
        assert (await client.delete(at)).status_code == 204
    # A key of before that distinction goes on as it did.
    async with service.client((await key(service, "write"))["key"]) as client:
        assert (await client.post(f"{path}/sessions", json={"argv": ["true"]})).status_code == 201
        assert (await client.post(f"{path}/tokens", json={"scopes": ["files"]})).status_code == 201


async def test_events_of_nodes_are_for_keys_of_the_installation(service: Service) -> None:
    async with (
        tenant(service) as client,
        client.stream("GET", "/v1/events", params={"after": 0}) as theirs,
        service.http.stream("GET", "/v1/events", params={"after": 0}) as ours,
    ):
        lines = ours.aiter_lines()
        async with asyncio.timeout(WITHIN):
            while (await anext(lines)) != "event: node.connected":
                pass
        lines = theirs.aiter_lines()
        seen = []
        async with asyncio.timeout(WITHIN):
            while "event: key.created" not in seen:
                seen.append(await anext(lines))
        assert not [line for line in seen if line.startswith("event: node.")]


# -- the end of keys


async def test_a_revocation_ends_event_streams_and_tokens_at_once(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    made, other = await key(service, "read", "exec"), await key(service, "read")
    async with (
        service.client(made["key"]) as client,
        service.client(other["key"]) as bystander,
        client.stream("GET", "/v1/events") as stream,
        bystander.stream("GET", "/v1/events") as untouched,
    ):
        token = await client.post(f"/v1/sandboxes/{sandbox['id']}/tokens", json={"scopes": ["files"]})
        claims = jwt.decode(token.json()["token"], options={"verify_signature": False})
        assert claims["key"] == made["id"]
        session = await client.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["true"]})
        claims = jwt.decode(session.json()["session"]["token"], options={"verify_signature": False})
        assert claims["key"] == made["id"]
        assert (await service.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
        # The answer is there, so the node knows it.
        assert node.configured is not None
        assert node.configured.revoked_keys == (made["id"],)
        async with asyncio.timeout(WITHIN):
            async for _ in stream.aiter_lines():
                pass  # to its end
        lines = untouched.aiter_lines()
        async with asyncio.timeout(WITHIN):
            while (await anext(lines)) != "event: key.revoked":
                pass
        problem(await client.get("/v1/sandboxes"), 401, "key_revoked")


async def test_a_node_that_was_away_hears_of_revocations_before_it_is_used(service: Service, node: NodeDouble) -> None:
    made = await key(service, "read")
    await node.die()
    assert (await service.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
    node.configured = None
    await node.start()
    await service.ready()
    assert node.configured is not None
    assert node.configured.revoked_keys == (made["id"],)


async def test_a_node_that_does_not_take_a_revocation_is_connected_anew(service: Service, node: NodeDouble) -> None:
    made = await key(service, "read")
    fails = True

    async def fail(_: Any) -> None:
        nonlocal fails
        if fails:
            fails = False
            raise Unavailable("busy", "Not now.", "")

    node.hooks["node.configure"] = fail
    greeted = node.calls.count("node.info")
    assert (await service.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
    async with asyncio.timeout(WITHIN):
        while node.calls.count("node.info") == greeted or (node.configured and not node.configured.revoked_keys):
            await asyncio.sleep(0.01)


async def test_an_event_stream_ends_when_its_key_expires(service: Service) -> None:
    made = await key(service, "read", expires_in_s=1)
    async with service.client(made["key"]) as client, client.stream("GET", "/v1/events") as stream:
        async with asyncio.timeout(WITHIN):
            async for _ in stream.aiter_lines():
                pass
    async with service.client(made["key"]) as client:
        problem(await client.get("/v1/sandboxes"), 401, "key_expired")


async def test_tokens_do_not_outlive_their_key(service: Service) -> None:
    sandbox = await service.create()
    made = await key(service, "exec", expires_in_s=100)
    async with service.client(made["key"]) as client:
        body = {"scopes": ["files"], "ttl_s": 3600}
        token = (await client.post(f"/v1/sandboxes/{sandbox['id']}/tokens", json=body)).json()
        session = (await client.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["x"]})).json()["session"]
        again = (await client.post(f"/v1/sessions/{session['id']}/token")).json()["session"]
    for expires_at in (token["expires_at"], session["token_expires_at"], again["token_expires_at"]):
        assert expires_at <= made["expires_at"]


async def test_a_key_is_rotated_with_and_without_an_overlap(service: Service, node: NodeDouble) -> None:
    old = await key(service, "read", "exec", expires_in_s=1000)
    rotated = await service.http.post(f"/v1/keys/{old['id']}/rotate", json={"overlap_s": 500})
    assert rotated.status_code == 201
    new = rotated.json()["key"]
    assert (new["name"], new["scopes"], new["project"]) == (old["name"], old["scopes"], old["project"])
    assert 990 <= new["expires_at"] - new["created_at"] <= 1010
    shown = (await service.http.get(f"/v1/keys/{old['id']}")).json()["key"]
    assert shown["expires_at"] < old["expires_at"] - 400
    for secret in (old["key"], new["key"]):
        async with service.client(secret) as client:
            assert (await client.get("/v1/sandboxes")).status_code == 200
    headers = {"idempotency-key": "once"}
    at_once = await service.http.post(f"/v1/keys/{new['id']}/rotate", json={"expires_in_s": None}, headers=headers)
    assert at_once.json()["key"]["expires_at"] is None
    again = await service.http.post(f"/v1/keys/{new['id']}/rotate", json={"expires_in_s": None}, headers=headers)
    assert problem(again, 409, "key_already_made")["key"] == at_once.json()["key"]["id"]
    async with service.client(new["key"]) as client:
        problem(await client.get("/v1/sandboxes"), 401, "key_revoked")
    assert node.configured is not None
    assert node.configured.revoked_keys == (new["id"],)
    problem(await service.http.post(f"/v1/keys/{new['id']}/rotate", json={}), 404, "unknown_key")


async def test_keys_of_other_projects_are_for_the_installation(service: Service) -> None:
    async with tenant(service) as client:
        theirs = (await client.get("/v1/keys")).json()["keys"]
        assert [one["project"] for one in theirs] == ["tenant"]
        seen = (await service.http.get("/v1/keys", params={"project": "tenant"})).json()["keys"]
        assert [one["id"] for one in seen] == [one["id"] for one in theirs]
        problem(await service.http.get("/v1/keys", params={"project": "none"}), 404, "unknown_project")
        # A project that is there and one that is not: the same refusal.
        for name in ("default", "none"):
            problem(await client.get("/v1/keys", params={"project": name}), 403, "scope_missing")
            problem(await client.post("/v1/keys", json={"name": "k", "project": name}), 403, "scope_missing")
        # A project's administrator does not end or take over a key of the installation in it.
        body = {"name": "ops", "project": "tenant", "scopes": list(SCOPES)}
        strong = (await service.http.post("/v1/keys", json=body)).json()["key"]
        problem(await client.delete(f"/v1/keys/{strong['id']}"), 403, "scope_missing")
        problem(await client.post(f"/v1/keys/{strong['id']}/rotate", json={}), 403, "scope_missing")
        assert (await service.http.delete(f"/v1/keys/{strong['id']}")).status_code == 204


# -- tokens


async def test_tokens_are_listed_and_revoked(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}/tokens"
    one, two = [(await service.http.post(path, json={"scopes": ["files"]})).json() for _ in range(2)]
    listed = (await service.http.get(path)).json()["tokens"]
    assert [entry["id"] for entry in listed] == [two["token_id"], one["token_id"]]
    assert "eyJ" not in str(listed)  # the tokens themselves are nowhere
    for _ in range(2):
        assert (await service.http.post(f"/v1/tokens/{one['token_id']}/revoke")).status_code == 204
    assert node.configured is not None
    assert node.configured.revoked == (one["token_id"],)
    assert [entry["id"] for entry in (await service.http.get(path)).json()["tokens"]] == [two["token_id"]]
    assert (await service.http.delete(path)).status_code == 204
    assert list(node.configured.cutoffs) == [sandbox["id"]]
    assert node.configured.revoked == ()  # the cut-off says it for all of them
    assert (await service.http.get(path)).json()["tokens"] == []
    three = (await service.http.post(path, json={"scopes": ["files"]})).json()
    claims = jwt.decode(three["token"], options={"verify_signature": False})
    assert claims["iat"] > node.configured.cutoffs[sandbox["id"]]
    assert [entry["id"] for entry in (await service.http.get(path)).json()["tokens"]] == [three["token_id"]]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_another_process_revoked_is_seen_soon(
    folder: Path, node: NodeDouble, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key that is believed for a moment is looked at again, and so is that of an open stream."""
    from hatchway.storage import keys as stored
    from hatchway.storage.database import Database

    monkeypatch.setattr(auth, "TRUSTED_ALONE_S", 0.0)
    monkeypatch.setattr(auth, "LOOK_EVERY_S", 0.05)
    config = ControlConfig(folder=folder / "control", node_socket=node.path, reconcile_every_s=0.05)
    opened: list[Database] = []
    open_ = Database.open

    async def remember(*arguments: Any, **more: Any) -> Database:
        opened.append(await open_(*arguments, **more))
        return opened[-1]

    monkeypatch.setattr(Database, "open", remember)
    async with in_process(config) as service:
        await service.ready()
        made = await key(service, "read")
        async with service.client(made["key"]) as client, client.stream("GET", "/v1/events") as stream:
            await opened[0].write(
                stored.revoke, "default", made["id"]
            )  # as another process would, without a word to this one
            async with asyncio.timeout(WITHIN):
                async for _ in stream.aiter_lines():
                    pass
                problem(await client.get("/v1/sandboxes"), 401, "key_revoked")
                while node.configured is None or node.configured.revoked_keys != (made["id"],):
                    await asyncio.sleep(0.01)
