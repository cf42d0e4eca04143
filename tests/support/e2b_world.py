"""The E2B wrapper before a real control plane, whose node is played: asked without a listener of its own."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.e2b.app import make_app
from hatchway.e2b.config import E2bConfig
from hatchway.e2b.identity import Identity
from hatchway.e2b.reaching import Reaching
from hatchway.e2b.wrapper import Wrapper
from hatchway.wire.behalf import SOCKET

SECRET = b"of the tests, and of nobody else"
ORIGIN = "http://127.0.0.1:7080"


@dataclass
class World:
    """A wrapper, what is behind it, and a client with a key of E2B's form."""

    wrapper: Wrapper
    service: Service
    node: NodeDouble
    key: str
    http: httpx.AsyncClient

    def client(self, key: str | None) -> httpx.AsyncClient:
        """Another client, with another key or none."""
        headers = {} if key is None else {"x-api-key": key}
        over = httpx.ASGITransport(make_app(self.wrapper), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=over, base_url=ORIGIN, headers=headers, timeout=WITHIN)

    async def create(self, **body: Any) -> dict[str, Any]:
        """A sandbox that runs, as its creation answers it."""
        made = await self.http.post("/v2/sandboxes", json={"templateID": "base", **body})
        assert made.status_code == 201, made.text
        shown: dict[str, Any] = made.json()
        return shown

    async def info(self, sandbox_id: str) -> dict[str, Any]:
        """What is told of a sandbox."""
        answer = await self.http.get(f"/sandboxes/{sandbox_id}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    async def ours(self, sandbox_id: str) -> dict[str, Any]:
        """The same sandbox, as API v1 shows it."""
        answer = await self.service.http.get(f"/v1/sandboxes/{sandbox_id}", params={"annotations": "true"})
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()["sandbox"]
        return shown


@contextlib.asynccontextmanager
async def world(database_url: str | None = None) -> AsyncIterator[World]:
    """One that is new."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        double = NodeDouble(folder / "node.sock")
        await double.start()
        config = ControlConfig(folder=folder / "control", node_socket=double.path, database_url=database_url)
        try:
            async with in_process(config, e2b=folder / SOCKET) as service:
                await service.ready()
                await double.followed()
                made = await service.http.post("/v1/keys", json={"name": "e2b", "e2b": True})
                assert made.status_code == 201, made.text
                reaching = Reaching(folder / SOCKET)
                wrapper = Wrapper(
                    config=E2bConfig(folder=folder, control=folder / SOCKET),
                    identity=Identity(SECRET),
                    reaching=reaching,
                )
                key = made.json()["key"]["key"]
                here = World(wrapper, service, double, key, httpx.AsyncClient())
                await here.http.aclose()
                here.http = here.client(key)
                try:
                    yield here
                finally:
                    await here.http.aclose()
                    await reaching.close()
        finally:
            await double.die()
