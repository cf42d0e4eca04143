"""What one session may take of a sandbox, in a real virtual machine: hostile sessions of `user` beside ones that must go on."""

import asyncio
import contextlib
import errno
import json
import time
from collections.abc import AsyncIterator
from typing import Final

import pytest
from guest_machine import WITHIN, Shell, machine, release, shell

from hatchway.node.guest.seam import ExitReason, GuestError, ProcessLimits
from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Tag

pytestmark = pytest.mark.vm
__all__ = ["machine", "release", "shell"]

HOG: Final = "x = [bytearray(1 << 20) for _ in range(4096)]"
ECHO: Final = """
import socket, sys, threading
def serve(listening):
    while True:
        peer = listening.accept()[0]
        threading.Thread(target=answer, args=(peer,), daemon=True).start()
def answer(peer):
    with peer:
        while got := peer.recv(65536):
            peer.sendall(got)
four = socket.create_server(("127.0.0.1", 7001), backlog=300)
six = socket.create_server(("::1", 7002), family=socket.AF_INET6, backlog=300)
threading.Thread(target=serve, args=(six,), daemon=True).start()
print("listening", flush=True)
serve(four)
"""


@contextlib.asynccontextmanager
async def running(shell: Shell, script: str, **options: object) -> AsyncIterator[int]:
    """A session of `user` that says `up` first; it is gone afterwards."""
    number, sink = await shell.start(script, user="user", **options)
    try:
        await sink.until(lambda: b"up\n" in sink.out)
        yield number
    finally:
        await asyncio.wait_for(shell.link.close_process(number), WITHIN)


async def goes_on(shell: Shell, what: str) -> None:
    """A new session of the same user, and file work, are possible; says how long they took."""
    began = time.monotonic()
    async with asyncio.timeout(WITHIN):
        assert await shell.output("echo well", user="user") == "well\n"
        session = time.monotonic() - began
        assert (await stat(shell, "/etc/passwd"))["type"] == "file"
    print(f"{what}: a session {session:.2f} s, a look at a file {time.monotonic() - began - session:.2f} s")


async def stat(shell: Shell, path: str) -> dict[str, object]:
    stream = await shell.link.open_builtin(["files", "stat", f"path={path}"], user="user")
    try:
        said = b""
        while got := await stream.read_error():
            said += got
        await stream.wait()
    finally:
        await stream.close()
    return dict(json.loads(said.splitlines()[-1])["ok"]["entry"])


async def until(shell: Shell, condition: str) -> None:
    await asyncio.wait_for(shell.output(f"until {condition}; do sleep 0.1; done"), WITHIN)


async def test_fork_bomb_leaves_the_others_their_places(shell: Shell) -> None:
    bound = int(await shell.output("cat /sys/fs/cgroup/hw/$(ls /sys/fs/cgroup/hw | grep -m1 '^[0-9]')/pids.max"))
    assert 100 < bound < int(await shell.output("cat /sys/fs/cgroup/hw/pids.max")) // 2
    # The leader ends; what it left forks and ends for ever, in the arms of the agent.
    bomb = "echo up; b() { b | b & }; b"
    async with running(shell, f"exec 2>/dev/null; {bomb}") as number, running(shell, f"exec 2>/dev/null; {bomb}"):
        await until(shell, f"cat /sys/fs/cgroup/hw/*/pids.current | awk '$1 > {bound // 3} {{n++}} END {{exit n < 2}}'")
        for _ in range(3):
            await goes_on(shell, "fork bombs")
        await asyncio.wait_for(shell.link.signal(number, 9), WITHIN)
    await until(shell, "[ $(cat /sys/fs/cgroup/hw/pids.current) -lt 20 ]")


async def test_memory_hogs_leave_room_for_the_others(shell: Shell) -> None:
    hogs = [await shell.start(f"exec python3 -c '{HOG}'", user="user") for _ in range(2)]
    many = "for i in 1 2 3 4 5 6 7 8; do python3 -c 'x = bytearray(100 << 20); input()' & done; wait"
    swarm, _ = await shell.start(many, user="user", merge_stderr=True)
    for _ in range(3):
        await goes_on(shell, "memory hogs")
    for number, sink in hogs:
        end = await sink.end()
        assert (end.reason, end.exit_signal) == (ExitReason.OOM, 9)
        await shell.link.close_process(number)
    await shell.link.close_process(swarm)


async def test_memory_that_outlives_its_processes_is_bounded(shell: Shell) -> None:
    fill = "dd if=/dev/zero of=$f bs=1M 2>&1 | grep -c 'No space'"
    try:
        assert await shell.output(f"f=/dev/shm/full; {fill}", user="user") == "1\n"
        assert await shell.output(f"f=/run/lock/full; {fill}", user="user") == "1\n"
        shared = "import ctypes; ctypes.CDLL(None).shmget(0, 60 << 20, 0o1600)"
        for _ in range(4):
            await shell.output(f"python3 -c '{shared}'", user="user")
        assert "1600" not in await shell.output("cat /proc/sysvipc/shm")
        await goes_on(shell, "full memory folders")
        await shell.output("python3 -c 'x = bytearray(20 << 20)'", user="user")
    finally:
        await shell.output("rm -f /dev/shm/full /run/lock/full")


async def test_hogs_of_one_session_take_no_more_than_one(shell: Shell) -> None:
    """On one processor: eight loops in one session get about what the one loop of another gets."""
    spin = "while :; do :; done"
    own = "cat /proc/self/cgroup | cut -d/ -f3"
    many = f"{own}; echo up; for i in 1 2 3 4 5 6 7 8; do ({spin}) & done; wait"
    first, said = await shell.start(many, user="user")
    second, said_too = await shell.start(f"{own}; echo up; {spin}", user="user")
    await said.until(lambda: b"up\n" in said.out)
    await said_too.until(lambda: b"up\n" in said_too.out)
    await goes_on(shell, "CPU hogs")
    names = [sink.out.split()[0].decode() for sink in (said, said_too)]
    files = " ".join(f"/sys/fs/cgroup/hw/{name}/cpu.stat" for name in names)

    async def used() -> list[int]:
        return [int(line.split()[1]) for line in (await shell.output(f"grep -h usage_usec {files}")).splitlines()]

    before = await used()
    async with asyncio.timeout(WITHIN):
        while sum(took := [now - then for now, then in zip(await used(), before, strict=True)]) < 3_000_000:
            await asyncio.sleep(0.2)
    for number in (first, second):
        await shell.link.close_process(number)
    assert min(took) > 0.3 * sum(took), took


async def test_open_files_of_a_user_leave_some_to_the_others(shell: Shell) -> None:
    holder = 'python3 -c \'import os, time\nfor _ in range(8000): os.open("/", 0)\nprint("up", flush=True)\ntime.sleep(1000)\''
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(running(shell, holder))
        await goes_on(shell, "32,000 open files")


async def test_limits_of_one_session_and_their_reasons(shell: Shell) -> None:
    end, said = await shell.run(f"exec python3 -c '{HOG}'", limits=ProcessLimits(memory_bytes=40 << 20))
    assert (end.reason, end.exit_signal) == (ExitReason.OOM, 9), said
    assert await shell.output("python3 -c 'x = bytearray(60 << 20); print(len(x))'") == f"{60 << 20}\n"

    end, said = await shell.run(
        "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 >/dev/null 2>&1 & done; echo all", limits=ProcessLimits(pids=6)
    )
    assert (end.reason, end.exit_code) == (ExitReason.EXITED, 2)
    assert "fork" in said
    assert await shell.output("for i in 1 2 3 4 5 6 7 8 9; do sleep 0 & done; wait; echo all") == "all\n"

    loop = "(while :; do :; done) & while :; do :; done"
    end, _ = await shell.run(loop, limits=ProcessLimits(cpu_ms=600))
    assert (end.reason, end.exit_signal, end.message) == (ExitReason.TIMEOUT, 9, "cpu time")
    end, _ = await shell.run("sleep 1; exit 5", limits=ProcessLimits(cpu_ms=900))
    assert (end.reason, end.exit_code) == (ExitReason.EXITED, 5)
    end, _ = await shell.run("sleep 1000", limits=ProcessLimits(cpu_ms=900), timeout_ms=500)
    assert (end.reason, end.message) == (ExitReason.TIMEOUT, "")

    end, said = await shell.run("ulimit -n; ulimit -f", limits=ProcessLimits(nofile=33, fsize_bytes=1 << 20))
    assert said == "33\n2048\n"
    end, _ = await shell.run(
        "exec head -c 2000000 /dev/zero > /tmp/large", limits=ProcessLimits(fsize_bytes=1 << 20), user="user"
    )
    assert (end.reason, end.exit_signal) == (ExitReason.SIGNALED, 25)
    assert await shell.output("stat -c %s /tmp/large; rm /tmp/large") == f"{1 << 20}\n"


async def test_users_cannot_reach_into_what_works_for_them_outside_their_bounds(shell: Shell) -> None:
    stream = await shell.link.open_builtin(["files", "watch", "path=/tmp"], user="user")
    try:
        pid = (await shell.output("until pgrep -x files; do sleep 0.1; done", user="user")).strip()
        group = await shell.output(f"cat /proc/{pid}/cgroup")
        assert group == "0::/builtin\n"
        for part in ("mem", "maps", "exe"):
            end, said = await shell.run(f"head -c 1 /proc/{pid}/{part}", user="user")
            assert end.exit_code, said
            assert "denied" in said
    finally:
        await stream.close()
    await until(shell, "! pgrep -x files")


async def test_connections_to_ports_inside(shell: Shell) -> None:
    number, sink = await shell.start(f"exec python3 -c '{ECHO}'", user="user")
    await sink.until(lambda: b"listening" in sink.out)
    with pytest.raises(GuestError) as refused:
        await shell.link.dial(7003)
    assert refused.value.errno == errno.ECONNREFUSED
    with pytest.raises(GuestError) as elsewhere:
        await shell.link.dial(80, "192.0.2.1")
    assert elsewhere.value.errno == errno.EADDRNOTAVAIL

    async def talk(port: int, text: bytes) -> None:
        stream = await shell.link.dial(port)
        try:
            await stream.write(text)
            await stream.write_eof()
            heard = b""
            while got := await stream.read():
                heard += got
            assert heard == text
            assert (await stream.wait()).exit_code == 0
        finally:
            await stream.close()

    await talk(7001, b"four" * 50_000)
    await talk(7002, b"six")

    together = asyncio.Barrier(200)

    async def talk_together(which: int) -> None:
        async with asyncio.timeout(WITHIN):
            stream = await shell.link.dial(7001 + which % 2)
            try:
                await together.wait()  # all of them are open
                text = b"%d " % which * 100
                await stream.write(text)
                await stream.write_eof()
                heard = b""
                while got := await stream.read():
                    heard += got
                assert heard == text
            finally:
                await stream.close()

    async with asyncio.TaskGroup() as group:
        for which in range(200):
            group.create_task(talk_together(which))
    await shell.link.close_process(number)


async def test_metrics(shell: Shell) -> None:
    metrics = await shell.link.metrics()
    assert metrics.cpus == 1
    assert 0 <= metrics.processes < 50  # those of sessions: there may be none
    assert 0 < metrics.memory_available_kib < metrics.memory_total_kib < 256 << 10
    assert metrics.load1_milli > 0
    async with running(shell, "sleep 1000 & sleep 1000 & echo up; wait"):
        assert (await shell.link.metrics()).processes >= 3


async def test_a_repeated_freeze_extends_the_first(shell: Shell) -> None:
    both = (shell.request(FrameType.FREEZE, (Tag.TIMEOUT_MS, 60_000)) for _ in range(2))
    await asyncio.gather(*both)
    await shell.request(FrameType.THAW)
    assert await shell.output("echo thawed > /root/thawed; cat /root/thawed") == "thawed\n"
