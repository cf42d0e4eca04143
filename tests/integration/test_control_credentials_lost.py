"""Changes of credentials whose end nobody heard of: they are listed as what they are, can be made again, and do not stay."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.broker_world import CANARY, HOST, World, world
from tests.support.control_fixtures import database_url, folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control import broker as control_broker
from hatchway.control import credentialkeeper
from hatchway.control.main import ControlConfig

__all__ = ["database_url", "folder", "node"]

NAME = "github/bot"
PATH = f"/v1/credentials/{NAME}"
STORED = {"source": {"kind": "store", "value": CANARY.decode()}, "hosts": [HOST]}


@pytest.fixture
async def broker(folder: Path) -> AsyncIterator[World]:
    async with world(folder / "world") as made:
        yield made


@pytest.fixture
async def service(
    folder: Path, node: NodeDouble, database_url: str | None, broker: World, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    monkeypatch.setattr(credentialkeeper, "EVERY_S", 0.05)
    monkeypatch.setattr(credentialkeeper, "AFTER_S", 3600.0)
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, broker_socket=broker.rpc_path
    )
    async with in_process(config) as running:
        await running.ready()
        yield running


class Silence:
    """While it holds, a method of the broker's sources is done, unless `deaf`, and its answer never comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broker: World, method: str, *, deaf: bool = False) -> None:
        self._patches = pytest.MonkeyPatch()
        real: Callable[..., Awaitable[Any]] = getattr(broker.sources, method)

        async def silent(*arguments: Any) -> None:
            if not deaf:
                await real(*arguments)
            await asyncio.Event().wait()

        self._patches.setattr(broker.sources, method, silent)
        self._patches.setattr(control_broker, "WITHIN_S", 0.5)

    def __enter__(self) -> None:
        """It holds already."""

    def __exit__(self, *_: object) -> None:
        self._patches.undo()


async def lost(call: Awaitable[Any]) -> None:
    answer = await call
    assert (answer.status_code, answer.json()["code"]) == (503, "broker_unavailable")


async def listed(service: Service) -> list[tuple[str, int, str]]:
    found = (await service.http.get("/v1/credentials")).json()["credentials"]
    return [(one["name"], one["version"], one["state"]) for one in found]


async def becomes(service: Service, *wanted: tuple[str, int, str]) -> None:
    async with asyncio.timeout(WITHIN):
        while await listed(service) != list(wanted):
            await asyncio.sleep(0.02)


async def test_a_creation_whose_answer_is_lost_is_listed_and_can_be_made_again(
    service: Service, broker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Silence(monkeypatch, broker, "put"):
        await lost(service.http.put(PATH, json=STORED))
    assert [one.name for one in broker.sources._store.all()] == [NAME], "the broker has it"
    assert await listed(service) == [(NAME, 0, "incomplete")]
    shown = (await service.http.get(PATH)).json()["credential"]
    assert (shown["source"], shown["hosts"]) == ({"kind": "store"}, [HOST])
    assert "did not come to its end" in shown["error"]
    again = await service.http.put(PATH, json=STORED)
    assert (again.status_code, again.json()["credential"]["state"]) == (201, "ready")
    assert (await service.http.get(f"{PATH}?check=true")).json()["credential"]["available"] is True


async def test_a_creation_whose_answer_is_lost_can_be_deleted_or_goes_by_itself(
    service: Service, broker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Silence(monkeypatch, broker, "put"):
        await lost(service.http.put(PATH, json=STORED))
    assert (await service.http.delete(PATH)).status_code == 204
    assert list(broker.sources._store.all()) == []
    with Silence(monkeypatch, broker, "put"):
        await lost(service.http.put(PATH, json=STORED))
    monkeypatch.setattr(credentialkeeper, "AFTER_S", 0.0)
    await becomes(service)
    assert list(broker.sources._store.all()) == []
    assert (await service.http.get(PATH)).status_code == 404


async def test_a_change_whose_answer_is_lost_is_told_until_it_is_made_again(
    service: Service, broker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await service.http.put(PATH, json=STORED)).status_code == 201
    with Silence(monkeypatch, broker, "put"):
        await lost(service.http.put(PATH, json={**STORED, "hosts": ["other.example"]}))
    looked_at, check = asyncio.Event(), broker.sources.check

    async def checked(project: str, name: str) -> Any:
        looked_at.set()
        return await check(project, name)

    monkeypatch.setattr(broker.sources, "check", checked)
    monkeypatch.setattr(credentialkeeper, "AFTER_S", 0.0)
    for _ in range(2):  # the keeper leaves what it cannot know
        looked_at.clear()
        async with asyncio.timeout(WITHIN):
            await looked_at.wait()
    assert await listed(service) == [(NAME, 1, "incomplete")]
    looked = (await service.http.get(f"{PATH}?check=true")).json()["credential"]
    assert looked["available"] is False
    assert "version 2" in looked["error"]
    changed = await service.http.put(PATH, json=STORED)
    assert (changed.status_code, changed.json()["credential"]["version"]) == (200, 3)
    assert await listed(service) == [(NAME, 3, "ready")]


async def test_a_change_that_the_broker_never_heard_is_none(
    service: Service, broker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await service.http.put(PATH, json=STORED)).status_code == 201
    for method, call in (("put", service.http.put(PATH, json=STORED)), ("delete", service.http.delete(PATH))):
        monkeypatch.setattr(credentialkeeper, "AFTER_S", 3600.0)
        with Silence(monkeypatch, broker, method, deaf=True):
            await lost(call)
        assert await listed(service) == [(NAME, 1, "incomplete")]
        monkeypatch.setattr(credentialkeeper, "AFTER_S", 0.0)
        await becomes(service, (NAME, 1, "ready"))


async def test_a_deletion_whose_answer_is_lost_is_one(
    service: Service, broker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await service.http.put(PATH, json=STORED)).status_code == 201
    with Silence(monkeypatch, broker, "delete"):
        await lost(service.http.delete(PATH))
    assert await listed(service) == [(NAME, 1, "incomplete")]
    monkeypatch.setattr(credentialkeeper, "AFTER_S", 0.0)
    await becomes(service)
    assert (await service.http.put(PATH, json=STORED)).status_code == 201
