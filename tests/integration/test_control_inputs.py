"""What the API refuses, and how: every refusal is a problem document with a stable code, the field, and what is allowed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import Service, in_process
from tests.support.node_double import NodeDouble
from tests.support.refusals import check

from hatchway.domain.ids import new_id
from hatchway.storage import keys as stored_keys
from hatchway.storage.database import Database

__all__ = ["database_url", "folder", "node", "service"]


async def test_isolation_that_is_not_there_is_refused(service: Service) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed", "require_isolation": "hardware"})
    problem = check(answer, 422, "isolation_unavailable")
    assert problem["allowed"] == ["emulated"]


async def test_what_a_project_requires_holds_for_all_its_sandboxes(service: Service, node: NodeDouble) -> None:
    async def create(**more: Any) -> httpx.Response:
        return await service.http.post(
            "/v1/sandboxes", json={"template": "seed", **more}, headers={"prefer": "wait=20"}
        )

    stopped = (await create()).json()["sandbox"]["id"]
    paused = (await create()).json()["sandbox"]["id"]
    await service.http.post(f"/v1/sandboxes/{stopped}/stop", headers={"prefer": "wait=20"})
    await service.http.post(f"/v1/sandboxes/{paused}/pause", headers={"prefer": "wait=20"})
    changed = await service.http.patch("/v1/projects/default", json={"require_isolation": "hardware"})
    assert changed.json()["project"]["require_isolation"] == "hardware"
    for more in ({}, {"require_isolation": "hardware"}):
        assert check(await create(**more), 422, "isolation_unavailable")["field"] == "require_isolation"
    problem = check(await create(require_isolation="emulated"), 422, "isolation_unavailable")
    assert problem["allowed"] == ["hardware"]
    for verb in ("start", "wake"):
        answer = await service.http.post(f"/v1/sandboxes/{stopped}/{verb}", headers={"prefer": "wait=20"})
        assert answer.json()["operation"]["error"]["code"] == "isolation_unavailable"
        assert answer.json()["sandbox"]["state"] == "stopped"
    # What runs, or is only paused, goes on.
    answer = await service.http.post(f"/v1/sandboxes/{paused}/wake", headers={"prefer": "wait=20"})
    assert answer.json()["sandbox"]["state"] == "running"
    await service.http.patch("/v1/projects/default", json={"require_isolation": None})
    answer = await service.http.post(f"/v1/sandboxes/{stopped}/start", headers={"prefer": "wait=20"})
    assert answer.json()["sandbox"]["state"] == "running"


async def test_what_a_sandbox_requires_is_held_to_at_every_start(service: Service, node: NodeDouble) -> None:
    made = await service.create(require_isolation="emulated")
    await service.http.post(f"/v1/sandboxes/{made['id']}/stop", headers={"prefer": "wait=20"})
    await node.die()
    node.isolation = "hardware"  # another accelerator after a change of the host
    await node.start()
    answer = await service.http.post(f"/v1/sandboxes/{made['id']}/start", headers={"prefer": "wait=20"})
    assert answer.json()["operation"]["error"]["code"] == "isolation_unavailable"
    assert answer.json()["sandbox"]["state"] == "stopped"


async def test_another_project_is_unknown_and_changes_need_admin(service: Service) -> None:
    check(await service.http.get("/v1/projects/other"), 404, "unknown_project")
    check(await service.http.patch("/v1/projects/other", json={}), 404, "unknown_project")
    assert (await service.http.patch("/v1/projects/default", json={})).json()["project"]["require_isolation"] is None
    shown = await service.http.get("/v1/projects/default")
    listed = (await service.http.get("/v1/projects")).json()["projects"]
    assert listed == [{**shown.json()["project"], "usage": None}]


@pytest.mark.parametrize("kind", [None, "application/json", "Application/JSON; charset=utf-8"])
async def test_a_body_that_says_it_is_json_is_read(service: Service, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await service.http.post("/v1/sandboxes", content=b'{"template": "seed"}', headers=headers)
    assert answer.status_code == 202, answer.text


NESTED: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"pty": {"colour": 1}}, "unknown_field", "pty.colour", ["rows", "cols"]),
    ({"pty": {"a` - at `$.b": 1}}, "unknown_field", "pty.a` - at `$.b", ["rows", "cols"]),
    ({"pty": {"rows": "x"}}, "invalid_field", "pty.rows", {"type": "integer", "minimum": 1, "maximum": 1000}),
    ({"pty": {"rows": 0}}, "invalid_field", "pty.rows", {"type": "integer", "minimum": 1, "maximum": 1000}),
]


@pytest.mark.parametrize(("more", "code", "field", "allowed"), NESTED)
async def test_a_bad_field_within_another_is_named(
    service: Service, more: dict[str, Any], code: str, field: str, allowed: Any
) -> None:
    sandbox = await service.create()
    answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["true"], **more})
    problem = check(answer, 422, code)
    assert (problem["field"], problem["allowed"]) == (field, allowed)


async def test_a_large_body_is_refused_whether_its_length_is_announced_or_not(service: Service) -> None:
    large = json.dumps({"template": "seed", "env": {"A": "x" * (1 << 20)}}).encode()
    check(await service.http.post("/v1/sandboxes", content=large), 413, "body_too_large")

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(large), 65536):
            yield large[at : at + 65536]

    check(await service.http.post("/v1/sandboxes", content=pieces()), 413, "body_too_large")


async def test_a_body_without_end_is_cut_off_at_the_bound(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        b"authorization: Bearer " + service.key.encode() + b"\r\n\r\n"
    )

    async def flood() -> None:
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        while True:
            writer.write(chunk)
            await writer.drain()

    flooding = asyncio.create_task(flood())
    try:
        # Whoever still sends when the connection is closed may be told so before the answer could be read.
        with contextlib.suppress(ConnectionResetError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
            assert b" 413 " in head
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        writer.close()


async def test_the_ids_of_another_project_answer_like_unknown_ones(folder: Any, node: NodeDouble) -> None:
    from hatchway.control.main import ControlConfig

    config = ControlConfig(folder=folder / "control", node_socket=node.path)
    async with in_process(config) as service:
        sandbox = await service.create()
        session = (await service.http.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["x"]})).json()[
            "session"
        ]
        operation = (await service.http.get("/v1/operations")).json()["operations"][0]
    database = await Database.open(str(config.database))
    await database.write(keys_ensure_other)
    _, secret = await database.write(
        lambda connection: stored_keys.create(connection, project="other", name="o", scopes=stored_keys.SCOPES)
    )
    await database.close()
    async with in_process(config) as service, service.client(secret) as other:
        mine = [
            ("GET", f"/v1/sandboxes/{sandbox['id']}"),
            ("DELETE", f"/v1/sandboxes/{sandbox['id']}"),
            ("POST", f"/v1/sandboxes/{sandbox['id']}/pause"),
            ("GET", f"/v1/sandboxes/{sandbox['id']}/sessions"),
            ("GET", f"/v1/sessions/{session['id']}"),
            ("POST", f"/v1/sessions/{session['id']}/token"),
            ("GET", f"/v1/operations/{operation['id']}"),
        ]
        for method, path in mine:
            theirs = await other.request(method, path)
            unknown = await other.request(
                method,
                path.replace(sandbox["id"], fake := new_id())
                .replace(session["id"], fake)
                .replace(operation["id"], fake),
            )
            assert theirs.status_code == unknown.status_code == 404
            hidden = theirs.text
            for real in (sandbox["id"], session["id"], operation["id"]):
                hidden = hidden.replace(real, fake)
            assert hidden == unknown.text
        assert (await other.get("/v1/sandboxes")).json()["sandboxes"] == []
        assert (await other.get("/v1/operations")).json()["operations"] == []


def keys_ensure_other(connection: Any) -> None:
    stored_keys.ensure_project(connection, "other")


BAD_SESSIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "argv"),
    ({"argv": ["a"], "command": "a"}, "argv"),
    ({"argv": []}, "argv"),
    ({"argv": [""]}, "argv[0]"),
    ({"argv": ["a\0b"]}, "argv"),
    ({"argv": ["a"] * 513}, "argv"),
    ({"argv": ["a" * 300_000]}, "argv"),
    ({"argv": "ls"}, "argv"),
    ({"command": ""}, "command"),
    ({"command": "a\0"}, "command"),
    ({"argv": ["a"], "cwd": "relative"}, "cwd"),
    ({"argv": ["a"], "user": "no such:user"}, "user"),
    ({"argv": ["a"], "pty": {"rows": 0}}, "pty.rows"),
    ({"argv": ["a"], "pty": True}, "pty"),
    ({"argv": ["a"], "timeout_s": 0}, "timeout_s"),
    ({"argv": ["a"], "timeout_s": -1}, "timeout_s"),
    ({"argv": ["a"], "retain_s": -1}, "retain_s"),
    ({"argv": ["a"], "limits": {"memory_mib": 1}}, "limits.memory_mib"),
    ({"argv": ["a"], "limits": {"cpu_s": 0}}, "limits.cpu_s"),
    ({"argv": ["a"], "limits": {"processes": 0}}, "limits.processes"),
    ({"argv": ["a"], "limits": {"open_files": "many"}}, "limits.open_files"),
    ({"argv": ["a"], "limits": {"file_size_mib": -1}}, "limits.file_size_mib"),
    ({"argv": ["a"], "env": {"": "x"}}, "env."),
    ({"argv": ["a"], "stdin": "yes"}, "stdin"),
]


async def test_bad_sessions(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}/sessions"
    for body, field in BAD_SESSIONS:
        problem = check(await service.http.post(path, json=body), 422, "invalid_field")
        assert problem["field"] == field, body
    problem = check(await service.http.post(path, json={"argv": ["a"], "ulimits": {}}), 422, "unknown_field")
    assert problem["field"] == "ulimits"
    assert node.sessions == {}


async def test_sessions_need_a_sandbox_that_runs(service: Service) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    await service.http.post(f"{path}/pause", headers={"prefer": "wait=20"})
    problem = check(await service.http.post(f"{path}/sessions", json={"argv": ["a"]}), 409, "sandbox_not_running")
    assert set(problem["verbs"]) == {
        "pause",
        "resume",
        "stop",
        "wake",
        "suspend",
        "fork",
        "snapshot",
        "rollback",
        "delete",
    }
    await service.http.request("DELETE", path, headers={"prefer": "wait=20"})
    check(await service.http.post(f"{path}/sessions", json={"argv": ["a"]}), 410, "sandbox_deleted")


async def test_a_verb_from_the_wrong_state_says_what_is_possible(service: Service) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    await service.http.post(f"{path}/stop", headers={"prefer": "wait=20"})
    problem = check(await service.http.post(f"{path}/pause"), 409, "wrong_state")
    assert problem["state"] == "stopped"
    assert set(problem["verbs"]) == {"start", "stop", "wake", "snapshot", "rollback", "export", "delete"}
    check(await service.http.post(f"{path}/pause", json={"grace": 1}), 422, "unknown_field")


@pytest.mark.parametrize("prefer", ["wait=x", "wait=-1", "wait", "wait=99999999999999", ", ,;", "wait=1.5"])
async def test_a_preference_that_cannot_be_read_is_not_followed(service: Service, prefer: str) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"prefer": prefer})
    assert answer.status_code in (200, 202)
    assert "preference-applied" not in answer.headers


async def test_a_long_wait_is_bounded(service: Service) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"prefer": "wait=3600"})
    assert answer.headers["preference-applied"] == "wait=60"


async def test_openapi_describes_every_path_that_is_served(service: Service) -> None:
    async with service.client(None) as nobody:
        document = (await nobody.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    text = str(document)
    for reference in {part.split("'")[0] for part in text.split("'$ref': '")[1:]}:
        target: Any = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
    for path, methods in document["paths"].items():
        concrete = path.replace("{id}", new_id()).replace("{reference}", "none")
        for method, described in methods.items():
            if described["tags"] == ["events"]:
                continue
            answer = await service.http.request(method.upper(), concrete)
            assert str(answer.status_code) in described["responses"], f"{method} {path}: {answer.status_code}"
            assert answer.json()["code"] != "unknown_path" if answer.status_code == 404 else True
        other = await service.http.request(
            next(one for one in ("PUT", "PATCH") if one.lower() not in methods), concrete
        )
        assert other.status_code == 405
        assert sorted(other.headers["allow"].split(", ")) == sorted(method.upper() for method in methods)
    schema = document["components"]["schemas"]["CreateSandbox"]
    assert schema["properties"]["vcpus"]["maximum"] == 32
    assert schema["additionalProperties"] is False
    ids = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids))
