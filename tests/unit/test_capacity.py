"""Admission: what this host can hold, with a host of the test's choosing."""

import asyncio
import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_parts import Node

from hatchway.domain.errors import HostExhausted, Unprocessable
from hatchway.domain.host_limits import HostLimits
from hatchway.domain.shapes import Shape
from hatchway.node import capacity
from hatchway.node.capacity import Capacity, Holding
from hatchway.node.vmm import qemu, qemu_args
from hatchway.node.vmm.seam import UPPER_NAMES

Usage = namedtuple("Usage", "total used free")
SMALL = Shape(memory_mib=256, disk_mib=512)


class Host:
    """A host: MiB of memory, of it available now, of disk, of it free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.available, self.disk, self.free = 8192, 8000, 100_000, 50_000
        self.private: dict[int, int] = {}
        monkeypatch.setattr(capacity, "total_memory_mib", lambda: self.total)
        monkeypatch.setattr(capacity, "available_memory_mib", lambda: self.available)
        monkeypatch.setattr(capacity, "private_memory_mib", lambda pid: self.private.get(pid, 0))
        monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: Usage(self.disk << 20, 0, self.free << 20))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def held(number: int, shape: Shape = SMALL, overhead_mib: int = 100, **changes: Any) -> Holding:
    return Holding(name=str(number), shape=shape, overhead_mib=overhead_mib, folder=Path("/nowhere"), **changes)


def admitted(room: Capacity, shape: Shape, most: int = 1000, *, overhead_mib: int = 100) -> int:
    """How many of a shape come in, one after another."""
    holdings: list[Holding] = []
    while len(holdings) < most:
        try:
            room.check_create(shape, overhead_mib, holdings)
        except HostExhausted:
            break
        holdings.append(held(len(holdings), shape, overhead_mib))
    return len(holdings)


def test_a_small_host_takes_what_fits_into_it_and_no_more(host: Host, tmp_path: Path) -> None:
    room = Capacity(HostLimits(), tmp_path)
    # 8192 - 512 for the host = 7680; 356 each, with the monitor.
    assert admitted(room, SMALL) == 21
    host.available = 8192
    assert admitted(Capacity(HostLimits(memory_reserve_mib=1024), tmp_path), SMALL) == (8192 - 1024) // 356
    # The monitor's share is never thinned out.
    assert admitted(Capacity(HostLimits(memory_overcommit=2.0), tmp_path), SMALL) == 7680 // (128 + 100)


def test_a_laptop_takes_as_many_as_the_documentation_says(host: Host, tmp_path: Path) -> None:
    host.available = host.total
    overhead = qemu.VMM_OVERHEAD_MIB + qemu_args.translation_cache_mib(SMALL) + SMALL.memory_mib // 64
    counts = [
        admitted(Capacity(HostLimits(memory_overcommit=factor), tmp_path, lambda: 280), SMALL, overhead_mib=overhead)
        for factor in (1.0, 2.0)
    ]
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert counts == [int(count) for count in re.findall(r"takes about (\d+)", text)]


def test_a_shape_that_never_fits_is_said_to_be_too_large(host: Host, tmp_path: Path) -> None:
    room = Capacity(HostLimits(), tmp_path)
    with pytest.raises(Unprocessable) as caught:
        room.check_create(Shape(memory_mib=8192), 100, [])
    assert caught.value.code == "memory_out_of_range"
    assert "7580" in caught.value.remedy
    room.check_create(Shape(memory_mib=7388), 100, [])
    with pytest.raises(Unprocessable, match="disk_out_of_range"):
        room.check_create(Shape(disk_mib=100_001), 100, [])
    with pytest.raises(Unprocessable, match="vcpus_out_of_range"):
        room.check_create(Shape(vcpus=capacity.max_vcpus() + 1), 100, [])


def test_the_refusal_has_the_numbers(host: Host, tmp_path: Path) -> None:
    with pytest.raises(HostExhausted) as caught:
        Capacity(HostLimits(), tmp_path).check_create(Shape(memory_mib=7000), 100, [held(1), held(2)])
    assert caught.value.code == "host_memory_full"
    assert caught.value.extra == {"needed_mib": 7100, "promised_mib": 712, "limit_mib": 7488}
    assert "7100 MiB" in caught.value.cause
    assert "712 of 7488 MiB" in caught.value.cause


def test_what_other_programs_use_is_not_promised(host: Host, tmp_path: Path) -> None:
    room = Capacity(HostLimits(), tmp_path)
    host.available = 1200
    with pytest.raises(HostExhausted):
        room.check_create(Shape(memory_mib=700), 100, [])
    # What sandboxes hold already is in their promise: it is not counted twice.
    host.private = {7: 3000}
    room.check_create(Shape(memory_mib=500), 100, [held(1, Shape(memory_mib=2900), pid=7)])
    with pytest.raises(HostExhausted):
        room.check_create(Shape(memory_mib=700), 100, [held(1, Shape(memory_mib=2900), pid=7)])


def test_what_bakes_want_of_the_page_cache_is_left_to_them(host: Host, tmp_path: Path) -> None:
    assert admitted(Capacity(HostLimits(), tmp_path, lambda: 356 * 4), SMALL) == 17


def test_those_that_have_no_memory_hold_up_nobody(host: Host, tmp_path: Path) -> None:
    stopped = [held(number, has_memory=False) for number in range(50)]
    Capacity(HostLimits(), tmp_path).check_create(SMALL, 100, stopped)


def test_disks_may_still_grow(host: Host, tmp_path: Path) -> None:
    host.free = 5000
    limits = HostLimits(disk_overcommit=4.0, kept_output_mib=512, disk_reserve_mib=1000)
    shape = Shape(memory_mib=128, disk_mib=3488)  # 4000 with its output: 1000 each
    assert admitted(Capacity(limits, tmp_path), shape) == 4
    room = Capacity(limits, tmp_path)
    with pytest.raises(HostExhausted) as caught:
        room.check_create(shape, 100, [held(number, shape, has_memory=False) for number in range(4)])
    assert caught.value.code == "host_disk_full"
    assert caught.value.extra == {"needed_mib": 1000, "promised_mib": 4000, "free_mib": 5000}
    # A start needs no new promise, but the reserve.
    room.check_start(shape, 100, [held(number, shape, has_memory=False) for number in range(4)])
    host.free = 999
    with pytest.raises(HostExhausted, match="host_disk_full"):
        room.check_start(shape, 100, [])


@pytest.mark.parametrize("name", UPPER_NAMES)
def test_what_a_disk_takes_already_is_not_promised_again(host: Host, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(os.urandom(3 << 20))
    assert capacity.disk_use_mib(tmp_path) == 3
    room = Capacity(HostLimits(disk_overcommit=1.0, kept_output_mib=64), tmp_path)
    one = Holding(name="1", shape=SMALL, overhead_mib=0, folder=tmp_path)
    assert room.use([one]).disk_promised == 512 + 64 - 3


# -- many at once


async def test_ten_at_once_do_not_pass_a_check_that_one_can(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, room=Capacity(HostLimits(), tmp_path))
    host.available = host.total = 512 + 128 + 100  # the machines here have no overhead
    results = await asyncio.gather(*(node.sandboxes.create(node.spec()) for _ in range(10)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, HostExhausted)]
    assert len(refused) == 9
    assert {error.code for error in refused} == {"host_memory_full"}
    assert len(node.launcher.machines) == 1


async def test_starts_at_once_do_not_pass_it_either_and_an_end_makes_room(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, room=Capacity(HostLimits(), tmp_path))
    specs = [node.spec() for _ in range(3)]
    for spec in specs:
        await node.sandboxes.create(spec)
        await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    host.available = host.total = 512 + 128 + 100
    boxes = [node.sandboxes.get(spec.sandbox_id) for spec in specs]
    results = await asyncio.gather(*(node.sandboxes.start(box) for box in boxes), return_exceptions=True)
    running = [box for box in boxes if box.record.state == "running"]
    assert len(running) == 1
    assert sum(isinstance(result, HostExhausted) for result in results) == 2
    await node.sandboxes.start(running[0])  # what runs is asked for nothing more
    await running[0].delete()
    other = next(box for box in boxes if box is not running[0])
    assert (await node.sandboxes.start(other)).state == "running"
