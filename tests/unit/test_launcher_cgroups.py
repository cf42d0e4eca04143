import os
from pathlib import Path

import pytest

from hatchway.launcher import cgroups, devices
from hatchway.launcher.cgroups import Cgroups, Limits, SlotCgroup


def test_limits_on_version_1_and_2() -> None:
    limits = Limits(2, 300)
    assert limits.files("v2") == [
        ("", "memory.max", str(300 << 20)),
        ("", "pids.max", "96"),
        ("", "cpu.weight", "200"),
        ("", "cpu.max", "250000 100000"),
    ]
    assert {name: value for _, name, value in limits.files("v1")} == {
        "memory.limit_in_bytes": str(300 << 20),
        "pids.max": "96",
        "cpu.shares": "2048",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "250000",
    }


def test_bounds_that_not_every_kernel_has() -> None:
    limits = Limits(2, 300, io_bps=1000, io_iops=50, disks=("8:0", "259:0"))
    assert limits.optional_files("v2") == [
        ("", "memory.swap.max", str(300 << 20)),
        ("", "io.weight", "default 200"),
        ("", "io.max", "8:0 rbps=1000 wbps=1000 riops=50 wiops=50"),
        ("", "io.max", "259:0 rbps=1000 wbps=1000 riops=50 wiops=50"),
    ]
    assert Limits(1, 1, io_iops=5, disks=("8:0",)).optional_files("v2")[-1] == ("", "io.max", "8:0 riops=5 wiops=5")
    assert Limits(1, 1, disks=("8:0",)).optional_files("v1") == [("blkio", "blkio.bfq.weight", "100")]
    assert limits.optional_files("v1")[1:5] == [
        ("blkio", "blkio.throttle.read_bps_device", "8:0 1000"),
        ("blkio", "blkio.throttle.write_bps_device", "8:0 1000"),
        ("blkio", "blkio.throttle.read_iops_device", "8:0 50"),
        ("blkio", "blkio.throttle.write_iops_device", "8:0 50"),
    ]


def test_says_why_there_are_none(tmp_path: Path) -> None:
    assert "none is mounted" in Cgroups("x", []).warning
    none = Cgroups("x", [("v1", {"memory": str(tmp_path / "absent")})])
    assert none.version == "none"
    assert "absent" in none.warning
    slot = none.slot(3)
    slot.make()
    slot.limit(Limits(1, 64))
    assert slot.open_procs() == []
    assert slot.remove()


def test_takes_the_first_that_can_be_used(tmp_path: Path) -> None:
    # Files stand in for the kernel's: a folder here has none of its own, so that version 2 is refused.
    good = tmp_path / "good"
    (good / "hatchway" / "x").mkdir(parents=True)
    (good / "hatchway" / "x" / "cgroup.procs").write_bytes(b"")
    found = Cgroups("x", [("v2", {"": str(tmp_path / "absent")}), ("v1", {"pids": str(good)})])
    assert (found.version, found.warning) == ("v1", "")
    found.slot(5).make()
    found.slot(7).make()
    assert found.leftovers() == {5, 7}
    assert found.slot(5).remove()
    assert found.slot(7).remove()
    (good / "hatchway" / "x" / "cgroup.procs").unlink()
    found.close()
    assert os.listdir(good) == []


def test_every_bound_that_every_kernel_has_must_be_there(tmp_path: Path) -> None:
    slot = SlotCgroup("v2", {"": str(tmp_path)})
    for name in ("memory.max", "pids.max", "cpu.weight", "cpu.max"):
        with pytest.raises(FileNotFoundError):
            slot.limit(Limits(1, 64))
        (tmp_path / name).touch()
    slot.limit(Limits(1, 64))
    (tmp_path / "memory.swap.max").touch()
    slot.limit(Limits(1, 64))
    assert (tmp_path / "memory.swap.max").read_text() == str(64 << 20)


def test_what_a_version_2_tree_counts_and_takes(tmp_path: Path) -> None:
    """Plain files stand in for the kernel's: the machines that run the tests may have no version 2."""
    base = tmp_path / "hatchway" / "x"
    base.mkdir(parents=True)
    for folder in (tmp_path, base.parent, base):
        for name in ("cgroup.procs", "memory.max"):
            (folder / name).touch()
        (folder / "cgroup.subtree_control").write_text("memory pids cpu io")
    found = Cgroups("x", [("v2", {"": str(tmp_path)})], memory_mib=77)
    assert (found.version, found.io) == ("v2", True)
    assert (base / "memory.max").read_text() == str(77 << 20)
    slot = found.slot(1)
    slot.make()
    folder = base / "slot-1"
    for name in ("memory.max", "pids.max", "cpu.weight", "cpu.max", "io.max"):
        (folder / name).touch()
    slot.limit(Limits(1, 64, io_bps=5, disks=("8:0",)))
    assert (folder / "io.max").read_text() == "8:0 rbps=5 wbps=5"
    assert slot.usage() == cgroups.Usage(memory_limit=64 << 20)
    (folder / "memory.current").write_text("1234\n")
    (folder / "pids.current").write_text("3\n")
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\n")
    used = slot.usage()
    assert (used.memory, used.processes, used.oom_kills) == (1234, 3, 1)


def test_version_1_does_without_the_controller_of_input_and_output(tmp_path: Path) -> None:
    mounts = {name: str(tmp_path / name) for name in ("memory", "pids", "cpu", "blkio")}
    for name in ("memory", "pids", "cpu"):
        (tmp_path / name / "hatchway" / "x").mkdir(parents=True)
        (tmp_path / name / "hatchway" / "x" / "cgroup.procs").touch()
    (tmp_path / "memory" / "hatchway" / "x" / "memory.limit_in_bytes").touch()
    found = Cgroups("x", [("v1", mounts)], memory_mib=5)
    assert (found.version, found.io) == ("v1", False)
    assert (tmp_path / "memory" / "hatchway" / "x" / "memory.limit_in_bytes").read_text() == str(5 << 20)
    (tmp_path / "memory" / "hatchway" / "x" / "slot-0").mkdir()
    (tmp_path / "memory" / "hatchway" / "x" / "slot-0" / "memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    )
    assert found.slot(0).usage().oom_kills == 4


def test_a_file_leads_to_its_whole_disk(tmp_path: Path) -> None:
    block = tmp_path / "devices" / "sda"
    (block / "sda1").mkdir(parents=True)
    (block / "dev").write_text("8:0\n")
    (block / "sda1" / "partition").write_text("1\n")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "8:0").symlink_to(block)
    (tmp_path / "dev" / "block" / "8:1").symlink_to(block / "sda1")
    mounts = tmp_path / "mountinfo"
    mounts.write_text("21 1 0:33 / /data rw - btrfs /dev/null rw\n22 1 0:34 / /tmp rw - tmpfs tmpfs rw\n")
    for device, disk in (((8, 1), "8:0"), ((8, 0), "8:0"), ((9, 9), ""), ((0, 33), ""), ((0, 34), ""), ((0, 99), "")):
        assert devices.disk_of(os.makedev(*device), tmp_path, mounts) == disk


def test_kills_what_is_in_it_and_not_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _signal: killed.append(pid))
    (tmp_path / "cgroup.procs").write_text("0\n4194399\n0\n")
    SlotCgroup("v1", {"pids": str(tmp_path)}).kill()
    assert killed == [4194399]


def test_a_busy_one_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "slot").mkdir()
    (tmp_path / "slot" / "still").mkdir()
    slot = SlotCgroup("v1", {"pids": str(tmp_path / "slot")})
    assert not slot.remove()
    (tmp_path / "slot" / "still").rmdir()
    assert slot.remove()
    assert slot.remove()


def test_the_mount_table_of_this_host_is_understood() -> None:
    for version, mounts in cgroups.mounted():
        assert version in ("v1", "v2")
        assert all(os.path.exists(path + "/cgroup.procs") for path in mounts.values())
