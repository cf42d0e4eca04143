"""Two installations: what one node suspended the other goes on with, by a store that they share or by an archive that somebody carries over."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Service
from test_suspend import COUNTER
from tests.support.control_service import in_process

from hatchway.client import AsyncHatchway, Output
from hatchway.control import engine
from hatchway.control.main import ControlConfig, UnixNode

pytestmark = pytest.mark.vm
WITHIN_S = 120


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    """A folder that both nodes' users, who are others, can read and write."""
    with tempfile.TemporaryDirectory(prefix="hw-store-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[tuple[Service, Service]]:
    """Two installations on this machine, each with folders, a launcher and a node of its own."""
    made = [Service(tmp_path_factory.mktemp(name)) for name in ("one", "two")]
    try:
        for one in made:
            configure(one, store)
            up = one.up()
            assert up.returncode == 0, up.stderr.decode()
        yield made[0], made[1]
    finally:
        for one in made:
            one.run("down", "--data-dir", str(one.data_dir))


def configure(host: Service, store: Path, *trusted: str) -> None:
    """Takes effect when it is started."""
    archives = f'store = "file://{store}"\ntrusted_keys = {json.dumps(trusted)}'
    (host.data_dir / "hatchway.toml").write_text(f"bake = false\n[archives]\n{archives}\n")


def address(host: Service) -> UnixNode:
    """Its node's."""
    return UnixNode(path=host.data_dir / "run" / "node.sock", uid=(host.data_dir / "node").stat().st_uid)


def objects(store: Path, room: str = "pieces") -> list[Path]:
    return [path for path in (store / room).rglob("*") if path.is_file()]


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.05)
    assert condition(), what


def test_an_archive_goes_on_in_another_installation(
    hosts: tuple[Service, Service], store: Path, tmp_path: Path
) -> None:
    """With memory, processes and disk, where the key that signed it is trusted; not a moment before.

    Before the next test: that gives the nodes to another control plane.
    """
    one, two = hosts
    archive = tmp_path / "one.archive"
    with one.client() as here, here.sandboxes.create(memory_mib=256, metadata={"k": "v"}) as source:
        counter = source.start(["python3", "-c", COUNTER])
        for event in counter:
            if isinstance(event, Output) and b"3\n" in event.data:
                break
        source.run("echo memory > /dev/shm/m; echo disk > d; sync").check()
        machine_id = source.run("cat /etc/machine-id").stdout
        source.suspend()
        export = here.archives.export(source)
        archive.write_bytes(b"".join(here.archives.fetch(export)))
    refused = two.run("import", str(archive))
    assert refused.returncode == 1
    assert b"archive_untrusted" in refused.stderr
    assert two.sandboxes() == []
    down = two.run("down", "--data-dir", str(two.data_dir))
    assert down.returncode == 0, down.stderr
    configure(two, store, export.signed_by)
    up = two.up()
    assert up.returncode == 0, up.stderr
    made = two.run("import", str(archive), "--json")
    assert made.returncode == 0, made.stderr
    with two.client() as there, there.sandboxes.get(json.loads(made.stdout)["id"]) as twin:
        assert (twin.info.state, twin.info.metadata) == ("suspended", {"k": "v"})
        twin.restore()
        assert twin.run("cat /dev/shm/m d").stdout == "memory\ndisk\n"
        assert twin.run("cat /etc/machine-id").stdout != machine_id
        (again,) = [session for session in twin.sessions() if session.forked_from == counter.id]
        assert any(isinstance(event, Output) for event in there.sessions.get(again.id))
    assert two.sandboxes() == []


async def test_another_node_goes_on(
    hosts: tuple[Service, Service], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MOVE_AFTER_S", 0.5)
    one, two = hosts
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        config = ControlConfig(
            folder=Path(name) / "control",
            node_socket=address(one).path,
            node_uid=address(one).uid,
            more_nodes=(address(two),),
            reconcile_every_s=0.5,
        )
        async with in_process(config) as control, AsyncHatchway(control.url, control.key) as hatchway:
            await control.ready()
            async with asyncio.timeout(WITHIN_S):
                while (await control.http.get("/v1/templates")).status_code != 200:
                    await asyncio.sleep(0.1)
            await _go_on(hatchway, control, one, store)


async def _go_on(hatchway: AsyncHatchway, control: Any, one: Service, store: Path) -> None:
    async with await hatchway.sandboxes.create(memory_mib=256) as sandbox:
        first = (await control.get(sandbox.id))["node"]
        counter = await sandbox.start(["python3", "-c", COUNTER])
        async for event in counter:
            if isinstance(event, Output) and b"3\n" in event.data:
                break
        await sandbox.run("echo memory > /dev/shm/m; echo disk > d")
        await sandbox.suspend()
        assert objects(store)
        # Its node is gone, with all that it has.
        down = one.run("down", "--data-dir", str(one.data_dir), "--keep-sandboxes")
        assert down.returncode == 0, down.stderr
        await sandbox.wake()
        shown = await control.get(sandbox.id)
        assert (shown["state"], shown["generation"]) == ("running", 2)
        assert shown["node"] != first
        assert (await sandbox.run("cat /dev/shm/m d")).stdout == "memory\ndisk\n"
        rows = (await control.http.get(f"/v1/sandboxes/{sandbox.id}/sessions")).json()["sessions"]
        again = next(row for row in rows if row["forked_from"] == counter.id)
        assert again["state"] == "running"
        # And again, from what it wrote there.
        await sandbox.suspend()
        await sandbox.restore()
        assert (await sandbox.run("cat /dev/shm/m d")).stdout == "memory\ndisk\n"
        # Its first node is back, and lets go of what it kept.
        assert one.up().returncode == 0
        await until(lambda: not (one.data_dir / "node" / "sandboxes" / sandbox.id).exists(), "the old node let go")
    await until(lambda: not objects(store) and not objects(store, "refs"), "nothing is left in the store")
