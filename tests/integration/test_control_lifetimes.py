"""Lifetimes, waking by traffic, schedules and ages through the API, with a node double."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.errors import Internal
from hatchway.wire import node as wire

__all__ = ["database_url", "folder", "node", "service"]

LONG = 1000.0


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN):
        while not await look():
            await asyncio.sleep(0.02)


async def bound(service: Service, **settings: dict[str, float]) -> None:
    """Bounds the project."""
    done = await service.http.patch("/v1/projects/default", json=settings)
    assert done.status_code == 200, done.text


async def events(service: Service, kind: str, count: int = 1) -> list[dict[str, Any]]:
    """The data of the first events of a kind."""
    found: list[dict[str, Any]] = []
    wanted = False
    async with (
        asyncio.timeout(WITHIN),
        service.http.stream("GET", "/v1/events", headers={"last-event-id": "0"}, timeout=None) as stream,
    ):
        async for line in stream.aiter_lines():
            if line.startswith("event:"):
                wanted = line.removeprefix("event:").strip() == kind
            elif line.startswith("data:") and wanted:
                found.append(json.loads(line.removeprefix("data:")))
                if len(found) == count:
                    return found
    raise AssertionError("the stream ended")


async def test_a_wake_for_a_time_gives_that_and_where_it_runs_at_least_that(service: Service) -> None:
    sandbox = await service.create(timeout_s=LONG)
    path, wait = f"/v1/sandboxes/{sandbox['id']}", {"prefer": "wait=20"}

    async def wake(seconds: float) -> dict[str, Any]:
        woken = await service.http.post(f"{path}/wake", json={"timeout_s": seconds}, headers=wait)
        assert woken.status_code == 200, woken.text
        shown: dict[str, Any] = woken.json()["sandbox"]
        return shown

    assert (await wake(10))["expires_at"] == sandbox["expires_at"]
    longer = await wake(5 * LONG)
    assert longer["expires_at"] - time.time() > 4 * LONG
    await service.http.post(f"{path}/suspend", headers=wait)
    woken = await wake(LONG / 2)
    assert abs(woken["expires_at"] - woken["state_since"] - LONG / 2) < 0.001
    assert (woken["timeout_s"], woken["state"]) == (LONG / 2, "running")
    await bound(service, caps={"timeout_s": LONG})
    refused = await service.http.post(f"{path}/wake", json={"timeout_s": LONG + 1})
    assert (refused.status_code, refused.json()["code"]) == (422, "timeout_above_cap")
    await service.http.delete(path, headers=wait)
    gone = await service.http.post(f"{path}/wake", json={"timeout_s": 10})
    assert (gone.status_code, gone.json()["code"]) == (410, "sandbox_deleted")


async def test_branches_have_their_sources_time_or_one_of_their_own(service: Service) -> None:
    source = await service.create(timeout_s=LONG, on_timeout="delete")
    for body, expected in (({}, LONG), ({"timeout_s": 77}, 77), ({"timeout_s": None}, None)):
        forked = await service.http.post(
            f"/v1/sandboxes/{source['id']}/fork", json={"count": 1, **body}, headers={"prefer": "wait=20"}
        )
        branch = await service.get(forked.json()["operation"]["result"]["branches"][0]["sandbox"])
        assert (branch["timeout_s"], branch["on_timeout"]) == (expected, "delete")


@pytest.mark.parametrize(
    ("on_timeout", "state"),
    [("suspend", "suspended"), ("pause", "paused"), ("stop", "stopped"), ("delete", "deleted")],
)
async def test_at_its_deadline_a_sandbox_goes_where_it_was_asked_to(
    service: Service, on_timeout: str, state: str
) -> None:
    sandbox = await service.create(timeout_s=1, on_timeout=on_timeout, metadata={"a": "b"})
    assert sandbox["expires_at"] - time.time() <= 1
    after = await service.until(sandbox["id"], state=state)
    assert (after["expires_at"], after["timeout_s"], after["metadata"]) == (None, 1, {"a": "b"})
    (said,) = await events(service, "sandbox.timeout")
    assert (said["data"]["why"], said["data"]["action"]) == ("timeout", on_timeout)


async def test_waking_gives_the_whole_time_anew_and_a_pause_keeps_what_is_left(service: Service) -> None:
    sandbox = await service.create(timeout_s=LONG)
    path = f"/v1/sandboxes/{sandbox['id']}"
    wait = {"prefer": "wait=20"}
    paused = (await service.http.post(f"{path}/pause", headers=wait)).json()["sandbox"]
    assert paused["expires_at"] is None
    assert LONG - 60 < paused["left_s"] <= LONG
    woken = (await service.http.post(f"{path}/wake", headers=wait)).json()["sandbox"]
    assert woken["left_s"] is None
    assert abs(woken["expires_at"] - woken["state_since"] - paused["left_s"]) < 0.001
    assert (woken["timeout_s"], woken["on_timeout"], woken["auto_wake"]) == (LONG, "suspend", False)


async def test_a_deadline_is_extended_and_never_shortened_unless_that_is_said(service: Service) -> None:
    sandbox = await service.create(timeout_s=LONG)
    path = f"/v1/sandboxes/{sandbox['id']}"
    same = (await service.http.post(f"{path}/extend", json={"timeout_s": 10})).json()["sandbox"]
    assert same["expires_at"] == sandbox["expires_at"]
    more = (await service.http.post(f"{path}/extend", json={"timeout_s": 5 * LONG})).json()["sandbox"]
    assert more["expires_at"] > sandbox["expires_at"] + LONG
    assert more["timeout_s"] == LONG
    refused = await service.http.patch(path, json={"timeout_s": 10})
    assert (refused.status_code, refused.json()["code"]) == (409, "would_shorten")
    assert (await service.get(sandbox["id"]))["expires_at"] == more["expires_at"]
    shorter = (await service.http.patch(path, json={"timeout_s": LONG, "shorten": True})).json()["sandbox"]
    assert shorter["expires_at"] < more["expires_at"]
    never = (await service.http.patch(path, json={"timeout_s": None, "auto_wake": True})).json()["sandbox"]
    assert (never["expires_at"], never["timeout_s"], never["auto_wake"]) == (None, None, True)
    renamed = (await service.http.patch(path, json={"name": "x"})).json()["sandbox"]
    assert renamed["auto_wake"] is True


@pytest.mark.parametrize(
    "body",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": "5"},
        {"idle_timeout_s": 0.5},
        {"on_timeout": "explode"},
        {"auto_wake": 1},
        {"snapshots": {"disk_every_s": 1}},
        {"snapshots": {"keep": [{"older_than_s": -1}]}},
    ],
)
async def test_what_makes_no_sense_is_refused(service: Service, body: dict[str, Any]) -> None:
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed:latest", **body})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field"), answer.text


async def test_the_projects_cap_is_the_longest_and_is_what_one_gets_without_asking(service: Service) -> None:
    await bound(service, caps={"timeout_s": 500})
    sandbox = await service.create()
    assert sandbox["timeout_s"] == 500
    path = f"/v1/sandboxes/{sandbox['id']}"
    for answer in (
        await service.http.post("/v1/sandboxes", json={"template": "seed:latest", "timeout_s": 501}),
        await service.http.post("/v1/sandboxes", json={"template": "seed:latest", "timeout_s": None}),
        await service.http.patch(path, json={"timeout_s": None}),
        await service.http.post(f"{path}/extend", json={"timeout_s": 501}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (422, "timeout_above_cap"), answer.text
        assert "500" in answer.json()["cause"]


async def test_an_idle_sandbox_is_suspended_and_one_in_use_is_not(service: Service, node: NodeDouble) -> None:
    used = await service.create(idle_timeout_s=1)
    node.activity[used["id"]] = wire.Activity(sandbox_id=used["id"], idle_s=0.0, busy=True)
    idle = await service.create(idle_timeout_s=1)
    await service.until(idle["id"], state="suspended")
    asked = node.asked_activity
    await until(lambda: _true(node.asked_activity > asked))
    assert (await service.get(used["id"]))["state"] == "running"
    node.activity.clear()
    await service.until(used["id"], state="suspended")


async def _true(value: bool) -> bool:
    return value


async def test_a_suspension_that_fails_is_said_and_falls_back(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.domain.lifetimes._FIRST_RETRY_S", 0.01)

    async def fail(_: Any) -> None:
        raise Internal("vmm_error", "The disk is gone.", "None.")

    node.hooks["sandbox.suspend"] = fail
    sandbox = await service.create(timeout_s=1)
    await service.until(sandbox["id"], state="paused")
    said = await events(service, "sandbox.timeout", 4)
    assert [(one["data"]["action"], one["data"]["tries"]) for one in said] == [
        ("suspend", 0),
        ("suspend", 1),
        ("suspend", 2),
        ("pause", 3),
    ]
    failed = await events(service, "operation.failed", 3)
    assert {one["data"]["error"]["cause"] for one in failed} == {"The disk is gone."}


async def test_what_came_due_while_no_control_plane_was_there_is_done_by_the_next(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create(timeout_s=1)
    await asyncio.sleep(max(0.0, sandbox["expires_at"] - time.time()))
    async with in_process(config) as service:
        await service.ready()
        await service.until(sandbox["id"], state="suspended")


# -- waking


async def test_traffic_wakes_what_may_be_woken_however_often_it_is_asked(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create(auto_wake=True)
    wait = {"prefer": "wait=20"}
    for verb in ("pause", "suspend", "stop"):
        await service.http.post(f"/v1/sandboxes/{sandbox['id']}/{verb}", headers=wait)
        for _ in range(5):
            node.tell(wire.Event(wake=wire.WakeWanted(sandbox_id=sandbox["id"])))
        await service.until(sandbox["id"], state="running", operation=None)
    said = await events(service, "sandbox.wake", 3)
    assert [one["data"]["state"] for one in said] == ["paused", "suspended", "stopped"]
    assert node.stayed == []


async def test_traffic_during_a_suspension_wakes_behind_it(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create(auto_wake=True)
    go, reached = asyncio.Event(), asyncio.Event()

    async def hold(_: Any) -> None:
        reached.set()
        await go.wait()

    node.hooks["sandbox.suspend"] = hold
    await service.http.post(f"/v1/sandboxes/{sandbox['id']}/suspend")
    await asyncio.wait_for(reached.wait(), WITHIN)
    node.tell(wire.Event(wake=wire.WakeWanted(sandbox_id=sandbox["id"])))
    go.set()
    await until(lambda: _true("sandbox.restore" in node.calls))
    await service.until(sandbox["id"], state="running", operation=None)


async def test_a_node_is_told_when_its_client_waits_in_vain(service: Service, node: NodeDouble) -> None:
    asleep = await service.create()
    wait = {"prefer": "wait=20"}
    await service.http.post(f"/v1/sandboxes/{asleep['id']}/pause", headers=wait)
    node.tell(wire.Event(wake=wire.WakeWanted(sandbox_id=asleep["id"])))
    await until(lambda: _true(len(node.stayed) == 1))
    assert (node.stayed[0].sandbox_id, node.stayed[0].error) == (asleep["id"], None)
    assert (await service.get(asleep["id"]))["state"] == "paused"

    async def fail(_: Any) -> None:
        raise Internal("vmm_error", "It does not go on.", "Stop it.")

    node.hooks["sandbox.resume"] = fail
    await service.http.patch(f"/v1/sandboxes/{asleep['id']}", json={"auto_wake": True})
    node.tell(wire.Event(wake=wire.WakeWanted(sandbox_id=asleep["id"])))
    await until(lambda: _true(len(node.stayed) == 2))
    assert node.stayed[1].error == {"code": "vmm_error", "cause": "It does not go on.", "remedy": "Stop it."}
    unknown = "z" * 20
    node.tell(wire.Event(wake=wire.WakeWanted(sandbox_id=unknown)))
    await until(lambda: _true(node.stayed[-1].sandbox_id == unknown))


# -- schedules


async def test_a_schedule_makes_snapshots_and_thins_them(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.lifetimes.SWEEP_EVERY_S", 0.2)
    monkeypatch.setattr("hatchway.domain.schedules.next_due", lambda last, every, now: every and now + every / 10)
    sandbox = await service.create(snapshots={"disk_every_s": 5, "max_bytes": 15})
    by_hand = await service.http.post(
        f"/v1/sandboxes/{sandbox['id']}/snapshots", json={"kind": "disk"}, headers={"prefer": "wait=20"}
    )
    kept = by_hand.json()["operation"]["result"]["snapshot"]
    said = await events(service, "snapshot.expired", 2)
    assert {one["data"]["why"] for one in said} == {"max_bytes"}
    shown = (await service.http.get("/v1/snapshots")).json()["snapshots"]
    assert kept in [one["id"] for one in shown if not one["scheduled"]]
    assert any(one["scheduled"] for one in shown)
    none = await service.http.patch(f"/v1/sandboxes/{sandbox['id']}", json={"snapshots": None})
    assert none.json()["sandbox"]["snapshots"] is None


async def test_a_snapshot_that_a_quota_forbids_is_said_and_not_asked_for_at_once_again(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.domain.schedules.next_due", lambda last, every, now: every and now + every / 10)
    await bound(service, quotas={"snapshot_bytes": 0})
    sandbox = await service.create(snapshots={"full_every_s": 5})
    (said,) = await events(service, "snapshot.refused")
    assert said["subject"] == sandbox["id"]
    assert "snapshot.create" not in node.calls


async def test_what_is_older_than_the_project_allows_is_deleted_with_the_reason(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.lifetimes.SWEEP_EVERY_S", 0.2)
    sandbox = await service.create()
    path, wait = f"/v1/sandboxes/{sandbox['id']}", {"prefer": "wait=20"}
    await service.http.post(f"{path}/snapshots", json={"kind": "full"}, headers=wait)
    await service.http.post(f"{path}/suspend", headers=wait)
    await bound(service, caps={"suspended_s": 1, "snapshot_s": 1})
    await service.until(sandbox["id"], state="deleted")
    (said,) = await events(service, "sandbox.expired")
    assert (said["subject"], said["data"]["why"]) == (sandbox["id"], "max_suspended")
    (said,) = await events(service, "snapshot.expired")
    assert said["data"]["why"] == "max_age"


async def test_an_export_that_is_older_than_the_project_allows_is_deleted_here_and_on_its_node(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.lifetimes.SWEEP_EVERY_S", 0.2)
    sandbox, wait = await service.create(), {"prefer": "wait=20"}
    path = f"/v1/sandboxes/{sandbox['id']}"
    await service.http.post(f"{path}/stop", headers=wait)
    made = await service.http.post(f"{path}/export", json={}, headers=wait)
    export = made.json()["operation"]["result"]["export"]
    await bound(service, caps={"export_s": 1})
    (said,) = await events(service, "export.expired")
    assert (said["subject"], said["data"]["why"]) == (export, "max_age")
    assert (await service.http.get(f"/v1/exports/{export}")).status_code == 404
    await until(lambda: _true(export not in node.exports))
    await bound(service, caps={"export_s": 60})
    began = time.time()
    again = await service.http.post(f"{path}/export", json={}, headers=wait)
    assert began + 50 < again.json()["operation"]["result"]["expires_at"] < time.time() + 61
