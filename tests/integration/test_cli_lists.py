"""What the command line lists, against the real control plane and a node double."""

import asyncio
import json
import os
import subprocess
import sys

from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import WITHIN, Service

__all__ = ["database_url", "folder", "node", "service"]


async def ls(service: Service, *arguments: str) -> set[str]:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "hatchway.cli.main", "ls", "--json", *arguments],
        env={**os.environ, "HATCHWAY_URL": service.url, "HATCHWAY_API_KEY": service.key},
        capture_output=True,
        check=True,
        timeout=WITHIN,
    )
    return {sandbox["id"] for sandbox in json.loads(done.stdout)}


async def test_deleted_sandboxes_are_listed_where_they_are_asked_for(service: Service) -> None:
    kept, deleted = (await service.create())["id"], (await service.create())["id"]
    await service.http.delete(f"/v1/sandboxes/{deleted}", headers={"prefer": "wait=20"})
    assert await ls(service) == {kept}
    assert await ls(service, "--all") == {kept, deleted}
    assert await ls(service, "--state", "deleted") == {deleted}
    assert await ls(service, "--all", "--state", "running") == {kept}
