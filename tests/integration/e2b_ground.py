"""The E2B wrapper before a real data plane and guest agent, with a control plane that is played: what it says of the sandbox a test sets."""

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dataplane_harness import WITHIN, Plane
from ports_harness import Client, token_of
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from hatchway.e2b.app import make_app
from hatchway.e2b.config import E2bConfig
from hatchway.e2b.connections import Room, heads_in
from hatchway.e2b.identity import Identity
from hatchway.e2b.reaching import Reaching
from hatchway.e2b.wrapper import Wrapper
from hatchway.wire.behalf import ANNOTATION, HEADER
from hatchway.wire.http_server import Server

SECRET = b"a secret of these tests alone"


class Control:
    """Answers for one sandbox as the control plane does on behalf of it. `woken` are the times that it was woken for."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.state = "running"
        self.operation: dict[str, Any] | None = None
        self.settings: dict[str, Any] | None = {"template": "base"}
        self.timeout_s = 60.0
        self.woken: list[float] = []
        self.looks = 0
        self.app = Router(
            [
                Route("/v1/sandboxes/{id}", self._get),
                Route("/v1/sandboxes/{id}/tokens", self._token, methods=["POST"]),
                Route("/v1/sandboxes/{id}/wake", self._wake, methods=["POST"]),
            ]
        )

    def sandbox(self) -> dict[str, Any]:
        """What API v1 shows."""
        annotations = {} if self.settings is None else {ANNOTATION: self.settings}
        return {"id": self.plane.sandbox_id, "state": self.state, "operation": self.operation, "timeout_s": self.timeout_s, "annotations": annotations}  # fmt: skip

    def _missing(self, request: Request) -> Response | None:
        own = self.plane.sandbox_id
        if self.settings is not None and request.path_params["id"] == own and request.headers.get(HEADER) == own:
            return None
        document = {"type": "about:blank", "status": 404, "code": "unknown_sandbox", "cause": "It is none.", "remedy": "Create one."}  # fmt: skip
        return JSONResponse(document, 404, media_type="application/problem+json")

    async def _get(self, request: Request) -> Response:
        self.looks += 1
        return self._missing(request) or JSONResponse({"sandbox": self.sandbox()})

    async def _token(self, request: Request) -> Response:
        scopes = (await request.json())["scopes"]
        token = token_of(self.plane, *scopes)
        return self._missing(request) or JSONResponse({"token": token, "expires_at": time.time() + 3600, "scopes": scopes, "data_plane_url": self.plane.url}, 201)  # fmt: skip

    async def _wake(self, request: Request) -> Response:
        self.woken.append(float((await request.json())["timeout_s"]))
        self.state, self.operation = "running", None
        operation = {"id": "o", "kind": "wake", "status": "succeeded", "target": self.plane.sandbox_id, "created_at": time.time()}  # fmt: skip
        return JSONResponse({"sandbox": self.sandbox(), "operation": operation}, 200)


class Ground:
    """Where a test takes place."""

    def __init__(
        self, plane: Plane, control: Control, identity: Identity, port: int, tls: ssl.SSLContext | None
    ) -> None:
        self.plane = plane
        self.control = control
        self.identity = identity
        self.port = port
        self.client_tls = tls

    @property
    def id(self) -> str:
        """The sandbox."""
        return self.plane.sandbox_id

    @contextlib.asynccontextmanager
    async def connected(self, server_name: str | None = None) -> AsyncIterator[Client]:
        """A connection to the wrapper."""
        async with asyncio.timeout(WITHIN):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.client_tls, server_hostname=server_name)  # fmt: skip
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()

    def head(
        self, port: int, *lines: str, method: str = "GET", target: str = "/", host: str = "localhost:7080"
    ) -> bytes:
        """The head of a request to a port of the sandbox, by headers."""
        own = [f"E2b-Sandbox-Id: {self.id}", f"E2b-Sandbox-Port: {port}"]
        return "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", *own, *lines, "", ""]).encode("latin-1")

    async def ask(self, octets: bytes) -> tuple[int, dict[str, str], bytes]:
        """The answer to one request."""
        async with self.connected() as client:
            await client.send(octets)
            status, fields = await client.head()
            return status, fields, b"" if status in (204, 304) else await body_of(client, fields)

    async def refusal(self, octets: bytes) -> tuple[int, dict[str, Any]]:
        """Status and body of a refusal in JSON."""
        status, fields, body = await self.ask(octets)
        assert fields["content-type"] == "application/json", body
        return status, json.loads(body)


async def body_of(client: Client, fields: dict[str, str]) -> bytes:
    """The body of an answer, however long it says that it is."""
    async with asyncio.timeout(WITHIN):
        if "content-length" in fields:
            return await client.reader.readexactly(int(fields["content-length"]))
        if fields.get("transfer-encoding") != "chunked":
            return await client.reader.read()
        body = b""
        while size := int((await client.reader.readline()).strip() or b"0", 16):
            body += await client.reader.readexactly(size)
            await client.reader.readexactly(2)
        await client.reader.readexactly(2)
        return body


@contextlib.asynccontextmanager
async def opening(
    plane: Plane,
    folder: Path,
    *,
    domain: str | None = None,
    tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    room: Room | None = None,
) -> AsyncIterator[Ground]:
    """A wrapper that serves, and what it asks."""
    control = Control(plane)
    path = folder / "control.sock"
    behind = socket.socket(socket.AF_UNIX)
    behind.bind(str(path))
    before = socket.create_server(("127.0.0.1", 0))
    identity = Identity(SECRET)
    config = E2bConfig(folder=folder, control=path, secret=SECRET, domain=domain)
    wrapper = Wrapper(config=config, identity=identity, reaching=Reaching(path))
    app = make_app(wrapper)
    servers = [Server(control.app), Server(app, tls=tls, protocol=heads_in(room or Room()), upgrades=app.upgrades)]
    tasks = [asyncio.create_task(one.serve([sock])) for one, sock in zip(servers, (behind, before), strict=True)]
    try:
        async with asyncio.timeout(WITHIN):
            while not all(one.started for one in servers):
                await asyncio.sleep(0.01)
        yield Ground(plane, control, identity, before.getsockname()[1], client_tls)
    finally:
        for one in servers:
            one.end()
        await asyncio.gather(*tasks)
        await wrapper.reaching.close()
        before.close()
        behind.close()
