"""Two projects on one installation: whatever one asks for, it learns nothing of the other, not even that something is there.

Every path of the API is asked with the ids of another project and with ids that never were, and must answer the same, header by
header; what is added to the API later is asked, too, or the tests fail.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from tests.support.audit_writer import audit_writer
from tests.support.broker_world import world
from tests.support.control_fixtures import folder
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.app import ENDPOINTS
from hatchway.control.endpoints import Endpoint, NoBody
from hatchway.control.main import ControlConfig
from hatchway.domain.ids import is_id, new_id

__all__ = ["folder"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT = {"prefer": "wait=20"}
SHARED = ("/v1/templates/{reference}",)
"""What belongs to the installation, and is the same for all."""
MARKS = ("planted-name", "planted-value", "planted-metadata", "planted-key")
"""Texts that one project puts wherever it can."""


@dataclass
class Tenants:
    """The installation, the one that owns things, and the one that looks for them."""

    service: Service
    node: NodeDouble
    owner: httpx.AsyncClient
    other: httpx.AsyncClient
    things: dict[str, str] = field(default_factory=dict)
    """By the beginning of a path: the id of the owner's."""
    theirs: dict[str, str] = field(default_factory=dict)
    """The same of the other."""

    @property
    def secrets(self) -> list[str]:
        """What the other must not read anywhere."""
        return [*(one for one in self.things.values() if is_id(one)), *MARKS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tenants]:
    place = tmp_path_factory.mktemp("t")
    node = NodeDouble(place / "n")
    await node.start()
    try:
        async with contextlib.AsyncExitStack() as clients:
            broker = await clients.enter_async_context(world(place / "world"))
            journal = clients.enter_context(audit_writer(place))
            config = ControlConfig(
                folder=place / "control",
                node_socket=node.path,
                broker_socket=broker.rpc_path,
                audit_socket=journal.path,
            )
            service = await clients.enter_async_context(in_process(config))
            await service.ready()
            await node.followed()
            made = []
            for name in ("owner", "other"):
                assert (await service.http.post("/v1/projects", json={"name": name})).status_code == 201
                body = {"name": "planted-key", "project": name, "scopes": ["read", "exec", "write", "admin"]}
                key = (await service.http.post("/v1/keys", json=body)).json()["key"]
                made.append((await clients.enter_async_context(service.client(key["key"])), key["id"]))
            (owner, owner_key), (other, other_key) = made
            found = Tenants(service, node, owner, other)
            found.things = await furnish(node, owner, owner_key, "owner")
            found.theirs = await furnish(node, other, other_key, "other")
            yield found
    finally:
        await node.die()


async def furnish(node: NodeDouble, client: httpx.AsyncClient, key_id: str, project: str) -> dict[str, str]:
    """Makes one of everything."""
    planted = {"name": "planted-name", "metadata": {"planted-metadata": "planted-value"}} if project == "owner" else {}
    made = (await client.post("/v1/sandboxes", json={"template": "seed", **planted}, headers=WAIT)).json()
    sandbox = made["sandbox"]["id"]
    session = await client.post(f"/v1/sandboxes/{sandbox}/sessions", json={"argv": ["planted-value"]})
    token = await client.post(f"/v1/sandboxes/{sandbox}/tokens", json={"scopes": ["files", "ports", "sessions"]})
    kept = await client.post(f"/v1/sandboxes/{sandbox}/snapshots", json={"kind": "full"}, headers=WAIT)
    things = {
        "/v1/sandboxes": sandbox,
        "/v1/operations": made["operation"]["id"],
        "/v1/sessions": session.json()["session"]["id"],
        "/v1/tokens": token.json()["token_id"],
        "/v1/snapshots": kept.json()["operation"]["result"]["snapshot"],
        "/v1/keys": key_id,
        "/v1/projects": project,
    }
    if any(one.path.startswith("/v1/exports/{id}") for one in ENDPOINTS):
        made = (await client.post("/v1/sandboxes", json={"template": "seed"}, headers=WAIT)).json()
        await client.post(f"/v1/sandboxes/{made['sandbox']['id']}/stop", headers=WAIT)
        exported = await client.post(f"/v1/sandboxes/{made['sandbox']['id']}/export", json={}, headers=WAIT)
        things["/v1/exports"] = exported.json()["operation"]["result"]["export"]
    if any(one.path.startswith("/v1/pools/{name}") for one in ENDPOINTS):
        pool = await client.put(f"/v1/pools/pool-of-{project}", json={"template": "seed", "size": 0})
        assert pool.status_code < 300, pool.text
        things["/v1/pools"] = f"pool-of-{project}"
    credential = {"source": {"kind": "store", "value": "planted-value"}, "hosts": ["index.example"]}
    put = await client.put(f"/v1/credentials/credential-of-{project}", json=credential)
    assert put.status_code == 201, put.text
    things["/v1/credentials"] = f"credential-of-{project}"
    put = await client.put(f"/v1/policies/policy-of-{project}", json=BODIES["PutPolicy"])
    assert put.status_code == 201, put.text
    things["/v1/policies"] = f"policy-of-{project}"
    asked = things["/v1/approvals"] = new_id()
    node.ask(sandbox, asked, path="/planted-value" if project == "owner" else "/own")
    async with asyncio.timeout(WITHIN):
        while (await client.get(f"/v1/approvals/{asked}")).status_code != 200:
            await asyncio.sleep(0.02)
    return things


NAME = re.compile(r"\{(id|name|credential)\}")


def prefix_of(endpoint: Endpoint) -> str:
    return endpoint.path.partition("/{")[0]


NAMED = [one for one in ENDPOINTS if "{" in one.path and one.path not in SHARED]
BODIES: dict[str, dict[str, Any]] = {
    "CreateSession": {"argv": ["true"]},
    "CreateToken": {"scopes": ["files"]},
    "MakeSnapshot": {"kind": "disk"},
    "Rollback": {"snapshot": "s" * 20},
    "ChangeSandbox": {"name": "changed"},
    "ChangeProject": {"require_isolation": "emulated"},
    "PutPolicy": {"document": {"version": 1, "rules": [{"id": "one", "to": {"hosts": ["index.example"]}}]}},
    "PutCredential": {"source": {"kind": "store", "value": "0123456789abcdef"}, "hosts": ["index.example"]},
    "AnswerApproval": {"decision": "allow"},
}


def body_of(endpoint: Endpoint) -> Any:
    """A body that is good: written here, or what is required of one filled in."""
    if endpoint.body in (None, NoBody):
        return None
    assert endpoint.body is not None
    known = BODIES.get(endpoint.body.__name__)
    if known is not None:
        return known
    fields = msgspec.inspect.type_info(endpoint.body).fields  # type: ignore[attr-defined]  # a Struct has them
    return {one.encode_name: filled(one.type) for one in fields if one.required}


def filled(kind: Any) -> Any:
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return kind.ge or 1
    assert isinstance(kind, msgspec.inspect.StrType), f"BODIES must say what is sent for a {kind}"
    return "seed"


async def answered(
    client: httpx.AsyncClient, method: str, path: str, named: str, body: Any = None, **more: Any
) -> tuple[int, dict[str, str], str]:
    """All of an answer but its time and its own id, with the name that was asked for blanked."""
    response = await client.request(method, path, json=body, headers=WAIT, **more)
    headers = {name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")}
    return response.status_code, headers, response.text.replace(named, "*")


def never(named: str) -> str:
    """A name of the same length and form that nothing ever had."""
    return new_id() if is_id(named) else "x" * len(named)


@pytest.mark.parametrize("endpoint", NAMED, ids=lambda one: f"{one.method} {one.path}")
async def test_what_another_project_has_is_answered_like_what_never_was(tenants: Tenants, endpoint: Endpoint) -> None:
    named = tenants.things[prefix_of(endpoint)]
    body = body_of(endpoint)
    # Its own would be found: what follows is not refused for another reason.
    if endpoint.method == "GET":
        mine = await tenants.other.get(NAME.sub(tenants.theirs[prefix_of(endpoint)], endpoint.path))
        assert mine.status_code == 200, mine.text
    calls = len([one for one in tenants.node.calls if not one.startswith(("sandbox.list", "node."))])
    answers, paths = [], []
    for asked in (named, never(named)):
        paths.append(NAME.sub(asked, endpoint.path))
        answers.append(await answered(tenants.other, endpoint.method, paths[-1], asked, body))
    theirs, nothing = answers
    if endpoint.method == "PUT":  # makes what it names, in the own project
        assert theirs[0] == nothing[0] == 201
        async with asyncio.timeout(WITHIN):
            for path in paths:
                await tenants.other.delete(path)
                while (await tenants.other.get(path)).status_code != 404:
                    await asyncio.sleep(0.02)
        return
    assert theirs == nothing
    if theirs[0] == 200:  # a list about something: an empty one
        assert json.loads(theirs[2]) == {**json.loads(theirs[2]), "next_cursor": None}
        assert not any(mark in theirs[2] for mark in tenants.secrets)
    else:
        assert theirs[0] in (403, 404), theirs
        assert (theirs[0] == 403) == (endpoint.scope == "installation")
    # What never reaches a node cannot take longer because something is there.
    assert len([one for one in tenants.node.calls if not one.startswith(("sandbox.list", "node."))]) == calls


BY_FIELD: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/sandboxes", {"snapshot": "/v1/snapshots"}),
    ("POST", "/v1/sandboxes/{own}/rollback", {"snapshot": "/v1/snapshots"}),
    ("POST", "/v1/keys", {"name": "spy", "project": "/v1/projects"}),
    ("GET", "/v1/keys?project={/v1/projects}", None),
    ("GET", "/v1/operations?target={/v1/sandboxes}", None),
    ("GET", "/v1/snapshots?sandbox={/v1/sandboxes}", None),
    ("GET", "/v1/sandboxes?name=planted-name", None),
    ("GET", "/v1/sandboxes?metadata.planted-metadata=planted-value", None),
]


@pytest.mark.parametrize(("method", "path", "body"), BY_FIELD, ids=lambda value: str(value)[:60])
async def test_what_a_field_names_is_looked_for_in_the_own_project(
    tenants: Tenants, method: str, path: str, body: dict[str, Any] | None
) -> None:
    path = path.replace("{own}", tenants.theirs["/v1/sandboxes"])
    kind = next((one for one in tenants.things if f"{{{one}}}" in path or one in (body or {}).values()), None)
    named = tenants.things[kind] if kind else "planted"
    answers = []
    for asked in (named, never(named)):
        sent = None if body is None else {name: asked if value == kind else value for name, value in body.items()}
        at = path.replace(f"{{{kind}}}", asked) if kind else path.replace("planted", asked)
        answers.append(await answered(tenants.other, method, at, asked, sent))
    assert answers[0] == answers[1]
    assert answers[0][0] in (200, 403, 404)
    assert not any(mark in answers[0][2] for mark in tenants.secrets)


async def test_lists_hold_nothing_of_another_project(tenants: Tenants) -> None:
    everything = [one for one in ENDPOINTS if one.method == "GET" and "{" not in one.path and not one.stream]
    assert len(everything) > 6
    for endpoint in everything:
        answer = await tenants.other.get(endpoint.path)
        assert answer.status_code == 200, endpoint.path
        for mark in tenants.secrets:
            if mark != "planted-key":  # both have a key of that name
                assert mark not in answer.text, endpoint.path
        # Nor do those who come with a place in a list of the owner.
        cursor = (await tenants.owner.get(endpoint.path, params={"limit": 1})).json().get("next_cursor")
        if cursor is not None:
            paged = await tenants.other.get(endpoint.path, params={"cursor": cursor})
            assert not any(mark in paged.text for mark in tenants.secrets if mark != "planted-key"), endpoint.path


async def test_idempotency_keys_of_two_projects_have_nothing_to_do_with_each_other(tenants: Tenants) -> None:
    same = {"idempotency-key": "one-and-the-same", **WAIT}
    first = await tenants.owner.post("/v1/sandboxes", json={"template": "seed", "name": "planted-name"}, headers=same)
    # Neither replayed, nor refused because another request had it.
    second = await tenants.other.post("/v1/sandboxes", json={"template": "seed"}, headers=same)
    assert (first.status_code, second.status_code) == (200, 200)
    assert "idempotency-replayed" not in second.headers
    assert first.json()["sandbox"]["id"] != second.json()["sandbox"]["id"]
    assert second.json()["sandbox"]["project"] == "other"


async def test_the_stream_of_events_tells_of_the_own_project_alone(tenants: Tenants) -> None:
    for after in ("0", None):
        params = {} if after is None else {"after": after}
        async with tenants.other.stream("GET", "/v1/events", params=params) as stream:
            lines = stream.aiter_lines()
            async with asyncio.timeout(WITHIN):
                while not (await anext(lines)).startswith("event: ping"):
                    pass
            # What happens to both, and to the installation; what comes last ends the look.
            await tenants.owner.patch(f"/v1/sandboxes/{tenants.things['/v1/sandboxes']}", json={"name": "planted-name"})
            mark = new_id()
            await tenants.other.patch(f"/v1/sandboxes/{tenants.theirs['/v1/sandboxes']}", json={"name": mark})
            read = ""
            async with asyncio.timeout(WITHIN):
                while mark not in read:
                    read += await anext(lines) + "\n"
        data = [json.loads(line.removeprefix("data: ")) for line in read.splitlines() if line.startswith("data: {")]
        assert {one["project"] for one in data if "project" in one} == {"other"}
        assert not any(kind in read for kind in ("node.", "project.created"))
        assert not any(mark in read for mark in tenants.secrets if mark != "planted-key")


async def test_one_projects_requests_and_streams_leave_places_to_others(folder: Path) -> None:
    node = NodeDouble(folder / "node.sock")
    await node.start()
    config = ControlConfig(
        folder=folder / "control",
        node_socket=node.path,
        max_event_streams_per_project=2,
        max_requests_per_project=3,
    )
    try:
        async with in_process(config) as service, contextlib.AsyncExitStack() as open_streams:
            await service.http.post("/v1/projects", json={"name": "other"})
            key = await service.http.post("/v1/keys", json={"name": "k", "project": "other"})
            other = await open_streams.enter_async_context(service.client(key.json()["key"]["key"]))
            for _ in range(2):
                stream = await open_streams.enter_async_context(other.stream("GET", "/v1/events"))
                assert stream.status_code == 200
            refused = await other.get("/v1/events")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            third = await open_streams.enter_async_context(service.http.stream("GET", "/v1/events"))
            assert third.status_code == 200
            # Two of its three places are streams; one is left.
            assert (await other.get("/v1/sandboxes")).status_code == 200
            assert (await service.http.get("/v1/sandboxes")).status_code == 200
    finally:
        await node.die()


async def test_nothing_of_the_owner_was_changed(tenants: Tenants) -> None:
    """The last of the module: after all those requests everything is there as it was."""
    for prefix, named in tenants.things.items():
        if prefix in ("/v1/keys", "/v1/tokens"):
            continue
        assert (await tenants.owner.get(f"{prefix}/{named}")).status_code == 200, prefix
    sandbox = tenants.things["/v1/sandboxes"]
    shown = (await tenants.owner.get(f"/v1/sandboxes/{sandbox}")).json()["sandbox"]
    assert (shown["state"], shown["name"]) == ("running", "planted-name")
    listed = (await tenants.owner.get(f"/v1/sandboxes/{sandbox}/tokens")).json()["tokens"]
    assert [one["id"] for one in listed] == [tenants.things["/v1/tokens"]]
