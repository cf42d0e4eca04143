"""What `hatchway.node.vmm.seam` promises, held against every driver with real machines and the real agent in them."""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vmm_harness import DRIVERS, SHAPE, WITHIN_S, Ground, Stand, lack_of_guests, standing

from hatchway.domain.host_limits import HostLimits
from hatchway.domain.lifecycle import Cause, State
from hatchway.domain.shapes import Shape
from hatchway.node.endings import ended_by
from hatchway.node.guest.seam import LinkLost
from hatchway.node.vmm.seam import (
    Baked,
    ExitStatus,
    LaunchRefused,
    SnapshotMismatch,
    Taking,
    Vm,
    VmmDied,
    VmmError,
    WrongGeneration,
)

pytestmark = [pytest.mark.vm, pytest.mark.skipif(os.geteuid() != 0, reason="jails and templates are made by root")]


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    top = tmp_path_factory.mktemp("vmm-ground")
    top.chmod(0o755)
    return Ground.prepare(top)


@pytest.fixture(scope="session", params=sorted(DRIVERS))
def driver_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def guests(ground: Ground, driver_name: str) -> None:
    """For what is about a guest that runs; test_firecracker.py shows the rest where none does."""
    lack = asyncio.run(lack_of_guests(ground, driver_name))
    if lack is not None:
        pytest.skip(f"NOT SHOWN HERE: this promise with {driver_name} and a running guest. {lack}")


@pytest.fixture(scope="session")
def baked(ground: Ground, driver_name: str, guests: None) -> Baked:
    async def bake() -> Baked:
        async with standing(ground, driver_name) as stand:
            return await stand.bake(driver_name)

    return asyncio.run(bake())


@pytest.fixture
async def stand(ground: Ground, driver_name: str) -> AsyncIterator[Stand]:
    async with standing(ground, driver_name) as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "small", folder], check=True, timeout=20)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True, timeout=20)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- bounds of the host


async def test_a_vmm_beyond_its_memory_is_known_to_have_run_out_of_it(stand: Stand, baked: Baked) -> None:
    """Its share is so small here that the guest's memory alone exceeds the cgroup's bound."""
    stand.driver.overhead_mib = lambda shape: 96 - shape.memory_mib  # type: ignore[method-assign]
    guest = await stand.restored(baked)
    with contextlib.suppress(AssertionError, TimeoutError, LinkLost):
        await guest.sh("head -c 200M /dev/zero | tail", within=60.0)
    async with asyncio.timeout(WITHIN_S):
        await guest.vm.ended.wait()
    assert guest.vm.exit == ExitStatus(signal=9, out_of_memory=True)
    assert ended_by(guest.vm.exit)[:2] == (State.FAILED, Cause.OUT_OF_MEMORY)
    again = await stand.make_driver()
    with pytest.raises(VmmDied) as died:  # so does a node that finds it after a restart
        await again.adopt(guest.vm.spec)
    assert died.value.status == guest.vm.exit


async def test_a_disk_is_no_faster_than_its_bound(stand: Stand, baked: Baked) -> None:
    """Bursts of forty operations a second; the time is a bound from below, which a slow machine does not break."""
    stand.driver._limits = HostLimits(disk_ops_s=10)  # type: ignore[attr-defined]
    guest = await stand.restored(baked)
    began = time.monotonic()
    await guest.sh("dd if=/dev/zero of=/var/tmp/bounded bs=4k count=120 oflag=direct,sync")
    assert time.monotonic() - began > 2.0, "120 writes passed at more than sixty a second"


# -- starting


async def test_a_cold_boot_ends_with_an_agent_that_answers(stand: Stand, guests: None) -> None:
    guest = await stand.booted(stand.spec(shape=Shape(vcpus=2, memory_mib=384, disk_mib=640)))
    assert await guest.sh("nproc") == "2"
    total = int((await guest.sh("grep MemTotal /proc/meminfo")).split()[1])
    assert 300_000 < total < 384 * 1024
    disk = int(
        await guest.sh(
            "cat /sys/class/block/$(basename $(readlink -f /dev/disk/by-id/*upper 2>/dev/null || echo vdb))/size"
        )
    )
    assert disk == 640 * 2048
    info = await guest.vm.info()
    assert (info.status, info.isolation, info.exit) == ("running", stand.driver.isolation, None)
    assert info.vmm == f"{stand.driver.name} {stand.driver.version}"
    assert Path(f"/proc/{info.pid}").exists()
    assert b"hatchway" in await guest.vm.console()


async def test_the_vmm_has_no_privilege_and_sees_only_its_own_files(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    pid = (await guest.vm.info()).pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert int(re.search(r"^Uid:\t(\d+)", status, re.M)[1]) > 1_000_000_000  # type: ignore[index]
    assert re.search(r"^CapEff:\t0+$", status, re.M)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
    assert re.search(r"^Seccomp:\t2$", status, re.M)
    assert not Path(f"/proc/{pid}/root/etc").exists()
    writable = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        flags = int(re.search(r"flags:\t(\d+)", Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text())[1], 8)  # type: ignore[index]
        if flags & os.O_ACCMODE != os.O_RDONLY and os.path.isfile(fd):
            writable.add(Path(os.readlink(fd)).name)
    assert writable == {"upper.raw" if stand.driver.name == "firecracker" else "upper.qcow2"}


async def test_restored_machines_share_nothing_and_leave_the_bake_as_it_was(stand: Stand, baked: Baked) -> None:
    before = {path: digest(path) for path in baked.folder.iterdir()}
    guests = [await stand.restored(baked) for _ in range(3)]
    for number, guest in enumerate(guests):
        await guest.sh(f"echo {number} > /root/who; head -c 20000000 /dev/urandom > /dev/shm/noise; sync")
    for number, guest in enumerate(guests):
        assert await guest.sh("cat /root/who; ls /root") == f"{number}\nwho"
        await guest.sh(
            "rm /dev/shm/noise; echo 3 > /proc/sys/vm/drop_caches; sync; echo 1 > /proc/sys/vm/compact_memory"
        )
    late = await stand.restored(baked)
    assert await late.sh("ls /root; ls /dev/shm") == ""
    assert {path: digest(path) for path in baked.folder.iterdir()} == before


async def test_all_that_a_guest_sends_ends_at_the_sockets_of_its_slot(stand: Stand, baked: Baked) -> None:
    """A name and a page, asked for by a real client; nothing that a well-behaved guest sends is dropped.

    QEMU announces a restored machine in rounds, as if it had moved: by frames to everybody (`mac`), and by having the guest ask for its
    own address (`arp`). Without any round QEMU 7.2 crashes when the machine is powered off.
    """
    guest = await stand.restored(baked)
    vm = guest.vm.spec
    tcp, udp, dns = (socket.socket(fileno=fd) for fd in await stand.launcher.listeners(vm.sandbox_id, vm.generation))
    with tcp, udp, dns:
        asking = asyncio.create_task(guest.sh("curl -sS -4 http://name.example:8080/ 2>&1"))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WITHIN_S):
            question, peer = await loop.sock_recvfrom(udp, 512)
            assert question[12:].startswith(b"\x04name\x07example\x00\x00\x01\x00\x01")
            answer = question[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + question[12 : question.index(b"\0\0\1\0\1") + 5]
            answer += b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton("198.18.0.7")
            await loop.sock_sendto(udp, answer, peer)
            connection, (client, _) = await loop.sock_accept(tcp)
            with connection:
                assert (client, connection.getsockname()) == ("10.200.0.2", ("198.18.0.7", 8080))
                assert b"Host: name.example:8080\r\n" in await loop.sock_recv(connection, 4096)
                await loop.sock_sendall(connection, b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nhere")
                assert await asking == "here"
        refused_at_once = "curl -s -m 10 -o /dev/null 'http://[2001:db8::1]/'; echo $?"
        assert await guest.sh(refused_at_once) == "7", "IPv6 is waited for (28), or goes out (0)"
        assert {
            name: count
            for name, count in (await stand.launcher.dropped(vm.sandbox_id)).packets.items()
            if count and name not in ("mac", "arp")
        } == {}


async def test_a_restored_disk_stops_and_boots_cold_with_what_was_written(stand: Stand, baked: Baked) -> None:
    spec = stand.spec()
    for round_number in range(3):
        if round_number == 0:
            guest = await stand.restored(baked, spec)
        else:
            guest = await stand.booted(spec)
        await guest.sh(f"echo {round_number} >> /root/rounds")
        await guest.link.shutdown()
        assert (await guest.vm.stop(WITHIN_S)).guest_shutdown
        await guest.link.close()
        await guest.vm.forget()
    guest = await stand.booted(spec)
    assert await guest.sh("cat /root/rounds") == "0\n1\n2"


async def test_the_key_of_a_bake_names_template_shape_and_network_and_no_disk(stand: Stand) -> None:
    key = stand.driver.baked_key("sha256:a", SHAPE)
    assert re.fullmatch(r"[a-z0-9]{20,64}", key)
    assert key == stand.driver.baked_key("sha256:a", replace_shape(disk_mib=9000))
    others = {
        stand.driver.baked_key("sha256:b", SHAPE),
        stand.driver.baked_key("sha256:a", replace_shape(vcpus=2)),
        stand.driver.baked_key("sha256:a", replace_shape(memory_mib=512)),
        stand.driver.baked_key("sha256:a", SHAPE, network=False),
    }
    assert len(others | {key}) == 5
    assert (await stand.make_driver()).baked_key("sha256:a", SHAPE) == key


def replace_shape(**changes: int) -> Shape:
    values = {"vcpus": SHAPE.vcpus, "memory_mib": SHAPE.memory_mib, "disk_mib": SHAPE.disk_mib, **changes}
    return Shape(**values)


# -- running


async def test_pause_stops_the_guest_and_resume_lets_it_go_on(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    for _ in range(3):
        await guest.vm.pause()
        await guest.vm.pause()
        assert (await guest.vm.info()).status == "paused"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await guest.link.ping()
        await guest.vm.resume()
        await guest.vm.resume()
        assert (await guest.vm.info()).status == "running"
        async with asyncio.timeout(WITHIN_S):
            await guest.link.ping()


async def test_the_disk_grows_and_never_shrinks(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked, stand.spec(shape=replace_shape(disk_mib=1024)))
    await guest.sh("echo kept > /root/kept")
    for _ in range(2):
        await guest.vm.resize_disk(1024)
        assert 900 * 2**20 < await guest.link.resize_disk(1024) <= 1024 * 2**20
    await guest.vm.resize_disk(2048)
    assert await guest.link.resize_disk(2048) > 1800 * 2**20
    with pytest.raises(ValueError, match="cannot shrink"):
        await guest.vm.resize_disk(1024)
    await guest.sh("fallocate -l 1500M /root/large")
    assert await guest.sh("stat -c %s /root/large; cat /root/kept") == f"{1500 * 2**20}\nkept"


async def test_a_full_host_disk_is_the_guests_error_and_no_end(stand: Stand, baked: Baked, small_disk: Path) -> None:
    guest = await stand.restored(baked, stand.spec(folder=small_disk / "vm"))
    code, _ = await guest.try_sh("head -c 60000000 /dev/zero | tr '\\0' x > /root/large && sync /root/large")
    assert code != 0
    async with asyncio.timeout(WITHIN_S):
        await guest.link.ping()
    info = await guest.vm.info()
    assert info.status == "running"
    if stand.driver.name == "qemu":  # Firecracker tells the guest alone
        assert int(str(info.details["disk_errors"])) > 0


# -- ending


async def test_kill_ends_it_and_says_so(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    pid = (await guest.vm.info()).pid
    first = await guest.vm.kill()
    assert (first.signal, first.guest_shutdown) == (9, False)
    assert guest.vm.ended.is_set()
    assert guest.vm.exit == first == await guest.vm.kill() == await guest.vm.stop(5)
    assert (await guest.vm.info()).status == "ended"
    assert not Path(f"/proc/{pid}").exists()
    for verb in (guest.vm.pause, guest.vm.resume):
        with pytest.raises(VmmDied) as caught:
            await verb()
        assert caught.value.status == first
    assert await stand.left() == [guest.vm.spec.sandbox_id]
    await guest.vm.forget()
    await guest.vm.forget()
    assert await stand.left() == []


async def test_a_vmm_that_crashes_is_noticed(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    os.kill((await guest.vm.info()).pid, 11)
    async with asyncio.timeout(WITHIN_S):
        await guest.vm.ended.wait()
    assert guest.vm.exit is not None
    assert (guest.vm.exit.signal, guest.vm.exit.guest_shutdown) == (11, False)


async def test_a_guest_that_powers_off_is_told_from_a_crash(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    await guest.link.shutdown()
    async with asyncio.timeout(WITHIN_S):
        await guest.vm.ended.wait()
    assert guest.vm.exit is not None
    assert guest.vm.exit.guest_shutdown
    assert guest.vm.exit.signal is None
    assert (await guest.vm.info()).status == "ended"


async def test_stop_waits_for_the_guest_and_no_longer_than_its_grace(stand: Stand, baked: Baked) -> None:
    willing, unwilling = await stand.restored(baked), await stand.restored(baked)
    await willing.link.shutdown()
    assert (await willing.vm.stop(WITHIN_S)).guest_shutdown
    assert (await unwilling.vm.stop(0.2)).signal == 9


async def test_forget_of_a_machine_that_runs_is_refused(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    with pytest.raises(VmmError, match="still runs"):
        await guest.vm.forget()
    async with asyncio.timeout(WITHIN_S):
        await guest.link.ping()


# -- taking over


async def test_a_machine_is_adopted_by_a_process_that_knows_nothing(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    await guest.sh("echo in-memory > /dev/shm/state")
    pid = (await guest.vm.info()).pid
    await guest.link.close()
    await guest.vm.close()
    await guest.vm.close()
    stand.restart_launcher()
    driver = await stand.make_driver()
    vm = stand.keep(await driver.adopt(guest.vm.spec))
    assert (await vm.info()).pid == pid
    again = await stand.linked(vm, fresh=False)
    assert await again.sh("cat /dev/shm/state") == "in-memory"
    await vm.pause()
    await vm.close()
    vm = stand.keep(await driver.adopt(guest.vm.spec))
    assert (await vm.info()).status == "paused"
    await vm.resume()
    assert (await vm.kill()).signal == 9


async def test_what_ended_while_nobody_watched_is_told_at_adoption(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    await guest.vm.close()
    await guest.link.shutdown()
    await guest.link.close()
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                vm = await stand.driver.adopt(guest.vm.spec)
            except VmmDied as error:
                died = error
                break
            await vm.close()
            await asyncio.sleep(0.01)
    assert died.status is not None
    assert died.status.guest_shutdown
    await stand.launcher.kill_vm(guest.vm.spec.sandbox_id)
    await stand.launcher.forget_vm(guest.vm.spec.sandbox_id)
    with pytest.raises(VmmDied):
        await stand.driver.adopt(guest.vm.spec)


async def test_another_generation_neither_adopts_nor_replaces(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    for generation in (2, 3):
        other = replace(guest.vm.spec, generation=generation)
        with pytest.raises(WrongGeneration, match="generation 1"):
            await stand.driver.adopt(other)
        with pytest.raises(LaunchRefused) as caught:
            await stand.driver.restore(baked, other)
        assert caught.value.code == "exists"
    async with asyncio.timeout(WITHIN_S):
        await guest.link.ping()


async def test_start_and_restore_asked_again_answer_with_the_machine_that_runs(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    await guest.sh("echo here > /dev/shm/here")
    pid = (await guest.vm.info()).pid
    await guest.vm.close()
    for verb in (stand.driver.restore(baked, guest.vm.spec), stand.driver.start(guest.vm.spec)):
        vm = stand.keep(await verb)
        assert (await vm.info()).pid == pid
        await vm.close()
    assert await guest.sh("cat /dev/shm/here") == "here"


async def test_start_replaces_what_ended_unforgotten(stand: Stand, baked: Baked) -> None:
    guest = await stand.restored(baked)
    await guest.vm.kill()
    await guest.vm.close()
    again = await stand.booted(guest.vm.spec)
    assert (await again.vm.info()).status == "running"


# -- failing


def damaged(baked: Baked, folder: Path, state: bytes, *, honest: bool) -> Baked:
    """A copy with another device state; `honest`: its manifest says so, and only the VMM can find out."""
    shutil.copytree(baked.folder, folder)
    os.chmod(folder / "state", 0o600)
    (folder / "state").write_bytes(state)
    if honest:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest.update(state_sha256=digest(folder / "state"), state_size=len(state))
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return replace(baked, folder=folder)


@pytest.mark.parametrize("honest", [False, True])
@pytest.mark.parametrize("how", ["cut", "other"])
async def test_a_damaged_snapshot_is_refused_and_leaves_nothing(
    stand: Stand, baked: Baked, tmp_path: Path, honest: bool, how: str
) -> None:
    whole = baked.state.read_bytes()
    state = whole[: len(whole) // 2] if how == "cut" else b"QEVM" + os.urandom(len(whole))
    with pytest.raises(SnapshotMismatch) as caught:
        await stand.driver.restore(damaged(baked, tmp_path / "damaged", state, honest=honest), stand.spec())
    assert "damaged" in str(caught.value) if not honest else "could not load" in str(caught.value)
    assert await stand.left() == []


async def test_a_snapshot_of_another_shape_is_refused(stand: Stand, baked: Baked) -> None:
    with pytest.raises(SnapshotMismatch, match="shape"):
        await stand.driver.restore(baked, stand.spec(shape=replace_shape(memory_mib=512)))
    with pytest.raises(SnapshotMismatch, match="network"):
        await stand.driver.restore(baked, stand.spec(network=False))
    assert await stand.left() == []


async def test_no_room_for_the_disk_is_enospc_and_leaves_nothing(stand: Stand, baked: Baked, small_disk: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        while filler.write(bytes(65_536)):
            filler.flush()
    with pytest.raises(OSError, match="No space left") as caught:
        await stand.driver.restore(baked, stand.spec(folder=small_disk / "vm"))
    assert caught.value.errno == errno.ENOSPC
    assert await stand.left() == []


async def test_a_kernel_that_is_none_is_the_vmms_own_error(stand: Stand, tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(b"this is no kernel" * 100)
    spec = stand.spec(boot=replace(stand.ground.boot, kernel=tmp_path / "kernel"))
    with pytest.raises(VmmError, match="kernel"):
        await stand.driver.start(spec)
    assert await stand.left() == []


async def test_a_cancelled_start_leaves_nothing(stand: Stand, baked: Baked) -> None:
    for delay in (0.0, 0.003, 0.01, 0.02, 0.03, 0.06, 0.1):
        task = asyncio.ensure_future(stand.driver.restore(baked, stand.spec()))
        done, _ = await asyncio.wait([task], timeout=delay)
        if done:
            stand.keep(task.result())
            await task.result().kill()
            await task.result().forget()
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await stand.left() == []


async def test_only_a_fresh_bakeable_machine_is_baked(stand: Stand, baked: Baked, tmp_path: Path) -> None:
    guest = await stand.restored(baked)
    with pytest.raises(VmmError, match="bakeable"):
        await guest.vm.snapshot(tmp_path / "snapshot")
    async with asyncio.timeout(WITHIN_S):
        await guest.link.ping()


# -- capturing


@pytest.mark.parametrize("origin", ["restored", "booted"])
async def test_a_paused_machine_is_captured_and_lives_on_in_any_number(
    stand: Stand, baked: Baked, tmp_path: Path, origin: str
) -> None:
    source = await (stand.restored(baked) if origin == "restored" else stand.booted())
    await source.sh("echo disk > /root/disk; head -c 3000000 /dev/urandom > /dev/shm/memory; sync")
    before = await source.sh("sha256sum /dev/shm/memory; cat /proc/sys/kernel/random/boot_id")
    with pytest.raises(VmmError, match="paused"):
        await stand.driver.capture(source.vm, tmp_path / "too-early")
    capture = stand.folder / "capture"
    for _ in range(2):
        await source.vm.pause()
        (await stand.driver.capture(source.vm, capture))()
        await source.vm.resume()
    await source.sh("echo after > /root/disk; rm /dev/shm/memory; sync")
    diff = (capture / "memory.diff").stat().st_size
    if origin == "restored":
        assert 3_000_000 < diff < 64 * 2**20
    for _ in range(2):
        vm = stand.keep(await stand.driver.revive(capture, stand.spec()))
        assert (await vm.info()).status == "paused"
        await vm.resume()
        child = await stand.linked(vm, fresh=False)
        assert (
            await child.sh("sha256sum /dev/shm/memory; cat /proc/sys/kernel/random/boot_id; cat /root/disk")
            == f"{before}\ndisk"
        )
        await child.sh("echo child > /root/disk; sync")
    assert await source.sh("cat /root/disk") == "after"


async def test_what_is_made_of_a_capture_gets_ready_while_that_is_taken(stand: Stand, baked: Baked) -> None:
    """The VMM is there before the source stands still, and has the memory and the disk of that later instant."""
    if stand.driver.disk_format == "raw":
        pytest.skip("this VMM maps the whole memory of a capture: it cannot be started before that is there")
    source = await stand.restored(baked)
    await source.sh("echo before > /root/disk; echo before > /dev/shm/memory; sync")
    capture, started = stand.folder / "capture", asyncio.Event()

    async def take() -> None:
        await started.wait()
        await source.sh(
            "echo then > /root/disk; echo then > /dev/shm/memory; head -c 9000000 /dev/zero > /root/more; sync"
        )
        await source.vm.pause()
        (await stand.driver.capture(source.vm, capture))(durable=False)
        await source.vm.resume()

    taking = Taking(source.vm.spec.folder, asyncio.create_task(take()))
    vm = stand.keep(await stand.driver.revive(capture, stand.spec(), lambda _: started.set(), taking=taking))
    await vm.resume()
    child = await stand.linked(vm, fresh=False)
    assert await child.sh("cat /root/disk /dev/shm/memory; stat -c %s /root/more") == "then\nthen\n9000000"
    await child.sh("echo child > /root/disk; sync")
    assert await source.sh("cat /root/disk") == "then"


async def test_a_capture_that_comes_to_nothing_leaves_nothing_of_what_waited_for_it(stand: Stand, baked: Baked) -> None:
    source = await stand.restored(baked)
    for failure in (VmmError("it was not to be"), None):
        done = asyncio.get_running_loop().create_future()

        def end(_: Vm, done: "asyncio.Future[None]" = done, failure: VmmError | None = failure) -> None:
            if failure is None:
                done.cancel()
            else:
                done.set_exception(failure)

        if stand.driver.disk_format == "raw":
            end(source.vm)
        with pytest.raises(VmmError, match=r"not to be|not there any more"):
            await stand.driver.revive(
                stand.folder / "capture", stand.spec(), end, taking=Taking(source.vm.spec.folder, done)
            )
    assert await stand.left() == [source.vm.spec.sandbox_id]


async def test_a_capture_without_its_parts_is_refused(stand: Stand, baked: Baked) -> None:
    source = await stand.restored(baked)
    await source.vm.pause()
    capture = stand.folder / "capture"
    (await stand.driver.capture(source.vm, capture))()
    (capture / "state").write_bytes(b"QEVM")
    with pytest.raises(SnapshotMismatch, match="damaged"):
        await stand.driver.revive(capture, stand.spec())
    (capture / "capture.json").unlink()
    with pytest.raises(SnapshotMismatch, match="incomplete"):
        await stand.driver.revive(capture, stand.spec())
    assert await stand.left() == [source.vm.spec.sandbox_id]
