"""The node's own streams with a guest that a test plays by hand: back-pressure, loss, what is left behind."""

import asyncio
import contextlib
import errno
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from guest_script import WITHIN, GuestEnd, ScriptedGuest

from hatchway.node.guest import peer, streams
from hatchway.node.guest.link import Link
from hatchway.node.guest.seam import GuestError, GuestMetrics, LinkLost, ProcessLimits, ProcessState, Spawn
from hatchway.node.guest.streams import AHEAD, WINDOW, Stream
from hatchway.wire import channel
from hatchway.wire.channel import FrameType, SpawnFlag
from hatchway.wire.channel_fields import Tag

PIECE = 32 * 1024


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[ScriptedGuest]:
    async with ScriptedGuest(tmp_path / "agent.sock") as guest:
        yield guest


async def _program(link: Link, end: GuestEnd, *, stdin: bool = False) -> tuple[Stream, int, str]:
    """Opens a builtin; returns the stream, its number and its key."""
    opening = asyncio.create_task(link.open_builtin(["files", "stat", b"path=/\xff"], user="user", stdin=stdin))
    request, fields = await end.expect(FrameType.SPAWN)
    number, key = fields.number(Tag.SIZE), fields.text(Tag.KEY, 64)
    assert number >= channel.FIRST_OWN_NUMBER
    assert fields.number(Tag.FLAGS) == SpawnFlag.BUILTIN | (SpawnFlag.STDIN if stdin else 0)
    assert fields.all(Tag.ARG) == (b"files", b"stat", b"path=/\xff")
    assert fields.get_text(Tag.USER) == "user"
    stream, credit = await end.expect(FrameType.OUTPUT_ACK)
    assert (stream, credit.number(Tag.LIMIT)) == (number, WINDOW)
    end.answer(request, (Tag.PID, 7))
    if stdin:
        end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, 0), (Tag.LIMIT, 65536))
    async with asyncio.timeout(WITHIN):
        return await opening, number, key


async def _connection(link: Link, end: GuestEnd, port: int = 80) -> tuple[Stream, int, str]:
    dialling = asyncio.create_task(link.dial(port))
    request, fields = await end.expect(FrameType.DIAL)
    number, key = fields.number(Tag.SIZE), fields.text(Tag.KEY, 64)
    assert (fields.number(Tag.PORT), fields.get_text(Tag.HOST)) == (port, None)
    end.answer(request)
    stream, credit = await end.expect(FrameType.OUTPUT_ACK)
    assert (stream, credit.number(Tag.LIMIT)) == (number, WINDOW)
    end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, 0), (Tag.LIMIT, 65536))
    async with asyncio.timeout(WITHIN):
        return await dialling, number, key


async def _until_ack(end: GuestEnd, number: int, stdout: int) -> None:
    """Reads acknowledgements until one is for so many octets; none may be for more."""
    while True:
        stream, fields = await end.expect(FrameType.OUTPUT_ACK)
        assert stream == number
        acknowledged = fields.number(Tag.STDOUT_ACK)
        assert acknowledged <= stdout
        if acknowledged == stdout:
            return


async def _closed(link: Link) -> None:
    async with asyncio.timeout(WITHIN):
        while link.streams:
            await asyncio.sleep(0)


async def test_a_builtin_gives_both_outputs_and_its_end(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, key = await _program(link, end)
        end.output(number, 0, b'{"ok":1}\n', 2)
        end.output(number, 0, b"data")
        end.proc(number, key, state=2, out=4, err=9)
        end.output(number, 4, b" more")  # what was in the pipe when the program ended
        end.proc(number, key, state=3, out=9, err=9)
        assert await stream.read() + await stream.read() == b"data more"
        assert await stream.read() == b""
        assert await stream.read_error() == b'{"ok":1}\n'
        assert await stream.read_error() == b""
        assert (await stream.wait()).state is ProcessState.CLOSED
        await stream.close()
        await stream.close()
        with pytest.raises(LinkLost):
            await stream.read()
        while True:
            kind, _, _, _ = await end.read()
            if kind == FrameType.CLOSE:
                break


async def test_only_what_was_read_is_acknowledged_and_one_output_does_not_hold_up_the_other(
    guest: ScriptedGuest,
) -> None:
    async with guest.linked() as (link, end):
        stream, number, _ = await _program(link, end)
        for offset in range(0, WINDOW, PIECE):
            end.output(number, offset, bytes(PIECE))
        end.output(number, 0, b"e" * 10, 2)
        assert await stream.read_error() == b"e" * 10
        _, fields = await end.expect(FrameType.OUTPUT_ACK)
        assert (fields.number(Tag.STDOUT_ACK), fields.number(Tag.STDERR_ACK)) == (0, 10)
        read = 0
        while read < WINDOW // 2:
            read += len(await stream.read())
        await _until_ack(end, number, read)


async def test_small_pieces_that_wait_take_no_more_memory_than_their_octets(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, _ = await _program(link, end)
        octets = random.Random(6).randbytes(6_000)
        for offset in range(0, len(octets), 2):
            end.output(number, offset, octets[offset : offset + 2])
        end.output(number, 0, b"e", 2)
        assert await stream.read_error() == b"e"
        pieces: list[bytes] = []
        while sum(map(len, pieces)) < len(octets):
            pieces.append(await stream.read())
        assert b"".join(pieces) == octets
        assert len(pieces) < 100
        _, fields = await end.expect(FrameType.OUTPUT_ACK)
        assert fields.number(Tag.STDOUT_ACK) == len(octets)


async def test_a_guest_that_sends_more_than_the_window_is_hung_up_on(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, _ = await _program(link, end)
        for offset in range(0, WINDOW + PIECE, PIECE):
            end.output(number, offset, bytes(PIECE))
        await end.hung_up()
        assert sum(map(len, stream._waiting[0])) <= WINDOW


async def test_a_stream_goes_on_after_a_reconnection_with_nothing_twice(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, key = await _program(link, end)
        end.output(number, 0, b"a" * 100)
        end.output(number, 100, b"b" * 100)
        assert await stream.read() == b"a" * 100
        while not stream._waiting[0]:
            await asyncio.sleep(0)
        end.close()
        end = await guest.accept()
        await end.greet((number, key), out=200)
        stream_id, fields = await end.expect(FrameType.OUTPUT_ACK)
        assert (stream_id, fields.number(Tag.STDOUT_ACK)) == (number, 100)
        end.output(number, 100, b"b" * 100 + b"c" * 50)
        assert await stream.read() == b"b" * 100
        assert await stream.read() == b"c" * 50


async def test_streams_of_an_earlier_node_are_closed_and_processes_are_not(guest: ScriptedGuest) -> None:
    left = channel.FIRST_OWN_NUMBER + 5
    async with guest.linked((3, "session"), (left, "node-of-before")) as (link, end):
        _, fields = await end.expect(FrameType.CLOSE)
        assert fields.number(Tag.SIZE) == left
        end.proc(left, "node-of-before", state=3)  # a late word of it changes nothing
        assert [process.number for process in link.hello.processes] == [3, left]
        assert set(link._peer.processes) == {3}


async def test_streams_end_when_the_guest_is_another_one(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, _, _ = await _program(link, end)
        reading = asyncio.create_task(stream.read())
        end.close()
        end = await guest.accept()
        await end.greet(boot="boot-2")
        with pytest.raises(LinkLost, match="started anew"):
            await asyncio.wait_for(reading, WITHIN)
        with pytest.raises(LinkLost):
            await stream.write(b"x")
        await stream.close()
        await end.expect(FrameType.CLOSE)


async def test_streams_end_when_the_vm_ends_and_closing_them_is_fine(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, _, _ = await _program(link, end)
        waiting = [asyncio.create_task(work) for work in (stream.read(), stream.read_error(), stream.wait())]
        await asyncio.sleep(0)
        guest.vm_ended.set()
        async with asyncio.timeout(WITHIN):
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, LinkLost) for result in results)
        await stream.close()
        await _closed(link)
        with pytest.raises(LinkLost):
            await link.dial(80)


async def test_closing_the_link_ends_its_streams(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, _, _ = await _program(link, end)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        await link.close()
        with pytest.raises(LinkLost):
            await asyncio.wait_for(reading, WITHIN)


async def test_a_connection_has_two_directions_that_end_apart(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, key = await _connection(link, end)
        end.output(number, 0, b"hello")
        end.proc(number, key, state=2, out=5)
        assert await stream.read() == b"hello"
        assert await stream.read() == b""
        writing = asyncio.create_task(stream.write(b"still here"))
        while (received := await end.read())[0] != FrameType.INPUT:
            pass
        assert received[2][16:] == b"still here"
        end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, 10), (Tag.LIMIT, 65536))
        await asyncio.wait_for(writing, WITHIN)
        await asyncio.wait_for(stream.write_eof(), WITHIN)
        received = await end.read()
        assert (received[0], received[2][0]) == (FrameType.INPUT, 1)
        end.proc(number, key, state=3, out=5, stdin=10)
        assert (await asyncio.wait_for(stream.wait(), WITHIN)).state is ProcessState.CLOSED
        with pytest.raises(GuestError) as refused:
            await stream.write(b"x")
        assert refused.value.errno == errno.EPIPE


async def test_nobody_takes_input_of_a_program_that_ended(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, key = await _program(link, end, stdin=True)
        end.proc(number, key, state=2)
        end.proc(number, key, state=3)
        await asyncio.wait_for(stream.wait(), WITHIN)
        with pytest.raises(GuestError) as refused:
            await stream.write(b"x")
        assert refused.value.errno == errno.EPIPE
        await stream.write_eof()


async def test_a_refused_dial_leaves_nothing(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        dialling = asyncio.create_task(link.dial(81, "::1"))
        request, fields = await end.expect(FrameType.DIAL)
        assert fields.get_text(Tag.HOST) == "::1"
        end.answer(request, (Tag.MESSAGE, "refused\x1b]0;x\x07\r\n"), status=errno.ECONNREFUSED)
        with pytest.raises(GuestError) as refused:
            await dialling
        assert refused.value.errno == errno.ECONNREFUSED
        assert str(refused.value).isprintable()
        assert str(refused.value).startswith("refused")
        assert not link.streams
        assert not link._peer.processes
        with pytest.raises(ValueError, match="port"):
            await link.dial(0)
        assert not link.streams


async def test_a_cancelled_dial_is_closed_once_its_answer_is_known(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        dialling = asyncio.create_task(link.dial(81))
        request, fields = await end.expect(FrameType.DIAL)
        dialling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dialling
        assert link.streams == 1
        end.answer(request)
        await end.expect(FrameType.OUTPUT_ACK)
        request, closed = await end.expect(FrameType.CLOSE)
        assert closed.number(Tag.SIZE) == fields.number(Tag.SIZE)
        end.answer(request)
        await _closed(link)
        assert not link._peer.processes


async def test_what_comes_between_close_and_its_answer_is_dropped(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        stream, number, key = await _program(link, end)
        await stream.close()
        request, _ = await end.expect(FrameType.CLOSE)
        end.output(number, 0, bytes(PIECE))
        end.proc(number, key, state=3, out=PIECE)
        end.answer(request)
        await _closed(link)
        assert not stream._waiting[0]
        assert not link._peer.processes


async def test_streams_of_a_sandbox_are_bounded(guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    async with guest.linked() as (link, end):
        first, _, _ = await _program(link, end)
        await _connection(link, end)
        with pytest.raises(GuestError) as refused:
            await link.dial(80)
        assert refused.value.errno == errno.EAGAIN
        await first.close()
        request, _ = await end.expect(FrameType.CLOSE)
        end.answer(request)
        while link.streams == 2:
            await asyncio.sleep(0)
        await _connection(link, end)


async def test_a_close_that_is_not_answered_is_made_good_when_the_link_comes_up(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "REQUEST_WITHIN", 1)
    monkeypatch.setattr(peer, "TICK_S", 0.01)
    monkeypatch.setattr(peer, "SILENT_FOR", 10_000)
    async with guest.linked() as (link, end):
        stream, number, key = await _program(link, end)
        await stream.close()
        await end.expect(FrameType.CLOSE)
        await _closed(link)
        end.close()
        end = await guest.accept()
        await end.greet((number, key))
        _, fields = await end.expect(FrameType.CLOSE)
        assert fields.number(Tag.SIZE) == number


async def test_limits_travel_with_a_spawn(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        limits = ProcessLimits(memory_bytes=1 << 20, cpu_ms=1500, nofile=64, pids=8, fsize_bytes=4096)
        spawning = asyncio.create_task(link.spawn(Spawn(1, "k", ["true"], {}, limits=limits), _Nothing()))
        request, fields = await end.expect(FrameType.SPAWN)
        tags = (Tag.LIMIT_MEMORY, Tag.LIMIT_CPU_MS, Tag.LIMIT_NOFILE, Tag.LIMIT_PIDS, Tag.LIMIT_FSIZE)
        assert [fields.get_number(tag) for tag in tags] == [1 << 20, 1500, 64, 8, 4096]
        end.answer(request, (Tag.PID, 7))
        await spawning


async def test_metrics_say_what_is_known(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        asking = asyncio.create_task(link.metrics())
        request, _ = await end.expect(FrameType.METRICS)
        end.answer(request, (Tag.CPUS, 2), (Tag.MEM_TOTAL_KIB, 1000), (Tag.LOAD1_MILLI, 250))
        assert await asking == GuestMetrics(cpus=2, memory_total_kib=1000, load1_milli=250)


async def _inputs(end: GuestEnd, upto: int, credit: int = 65_536) -> tuple[bytes, bool]:
    """Takes INPUT up to so many octets, giving credit as it comes; returns them, and whether the end came with them."""
    got = bytearray()
    ended = False
    while len(got) < upto:
        kind, number, payload, _ = await end.read()
        assert kind == FrameType.INPUT
        assert int.from_bytes(payload[8:16], "little") == len(got)
        got += payload[16:]
        ended = ended or bool(payload[0])
        end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, len(got)), (Tag.LIMIT, credit))
    return bytes(got), ended


async def test_writes_run_ahead_by_a_window_and_the_end_comes_behind_them(guest: ScriptedGuest) -> None:
    octets = random.Random(8).randbytes(3 * AHEAD)
    async with guest.linked() as (link, end):
        stream, _, _ = await _program(link, end, stdin=True)
        await asyncio.wait_for(stream.write(octets[:AHEAD]), WITHIN)  # nobody took anything yet
        writing = asyncio.create_task(stream.write(octets[AHEAD : 2 * AHEAD]))
        await asyncio.sleep(0)
        assert not writing.done()
        writing.cancel()  # what it was given is on its way all the same
        with contextlib.suppress(asyncio.CancelledError):
            await writing
        taking = asyncio.create_task(_inputs(end, len(octets)))
        await asyncio.wait_for(stream.write(octets[2 * AHEAD :]), WITHIN)
        await asyncio.wait_for(stream.write_eof(), WITHIN)
        got, ended = await taking
        if not ended:
            kind, _, payload, _ = await end.read()
            ended = (kind, payload[0], len(payload)) == (FrameType.INPUT, 1, 16)
        assert (got == octets, ended) == (True, True)
        with pytest.raises(GuestError) as refused:
            await stream.write(b"more")
        assert refused.value.errno == errno.EPIPE


async def test_what_was_written_and_not_taken_is_sent_again_after_a_reconnection(guest: ScriptedGuest) -> None:
    octets = random.Random(9).randbytes(100_000)
    async with guest.linked() as (link, end):
        stream, number, key = await _program(link, end, stdin=True)
        await stream.write(octets)
        ending = asyncio.create_task(stream.write_eof())
        kind, _, payload, _ = await end.read()
        assert (kind, len(payload) - 16) == (FrameType.INPUT, min(65_536, channel.MAX_DATA))
        end.close()
        end = await guest.accept()
        await end.greet((number, key))
        await end.expect(FrameType.OUTPUT_ACK)
        end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, 0), (Tag.LIMIT, 200_000))
        got, ended = await _inputs(end, len(octets))
        assert (got == octets, ended) == (True, True)
        await asyncio.wait_for(ending, WITHIN)


class _Nothing:
    def stored(self) -> tuple[int, int]:
        return 0, 0

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        pass

    def changed(self, proc: object) -> None:
        pass

    def gone(self, reason: str) -> None:
        pass
