"""What the API refuses without a look at anything: one control plane stands for all of these, because nothing of it changes."""

from typing import Any

import pytest
from tests.support.control_fixtures import standing as service
from tests.support.control_service import Service
from tests.support.refusals import check

__all__ = ["service"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    ({"template": "seed", "metadata": {'bad"key': "x"}}, "invalid_field", 'metadata.bad"key'),
    ({"template": "seed", "metadata": {"k": 1}}, "invalid_field", "metadata[...]"),
    ({"template": "seed", "metadata": {"k": "x" * 2_049}}, "invalid_field", "metadata.k"),
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


@pytest.mark.parametrize(
    "octets", [b'{"template": "\\ud800"}', b'{"template": "\\udc00"}', b'{"template": "\\ud800x"}']
)
async def test_half_a_surrogate_pair_is_named_as_such(service: Service, octets: bytes) -> None:
    problem = check(await service.http.post("/v1/sandboxes", content=octets), 400, "invalid_json")
    assert "surrogate" in problem["cause"]


@pytest.mark.parametrize("octets", [b"[]", b"null", b'"seed"', b"7", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(service: Service, octets: bytes) -> None:
    check(await service.http.post("/v1/sandboxes", content=octets), 422, "invalid_field")


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
        ({'metadata.a"b': "x"}, 422, "invalid_field"),
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
