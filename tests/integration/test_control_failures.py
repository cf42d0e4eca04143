"""What the control plane does when nodes and machines fail: the state that it shows is the truth, and has a way out.

What the transitions do on either database is shown by the tests of the storage, processes that die on both by those of restarts.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.errors import Conflict, HostExhausted, Internal, Unavailable
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import State
from hatchway.wire.node import Observed

__all__ = ["database_url", "folder", "node", "service"]


class Gate:
    """A hook that holds the first call until it is opened; later calls pass."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.calls = 0

    async def __call__(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            self.entered.set()
            await self.open.wait()

    async def reached(self) -> None:
        await asyncio.wait_for(self.entered.wait(), WITHIN)


async def event_kinds(service: Service, wanted: str, **members: Any) -> dict[str, Any]:
    """The first event of a kind whose data has these members, from the beginning of the outbox."""
    async with service.http.stream("GET", "/v1/events", params={"after": "0"}) as answer, asyncio.timeout(WITHIN):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = msgspec.json.decode(line.removeprefix("data: "))
                data = event.get("data", {})
                if event.get("kind") == wanted and all(data.get(name) == value for name, value in members.items()):
                    return dict(event)
    raise AssertionError(wanted)


@pytest.mark.parametrize(
    ("state", "cause", "reason"),
    [
        (State.FAILED, "vmm_died", "The virtual machine was killed by signal 9."),
        (State.FAILED, "out_of_memory", "The host killed it."),
        (State.STOPPED, "guest_power_off", "The guest powered itself off."),
    ],
)
async def test_what_happens_unasked_is_shown_with_its_cause(
    service: Service, node: NodeDouble, state: State, cause: str, reason: str
) -> None:
    sandbox = await service.create()
    node.happen(sandbox["id"], state, cause, reason)
    shown = await service.until(sandbox["id"], state=str(state))
    assert (shown["cause"], shown["reason"], shown["desired"]) == (cause, reason, str(state))
    event = await event_kinds(service, "sandbox.state_changed", state=str(state))
    assert event["data"]["cause"] == cause
    started = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/start", headers={"prefer": "wait=20"})
    assert started.json()["sandbox"]["state"] == "running"
    assert started.json()["sandbox"]["cause"] is None


async def test_a_create_that_fails_says_why_and_can_be_started_again(service: Service, node: NodeDouble) -> None:
    async def full(_: Any) -> None:
        raise HostExhausted("host_disk_full", "The host's disk is full.", "Free some space.")

    node.hooks["sandbox.create"] = full
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"prefer": "wait=20"})
    assert answer.status_code == 200
    sandbox, operation = answer.json()["sandbox"], answer.json()["operation"]
    assert (sandbox["state"], sandbox["reason"]) == ("failed", "The host's disk is full.")
    assert operation["status"] == "failed"
    assert operation["error"] == {
        "code": "host_disk_full",
        "message": "The host's disk is full.",
        "cause": "The host's disk is full.",
        "remedy": "Free some space.",
    }
    del node.hooks["sandbox.create"]
    again = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/start", headers={"prefer": "wait=20"})
    assert again.json()["sandbox"]["state"] == "running"
    assert node.calls[-1] == "sandbox.create"


async def test_a_sandbox_that_never_came_to_be_can_be_stopped_and_started(service: Service, node: NodeDouble) -> None:
    async def full(_: Any) -> None:
        raise HostExhausted("host_disk_full", "The host's disk is full.", "Free some space.")

    node.hooks["sandbox.create"] = full
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"}, headers={"prefer": "wait=20"})
    sandbox = answer.json()["sandbox"]
    assert (sandbox["state"], sandbox["cause"]) == ("failed", "operation_failed")
    stopped = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/stop", headers={"prefer": "wait=20"})
    assert (stopped.json()["operation"]["status"], stopped.json()["sandbox"]["state"]) == ("succeeded", "stopped")
    await node.die()
    await node.start()
    async with asyncio.timeout(WITHIN):
        while node.calls.count("events.subscribe") < 2:  # what is stored and what the node has were compared before
            await asyncio.sleep(0.01)
    assert (await service.get(sandbox["id"]))["state"] == "stopped"
    del node.hooks["sandbox.create"]
    again = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/start", headers={"prefer": "wait=20"})
    assert again.json()["sandbox"]["state"] == "running"


async def test_a_pause_that_fails_leaves_what_the_node_sees(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()

    async def fail(_: Any) -> None:
        raise Internal("vmm_error", "It does not answer.", "")

    node.hooks["sandbox.pause"] = fail
    answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause", headers={"prefer": "wait=20"})
    assert answer.json()["operation"]["status"] == "failed"
    assert answer.json()["sandbox"]["state"] == "running"

    async def die(_: Any) -> None:
        node.happen(sandbox["id"], State.FAILED, "vmm_died", "Killed.")
        raise Internal("vmm_died", "The machine is gone.", "")

    node.hooks["sandbox.pause"] = die
    answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause", headers={"prefer": "wait=20"})
    shown = answer.json()["sandbox"]
    assert (shown["state"], shown["cause"]) == ("failed", "vmm_died")


async def test_a_death_right_after_a_verb_is_not_lost(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    for _ in range(10):
        answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause")
        assert answer.status_code in (200, 202)
        await service.operation(answer.json()["operation"]["id"])
        answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/resume")
        while node.boxes[sandbox["id"]].state != State.RUNNING:
            await asyncio.sleep(0)
        # The answer of the resume may still be on its way.
        node.happen(sandbox["id"], State.FAILED, "vmm_died", "Killed.")
        await service.until(sandbox["id"], state="failed", cause="vmm_died", operation=None)
        await service.http.post(f"/v1/sandboxes/{sandbox['id']}/start", headers={"prefer": "wait=20"})


async def test_one_operation_at_a_time_and_delete_preempts(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    path = f"/v1/sandboxes/{sandbox['id']}"
    gate = node.hooks["sandbox.pause"] = Gate()
    pause = (await service.http.post(f"{path}/pause")).json()["operation"]
    await gate.reached()
    refused = await service.http.post(f"{path}/stop")
    assert refused.status_code == 409
    assert refused.json()["code"] == "operation_in_flight"
    assert refused.json()["operation"] == pause["id"]
    cancel = await service.http.post(f"/v1/operations/{pause['id']}/cancel")
    assert (cancel.status_code, cancel.json()["code"]) == (409, "not_cancellable")
    waiting = asyncio.create_task(service.operation(pause["id"]))
    deleted = await service.http.request("DELETE", path, headers={"prefer": "wait=20"})
    assert deleted.json()["sandbox"]["state"] == "deleted"
    ended = await waiting
    assert (ended["status"], ended["error"]["code"]) == ("cancelled", "preempted")
    gate.open.set()
    await asyncio.sleep(0)
    assert (await service.get(sandbox["id"]))["state"] == "deleted"
    assert node.boxes == {}


async def test_delete_of_a_sandbox_that_is_being_made(service: Service, node: NodeDouble) -> None:
    gate = node.hooks["sandbox.create"] = Gate()
    made = (await service.http.post("/v1/sandboxes", json={"template": "seed"})).json()
    await gate.reached()
    deleted = await service.http.request(
        "DELETE", f"/v1/sandboxes/{made['sandbox']['id']}", headers={"prefer": "wait=20"}
    )
    assert deleted.json()["sandbox"]["state"] == "deleted"
    assert (await service.operation(made["operation"]["id"]))["status"] == "cancelled"


async def test_a_delete_goes_on_until_nothing_is_left(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    tries = 0

    async def twice(_: Any) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Unavailable("launcher_unavailable", "It is being restarted.", "")

    node.hooks["sandbox.delete"] = twice
    answer = await service.http.request("DELETE", f"/v1/sandboxes/{sandbox['id']}", headers={"prefer": "wait=20"})
    assert answer.json()["sandbox"]["state"] == "deleted"
    assert tries == 3


async def test_operations_beyond_the_bound_wait_and_can_be_cancelled(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, max_concurrent_operations=1
    )
    async with in_process(config) as service:
        await service.ready()
        gate = node.hooks["sandbox.create"] = Gate()
        first = (await service.http.post("/v1/sandboxes", json={"template": "seed"})).json()
        await gate.reached()
        second = (await service.http.post("/v1/sandboxes", json={"template": "seed"})).json()
        assert second["operation"]["status"] == "pending"
        cancelled = await service.http.post(f"/v1/operations/{second['operation']['id']}/cancel")
        assert cancelled.json()["operation"]["status"] == "cancelled"
        shown = await service.get(second["sandbox"]["id"])
        assert (shown["state"], shown["operation"]) == ("failed", None)
        gate.open.set()
        assert (await service.operation(first["operation"]["id"]))["status"] == "succeeded"
        assert gate.calls == 1
        started = await service.http.post(
            f"/v1/sandboxes/{second['sandbox']['id']}/wake", headers={"prefer": "wait=20"}
        )
        assert started.status_code == 409
        started = await service.http.post(
            f"/v1/sandboxes/{second['sandbox']['id']}/start", headers={"prefer": "wait=20"}
        )
        assert started.json()["sandbox"]["state"] == "running"


async def test_a_node_that_dies_in_the_middle_of_a_verb_finishes_it_when_it_is_back(
    service: Service, node: NodeDouble
) -> None:
    gate = node.hooks["sandbox.create"] = Gate()
    made = (await service.http.post("/v1/sandboxes", json={"template": "seed"})).json()
    await gate.reached()
    await node.die()
    shown = await service.get(made["sandbox"]["id"])
    assert shown["state"] == "pending"
    await node.start()
    operation = await service.operation(made["operation"]["id"])
    assert operation["status"] == "succeeded"
    assert gate.calls == 2


async def test_a_node_that_is_away_is_a_condition_and_no_state(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    await node.die()
    async with asyncio.timeout(WITHIN):
        while not (shown := await service.get(sandbox["id"]))["conditions"]:
            await asyncio.sleep(0.01)
    assert shown["state"] == "running"
    assert [one["type"] for one in shown["conditions"]] == ["node_unreachable"]
    pause = (await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause")).json()["operation"]
    async with asyncio.timeout(WITHIN):
        while (await service.operation(pause["id"], wait=0))["phase"] != "waiting for the node":
            await asyncio.sleep(0.01)
    began = time.monotonic()
    await node.start()
    assert (await service.operation(pause["id"]))["status"] == "succeeded"
    assert time.monotonic() - began < 5
    assert (await service.get(sandbox["id"]))["conditions"] == []
    await event_kinds(service, "node.unreachable")


async def test_without_a_node_a_create_and_a_session_say_so(
    service: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("creation", "sessions"):
        monkeypatch.setattr(f"hatchway.control.{module}.NODE_WAIT_S", 0.2)
    sandbox = await service.create()
    await node.die()
    answer = await service.http.post("/v1/sandboxes", json={"template": "seed"})
    assert (answer.status_code, answer.json()["code"]) == (503, "node_unreachable")
    answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["true"]})
    assert (answer.status_code, answer.json()["code"]) == (503, "node_unreachable")
    await node.start()


async def test_an_operation_whose_node_never_comes_back_fails_in_the_end(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, operation_bound_s=1.0
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        await node.die()
        pause = (await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause")).json()["operation"]
        ended = await service.operation(pause["id"])
        assert (ended["status"], ended["error"]["code"]) == ("failed", "operation_bound")
        assert (await service.get(sandbox["id"]))["state"] == "running"
        deletion = (await service.http.delete(f"/v1/sandboxes/{sandbox['id']}")).json()["operation"]
        assert (await service.operation(deletion["id"], wait=2))["status"] == "running"
        await node.start()
        assert (await service.operation(deletion["id"]))["status"] == "succeeded"
        assert node.boxes == {}


async def test_a_session_whose_node_is_just_restarting_is_made_on_the_new_one(
    service: Service, node: NodeDouble
) -> None:
    sandbox = await service.create()
    gate = node.hooks["session.create"] = Gate()
    asking = asyncio.create_task(service.http.post(f"/v1/sandboxes/{sandbox['id']}/sessions", json={"argv": ["true"]}))
    await gate.reached()
    await node.die()
    await node.start()
    answer = await asking
    assert answer.status_code == 201
    assert answer.json()["session"]["id"] in node.sessions


async def test_what_happened_while_nobody_was_connected_is_found_out(service: Service, node: NodeDouble) -> None:
    kept = await service.create()
    died = await service.create()
    lost = await service.create()
    session = (await service.http.post(f"/v1/sandboxes/{kept['id']}/sessions", json={"argv": ["true"]})).json()[
        "session"
    ]
    await node.die()
    node.happen(died["id"], State.STOPPED, "host_reboot", "The host was restarted.")
    del node.boxes[lost["id"]]
    node.session_becomes(session["id"], state="ended")
    await node.start()
    await service.until(died["id"], state="stopped", cause="host_reboot")
    shown = await service.until(lost["id"], state="failed")
    assert "no trace" in shown["reason"]
    assert (await service.get(kept["id"]))["state"] == "running"
    deleted = await service.http.request("DELETE", f"/v1/sandboxes/{lost['id']}", headers={"prefer": "wait=20"})
    assert deleted.json()["sandbox"]["state"] == "deleted"
    async with asyncio.timeout(WITHIN):
        while True:
            rows = (await service.http.get(f"/v1/sandboxes/{kept['id']}/sessions")).json()["sessions"]
            if rows[0]["state"] == "ended":
                break
            await asyncio.sleep(0.01)


async def test_machines_that_are_none_of_ours_are_left_alone(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    stranger = new_id()
    node.boxes[stranger] = Observed(sandbox_id=stranger, project="default", generation=1, state=State.RUNNING)
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    async with in_process(config) as service:
        await service.ready()
        event = await event_kinds(service, "node.quarantine", node="node-one")
        assert event["subject"] == stranger
        listed = node.calls.count("sandbox.list")
        async with asyncio.timeout(WITHIN):
            while node.calls.count("sandbox.list") < listed + 3:
                await asyncio.sleep(0.01)
        assert stranger in node.boxes
        assert not {call for call in node.calls if call.startswith("sandbox.")} - {"sandbox.list"}
        assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []


async def test_a_newer_generation_on_the_node_fences_us(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        node.sequence += 1
        node.boxes[sandbox["id"]] = msgspec.structs.replace(
            node.boxes[sandbox["id"]], generation=2, state=State.PAUSED, sequence=node.sequence
        )
        async with asyncio.timeout(WITHIN):
            while not (shown := await service.get(sandbox["id"]))["conditions"]:
                await asyncio.sleep(0.01)
        assert shown["conditions"][0]["type"] == "foreign_generation"
        assert shown["state"] == "running", "what another owner does is not ours"
        answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/stop", headers={"prefer": "wait=20"})
        assert answer.json()["operation"]["error"]["code"] == "stale_generation"


async def test_drift_is_found_by_the_periodic_pass(folder: Path, node: NodeDouble, database_url: str | None) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.05
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        # Nobody told of it: no event.
        node.boxes[sandbox["id"]] = msgspec.structs.replace(node.boxes[sandbox["id"]], state=State.PAUSED)
        await service.until(sandbox["id"], state="paused")
        deleted = await service.create()
        await service.http.request("DELETE", f"/v1/sandboxes/{deleted['id']}", headers={"prefer": "wait=20"})
        node.boxes[deleted["id"]] = Observed(
            sandbox_id=deleted["id"], project="default", generation=1, state=State.RUNNING
        )
        async with asyncio.timeout(WITHIN):
            while deleted["id"] in node.boxes:
                await asyncio.sleep(0.01)


async def test_deleted_sandboxes_are_purged_after_their_time(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control",
        node_socket=node.path,
        database_url=database_url,
        reconcile_every_s=0.05,
        deleted_kept_s=0.2,
    )
    async with in_process(config) as service:
        await service.ready()
        sandbox = await service.create()
        path = f"/v1/sandboxes/{sandbox['id']}"
        await service.http.request("DELETE", path, headers={"prefer": "wait=20"})
        async with asyncio.timeout(WITHIN):
            while (await service.http.get(path)).status_code == 200:
                await asyncio.sleep(0.02)
        assert (await service.http.get(path)).json()["code"] == "unknown_sandbox"


async def test_a_stale_generation_fails_truthfully(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()

    async def stale(_: Any) -> None:
        raise Conflict("stale_generation", "A newer one was here.", "")

    node.hooks["sandbox.stop"] = stale
    answer = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/stop", headers={"prefer": "wait=20"})
    assert answer.json()["operation"]["error"]["code"] == "stale_generation"
    assert answer.json()["sandbox"]["state"] == "running"
