"""Guests that attack: from within as a user, who must not keep the sandbox from answering, and as root, who must not get out of its bounds.

The seconds that answers take are printed by `hatchway bench hostile`; here they only have to come.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.conftest import Service

from hatchway.bench.attacks import ATTACKS, Attack, begin, wait_for
from hatchway.bench.hostile import SHAPE, answers
from hatchway.client import Hatchway, Sandbox
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.wire.launcher import VmUsage

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="looks at control groups and other users' files"),
]

MIB = 1 << 20


@pytest.fixture(scope="module")
def hatchway(service: Service) -> Iterator[Hatchway]:
    with service.client() as client:
        yield client


@pytest.fixture
def quiet(hatchway: Hatchway) -> Iterator[Sandbox]:
    with hatchway.sandboxes.create(**SHAPE) as sandbox:
        yield sandbox


def usage(service: Service, sandbox: Sandbox) -> VmUsage:
    """What the host's control groups count for a sandbox."""

    async def ask() -> VmUsage:
        launcher = LauncherClient(service.data_dir / "run" / "launcher.sock")
        try:
            return await launcher.inspect_vm(sandbox.id)
        finally:
            await launcher.close()

    return asyncio.run(ask())


def on_disk(folder: Path) -> int:
    """Octets that the files below a folder take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if not attack.of_root], ids=lambda attack: attack.name)
def test_a_users_attack_leaves_exec_signals_and_delete_possible(hatchway: Hatchway, attack: Attack) -> None:
    took = answers(hatchway, attack)
    print(json.dumps({attack.name: {name: round(seconds, 2) for name, seconds in took.items()}}))
    assert took.keys() == {"exec", "signal", "delete"}


def test_the_administrator_of_a_guest_stays_within_its_bounds(
    service: Service, hatchway: Hatchway, quiet: Sandbox
) -> None:
    """All at once, as root: processes, memory, disk, output, console. Its neighbour works, its deletion does too."""
    sandbox = hatchway.sandboxes.create(**SHAPE)
    folder = service.data_dir / "node" / "sandboxes" / sandbox.id
    kept = service.data_dir / "node" / "sessions" / sandbox.id
    try:
        limit = usage(service, sandbox).memory_limit_bytes
        assert 256 * MIB < limit < 512 * MIB
        attacks = {attack.name: attack for attack in ATTACKS}
        begin(sandbox, attacks["full_disk"], "root")
        begin(sandbox, attacks["output_flood"], "root")
        wait_for("a flood of output", lambda: on_disk(kept) > 32 * MIB)
        for name in (
            "console_flood",
            "memory_hog",
            "fork_bomb",
        ):  # beside each other they take long to have their full effect
            sandbox.start(attacks[name].argv, user="root", stdin=False).close()
        raw = sandbox.start(
            ["/bin/sh", "-c", "for d in /dev/vd*; do dd if=/dev/zero of=$d bs=1M count=64; done"], user="root"
        )
        raw.close()
        used = usage(service, sandbox)
        assert used.memory_bytes <= used.memory_peak_bytes <= limit
        assert used.processes < 100
        assert used.oom_kills == 0
        assert on_disk(folder) < (512 + 64) * MIB
        assert on_disk(kept) < (256 + 16) * MIB
        assert quiet.run(["echo", "undisturbed"]).check().stdout == "undisturbed\n"
    finally:
        sandbox.delete()
    wait_for("the end of its files", lambda: not folder.exists() and not kept.exists())


def test_what_one_guest_writes_to_its_base_image_no_other_sees(hatchway: Hatchway, quiet: Sandbox) -> None:
    before = quiet.run("md5sum /usr/bin/env").check().stdout
    with hatchway.sandboxes.create(**SHAPE) as sandbox:
        script = "for d in /dev/vd*; do blockdev --setrw $d; mount -o remount,rw $d; dd if=/dev/zero of=$d bs=1M count=8; done; true"
        sandbox.run(script, user="root")
    with hatchway.sandboxes.create(**SHAPE) as sandbox:
        assert sandbox.run("md5sum /usr/bin/env").check().stdout == before


def test_a_monitor_that_exceeds_its_memory_shows_as_out_of_memory(
    service: Service, hatchway: Hatchway, quiet: Sandbox
) -> None:
    """The bound of its control group is lowered below what it uses: what a leak in the monitor would come to."""
    sandbox = hatchway.sandboxes.create(**SHAPE)
    try:
        group = cgroup_of(service, sandbox)
        session = sandbox.start(["/bin/sh", "-c", "head -c 150M /dev/zero | tail"], stdin=False)
        session.close()
        lower(group)
        wait_for("the end of the monitor", lambda: sandbox.refresh().state == "failed")
        assert sandbox.info.cause == "out_of_memory"
        assert "memory" in (sandbox.info.reason or "")
        assert quiet.run(["true"]).exit_code == 0
        sandbox.start_vm()
        assert sandbox.run(["echo", "again"]).check().stdout == "again\n"
    finally:
        sandbox.delete()


def cgroup_of(service: Service, sandbox: Sandbox) -> Path:
    record: dict[str, Any] = json.loads((service.data_dir / "run" / "vm" / sandbox.id / "launch.json").read_text())
    info = (service.data_dir / "run").stat()
    name = f"{info.st_dev:x}-{info.st_ino:x}"
    for base in ("memory", "."):
        folder = Path("/sys/fs/cgroup") / base / "hatchway" / name / f"slot-{record['slot']}"
        if folder.is_dir():
            return folder
    pytest.skip("no control group of memory here")


def lower(group: Path) -> None:
    """Bounds a control group to 48 MiB, as soon as the kernel takes that."""
    v2 = group / "memory.max"
    if v2.exists():
        v2.write_text(str(48 * MIB))
        return

    def taken() -> bool:
        # Version 1 takes no bound below what is used: it goes down with what can be given back, and then holds.
        used = int((group / "memory.usage_in_bytes").read_text())
        try:
            (group / "memory.limit_in_bytes").write_text(str(max(48 * MIB, used)))
        except OSError:
            return False
        return True

    wait_for("a lower bound", taken)
