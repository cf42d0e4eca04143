"""Measures what the control plane adds to a node that takes no time, and what a transaction costs: one JSON line per figure.

Run it as `.venv/bin/python -m tests.support.control_overhead`. The node double runs in this process, the control plane in another.
"""

import asyncio
import http.client
import itertools
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from tests.support.control_service import ControlProcess, Service
from tests.support.node_double import NodeDouble

from hatchway.domain.shapes import Shape
from hatchway.storage import keys, transitions
from hatchway.storage.database import Database

RUNS = 200
NEW = transitions.NewSandbox(
    project="default",
    name=None,
    node_id="n",
    template="seed:latest",
    template_digest="sha256:0",
    shape=Shape(),
    metadata={},
    env={},
    require_isolation=None,
)


def report(metric: str, times: list[float]) -> None:
    """Prints the median, in milliseconds."""
    median, best = statistics.median(times) * 1e3, min(times) * 1e3
    line = {"bench": "control", "metric": metric, "value": round(median, 2), "min": round(best, 2), "unit": "ms"}
    print(json.dumps({**line, "runs": len(times)}), flush=True)


def requests(service: Service) -> None:
    """One client on one connection, one request after another."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"))
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    numbers = itertools.count()

    def ask(method: str, path: str, body: Any = None, **headers: str) -> Any:
        headers = {"authorization": f"Bearer {service.key}", "prefer": "wait=20", **headers}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        octets = answer.read()
        assert answer.status in (200, 201), octets
        return json.loads(octets)

    def measure(metric: str, one: Callable[[], Any]) -> Any:
        times = []
        for _ in range(RUNS):
            began = time.perf_counter()
            last = one()
            times.append(time.perf_counter() - began)
        report(metric, times)
        return last

    measure("healthz", lambda: ask("GET", "/healthz"))
    made = measure("create_running", lambda: ask("POST", "/v1/sandboxes", {"template": "seed"}))
    path = f"/v1/sandboxes/{made['sandbox']['id']}"
    body = {"argv": ["true"]}
    measure(
        "create_session",
        lambda: ask("POST", f"{path}/sessions", body, **{"idempotency-key": str(next(numbers))}),
    )
    measure("get", lambda: ask("GET", path))
    measure("verb", lambda: ask("POST", f"{path}/{('pause', 'resume')[next(numbers) % 2]}"))


async def transactions(folder: Path) -> None:
    """The transaction that accepts a create: handed over whole, and statement by statement through an asynchronous driver."""
    database = await Database.open(str(folder / "a.db"))
    await database.write(keys.ensure_project, "default")
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder / 'a.db'}")

    @event.listens_for(engine.sync_engine, "connect")
    def plain(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    async def whole() -> None:
        await database.write(transitions.accept_create, NEW, None)

    async def by_statement() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(transitions.accept_create, NEW, None)

    async def measure(metric: str, one: Callable[[], Awaitable[None]]) -> None:
        times = []
        for _ in range(RUNS):
            began = time.perf_counter()
            await one()
            times.append(time.perf_counter() - began)
        report(metric, times)

    await measure("transaction_whole", whole)
    await measure("transaction_by_statement", by_statement)
    began = time.perf_counter()
    await asyncio.gather(*(whole() for _ in range(RUNS * 10)))
    report("transaction_shared_commit", [(time.perf_counter() - began) / (RUNS * 10)])
    await engine.dispose()
    await database.close()


async def main() -> None:
    """Everything."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        await transactions(folder)
        node = NodeDouble(folder / "node.sock")
        await node.start()
        process = ControlProcess(folder / "control", node.path)
        try:
            service = await process.start()
            await service.ready()
            await asyncio.to_thread(requests, service)
            await service.http.aclose()
        finally:
            process.kill()
            await node.die()


if __name__ == "__main__":
    asyncio.run(main())
