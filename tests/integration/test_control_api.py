"""API v1 over HTTP, the real application against a node double: what works."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import DIGEST, NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.ids import is_id
from hatchway.wire import tokens
from hatchway.wire.node import Event, Exit, Progress, SessionLimits

__all__ = ["database_url", "folder", "node", "service"]


async def test_create_waits_for_the_end_where_the_client_prefers_that(service: Service, node: NodeDouble) -> None:
    answer = await service.http.post(
        "/v1/sandboxes",
        json={"template": "seed", "name": "My_box", "metadata": {"team": "a"}, "env": {"A": "1"}, "vcpus": 2},
        headers={"prefer": "wait=20"},
    )
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "wait=20"
    body = answer.json()
    sandbox, operation = body["sandbox"], body["operation"]
    assert is_id(sandbox["id"])
    assert sandbox["state"] == sandbox["desired"] == "running"
    assert sandbox["template"] == "seed:latest"
    assert sandbox["template_digest"] == DIGEST
    assert (sandbox["vcpus"], sandbox["memory_mib"], sandbox["disk_mib"]) == (2, 512, 4096)
    assert sandbox["isolation"] == "emulated"
    assert sandbox["operation"] is None
    assert sandbox["conditions"] == []
    assert "env" not in sandbox
    assert operation["status"] == "succeeded"
    assert operation["kind"] == "create"
    assert operation["target"] == sandbox["id"]
    assert operation["result"]["phases_ms"] == {"restore": 1.0}
    assert answer.headers["location"] == f"/v1/operations/{operation['id']}"
    spec = node.specs[sandbox["id"]]
    assert spec.env == {"A": "1"}
    assert spec.hostname == "my-box"
    assert spec.project == "default"


async def test_create_without_a_preference_is_accepted_and_ends_by_itself(service: Service, node: NodeDouble) -> None:
    go = asyncio.Event()

    async def hold(_: Any) -> None:
        await go.wait()

    node.hooks["sandbox.create"] = hold
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed:latest"})
    assert answer.status_code == 202
    body = answer.json()
    assert body["sandbox"]["state"] == "pending"
    assert body["operation"]["status"] in ("pending", "running")
    assert body["sandbox"]["operation"]["id"] == body["operation"]["id"]
    shown = await service.get(body["sandbox"]["id"])
    assert shown["operation"]["kind"] == "create"
    go.set()
    operation = await service.operation(body["operation"]["id"])
    assert operation["status"] == "succeeded"
    assert (await service.get(body["sandbox"]["id"]))["state"] == "running"


async def test_a_wait_that_is_too_short_answers_202_with_how_far_it_is(service: Service, node: NodeDouble) -> None:
    go = asyncio.Event()

    async def hold(request: Any) -> None:
        node.tell(Event(progress=Progress(sandbox_id=request.sandbox_id, phase="bake", fraction=0.5)))
        await go.wait()

    node.hooks["sandbox.create"] = hold
    answer = await service.http.post(
        "/v1/sandboxes", json={"template": "seed"}, headers={"prefer": "respond-async, wait=1"}
    )
    assert answer.status_code == 202
    operation = answer.json()["operation"]
    assert (operation["status"], operation["phase"], operation["progress"]) == ("running", "bake", 0.5)
    listed = (await service.http.get("/v1/operations", params={"status": "running"})).json()["operations"]
    assert [one["id"] for one in listed] == [operation["id"]]
    assert (await service.http.get("/v1/operations", params={"status": "pending"})).json()["operations"] == []
    go.set()
    assert (await service.operation(operation["id"]))["status"] == "succeeded"


async def test_every_verb_moves_the_sandbox_and_a_repeated_one_does_nothing(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    steps = [
        ("pause", "paused"),
        ("resume", "running"),
        ("pause", "paused"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("wake", "running"),
        ("suspend", "suspended"),
        ("restore", "running"),
        ("pause", "paused"),
        ("suspend", "suspended"),
        ("wake", "running"),
        ("stop", "stopped"),
        ("start", "running"),
    ]
    for verb, state in steps:
        answer = await service.http.post(f"{path}/{verb}", headers={"prefer": "wait=20"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["sandbox"]["state"] == state
        assert answer.json()["operation"]["result"]["changed"] is True
        before = len(node.calls)
        again = await service.http.post(f"{path}/{verb}")
        assert again.status_code == 200
        assert again.json()["operation"]["status"] == "succeeded"
        assert again.json()["operation"]["result"] == {"state": state, "changed": False}
        assert len(node.calls) == before
    assert (await service.get(sandbox["id"]))["boot_id"] != sandbox["boot_id"]


async def test_delete_is_idempotent_and_the_sandbox_stays_visible(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    first = await service.http.request("DELETE", path, headers={"prefer": "wait=20"})
    assert first.json()["sandbox"]["state"] == "deleted"
    assert node.boxes == {}
    again = await service.http.delete(path)
    assert again.status_code == 200
    assert again.json()["operation"]["result"]["changed"] is False
    shown = await service.get(sandbox["id"])
    assert shown["state"] == "deleted"
    assert shown["deleted_at"] is not None
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []
    listed = (await service.http.get("/v1/sandboxes", params={"state": "deleted"})).json()["sandboxes"]
    assert [one["id"] for one in listed] == [sandbox["id"]]
    assert (await service.http.post(f"{path}/start")).status_code == 410
    assert (await service.http.patch(path, json={"name": "x"})).status_code == 410


async def test_lists_page_and_filter(service: Service) -> None:
    made = [await service.create(name=f"s{n}", metadata={"parity": str(n % 2)}) for n in range(5)]
    names: list[str] = []
    cursor: str | None = None
    pages = 0
    while True:
        params = {"limit": "2", **({"cursor": cursor} if cursor else {})}
        page = (await service.http.get("/v1/sandboxes", params=params)).json()
        names += [one["name"] for one in page["sandboxes"]]
        pages += 1
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert names == ["s4", "s3", "s2", "s1", "s0"]
    assert pages == 3
    odd = (await service.http.get("/v1/sandboxes", params={"metadata.parity": "1", "state": "running,paused"})).json()
    assert [one["name"] for one in odd["sandboxes"]] == ["s3", "s1"]
    assert (await service.http.get("/v1/sandboxes", params={"template": "other"})).json()["sandboxes"] == []
    named = (await service.http.get("/v1/sandboxes", params={"name": "s2", "template": "seed"})).json()["sandboxes"]
    assert [one["id"] for one in named] == [made[2]["id"]]
    operations = (await service.http.get("/v1/operations", params={"target": made[0]["id"]})).json()["operations"]
    assert [one["kind"] for one in operations] == ["create"]


async def test_name_and_metadata_can_be_changed_and_survive_pause(service: Service) -> None:
    sandbox = await service.create(metadata={"a": "1", "b": "2"})
    path = f"/v1/sandboxes/{sandbox['id']}"
    changed = (await service.http.patch(path, json={"metadata": {"c": "3"}, "name": "n"})).json()["sandbox"]
    assert (changed["metadata"], changed["name"]) == ({"c": "3"}, "n")
    assert changed["version"] > sandbox["version"]
    for verb in ("pause", "resume", "pause", "resume", "pause", "resume"):
        moved = await service.http.post(f"{path}/{verb}", headers={"prefer": "wait=20"})
        assert moved.json()["sandbox"]["metadata"] == {"c": "3"}
    cleared = (await service.http.patch(path, json={"name": None})).json()["sandbox"]
    assert (cleared["name"], cleared["metadata"]) == (None, {"c": "3"})


async def test_an_idempotency_key_makes_one_sandbox_of_many_requests(service: Service, node: NodeDouble) -> None:
    headers = {"idempotency-key": "once"}
    answers = await asyncio.gather(
        *(service.http.post("/v1/sandboxes", json={"template": "seed"}, headers=headers) for _ in range(8))
    )
    assert {answer.status_code for answer in answers} <= {200, 202}
    bodies = [answer.json() for answer in answers]
    assert len({body["sandbox"]["id"] for body in bodies}) == 1
    assert len({body["operation"]["id"] for body in bodies}) == 1
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 7
    await service.operation(bodies[0]["operation"]["id"])
    assert node.calls.count("sandbox.create") == 1
    other = await service.http.post("/v1/sandboxes", json={"template": "seed", "vcpus": 2}, headers=headers)
    assert other.status_code == 422
    assert other.json()["code"] == "idempotency_key_reused"
    waited = await service.http.post(
        "/v1/sandboxes", json={"template": "seed"}, headers={**headers, "prefer": "wait=20"}
    )
    assert waited.status_code == 200
    assert waited.json()["sandbox"]["state"] == "running"
    deleted = await service.http.request(
        "DELETE", f"/v1/sandboxes/{bodies[0]['sandbox']['id']}", headers={"idempotency-key": "del", "prefer": "wait=9"}
    )
    again = await service.http.request(
        "DELETE", f"/v1/sandboxes/{bodies[0]['sandbox']['id']}", headers={"idempotency-key": "del"}
    )
    assert again.json() == deleted.json()


async def test_the_limits_of_a_session_reach_the_node_and_are_shown(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    limits = {"memory_mib": 64, "cpu_s": 1.5, "open_files": 32, "processes": 8, "file_size_mib": 1}
    path = f"/v1/sandboxes/{sandbox['id']}/sessions"
    session = (await service.http.post(path, json={"argv": ["true"], "limits": limits})).json()["session"]
    assert session["limits"] == limits
    assert node.session_specs[session["id"]].limits == SessionLimits(**limits)
    some = (await service.http.post(path, json={"argv": ["true"], "limits": {"cpu_s": 2}})).json()["session"]
    assert some["limits"] == {"cpu_s": 2}
    assert (await service.http.post(path, json={"argv": ["true"]})).json()["session"]["limits"] is None


async def test_a_session_is_recorded_by_the_node_before_it_is_answered(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}/sessions"
    answer = await service.http.post(path, json={"command": "echo $HOME", "env": {"A": "b"}, "timeout_s": 5})
    assert answer.status_code == 201
    session = answer.json()["session"]
    assert session["process_id"] == 1
    assert session["state"] == "created"
    assert session["attach_url"] == f"{node.attach_url}/v1/sessions/{session['id']}/attach"
    spec = node.session_specs[session["id"]]
    assert spec.argv == ("/bin/bash", "-lc", "echo $HOME")
    assert (spec.user, spec.cwd, spec.env, spec.timeout_s) == ("user", "/home/user", {"A": "b"}, 5)
    assert node.configured is not None
    public = {key.key_id: key.public for key in node.configured.token_keys}
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    checkers = {name: Ed25519PublicKey.from_public_bytes(raw) for name, raw in public.items()}
    claims = tokens.verify(session["token"], checkers)
    assert (claims.session_id, claims.sandbox_id, claims.project) == (session["id"], sandbox["id"], "default")
    assert claims.expires_at == session["token_expires_at"] > time.time()

    second = (
        await service.http.post(path, json={"argv": ["id"], "user": "root", "pty": {"rows": 10, "cols": 20}})
    ).json()["session"]
    assert second["process_id"] == 2
    assert second["pty"] == {"rows": 10, "cols": 20}
    assert node.session_specs[second["id"]].cwd == "/root"
    listed = (await service.http.get(path)).json()["sessions"]
    assert [one["process_id"] for one in listed] == [2, 1]
    assert "token" not in listed[0]

    renewed = (await service.http.post(f"/v1/sessions/{session['id']}/token")).json()["session"]
    assert tokens.verify(renewed["token"], checkers).token_id != claims.token_id


async def test_a_session_shows_what_its_node_knows_even_when_that_is_away(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    session = (await service.http.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["true"]})).json()[
        "session"
    ]
    path = f"/v1/sessions/{session['id']}"
    node.session_becomes(session["id"], state="running", pid=42, started_at=1.0)
    assert (await service.http.get(path)).json()["session"]["pid"] == 42
    node.session_becomes(
        session["id"], state="ended", exit=Exit(reason="exited", code=3), stdout_bytes=7, retain_until=9.0
    )
    async with asyncio.timeout(WITHIN):
        while True:
            rows = (await service.http.get(f"/v1/sandboxes/{sandbox['id']}/sessions")).json()["sessions"]
            if rows[0]["state"] == "ended":
                break
            await asyncio.sleep(0.01)
    await node.die()
    shown = (await service.http.get(path)).json()["session"]
    assert (shown["state"], shown["exit"]["code"], shown["stdout_bytes"], shown["retain_until"]) == ("ended", 3, 7, 9.0)
    await node.start()


async def test_a_session_that_is_deleted_is_unknown_here_and_there(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    session = (await service.http.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["true"]})).json()[
        "session"
    ]
    assert (await service.http.delete(f"/v1/sessions/{session['id']}")).status_code == 204
    assert session["id"] not in node.sessions
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/token")):
        answer = await service.http.request(method, f"/v1/sessions/{session['id']}{path}")
        assert answer.status_code == 404
        assert answer.json()["code"] == "unknown_session"


async def test_a_repeated_session_request_makes_one_process(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}/sessions"
    headers = {"idempotency-key": "one"}
    first = await service.http.post(path, json={"argv": ["true"]}, headers=headers)
    second = await service.http.post(path, json={"argv": ["true"]}, headers=headers)
    assert first.json()["session"]["id"] == second.json()["session"]["id"]
    assert second.headers["idempotency-replayed"] == "true"
    assert len(node.session_specs) == 1


async def test_keys_are_shown_once_limited_by_scope_and_revoked_at_once(service: Service) -> None:
    made = await service.http.post("/v1/keys", json={"name": "reader", "scopes": ["read"]})
    assert made.status_code == 201
    key = made.json()["key"]
    assert key["key"].startswith("hw_")
    assert key["key"].startswith(key["prefix"])
    async with service.client(key["key"]) as reader:
        assert (await reader.get("/v1/sandboxes")).status_code == 200
        denied = await reader.post("/v1/sandboxes", json={"template": "seed"})
        assert (denied.status_code, denied.json()["code"]) == (403, "scope_missing")
        assert (await reader.get("/v1/keys")).status_code == 403
        own = (await reader.get("/v1/key")).json()["key"]
        assert (own["id"], own["scopes"], own["project"]) == (key["id"], ["read"], key["project"])
        assert "key" not in own, "no secret"
        assert (await service.http.delete(f"/v1/keys/{key['id']}")).status_code == 204
        refused = await reader.get("/v1/sandboxes")
        assert (refused.status_code, refused.json()["code"]) == (401, "key_revoked")
    listed = (await service.http.get("/v1/keys")).json()["keys"]
    assert [one["name"] for one in listed] == ["development"]
    assert "secret" not in str(listed)
    assert key["key"] not in str(listed)
    assert (await service.http.get(f"/v1/keys/{key['id']}")).status_code == 404


async def test_a_key_expires(service: Service) -> None:
    made = (await service.http.post("/v1/keys", json={"name": "short", "expires_in_s": 1})).json()["key"]
    assert made["expires_at"] - made["created_at"] == pytest.approx(1, abs=0.5)
    async with service.client(made["key"]) as client, asyncio.timeout(WITHIN):
        assert (await client.get("/v1/projects")).json()["projects"][0]["name"] == "default"
        while (answer := await client.get("/v1/projects")).status_code == 200:
            await asyncio.sleep(0.05)
        assert answer.json()["code"] == "key_expired"


async def test_a_repeated_key_request_does_not_make_a_second_key(service: Service) -> None:
    headers = {"idempotency-key": "k"}
    first = await service.http.post("/v1/keys", json={"name": "a"}, headers=headers)
    second = await service.http.post("/v1/keys", json={"name": "a"}, headers=headers)
    assert second.status_code == 409
    assert second.json()["key"] == first.json()["key"]["id"]


async def test_templates(service: Service) -> None:
    page = (await service.http.get("/v1/templates")).json()
    assert [(one["name"], one["tag"], one["digest"]) for one in page["templates"]] == [("seed", "latest", DIGEST)]
    for reference in ("seed", "seed:latest", f"seed@{DIGEST}"):
        assert (await service.http.get(f"/v1/templates/{reference}")).json()["template"]["digest"] == DIGEST
    assert (await service.http.get("/v1/templates/none")).status_code == 404


async def test_health_and_readiness(service: Service, node: NodeDouble) -> None:
    async with service.client(None) as nobody:
        assert (await nobody.get("/healthz")).json()["status"] == "ok"
        assert (await nobody.get("/readyz")).status_code == 200
        await node.die()
        async with asyncio.timeout(WITHIN):
            while (answer := await nobody.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
        assert answer.status_code == 503
        assert answer.json()["checks"]["database"] == "ok"
        assert (await nobody.get("/healthz")).status_code == 200
        await node.start()


async def read_events(answer: httpx.Response, count: int) -> list[tuple[int, str, str]]:
    """The next events that are no pings: id, kind, data."""
    found: list[tuple[int, str, str]] = []
    fields: dict[str, str] = {}
    async with asyncio.timeout(WITHIN):
        async for line in answer.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields.get("event", "ping") != "ping":
                found.append((int(fields["id"]), fields["event"], fields["data"]))
                fields = {}
                if len(found) == count:
                    return found
            else:
                fields = {}
    raise AssertionError(f"the stream ended after {found}")


async def test_events_stream_live_and_go_on_after_the_last_one_seen(service: Service) -> None:
    async with service.http.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        sandbox = await service.create()
        live = await read_events(answer, 3)
    assert [kind for _, kind, _ in live] == ["operation.accepted", "operation.succeeded", "sandbox.state_changed"]
    assert sandbox["id"] in live[0][2]
    await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause", headers={"prefer": "wait=20"})
    resumed = {"last-event-id": str(live[1][0])}
    async with service.http.stream("GET", "/v1/events", headers=resumed) as answer:
        rest = await read_events(answer, 4)
    assert rest[0] == live[2]
    assert [kind for _, kind, _ in rest[1:]] == ["operation.accepted", "operation.succeeded", "sandbox.state_changed"]
    other = await service.create()
    async with service.http.stream("GET", "/v1/events", params={"after": "0", "subject": other["id"]}) as answer:
        mine = await read_events(answer, 3)
    assert all(other["id"] in data for _, _, data in mine)


async def test_event_streams_are_bounded_and_given_back(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, max_event_streams=3
    )
    async with in_process(config) as service:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                answer = await stack.enter_async_context(service.http.stream("GET", "/v1/events"))
                assert answer.status_code == 200
            refused = await service.http.get("/v1/events")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            assert refused.headers["retry-after"] == "1"
        async with asyncio.timeout(WITHIN):
            status = 429
            while status != 200:
                async with service.http.stream("GET", "/v1/events") as answer:
                    status = answer.status_code
                await asyncio.sleep(0.01)


async def test_an_open_event_stream_does_not_hold_up_the_end_of_the_service(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    async with contextlib.AsyncExitStack() as streams, in_process(config) as service:
        client = await streams.enter_async_context(service.client(service.key))
        answer = await streams.enter_async_context(client.stream("GET", "/v1/events"))
        lines = answer.aiter_lines()
        assert await anext(lines) == "retry: 500"
        began = time.monotonic()
    assert time.monotonic() - began < 4


async def test_a_token_of_a_sandbox(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}/tokens"
    answer = await service.http.post(path, json={"scopes": ["ports", "files", "ports"], "ttl_s": 60})
    assert answer.status_code == 201
    made = answer.json()
    assert made["scopes"] == ["files", "ports"]
    assert made["sandbox_id"] == sandbox["id"]
    assert made["data_plane_url"] == node.attach_url
    assert made["port_url"] == f"http://{{port}}-{sandbox['id']}.localhost:7071/"
    assert node.configured is not None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    keys = {key.key_id: Ed25519PublicKey.from_public_bytes(key.public) for key in node.configured.token_keys}
    claims = tokens.verify(made["token"], keys)
    assert (claims.sandbox_id, claims.session_id, claims.project) == (sandbox["id"], None, "default")
    assert (claims.token_id, claims.scopes) == (made["token_id"], {"files", "ports"})
    assert time.time() < claims.expires_at == made["expires_at"] <= time.time() + 60
    hour = (await service.http.post(path, json={"scopes": ["sessions"]})).json()
    assert time.time() + 3500 < hour["expires_at"] <= time.time() + 3600

    for bad, field in (
        ({"scopes": []}, "scopes"),
        ({"scopes": ["write"]}, "scopes[0]"),
        ({"scopes": ["files"], "ttl_s": 0.5}, "ttl_s"),
        ({"scopes": ["files"], "ttl_s": 86_401}, "ttl_s"),
    ):
        refused = await service.http.post(path, json=bad)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")
        assert refused.json()["field"] == field
    await service.http.post(f"/v1/sandboxes/{sandbox['id']}/stop", headers={"prefer": "wait=20"})
    assert (await service.http.post(path, json={"scopes": ["files"]})).status_code == 201

    async with service.http.stream("GET", f"/v1/events?after=0&subject={sandbox['id']}") as events:
        async for line in events.aiter_lines():
            if line.startswith("data:") and '"token.created"' in line:
                data = json.loads(line.removeprefix("data:"))["data"]
                break
    assert (data["token"], data["scopes"]) == (made["token_id"], ["files", "ports"])
    assert made["token"] not in json.dumps(data)
    await service.http.request("DELETE", f"/v1/sandboxes/{sandbox['id']}", headers={"prefer": "wait=20"})
    gone = await service.http.post(path, json={"scopes": ["files"]})
    assert (gone.status_code, gone.json()["code"]) == (410, "sandbox_deleted")
