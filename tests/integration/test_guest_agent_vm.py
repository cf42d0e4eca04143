"""The guest agent as PID 1 of a real virtual machine: what the host-mode tests cannot show."""

import asyncio
import errno
import os
import subprocess
import time
from pathlib import Path

import pytest
from guest_machine import DISK_MIB, WITHIN, Machine, Shell, machine, release, shell

from hatchway.node.guest.seam import ExitReason, GuestError
from hatchway.node.images.store import Release
from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Tag

pytestmark = pytest.mark.vm
__all__ = ["machine", "release", "shell"]

MACHINE_ID = "0123456789abcdef0123456789abcdef"


async def test_identity(shell: Shell) -> None:
    wanted = time.time() + 86_400
    await shell.link.setup(
        time_ns=int(wanted * 1e9),
        entropy=os.urandom(64),
        hostname="box-1",
        machine_id=MACHINE_ID,
        env={"COLOUR": "red"},
    )
    said = await shell.output("hostname; cat /etc/hostname /etc/machine-id; date +%s; echo $COLOUR; getent hosts box-1")
    hostname, file_hostname, machine_id, clock, colour, hosts = said.splitlines()
    assert (hostname, file_hostname, machine_id, colour) == ("box-1", "box-1", MACHINE_ID, "red")
    assert wanted - 1 <= int(clock) <= wanted + WITHIN
    assert hosts.split()[1] == "box-1"
    await shell.link.setup(time_ns=time.time_ns(), hostname="box-2", env={})
    assert await shell.output("hostname; grep -c box- /etc/hosts; echo ${COLOUR-none}") == "box-2\n1\nnone\n"


async def test_users(shell: Shell) -> None:
    assert await shell.output("id -u; echo $HOME; pwd") == "0\n/root\n/root\n"
    said = await shell.output("id -un; id -gn; echo $HOME $USER $LOGNAME $SHELL; pwd; sudo -n id -u", user="user")
    assert said == "user\nuser\n/home/user user user /bin/bash\n/home/user\n0\n"
    assert await shell.output("id -u; echo $HOME", user="1000") == "1000\n/home/user\n"
    await shell.output("groupadd -f extra && usermod -aG extra user")
    assert "extra" in await shell.output("id -Gn", user="user")
    end, _ = await shell.run("true", user="bob")
    assert (end.reason, end.message) == (ExitReason.SPAWN_FAILED, "no such user: bob")
    end, _ = await shell.run("true", user="user", cwd="/root")
    assert (end.reason, end.message) == (ExitReason.SPAWN_FAILED, "cwd /root: Permission denied")


async def test_root_of_the_processes(shell: Shell) -> None:
    """User namespaces work inside, the agent's disks and port are not to be seen, and the usual places are there."""
    assert (
        await shell.output("unshare -Urm sh -c 'id -u; mount -t tmpfs none /mnt && echo mounted'", user="user")
        == "0\nmounted\n"
    )
    said = await shell.output("ls /dev; ls -d /hw /modules 2>&1; cut -d' ' -f5 /proc/self/mountinfo")
    assert "vd" not in said
    assert "vport" not in said
    assert said.count("No such file") == 2
    for place in ("/dev/pts", "/dev/shm", "/proc", "/run", "/sys", "/sys/fs/cgroup"):
        assert place in said.splitlines()
    assert await shell.output(
        "stat -c %a /tmp /dev/shm; echo x | tee /dev/stderr >/dev/null 2>&1; cat /etc/resolv.conf", user="user"
    ) == ("1777\n1777\nnameserver 10.200.0.1\n")


async def test_terminal_of_a_user(shell: Shell) -> None:
    said = await shell.output(
        "tty; stat -c '%U %G' $(tty); stty size; echo >/dev/tty; : >$(tty)", user="user", pty=(31, 99)
    )
    assert said.replace("\r", "") == "/dev/pts/0\nuser tty\n31 99\n\n"


async def test_kill_reaches_what_left_the_session(shell: Shell) -> None:
    number, sink = await shell.start("setsid sh -c 'setsid sleep 4242 & sleep 4242' & echo up; wait")
    await sink.until(lambda: b"up" in sink.out)
    assert await shell.output("until [ $(pgrep -cf 'sleep 424[2]') -ge 2 ]; do :; done; echo seen") == "seen\n"
    await shell.link.signal(number, 9)
    end = await sink.end()
    assert (end.reason, end.exit_signal) == (ExitReason.SIGNALED, 9)
    assert await shell.output("pgrep -cf 'sleep 424[2]' || true") == "0\n"
    await shell.link.close_process(number)
    end, _ = await shell.run("setsid sleep 4242 & sleep 4242", timeout_ms=500)
    assert end.reason is ExitReason.TIMEOUT
    assert await shell.output("pgrep -cf 'sleep 424[2]' || true") == "0\n"


async def test_what_outlives_its_leader_is_left_alone_where_that_is_asked(shell: Shell) -> None:
    number, sink = await shell.start("setsid sleep 4243 >/dev/null 2>&1 </dev/null &")
    await sink.end()
    with pytest.raises(GuestError) as refused:
        await shell.link.close_process(number, if_over=True)
    assert refused.value.errno == errno.EBUSY
    assert (
        await shell.output("pkill -xf 'sleep 4243' && while pgrep -xf 'sleep 4243'; do :; done; echo over") == "over\n"
    )
    await shell.link.close_process(number, if_over=True)


async def test_no_orphan_stays_a_zombie(shell: Shell) -> None:
    await shell.output("for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'exit 1' &); done")
    assert await shell.output("until ! grep -ls '^State:.Z' /proc/[0-9]*/status; do :; done; echo none") == "none\n"


async def test_memory_hog_is_named_and_the_agent_lives(shell: Shell) -> None:
    end, said = await shell.run("exec python3 -c 'x = [bytearray(1 << 20) for _ in range(4096)]'")
    assert (end.reason, end.exit_signal) == (ExitReason.OOM, 9), said
    assert await shell.output("echo well") == "well\n"
    end, _ = await shell.run("kill -9 $$")
    assert end.reason is ExitReason.SIGNALED
    # What the memory killer took from one session is no reason for the end of another.
    assert "137\n" in await shell.output("python3 -c 'x = [bytearray(1 << 20) for _ in range(4096)]'; echo $?")
    number, sink = await shell.start("exec sleep 1000")
    await shell.link.signal(number, 9)
    assert (await sink.end()).reason is ExitReason.SIGNALED
    await shell.link.close_process(number)


async def test_a_cgroup_that_a_container_manager_left_fails_no_later_start(shell: Shell) -> None:
    own = await shell.output(
        """
        mkdir /run/cg2 && mount -t cgroup2 none /run/cg2
        own=/run/cg2$(sed -n 's/^0:://p' /proc/self/cgroup)
        mkdir $own/inner && echo $$ > $own/inner/cgroup.procs
        echo +memory > $own/cgroup.subtree_control
        echo $own
        """
    )
    assert await shell.output(f"cat {own.strip()}/cgroup.subtree_control") == "memory\n"
    for _ in range(3):
        assert await shell.output("echo well") == "well\n"
    await shell.output(
        f"""
        rmdir {own.strip()}/inner && echo -memory > {own.strip()}/cgroup.subtree_control && umount /run/cg2
        """
    )


async def test_no_signal_of_root_ends_the_agent(shell: Shell) -> None:
    await shell.link.setup(time_ns=time.time_ns(), hostname="box-4", machine_id=MACHINE_ID)
    # All but INT and TERM, which ask for the machine's end, and what its own loop is told by.
    said = await shell.output("for n in $(seq 1 64); do [ $n = 2 ] || [ $n = 15 ] || kill -$n 1; done; echo sent 2>&1")
    assert "sent\n" in said
    assert await shell.output("echo well") == "well\n"
    await shell.output(": > /etc/hostname")  # the agent has this file mapped
    await shell.link.setup(time_ns=time.time_ns(), hostname="box-5", machine_id=MACHINE_ID)
    assert await shell.output("cat /etc/hostname") == "box-5\n"


async def test_fork_bomb_is_bounded_and_goes_away(shell: Shell) -> None:
    # With as many as the machine has it would take long to get there under emulation.
    usual = (await shell.output("cat /sys/fs/cgroup/hw/pids.max")).strip()
    assert int(usual) > 500
    await shell.output("mkdir /run/cg && mount -t cgroup2 none /run/cg && echo 100 > /run/cg/hw/pids.max")
    number, sink = await shell.start("while :; do sleep 4343 & done")
    bomb, bomb_sink = await shell.start("exec python3 -c 'import os\nwhile 1:\n try: os.fork()\n except OSError: pass'")
    try:
        await sink.until(lambda: b"fork" in sink.err)
        assert await asyncio.wait_for(shell.link.ping(), WITHIN) > 0
        async with asyncio.timeout(WITHIN):
            while (end := (await shell.run("true"))[0]).reason is not ExitReason.SPAWN_FAILED:
                pass
        assert end.message == "the sandbox has as many processes as it may have"
    finally:
        await shell.link.close_process(number)
        await shell.link.close_process(bomb)
    assert bomb_sink.lost is None
    async with asyncio.timeout(WITHIN):
        while (await shell.run("true"))[0].reason is ExitReason.SPAWN_FAILED:
            pass
    assert await shell.output("until ! pgrep -f 'sleep 434[3]' >/dev/null; do :; done; echo gone") == "gone\n"
    await shell.output(f"echo {usual} > /run/cg/hw/pids.max; umount /run/cg; rmdir /run/cg")


async def test_frozen_disk_thaws_by_itself(shell: Shell) -> None:
    await shell.link.sync()
    await shell.request(FrameType.FREEZE, (Tag.TIMEOUT_MS, 1500))
    began = time.monotonic()
    await shell.link.setup(time_ns=time.time_ns(), hostname="box-3", machine_id=MACHINE_ID)  # not on the disk
    await shell.output("echo written > /root/frozen; sync /root/frozen; cat /root/frozen")
    assert time.monotonic() - began > 1.0
    await shell.request(FrameType.FREEZE, (Tag.TIMEOUT_MS, 60_000))
    await shell.request(FrameType.THAW)
    assert await shell.output("echo again > /root/frozen; cat /root/frozen") == "again\n"


async def test_disk_grows_to_its_device(shell: Shell) -> None:
    size = await shell.link.resize_disk(DISK_MIB)
    assert (DISK_MIB * 9 // 10) << 20 < size <= DISK_MIB << 20
    assert await shell.link.resize_disk(DISK_MIB) == size
    with pytest.raises(GuestError, match="timed out") as refused:  # never grown to less than what was said
        await shell.link.resize_disk(DISK_MIB + 1)
    assert refused.value.errno == errno.ETIMEDOUT
    metrics = await shell.request(FrameType.METRICS)
    assert metrics.number(Tag.DISK_TOTAL) == size
    assert 0 < metrics.number(Tag.MEM_AVAILABLE_KIB) < metrics.number(Tag.MEM_TOTAL_KIB) < 256 << 10


async def test_agent_sleeps_while_no_host_is_connected(machine: Machine) -> None:
    """An unconnected port reports a hang-up for as long as it lasts: an agent that takes it for news eats a core."""
    script = "grep '^voluntary' /proc/1/status; cat /proc/1/stat | cut -d' ' -f14,15; cut -d' ' -f1 /proc/uptime"
    async with machine.link() as shell:
        before = (await shell.output(script)).split()
    await asyncio.sleep(1.5)  # the time itself is what is measured
    async with machine.link() as shell:
        after = (await shell.output(script)).split()
    assert float(after[-1]) - float(before[-1]) > 1.0
    assert int(after[1]) - int(before[1]) < 100
    ticks = sum(map(int, after[2:4])) - sum(map(int, before[2:4]))
    assert ticks < 50  # of the 150 and more that passed


async def test_flood_is_whole_and_does_not_hold_up_the_others(shell: Shell) -> None:
    number, sink = await shell.start("yes | head -c 5000000; echo end")
    await sink.until(lambda: len(sink.out) > 100_000)
    assert await shell.output("echo quick") == "quick\n"
    await sink.end()
    assert not sink.gaps
    assert sink.out == b"y\n" * 2_500_000 + b"end\n"
    await shell.link.close_process(number)


async def test_a_process_that_starts_beside_a_flood_is_scheduled_as_any_other(shell: Shell) -> None:
    """The agent is patient while much flows, and of high priority: neither is for those that it starts."""
    flood = asyncio.create_task(shell.run("head -c 60000000 /dev/zero; echo over"))
    scheduled = set()
    while not flood.done():
        scheduled.add(await shell.output("cut -d' ' -f19,41 /proc/self/stat"))
    _, out = await flood
    assert len(out) == 60_000_005
    assert scheduled == {"0 0\n"}  # nice, and SCHED_OTHER


async def test_power_off_keeps_the_disk(release: Release, tmp_path: Path) -> None:
    machine = Machine(release, tmp_path)
    machine.make_disk()
    try:
        machine.start()
        async with machine.link() as shell:
            await shell.link.setup(machine_id=MACHINE_ID, hostname="kept")
            await shell.output("echo kept > /root/file; mkdir /root/folder; mv /usr/share/doc /root/folder/doc")
            await shell.start("trap '' TERM; sleep 4444")
            await shell.link.shutdown()
        machine.wait_off()
        said = subprocess.run(["dumpe2fs", "-h", machine.upper], capture_output=True, text=True, check=True, timeout=60)
        assert "needs_recovery" not in said.stdout
        machine.start()
        async with machine.link() as shell:
            assert await shell.output("cat /root/file /etc/machine-id; hostname; ls -d /root/folder/doc") == (
                f"kept\n{MACHINE_ID}\nkept\n/root/folder/doc\n"
            )
            await shell.request(FrameType.SHUTDOWN, (Tag.FLAGS, 1))
        machine.wait_off()
    finally:
        machine.kill()


async def test_failed_start_up_says_why_and_ends(release: Release, tmp_path: Path) -> None:
    machine = Machine(release, tmp_path)
    machine.upper.write_bytes(bytes(1 << 20))  # no file system
    try:
        machine.start()
        machine.wait_off()
        assert "hatchway-agent: fatal: no disk with an ext4 file system (upper)" in machine.console.read_text(
            errors="replace"
        )
    finally:
        machine.kill()
