"""Several control processes on one PostgreSQL database: what one takes on another can end, and all see the same."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.support import postgres
from tests.support.control_fixtures import folder, node
from tests.support.control_service import WITHIN, ControlProcess, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.lifecycle import State

__all__ = ["folder", "node"]

WAIT = {"prefer": "wait=30"}


@pytest.fixture
def database_url() -> Iterator[str]:
    """A database on a server."""
    with postgres.database_url() as url:
        yield url


@pytest.fixture
async def pair(folder: Path, node: NodeDouble, database_url: str) -> AsyncIterator[tuple[Service, Service]]:
    """Two control planes of one database and one node."""
    async with contextlib.AsyncExitStack() as stack:
        both = []
        for name in ("one", "two"):
            config = ControlConfig(
                folder=folder / name,
                node_socket=node.path,
                database_url=database_url,
                lease_s=2.0,
                reconcile_every_s=0.2,
            )
            both.append(await stack.enter_async_context(in_process(config)))
        for service in both:
            await service.ready()
        yield both[0], both[1]


class Gate:
    """Holds a method of the node until it is opened."""

    def __init__(self, node: NodeDouble, method: str) -> None:
        self.entered, self._open = asyncio.Event(), asyncio.Event()
        self._node, self._method = node, method
        node.hooks[method] = self

    async def __call__(self, _: Any) -> None:
        self.entered.set()
        await self._open.wait()

    def open(self) -> None:
        self._node.hooks.pop(self._method, None)
        self._open.set()


async def test_what_one_takes_on_the_other_shows_waits_for_and_goes_on_from(
    pair: tuple[Service, Service], node: NodeDouble
) -> None:
    one, two = pair
    gate = Gate(node, "sandbox.create")
    made = (await one.http.post("/v1/sandboxes", json={"template": "seed"})).json()
    await asyncio.wait_for(gate.entered.wait(), WITHIN)
    waiting = asyncio.create_task(two.operation(made["operation"]["id"], wait=30))
    refused = await two.http.post(f"/v1/operations/{made['operation']['id']}/cancel")
    assert refused.json()["code"] == "not_cancellable"
    gate.open()
    assert (await waiting)["status"] == "succeeded"
    sandbox = made["sandbox"]["id"]
    for number in range(3):
        service = pair[number % 2]
        verb = ("pause", "resume", "pause")[number]
        answer = await service.http.post(f"/v1/sandboxes/{sandbox}/{verb}", headers=WAIT)
        assert answer.status_code == 200, answer.text
    assert (await one.get(sandbox))["state"] == (await two.get(sandbox))["state"] == "paused"
    assert node.calls.count("sandbox.create") == 1


async def test_a_repeated_request_is_one_whichever_process_gets_it(pair: tuple[Service, Service]) -> None:
    answers = await asyncio.gather(
        *(
            pair[number % 2].http.post(
                "/v1/sandboxes", json={"template": "seed"}, headers={"idempotency-key": "k", **WAIT}
            )
            for number in range(6)
        )
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["sandbox"]["id"] for answer in answers}) == 1


async def test_a_delete_here_pre_empts_what_is_executed_there(pair: tuple[Service, Service], node: NodeDouble) -> None:
    one, two = pair
    gate = Gate(node, "sandbox.create")
    made = (await one.http.post("/v1/sandboxes", json={"template": "seed"})).json()
    await asyncio.wait_for(gate.entered.wait(), WITHIN)
    deleted = await two.http.delete(f"/v1/sandboxes/{made['sandbox']['id']}", headers=WAIT)
    assert deleted.json()["operation"]["status"] == "succeeded", deleted.text
    assert (await one.operation(made["operation"]["id"]))["status"] == "cancelled"
    gate.open()
    # Whatever became of the call that was under way: what is deleted does not stay on its node.
    async with asyncio.timeout(WITHIN):
        while node.boxes:
            await asyncio.sleep(0.02)
    assert (await one.get(made["sandbox"]["id"]))["state"] == "deleted"


async def test_events_and_what_happens_unasked_are_seen_by_all_and_written_once(
    pair: tuple[Service, Service], node: NodeDouble
) -> None:
    one, two = pair
    sandbox = (await one.create())["id"]
    seen: list[dict[str, Any]] = []
    async with two.http.stream("GET", "/v1/events", params={"after": 0, "subject": sandbox}) as stream:
        lines = stream.aiter_lines()
        node.happen(sandbox, State.FAILED, "vmm_died", "killed")
        async with asyncio.timeout(WITHIN):
            async for line in lines:
                if line.startswith("data: {") and len(line) > len("data: {}"):
                    seen.append(json.loads(line.removeprefix("data: ")))
                    if seen[-1]["data"].get("state") == "failed":
                        break
    for service in pair:
        assert (await service.until(sandbox, state="failed"))["reason"] == "killed"
    kinds = [event["kind"] for event in seen]
    assert kinds == ["operation.accepted", "operation.succeeded", "sandbox.state_changed", "sandbox.state_changed"]
    assert len({event["sequence"] for event in seen}) == len(seen)


async def test_a_revoked_key_ends_everywhere_at_once(pair: tuple[Service, Service]) -> None:
    one, two = pair
    made = (await one.http.post("/v1/keys", json={"name": "guest"})).json()["key"]
    async with two.client(made["key"]) as guest:
        assert (await guest.get("/v1/sandboxes")).status_code == 200
        assert (await one.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
        async with asyncio.timeout(WITHIN):
            while (await guest.get("/v1/sandboxes")).status_code == 200:
                await asyncio.sleep(0.01)


async def test_both_have_one_signing_key_and_development_keys_of_their_own(
    pair: tuple[Service, Service], node: NodeDouble
) -> None:
    one, two = pair
    assert one.key != two.key
    for service in pair:
        async with one.client(service.key) as client:
            assert (await client.get("/v1/sandboxes")).status_code == 200
    assert node.configured is not None
    assert len(node.configured.token_keys) == 1


async def test_what_a_killed_process_had_in_hand_another_one_ends(
    folder: Path, node: NodeDouble, database_url: str
) -> None:
    first = ControlProcess(folder / "one", node.path, database_url)
    second = ControlProcess(folder / "two", node.path, database_url)
    try:
        one, two = await first.start(), await second.start()
        await one.ready()
        await two.ready()
        kept = [await one.create(name=f"kept-{n}") for n in range(3)]
        gate = Gate(node, "sandbox.create")
        pausing = Gate(node, "sandbox.pause")
        operations = [
            (await one.http.post("/v1/sandboxes", json={"template": "seed"})).json()["operation"]["id"]
            for _ in range(8)
        ]
        operations.append((await one.http.post(f"/v1/sandboxes/{kept[0]['id']}/pause")).json()["operation"]["id"])
        await asyncio.wait_for(gate.entered.wait(), WITHIN)
        await asyncio.wait_for(pausing.entered.wait(), WITHIN)
        first.kill()
        await one.http.aclose()
        gate.open()
        pausing.open()
        for operation in operations:
            assert (await two.operation(operation, wait=30))["status"] == "succeeded"
        assert len(node.boxes) == 11
        assert (await two.get(kept[0]["id"]))["state"] == "paused"
        # What nodes say is the second one's to write down now.
        node.happen(kept[1]["id"], State.FAILED, "vmm_died", "killed")
        await two.until(kept[1]["id"], state="failed")
        # And the first one, back again, is one of two.
        again = await first.start()
        await again.ready()
        assert (await again.get(kept[2]["id"]))["state"] == "running"
        answer = await again.http.post(f"/v1/sandboxes/{kept[2]['id']}/stop", headers=WAIT)
        assert answer.json()["operation"]["status"] == "succeeded", answer.text
        await again.http.aclose()
        await two.http.aclose()
    finally:
        first.kill()
        second.kill()


async def test_a_process_that_was_stopped_for_long_does_nothing_twice(
    folder: Path, node: NodeDouble, database_url: str
) -> None:
    first = ControlProcess(folder / "one", node.path, database_url)
    second = ControlProcess(folder / "two", node.path, database_url)
    try:
        one, two = await first.start(), await second.start()
        await one.ready()
        await two.ready()
        gate = Gate(node, "sandbox.create")
        made = (await one.http.post("/v1/sandboxes", json={"template": "seed"})).json()
        await asyncio.wait_for(gate.entered.wait(), WITHIN)
        first.stop()
        gate.open()
        assert (await two.operation(made["operation"]["id"], wait=30))["status"] == "succeeded"
        answer = await two.http.post(f"/v1/sandboxes/{made['sandbox']['id']}/pause", headers=WAIT)
        assert answer.status_code == 200, answer.text
        first.go_on()
        await one.ready()
        assert (await one.get(made["sandbox"]["id"]))["state"] == "paused"
        answer = await one.http.post(f"/v1/sandboxes/{made['sandbox']['id']}/resume", headers=WAIT)
        assert answer.status_code == 200, answer.text
        await one.http.aclose()
        await two.http.aclose()
    finally:
        first.kill()
        second.kill()


@pytest.fixture
async def apart(
    folder: Path, node: NodeDouble, database_url: str
) -> AsyncIterator[tuple[tuple[Service, NodeDouble], tuple[Service, NodeDouble]]]:
    """Two control planes of one database, each with a node that the other one does not reach."""
    far = NodeDouble(folder / "far.sock", "node-two")
    await far.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            services = []
            for name, one in (("one", node), ("two", far)):
                config = ControlConfig(
                    folder=folder / name, node_socket=one.path, database_url=database_url, lease_s=1.0
                )
                services.append(await stack.enter_async_context(in_process(config)))
                await services[-1].ready()
            yield (services[0], node), (services[1], far)
    finally:
        await far.die()


async def test_an_operation_is_executed_where_its_node_is_reached(
    apart: tuple[tuple[Service, NodeDouble], tuple[Service, NodeDouble]],
) -> None:
    (one, near), (two, far) = apart
    sandbox = await one.create()
    assert (len(near.boxes), len(far.boxes)) == (1, 0)
    answer = await two.http.post(f"/v1/sandboxes/{sandbox['id']}/pause", headers=WAIT)
    assert answer.json()["operation"]["status"] == "succeeded", answer.text
    assert (await two.get(sandbox["id"]))["state"] == "paused"
    deleted = await two.http.delete(f"/v1/sandboxes/{sandbox['id']}", headers=WAIT)
    assert deleted.json()["operation"]["status"] == "succeeded", deleted.text


async def test_what_a_process_gave_up_when_its_lease_lapsed_it_takes_up_again(
    apart: tuple[tuple[Service, NodeDouble], tuple[Service, NodeDouble]],
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (one, near), _ = apart
    gate = Gate(near, "sandbox.create")
    made = (await one.http.post("/v1/sandboxes", json={"template": "seed"})).json()
    await asyncio.wait_for(gate.entered.wait(), WITHIN)
    async with await psycopg.AsyncConnection.connect(database_url) as blocking:
        await blocking.execute("LOCK TABLE leases IN EXCLUSIVE MODE")
        async with asyncio.timeout(WITHIN):
            while "not renewed: the database did not answer in time" not in caplog.text:
                await asyncio.sleep(0.01)
    gate.open()
    operation = await one.operation(made["operation"]["id"])
    assert operation["status"] == "succeeded", operation
    assert len(near.boxes) == 1


async def test_what_one_revokes_the_nodes_of_the_other_know(
    apart: tuple[tuple[Service, NodeDouble], tuple[Service, NodeDouble]],
) -> None:
    (one, _), (_, far) = apart
    made = (await one.http.post("/v1/keys", json={"name": "guest", "expires_in_s": 3600})).json()["key"]
    assert (await one.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
    async with asyncio.timeout(WITHIN):
        while far.configured is None or made["id"] not in str(far.configured.revoked_keys):
            await asyncio.sleep(0.01)
