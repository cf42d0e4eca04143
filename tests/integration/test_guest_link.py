"""The link against the real agent, run on this host over a Unix socket (no VM): processes, streams, and every kind of loss."""

import asyncio
import contextlib
import errno
import hashlib
import itertools
import random
import re
import select
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from guest_script import WITHIN, Proxy, Recorder
from tests.support.native import built

from hatchway.node.guest import peer
from hatchway.node.guest.link import Link, connect
from hatchway.node.guest.seam import ExitReason, GuestError, LinkLost, ProcessState, Setup, Spawn
from hatchway.wire.channel import encode_input

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def agent_binary() -> Path:
    return built("guest", "host") / "hatchway-agent-host"


class Agent:
    """A running agent and the links to it."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.socket = folder / "agent.sock"
        self.vm_ended = asyncio.Event()
        self._binary = binary
        self._links: list[Link] = []

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "--host-mode", str(self.socket), stderr=asyncio.subprocess.DEVNULL
        )

    async def connect(self, *, setup: Setup | None = None, path: Path | None = None, within: float = WITHIN) -> Link:
        """The link waits for the socket by itself."""
        link = await connect(path or self.socket, fresh=False, vm_ended=self.vm_ended, setup=setup, within=within)
        self._links.append(link)
        return link

    async def stop_process(self) -> None:
        """Ends the agent as a crash would."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        for link in self._links:
            with contextlib.suppress(LinkLost, GuestError, TimeoutError):
                if self._process.returncode is None:
                    async with asyncio.timeout(WITHIN):
                        await asyncio.gather(*map(link.close_process, list(link._peer.processes)))
            await link.close()
        self._links.clear()
        if self._process.returncode is None:
            await self.stop_process()


@pytest.fixture
async def agent(agent_binary: Path, tmp_path: Path) -> AsyncIterator[Agent]:
    agent = Agent(agent_binary, tmp_path)
    await agent.start()
    try:
        yield agent
    finally:
        await agent.stop()


@pytest.fixture
async def link(agent: Agent) -> Link:
    return await agent.connect()


def spawn_of(*argv: str | bytes, stdin: bool = False, **options: object) -> Spawn:
    number = next(_numbers)
    environment = {"PATH": "/usr/bin:/bin", **options.pop("env", {})}  # type: ignore[dict-item] # the options are data
    return Spawn(number=number, key=f"test-{number}", argv=argv, env=environment, stdin=stdin, **options)  # type: ignore[arg-type] # the options are data


def shell(script: str, **options: object) -> Spawn:
    return spawn_of("/bin/sh", "-c", script, **options)  # type: ignore[arg-type] # the options are data


async def run(link: Link, spawn: Spawn) -> Recorder:
    sink = Recorder()
    await link.spawn(spawn, sink)
    await sink.end()
    return sink


# -- processes and streams


async def test_output_exit_and_usage(link: Link) -> None:
    sink = Recorder()
    pid = await link.spawn(shell("printf out; printf err >&2; exit 7"), sink)
    end = await sink.end()
    assert pid
    assert (sink.out, sink.err) == (b"out", b"err")
    assert (end.exit_code, end.reason, end.pid) == (7, ExitReason.EXITED, pid)
    assert (end.stdout_total, end.stderr_total) == (3, 3)
    assert end.wall_us > 0
    assert end.max_rss_kib > 0
    assert [proc.state for proc in sink.states][-2:] == [ProcessState.EXITED, ProcessState.CLOSED]
    assert not sink.gaps


async def test_stdin_is_binary_and_ends(link: Link) -> None:
    octets = random.Random(1).randbytes(300_000)
    sink = Recorder()
    spawn = spawn_of("cat", stdin=True)
    await link.spawn(spawn, sink)
    offset = 0
    for start in range(0, len(octets), 70_000):
        offset = await link.send_input(spawn.number, offset, octets[start : start + 70_000])
    assert offset == len(octets)
    assert await link.send_input(spawn.number, offset, b"", eof=True) == offset
    assert (await sink.end()).exit_code == 0
    assert sink.out == octets


async def test_stdin_and_its_end_in_one_call_much_larger_than_any_buffer(link: Link) -> None:
    octets = random.Random(2).randbytes(3_000_000)
    sink = Recorder()
    spawn = spawn_of("sha256sum", stdin=True)
    await link.spawn(spawn, sink)
    assert await link.send_input(spawn.number, 0, octets, eof=True) == len(octets)
    await sink.end()
    assert sink.out.split()[0].decode() == hashlib.sha256(octets).hexdigest()


async def test_stdin_of_a_process_that_does_not_read_waits_and_can_be_given_up(link: Link) -> None:
    sink = Recorder()
    spawn = shell("echo up; exec sleep 1000", stdin=True)
    await link.spawn(spawn, sink)
    await sink.until(lambda: sink.out == b"up\n")
    feeding = asyncio.create_task(link.send_input(spawn.number, 0, bytes(1_000_000)))
    assert await link.ping() > 0
    assert not feeding.done()
    await link.signal(spawn.number, signal.SIGKILL)
    assert (await sink.end()).exit_signal == signal.SIGKILL
    assert await feeding == 1_000_000


async def test_stdin_that_was_given_up_goes_on_from_any_offset_before(link: Link, tmp_path: Path) -> None:
    octets = random.Random(4).randbytes(4_000_000)
    sink, spawn = Recorder(), shell(f"until test -e {tmp_path}/go; do sleep 0.02; done; exec cat", stdin=True)
    await link.spawn(spawn, sink)
    feeding = asyncio.create_task(link.send_input(spawn.number, 0, octets))
    process = link._peer.processes[spawn.number]
    async with asyncio.timeout(WITHIN):
        while process.taken == 0:
            await asyncio.sleep(0.01)
    feeding.cancel()
    assert 0 < process.taken <= process.sent < len(octets)
    again = asyncio.create_task(link.send_input(spawn.number, 1000, octets[1000:], eof=True))
    (tmp_path / "go").touch()
    assert await again == len(octets)
    await sink.end()
    assert sink.out == octets


async def test_a_terminal(link: Link) -> None:
    sink = Recorder()
    spawn = shell(
        "stty size; read line; stty size; echo got $line; test -t 2 && echo terminal", stdin=True, pty=(33, 99)
    )
    await link.spawn(spawn, sink)
    await sink.until(lambda: b"33 99" in sink.out)
    await link.resize(spawn.number, 44, 101)
    await link.send_input(spawn.number, 0, b"words\n")
    await sink.end()
    assert b"44 101" in sink.out
    assert b"got words" in sink.out
    assert b"terminal" in sink.out
    assert sink.err == b""


async def test_merged_streams(link: Link) -> None:
    sink = await run(link, shell("echo a; echo b >&2; echo c", merge_stderr=True))
    assert (sink.out, sink.err) == (b"a\nb\nc\n", b"")


async def test_environment_and_folder(agent: Agent) -> None:
    link = await agent.connect(setup=Setup(env={"COLOUR": "blue", "SIZE": "1"}))
    sink = await run(link, shell("echo $COLOUR $SIZE $PWD", env={"SIZE": "2"}, cwd="/usr"))
    assert sink.out == b"blue 2 /usr\n"


async def test_arguments_beyond_one_frame(link: Link) -> None:
    argument = bytes(random.Random(3).choices(range(1, 256), k=120_000))
    sink = await run(link, spawn_of("/usr/bin/printf", "%s%s", argument, argument[::-1]))
    assert sink.out == argument + argument[::-1]


async def test_a_program_that_is_not_there(link: Link) -> None:
    sink = Recorder()
    assert await link.spawn(spawn_of("/no/such/program"), sink) is None
    end = await sink.end()
    assert end.reason is ExitReason.SPAWN_FAILED
    assert "No such file" in end.message


async def test_a_signal_reaches_the_whole_tree_or_the_leader_alone(link: Link) -> None:
    script = "trap 'echo leader; exit 3' USR1; sh -c 'trap \"echo child; exit\" USR1; echo ready; while :; do sleep 0.05; done' & wait; wait"
    tree, spawn = Recorder(), shell(script)
    await link.spawn(spawn, tree)
    await tree.until(lambda: b"ready" in tree.out)
    await link.signal(spawn.number, signal.SIGUSR1)
    assert (await tree.end()).exit_code == 3
    assert b"leader" in tree.out
    assert b"child" in tree.out

    alone, spawn = Recorder(), shell(script)
    await link.spawn(spawn, alone)
    await alone.until(lambda: b"ready" in alone.out)
    await link.signal(spawn.number, signal.SIGUSR1, leader_only=True)
    await alone.until(lambda: alone.states[-1].state is ProcessState.EXITED)
    assert b"child" not in alone.out
    await link.signal(spawn.number, signal.SIGKILL)
    await alone.end()


async def test_a_time_limit_kills_the_tree(link: Link) -> None:
    sink = await run(link, shell("sleep 1000 & sleep 1000", timeout_ms=200))
    assert sink.states[-1].reason is ExitReason.TIMEOUT


async def test_closing_a_process_kills_it(link: Link) -> None:
    sink, spawn = Recorder(), shell("echo $$; exec sleep 1000")
    pid = await link.spawn(spawn, sink)
    await sink.until(lambda: sink.out.endswith(b"\n"))
    await link.close_process(spawn.number)
    async with asyncio.timeout(WITHIN):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
    await link.close_process(spawn.number)
    with pytest.raises(GuestError) as caught:
        await link.signal(spawn.number, signal.SIGTERM)
    assert caught.value.errno == errno.ESRCH


async def test_a_process_that_nobody_stores_blocks_alone(link: Link) -> None:
    stuck, spawn = Recorder(), shell("exec cat /dev/zero")
    stuck.stored = lambda: (0, 0)  # type: ignore[method-assign] # a disk that takes nothing
    await link.spawn(spawn, stuck)
    await stuck.until(lambda: len(stuck.out) >= 256 * 1024)
    sink = await run(link, shell("head -c 3000000 /dev/zero | tr '\\0' x"))
    assert sink.out == b"x" * 3_000_000
    assert len(stuck.out) <= 1024 * 1024
    await link.close_process(spawn.number)


async def test_much_output_arrives_whole(link: Link) -> None:
    class Digest(Recorder):
        """Does not keep what it hashes."""

        def __init__(self) -> None:
            super().__init__()
            self.digest = hashlib.sha256()

        def output(self, fd: int, offset: int, data: memoryview) -> None:
            assert (fd, offset) == (1, self.next[0])
            self.digest.update(data)
            self.next[0] += len(data)
            self._changed.set()

    sink = Digest()
    await link.spawn(shell("yes 'a line of output' | head -c 200000000"), sink)
    await sink.end()
    line = b"a line of output\n"
    whole = hashlib.sha256((line * (200_000_000 // len(line) + 1))[:200_000_000])
    assert sink.next[0] == 200_000_000
    assert sink.digest.digest() == whole.digest()


async def test_many_processes_at_once(link: Link) -> None:
    spawns = [shell(f"printf '%s' {n}; printf '%s' {n} >&2") for n in range(100)]
    sinks = await asyncio.gather(*[run(link, spawn) for spawn in spawns])
    assert [sink.out for sink in sinks] == [str(n).encode() for n in range(100)]
    assert [sink.err for sink in sinks] == [str(n).encode() for n in range(100)]


# -- losses


@pytest.mark.parametrize("seed", range(6))
async def test_connections_that_break_at_random_lose_nothing(
    agent: Agent, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "BACKOFF_S", (0.0,))
    chance = random.Random(seed)
    octets = chance.randbytes(1_500_000)
    cuts = itertools.chain((chance.randint(66_000, 900_000) for _ in range(12)), itertools.repeat(2**60))
    async with Proxy(tmp_path / "proxy.sock", agent.socket, cuts) as proxy:
        while True:
            try:
                link = await agent.connect(path=proxy.path)
                break
            except LinkLost:
                continue
        sinks = [Recorder() for _ in range(3)]
        echo, count, failing = spawn_of("cat", stdin=True), shell("seq 1 200000; echo done >&2"), shell("exit 9")
        echoing = asyncio.create_task(link.spawn(echo, sinks[0]))
        await link.spawn(count, sinks[1])
        await link.spawn(failing, sinks[2])
        await echoing
        assert await link.send_input(echo.number, 0, octets, eof=True) == len(octets)
        ends = [await sink.end() for sink in sinks]
        assert [end.exit_code for end in ends] == [0, 0, 9]
        assert sinks[0].out == octets
        assert sinks[1].out == b"".join(b"%d\n" % n for n in range(1, 200_001))
        assert sinks[1].err == b"done\n"
        assert not any(sink.gaps or sink.lost for sink in sinks)
        assert proxy.lost >= 3
        await link.close()


async def test_a_host_that_died_in_the_middle_of_a_frame(agent: Agent) -> None:
    link = await agent.connect()
    sink, spawn = Recorder(), spawn_of("cat", stdin=True)
    await link.spawn(spawn, sink)
    assert await link.send_input(spawn.number, 0, b"whole ") == 6
    link._peer.write(encode_input(spawn.number, 6, b"half of a frame" * 1000)[:5000])
    await sink.until(lambda: sink.out == b"whole ")
    await link.close()
    assert sink.lost is None

    second = await agent.connect()
    assert [proc.key for proc in second.hello.processes] == [spawn.key]
    after = Recorder(*sink.stored())
    assert second.attach(spawn.number, after)
    assert await second.send_input(spawn.number, 6, b"and more", eof=True) == 14
    await after.end()
    assert after.out == b"and more"


async def test_a_node_that_comes_back_goes_on_where_it_had_stored(agent: Agent) -> None:
    link = await agent.connect()
    sink, spawn = Recorder(), shell("seq 1 300000")
    await link.spawn(spawn, sink)
    await sink.until(lambda: len(sink.out) > 300_000)
    await link.close()
    kept = sink.out

    second = await agent.connect()
    after = Recorder(*sink.stored())
    assert second.attach(spawn.number, after)
    await after.end()
    assert not after.gaps
    assert kept + after.out == b"".join(b"%d\n" % n for n in range(1, 300_001))


async def test_a_node_that_lost_what_it_had_acknowledged_sees_the_gap(agent: Agent) -> None:
    link = await agent.connect()
    sink, spawn = Recorder(), shell("seq 1 300000")
    await link.spawn(spawn, sink)
    await sink.end()
    await link.sync()
    total = sink.states[-1].stdout_total
    while link._peer._unacked:  # the last acknowledgement goes out within its delay
        await asyncio.sleep(0.01)
    await link.ping()
    await link.close()

    second = await agent.connect()
    after = Recorder()
    assert second.attach(spawn.number, after)
    third = shell("echo after")
    assert (await run(second, third)).out == b"after\n"
    assert after.out == b""
    assert after.states[-1].stdout_total == total


async def test_a_spawn_that_was_repeated_by_another_node_starts_nothing_twice(agent: Agent, tmp_path: Path) -> None:
    link = await agent.connect()
    sink, spawn = Recorder(), shell(f"echo once >> {tmp_path}/witness; echo said")
    pid = await link.spawn(spawn, sink)
    await sink.end()
    await link.close()
    second = await agent.connect()
    again = Recorder(*sink.stored())
    assert await second.spawn(spawn, again) == pid
    assert (await again.end()).exit_code == 0
    assert (tmp_path / "witness").read_text() == "once\n"


async def test_a_dead_agent_is_not_the_end_until_the_vm_is(agent: Agent) -> None:
    link = await agent.connect()
    lasting = Recorder()
    await link.spawn(shell("exec sleep 3"), lasting)
    await agent.stop_process()
    pinging = asyncio.create_task(link.ping())
    await agent.start()
    assert await pinging > 0, "the link dialled again"
    await lasting.until(lambda: lasting.lost is not None)
    assert re.search("does not know", lasting.lost or "")
    agent.vm_ended.set()
    with pytest.raises(LinkLost, match="the virtual machine ended"):
        await link.ping()


async def test_a_port_that_answers_nobody_holds_up_no_session(link: Link) -> None:
    with socket.socket() as listening, contextlib.ExitStack() as taken:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        while True:  # until the listener's queue is full
            probe = taken.enter_context(socket.socket())
            probe.setblocking(False)
            probe.connect_ex(address)
            if not select.select([], [probe], [], 0.5)[1]:
                break
        dials = [asyncio.create_task(link.dial(address[1])) for _ in range(40)]
        try:
            await link.ping()  # behind the first of them
            sink = Recorder()
            assert await link.spawn(spawn_of("echo", "well"), sink)
            await sink.end()
            assert sink.out == b"well\n"
            assert not any(task.done() for task in dials)  # it waited for none of them
        finally:
            for task in dials:
                task.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
