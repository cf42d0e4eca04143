"""Runs the control plane for a test: in the test's own loop, or as a process that can be killed."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from hatchway.control.main import ControlConfig, serve

WITHIN = 20.0


def listen() -> socket.socket:
    """A bound socket at a free port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


class Service:
    """A control plane that runs, and a client with its development key."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.key = (folder / "dev.key").read_text().strip()
        self.http = self.client(self.key)

    def client(self, key: str | None) -> httpx.AsyncClient:
        """Another client, with another key or none."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=WITHIN)

    async def create(self, **more: Any) -> dict[str, Any]:
        """A sandbox that runs."""
        answer = await self.http.post(
            "/v1/sandboxes", json={"template": "seed:latest", **more}, headers={"prefer": "wait=20"}
        )
        assert answer.status_code == 200, answer.text
        sandbox: dict[str, Any] = answer.json()["sandbox"]
        assert sandbox["state"] == "running", answer.text
        return sandbox

    async def get(self, sandbox_id: str) -> dict[str, Any]:
        """The sandbox as it is now."""
        answer = await self.http.get(f"/v1/sandboxes/{sandbox_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["sandbox"]
        return found

    async def until(self, sandbox_id: str, **members: Any) -> dict[str, Any]:
        """Waits until the sandbox shows these members."""
        async with asyncio.timeout(WITHIN):
            while True:
                found = await self.get(sandbox_id)
                if all(found[name] == value for name, value in members.items()):
                    return found
                await asyncio.sleep(0.01)

    async def operation(self, operation_id: str, wait: int = 20) -> dict[str, Any]:
        """The operation, after its end if that comes in time."""
        answer = await self.http.get(f"/v1/operations/{operation_id}", headers={"prefer": f"wait={wait}"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["operation"]
        return found

    async def ready(self) -> None:
        """Waits until a node is connected."""
        async with asyncio.timeout(WITHIN):
            while (await self.http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def in_process(config: ControlConfig, e2b: Path | None = None) -> AsyncIterator[Service]:
    """The control plane in this loop; `e2b` is where it listens for the E2B wrapper, which is a process of ours."""
    from tests.support.sqlite import migrated  # not where this file is run as a program

    if config.database_url is None and not (file := Path(config.database)).exists():
        migrated(file)
    sock = listen()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    ready, ending = asyncio.Event(), asyncio.Event()
    wrappers = None
    if e2b is not None:
        wrappers = socket.socket(socket.AF_UNIX)
        wrappers.bind(str(e2b))
    task = asyncio.create_task(serve(config, api=sock, ready=ready.set, ending=ending, e2b=wrappers))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=WITHIN)
    waiting.cancel()
    if task.done():
        await task
    service = Service(url, config.folder)
    try:
        yield service
    finally:
        await service.http.aclose()
        ending.set()
        await asyncio.wait_for(task, WITHIN)


class ControlProcess:
    """The control plane in a process of its own."""

    def __init__(
        self,
        folder: Path,
        node_socket: Path,
        database_url: str | None = None,
        audit: Path | None = None,
        broker: Path | None = None,
    ) -> None:
        self._folder, self._node, self._url, self._audit, self._broker = (
            folder,
            node_socket,
            database_url,
            audit,
            broker,
        )
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> Service:
        """Starts it; returns when it serves."""
        sock = listen()
        self._process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                str(self._folder),
                str(self._node),
                str(sock.fileno()),
                self._url or "",
                str(self._audit or ""),
                str(self._broker or ""),
            ],
            pass_fds=[sock.fileno()],
            stdout=subprocess.PIPE,
        )
        port = sock.getsockname()[1]
        sock.close()
        assert self._process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), 60)
        assert line == b"ready\n", line
        return Service(f"http://127.0.0.1:{port}", self._folder)

    def stop(self) -> None:
        """SIGSTOP: it holds everything and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def _main() -> None:
    from hatchway.control.main import run

    folder, node, fd, url, audit, broker = sys.argv[1:]
    config = ControlConfig(
        folder=Path(folder),
        node_socket=Path(node),
        database_url=url or None,
        audit_socket=Path(audit) if audit else None,
        lease_s=1.0,
        broker_socket=Path(broker) if broker else None,
    )
    run(config, api=socket.socket(fileno=int(fd)), ready=lambda: print("ready", flush=True))


if __name__ == "__main__":
    _main()
