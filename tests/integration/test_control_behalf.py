"""The E2B wrapper's socket of the control plane: what may be asked there on behalf of a sandbox, and that nowhere else may."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.control_fixtures import database_url, folder, node
from tests.support.control_service import Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control import behalf, events
from hatchway.control.events import MAX_OF_WRAPPERS
from hatchway.control.main import ControlConfig
from hatchway.wire.behalf import ALL, ANNOTATION, HEADER, KEY_ID, SOCKET

__all__ = ["database_url", "folder", "node"]

OURS = {ANNOTATION: {"template": "base"}}


@pytest.fixture
async def service(folder: Path, node: NodeDouble, database_url: str | None) -> AsyncIterator[Service]:
    """A control plane that listens for the wrapper too."""
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    async with in_process(config, e2b=folder / SOCKET) as running:
        await running.ready()
        await node.followed()
        yield running


@pytest.fixture
async def wrapper(service: Service, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client on the wrapper's socket, without a key."""
    over = httpx.AsyncHTTPTransport(uds=str(folder / SOCKET))
    async with httpx.AsyncClient(transport=over, base_url="http://control", timeout=20) as client:
        yield client


def speaking(sandbox: dict[str, Any]) -> dict[str, str]:
    return {HEADER: sandbox["id"]}


async def test_it_asks_for_what_is_the_sandboxs_own(service: Service, wrapper: httpx.AsyncClient) -> None:
    sandbox = await service.create(annotations=OURS)
    path, on_behalf = f"/v1/sandboxes/{sandbox['id']}", speaking(sandbox)
    shown = await wrapper.get(path, params={"annotations": "true"}, headers=on_behalf)
    assert shown.status_code == 200, shown.text
    assert shown.json()["sandbox"]["annotations"] == OURS
    made = await wrapper.post(f"{path}/sessions", json={"command": "true"}, headers=on_behalf)
    assert made.status_code == 201, made.text
    session = made.json()["session"]
    assert (await wrapper.get(f"/v1/sessions/{session['id']}", headers=on_behalf)).status_code == 200
    assert (await wrapper.post(f"/v1/sessions/{session['id']}/token", headers=on_behalf)).status_code == 200
    token = await wrapper.post(f"{path}/tokens", json={"scopes": ["ports"]}, headers=on_behalf)
    assert token.status_code == 201, token.text
    # Seen by the project as asked for by the wrapper, not by any key.
    told = await service.http.get(f"{path}/tokens")
    assert [one["key_id"] for one in told.json()["tokens"]] == [KEY_ID]


async def test_it_wakes_it_and_follows_that(service: Service, wrapper: httpx.AsyncClient) -> None:
    sandbox = await service.create(annotations=OURS, timeout_s=600)
    path, on_behalf = f"/v1/sandboxes/{sandbox['id']}", speaking(sandbox)
    await service.http.post(f"{path}/suspend", headers={"prefer": "wait=20"})
    woken = await wrapper.post(f"{path}/wake", headers=on_behalf)
    assert woken.status_code in (200, 202), woken.text
    operation = woken.json()["operation"]["id"]
    done = await wrapper.get(f"/v1/operations/{operation}", headers={**on_behalf, "prefer": "wait=20"})
    assert done.json()["operation"]["status"] == "succeeded", done.text
    longer = await wrapper.post(f"{path}/extend", json={"timeout_s": 3000}, headers=on_behalf)
    assert longer.status_code == 200, longer.text
    assert longer.json()["sandbox"]["state"] == "running"


async def test_nobody_asks_so_on_the_other_listener(service: Service) -> None:
    sandbox = await service.create(annotations=OURS)
    for client in (service.client(None), service.client(service.key)):
        async with client:
            refused = await client.get(f"/v1/sandboxes/{sandbox['id']}", headers=speaking(sandbox))
        assert (refused.status_code, refused.json()["code"]) == (403, "on_behalf_refused")


async def test_one_is_not_asked_for_another(service: Service, wrapper: httpx.AsyncClient) -> None:
    mine, other = await service.create(annotations=OURS), await service.create(annotations=OURS)
    session = (await service.http.post(f"/v1/sandboxes/{other['id']}/sessions", json={"command": "true"})).json()
    listed = (await service.http.get("/v1/operations")).json()["operations"]
    operation = next(one["id"] for one in listed if one["target"] == other["id"])
    for method, path, body in (
        ("GET", f"/v1/sandboxes/{other['id']}", None),
        ("POST", f"/v1/sandboxes/{other['id']}/wake", None),
        ("POST", f"/v1/sandboxes/{other['id']}/sessions", {"command": "true"}),
        ("POST", f"/v1/sandboxes/{other['id']}/tokens", {"scopes": ["files"]}),
        ("GET", f"/v1/sessions/{session['session']['id']}", None),
        ("DELETE", f"/v1/sessions/{session['session']['id']}", None),
        ("GET", f"/v1/operations/{operation}", None),
    ):
        refused = await wrapper.request(method, path, json=body, headers=speaking(mine))
        assert (refused.status_code, refused.json()["code"]) == (403, "on_behalf_refused"), (method, path)


async def test_what_a_project_does_is_not_done_on_behalf(service: Service, wrapper: httpx.AsyncClient) -> None:
    sandbox = await service.create(annotations=OURS)
    path = f"/v1/sandboxes/{sandbox['id']}"
    for method, asked, body in (
        ("DELETE", path, None),
        ("PATCH", path, {"timeout_s": None}),
        ("POST", f"{path}/fork", {"count": 1}),
        ("POST", f"{path}/snapshots", {"kind": "disk"}),
        ("POST", f"{path}/suspend", None),
        ("GET", "/v1/sandboxes", None),
        ("POST", "/v1/sandboxes", {"template": "seed:latest"}),
        ("GET", "/v1/keys", None),
        ("GET", "/v1/events", None),
        ("GET", "/v1/audit", None),
        ("GET", "/v1/projects", None),
    ):
        refused = await wrapper.request(method, asked, json=body, headers=speaking(sandbox))
        assert (refused.status_code, refused.json()["code"]) == (403, "on_behalf_refused"), (method, asked)


async def test_only_the_wrappers_own_are_spoken_for(service: Service, wrapper: httpx.AsyncClient) -> None:
    plain, marked = await service.create(annotations={"other": 1}), await service.create(annotations=OURS)
    await service.http.delete(f"/v1/sandboxes/{marked['id']}", headers={"prefer": "wait=20"})
    for sandbox_id in (plain["id"], marked["id"], "0" * 20, "nonsense", ""):
        refused = await wrapper.get(f"/v1/sandboxes/{plain['id']}", headers={HEADER: sandbox_id})
        assert (refused.status_code, refused.json()["code"]) == (404, "unknown_sandbox"), sandbox_id


async def test_with_a_key_the_socket_is_the_api(service: Service, wrapper: httpx.AsyncClient) -> None:
    sandbox = await service.create()
    bearer = {"authorization": f"Bearer {service.key}"}
    assert (await wrapper.get(f"/v1/sandboxes/{sandbox['id']}", headers=bearer)).status_code == 200
    both = await wrapper.get(f"/v1/sandboxes/{sandbox['id']}", headers={**bearer, **speaking(sandbox)})
    assert (both.status_code, both.json()["code"]) == (403, "on_behalf_refused")
    neither = await wrapper.get(f"/v1/sandboxes/{sandbox['id']}")
    assert (neither.status_code, neither.json()["code"]) == (401, "key_missing")


async def test_another_users_connection_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode of the socket keeps others out; whoever came by it nevertheless gets nothing."""
    monkeypatch.setattr(behalf, "_peer_uid", lambda _: 4_000_000_000)
    double = NodeDouble(folder / "node.sock")
    await double.start()
    try:
        async with in_process(
            ControlConfig(folder=folder / "control", node_socket=double.path), e2b=folder / SOCKET
        ) as service:
            over = httpx.AsyncHTTPTransport(uds=str(folder / SOCKET))
            async with httpx.AsyncClient(transport=over, base_url="http://control", timeout=20) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/healthz", headers={"authorization": f"Bearer {service.key}"})
    finally:
        await double.die()


async def next_event(lines: AsyncIterator[str]) -> tuple[str, dict[str, Any]]:
    """Kind and data of the next event that is no ping."""
    kind = ""
    async with asyncio.timeout(20):
        async for line in lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind not in ("", "ping"):
                return kind, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


async def test_states_of_all_that_it_speaks_for_are_told_and_nothing_else(
    service: Service, wrapper: httpx.AsyncClient
) -> None:
    ours, other = await service.create(annotations=OURS), await service.create(annotations={"another": 1})
    async with wrapper.stream("GET", "/v1/events", headers={HEADER: ALL}) as stream:
        assert stream.status_code == 200
        lines = aiter(stream.aiter_lines())
        while await anext(lines) != "event: ping":
            pass
        for one in (other, ours):
            await service.http.post(f"/v1/sandboxes/{one['id']}/suspend", headers={"prefer": "wait=20"})
        kind, told = await next_event(lines)
        assert (kind, told["subject"], told["data"]["state"]) == ("sandbox.state_changed", ours["id"], "suspended")
        for one in (other, ours):
            await service.http.delete(f"/v1/sandboxes/{one['id']}", headers={"prefer": "wait=20"})
        kind, told = await next_event(lines)
        assert (kind, told["subject"], told["data"]["state"]) == ("sandbox.state_changed", ours["id"], "deleted")
        last = str(told["sequence"])
    # And from where one was.
    made = await service.create(annotations=OURS)
    async with wrapper.stream("GET", "/v1/events", headers={HEADER: ALL, "last-event-id": last}) as stream:
        _, told = await next_event(aiter(stream.aiter_lines()))
        assert (told["subject"], told["data"]["state"]) == (made["id"], "running")


async def test_for_all_nothing_but_that_is_asked(service: Service, wrapper: httpx.AsyncClient) -> None:
    sandbox = await service.create(annotations=OURS)
    for method, path in (("GET", "/v1/sandboxes"), ("GET", f"/v1/sandboxes/{sandbox['id']}"), ("GET", "/v1/audit")):
        refused = await wrapper.request(method, path, headers={HEADER: ALL})
        assert (refused.status_code, refused.json()["code"]) == (403, "on_behalf_refused"), path
    async with service.client(None) as client:
        refused = await client.get("/v1/events", headers={HEADER: ALL})
        assert (refused.status_code, refused.json()["code"]) == (403, "on_behalf_refused")
    refused = await wrapper.get("/v1/events", headers=speaking(sandbox))
    assert refused.status_code == 403


async def test_streams_of_wrappers_are_bounded_and_take_no_place_from_others(
    service: Service, wrapper: httpx.AsyncClient
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_OF_WRAPPERS):
            stream = await stack.enter_async_context(wrapper.stream("GET", "/v1/events", headers={HEADER: ALL}))
            assert stream.status_code == 200
        refused = await wrapper.get("/v1/events", headers={HEADER: ALL})
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
        async with service.http.stream("GET", "/v1/events") as other:
            assert other.status_code == 200


async def test_a_stream_says_that_it_lives_however_much_happens_that_it_does_not_tell(
    service: Service, wrapper: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "PING_EVERY_S", 0.2)

    async def busy() -> None:
        while True:
            await service.http.post("/v1/keys", json={"name": "one of many", "scopes": ["read"]})

    async with wrapper.stream("GET", "/v1/events", headers={HEADER: ALL}) as stream:
        lines, pings = aiter(stream.aiter_lines()), 0
        going_on = asyncio.create_task(busy())
        try:
            async with asyncio.timeout(20):
                while pings < 4:
                    pings += await anext(lines) == "event: ping"
        finally:
            going_on.cancel()
            await asyncio.gather(going_on, return_exceptions=True)
