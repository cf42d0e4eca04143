"""The driver for Firecracker against the real program, as far as a host goes whose KVM runs no guest: everything but the agent.

The guest's kernel prints its first lines; that it goes on is shown by test_vmm_conformance.py where KVM works.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from vmm_harness import BOOT_WITHIN_S, SHAPE, WITHIN_S, Ground, Stand, lack_of_guests, standing

from hatchway.domain.shapes import Shape
from hatchway.node.vmm import captures, disk
from hatchway.node.vmm.seam import (
    Baked,
    LaunchRefused,
    SnapshotMismatch,
    Vm,
    VmmDied,
    VmmError,
    VmmTimeout,
    VmSpec,
    WrongGeneration,
)

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="jails and templates are made by root"),
    pytest.mark.skipif(
        not os.path.exists("/dev/kvm"), reason="NOT SHOWN HERE: Firecracker at all. There is no /dev/kvm"
    ),
]

FIRST_LINES_WITHIN_S = 60.0
"""Where KVM hardly runs guests it takes seconds to tens of seconds."""
EARLY = "earlyprintk=ttyS0"
"""Has the kernel print before it has come to its console."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    top = tmp_path_factory.mktemp("firecracker-ground")
    top.chmod(0o755)
    made = Ground.prepare(top)
    return replace(made, boot=replace(made.boot, cmdline=EARLY))


@pytest.fixture
async def stand(ground: Ground) -> AsyncIterator[Stand]:
    async with standing(ground, "firecracker") as made:
        yield made


@pytest.fixture(scope="module")
def baked(ground: Ground) -> Baked:
    async def bake() -> Baked:
        async with standing(ground, "firecracker") as stand:
            vm = await started(stand, bakeable=True)
            folder = ground.top / "baked" / "one"
            await vm.snapshot(folder)
            assert vm.exit is not None
            assert not vm.exit.guest_shutdown
            await vm.forget()
            return Baked(key="one", folder=folder, shape=SHAPE)

    return asyncio.run(bake())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "small", folder], check=True, timeout=20)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True, timeout=20)


async def started(stand: Stand, spec: VmSpec | None = None, *, bakeable: bool = False) -> Vm:
    return stand.keep(await stand.driver.start(spec or stand.spec(), bakeable=bakeable))


async def restored(stand: Stand, baked: Baked, spec: VmSpec | None = None) -> Vm:
    return stand.keep(await stand.driver.restore(baked, spec or stand.spec()))


async def changed(stand: Stand, vm: Vm, folder: Path) -> None:
    """Captures until the guest, however slow it is here, has written to its memory, and leaves the machine running."""
    async with asyncio.timeout(BOOT_WITHIN_S):
        while True:
            await vm.pause()
            (await stand.driver.capture(vm, folder))()
            await vm.resume()
            if (folder / captures.DIFF).stat().st_size > 4096:
                return
            await asyncio.sleep(0.1)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def other_bake(baked: Baked, folder: Path, changes: dict[str, bytes]) -> Path:
    """The same bake but for some of its files."""
    folder.mkdir()
    for path in baked.folder.iterdir():
        if path.name in changes:
            (folder / path.name).write_bytes(changes[path.name])
        else:
            os.link(path, folder / path.name)
    return folder


def status_of(pid: int, name: str) -> str:
    found = re.search(rf"^{name}:\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return found[1]


# -- the jail


async def test_a_kernel_boots_in_a_jail_without_files(stand: Stand) -> None:
    vm = await started(stand, stand.spec(shape=Shape(vcpus=2, memory_mib=384, disk_mib=640)))
    info = await vm.info()
    assert (info.status, info.isolation, info.vmm) == ("running", "hardware", "firecracker 1.12.1")
    pid = info.pid
    uid = int(status_of(pid, "Uid").split()[0])
    assert uid > 1_000_000_000
    assert (status_of(pid, "CapEff").strip("0"), status_of(pid, "NoNewPrivs")) == ("", "1")
    # Ours, and those of Firecracker itself, one for each kind of thread.
    assert status_of(pid, "Seccomp") == "2"
    assert int(status_of(pid, "Seccomp_filters")) == 2
    root = Path(f"/proc/{pid}/root")
    assert {path.name for path in root.iterdir()} == {"dev", "tmp", "proc", "vmm"}
    assert {path.name for path in (root / "dev").iterdir()} == {"null", "zero", "urandom", "kvm"}
    # KVM is this VM's alone; nobody was given the host's device.
    kvm = (root / "dev/kvm").stat()
    assert (kvm.st_uid, stat.S_IMODE(kvm.st_mode)) == (uid, 0o600)
    assert {path.name for path in (root / "tmp").iterdir()} == {"api.sock", "vsock.sock"}
    assert list((root / "proc").iterdir()) == []
    open_for_writing = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        flags = int(re.search(r"flags:\t(\d+)", Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text())[1], 8)  # type: ignore[index]
        if flags & os.O_ACCMODE != os.O_RDONLY and os.path.isfile(fd):
            open_for_writing.add(Path(os.readlink(fd)).name)
    assert open_for_writing == {"upper.raw"}
    # Its network is a tap in a namespace of its own, attached by Firecracker.
    interfaces = {line.split(":")[0].strip() for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]}
    assert interfaces == {"lo", "tap0"}
    assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


async def test_it_holds_a_tap_only_where_it_has_a_network(stand: Stand) -> None:
    for network in (True, False):
        pid = (await (await started(stand, stand.spec(network=network))).info()).pid
        held = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert held.count("/dev/net/tun") == int(network)


async def test_the_kernels_first_lines_are_on_the_console(stand: Stand) -> None:
    vm = await started(stand)
    try:
        async with asyncio.timeout(FIRST_LINES_WITHIN_S):
            while EARLY.encode() not in (said := await vm.console()):
                await asyncio.sleep(0.02)
    except TimeoutError:
        lack = await lack_of_guests(stand.ground, "firecracker")
        assert lack is not None
        pytest.skip(f"NOT SHOWN HERE: a guest kernel's first lines within {FIRST_LINES_WITHIN_S:g} s. {lack}")
    assert b"Linux version" in said
    assert len(said) <= 65_536
    # It stays readable after the end, for whoever wants to know why.
    await vm.kill()
    assert (await vm.console()).startswith(said)


async def test_the_guest_channel_is_dialled_until_the_vm_ends(stand: Stand) -> None:
    vm = await started(stand)
    dial = vm.agent_socket
    assert not isinstance(dial, Path)
    with pytest.raises(TimeoutError):  # no guest comes to listen here
        await asyncio.wait_for(dial(), 0.3)
    waiting = asyncio.ensure_future(dial())
    await asyncio.sleep(0)
    await vm.kill()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(waiting, WITHIN_S)


# -- running


async def test_pause_and_resume_hold_however_often_they_are_asked(stand: Stand, baked: Baked) -> None:
    vm = await restored(stand, baked)
    for _ in range(3):
        await vm.pause()
        await vm.pause()
        assert (await vm.info()).status == "paused"
        await vm.resume()
        await vm.resume()
        assert (await vm.info()).status == "running"


async def test_the_disk_grows_and_never_shrinks(stand: Stand, baked: Baked) -> None:
    vm = await restored(stand, baked, stand.spec(shape=structs.replace(SHAPE, disk_mib=1024)))
    top = vm.spec.folder / disk.RAW_TOP
    assert top.stat().st_size == 1024 * 2**20
    for size in (1024, 2048, 2048):
        await vm.resize_disk(size)
        assert top.stat().st_size == size * 2**20
    with pytest.raises(ValueError, match="cannot shrink"):
        await vm.resize_disk(1024)
    assert top.stat().st_blocks * 512 < 200 * 2**20


# -- snapshots


async def test_restored_machines_leave_the_bake_as_it_was(stand: Stand, baked: Baked) -> None:
    before = {path: digest(path) for path in baked.folder.iterdir()}
    assert baked.memory.stat().st_blocks * 512 < baked.memory.stat().st_size / 2  # what is zero takes no space
    assert all(stat.S_IMODE((baked.folder / name).stat().st_mode) == 0o444 for name in ("memory", "state", "upper.raw"))
    vms = [await restored(stand, baked) for _ in range(3)]
    for vm in vms:
        pid = (await vm.info()).pid
        mappings = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith("/memory")]
        assert len(mappings) == 1
        assert mappings[0].split()[1] == "rw-p"
        await vm.pause()
        await vm.resume()
    assert {path: digest(path) for path in baked.folder.iterdir()} == before


@pytest.mark.parametrize("origin", ["restored", "booted"])
async def test_a_paused_machine_is_captured_and_lives_on_in_any_number(stand: Stand, baked: Baked, origin: str) -> None:
    if origin == "restored":
        source = await restored(stand, baked)
    else:
        source = await started(stand)
    with pytest.raises(VmmError, match="paused"):
        await stand.driver.capture(source, stand.folder / "too-early")
    capture = stand.folder / "capture"
    for _ in range(2):
        await source.pause()
        (await stand.driver.capture(source, capture))()
        await source.resume()
        assert (await source.info()).status == "running"
    if origin == "restored":
        # What it changed since its parent, and nothing of what the parent has.
        await changed(stand, source, capture)
        assert (capture / captures.DIFF).stat().st_size < 64 * 2**20
        assert os.path.samefile(capture / captures.BASE, baked.memory)
    for _ in range(2):
        child = stand.keep(await stand.driver.revive(capture, stand.spec()))
        assert (await child.info()).status == "paused"
        again = stand.folder / f"again-{child.spec.sandbox_id}"
        (await stand.driver.capture(child, again))()
        # It did nothing since: but for what Firecracker itself writes for a snapshot, the memory is what was captured.
        one, two = [await asyncio.to_thread(captures.merged_memory, folder) for folder in (capture, again)]
        assert differing_pages(one, two) <= 4
        await child.resume()
        assert (await child.info()).status == "running"


def differing_pages(one: Path, two: Path) -> int:
    count = 0
    with one.open("rb") as first, two.open("rb") as second:
        while octets := first.read(2**20):
            other = second.read(2**20)
            if octets != other:
                count += sum(octets[at : at + 4096] != other[at : at + 4096] for at in range(0, len(octets), 4096))
    return count


async def test_a_capture_without_its_parts_is_refused(stand: Stand, baked: Baked) -> None:
    source = await restored(stand, baked)
    capture = stand.folder / "capture"
    await changed(stand, source, capture)
    changes = (capture / captures.DIFF).read_bytes()
    (capture / captures.DIFF).write_bytes(changes[: len(changes) // 2])
    with pytest.raises(SnapshotMismatch, match="damaged"):
        await stand.driver.revive(capture, stand.spec())
    (capture / captures.STATE).write_bytes(b"nothing")
    with pytest.raises(SnapshotMismatch, match="damaged"):
        await stand.driver.revive(capture, stand.spec())
    assert await stand.left() == [source.spec.sandbox_id]


async def test_only_a_fresh_bakeable_machine_is_baked(stand: Stand, baked: Baked, tmp_path: Path) -> None:
    vm = await restored(stand, baked)
    with pytest.raises(VmmError, match="bakeable"):
        await vm.snapshot(tmp_path / "snapshot")
    assert (await vm.info()).status == "running"


async def test_a_capture_on_a_full_disk_fails_and_the_machine_goes_on(
    stand: Stand, baked: Baked, small_disk: Path
) -> None:
    source = await restored(stand, baked)
    await changed(stand, source, stand.folder / "before")
    await source.pause()
    folder = small_disk / "capture"
    folder.mkdir()
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        while filler.write(bytes(65_536)):
            filler.flush()
    with pytest.raises((VmmError, OSError)):
        (await stand.driver.capture(source, folder))()
    # What Firecracker knew of changes may be gone with that: the next capture has them all the same.
    later = stand.folder / "later"
    (await stand.driver.capture(source, later))()
    assert (later / captures.DIFF).stat().st_size > 4096
    await source.resume()
    assert (await source.info()).status == "running"


@pytest.mark.parametrize("honest", [False, True])
@pytest.mark.parametrize("how", ["cut", "other"])
async def test_a_damaged_snapshot_is_refused_and_leaves_nothing(
    stand: Stand, baked: Baked, tmp_path: Path, honest: bool, how: str
) -> None:
    whole = baked.state.read_bytes()
    state = whole[: len(whole) // 2] if how == "cut" else os.urandom(len(whole))
    manifest = json.loads((baked.folder / "manifest.json").read_bytes())
    if honest:  # its manifest says so, and only Firecracker can find out
        manifest.update(state_sha256=hashlib.sha256(state).hexdigest(), state_size=len(state))
    folder = other_bake(baked, tmp_path / "damaged", {"state": state, "manifest.json": json.dumps(manifest).encode()})
    # Firecracker has been seen to say neither yes nor no to half a state that its manifest vouches for: then it is given up, and ended.
    refusals = (SnapshotMismatch, VmmTimeout) if honest else SnapshotMismatch
    with pytest.raises(refusals, match="could not load|did not answer" if honest else "damaged"):
        await stand.driver.restore(replace(baked, folder=folder), stand.spec())
    assert await stand.left() == []


async def test_a_snapshot_of_another_shape_network_or_driver_is_refused(
    stand: Stand, baked: Baked, tmp_path: Path
) -> None:
    with pytest.raises(SnapshotMismatch, match="shape"):
        await stand.driver.restore(baked, stand.spec(shape=structs.replace(SHAPE, memory_mib=512)))
    with pytest.raises(SnapshotMismatch, match="network"):
        await stand.driver.restore(baked, stand.spec(network=False))
    manifest = json.loads((baked.folder / "manifest.json").read_bytes())
    described = json.dumps({**manifest, "build": "0" * 64}).encode()
    other = other_bake(baked, tmp_path / "other", {"manifest.json": described})
    with pytest.raises(SnapshotMismatch, match="build of the VMM"):
        await stand.driver.restore(replace(baked, folder=other), stand.spec())
    assert await stand.left() == []


async def test_the_key_of_a_bake_names_template_shape_network_and_build(stand: Stand) -> None:
    key = stand.driver.baked_key("sha256:a", SHAPE)
    assert key == stand.driver.baked_key("sha256:a", structs.replace(SHAPE, disk_mib=9000))
    others = {
        stand.driver.baked_key("sha256:b", SHAPE),
        stand.driver.baked_key("sha256:a", structs.replace(SHAPE, vcpus=2)),
        stand.driver.baked_key("sha256:a", SHAPE, network=False),
    }
    stand.driver.build = "another"
    others.add(stand.driver.baked_key("sha256:a", SHAPE))
    assert len(others | {key}) == 5


# -- ending and taking over


async def test_kill_ends_it_and_says_so(stand: Stand, baked: Baked) -> None:
    vm = await restored(stand, baked)
    pid = (await vm.info()).pid
    with pytest.raises(VmmError, match="still runs"):
        await vm.forget()
    first = await vm.kill()
    assert (first.signal, first.guest_shutdown) == (9, False)
    assert vm.ended.is_set()
    assert vm.exit == first == await vm.kill() == await vm.stop(5)
    assert (await vm.info()).status == "ended"
    assert not Path(f"/proc/{pid}").exists()
    for verb in (vm.pause, vm.resume):
        with pytest.raises(VmmDied) as caught:
            await verb()
        assert caught.value.status == first
    await vm.forget()
    await vm.forget()
    assert await stand.left() == []


async def test_a_vmm_that_crashes_is_noticed(stand: Stand, baked: Baked) -> None:
    vm = await restored(stand, baked)
    os.kill((await vm.info()).pid, 9)
    async with asyncio.timeout(WITHIN_S):
        await vm.ended.wait()
    assert vm.exit is not None
    assert (vm.exit.signal, vm.exit.guest_shutdown) == (9, False)


async def test_a_machine_is_adopted_by_a_process_that_knows_nothing(stand: Stand, baked: Baked) -> None:
    vm = await restored(stand, baked)
    await vm.pause()
    pid = (await vm.info()).pid
    await vm.close()
    await vm.close()
    stand.restart_launcher()
    driver = await stand.make_driver()
    assert driver.baked_key("sha256:a", SHAPE) == stand.driver.baked_key("sha256:a", SHAPE)
    again = stand.keep(await driver.adopt(vm.spec))
    info = await again.info()
    assert (info.pid, info.status) == (pid, "paused")
    # Also what it changed is known to whoever took it over.
    (await driver.capture(again, stand.folder / "capture"))()
    await again.resume()
    for generation in (2, 3):
        other = replace(vm.spec, generation=generation)
        with pytest.raises(WrongGeneration, match="generation 1"):
            await driver.adopt(other)
        with pytest.raises(LaunchRefused):
            await driver.restore(baked, other)
    for verb in (driver.restore(baked, vm.spec), driver.start(vm.spec)):
        same = stand.keep(await verb)
        assert (await same.info()).pid == pid
        await same.close()
    assert (await again.kill()).signal == 9
    await again.close()
    with pytest.raises(VmmDied) as caught:
        await driver.adopt(vm.spec)
    assert caught.value.status is not None
    assert caught.value.status.signal == 9


async def test_a_cancelled_start_leaves_nothing(stand: Stand, baked: Baked) -> None:
    for delay in (0.0, 0.003, 0.01, 0.02, 0.04):
        task = asyncio.ensure_future(stand.driver.restore(baked, stand.spec()))
        done, _ = await asyncio.wait([task], timeout=delay)
        if done:
            await stand.keep(task.result()).kill()
            await task.result().forget()
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await stand.left() == []


async def test_what_cannot_start_is_an_error_and_leaves_nothing(
    stand: Stand, baked: Baked, small_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "kernel").write_bytes(b"\x7fELF" + b"this is no kernel" * 100)
    with pytest.raises(VmmDied, match="kernel"):
        await stand.driver.start(stand.spec(boot=replace(stand.ground.boot, kernel=tmp_path / "kernel")))
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        while filler.write(bytes(65_536)):
            filler.flush()
    with pytest.raises(OSError, match="No space left") as caught:
        await stand.driver.restore(baked, stand.spec(folder=small_disk / "vm"))
    assert caught.value.errno == errno.ENOSPC
    layered = stand.spec()
    disk.prepare(layered.folder, stand.ground.boot.upper, None, SHAPE.disk_mib * 2**20)
    with pytest.raises(VmmError, match="only QEMU can use"):
        await stand.driver.restore(baked, layered)
    assert await stand.left() == []
