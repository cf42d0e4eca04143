"""Policies through the API: what each tier holds for, what is refused, and that nodes have what the database says. With a node double."""

import asyncio
from typing import Any

import httpx
import pytest
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.errors import Unavailable

__all__ = ["database_url", "folder", "node", "service"]


def allowing(host: str) -> dict[str, Any]:
    """A document that lets one host pass."""
    return {"version": 1, "rules": [{"id": "one", "to": {"hosts": [host]}}]}


async def put(
    service: Service, name: str, document: object, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    return await service.http.put(f"/v1/policies/{name}", json={"document": document, **more}, headers=headers)


async def made(service: Service, name: str, document: object, **more: Any) -> dict[str, Any]:
    answer = await put(service, name, document, **more)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()["policy"]
    return found


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    assert found["code"] == code, answer.text
    return found


async def holds(service: Service, sandbox_id: str) -> dict[str, Any]:
    """Waits until the node has said that the newest revision is in force; returns what the sandbox shows of it."""
    async with asyncio.timeout(WITHIN):
        while True:
            policy: dict[str, Any] = (await service.get(sandbox_id))["policy"]
            if policy["applied_revision"] == policy["revision"]:
                return policy
            await asyncio.sleep(0.01)


def told(node: NodeDouble, sandbox_id: str) -> list[tuple[str, str]]:
    """Tier and name of all documents that the node was told of."""
    return [(one.tier, one.name) for one in node.egress[sandbox_id].documents]


async def test_a_sandbox_has_the_policies_of_all_tiers_from_the_beginning(service: Service, node: NodeDouble) -> None:
    assert told(node, (await service.create())["id"]) == []
    await made(service, "floor", allowing("a.example"), tier="platform")
    await made(service, "all", allowing("b.example"), tier="project")
    await made(service, "seeds", allowing("c.example"), tier="template", template="seed")
    await made(service, "others", allowing("d.example"), tier="template", template="see")
    await made(service, "web", allowing("e.example"))
    high = [("platform", "floor"), ("project", "all"), ("template", "seeds")]
    for given, own in (
        (None, []),
        ("web", [("sandbox", "web")]),
        ({"document": allowing("f.example")}, [("sandbox", "inline")]),
    ):
        sandbox = await service.create(policy=given)
        assert told(node, sandbox["id"]) == [*high, *own]
        assert sandbox["policy"]["applied_revision"] == sandbox["policy"]["revision"] == 1
        assert sandbox["conditions"] == []
        shown = (await service.http.get(f"/v1/sandboxes/{sandbox['id']}/policy")).json()["policy"]
        assert [(one["tier"], one["name"]) for one in shown["documents"]] == [*high, *own]


async def test_a_change_of_any_tier_is_told_to_those_that_it_concerns_and_to_no_other(
    service: Service, node: NodeDouble
) -> None:
    await made(service, "web", allowing("a.example"))
    with_it, without = await service.create(policy="web"), await service.create()
    changed = await made(service, "web", allowing("b.example"))
    assert changed["version"] == 2
    assert (await holds(service, with_it["id"]))["revision"] == 2
    assert "b.example" in node.egress[with_it["id"]].documents[0].text
    assert (await service.get(without["id"]))["policy"]["revision"] == 1
    # The same once more changes nothing.
    assert (await made(service, "web", allowing("b.example")))["version"] == 2
    assert (await service.get(with_it["id"]))["policy"]["revision"] == 2

    await made(service, "all", allowing("c.example"), tier="project")
    for sandbox in (with_it, without):
        await holds(service, sandbox["id"])
        assert ("project", "all") in told(node, sandbox["id"])
    answer = await service.http.delete("/v1/policies/all")
    assert answer.status_code == 204
    for sandbox in (with_it, without):
        await holds(service, sandbox["id"])
        assert ("project", "all") not in told(node, sandbox["id"])


async def test_a_sandbox_gets_another_policy_and_keeps_it_through_suspension_and_fork(
    service: Service, node: NodeDouble
) -> None:
    await made(service, "web", allowing("a.example"))
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    assert (await service.http.patch(path, json={"policy": "web", "credentials": ["bot"]})).status_code == 200
    await holds(service, sandbox["id"])
    assert told(node, sandbox["id"]) == [("sandbox", "web")]
    assert node.egress[sandbox["id"]].credentials == ("bot",)
    assert (await service.http.post(f"{path}/suspend", json={}, headers={"prefer": "wait=20"})).status_code == 200
    await made(service, "web", allowing("b.example"))
    assert "a.example" in node.egress[sandbox["id"]].documents[0].text, "nothing leaves one that does not run"
    assert (await service.http.post(f"{path}/restore", json={}, headers={"prefer": "wait=20"})).status_code == 200
    assert "b.example" in node.egress[sandbox["id"]].documents[0].text, (
        "it runs under the newest from the first moment on"
    )
    assert (await holds(service, sandbox["id"]))["name"] == "web"
    forked = (await service.http.post(f"{path}/fork", json={}, headers={"prefer": "wait=20"})).json()
    branch = forked["operation"]["result"]["branches"][0]["sandbox"]
    assert told(node, branch) == [("sandbox", "web")]
    assert (await service.http.patch(path, json={"policy": None})).status_code == 200
    await holds(service, sandbox["id"])
    assert told(node, sandbox["id"]) == []
    assert told(node, branch) == [("sandbox", "web")]


async def test_a_bad_document_is_refused_as_a_whole_and_the_old_one_stays(service: Service, node: NodeDouble) -> None:
    before = await made(service, "web", allowing("a.example"))
    sandbox = await service.create(policy="web")
    bad = {
        "version": 1,
        "rules": [
            {"id": "one", "to": {"hosts": ["b.example"]}, "allow_all": True},
            {"id": "two", "to": {"cidrs": ["192.0.2.1/24"]}},
        ],
    }
    for attempt in (
        await put(service, "web", bad),
        await service.http.patch(f"/v1/sandboxes/{sandbox['id']}", json={"policy": {"document": bad}}),
        await service.http.post("/v1/sandboxes", json={"template": "seed:latest", "policy": {"document": bad}}),
    ):
        refused = problem(attempt, 422, "invalid_policy")
        places = [one["place"] for one in refused["problems"]]
        assert any(place.startswith("rules[0]") for place in places)
        assert all(one["remedy"] for one in refused["problems"])
    assert (await service.http.get("/v1/policies/web")).json()["policy"] == before
    assert (await service.get(sandbox["id"]))["policy"]["revision"] == 1
    assert "a.example" in node.egress[sandbox["id"]].documents[0].text
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == [await service.get(sandbox["id"])]


async def test_only_the_version_that_was_seen_is_changed(service: Service) -> None:
    first = await put(service, "web", allowing("a.example"))
    etag = first.headers["etag"]
    assert (await put(service, "web", allowing("b.example"), {"if-match": etag})).status_code == 200
    assert problem(await put(service, "web", allowing("c.example"), {"if-match": etag}), 409, "policy_changed")["etag"]
    problem(await service.http.delete("/v1/policies/web", headers={"if-match": etag}), 409, "policy_changed")
    problem(await put(service, "web", allowing("c.example"), {"if-none-match": "*"}), 409, "policy_exists")
    problem(await put(service, "web", allowing("c.example"), tier="project"), 409, "policy_tier")
    # One that was deleted and made anew counts from one again, and is another version all the same.
    assert (await service.http.delete("/v1/policies/web")).status_code == 204
    again = await put(service, "web", allowing("d.example"))
    assert again.json()["policy"]["version"] == 1
    assert again.headers["etag"] != etag


async def test_who_may_set_what_and_who_sees_it(service: Service) -> None:
    async def client(*scopes: str) -> httpx.AsyncClient:
        key = await service.http.post("/v1/keys", json={"name": "-".join(scopes), "scopes": list(scopes)})
        return service.client(key.json()["key"]["key"])

    async with (
        await client("read", "write") as writer,
        await client("read", "admin") as admin,
        await client("read") as reader,
    ):
        for tier, who, status in (
            ("sandbox", reader, 403), ("sandbox", writer, 201), ("project", writer, 403), ("template", writer, 403),
            ("platform", admin, 403),
        ):  # fmt: skip
            more = {"template": "seed"} if tier == "template" else {}
            answer = await who.put(
                f"/v1/policies/{tier}", json={"document": allowing("a.example"), "tier": tier, **more}
            )
            assert answer.status_code == status, (tier, answer.text)
        await made(service, "all", allowing("a.example"), tier="project")
        assert (await writer.delete("/v1/policies/all")).status_code == 403
        assert (await reader.get("/v1/policies/all")).status_code == 200


async def test_a_policy_that_is_referred_to_stays(service: Service) -> None:
    await made(service, "web", allowing("a.example"))
    await made(service, "all", allowing("a.example"), tier="project")
    sandbox = await service.create(policy="web")
    assert problem(await service.http.delete("/v1/policies/web"), 409, "policy_in_use")["sandboxes"] == 1
    for name in ("all", "nowhere"):
        problem(
            await service.http.post("/v1/sandboxes", json={"template": "seed:latest", "policy": name}),
            422,
            "unknown_policy",
        )
    await service.http.delete(f"/v1/sandboxes/{sandbox['id']}", headers={"prefer": "wait=20"})
    assert (await service.http.delete("/v1/policies/web")).status_code == 204


async def test_g02_a_change_that_got_lost_is_told_again(service: Service, node: NodeDouble) -> None:
    await made(service, "web", allowing("a.example"))
    sandbox = await service.create(policy="web")
    failures = 0

    async def fails(request: Any) -> None:
        nonlocal failures
        failures += 1
        if failures < 3:
            raise Unavailable("gateway_unavailable", "It is being started again.", "Try again.")

    node.hooks["sandbox.egress"] = fails
    await made(service, "web", allowing("b.example"))
    pending = await service.get(sandbox["id"])
    if pending["policy"]["applied_revision"] == 1:
        assert "policy_pending" in [one["type"] for one in pending["conditions"]]
    await holds(service, sandbox["id"])
    assert failures >= 3
    assert (await service.get(sandbox["id"]))["conditions"] == []
    # And while the node is away.
    del node.hooks["sandbox.egress"]
    await node.die()
    await made(service, "web", allowing("c.example"))
    await node.start()
    await holds(service, sandbox["id"])
    assert "c.example" in node.egress[sandbox["id"]].documents[0].text


async def test_g02_a_gateway_that_refuses_keeps_the_former_and_it_is_shown(service: Service, node: NodeDouble) -> None:
    await made(service, "web", allowing("a.example"))
    sandbox = await service.create(policy="web")
    node.rejects = {2}
    await made(service, "web", allowing("b.example"))
    async with asyncio.timeout(WITHIN):
        while "policy_rejected" not in (shown := await service.get(sandbox["id"]))["policy"]["conditions"]:
            await asyncio.sleep(0.01)
    assert shown["policy"]["applied_revision"] == 1
    assert {"policy_rejected", "policy_pending"} == {one["type"] for one in shown["conditions"]}
    assert "a.example" in node.egress[sandbox["id"]].documents[0].text
    await made(service, "web", allowing("c.example"))
    await holds(service, sandbox["id"])
    assert (await service.get(sandbox["id"]))["conditions"] == []


async def test_a_member_of_a_pool_gets_its_policy_when_it_is_claimed(service: Service, node: NodeDouble) -> None:
    await made(service, "all", allowing("a.example"), tier="project")
    await service.http.put("/v1/pools/warm", json={"template": "seed:latest", "size": 1})
    async with asyncio.timeout(WITHIN):
        while (await service.http.get("/v1/pools/warm")).json()["pool"]["ready"] != 1:
            await asyncio.sleep(0.01)
    (member,) = node.boxes
    assert member not in node.egress, "nothing leaves what is nobody's"
    await made(service, "web", allowing("b.example"))
    sandbox = await service.create(policy="web", pool="warm")
    assert sandbox["id"] == member
    assert told(node, member) == [("project", "all"), ("sandbox", "web")]
    assert sandbox["policy"]["applied_revision"] == sandbox["policy"]["revision"]


async def test_a_restarted_control_plane_tells_what_the_one_before_it_could_not(
    folder: Any, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)

    async def never(request: Any) -> None:
        raise Unavailable("gateway_unavailable", "It is away.", "Try again.")

    async with in_process(config) as running:
        await running.ready()
        await made(running, "web", allowing("a.example"))
        sandbox = await running.create(policy="web")
        node.hooks["sandbox.egress"] = never
        await made(running, "web", allowing("b.example"))
    del node.hooks["sandbox.egress"]
    async with in_process(config) as running:
        await holds(running, sandbox["id"])
        assert "b.example" in node.egress[sandbox["id"]].documents[0].text


async def test_it_says_what_would_leave_a_sandbox_and_why_not(service: Service) -> None:
    await made(
        service,
        "web",
        {
            "version": 1,
            "rules": [{"id": "read", "to": {"hosts": ["a.example"]}, "http": {"allow": [{"paths": ["/x/**"]}]}}],
        },
    )
    sandbox = await service.create(policy="web")

    async def asked(**question: Any) -> dict[str, Any]:
        answer = await service.http.post("/v1/policies/check", json={"sandbox": sandbox["id"], **question})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["check"]
        return found

    assert (await asked(host="a.example", method="GET", path="/x/1"))["action"] == "allow"
    denied = await asked(host="a.example", method="GET", path="/y")
    assert (denied["action"], denied["reason"]) == ("deny", "path_not_allowed")
    assert denied["needed"]
    assert (await asked(host="b.example"))["action"] == "deny"
    assert (await asked(host="b.example", document=allowing("b.example")))["action"] == "allow"
    problem(
        await service.http.post("/v1/policies/check", json={"sandbox": "x" * 20, "host": "a.example"}),
        404,
        "unknown_sandbox",
    )


@pytest.mark.parametrize("name", ["check", "inline", "UPPER"])
async def test_names_that_no_policy_can_have(service: Service, name: str) -> None:
    assert (await put(service, name, allowing("a.example"))).status_code in (404, 405, 422)
