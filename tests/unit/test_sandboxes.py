"""The node's sandboxes: verbs that meet each other, deaths and restarts, on played machines."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_parts import Node

from hatchway.domain.errors import Gone, HatchwayError, Unavailable
from hatchway.domain.ids import new_id
from hatchway.node import record as records
from hatchway.node import sandboxes as sandboxes_module

WITHIN = 10.0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(sandboxes_module.capacity, "check", lambda *_: None)
    return Node(tmp_path, monkeypatch)


class Gate:
    """A hook that holds whoever comes until it is opened."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self.entered.set()
        await self.open.wait()


async def settle() -> None:
    """Lets everything run that can run."""
    for _ in range(50):
        await asyncio.sleep(0)


# -- verbs that meet each other


async def test_a_creation_that_waits_makes_nothing_once_its_sandbox_was_deleted(node: Node) -> None:
    gate = node.launcher.hooks["restore"] = Gate()
    busy = [asyncio.create_task(node.sandboxes.create(node.spec())) for _ in range(sandboxes_module.STARTS_AT_ONCE)]
    spec = node.spec()
    waiting = asyncio.create_task(node.sandboxes.create(spec))
    await gate.entered.wait()
    await settle()
    deleted = await node.sandboxes.get(spec.sandbox_id).delete()
    assert deleted.state == "deleted"
    gate.open.set()
    await asyncio.gather(*busy)
    with pytest.raises(Gone) as caught:
        await waiting
    assert caught.value.code == "sandbox_deleted"
    assert spec.sandbox_id not in node.launcher.machines
    assert not (node.root / spec.sandbox_id).exists()


async def test_two_who_make_a_failed_sandbox_anew_share_one(node: Node) -> None:
    spec = node.spec()

    async def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    node.launcher.hooks["restore"] = fail
    with pytest.raises(HatchwayError):
        await node.sandboxes.create(spec)
    del node.launcher.hooks["restore"]
    made = node.launcher.made
    both = await asyncio.gather(node.sandboxes.create(spec), node.sandboxes.create(spec))
    assert [one.state for one in both] == ["running", "running"]
    assert node.launcher.made == made + 1


async def test_a_creation_that_is_repeated_late_leaves_the_disk_alone(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    again = await node.sandboxes.create(spec)
    assert again.state == "stopped"
    assert node.launcher.made == 1


async def test_a_drain_waits_for_what_is_being_made_and_begins_nothing_more(node: Node) -> None:
    gate = node.launcher.hooks["restore"] = Gate()
    making = [
        asyncio.create_task(node.sandboxes.create(node.spec())) for _ in range(sandboxes_module.STARTS_AT_ONCE + 1)
    ]
    await gate.entered.wait()
    await settle()
    draining = asyncio.create_task(node.sandboxes.drain())
    await settle()
    gate.open.set()
    await draining
    results = await asyncio.gather(*making, return_exceptions=True)
    assert sum(isinstance(result, Unavailable) for result in results) == 1
    assert node.launcher.machines == {}


# -- restarts


async def test_after_a_reboot_of_the_host_sessions_hear_that_their_sandbox_is_gone(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    node.boot_id = "boot-2"
    node.launcher.machines.clear()
    await node.restart()
    assert node.sandboxes.get(spec.sandbox_id).observed().state == "stopped"
    assert [name for name, _ in node.sessions.lost] == [spec.sandbox_id]


async def test_a_record_that_cannot_be_read_keeps_no_other_sandbox_from_being_found(node: Node) -> None:
    damaged, kept = node.spec(), node.spec()
    await node.sandboxes.create(damaged)
    await node.sandboxes.create(kept)
    (node.root / damaged.sandbox_id / records.FILE).write_bytes(b'{"sandbox_id": "')
    await node.restart()
    assert node.sandboxes.get(kept.sandbox_id).observed().state == "running"
    seen = node.sandboxes.get(damaged.sandbox_id).observed()
    assert seen.state == "failed"
    assert "damaged" in seen.reason
    assert (await node.sandboxes.get(damaged.sandbox_id).delete()).state == "deleted"
    assert damaged.sandbox_id not in node.launcher.machines
    assert not (node.root / damaged.sandbox_id).exists()


async def test_a_folder_without_a_record_stays_while_its_machine_runs(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    (node.root / spec.sandbox_id / records.FILE).unlink()
    await node.restart()
    assert (node.root / spec.sandbox_id).is_dir()
    assert node.sandboxes.quarantined == (spec.sandbox_id,)


def test_a_record_that_the_disk_took_in_part_only_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Node.spec(None, new_id())  # type: ignore[arg-type]
    record = sandboxes_module.new_record(spec, "boot")
    records.write(tmp_path, record)
    before = (tmp_path / records.FILE).read_bytes()
    write, left = os.write, [10]

    def full(fd: int, data: Any) -> int:
        taken = min(len(data), left[0])
        if taken == 0:
            raise OSError(errno.ENOSPC, "full")
        left[0] -= taken
        return write(fd, data[:taken])

    monkeypatch.setattr(os, "write", full)
    record.state = "running"
    with pytest.raises(OSError, match="full"):
        records.write(tmp_path, record)
    assert (tmp_path / records.FILE).read_bytes() == before
    left[0] = 10**9
    records.write(tmp_path, record)
    assert b"running" in (tmp_path / records.FILE).read_bytes()
