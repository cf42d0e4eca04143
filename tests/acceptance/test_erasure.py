"""What is deleted is gone from the node's folder: no file of it, no name with its id, no octet of what it held."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Service
from test_archives_live import Archives
from test_snapshots import snapshot
from test_suspend import Verbs, verbs

pytestmark = pytest.mark.vm
__all__ = ["verbs"]
WITHIN_S = 60


def files(folder: Path) -> set[str]:
    """Every file below, without the node's copies of templates' file systems."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}
    return {str(path) for path in found if path.parts[0] != "disks"}


def holding(folder: Path, marker: bytes) -> list[str]:
    """The files below that have these octets, holes left out."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and has(path, marker)]


def has(path: Path, marker: bytes) -> bool:
    with path.open("rb") as file:
        size, at, tail = os.fstat(file.fileno()).st_size, 0, b""
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return False
            if start > at:
                at, tail = start, b""
            data = os.pread(file.fileno(), 4 << 20, at)
            if not data:
                return False
            if marker in tail + data:
                return True
            at, tail = at + len(data), data[-len(marker) :]
    return False


def until(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < ends:
        time.sleep(0.05)
    return condition()


def test_nothing_is_left(service: Service, verbs: Verbs) -> None:
    node, archives = service.data_dir / "node", Archives(verbs)
    with service.client() as hatchway:
        hatchway.sandboxes.create(memory_mib=256).delete()  # what all sandboxes share is made
        marker = os.urandom(12).hex().encode()
        assert until(lambda: not any((node / "sessions").iterdir()))
        before = files(node)
        ids: list[str] = []
        with hatchway.sandboxes.create(memory_mib=256, env={"SECRET": marker.decode()}) as source:
            ids.append(source.id)
            source.run("echo $SECRET | tee disk > /dev/shm/memory; cat disk disk; sync")
            full, disk = snapshot(verbs, source, "full"), snapshot(verbs, source, "disk")
            branches = source.fork(2)
            verbs.do(source, "suspend")
            suspended = node / "sandboxes" / source.id / "suspended"
            assert holding(suspended, marker), "the marker is in what is kept: the scan finds it"
            export = archives.export(source)
            made = archives.take_in(archives.fetch(export).content)
            taken = hatchway.sandboxes.get(made["id"])
            # The memory of a suspended one goes with its restore.
            verbs.do(source, "restore")
            assert until(lambda: not suspended.exists() and not suspended.with_name("suspended.old").exists())
            for one in (*branches, taken):
                ids.append(one.id)
                one.delete()
        for kept in (full["id"], disk["id"]):
            ids.append(kept)
            assert verbs.http.delete(f"/v1/snapshots/{kept}").status_code == 200
        ids.append(export)
        assert verbs.http.delete(f"/v1/exports/{export}").status_code == 204
        assert until(lambda: files(node) == before), sorted(files(node) ^ before)
        assert not [path for path in node.rglob("*") if any(one in str(path) for one in ids)]
        assert holding(node, marker) == []
        run = service.data_dir / "run"
        assert not [name for name in files(run) if any(one in name for one in ids)]


def test_what_branches_share_goes_with_the_last_of_them(service: Service, verbs: Verbs) -> None:
    node = service.data_dir / "node"
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256) as source:
        source.run("head -c 5000000 /dev/urandom > /dev/shm/m")
        first, second = source.fork(2)
        bases = [node / "sandboxes" / one.id / "memory-base" for one in (first, second)]
        shared = bases[0].stat()
        assert os.path.samestat(shared, bases[1].stat())
        assert shared.st_nlink == 2, "it is theirs alone"
        first.delete()
        assert until(lambda: bases[1].stat().st_nlink == 1)
        assert second.run("wc -c < /dev/shm/m").stdout.strip() == "5000000"
        second.delete()
        inode = shared.st_ino
        assert until(lambda: not any(path.stat().st_ino == inode for path in node.rglob("memory*") if path.exists()))
