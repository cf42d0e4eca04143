"""The E2B wrapper's socket of the control plane: what may be asked there on behalf of a sandbox, and that nowhere else may."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.control_fixtures import database_url, folder, node
from tests.support.control_service import Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control import behalf
from hatchway.control.main import ControlConfig
from hatchway.wire.behalf import ANNOTATION, HEADER, KEY_ID, SOCKET

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
