"""What the command line makes and lists, against the real control plane and a node double."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import WITHIN, Service

__all__ = ["database_url", "folder", "node", "service"]


async def hatchway(service: Service, *arguments: str) -> Any:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "hatchway.cli.main", *arguments, "--json"],
        env={**os.environ, "HATCHWAY_URL": service.url, "HATCHWAY_API_KEY": service.key},
        capture_output=True,
        check=True,
        timeout=WITHIN,
    )
    return json.loads(done.stdout)


async def ls(service: Service, *arguments: str) -> set[str]:
    return {sandbox["id"] for sandbox in await hatchway(service, "ls", *arguments)}


async def test_deleted_sandboxes_are_listed_where_they_are_asked_for(service: Service) -> None:
    kept, deleted = (await service.create())["id"], (await service.create())["id"]
    await service.http.delete(f"/v1/sandboxes/{deleted}", headers={"prefer": "wait=20"})
    assert await ls(service) == {kept}
    assert await ls(service, "--all") == {kept, deleted}
    assert await ls(service, "--state", "deleted") == {deleted}
    assert await ls(service, "--all", "--state", "running") == {kept}


async def test_a_sandbox_is_made_from_a_snapshot(service: Service) -> None:
    source = (await service.create())["id"]
    kept = await hatchway(service, "snapshot", source, "--kind", "full")
    made = await hatchway(service, "create", "--snapshot", kept["id"], "--name", "second")
    assert (made["state"], made["name"]) == ("running", "second")
    assert (await service.http.get(f"/v1/sandboxes/{made['id']}")).json()["sandbox"]["head_snapshot"] == kept["id"]
