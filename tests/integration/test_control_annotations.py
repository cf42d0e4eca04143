"""Annotations of sandboxes: kept with them for programs, copied by forks, within their bound; and keys of E2B's form."""

import re

from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import Service

__all__ = ["database_url", "folder", "node", "service"]

WAIT = {"prefer": "wait=20"}
SHOWN = {"annotations": "true"}
GIVEN = {"one": {"deep": [1, 2.5, None, "x"]}, "two": True}


async def annotations(service: Service, sandbox_id: str) -> object:
    answer = await service.http.get(f"/v1/sandboxes/{sandbox_id}", params=SHOWN)
    assert answer.status_code == 200, answer.text
    return answer.json()["sandbox"]["annotations"]


async def test_they_are_kept_and_shown_where_asked_for(service: Service) -> None:
    sandbox, bare = await service.create(annotations=GIVEN), await service.create()
    assert "annotations" not in sandbox
    assert "annotations" not in await service.get(sandbox["id"])
    assert await annotations(service, sandbox["id"]) == GIVEN
    assert await annotations(service, bare["id"]) == {}
    listed = (await service.http.get("/v1/sandboxes", params=SHOWN)).json()["sandboxes"]
    assert {one["id"]: one["annotations"] for one in listed} == {sandbox["id"]: GIVEN, bare["id"]: {}}
    assert all("annotations" not in one for one in (await service.http.get("/v1/sandboxes")).json()["sandboxes"])
    await service.http.post(f"/v1/sandboxes/{sandbox['id']}/suspend", headers=WAIT)
    assert await annotations(service, sandbox["id"]) == GIVEN


async def test_a_patch_replaces_entry_by_entry(service: Service) -> None:
    path = f"/v1/sandboxes/{(await service.create(annotations=GIVEN))['id']}"
    changed = await service.http.patch(path, json={"annotations": {"one": None, "three": {"a": 1}}})
    assert changed.status_code == 200, changed.text
    assert await annotations(service, path.rpartition("/")[2]) == {"two": True, "three": {"a": 1}}
    version = changed.json()["sandbox"]["version"]
    again = await service.http.patch(path, json={"annotations": {"three": {"a": 1}}})
    assert again.json()["sandbox"]["version"] == version
    await service.http.patch(path, json={"annotations": {"two": None, "three": None}})
    assert await annotations(service, path.rpartition("/")[2]) == {}


async def test_a_branch_has_its_sources_or_those_that_are_given(service: Service) -> None:
    source = await service.create(annotations=GIVEN)
    for body, expected in (({"count": 1}, GIVEN), ({"count": 1, "annotations": {"mine": 1}}, {"mine": 1})):
        forked = await service.http.post(f"/v1/sandboxes/{source['id']}/fork", json=body, headers=WAIT)
        branch = forked.json()["operation"]["result"]["branches"][0]["sandbox"]
        assert await annotations(service, branch) == expected
    kept = await service.http.post(f"/v1/sandboxes/{source['id']}/snapshots", json={"kind": "full"}, headers=WAIT)
    snapshot = kept.json()["operation"]["result"]["snapshot"]
    made = await service.http.post("/v1/sandboxes", json={"snapshot": snapshot}, headers=WAIT)
    assert made.status_code == 200, made.text
    assert await annotations(service, made.json()["sandbox"]["id"]) == {}


async def test_their_bound(service: Service) -> None:
    octets = 64 * 1024
    fits = {"a": "x" * (octets - len('{"a":""}'))}
    sandbox = await service.create(annotations=fits)
    for body in (
        {"annotations": {"a": fits["a"] + "x"}},
        {"annotations": {"b": 1}},  # with what is there already it is too much
        {"annotations": {"-": 1}},
        {"annotations": {f"k{number}": None for number in range(17)}},
        {"annotations": [1]},
    ):
        refused = await service.http.patch(f"/v1/sandboxes/{sandbox['id']}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field"), body
    refused = await service.http.post(
        "/v1/sandboxes", json={"template": "seed:latest", "annotations": {"a": "x" * octets}}
    )
    assert (refused.status_code, refused.json()["field"]) == (422, "annotations")
    assert await annotations(service, sandbox["id"]) == fits


async def ids(service: Service, **query: object) -> list[str]:
    answer = await service.http.get("/v1/sandboxes", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["sandboxes"]]


async def test_lists_find_by_them_and_by_time_in_either_order(service: Service) -> None:
    one = await service.create(annotations={"mine": {"kind": "a", "number": 1}}, metadata={"k y": "v&1"})
    two = await service.create(annotations={"mine": {"kind": "b"}, "other": 1})
    three = await service.create()
    first, second, third = one["id"], two["id"], three["id"]
    assert await ids(service) == [third, second, first]
    assert await ids(service, order="asc") == [first, second, third]
    assert await ids(service, annotated="mine") == [second, first]
    assert await ids(service, annotated="nobody") == []
    assert await ids(service, **{"annotation.mine.kind": "a"}) == [first]
    assert await ids(service, **{"annotation.mine.kind": "a", "annotated": "other"}) == []
    assert await ids(service, **{"annotation.other.kind": "a"}) == []
    assert await ids(service, **{"metadata.k y": "v&1"}) == [first]
    assert await ids(service, created_after=repr(two["created_at"])) == [third, second]
    assert await ids(service, created_after=repr(three["created_at"] + 1)) == []
    read: list[str] = []
    query = {"order": "asc", "limit": "2", "total": "true"}
    while True:
        page = (await service.http.get("/v1/sandboxes", params=query)).json()
        assert page["total"] == 3
        read += [one["id"] for one in page["sandboxes"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
        # A cursor is of its order: in the other one it would name another place.
        turned = await service.http.get("/v1/sandboxes", params={**query, "order": "desc"})
        assert (turned.status_code, turned.json()["code"]) == (400, "invalid_cursor")
    assert read == [first, second, third]
    for query in (
        {"order": "sideways"},
        {"annotated": '"'},
        {"annotation.mine": "a"},
        {'annotation.mine.k"': "a"},
        {"created_after": "yesterday"},
    ):
        refused = await service.http.get("/v1/sandboxes", params=query)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field"), query


async def test_keys_of_metadata_are_any_text_that_can_be_read(service: Service) -> None:
    metadata = {"k y": "v&1", "ключ": "значение", "a=b&c": "%25", "$.x'--": "", "0": "x" * 2048}
    sandbox = await service.create(metadata=metadata)
    assert (await service.get(sandbox["id"]))["metadata"] == metadata
    for key, value in metadata.items():
        assert await ids(service, **{f"metadata.{key}": value}) == [sandbox["id"]], key
        assert await ids(service, **{f"metadata.{key}": value + "x"}) == [], key
    for refused in ({'a"b': ""}, {"a\\b": ""}, {"a\nb": ""}, {"": ""}, {"k" * 129: ""}, {"k": "x" * 2049}, {"k": "\0"}):
        answer = await service.http.post("/v1/sandboxes", json={"template": "seed:latest", "metadata": refused})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field"), refused


async def test_a_key_of_e2bs_form_does_what_any_does(service: Service) -> None:
    made = (await service.http.post("/v1/keys", json={"name": "sdk", "e2b": True})).json()["key"]
    assert re.fullmatch(r"e2b_[0-9a-f]{48}", made["key"])
    assert made["key"].startswith(made["prefix"])
    assert made["scopes"] == ["read", "write"]
    async with service.client(made["key"]) as client:
        assert (await client.get("/v1/sandboxes")).status_code == 200
        assert (await client.get("/v1/keys")).status_code == 403
    rotated = (await service.http.post(f"/v1/keys/{made['id']}/rotate", json={})).json()["key"]
    assert re.fullmatch(r"e2b_[0-9a-f]{48}", rotated["key"])
    async with service.client(made["key"]) as client:
        assert (await client.get("/v1/sandboxes")).json()["code"] == "key_revoked"
    plain = (await service.http.post("/v1/keys", json={"name": "plain"})).json()["key"]
    assert plain["key"].startswith("hw_")
