"""Measures what the control plane adds to a node that takes no time, and what a transaction costs: one JSON line per figure.

Run it as `.venv/bin/python -m tests.support.control_overhead [requests|rates|pages]...`. The node double runs in this process, the control
plane in another. `rates` compares with a bare endpoint (`tests/support/bare_endpoint.py`), `pages` lists 100,000 sandboxes; both on either
database, PostgreSQL with its commits durable.
"""

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, event, insert
from sqlalchemy.ext.asyncio import create_async_engine
from tests.support.bare_endpoint import NEW
from tests.support.control_service import ControlProcess, Service
from tests.support.node_double import NodeDouble
from tests.support.postgres import PostgresServer

from hatchway.domain.ids import new_id
from hatchway.storage import accepting, keys, sandboxes
from hatchway.storage.database import Database
from hatchway.storage.tables import sandboxes as sandboxes_table

RUNS = 200


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
        await database.write(accepting.accept_create, NEW, None)

    async def by_statement() -> None:
        async with engine.begin() as connection:
            await connection.run_sync(accepting.accept_create, NEW, None)

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


PAGES_OF = 100_000
PAGE = 50
CLIENTS, CREATES = 8, 400


@contextlib.contextmanager
def server() -> Iterator[PostgresServer]:
    """A server whose commits are durable, as in production."""
    one = PostgresServer(durable=True)
    try:
        one.start()
        yield one
    finally:
        one.close()


def creates(url: str, path: str, headers: dict[str, str]) -> float:
    """Creates per second of `CLIENTS` clients, each on a connection of its own."""
    numbers = itertools.count()
    body = json.dumps({"template": "seed"})

    def client() -> None:
        connection = http.client.HTTPConnection(url)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while next(numbers) < CREATES:
            connection.request("POST", path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            octets = answer.read()
            assert answer.status == 200, octets
        connection.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for future in [pool.submit(client) for _ in range(CLIENTS)]:
            future.result()
    return CREATES / (time.perf_counter() - began)


async def rates(folder: Path, kind: str, bare_where: str, url: str | None) -> None:
    """Creates per second through the control plane and through the bare endpoint, in turns in the same run."""
    node = NodeDouble(folder / "node.sock")
    await node.start()
    process = ControlProcess(folder / "control", node.path, url)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    bare = subprocess.Popen(
        [sys.executable, "-m", "tests.support.bare_endpoint", bare_where, str(sock.fileno())],
        pass_fds=[sock.fileno()],
        stdout=subprocess.PIPE,
    )
    try:
        service = await process.start()
        await service.ready()
        assert bare.stdout is not None
        assert await asyncio.to_thread(bare.stdout.readline) == b"ready\n"
        headers = {"authorization": f"Bearer {service.key}", "prefer": "wait=30"}
        ours, floor = [], []
        for _ in range(4):
            floor.append(await asyncio.to_thread(creates, f"127.0.0.1:{sock.getsockname()[1]}", "/", {}))
            address = service.url.removeprefix("http://")
            ours.append(await asyncio.to_thread(creates, address, "/v1/sandboxes", headers))
        await service.http.aclose()
    finally:
        process.kill()
        bare.kill()
        bare.wait()
        sock.close()
        await node.die()
    value, base = statistics.median(ours[1:]), statistics.median(floor[1:])
    line = {
        "bench": "control",
        "metric": f"creates_per_s_{kind}",
        "value": round(value),
        "unit": "1/s",
        "floor": round(base),
    }
    print(json.dumps({**line, "ratio": round(value / base, 2), "runs": len(ours) - 1}), flush=True)


async def pages(kind: str, where: str) -> None:
    """The first, a middle and the last page of a list of 100,000 sandboxes."""
    database = await Database.open(where)
    await database.write(keys.ensure_project, "default")
    accepted = await database.write(accepting.accept_create, NEW, None)
    made = msgspec.structs.asdict(accepted.sandbox)

    def fill(connection: Connection, begin: int) -> None:
        rows = [
            {**made, "id": new_id(), "created_at": float(number), "operation_id": None}
            for number in range(begin, begin + 5_000)
        ]
        connection.execute(insert(sandboxes_table), rows)

    for begin in range(0, PAGES_OF, 5_000):
        await database.write(fill, begin)
    await database.write(lambda connection: connection.exec_driver_sql("ANALYZE"))  # as a server's autovacuum does it
    for metric, before in (
        ("first", None),
        ("middle", (PAGES_OF / 2.0, "")),
        ("last", (float(PAGE), "")),
    ):
        for states in ((), ("running", "pending")):
            times = []
            for _ in range(RUNS):
                began = time.perf_counter()
                rows = await database.read(
                    sandboxes.list_page, "default", sandboxes.Filter(states=states), behind=before, limit=PAGE
                )
                times.append(time.perf_counter() - began)
                assert len(rows) == PAGE
            report(f"page_{metric}{'_by_state' if states else ''}_{kind}", times)
    await database.close()


async def main(chosen: list[str]) -> None:
    """Everything, or what is named."""
    if not chosen or "requests" in chosen:
        await overhead()
    with server() as running:
        for name in ("rates", "pages"):
            for kind in ("sqlite", "postgresql"):
                if chosen and name not in chosen:
                    continue
                with tempfile.TemporaryDirectory(prefix="hw-") as folder:
                    url = running.url(running.make()) if kind == "postgresql" else None
                    other = running.url(running.make()) if url else str(Path(folder) / "bare.db")
                    if name == "rates":
                        await rates(Path(folder), kind, other, url)
                    else:
                        await pages(kind, other)


async def overhead() -> None:
    """What each request costs."""
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
    asyncio.run(main(sys.argv[1:]))
