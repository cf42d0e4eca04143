"""What one node, one event or one operation does wrong stays with it: the rest of the control plane goes on."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control import nodes, reconciler, templates
from hatchway.control.main import ControlConfig, UnixNode
from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.domain.lifecycle import State
from hatchway.storage.database import Connection

__all__ = ["database_url", "folder", "node", "service"]


async def test_a_state_that_is_none_of_ours_changes_nothing_and_stops_nothing(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    async with in_process(config) as service:
        await service.ready()
        odd, other = await service.create(), await service.create()
        node.happen(odd["id"], "deleting", None, "")  # type: ignore[arg-type]  # what another version might say
        listed = node.calls.count("sandbox.list")
        async with asyncio.timeout(WITHIN):
            while node.calls.count("sandbox.list") < listed + 3:
                await asyncio.sleep(0.01)
        assert (await service.get(odd["id"]))["state"] == "running"
        node.boxes[other["id"]] = msgspec.structs.replace(node.boxes[other["id"]], state=State.PAUSED)
        await service.until(other["id"], state="paused")
        node.happen(other["id"], State.FAILED, "vmm_died", "Killed.")
        await service.until(other["id"], state="failed")
        # A verb that ends in such a state fails, and the sandbox can still be deleted.
        answer = await service.http.post(f"/v1/sandboxes/{odd['id']}/pause", headers={"prefer": "wait=20"})
        assert answer.json()["operation"]["status"] == "failed", answer.text
        deleted = await service.http.request("DELETE", f"/v1/sandboxes/{odd['id']}", headers={"prefer": "wait=20"})
        assert deleted.json()["sandbox"]["state"] == "deleted"


@pytest.mark.parametrize("method", ["node.info", "sandbox.list", "events.subscribe"])
async def test_a_node_that_answers_nonsense_is_connected_again_until_it_does_not(
    folder: Path, node: NodeDouble, monkeypatch: pytest.MonkeyPatch, method: str, database_url: str | None
) -> None:
    answer, nonsense = node._answer, asyncio.Event()

    def answered(connection: Any, name: str, request: Any) -> object:
        if name == method and not nonsense.is_set():
            return 5
        return answer(connection, name, request)

    monkeypatch.setattr(node, "_answer", answered)
    async with in_process(
        ControlConfig(folder=folder / "control", node_socket=node.path, database_url=database_url)
    ) as service:
        async with asyncio.timeout(WITHIN):
            while node.calls.count(method) < 2:
                await asyncio.sleep(0.01)
        nonsense.set()
        await service.ready()
        sandbox = await service.create()
        # Not only calls, also events come again.
        async with asyncio.timeout(WITHIN):
            while not node._listeners:
                await asyncio.sleep(0.01)
        node.happen(sandbox["id"], State.FAILED, "vmm_died", "Killed.")
        await service.until(sandbox["id"], state="failed")


async def test_an_operation_whose_answer_is_nonsense_ends(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await service.create()
    answer = node._answer
    monkeypatch.setattr(node, "_answer", lambda c, name, r: 5 if name == "sandbox.pause" else answer(c, name, r))
    paused = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause", headers={"prefer": "wait=20"})
    operation = paused.json()["operation"]
    assert (operation["status"], operation["error"]["code"]) == ("failed", "bad_message")
    assert operation["error"]["remedy"]


async def test_a_node_that_does_not_answer_keeps_no_other_from_the_truth(
    folder: Path, node: NodeDouble, monkeypatch: pytest.MonkeyPatch, database_url: str | None
) -> None:
    second = NodeDouble(folder / "second.sock", node_id="node-two", isolation="hardware")
    await second.start()
    config = ControlConfig(
        folder=folder / "control",
        node_socket=node.path,
        database_url=database_url,
        more_nodes=(UnixNode(path=second.path),),
        reconcile_every_s=0.05,
    )
    try:
        async with in_process(config) as service:
            await service.ready()
            async with asyncio.timeout(WITHIN):
                while not second._listeners:
                    await asyncio.sleep(0.01)
            sandbox = await service.create(require_isolation="hardware")
            assert sandbox["id"] in second.boxes
            forever = asyncio.Event()

            async def hang(_: Any) -> None:
                await forever.wait()

            node.hooks["sandbox.list"] = hang
            second.boxes[sandbox["id"]] = msgspec.structs.replace(second.boxes[sandbox["id"]], state=State.PAUSED)
            await service.until(sandbox["id"], state="paused")
            # Nor does it hide the templates of the others.
            monkeypatch.setattr(templates, "LIST_WITHIN_S", 0.2)
            node.hooks["template.list"] = node.hooks["template.resolve"] = hang
            listed = await service.http.get("/v1/templates")
            assert [one["name"] for one in listed.json()["templates"]] == ["seed"]
            assert (await service.http.get("/v1/templates/seed:latest")).status_code == 200
            second.hooks["template.list"] = second.hooks["template.resolve"] = hang
            for path in ("/v1/templates", "/v1/templates/seed:latest"):
                silent = await service.http.get(path)
                assert (silent.status_code, silent.json()["code"]) == (503, "node_timeout")
            # Nor does it keep another from being connected again.
            await second.die()
            second.boxes[sandbox["id"]] = msgspec.structs.replace(second.boxes[sandbox["id"]], state=State.RUNNING)
            await second.start()
            await service.until(sandbox["id"], state="running")
            forever.set()
    finally:
        await second.die()


async def test_operations_that_wait_for_something_leave_their_places_to_others(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, max_concurrent_operations=1
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        broken = True

        async def refuse(_: Any) -> None:
            if broken:
                raise Unavailable("launcher_unavailable", "It is being restarted.", "")

        node.hooks["sandbox.delete"] = refuse
        deletion = (await service.http.delete(f"/v1/sandboxes/{sandbox['id']}")).json()["operation"]
        async with asyncio.timeout(WITHIN):
            while "launcher" not in (await service.operation(deletion["id"], wait=0))["phase"]:
                await asyncio.sleep(0.01)
        await service.create()
        broken = False
        assert (await service.operation(deletion["id"]))["status"] == "succeeded"


async def test_what_nodes_said_while_the_disk_was_full_is_not_lost(
    folder: Path, node: NodeDouble, monkeypatch: pytest.MonkeyPatch, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    write, full, met = reconciler._write_events, True, asyncio.Event()
    loop = asyncio.get_running_loop()

    def written(connection: Connection, *arguments: Any) -> None:
        if full:
            loop.call_soon_threadsafe(met.set)
            raise HostExhausted("host_disk_full", "The disk is full.", "")
        write(connection, *arguments)

    monkeypatch.setattr(reconciler, "_write_events", written)
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        path = f"/v1/sandboxes/{sandbox['id']}/sessions"
        session = (await service.http.post(path, json={"argv": ["true"]})).json()["session"]
        async with asyncio.timeout(WITHIN):
            while not node._listeners:
                await asyncio.sleep(0.01)
        node.session_becomes(session["id"], state="ended")
        await asyncio.wait_for(met.wait(), WITHIN)
        full = False
        async with asyncio.timeout(WITHIN):
            while (await service.http.get(path)).json()["sessions"][0]["state"] != "ended":
                await asyncio.sleep(0.01)


async def test_a_node_that_stands_still_shows_as_unreachable(
    folder: Path, node: NodeDouble, monkeypatch: pytest.MonkeyPatch, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        for bound in ("GREET_WITHIN_S", "LIST_WITHIN_S"):
            monkeypatch.setattr(reconciler if bound.startswith("LIST") else nodes, bound, 0.05)
        goes_on = asyncio.Event()

        async def still(_: Any) -> None:
            await goes_on.wait()

        node.hooks.update({"sandbox.list": still, "node.info": still})
        async with asyncio.timeout(WITHIN):
            while not (shown := await service.get(sandbox["id"]))["conditions"]:
                await asyncio.sleep(0.01)
        assert shown["state"] == "running"
        goes_on.set()
        await service.until(sandbox["id"], conditions=[])
