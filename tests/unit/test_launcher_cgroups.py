import os
from pathlib import Path

import pytest

from hatchway.launcher import cgroups
from hatchway.launcher.cgroups import Cgroups, Limits, SlotCgroup


def test_limits_on_version_1_and_2() -> None:
    limits = Limits(2, 300)
    assert limits.files("v2") == [
        ("", "memory.max", str(300 << 20)),
        ("", "memory.swap.max", str(300 << 20)),
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


def test_every_bound_but_that_of_swap_must_be_there(tmp_path: Path) -> None:
    slot = SlotCgroup("v2", {"": str(tmp_path)})
    for name in ("memory.max", "pids.max", "cpu.weight", "cpu.max"):
        with pytest.raises(FileNotFoundError):
            slot.limit(Limits(1, 64))
        (tmp_path / name).touch()
    slot.limit(Limits(1, 64))
    (tmp_path / "memory.swap.max").touch()
    slot.limit(Limits(1, 64))
    assert (tmp_path / "memory.swap.max").read_text() == str(64 << 20)


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
