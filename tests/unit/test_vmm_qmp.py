"""The QMP client against a scripted peer on a real Unix socket, well-behaved and hostile."""

import array
import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hatchway.node.vmm import qmp as qmp_module
from hatchway.node.vmm.qmp import MAX_LINE, Qmp, QmpError, command
from hatchway.node.vmm.seam import VmmDied, VmmTimeout

GREETING = b'{"QMP": {"version": {"qemu": {"major": 7}}}}\r\n'
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serving(path: Path, script: Script) -> asyncio.Server:
    return await asyncio.start_unix_server(script, str(path), limit=4 * MAX_LINE)


async def answer_everything(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    while line := await reader.readline():
        request = json.loads(line)
        writer.write(json.dumps({"return": request["execute"], "id": request["id"]}).encode() + b"\r\n")
        await writer.drain()
    writer.close()


async def test_negotiates_with_the_first_commands_and_once(tmp_path: Path) -> None:
    seen: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        while line := await reader.readline():
            request = json.loads(line)
            seen.append(request["execute"])
            writer.write(json.dumps({"return": {}, "id": request["id"]}).encode() + b"\n")
        writer.close()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q")
    await qmp.run(command("stop"), command("cont"))
    await qmp.execute("query-status")
    assert seen == ["qmp_capabilities", "stop", "cont", "query-status"]
    assert qmp.greeting is not None
    qmp.close()
    server.close()


async def test_sends_before_the_peer_accepts(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "q"))
    listener.listen(1)
    qmp = await Qmp.connect(tmp_path / "q")
    result = asyncio.ensure_future(qmp.execute("query-status"))
    await asyncio.sleep(0)
    server = await asyncio.start_unix_server(answer_everything, sock=listener)
    assert await result == "query-status"
    qmp.close()
    server.close()


async def test_long_paths_connect(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    here = os.open(folder, os.O_PATH)
    listener.bind(f"/proc/self/fd/{here}/qmp.sock")
    os.close(here)
    listener.listen(1)
    server = await asyncio.start_unix_server(answer_everything, sock=listener)
    qmp = await Qmp.connect(folder / "qmp.sock")
    assert await qmp.execute("x") == "x"
    qmp.close()
    server.close()


async def test_refusal_is_the_first_one_and_carries_qemus_words(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        while line := await reader.readline():
            request = json.loads(line)
            answer: dict[str, object] = {"id": request["id"]}
            if request["execute"].startswith("bad"):
                answer["error"] = {"class": "GenericError", "desc": f"no {request['execute']}"}
            else:
                answer["return"] = {}
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q")
    with pytest.raises(QmpError, match="QEMU refused bad1: no bad1") as caught:
        await qmp.run(command("good"), command("bad1"), command("bad2"))
    assert caught.value.kind == "GenericError"
    assert await qmp.execute("good") == {}
    qmp.close()
    server.close()


async def test_events_reach_the_callback_and_answers_keep_their_order(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        requests = [json.loads(await reader.readline()) for _ in range(3)]
        for request in reversed(requests):
            writer.write(b'{"event": "STOP", "timestamp": {}}\n')
            writer.write(json.dumps({"return": request["execute"], "id": request["id"]}).encode() + b"\n")
        await reader.read()
        writer.close()

    events: list[object] = []
    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q", lambda event: events.append(event["event"]))
    assert await qmp.run(command("a"), command("b")) == ["a", "b"]
    assert events == ["STOP"] * 3
    qmp.close()
    server.close()


async def test_descriptors_travel_beside_the_command(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "q"))
    listener.listen(1)
    qmp = await Qmp.connect(tmp_path / "q")
    peer, _ = listener.accept()
    given = tmp_path / "given"
    given.write_bytes(b"it is this file")
    fd = os.open(given, os.O_RDONLY)
    asking = asyncio.ensure_future(qmp.run(command("getfd", fdname="state"), fds=[fd]))
    await asyncio.sleep(0)
    octets, ancillary, _, _ = await asyncio.to_thread(peer.recvmsg, 65_536, 1024)
    received = array.array("i", ancillary[0][2])
    assert os.pread(received[0], 100, 0) == b"it is this file"
    lines = [json.loads(line) for line in octets.splitlines()]
    assert lines[1]["arguments"] == {"fdname": "state"}
    peer.sendall(GREETING + b"".join(json.dumps({"return": {}, "id": line["id"]}).encode() + b"\n" for line in lines))
    assert await asking == [{}]
    for number in (fd, *received):
        os.close(number)
    peer.close()
    listener.close()
    qmp.close()


async def test_silence_ends_in_a_timeout_and_closes(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q")
    with pytest.raises(VmmTimeout, match="did not answer qmp_capabilities, stop within"):
        await qmp.run(command("stop"), within=0.05)
    with pytest.raises(VmmDied):
        await qmp.run(command("stop"))
    server.close()


async def test_the_peers_end_fails_what_is_in_flight(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q")
    with pytest.raises(VmmDied):
        await qmp.run(command("stop"))
    assert qmp.closed
    server.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(VmmDied, match="Nobody listens"):
        await Qmp.connect(tmp_path / "absent")


@pytest.mark.parametrize(
    "octets",
    [
        b"x" * (MAX_LINE + 100_000),
        b"this is no JSON\n",
        b"[1, 2]\n",
        b"[" * 900_000 + b"\n",
        b'{"event": "\xff\xfe"}\n',
    ],
    ids=["endless line", "no json", "no object", "deep", "no utf-8"],
)
async def test_a_hostile_peer_is_closed(tmp_path: Path, octets: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qmp_module, "FLOOD_SECONDS", 0.01)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(octets)
        await reader.read()
        writer.close()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q")
    with pytest.raises(VmmDied):
        await qmp.run(command("stop"), within=10)
    server.close()


async def test_strange_answers_are_dropped(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"return": 1}\n{"return": 1, "id": 99}\n{"return": 1, "id": "x"}\n{"return": 1, "id": [1]}\n\n')
        writer.write(b'{"QMP": 5}\n')
        await reader.readline()
        line = json.loads(await reader.readline())
        for value in ("first", "second"):
            writer.write(json.dumps({"return": value, "id": line["id"]}).encode() + b"\n")
            writer.write(json.dumps({"return": {}, "id": line["id"] - 1}).encode() + b"\n")
        await reader.read()
        writer.close()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q")
    assert await qmp.execute("stop") == "first"
    qmp.close()
    server.close()


async def test_a_flood_of_events_is_read_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qmp_module, "FLOOD_OCTETS", 100_000)
    monkeypatch.setattr(qmp_module, "FLOOD_SECONDS", 3600.0)
    event = b'{"event": "NOISE", "data": {}}\n'
    seen = 0

    def count(_: object) -> None:
        nonlocal seen
        seen += 1

    flooded = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=1)
        writer.write(event * 200_000)
        flooded.set()
        await reader.read()
        writer.transport.abort()

    server = await serving(tmp_path / "q", script)
    qmp = await Qmp.connect(tmp_path / "q", count)
    await flooded.wait()
    with pytest.raises(VmmTimeout):
        await qmp.run(command("stop"), within=0.3)
    # One more read of 64 KiB after the bound, and no further for the window.
    assert 100_000 // len(event) - 1 <= seen <= 170_000 // len(event)
    server.close()
