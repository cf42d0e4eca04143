"""Version 2 cgroups where processes are in the way: a delegated cgroup, as a user's service manager or a container gives it."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatchway.launcher import cgroups


@pytest.fixture
def delegated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cgroup of this test, with one controller to hand down."""
    assert os.geteuid() == 0, "these tests need root"
    mounts = [
        line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line
    ]
    assert mounts, "no cgroup2 is mounted"
    top = Path(mounts[0])
    # One for which a cgroup may not have both processes and children that use it.
    controller = next(
        name for name in ("memory", "io", "hugetlb") if name in (top / "cgroup.controllers").read_text().split()
    )
    had = controller in (top / "cgroup.subtree_control").read_text().split()
    (top / "cgroup.subtree_control").write_text(f"+{controller}")
    monkeypatch.setattr(cgroups, "_V2", (controller,))
    base = top / f"hatchway-test-{os.getpid()}"
    base.mkdir()
    try:
        yield base
    finally:
        for folder in sorted((path for path in base.rglob("*") if path.is_dir()), reverse=True):
            folder.rmdir()
        base.rmdir()
        if not had:
            (top / "cgroup.subtree_control").write_text(f"-{controller}")


def test_processes_make_room_and_slots_are_killed_as_a_whole(delegated: Path) -> None:
    service = subprocess.Popen(["sleep", "600"])
    vm = subprocess.Popen(
        ["sh", "-c", "read go; sleep 600 & sleep 600 & echo up; wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        (delegated / "cgroup.procs").write_text(str(service.pid))
        made = cgroups.Cgroups("instance", [("v2", {"": str(delegated)})])
        assert (made.version, made.warning) == ("v2", "")
        assert (delegated / "hatchway-services" / "cgroup.procs").read_text().split() == [str(service.pid)]
        slot = made.slot(3)
        slot.make()
        (fd,) = slot.open_procs()
        os.write(fd, str(vm.pid).encode())
        os.close(fd)
        assert vm.stdin is not None
        assert vm.stdout is not None
        vm.stdin.write(b"\n")
        vm.stdin.close()
        assert vm.stdout.readline() == b"up\n"
        assert made.leftovers() == {3}
        assert not slot.remove()
        slot.kill()
        assert vm.wait(10) == -9
        assert vm.stdout.read() == b""  # at its end: nobody else holds it any more either
        deadline = time.monotonic() + 30
        while not slot.remove():  # until init has reaped those that lost their parent
            assert time.monotonic() < deadline
            time.sleep(0.01)
        made.close()
        assert not (delegated / "hatchway").exists()
    finally:
        for process in (service, vm):
            process.kill()
            process.wait()
