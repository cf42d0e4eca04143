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

from hatchway.domain.ids import new_id
from hatchway.storage import keys as stored_keys
from hatchway.storage.database import Database

__all__ = ["database_url", "folder", "node", "service"]


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document, after a look at its form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert body["code"] == code, body
    assert body["title"]
    assert body["detail"] == body["cause"] != ""
    assert body["remedy"]
    assert body["type"].endswith(code)
    return body


BAD_CREATES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "missing_field", "template"),
    ({"template": "nothing:latest"}, "unknown_template", "template"),
    ({"template": "Bad Name"}, "invalid_field", "template"),
    ({"template": 7}, "invalid_field", "template"),
    ({"template": "seed", "lifetime": 60}, "unknown_field", "lifetime"),
    ({"template": "seed", "pools": "auto"}, "unknown_field", "pools"),
    ({"template": "seed", "vcpus": 0}, "invalid_field", "vcpus"),
    ({"template": "seed", "vcpus": 33}, "invalid_field", "vcpus"),
    ({"template": "seed", "vcpus": "2"}, "invalid_field", "vcpus"),
    ({"template": "seed", "vcpus": 1.5}, "invalid_field", "vcpus"),
    ({"template": "seed", "vcpus": True}, "invalid_field", "vcpus"),
    ({"template": "seed", "memory_mib": 127}, "invalid_field", "memory_mib"),
    ({"template": "seed", "memory_mib": 10**30}, "invalid_field", "memory_mib"),
    ({"template": "seed", "disk_mib": 1}, "invalid_field", "disk_mib"),
    ({"template": "seed", "name": "-x"}, "invalid_field", "name"),
    ({"template": "seed", "name": "x" * 64}, "invalid_field", "name"),
    ({"template": "seed", "require_isolation": "total"}, "invalid_field", "require_isolation"),
    ({"template": "seed", "metadata": {"bad key": "x"}}, "invalid_field", "metadata.bad key"),
    ({"template": "seed", "metadata": {"k": 1}}, "invalid_field", "metadata[...]"),
    ({"template": "seed", "metadata": {"k": "x" * 513}}, "invalid_field", "metadata.k"),
    ({"template": "seed", "metadata": {f"k{n}": "" for n in range(65)}}, "invalid_field", "metadata"),
    ({"template": "seed", "env": {"1A": "x"}}, "invalid_field", "env.1A"),
    ({"template": "seed", "env": {"A": "a\0b"}}, "invalid_field", "env.A"),
    ({"template": "seed", "env": {"A": "x" * 40_000}}, "invalid_field", "env"),
    ({"template": "seed", "env": ["A=1"]}, "invalid_field", "env"),
]


@pytest.mark.parametrize(("body", "code", "field"), BAD_CREATES)
async def test_a_bad_create_says_which_field(service: Service, body: dict[str, Any], code: str, field: str) -> None:
    problem = check(await service.http.post("/v1/sandboxes", json=body), 422, code)
    assert problem["field"] == field
    if code == "invalid_field":
        assert problem["allowed"]
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []


async def test_what_is_allowed_is_said_in_words_and_for_programs(service: Service) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed", "vcpus": 99})
    problem = check(answer, 422, "invalid_field")
    assert problem["allowed"] == {"type": "integer", "minimum": 1, "maximum": 32}
    assert "from 1 to 32" in problem["remedy"]


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


@pytest.mark.parametrize(
    "octets",
    [
        b"{",
        b"",
        b"nonsense",
        b'{"template": "seed"',
        b'{"template": "\xff"}',
        b'{"template": "\\ud800"}',
    ],
)
async def test_a_body_that_is_no_json_is_refused(service: Service, octets: bytes) -> None:
    answer = await service.http.post("/v1/sandboxes", content=octets)
    check(answer, 400, "invalid_json" if octets else "body_missing")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json", ""])
async def test_a_body_that_says_it_is_no_json_is_refused(service: Service, kind: str) -> None:
    answer = await service.http.post("/v1/sandboxes", content=b'{"template": "seed"}', headers={"content-type": kind})
    assert check(answer, 415, "unsupported_media_type")["allowed"] == ["application/json"]
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []


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


@pytest.mark.parametrize(
    "octets", [b'{"template": "\\ud800"}', b'{"template": "\\udc00"}', b'{"template": "\\ud800x"}']
)
async def test_half_a_surrogate_pair_is_named_as_such(service: Service, octets: bytes) -> None:
    problem = check(await service.http.post("/v1/sandboxes", content=octets), 400, "invalid_json")
    assert "surrogate" in problem["cause"]


@pytest.mark.parametrize("octets", [b"[]", b"null", b'"seed"', b"7", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(service: Service, octets: bytes) -> None:
    check(await service.http.post("/v1/sandboxes", content=octets), 422, "invalid_field")


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


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "key_missing"),
        ("", "key_unknown"),
        ("Bearer", "key_unknown"),
        ("Bearer nothing", "key_unknown"),
        ("Bearer hw_" + "a" * 40, "key_unknown"),
        ("Bearer hw_" + "a" * 4000, "key_unknown"),
        ("Basic aGFsbG86aGFsbG8=", "key_unknown"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/sandboxes/" + "a" * 20, "/v1/keys", "/v1/events"])
async def test_without_a_key_nothing_is_said(service: Service, header: str | None, code: str, path: str) -> None:
    async with service.client(None) as nobody:
        answer = await nobody.get(path, headers={} if header is None else {"authorization": header})
    check(answer, 401, code)
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_unknown_paths_and_methods(service: Service) -> None:
    check(await service.http.get("/v2/sandboxes"), 404, "unknown_path")
    check(await service.http.get("/v1/sandboxes/"), 404, "unknown_path")
    answer = await service.http.put("/v1/sandboxes")
    problem = check(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"
    assert problem["allow"] == ["GET", "POST"]


@pytest.mark.parametrize("name", ["x", "A" * 20, "abcdefghij0123456789", "..%2f..", "a" * 300])
async def test_unknown_ids(service: Service, name: str) -> None:
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/pause"),
        ("POST", "/sessions"),
        ("GET", "/sessions"),
    ):
        body = {"json": {"argv": ["x"]}} if path == "/sessions" and method == "POST" else {}
        answer = await service.http.request(method, f"/v1/sandboxes/{name}{path}", **body)  # type: ignore[arg-type]  # a dict of arguments
        assert answer.status_code == 404
        assert answer.json()["code"] in ("unknown_sandbox", "unknown_path")
    assert (await service.http.get(f"/v1/operations/{name}")).status_code == 404
    assert (await service.http.get(f"/v1/sessions/{name}")).status_code == 404
    assert (await service.http.delete(f"/v1/keys/{name}")).status_code == 404


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


@pytest.mark.parametrize(
    ("params", "status", "code"),
    [
        ({"limit": "0"}, 422, "invalid_field"),
        ({"limit": "501"}, 422, "invalid_field"),
        ({"limit": "x"}, 422, "invalid_field"),
        ({"cursor": "x"}, 400, "invalid_cursor"),
        ({"cursor": "é"}, 400, "invalid_cursor"),
        ({"cursor": "gqFhoWI"}, 400, "invalid_cursor"),
        ({"state": "dead"}, 422, "invalid_field"),
        ({"metadata.a b": "x"}, 422, "invalid_field"),
        ({"colour": "red"}, 422, "unknown_field"),
        ([("limit", "1"), ("limit", "2")], 400, "invalid_field"),
    ],
)
async def test_bad_queries(service: Service, params: Any, status: int, code: str) -> None:
    check(await service.http.get("/v1/sandboxes", params=params), status, code)


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
async def test_bad_idempotency_keys(service: Service, key: str) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"idempotency-key": key})
    check(answer, 400, "invalid_idempotency_key")


@pytest.mark.parametrize("prefer", ["wait=x", "wait=-1", "wait", "wait=99999999999999", ", ,;", "wait=1.5"])
async def test_a_preference_that_cannot_be_read_is_not_followed(service: Service, prefer: str) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"prefer": prefer})
    assert answer.status_code in (200, 202)
    assert "preference-applied" not in answer.headers


async def test_a_long_wait_is_bounded(service: Service) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"prefer": "wait=3600"})
    assert answer.headers["preference-applied"] == "wait=60"


async def test_bad_keys(service: Service) -> None:
    for body, field in (
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "x", "expires_in_s": 0}, "expires_in_s"),
    ):
        answer = await service.http.post("/v1/keys", json=body)
        assert answer.status_code == 422
        assert answer.json()["field"] == field, answer.text


@pytest.mark.parametrize("value", ["x", "-1", "1" * 30, "٣"])
async def test_bad_event_positions(service: Service, value: str) -> None:
    answer = await service.http.get("/v1/events", headers={"last-event-id": value.encode()})  # type: ignore[dict-item]  # httpx takes octets
    check(answer, 400, "invalid_field")


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
