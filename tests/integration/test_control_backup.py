"""An old backup under nodes that have gone on: what is shown is the truth, and nothing is killed."""

import asyncio
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import postgres
from tests.support.control_fixtures import database_url, folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.lifecycle import State
from hatchway.storage import backup

__all__ = ["database_url", "folder", "node"]

WAIT = {"prefer": "wait=20"}


def copy(config: ControlConfig, target: Path) -> Callable[[], None]:
    """Backs the database up as docs/production.md says it, beside the service; returns what puts it back."""
    if config.database_url is None:
        backup.copy(Path(config.database), target)
        return lambda: backup.put_back(target, Path(config.database))
    server = postgres.server()
    where = server.conninfo(config.database_url.partition("@/")[2].partition("?")[0])

    def run(program: str, *options: str) -> None:
        done = subprocess.run([postgres.program(program), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run("pg_dump", "--format=custom", f"--file={target}", where)
    restore = ("--clean", "--if-exists", "--exit-on-error", "--single-transaction", f"--dbname={where}", str(target))
    return lambda: run("pg_restore", *restore)


async def test_after_an_old_backup_the_nodes_are_believed_and_nothing_is_killed(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.1, lease_s=1.0
    )
    async with in_process(config) as service:
        await service.ready()
        kept, deleted, paused = [(await service.create())["id"] for _ in range(3)]
        key = (await service.http.post("/v1/keys", json={"name": "old"})).json()["key"]
        put_back = await asyncio.to_thread(copy, config, folder / "backup")
        made_later = (await service.create())["id"]
        await service.http.delete(f"/v1/sandboxes/{deleted}", headers=WAIT)
        await service.http.post(f"/v1/sandboxes/{paused}/pause", headers=WAIT)
        await service.http.delete(f"/v1/keys/{key['id']}")
    await asyncio.to_thread(put_back)
    calls = len(node.calls)
    async with in_process(config) as service:
        await service.ready()
        assert (await service.until(deleted, state="failed"))["cause"] == "disk_lost"
        await service.until(paused, state="paused")
        await service.until(kept, state="running")
        await quarantined(service, made_later)
        assert node.boxes[made_later].state == State.RUNNING
        assert not {"sandbox.delete", "sandbox.stop", "sandbox.create"} & set(node.calls[calls:])
        # Everything that is known can be used, and the events go on.
        answer = await service.http.post(f"/v1/sandboxes/{paused}/resume", headers=WAIT)
        assert answer.json()["operation"]["status"] == "succeeded", answer.text
        answer = await service.http.delete(f"/v1/sandboxes/{deleted}", headers=WAIT)
        assert answer.json()["operation"]["status"] == "succeeded", answer.text
        await service.create()


async def quarantined(service: Service, sandbox_id: str) -> None:
    """Waits for the event that tells of a machine which the database does not know."""
    async with asyncio.timeout(WITHIN), service.http.stream("GET", "/v1/events", params={"after": 0}) as stream:
        event = ""
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            if line.startswith("data: ") and event == "node.quarantine" and sandbox_id in line:
                return


async def test_a_create_that_was_in_hand_at_the_backup_is_made_once(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = ControlConfig(
        folder=folder / "control", node_socket=node.path, database_url=database_url, reconcile_every_s=0.1, lease_s=1.0
    )
    entered, go = asyncio.Event(), asyncio.Event()

    async def hold(_: Any) -> None:
        entered.set()
        await go.wait()

    node.hooks["sandbox.create"] = hold
    async with in_process(replace(config)) as service:
        await service.ready()
        made = (await service.http.post("/v1/sandboxes", json={"template": "seed"})).json()
        await asyncio.wait_for(entered.wait(), WITHIN)
        put_back = await asyncio.to_thread(copy, config, folder / "backup")
        go.set()
        assert (await service.operation(made["operation"]["id"]))["status"] == "succeeded"
    await asyncio.to_thread(put_back)
    async with in_process(config) as service:
        await service.ready()
        assert (await service.operation(made["operation"]["id"]))["status"] == "succeeded"
        assert (await service.get(made["sandbox"]["id"]))["state"] == "running"
        assert list(node.boxes) == [made["sandbox"]["id"]]
