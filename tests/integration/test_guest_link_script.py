"""The link against guests that a test plays by hand: every handshake, loss, lie and silence."""

import asyncio
import errno
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from guest_script import WITHIN, GuestEnd, Recorder, ScriptedGuest

from hatchway.node.guest import peer, requests
from hatchway.node.guest.link import Link, connect
from hatchway.node.guest.processes import MAX_PROC_FRAMES, OUTPUT_WINDOW
from hatchway.node.guest.seam import GuestError, LinkLost, Setup, Spawn
from hatchway.wire import channel
from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Fields, Tag, encode_fields


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[ScriptedGuest]:
    async with ScriptedGuest(tmp_path / "agent.sock") as guest:
        yield guest


def _spawn(number: int = 1, *, stdin: bool = True) -> Spawn:
    return Spawn(number=number, key=f"k{number}", argv=["cat"], env={}, stdin=stdin)


async def _spawned(link: Link, end: GuestEnd, number: int = 1, sink: Recorder | None = None) -> Recorder:
    """Starts a process that the scripted guest says is running, with credit for its stdin."""
    sink = sink or Recorder()
    starting = asyncio.create_task(link.spawn(_spawn(number), sink))
    request, fields = await end.expect(FrameType.SPAWN)
    assert fields.number(Tag.SIZE) == number
    stream, credit = await end.expect(FrameType.OUTPUT_ACK)
    assert (stream, credit.number(Tag.LIMIT)) == (number, OUTPUT_WINDOW)
    end.answer(request, (Tag.PID, 7))
    end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, 0), (Tag.LIMIT, 65536))
    assert await starting == 7
    return sink


# -- the handshake


async def test_greeting_and_setup_are_one_round_trip(guest: ScriptedGuest) -> None:
    setup = Setup(time_ns=10**18, entropy=b"e" * 32, hostname="box", machine_id="0" * 32, env={"A": "1"})
    dialling = asyncio.create_task(guest.connect(fresh=True, setup=setup))
    end = await guest.accept()
    _, hello = await end.expect(FrameType.HELLO)
    request, fields = await end.expect(FrameType.SETUP)
    assert end.zeros == 0
    assert 10**18 <= fields.number(Tag.TIME_NS) < 10**18 + 10**10
    assert (fields.get_text(Tag.HOSTNAME), fields.all(Tag.ENV)) == ("box", ("A=1",))
    end.acknowledge(hello)
    end.send(FrameType.READY, 0)
    end.answer(request)
    link = await dialling
    assert (link.hello.boot_id, link.hello.agent, link.hello.uptime_ns) == ("boot-1", "script", 5)


async def test_a_guest_that_is_not_fresh_gets_zeros_first(guest: ScriptedGuest) -> None:
    async with guest.linked() as (_, end):
        assert end.zeros == channel.MAX_FRAME


async def test_a_fresh_guest_that_does_not_answer_gets_zeros_and_everything_again(guest: ScriptedGuest) -> None:
    dialling = asyncio.create_task(guest.connect(fresh=True, setup=Setup(hostname="box")))
    end = await guest.accept()
    _, first = await end.expect(FrameType.HELLO)
    await end.expect(FrameType.SETUP)
    async with asyncio.timeout(WITHIN):
        assert await end.reader.readexactly(channel.MAX_FRAME) == channel.RESYNC
    _, second = await end.expect(FrameType.HELLO)
    request, _ = await end.expect(FrameType.SETUP)
    assert first.get_octets(Tag.NONCE) != second.get_octets(Tag.NONCE)
    end.acknowledge(first)  # too late: only the last nonce counts
    end.send(FrameType.READY, 0)
    end.answer(request)
    end.acknowledge(second)
    end.send(FrameType.READY, 0)
    end.answer(request)
    await dialling


async def test_octets_wait_in_the_socket_until_the_vmm_runs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen(1)
        dialling = asyncio.create_task(connect(tmp_path / "agent.sock", fresh=True, vm_ended=asyncio.Event()))
        listener.settimeout(WITHIN)
        accepted, _ = await asyncio.to_thread(listener.accept)
        end = GuestEnd(*await asyncio.open_unix_connection(sock=accepted))
        await end.greet()
        link = await dialling
        await link.close()
        await end.hung_up()
        end.close()


async def test_a_path_longer_than_a_socket_address(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30) / ("deeper" * 20)
    folder.mkdir(parents=True)
    async with ScriptedGuest(tmp_path / "s") as guest:
        (tmp_path / "s").rename(folder / "agent.sock")
        assert len(str(folder)) > 200
        dialling = asyncio.create_task(guest.connect(path=folder / "agent.sock"))
        await (await guest.accept()).greet()
        await dialling


async def test_stale_octets_before_the_answer_do_not_matter(guest: ScriptedGuest) -> None:
    dialling = asyncio.create_task(guest.connect())
    old = channel.encode_output(9, 1, 0, b"from before" * 5000)
    fake = channel.encode_frame(
        FrameType.HELLO_ACK, 0, encode_fields([(Tag.VERSION, 1), (Tag.NONCE, b"n" * 16), (Tag.EPOCH, 1)])
    )
    await (await guest.accept()).greet(before=old + fake + old[:1000])
    assert (await dialling).hello.processes == ()


async def test_another_version_is_said_and_final(guest: ScriptedGuest) -> None:
    dialling = asyncio.create_task(guest.connect())
    end = await guest.accept()
    _, hello = await end.expect(FrameType.HELLO)
    end.acknowledge(hello, version=2)
    with pytest.raises(LinkLost, match="speaks version 2, this node version 1"):
        await dialling


async def test_a_silent_guest_is_given_up_within_the_bound(guest: ScriptedGuest) -> None:
    with pytest.raises(LinkLost, match=r"did not answer within 0\.3 s"):
        await guest.connect(within=0.3)
    await (await guest.accept()).hung_up()


async def test_no_socket_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(LinkLost, match="No such file"):
        await connect(tmp_path / "none.sock", fresh=True, vm_ended=asyncio.Event(), within=0.3)


async def test_the_end_of_the_vm_ends_the_wait(guest: ScriptedGuest) -> None:
    dialling = asyncio.create_task(guest.connect())
    await guest.accept()
    guest.vm_ended.set()
    with pytest.raises(LinkLost, match="the virtual machine ended"):
        await dialling


async def test_a_refused_setup_is_an_error(guest: ScriptedGuest) -> None:
    dialling = asyncio.create_task(guest.connect(setup=Setup(hostname="x")))
    end = await guest.accept()
    await end.greet()
    request, _ = await end.expect(FrameType.SETUP)
    end.answer(request, (Tag.MESSAGE, "no such name"), status=errno.EINVAL)
    with pytest.raises(GuestError, match="no such name") as caught:
        await dialling
    assert caught.value.errno == errno.EINVAL


async def test_a_setup_that_cannot_be_said_is_the_callers_mistake(guest: ScriptedGuest) -> None:
    with pytest.raises(ValueError, match="MACHINE_ID"):
        await guest.connect(setup=Setup(machine_id="short"))


# -- requests


async def test_answers_come_in_any_order(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        first, second = asyncio.create_task(link.ping()), asyncio.create_task(link.resize_disk(1024))
        one, _ = await end.expect(FrameType.PING)
        two, _ = await end.expect(FrameType.RESIZE_DISK)
        end.answer(two, (Tag.SIZE, 99))
        assert await second == 99
        end.answer(one, (Tag.TIME_NS, 5), (Tag.UPTIME_NS, 1))
        assert await first == 5


async def test_no_more_than_32_requests_are_out_at_once(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        tasks = [asyncio.create_task(link.sync()) for _ in range(40)]
        ids = [(await end.expect(FrameType.SYNC))[0] for _ in range(32)]
        for answered, number in enumerate(ids, start=1):
            end.answer(number)
            if answered <= 8:
                ids.append((await end.expect(FrameType.SYNC))[0])
        assert len(set(ids)) == 40
        await asyncio.gather(*tasks)


async def test_too_many_waiting_requests_are_refused(guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_WAITING", 3)
    async with guest.linked() as (link, _):
        tasks = [asyncio.create_task(link.sync()) for _ in range(35)]
        await asyncio.sleep(0)
        with pytest.raises(GuestError) as caught:
            await link.sync()
        assert caught.value.errno == errno.EAGAIN
        await link.close()
        assert all(isinstance(e, LinkLost) for e in await asyncio.gather(*tasks, return_exceptions=True))


async def test_unanswered_requests_are_sent_again_on_the_next_connection_with_a_clock_that_went_on(
    guest: ScriptedGuest,
) -> None:
    async with guest.linked() as (link, end):
        began = time.monotonic_ns()
        setting = asyncio.create_task(link.setup(time_ns=1000))
        syncing = asyncio.create_task(link.sync())
        first, one = await end.expect(FrameType.SETUP)
        second, _ = await end.expect(FrameType.SYNC)
        end.close()
        end = await guest.accept()
        await end.greet()
        assert end.zeros == channel.MAX_FRAME
        again, two = await end.expect(FrameType.SETUP)
        assert again == first
        assert one.number(Tag.TIME_NS) < two.number(Tag.TIME_NS) <= 1000 + time.monotonic_ns() - began
        assert (await end.expect(FrameType.SYNC))[0] == second
        end.answer(second)
        end.answer(first)
        end.answer(first)  # an answer from before the HELLO may come late: it is ignored
        await asyncio.gather(setting, syncing)


async def test_an_agent_that_goes_silent_is_probed_then_dialled_anew(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "TICK_S", 0.02)
    async with guest.linked() as (link, end):
        syncing = asyncio.create_task(link.sync())
        await end.expect(FrameType.SYNC)
        await end.expect(FrameType.PING)
        await end.hung_up()
        end = await guest.accept()
        await end.greet()
        number, _ = await end.expect(FrameType.SYNC)
        end.answer(number)
        await syncing


async def test_an_agent_that_answers_probes_may_take_its_time_and_one_that_stands_still_too(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "TICK_S", 0.01)
    async with guest.linked() as (link, end):
        syncing = asyncio.create_task(link.sync())
        number, _ = await end.expect(FrameType.SYNC)
        for _ in range(5):
            probe, _ = await end.expect(FrameType.PING)
            end.answer(probe)
        link.paused(True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(peer.SILENT_FOR * 0.01 * 3):
                await end.reader.read(1)
        link.paused(False)
        await end.expect(FrameType.PING)
        end.answer(number)
        await syncing


async def test_a_request_that_is_never_answered_fails_within_its_bound(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "TICK_S", 0.01)
    monkeypatch.setattr(peer, "REQUEST_WITHIN", 5)
    async with guest.linked() as (link, _):
        with pytest.raises(LinkLost, match="did not answer to SYNC within 5 s"):
            await link.sync()


async def test_a_guest_that_boots_for_longer_than_a_request_may_take_is_waited_for(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "TICK_S", 0.02)
    monkeypatch.setattr(peer, "REQUEST_WITHIN", 2)
    dialling = asyncio.create_task(guest.connect(setup=Setup(hostname="box")))
    await (await guest.accept()).hung_up()
    end = await guest.accept()
    await end.greet()
    number, _ = await end.expect(FrameType.SETUP)
    end.answer(number)
    await dialling


async def test_an_idle_link_has_no_timer_and_sends_nothing(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "TICK_S", 0.01)
    async with guest.linked() as (link, end):
        await _spawned(link, end)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await end.read()
        assert link._peer._tick_timer is None


async def test_the_end_of_the_vm_fails_what_waits_but_is_what_a_shutdown_wants(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        syncing, ending = asyncio.create_task(link.sync()), asyncio.create_task(link.shutdown())
        feeding = asyncio.create_task(link.send_input(1, 0, b"x"))
        await end.expect(FrameType.SYNC)
        await end.expect(FrameType.SHUTDOWN)
        guest.vm_ended.set()
        await ending
        for task in (syncing, feeding):
            with pytest.raises(LinkLost, match="the virtual machine ended"):
                await task
        assert sink.lost == "the virtual machine ended"
        with pytest.raises(LinkLost):
            await link.ping()


# -- processes


async def test_output_is_stored_and_acknowledged(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        end.output(1, 0, b"hello ")
        end.output(1, 0, b"oops", descriptor=2)
        end.output(1, 6, b"world")
        await sink.until(lambda: len(sink.out) == 11)
        assert (sink.out, sink.err) == (b"hello world", b"oops")
        _, ack = await end.expect(FrameType.OUTPUT_ACK)
        while ack.number(Tag.STDOUT_ACK) < 11:
            _, ack = await end.expect(FrameType.OUTPUT_ACK)
        assert ack.number(Tag.STDERR_ACK) == 4


async def test_a_resynchronised_process_goes_on_where_its_sink_is(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        end.output(1, 0, b"hello ")
        await sink.until(lambda: len(sink.out) == 6)
        end.close()
        end = await guest.accept()
        await end.greet((1, "k1"))
        _, ack = await end.expect(FrameType.OUTPUT_ACK)
        assert (ack.number(Tag.STDOUT_ACK), ack.number(Tag.STDERR_ACK)) == (6, 0)
        end.output(1, 6, b"world")
        end.proc(1, "k1", state=3, out=11)
        assert (await sink.end()).exit_code == 0
        assert sink.out == b"hello world"
        guest.vm_ended.set()
        with pytest.raises(LinkLost):
            await link.ping()
        assert sink.lost is None, "nothing was left to come"


async def test_a_gap_is_told_only_at_the_beginning_of_a_connection(guest: ScriptedGuest) -> None:
    async with guest.linked((4, "old")) as (link, end):
        sink = Recorder(stdout=10)
        assert link.attach(4, sink)
        assert sink.states[0].key == "old"
        await end.expect(FrameType.OUTPUT_ACK)
        end.output(4, 5_000_000, b"later")
        await sink.until(lambda: sink.gaps == [(1, 10, 5_000_000)])
        end.output(4, 5_000_006, b"!")
        await end.hung_up()


async def test_processes_that_the_agent_lost_are_gone(guest: ScriptedGuest) -> None:
    async with guest.linked((4, "a"), (5, "b"), (6, "c")) as (link, end):
        sinks = [Recorder(), Recorder(), Recorder()]
        for number, sink in zip((4, 5, 6), sinks, strict=True):
            assert link.attach(number, sink)
        assert not link.attach(7, Recorder())
        end.close()
        end = await guest.accept()
        await end.greet((5, "b"), (6, "of another"))
        await sinks[0].until(lambda: sinks[0].lost is not None)
        await sinks[2].until(lambda: sinks[2].lost is not None)
        assert sinks[1].lost is None
        end.close()
        await (await guest.accept()).greet((5, "b"), boot="boot-2")
        await sinks[1].until(lambda: sinks[1].lost == "the guest was started anew")


async def test_a_spawn_that_was_cut_off_is_sent_again_and_its_sink_is_not_told_that_it_is_gone(
    guest: ScriptedGuest,
) -> None:
    async with guest.linked() as (link, end):
        sink = Recorder()
        starting = asyncio.create_task(link.spawn(_spawn(), sink))
        request, _ = await end.expect(FrameType.SPAWN)
        end.close()
        end = await guest.accept()
        await end.greet()
        again, _ = await end.expect(FrameType.SPAWN)
        assert again == request
        await end.expect(FrameType.OUTPUT_ACK)
        end.answer(request, (Tag.PID, 8))
        assert await starting == 8
        assert sink.lost is None


async def test_a_spawn_that_is_refused_leaves_nothing(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        starting = asyncio.create_task(link.spawn(_spawn(), Recorder()))
        request, _ = await end.expect(FrameType.SPAWN)
        end.answer(request, (Tag.MESSAGE, "full"), status=errno.EAGAIN)
        with pytest.raises(GuestError, match="full"):
            await starting
        with pytest.raises(GuestError) as caught:
            await link.send_input(1, 0, b"x")
        assert caught.value.errno == errno.ESRCH


async def test_a_failed_exec_is_a_process_without_a_pid(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = Recorder()
        starting = asyncio.create_task(link.spawn(_spawn(), sink))
        request, _ = await end.expect(FrameType.SPAWN)
        end.answer(request)
        end.send(
            FrameType.PROC, 1, (Tag.KEY, "k1"), (Tag.STATE, 3), (Tag.REASON, 5), (Tag.MESSAGE, "cat: no such file")
        )
        assert await starting is None
        assert (await sink.end()).message == "cat: no such file"


async def test_closing_a_process_that_the_agent_forgot_succeeds(guest: ScriptedGuest) -> None:
    async with guest.linked((4, "a")) as (link, end):
        sink = Recorder()
        link.attach(4, sink)
        await end.expect(FrameType.OUTPUT_ACK)
        closing = asyncio.create_task(link.close_process(4))
        request, _ = await end.expect(FrameType.CLOSE)
        end.answer(request, status=errno.ESRCH)
        await closing
        end.proc(4, "a", state=2)  # may still come: nobody hears it
        signalling = asyncio.create_task(link.signal(4, signal.SIGTERM))
        request, fields = await end.expect(FrameType.SIGNAL)
        assert (fields.number(Tag.SIGNAL), fields.number(Tag.SCOPE)) == (signal.SIGTERM, 0)
        end.answer(request, status=errno.ESRCH)
        with pytest.raises(GuestError):
            await signalling
        assert len(sink.states) == 1


# -- stdin


async def test_stdin_keeps_to_its_credit_and_is_resent_from_what_was_taken(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        await _spawned(link, end)
        octets = bytes(range(256)) * 400
        feeding = asyncio.create_task(link.send_input(1, 0, octets, eof=True))
        got = bytearray()
        while len(got) < 65536:
            kind, _, payload, _ = await end.read()
            assert kind == FrameType.INPUT
            flags, offset, data = channel.decode_data(memoryview(payload))
            assert (flags, offset) == (0, len(got))
            got += data
        assert len(got) == 65536
        end.send(FrameType.INPUT_ACK, 1, (Tag.STDIN_OFFSET, 1000), (Tag.LIMIT, 65536))
        _, _, payload, _ = await end.read()
        assert channel.decode_data(memoryview(payload)).offset == 65536
        end.close()
        end = await guest.accept()
        await end.greet((1, "k1"))
        await end.expect(FrameType.OUTPUT_ACK)
        end.send(FrameType.INPUT_ACK, 1, (Tag.STDIN_OFFSET, 1000), (Tag.LIMIT, 200_000))
        del got[1000:]
        flags = 0
        while not flags:
            _, _, payload, _ = await end.read()
            flags, offset, data = channel.decode_data(memoryview(payload))
            assert offset == len(got)
            got += data
        assert got == octets
        assert not feeding.done()
        end.send(FrameType.INPUT_ACK, 1, (Tag.STDIN_OFFSET, len(octets)), (Tag.LIMIT, 65536))
        assert await feeding == len(octets)


async def test_an_end_of_file_alone_is_confirmed_and_said_again_after_a_loss(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        await _spawned(link, end)
        ending = asyncio.create_task(link.send_input(1, 0, b"", eof=True))
        for attempt in range(2):
            kind, _, payload, _ = await end.read()
            assert kind == FrameType.INPUT
            assert channel.decode_data(memoryview(payload))[:2] == (1, 0)
            request, _ = await end.expect(FrameType.PING)
            if attempt == 0:
                end.close()
                end = await guest.accept()
                await end.greet((1, "k1"))
                await end.expect(FrameType.OUTPUT_ACK)
        end.answer(request, (Tag.TIME_NS, 1))
        assert await ending == 0


async def test_stdin_that_cannot_be_given_is_refused(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        await _spawned(link, end)
        with pytest.raises(GuestError, match="goes on at 0, not at 5") as caught:
            await link.send_input(1, 5, b"x")
        assert caught.value.errno == errno.EINVAL
        starting = asyncio.create_task(link.spawn(_spawn(2, stdin=False), Recorder()))
        request, _ = await end.expect(FrameType.SPAWN)
        end.answer(request, (Tag.PID, 9))
        await starting
        with pytest.raises(GuestError) as caught:
            await link.send_input(2, 0, b"x")
        assert caught.value.errno == errno.EBADF


async def test_a_closed_process_takes_stdin_no_more(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        await _spawned(link, end)
        feeding = asyncio.create_task(link.send_input(1, 0, bytes(100_000)))
        await end.read()
        end.proc(1, "k1", state=3)
        assert await feeding == 100_000


# -- lies


def _raw(*pieces: bytes) -> Callable[[GuestEnd], None]:
    return lambda end: end.writer.write(b"".join(pieces))


def _repeat(count: int, action: Callable[[GuestEnd], None]) -> Callable[[GuestEnd], None]:
    def do(end: GuestEnd) -> None:
        for _ in range(count):
            action(end)

    return do


def _then(*actions: Callable[[GuestEnd], None]) -> Callable[[GuestEnd], None]:
    def do(end: GuestEnd) -> None:
        for action in actions:
            action(end)

    return do


LIES: dict[str, Callable[[GuestEnd], None]] = {
    "noise": _raw(b"\x7fELF" * 20),
    "bad trailer": _raw(channel.encode_output(1, 1, 0, b"x")[:-1] + b"\0"),
    "reserved flags": lambda end: end.send(FrameType.PROC, 1, flags=4),
    "a host's frame": lambda end: end.send(FrameType.SPAWN, 1),
    "a second READY": lambda end: end.send(FrameType.READY, 0),
    "output of nobody": lambda end: end.output(99, 0, b"x"),
    "output of an uncredited process": lambda end: end.output(4, 0, b"x"),
    "empty output": lambda end: end.output(1, 0, b""),
    "output on stdin": lambda end: end.output(1, 0, b"x", descriptor=0),
    "output without header": lambda end: end.send(FrameType.OUTPUT, 1),
    "output that goes back": _then(lambda end: end.output(1, 0, b"abc"), lambda end: end.output(1, 1, b"x")),
    "output that jumps": _then(lambda end: end.output(1, 0, b"abc"), lambda end: end.output(1, 9, b"x")),
    "output beyond all measure": lambda end: end.output(1, 2**63, b"x"),
    "output beyond the total": _then(
        lambda end: end.output(1, 0, b"abc"),
        lambda end: end.proc(1, "k1", state=3, out=3),
        lambda end: end.output(1, 3, b"x"),
    ),
    "a total below what came": _then(lambda end: end.output(1, 0, b"abc"), lambda end: end.proc(1, "k1", out=2)),
    "a total that goes back": _then(lambda end: end.proc(1, "k1", out=9), lambda end: end.proc(1, "k1", out=8)),
    "a state that goes back": _then(lambda end: end.proc(1, "k1", state=2), lambda end: end.proc(1, "k1", state=1)),
    "another key": lambda end: end.proc(1, "k2"),
    "an unknown state": lambda end: end.proc(1, "k1", state=9),
    "stdin that was never sent": lambda end: end.proc(1, "k1", stdin=5),
    "an ack for stdin that was never sent": lambda end: end.send(
        FrameType.INPUT_ACK, 1, (Tag.STDIN_OFFSET, 5), (Tag.LIMIT, 1)
    ),
    "a flood of states": _repeat(MAX_PROC_FRAMES + 1, lambda end: end.proc(1, "k1")),
    "a flood of answers to nothing": _repeat(peer.STRAYS + 1, lambda end: end.answer(77)),
    "a flood of states of nobody": _repeat(peer.STRAYS + 1, lambda end: end.proc(500, "x")),
    "an answer without a status": lambda end: end.send(FrameType.RESPONSE, 1),
    "broken fields": _raw(channel.encode_frame(FrameType.PROC, 1, b"\1\0\xff\xff\xff\xff")),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_guest_that_lies_is_hung_up_on_and_may_begin_again(
    guest: ScriptedGuest, lie: Callable[[GuestEnd], None]
) -> None:
    async with guest.linked((4, "old")) as (link, end):
        sink = await _spawned(link, end)
        lie(end)
        await end.hung_up()
        end = await guest.accept()
        await end.greet((1, "k1"), state=3, out=9)
        pinging = asyncio.create_task(link.ping())
        kind = 0
        while kind != FrameType.PING:
            kind, request, _, _ = await end.read()
        end.answer(request, (Tag.TIME_NS, 1))
        await pinging
        assert sink.lost is None


async def test_output_beyond_the_credit_is_a_lie(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        # Not acknowledged in between: the loop never gets to it while it parses one batch after the other.
        data = bytes(channel.MAX_DATA)
        sink.stored = lambda: (0, 0)  # type: ignore[method-assign] # a disk that does not take it
        for count in range(OUTPUT_WINDOW // len(data) + 1):
            end.output(1, count * len(data), data)
        await end.hung_up()
        assert len(sink.out) <= OUTPUT_WINDOW


async def _refuse_ready(end: GuestEnd, hello: Fields) -> None:
    end.acknowledge(hello)
    end.output(1, 0, b"x")


async def _list_twice(end: GuestEnd, hello: Fields) -> None:
    end.acknowledge(hello)
    end.proc(3)
    end.proc(3)


async def _list_without_end(end: GuestEnd, hello: Fields) -> None:
    end.acknowledge(hello)
    for number in range(1, channel.MAX_LISTED + 2):
        end.proc(number, f"k{number}")


async def _wrong_epoch(end: GuestEnd, hello: Fields) -> None:
    end.acknowledge(hello, epoch=99)


async def _noise_without_end(end: GuestEnd, hello: Fields) -> None:
    for _ in range(100):
        end.writer.write(b"\xaa" * 65536)


@pytest.mark.parametrize(
    "answer",
    [_refuse_ready, _list_twice, _list_without_end, _wrong_epoch, _noise_without_end],
    ids=lambda f: f.__name__,
)
async def test_a_guest_that_never_keeps_to_the_handshake_is_given_up(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch, answer: Callable[[GuestEnd, Fields], Awaitable[None]]
) -> None:
    monkeypatch.setattr(peer, "STRIKES", 3)
    dialling = asyncio.create_task(guest.connect())
    for _ in range(3):
        end = await guest.accept()
        _, hello = await end.expect(FrameType.HELLO)
        await answer(end, hello)
        await end.hung_up()
    with pytest.raises(LinkLost, match="breaks the protocol"):
        await dialling


async def test_a_guest_that_lies_for_ever_loses_its_processes(
    guest: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "STRIKES", 2)
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        end.writer.write(b"noise" * 9)
        end = await guest.accept()
        await end.greet((1, "k1"))
        end.writer.write(b"noise" * 9)
        await sink.until(lambda: sink.lost is not None)
        with pytest.raises(LinkLost, match="breaks the protocol"):
            await link.ping()


async def test_a_flood_of_tiny_frames_is_read_slowly_and_the_loop_stays_free(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        count = 20_000
        end.writer.write(b"".join(channel.encode_output(1, 1, offset, b"x") for offset in range(count)))
        began = time.monotonic()
        longest = 0.0
        while len(sink.out) < count:
            before = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - before)
            assert time.monotonic() - began < WITHIN
        assert time.monotonic() - began > 0.1, "more than one window's frames came in no time"


async def test_a_guest_that_does_not_read_makes_nothing_grow(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)
        end.send(FrameType.INPUT_ACK, 1, (Tag.STDIN_OFFSET, 0), (Tag.LIMIT, 2**64 - 1))
        feeding = asyncio.create_task(link.send_input(1, 0, bytes(32 * 1024 * 1024)))
        end.output(1, 0, b"still heard")
        await sink.until(lambda: sink.out == b"still heard")
        transport = link._peer._connection and link._peer._connection._transport
        assert transport is not None
        assert transport.get_write_buffer_size() <= 2 * 1024 * 1024
        feeding.cancel()


async def test_a_failing_sink_does_not_take_the_link_down(guest: ScriptedGuest) -> None:
    async with guest.linked() as (link, end):
        sink = await _spawned(link, end)

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "disk full")

        sink.output = fail  # type: ignore[method-assign] # the disk is full
        other = await _spawned(link, end, 2)
        end.output(1, 0, b"x")
        end.output(2, 0, b"y")
        await other.until(lambda: other.out == b"y")
        stream, _ = await end.expect(FrameType.OUTPUT_ACK)
        assert stream == 2
