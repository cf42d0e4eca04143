"""The data plane as clients meet it: a real node process, the real guest agent, real processes behind it."""

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from dataplane_fixtures import Opener, agent, module_opened, module_plane, own_opened, own_plane
from dataplane_harness import WITHIN, Command, Plane, Seen

__all__ = ["agent", "module_opened", "module_plane", "own_opened", "own_plane"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane, opened = module_plane, own_opened

# Prints N lines that tell their own number, so that any part shows where it belongs.
COUNT = "import sys\nfor n in range({lines}): sys.stdout.write(f'{{n:019d}}\\n')"


def counted(lines: int) -> bytes:
    """What `COUNT` prints."""
    return b"".join(b"%019d\n" % n for n in range(lines))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(WITHIN):
        while not await condition():
            await asyncio.sleep(0.01)


# -- one command


async def test_a_short_command(plane: Plane) -> None:
    seen = await (await plane.create("sh", "-c", "echo out; echo err >&2; exit 3")).run()
    assert (bytes(seen.stdout), bytes(seen.stderr)) == (b"out\n", b"err\n")
    assert seen.names == ["started", "exit", "end"]
    assert isinstance(seen.the("started")["pid"], int)
    exit_ = seen.the("exit")
    assert (exit_["code"], exit_["signal"], exit_["reason"]) == (3, None, "exited")
    assert (exit_["stdout_bytes"], exit_["stderr_bytes"]) == (4, 4)
    assert seen.last_id == "1.4.4"


async def test_very_short_processes_lose_nothing(plane: Plane) -> None:
    commands = [await plane.create("sh", "-c", f"printf %s {number}; printf %s e{number} >&2") for number in range(60)]
    for at in range(0, 60, 10):
        seen = await asyncio.gather(*[command.run() for command in commands[at : at + 10]])
        for number, one in enumerate(seen, at):
            assert (one.stdout, one.stderr) == (str(number).encode(), f"e{number}".encode())


async def test_a_command_that_cannot_start(plane: Plane) -> None:
    seen = await (await plane.create("/there/is/no/such/program")).run()
    assert seen.names == ["exit", "end"]
    assert seen.the("exit")["reason"] == "spawn_failed"
    assert seen.the("exit")["message"]


async def test_killed_by_a_signal_and_by_its_timeout(plane: Plane) -> None:
    seen = await (await plane.create("sh", "-c", "kill -9 $$")).run()
    assert (seen.the("exit")["reason"], seen.the("exit")["signal"]) == ("signaled", 9)
    seen = await (await plane.create("sleep", "1000", timeout_s=0.2)).run()
    assert seen.the("exit")["reason"] == "timeout"


async def test_characters_are_not_split_and_other_octets_come_as_base64(plane: Plane) -> None:
    text = "aé漢\N{GRINNING FACE}" * 30_000
    code = f"import sys,time\nb=({text[:4]!r}*30000).encode()\nfor i in range(0,len(b),9973): sys.stdout.buffer.write(b[i:i+9973]); sys.stdout.flush()"
    command = await plane.python(code)
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        got = [str(event.data["text"]) async for event in stream if event.name == "stdout"]
    assert "".join(got) == text
    binary = await plane.python("import sys; sys.stdout.buffer.write(bytes(range(256))*1000)")
    assert bytes((await binary.run()).stdout) == bytes(range(256)) * 1000
    half = await plane.python("import sys; sys.stdout.buffer.write('é'.encode()[:1])")
    assert bytes((await half.run()).stdout) == b"\xc3"


async def test_a_background_child_does_not_hold_up_the_call_and_goes_on(plane: Plane, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = await plane.create(
        "sh", "-c", f"(trap '' PIPE; sleep 4; yes | head -c 3000000; echo done > {told}) & echo started"
    )
    began = time.monotonic()
    seen = await command.run()
    assert 1.5 < time.monotonic() - began < 20
    assert bytes(seen.stdout) == b"started\n"
    assert seen.the("exit")["code"] == 0
    await until(_exists(told))  # it was neither killed nor blocked by its full pipe
    assert (await command.status())["stdout_bytes"] == 8


def _exists(path: Path) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return path.exists()

    return check


# -- input


async def test_stdin_is_binary_and_its_end_arrives(plane: Plane) -> None:
    command = await plane.create("sha256sum")
    octets = os.urandom(3_000_000)
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        assert (await anext(stream)).name == "started"
        half = len(octets) // 2
        answer = await command.post("stdin", content=octets[:half])
        assert answer.json() == {"offset": half}
        answer = await command.post("stdin", content=octets[half:], params={"eof": 1})
        assert answer.json() == {"offset": len(octets)}
        seen = Seen()
        async for event in stream:
            seen.add(event)
    assert bytes(seen.stdout).split()[0].decode() == hashlib.sha256(octets).hexdigest()
    late = await command.post("stdin", content=b"more")
    assert (late.status_code, late.json()["code"]) == (409, "process_ended")
    repeated = await command.post("stdin", content=octets[-100:], params={"eof": 1, "offset": len(octets) - 100})
    assert (repeated.status_code, repeated.json()) == (200, {"offset": len(octets)})


async def test_a_repeated_stdin_request_gives_its_octets_once(own_plane: Plane) -> None:
    command = await own_plane.create("cat")
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        assert (await anext(stream)).name == "started"
        for _ in range(3):
            answer = await command.post("stdin", content=b"hello ", params={"offset": 0})
            assert answer.json() == {"offset": 6}
        answer = await command.post("stdin", content=b"world", params={"offset": 6})
        assert answer.json() == {"offset": 11}
        beyond = await command.post("stdin", content=b"!", params={"offset": 20})
        assert (beyond.status_code, beyond.json()["code"], beyond.json()["next"]) == (409, "stdin_offset", 11)
        await own_plane.restart_node()
        assert (await command.post("stdin", content=b"world!", params={"offset": 6, "eof": 1})).json() == {"offset": 12}
    assert bytes((await command.run()).stdout) == b"hello world!"


async def test_a_client_that_leaves_in_the_middle_of_stdin_gives_no_end(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "head -c 10; sleep 1; cat")
    async with command.attach() as stream:
        assert (await anext(stream)).name == "started"

        async def trickle() -> AsyncIterator[bytes]:
            yield b"0123456789" + b"x" * 90
            await asyncio.Event().wait()

        leaving = asyncio.ensure_future(command.post("stdin", content=trickle(), params={"eof": 1}))
        assert (await anext(stream)).octets == b"0123456789"
        leaving.cancel()
        answer = await command.post("stdin", content=b"the rest", params={"eof": 1})
        assert answer.json() == {"offset": 108}
    seen = await command.run()
    assert bytes(seen.stdout)[-8:] == b"the rest"


async def test_a_process_that_takes_nothing_holds_up_only_its_own_stdin(opened: Opener) -> None:
    plane = await opened(plane={"stdin_turn_s": 0.5})
    command = await plane.create("sleep", "1000")
    async with command.attach() as stream:
        assert (await anext(stream)).name == "started"
        first = asyncio.ensure_future(command.post("stdin", content=bytes(2_000_000)))

        async def busy() -> bool:
            second = await command.post("stdin", content=b"x")
            return (second.status_code, second.json().get("code")) == (409, "stdin_busy")

        await until(busy)
        other = await (await plane.create("echo", "fine")).run()
        assert bytes(other.stdout) == b"fine\n"
        assert (await command.post("signal", json={"signal": "KILL"})).json() == {"delivered": True}
        async with asyncio.timeout(WITHIN):
            assert (await first).status_code in (200, 409)


async def test_pings_come_while_nothing_happens(opened: Opener) -> None:
    plane = await opened(plane={"ping_s": 0.05})
    command = await plane.create("cat")
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        names = [(await anext(stream)).name for _ in range(4)]
        assert (await command.post("stdin", params={"eof": 1})).status_code == 200
    assert names == ["started", "ping", "ping", "ping"]


async def test_a_full_disk_is_a_gap_and_neither_a_crash_nor_a_hang(opened: Opener, tmp_path: Path) -> None:
    small = tmp_path / "plane0" / "sessions"
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        plane = await opened(spool={"keep": 64_000_000, "segment": 262_144, "disk_reserve": 0})
        command = await plane.create("sh", "-c", "head -c 5000000 /dev/zero; echo; read line; echo $line")
        stdout = gap = 0
        tail = b""
        async with asyncio.timeout(WITHIN), command.attach() as stream:
            async for event in stream:
                if event.name == "gap":
                    assert (event.data["stream"], event.data["from"]) == ("stdout", stdout)
                    assert event.data["cause"] == "disk_full"
                    gap += int(str(event.data["to"])) - stdout
                    stdout = int(str(event.data["to"]))
                elif event.name == "stdout":
                    assert event.data["offset"] == stdout
                    stdout += len(event.octets)
                    tail = (tail + event.octets)[-20:]
                if stdout == 5_000_001 and event.name in ("stdout", "gap"):
                    for path in small.glob("*/*/stdout.*"):
                        path.unlink()
                    assert (await command.post("stdin", content=b"room again\n")).status_code == 200
        assert gap > 3_000_000
        assert (stdout, tail[-11:]) == (5_000_012, b"room again\n")
        await plane.stop()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


async def test_signals_and_resize(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "trap 'echo got; exit 0' USR1; echo ready; while :; do sleep 0.05; done")
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        async for event in stream:
            if event.name == "stdout" and event.octets == b"ready\n":
                break
        for body in ({"signal": "NOPE"}, {"signal": 99}):
            assert (await command.post("signal", content=json.dumps(body))).status_code == 400
        for body in ({"signal": 15, "scope": "all"}, {"signl": 9}, [], None):
            assert (await command.post("signal", content=json.dumps(body))).status_code == 422
        assert (await command.post("resize", json={"rows": 10, "cols": 10})).json()["code"] == "no_terminal"
        assert (await command.post("signal", json={"signal": "usr1", "scope": "leader"})).json() == {"delivered": True}
        rest = [event async for event in stream]
    assert rest[0].octets == b"got\n"
    assert (await command.post("signal", json={"signal": 15})).json() == {"delivered": False}


async def test_a_terminal(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "stty size; read line; stty size", pty={"rows": 30, "cols": 100})
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        seen = Seen()
        async for event in stream:
            seen.add(event)
            if bytes(seen.stdout) == b"30 100\r\n" and event.name == "stdout":
                assert (await command.post("resize", json={"rows": 5, "cols": 7})).status_code == 204
                assert (await command.post("stdin", content=b"\n")).status_code == 200
    assert bytes(seen.stdout) == b"30 100\r\n\r\n5 7\r\n"


# -- followers


async def test_200_mb_with_a_client_that_goes_away_in_the_middle(plane: Plane) -> None:
    lines = 10_000_000
    command = await plane.create("sh", "-c", f"seq -f %019.0f 0 {lines - 1}")
    whole = hashlib.sha256()
    for start in range(0, lines, 100_000):
        whole.update(b"".join(b"%019d\n" % n for n in range(start, start + 100_000)))
    began = time.monotonic()
    seen = Seen()
    async with command.attach() as stream:
        async for event in stream:
            seen.add(event)
            if len(seen.stdout) > 60_000_000:
                break
    await command.run(seen)
    print(f"200 MB in {time.monotonic() - began:.1f} s")
    assert len(seen.stdout) == 20 * lines
    assert hashlib.sha256(seen.stdout).hexdigest() == whole.hexdigest()
    assert seen.the("exit")["code"] == 0


async def test_last_event_id_goes_on_where_it_was(plane: Plane) -> None:
    command = await plane.python(COUNT.format(lines=50_000))
    seen = Seen()
    async with command.attach() as stream:
        async for event in stream:
            seen.add(event)
            if len(seen.stdout) > 300_000:
                break
    headers = {**command.headers, "last-event-id": seen.last_id}
    answer = await plane.client.post(command.url("attach"), headers=headers)
    first = next(part for part in answer.text.split("\n\n") if "event: stdout" in part)
    assert json.loads(first.split("data: ")[1])["offset"] == len(seen.stdout)
    void = await plane.client.post(command.url("attach"), headers={**headers, "last-event-id": "7" + seen.last_id[1:]})
    first = next(part for part in void.text.split("\n\n") if "event: stdout" in part)
    assert json.loads(first.split("data: ")[1])["offset"] == 0


async def test_two_clients_one_of_them_stalled(plane: Plane) -> None:
    lines = 1_000_000
    command = await plane.create("sh", "-c", f"seq -f %019.0f 0 {lines - 1}")
    async with command.attach() as stalled:
        assert (await anext(stalled)).name == "started"
        seen = await command.run()
        assert len(seen.stdout) == 20 * lines
        late = Seen()
        async with asyncio.timeout(WITHIN):
            async for event in stalled:
                late.add(event)
    assert hashlib.sha256(late.stdout).digest() == hashlib.sha256(seen.stdout).digest()
    assert late.names == ["exit", "end"]


async def test_a_stalled_client_costs_the_node_no_memory(own_plane: Plane) -> None:
    command = await own_plane.create("sh", "-c", "head -c 150000000 /dev/zero")
    before = await own_plane.tell("memory")
    async with command.attach() as stalled:
        assert (await anext(stalled)).name == "started"

        async def over() -> bool:
            return (await command.status())["state"] == "ended"

        await until(over)
        after = await own_plane.tell("memory")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < 40_000_000


async def test_concurrent_attaches_start_one_process(plane: Plane, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    command = await plane.create("sh", "-c", f"echo $$ >> {starts}; echo hello")
    seen = await asyncio.gather(*[command.run() for _ in range(8)])
    assert {bytes(one.stdout) for one in seen} == {b"hello\n"}
    assert len(starts.read_text().split()) == 1
    assert bytes((await command.run()).stdout) == b"hello\n"  # an ended one replays


async def test_a_thousand_idle_clients(own_plane: Plane) -> None:
    command = await own_plane.create("cat")
    head = f"POST /v1/sessions/{command.id}/attach HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    head += f"Authorization: {command.headers['authorization']}\r\n\r\n"
    host, port = own_plane.url.removeprefix("http://").split(":")
    before = await own_plane.tell("memory")
    connections = []
    async with asyncio.timeout(WITHIN):
        for _ in range(1000):
            reader, writer = await asyncio.open_connection(host, int(port))
            connections.append((reader, writer))
            writer.write(head.encode())
            await reader.readuntil(b"event: started\n")
        after = await own_plane.tell("memory")
        assert (await command.post("stdin", content=b"to all", params={"eof": 1})).status_code == 200
        ends = await asyncio.gather(*[reader.readuntil(b"event: end\n") for reader, _ in connections])
    assert all(b'"text":"to all"' in end for end in ends)
    for _, writer in connections:
        writer.close()
    assert isinstance(before, int)
    assert isinstance(after, int)
    print(f"{(after - before) / 1000 / 1024:.1f} KiB a client")
    assert after - before < 100_000_000


async def test_raw_output(opened: Opener) -> None:
    plane = await opened(spool={"keep": 65_536, "segment": 4_096, "disk_reserve": 0})
    command = await plane.python(COUNT.format(lines=50_000) + "\nsys.stderr.write('why')")
    await command.run_ignoring_gaps()
    whole = counted(50_000)
    refused = await command.output(stream="stdout")
    assert refused.status_code == 410
    problem = refused.json()
    assert (problem["code"], problem["stream"], problem["from"]) == ("output_dropped", "stdout", 0)
    kept = await command.output(stream="stdout", gaps="skip")
    start = int(kept.headers["hatchway-offset"])
    assert start == problem["to"]
    assert kept.content == whole[start:]
    part = await command.output(**{"from": len(whole) - 100})
    assert (part.content, part.headers["hatchway-offset"]) == (whole[-100:], str(len(whole) - 100))
    assert (await command.output(stream="stderr")).content == b"why"
    beyond = await command.output(**{"from": len(whole) + 1})
    assert (beyond.status_code, beyond.json()["code"]) == (422, "offset_beyond_end")
    for bad in ({"from": "-1"}, {"from": "x"}, {"stream": "stdin"}, {"gaps": "no"}, {"follow": "2"}):
        assert (await command.output(**bad)).status_code == 422


async def test_raw_output_follows_or_stops_at_what_is_there(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "echo one; read line; echo two")
    async with command.attach() as stream:
        async for event in stream:
            if event.name == "stdout":
                break
        assert (await command.output(follow=0)).content == b"one\n"
        following = asyncio.ensure_future(command.output())
        await command.post("stdin", content=b"\n")
        async with asyncio.timeout(WITHIN):
            assert (await following).content == b"one\ntwo\n"


async def test_a_dropped_part_is_an_exact_gap(opened: Opener) -> None:
    plane = await opened(spool={"keep": 65_536, "segment": 4_096, "disk_reserve": 0})
    command = await plane.python(COUNT.format(lines=50_000))
    await command.run_ignoring_gaps()
    whole, position, gaps = counted(50_000), 0, 0
    async with command.attach() as stream:
        async for event in stream:
            if event.name == "gap":
                assert (event.data["stream"], event.data["from"], event.data["cause"]) == ("stdout", position, "bound")
                position = int(str(event.data["to"]))
                gaps += 1
            elif event.name == "stdout":
                assert event.data["offset"] == position
                assert event.octets == whole[position : position + len(event.octets)]
                position += len(event.octets)
    assert (position, gaps) == (len(whole), 1)


# -- deaths


async def test_the_node_is_killed_while_output_flows(own_plane: Plane) -> None:
    lines = 1_000_000
    command = await own_plane.create("sh", "-c", f'seq -f %019.0f 0 {lines - 1}; read line; echo "$line"')
    seen = Seen()
    for limit in (1_000_000, 6_000_000, 12_000_000):
        with pytest.raises(httpx.HTTPError):
            await _read_and_kill(own_plane, command, seen, limit)
        await own_plane.restart_node()
    async with asyncio.timeout(WITHIN), command.attach(stdout=len(seen.stdout)) as stream:
        async for event in stream:
            seen.add(event)
            if len(seen.stdout) == 20 * lines and event.name == "stdout":
                assert (await command.post("stdin", content=b"alive\n")).status_code == 200
    assert bytes(seen.stdout[: 20 * lines]) == counted(lines)
    assert bytes(seen.stdout[20 * lines :]) == b"alive\n"
    assert seen.names == ["started"] * 4 + ["exit", "end"]
    await own_plane.restart_node(connect=False)  # what ended is whole without any sandbox
    again = await command.run()
    assert again.stdout == seen.stdout


async def _read_and_kill(own_plane: Plane, command: Command, seen: Seen, limit: int) -> None:
    async with command.attach(stdout=len(seen.stdout)) as stream:
        async for event in stream:
            seen.add(event)
            if len(seen.stdout) > limit:
                own_plane.kill_node()


async def test_killed_between_end_and_restart_the_end_is_kept(own_plane: Plane) -> None:
    command = await own_plane.create("sh", "-c", "echo hello; exit 5")
    await command.run()
    await own_plane.restart_node()
    seen = await command.run()
    assert (bytes(seen.stdout), seen.the("exit")["code"]) == (b"hello\n", 5)


async def test_a_process_that_ends_while_no_node_lives(own_plane: Plane, tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = await own_plane.create("sh", "-c", f"echo one; read line; echo two; echo > {done}; exit 9")
    async with command.attach() as stream:
        async for event in stream:
            if event.name == "stdout":
                break
        await command.post("stdin", content=b"\n")
        own_plane.kill_node()
    await until(_exists(done))
    await own_plane.restart_node()
    seen = await command.run()
    assert (bytes(seen.stdout), seen.the("exit")["code"]) == (b"one\ntwo\n", 9)


async def test_sandbox_lost_ends_open_streams(own_plane: Plane) -> None:
    command = await own_plane.create("sh", "-c", "echo hello; sleep 1000")
    waiting = await own_plane.create("true")
    seen = Seen()
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        raw = asyncio.ensure_future(command.output())
        async for event in stream:
            seen.add(event)
            if event.name == "stdout":
                await own_plane.tell("lose", "The VM died.")
        assert (await raw).content == b"hello\n"
    assert seen.names == ["started", "exit", "end"]
    assert (seen.the("exit")["reason"], seen.the("exit")["message"]) == ("sandbox_lost", "The VM died.")
    refused = await waiting.post("attach")
    assert (refused.status_code, refused.json()["code"], refused.json()["state"]) == (
        409,
        "sandbox_not_running",
        "failed",
    )
    assert f"/v1/sandboxes/{own_plane.sandbox_id}/start" in refused.json()["remedy"]


async def test_after_a_restart_of_the_guest_its_processes_are_lost(own_plane: Plane) -> None:
    command = await own_plane.create("sleep", "1000")
    async with command.attach() as stream:
        assert (await anext(stream)).name == "started"
    own_plane.kill_node()
    own_plane.stop_agent()
    own_plane.start_agent()
    await own_plane.restart_node()
    seen = await command.run()
    assert seen.names == ["started", "exit", "end"]
    assert seen.the("exit")["reason"] == "sandbox_lost"


async def test_a_paused_sandbox(own_plane: Plane) -> None:
    running = await own_plane.create("sh", "-c", "echo kept; sleep 1000")
    waiting = await own_plane.create("true")
    async with running.attach() as stream:
        async for event in stream:
            if event.name == "stdout":
                break
    await own_plane.tell("state", "paused")
    async with running.attach() as stream:  # what is kept can be read
        assert [(await anext(stream)).name, (await anext(stream)).octets] == ["started", b"kept\n"]
    for refused in (await waiting.post("attach"), await running.post("signal", json={"signal": 9})):
        assert (refused.status_code, refused.json()["code"]) == (409, "sandbox_not_running")
        assert "/resume" in refused.json()["remedy"]


async def test_shutdown_does_not_wait_for_streams_nor_for_a_stalled_client(own_plane: Plane) -> None:
    idle = await own_plane.create("sleep", "1000")
    flood = await own_plane.create("cat", "/dev/zero")
    async with idle.attach() as stream, flood.attach() as stalled:
        assert (await anext(stream)).name == "started"
        assert (await anext(stalled)).name == "started"
        began = time.monotonic()
        async with asyncio.timeout(WITHIN):
            await own_plane.tell("stop")
            assert [event.name async for event in stream] == []
        assert time.monotonic() - began < 10


async def test_deleting_a_session_ends_its_streams_and_its_processes(plane: Plane) -> None:
    command = await plane.create("sh", "-c", "sleep 1000 & echo $!; wait")
    seen = Seen()
    async with asyncio.timeout(WITHIN), command.attach() as stream:
        async for event in stream:
            seen.add(event)
            if event.name == "stdout":
                await plane.tell("delete", command.id)
    assert seen.names[-1] == "end"
    child = Path(f"/proc/{int(seen.stdout)}")

    async def dead() -> bool:
        return not child.exists() or child.joinpath("stat").read_text().split()[2] == "Z"

    await until(dead)
    gone = await command.post("attach")
    assert (gone.status_code, gone.json()["code"]) == (410, "session_gone")


# -- who may


async def test_tokens(plane: Plane) -> None:
    command, other = await plane.create("true"), await plane.create("true")

    async def attach(authorization: str | None) -> tuple[int, str]:
        headers = {} if authorization is None else {"authorization": authorization}
        answer = await plane.client.post(command.url("attach"), headers=headers)
        if answer.status_code == 200:
            return 200, ""
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == answer.status_code
        assert problem["cause"]
        assert problem["remedy"]
        return answer.status_code, problem["code"]

    assert await attach(None) == (401, "token_missing")
    assert await attach("Basic abc") == (401, "token_missing")
    assert await attach("Bearer abc") == (401, "token_invalid")
    assert await attach(f"Bearer {'x' * 5000}") == (401, "token_invalid")
    assert await attach(f"Bearer {plane.token(command.id, ttl_s=-5.0)}") == (401, "token_expired")
    assert await attach(f"Bearer {plane.token(other.id)}") == (403, "wrong_session")
    assert await attach(f"Bearer {plane.token(None, scopes=frozenset({'files'}))}") == (403, "wrong_scope")
    assert await attach(f"Bearer {plane.token(None, sandbox_id='b' * 20)}") == (404, "unknown_session")
    assert await attach(f"Bearer {plane.token(None, project='another')}") == (404, "unknown_session")
    stranger = Plane(plane.folder, plane.folder)
    assert await attach(f"Bearer {stranger.token(command.id, sandbox_id=plane.sandbox_id)}") == (401, "token_invalid")
    await stranger.client.aclose()
    assert await attach(f"Bearer {plane.token(None)}") == (200, "")
    for verb, method in (
        ("attach", "POST"),
        ("output", "GET"),
        ("stdin", "POST"),
        ("signal", "POST"),
        ("resize", "POST"),
    ):
        assert (await plane.client.request(method, command.url(verb))).status_code == 401


async def test_revocation_ends_streams(own_plane: Plane) -> None:
    command = await own_plane.create("sleep", "1000")
    token = own_plane.token(command.id)
    payload = token.split(".")[1]
    token_id = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["jti"]
    headers = {"authorization": f"Bearer {token}"}
    async with (
        asyncio.timeout(WITHIN),
        own_plane.client.stream("POST", command.url("attach"), headers=headers) as response,
    ):
        pieces = response.aiter_raw()
        assert b"event: started" in await anext(pieces)
        await own_plane.configure(revoked=(token_id,))
        assert b"event: end" not in b"".join([piece async for piece in pieces])
    refused = await own_plane.client.post(command.url("attach"), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (401, "token_revoked")


async def test_what_is_malformed_is_refused(opened: Opener) -> None:
    plane = await opened(plane={"body": 1_000})
    command = await plane.create("true")

    async def attach(**more: object) -> tuple[int, str]:
        headers = {**command.headers, **more.pop("headers", {})}  # type: ignore[dict-item]
        answer = await plane.client.post(command.url("attach"), headers=headers, **more)  # type: ignore[arg-type]
        return answer.status_code, answer.json()["code"]

    assert await attach(content=b"{") == (400, "invalid_json")
    assert await attach(content=b"\xff") == (400, "invalid_json")
    assert await attach(json={"offset": {}}) == (422, "unknown_field")
    assert await attach(json={"offsets": {"stdout": -1}}) == (422, "invalid_field")
    assert await attach(json={"offsets": {"stdout": 2**70}}) == (422, "invalid_field")
    assert await attach(json={"offsets": {"stdout": 5}}) == (422, "offset_beyond_end")
    assert await attach(content=b" " * 2000) == (413, "body_too_large")
    assert await attach(headers={"last-event-id": "soon"}) == (400, "invalid_event_id")
    not_started = await command.post("stdin", content=b"x")
    assert (not_started.status_code, not_started.json()["code"]) == (409, "not_started")
    unknown = Command(plane, "z" * 20)
    sandbox_token = {"authorization": f"Bearer {plane.token(None)}"}
    answer = await plane.client.post(unknown.url("attach"), headers=sandbox_token)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_session")
    answer = await plane.client.get(plane.url + "/v2")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_path")
    answer = await plane.client.get(command.url("attach"))
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    assert answer.json()["type"].endswith("/method_not_allowed")
    assert (await plane.client.get(plane.url + "/healthz")).status_code == 200


async def test_the_bound_of_requests_has_a_clear_error(opened: Opener) -> None:
    plane = await opened(plane={"requests": 3})
    command = await plane.create("sleep", "1000")
    async with command.attach() as one, command.attach() as two, command.attach() as three:
        for stream in (one, two, three):
            assert (await anext(stream)).name == "started"
        refused = await command.post("attach")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")

    async def admitted() -> bool:
        return (await plane.client.get(plane.url + "/healthz")).status_code == 200

    await until(admitted)  # who left made room at once
