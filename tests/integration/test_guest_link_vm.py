"""The link against the agent in a real VM: what virtio-serial loses when its host end hangs up, and a guest that stands still."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator

import pytest
from guest_script import WITHIN, Proxy, Recorder
from vmm_harness import Ground, Guest, Stand, standing

from hatchway.node.guest import peer
from hatchway.node.guest.link import connect
from hatchway.node.guest.seam import Spawn

pytestmark = [pytest.mark.vm, pytest.mark.skipif(os.geteuid() != 0, reason="jails and templates are made by root")]

_numbers = itertools.count(1000)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    top = tmp_path_factory.mktemp("link-ground")
    top.chmod(0o755)
    return Ground.prepare(top)


@pytest.fixture
async def stand(ground: Ground) -> AsyncIterator[Stand]:
    async with standing(ground, "qemu") as stand:
        yield stand


def _shell(script: str, *, stdin: bool = False) -> Spawn:
    number = next(_numbers)
    return Spawn(number=number, key=f"p{number}", argv=["/bin/sh", "-c", script], env={}, stdin=stdin)


async def _break_often(guest: Guest, stand: Stand, seed: int) -> None:
    chance = random.Random(seed)
    octets = chance.randbytes(1_500_000)
    cuts = itertools.chain((chance.randint(66_000, 900_000) for _ in range(10)), itertools.repeat(2**60))
    path = stand.folder / f"proxy-{seed}.sock"
    async with Proxy(path, guest.vm.agent_socket, cuts) as proxy:
        link = await connect(path, fresh=False, vm_ended=guest.vm.ended, within=WITHIN)
        try:
            sinks = [Recorder(), Recorder()]
            echo, count = _shell("exec cat", stdin=True), _shell("seq 1 100000; echo done >&2")
            await asyncio.gather(link.spawn(echo, sinks[0]), link.spawn(count, sinks[1]))
            assert await link.send_input(echo.number, 0, octets, eof=True) == len(octets)
            for sink in sinks:
                await sink.end()
            assert sinks[0].out == octets
            assert sinks[1].out == b"".join(b"%d\n" % n for n in range(1, 100_001))
            assert sinks[1].err == b"done\n"
            assert not any(sink.gaps or sink.lost for sink in sinks)
            assert proxy.lost >= 3
            for spawn in (echo, count):
                await link.close_process(spawn.number)
        finally:
            await link.close()


async def test_a_channel_that_breaks_often_loses_nothing(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "BACKOFF_S", (0.0,))
    guest = await stand.booted()
    await guest.link.close()
    for seed in range(3):
        await _break_often(guest, stand, seed)
    again = await stand.linked(guest.vm, fresh=False)
    assert again.link.hello.processes == ()
    assert await again.sh("echo well") == "well"


async def test_a_paused_guest_is_waited_for_and_goes_on(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = await stand.booted()
    monkeypatch.setattr(peer, "TICK_S", 0.02)
    sink, spawn = Recorder(), _shell("while :; do echo tick; sleep 0.05; done")
    await guest.link.spawn(spawn, sink)
    await sink.until(lambda: sink.out.count(b"tick") > 3)
    await guest.vm.pause()
    guest.link.paused(True)
    syncing = asyncio.create_task(guest.link.sync())
    done, _ = await asyncio.wait([syncing], timeout=peer.SILENT_FOR * 0.02 * 3)
    assert not done
    before = len(sink.out)
    await guest.vm.resume()
    guest.link.paused(False)
    await syncing
    await guest.link.setup(time_ns=time.time_ns())
    assert abs(await guest.link.ping() - time.time_ns()) < 5_000_000_000
    await sink.until(lambda: len(sink.out) > before + 15)
    assert not sink.gaps
    assert sink.lost is None


async def test_the_end_of_the_vm_is_told_to_every_sink(stand: Stand) -> None:
    guest = await stand.booted()
    sink, spawn = Recorder(), _shell("exec sleep 1000")
    await guest.link.spawn(spawn, sink)
    await guest.link.shutdown()
    await sink.until(lambda: sink.lost is not None or (bool(sink.states) and sink.states[-1].exit_signal is not None))
    async with asyncio.timeout(WITHIN):
        await guest.vm.ended.wait()
