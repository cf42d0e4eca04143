"""A control process that is killed, at any moment, and the one that takes its place; and nodes on other hosts."""

import asyncio
import contextlib
import random
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.certificates import Authority
from tests.support.control_fixtures import database_url, folder, node
from tests.support.control_service import WITHIN, ControlProcess, Service, in_process
from tests.support.node_double import DIGEST, NodeDouble

from hatchway.control.main import ControlConfig, TlsNode
from hatchway.domain.errors import Unavailable
from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.wire.node import UploadDescription

__all__ = ["database_url", "folder", "node"]


@pytest.fixture
async def process(folder: Path, node: NodeDouble, database_url: str | None) -> AsyncIterator[ControlProcess]:
    """A control process that has not been started."""
    control = ControlProcess(folder / "control", node.path, database_url)
    yield control
    control.kill()


async def test_a_create_goes_on_in_the_next_process(process: ControlProcess, node: NodeDouble) -> None:
    service = await process.start()
    await service.ready()
    entered = asyncio.Event()

    async def never(_: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    node.hooks["sandbox.create"] = never
    body = {"template": "seed", "metadata": {"a": "b"}}
    made = (await service.http.post("/v1/sandboxes", json=body, headers={"idempotency-key": "k"})).json()
    await asyncio.wait_for(entered.wait(), WITHIN)
    process.kill()
    await service.http.aclose()
    del node.hooks["sandbox.create"]

    second = await process.start()
    assert second.key == service.key, "the development key stays"
    operation = await second.operation(made["operation"]["id"])
    assert operation["status"] == "succeeded"
    shown = await second.get(made["sandbox"]["id"])
    assert (shown["state"], shown["metadata"]) == ("running", {"a": "b"})
    repeated = await second.http.post("/v1/sandboxes", json=body, headers={"idempotency-key": "k"})
    assert repeated.json()["sandbox"]["id"] == made["sandbox"]["id"]
    assert len(node.boxes) == 1
    await second.http.aclose()


async def test_a_delete_and_a_stop_go_on_in_the_next_process(process: ControlProcess, node: NodeDouble) -> None:
    service = await process.start()
    await service.ready()
    boxes = [await service.create() for _ in range(2)]
    arrived = asyncio.Semaphore(0)

    async def never(_: Any) -> None:
        arrived.release()
        await asyncio.Event().wait()

    node.hooks["sandbox.delete"] = node.hooks["sandbox.stop"] = never
    deletion = (await service.http.delete(f"/v1/sandboxes/{boxes[0]['id']}")).json()["operation"]
    stop = (await service.http.post(f"/v1/sandboxes/{boxes[1]['id']}/stop")).json()["operation"]
    for _ in range(2):
        await asyncio.wait_for(arrived.acquire(), WITHIN)
    process.kill()
    await service.http.aclose()
    node.hooks.clear()

    second = await process.start()
    for operation in (deletion, stop):
        assert (await second.operation(operation["id"]))["status"] == "succeeded"
    assert (await second.get(boxes[0]["id"]))["state"] == "deleted"
    assert (await second.get(boxes[1]["id"]))["state"] == "stopped"
    assert boxes[0]["id"] not in node.boxes
    await second.http.aclose()


async def test_the_import_of_a_snapshot_goes_on_in_the_next_process(process: ControlProcess, node: NodeDouble) -> None:
    service = await process.start()
    await service.ready()
    entered = asyncio.Event()

    async def never(_: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    node.hooks["snapshot.import"] = never
    upload = (await service.http.post("/v1/uploads")).json()["id"]
    node.uploads[upload] = UploadDescription(
        kind="full",
        source=new_id(),
        template="seed:latest",
        template_digest=DIGEST,
        shape=Shape(),
        hostname="box",
        env={},
        of_snapshot=True,
    )
    body, key = {"upload": upload}, {"idempotency-key": "k"}
    made = (await service.http.post("/v1/imports", json=body, headers=key)).json()
    await asyncio.wait_for(entered.wait(), WITHIN)
    snapshot = made["snapshot"]["id"]
    early = await service.http.delete(f"/v1/snapshots/{snapshot}")
    assert (early.status_code, early.json()["code"]) == (409, "snapshot_not_ready")
    process.kill()
    await service.http.aclose()
    del node.hooks["snapshot.import"]

    second = await process.start()
    operation = await second.operation(made["operation"]["id"])
    assert (operation["status"], operation["target"]) == ("succeeded", snapshot)
    shown = (await second.http.get(f"/v1/snapshots/{snapshot}")).json()["snapshot"]
    assert (shown["state"], shown["kind"]) == ("ready", "full")
    repeated = await second.http.post("/v1/imports", json=body, headers=key)
    assert (repeated.json()["made"], repeated.json()["snapshot"]["id"]) == ("snapshot", snapshot)
    assert set(node.snapshots) == {snapshot}
    await second.http.aclose()


async def test_tokens_stay_valid_over_a_restart(process: ControlProcess, node: NodeDouble) -> None:
    service = await process.start()
    await service.ready()
    assert node.configured is not None
    before = node.configured.token_keys
    process.kill()
    await service.http.aclose()
    node.configured = None
    second = await process.start()
    await second.ready()
    assert node.configured is not None
    assert node.configured.token_keys == before
    await second.http.aclose()


async def _drive(service: Service, rng: random.Random, known: set[str]) -> None:
    """Asks for one thing after another until the process is gone."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            verb = rng.choice(["create", "pause", "resume", "stop", "start", "delete"])
            if verb == "create" or not known:
                answer = await service.http.post("/v1/sandboxes", json={"template": "seed"})
                if answer.status_code in (200, 202):
                    known.add(answer.json()["sandbox"]["id"])
                continue
            name = rng.choice(sorted(known))
            if verb == "delete":
                await service.http.delete(f"/v1/sandboxes/{name}")
            else:
                await service.http.post(f"/v1/sandboxes/{name}/{verb}")


async def test_kills_at_random_moments_leave_no_sandbox_without_a_way_out(
    process: ControlProcess, node: NodeDouble
) -> None:
    rng = random.Random(20261129)
    known: set[str] = set()

    async def slowly(_: Any) -> None:
        await asyncio.sleep(rng.uniform(0, 0.02))

    for verb in ("create", "pause", "resume", "stop", "start", "delete"):
        node.hooks[f"sandbox.{verb}"] = slowly
    for _ in range(4):
        service = await process.start()
        await service.ready()
        clients = [asyncio.create_task(_drive(service, rng, known)) for _ in range(4)]
        calls = len(node.calls)
        async with asyncio.timeout(WITHIN):
            while len(node.calls) < calls + rng.randint(30, 60):
                await asyncio.sleep(0.005)
        process.kill()
        await asyncio.gather(*clients)
        await service.http.aclose()
    node.hooks.clear()

    service = await process.start()
    await service.ready()
    async with asyncio.timeout(WITHIN):
        while (await service.http.get("/v1/operations", params={"status": "pending,running"})).json()["operations"]:
            await asyncio.sleep(0.02)
    shown = {name: await service.get(name) for name in known}
    for name, sandbox in shown.items():
        assert sandbox["operation"] is None
        if sandbox["state"] == "deleted":
            assert name not in node.boxes
        else:
            assert sandbox["state"] == node.boxes[name].state
    assert len(known) > 4
    assert set(node.boxes) <= known | {one["id"] for one in await _all(service)}
    for name in sorted({one["id"] for one in await _all(service)}):
        answer = await service.http.request("DELETE", f"/v1/sandboxes/{name}", headers={"prefer": "wait=20"})
        assert answer.json()["sandbox"]["state"] == "deleted"
    assert node.boxes == {}
    await service.http.aclose()


async def _all(service: Service) -> list[dict[str, Any]]:
    """Every sandbox that is not deleted; one whose answer the kill swallowed is among them."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = (
            await service.http.get("/v1/sandboxes", params={"limit": "500", **({"cursor": cursor} if cursor else {})})
        ).json()
        found += page["sandboxes"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


async def test_a_second_control_process_on_one_database_is_refused(folder: Path, node: NodeDouble) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path)
    async with in_process(config):
        with pytest.raises(Unavailable, match="database_in_use"):
            async with in_process(config):
                raise AssertionError("it must not start")


async def test_the_development_key_is_private_and_made_anew_when_its_file_is_lost(
    folder: Path, node: NodeDouble
) -> None:
    config = ControlConfig(folder=folder / "control", node_socket=node.path)
    async with in_process(config) as first:
        assert stat.S_IMODE(config.development_key.stat().st_mode) == 0o600
        old = first.key
    config.development_key.unlink()
    async with in_process(config) as second:
        assert second.key != old
        assert (await second.http.get("/v1/sandboxes")).status_code == 200
        async with second.client(old) as lost:
            assert (await lost.get("/v1/sandboxes")).json()["code"] == "key_revoked"
        assert len((await second.http.get("/v1/keys")).json()["keys"]) == 1


@pytest.fixture
async def remote(folder: Path) -> AsyncIterator[tuple[NodeDouble, Authority]]:
    """A node that listens on TCP and wants certificates of an authority."""
    authority = Authority(folder / "ca", "Test authority")
    double = NodeDouble(folder / "unused", node_id="node-far")
    double.tls = ("127.0.0.1", authority.server_context("node-far.test"))
    await double.start()
    yield double, authority
    await double.die()


def _address(node: NodeDouble, authority: Authority, client: Authority, name: str = "node-far.test") -> TlsNode:
    certificate, key = client.issue("control.test")
    return TlsNode(
        host="127.0.0.1", port=node.port, server_name=name, certificate=certificate, key=key, ca=authority.ca
    )


async def test_a_node_on_another_host_over_mutual_tls(
    folder: Path, node: NodeDouble, remote: tuple[NodeDouble, Authority]
) -> None:
    far, authority = remote
    far.isolation = "hardware"
    config = ControlConfig(
        folder=folder / "control",
        node_socket=node.path,
        more_nodes=(_address(far, authority, authority),),
    )
    async with in_process(config) as service:
        async with asyncio.timeout(WITHIN):
            while far.configured is None:
                await asyncio.sleep(0.01)
        await service.ready()
        here = await service.create()
        there = await service.create(require_isolation="hardware")
        assert (here["node"], there["node"]) == ("node-one", "node-far")
        assert set(far.boxes) == {there["id"]}
        assert set(node.boxes) == {here["id"]}
        await far.die()
        await far.start()
        stopped = await service.http.post(f"/v1/sandboxes/{there['id']}/stop", headers={"prefer": "wait=20"})
        assert stopped.json()["sandbox"]["state"] == "stopped"


@pytest.mark.parametrize("wrong", ["authority", "name", "client"])
async def test_a_node_that_cannot_show_who_it_is_is_not_spoken_to(
    folder: Path, remote: tuple[NodeDouble, Authority], wrong: str
) -> None:
    far, authority = remote
    stranger = Authority(folder / "other", "Another authority")
    address = _address(
        far,
        stranger if wrong == "authority" else authority,
        stranger if wrong == "client" else authority,
        "other.test" if wrong == "name" else "node-far.test",
    )
    tried = asyncio.Event()

    done = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.set()
        there, back = await asyncio.open_connection("127.0.0.1", far.port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while octets := await source.read(65536):
                    sink.write(octets)
                    await sink.drain()
            sink.close()

        await asyncio.gather(copy(reader, back), copy(there, writer))
        done.set()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = ControlConfig(folder=folder / "control", more_nodes=(replace(address, port=port),))
    async with in_process(config) as service:
        await asyncio.wait_for(tried.wait(), WITHIN)
        await asyncio.wait_for(done.wait(), WITHIN)
        assert (await service.http.get("/readyz")).status_code == 503
        assert far.configured is None
        assert far.calls == []
    server.close()
