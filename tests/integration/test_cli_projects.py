"""Projects, their keys, and tokens by the command line and the SDK, against the real control plane and a node double."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import WITHIN, Service

from hatchway.client import AsyncHatchway, Conflict, Forbidden, Hatchway, NotFound, Unauthenticated

__all__ = ["database_url", "folder", "node", "service"]


async def hatchway(service: Service, *arguments: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "hatchway.cli.main", *arguments],
        env={**os.environ, "HATCHWAY_URL": service.url, "HATCHWAY_API_KEY": key or service.key},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN,
    )


async def told(service: Service, *arguments: str, key: str | None = None) -> Any:
    done = await hatchway(service, *arguments, "--json", key=key)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_a_project_by_the_command_line(service: Service) -> None:
    made = await told(
        service, "projects", "create", "tenant", "--quota", "sandboxes=2", "--quota", "sessions=9", "--cap", "vcpus=4"
    )
    assert (made["quotas"], made["caps"], made["templates"]) == ({"sandboxes": 2, "sessions": 9}, {"vcpus": 4}, None)
    changed = await told(
        service, "projects", "set", "tenant", "--quota", "sandboxes=1", "--quota", "sessions=", "--template", "seed"
    )
    assert (changed["quotas"], changed["caps"], changed["templates"]) == ({"sandboxes": 1}, {"vcpus": 4}, ["seed"])
    key = (await told(service, "keys", "create", "k", "--project", "tenant"))["key"]
    assert [one["name"] for one in await told(service, "projects", key=key)] == ["tenant"]
    await told(service, "create", key=key)
    refused = await hatchway(service, "create", key=key)
    assert refused.returncode == 1
    assert "code: quota_exceeded" in refused.stderr
    shown = (await hatchway(service, "projects", "show", "tenant", key=key)).stdout
    assert ["sandboxes", "1", "1"] in [line.split() for line in shown.splitlines()]
    wrong = await hatchway(service, "projects", "set", "tenant", "--quota", "sandboxes=many")
    assert wrong.returncode == 2
    refused = await hatchway(service, "projects", "delete", "tenant")
    assert "code: project_not_empty" in refused.stderr
    assert (await told(service, "projects", "delete", "tenant", "--force"))["state"] in ("deleting", "deleted")


async def test_a_key_is_rotated_by_the_command_line(service: Service) -> None:
    old = await told(service, "keys", "create", "ci", "--scope", "read", "--scope", "exec")
    assert old["scopes"] == ["read", "exec"]
    new = (await hatchway(service, "keys", "rotate", old["id"])).stdout.strip()
    assert await told(service, "ls", key=new) == []
    refused = await hatchway(service, "ls", key=old["key"])
    assert "code: key_revoked" in refused.stderr


async def test_projects_and_tokens_by_the_sdk(service: Service) -> None:
    def blocking() -> None:
        with Hatchway(service.url, service.key) as hatchway:
            made = hatchway.projects.create(
                "tenant", quotas={"sandboxes": 1}, caps={"memory_mib": 1024, "timeout_s": 60.5}
            )
            assert (made.quotas, made.caps) == ({"sandboxes": 1}, {"memory_mib": 1024, "timeout_s": 60.5})
            with pytest.raises(Conflict, match="project_exists"):
                hatchway.projects.create("tenant")
            key = hatchway.keys.create("k", project="tenant")
            assert [one.id for one in hatchway.keys.list("tenant")] == [key.id]
            rotated = hatchway.keys.rotate(key.id, overlap=60)
            with Hatchway(service.url, rotated.key) as tenant:
                sandbox = tenant.sandboxes.create("seed")
                with pytest.raises(Forbidden, match="quota_exceeded"):
                    tenant.sandboxes.create("seed")
                usage = tenant.projects.get("tenant").usage
                assert usage is not None
                assert usage["sandboxes"] == 1
                sandbox.token(["files"])
                (token,) = tenant.tokens.list(sandbox.id)
                tenant.tokens.revoke(token.id)
                tenant.tokens.revoke_all(sandbox.id)
                assert list(tenant.tokens.list(sandbox.id)) == []
                hatchway.projects.update("tenant", quotas={})
                assert not hatchway.projects.delete("tenant", force=True)
                with pytest.raises(Unauthenticated):
                    list(tenant.sandboxes.list())

    await asyncio.to_thread(blocking)
    async with AsyncHatchway(service.url, service.key) as hatchway:
        async with asyncio.timeout(WITHIN):
            while "tenant" in [one.name async for one in hatchway.projects.list()]:
                await asyncio.sleep(0.02)
        with pytest.raises(NotFound, match="unknown_project"):
            await hatchway.projects.get("tenant")
        assert await hatchway.projects.create("other")
        assert await hatchway.projects.delete("other")
