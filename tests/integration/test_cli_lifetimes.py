"""Lifetimes, pools, tokens, snapshots and exports from the command line, against the real control plane and a node double."""

import asyncio
import json
from typing import Any

from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import WITHIN, Service
from typer.testing import CliRunner, Result

from hatchway.cli.app import app

__all__ = ["database_url", "folder", "node", "service"]


async def called(service: Service, *words: str) -> Result:
    environ = {"HATCHWAY_URL": service.url, "HATCHWAY_API_KEY": service.key}
    return await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, app, [*words], env=environ), WITHIN)


async def hatchway(service: Service, *words: str) -> Any:
    done = await called(service, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if done.stdout else None


async def test_a_lifetime_is_given_changed_and_extended(service: Service) -> None:
    words = ["--timeout-s", "600", "--idle-timeout-s", "60", "--on-timeout", "pause", "--auto-wake"]
    made = await hatchway(service, "create", *words, "--snapshots", '{"full_every_s": 900}')
    assert (made["timeout_s"], made["idle_timeout_s"], made["on_timeout"], made["auto_wake"]) == (
        600,
        60,
        "pause",
        True,
    )
    assert made["snapshots"]["full_every_s"] == 900
    box = made["id"]
    later = await hatchway(service, "extend", box, "3600")
    assert later["expires_at"] > made["expires_at"] + 2900
    kept = await hatchway(service, "extend", box, "10")
    assert kept["expires_at"] == later["expires_at"]
    refused = await called(service, "set", box, "--timeout-s", "30", "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stderr)["error"]["code"] == "would_shorten"
    shorter = await hatchway(service, "set", box, "--timeout-s", "30", "--shorten")
    assert shorter["expires_at"] < made["expires_at"]
    free = await hatchway(service, "set", box, "--timeout-s", "none", "--no-auto-wake", "--snapshots", "none")
    assert (free["timeout_s"], free["expires_at"], free["auto_wake"], free["snapshots"]) == (None, None, False, None)
    assert (free["idle_timeout_s"], free["on_timeout"]) == (60, "pause")


async def test_name_and_metadata_change_one_by_one(service: Service) -> None:
    made = await hatchway(service, "create", "--name", "lab", "-m", "a=1", "-m", "b=2")
    changed = await hatchway(service, "set", made["id"], "--name", "other", "-m", "c=3", "--drop-metadata", "a")
    assert (changed["name"], changed["metadata"]) == ("other", {"b": "2", "c": "3"})
    assert (await hatchway(service, "set", made["id"], "--name", ""))["name"] is None


async def test_pools_are_made_claimed_from_and_let_run_dry(service: Service) -> None:
    pool = await hatchway(service, "pools", "put", "mine", "--size", "1", "--memory", "512")
    assert (pool["name"], pool["size"], pool["memory_mib"], pool["state"]) == ("mine", 1, 512, "active")
    async with asyncio.timeout(WITHIN):
        while (await hatchway(service, "pools", "get", "mine"))["ready"] != 1:
            await asyncio.sleep(0.02)
    assert [one["name"] for one in await hatchway(service, "pools", "ls")] == ["mine"]
    came = {}
    for asked in ("never", "mine"):
        made = await hatchway(service, "create", "--pool", asked, "--memory", "512")
        (operation,) = (await service.http.get("/v1/operations", params={"target": made["id"]})).json()["operations"]
        came[asked] = operation["result"].get("pool")
    assert came == {"never": None, "mine": "mine"}
    wrong = await called(service, "create", "--pool", "mine", "--memory", "256", "--json")
    assert json.loads(wrong.stderr)["error"]["code"] == "pool_does_not_fit"
    (gone,) = await hatchway(service, "pools", "rm", "mine")
    assert gone["state"] == "draining"
    table = (await called(service, "pools")).stdout.splitlines()
    assert table[0].split()[:2] == ["POOL", "STATE"]


async def test_snapshots_forks_and_exports_are_shown_and_removed(service: Service) -> None:
    box = (await service.create())["id"]
    kept = await hatchway(service, "snapshot", box, "--kind", "disk")
    assert (await hatchway(service, "snapshots", "get", kept["id"]))["kind"] == "disk"
    assert [one["id"] for one in await hatchway(service, "snapshots", "ls", "--kind", "disk")] == [kept["id"]]
    assert await hatchway(service, "snapshots", "ls", "--kind", "full") == []
    (branch,) = await hatchway(service, "fork", box, "--name", "b", "-m", "k=v")
    assert (branch["name"], branch["metadata"]) == ("b", {"k": "v"})
    (gone,) = await hatchway(service, "snapshots", "rm", kept["id"])
    assert gone["state"] == "deleted"
    await hatchway(service, "stop", box)
    made = await service.http.post(f"/v1/sandboxes/{box}/export", json={}, headers={"prefer": "wait=20"})
    export = made.json()["operation"]["result"]["export"]
    assert [one["id"] for one in await hatchway(service, "exports")] == [export]
    await hatchway(service, "exports", "rm", export)
    assert await hatchway(service, "exports", "ls") == []


async def test_tokens_sessions_keys_and_templates_are_shown_and_ended(service: Service) -> None:
    box = (await service.create())["id"]
    made = await hatchway(service, "tokens", "create", box, "--scope", "files", "--scope", "ports")
    other = await hatchway(service, "tokens", "create", box, "--scope", "sessions")
    assert {one["id"] for one in await hatchway(service, "tokens", "ls", box)} == {made["token_id"], other["token_id"]}
    await hatchway(service, "tokens", "revoke", made["token_id"])
    assert [one["id"] for one in await hatchway(service, "tokens", "ls", box)] == [other["token_id"]]
    await hatchway(service, "tokens", "revoke", "--sandbox", box)
    assert await hatchway(service, "tokens", "ls", box) == []
    session = (await service.http.post(f"/v1/sandboxes/{box}/sessions", json={"argv": ["true"]})).json()["session"][
        "id"
    ]
    await hatchway(service, "kill", session)
    assert (await called(service, "kill", session)).exit_code == 1
    key = await hatchway(service, "keys", "create", "one")
    assert (await hatchway(service, "keys", "show", key["id"]))["name"] == "one"
    assert (await hatchway(service, "templates", "seed:latest"))["name"] == "seed"
