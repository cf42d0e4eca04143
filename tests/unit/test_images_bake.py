"""Baked snapshots: made once however many ask, seen only when whole, kept within a budget.

The machine here is a stand-in that writes the files of a snapshot; real guests are baked in tests/integration.
"""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from test_images_store import publish

from hatchway.domain.errors import HostExhausted, Internal
from hatchway.domain.ids import new_id
from hatchway.domain.shapes import DEFAULT_DISK_MIB, MIN_DISK_MIB, Shape
from hatchway.node.guest.seam import LinkLost
from hatchway.node.images import bake as bake_module
from hatchway.node.images import bakes as bakes_module
from hatchway.node.images.bake import Baker
from hatchway.node.images.bakes import Bakes, warm_page_cache
from hatchway.node.images.store import Images, Release
from hatchway.node.vmm.seam import Baked, ExitStatus, LaunchRefused, VmmDied, VmSpec

SMALL = Shape(vcpus=1, memory_mib=128, disk_mib=MIN_DISK_MIB)


class Machine:
    def __init__(self, spec: VmSpec, host: "Host") -> None:
        self.spec = spec
        self.agent_socket = spec.folder / "agent.sock"
        self.ended = asyncio.Event()
        self.exit: ExitStatus | None = None
        self._host = host

    async def snapshot(self, folder: Path) -> None:
        if self._host.snapshot_error is not None:
            (folder / "memory").write_bytes(b"half")
            raise self._host.snapshot_error
        with (folder / "memory").open("wb") as memory:
            memory.write(self.spec.sandbox_id.encode())
            memory.truncate(self.spec.shape.memory_mib << 20)
        (folder / "state").write_bytes(b"state")
        (folder / "upper.qcow2").write_bytes(b"upper")
        await self.kill()

    async def kill(self) -> ExitStatus:
        self.exit = ExitStatus(signal=9)
        self.ended.set()
        return self.exit

    async def forget(self) -> None:
        self._host.running.discard(self.spec.sandbox_id)

    async def console(self) -> bytes:
        return b"\x1b[2Jlast words of the kernel\r\n"


class Host:
    """Driver and launcher at once."""

    name, version, isolation, build = "stand-in", "1", "emulated", "b"

    def __init__(self) -> None:
        self.started: list[VmSpec] = []
        self.running: set[str] = set()
        self.killed: list[str] = []
        self.start_error: Exception | None = None
        self.snapshot_error: Exception | None = None

    def baked_key(self, template_digest: str, shape: Shape) -> str:
        return f"{template_digest[7:19]}-{shape.vcpus}x{shape.memory_mib}"

    async def start(self, spec: VmSpec, *, bakeable: bool = False) -> Machine:
        assert bakeable
        if self.start_error is not None:
            raise self.start_error
        self.started.append(spec)
        self.running.add(spec.sandbox_id)
        return Machine(spec, self)

    async def kill_vm(self, sandbox_id: str) -> None:
        self.killed.append(sandbox_id)

    async def forget_vm(self, sandbox_id: str) -> None:
        self.running.discard(sandbox_id)


class QuickBaker(Baker):
    """Its guests have no agent: instead of first jobs it waits for `gate`."""

    gate: asyncio.Event
    job_error: Exception | None = None
    host_keys = False

    async def _first_jobs(self, vm: object, report: Callable[..., None]) -> bool:
        report("first_job")
        await self.gate.wait()
        if self.job_error is not None:
            raise self.job_error
        return self.host_keys


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def release(tmp_path: Path) -> Release:
    (tmp_path / "images").mkdir()
    publish(tmp_path / "images")
    return Images(tmp_path / "images").resolve("seed")


def new_baker(tmp_path: Path, host: Host, **options: object) -> QuickBaker:
    baker = QuickBaker(host, host, tmp_path / "baked", **options)  # type: ignore[arg-type]
    baker.gate = asyncio.Event()
    baker.gate.set()
    return baker


@pytest.fixture
async def baker(tmp_path: Path, host: Host) -> QuickBaker:
    return new_baker(tmp_path, host)


async def test_one_bake_however_many_ask(baker: QuickBaker, host: Host, release: Release) -> None:
    baker.gate.clear()
    phases: list[list[str]] = [[], [], []]
    asked = [
        asyncio.create_task(
            baker.baked(release, Shape(memory_mib=128, disk_mib=disk), lambda phase, _, n=n: phases[n].append(phase))
        )
        for n, disk in enumerate((512, 1024, 4095))
    ]
    while "first_job" not in phases[0]:
        await asyncio.sleep(0)
    asked[1].cancel()
    baker.gate.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError)
    assert found[0] == found[2]
    assert len(host.started) == 1
    assert phases[0][-3:] == ["boot", "first_job", "save"]
    baked = found[0]
    assert isinstance(baked, Baked)
    assert baked.shape == Shape(vcpus=1, memory_mib=128, disk_mib=MIN_DISK_MIB)
    assert {path.name: path.stat().st_mode & 0o777 for path in baked.folder.iterdir()} == dict.fromkeys(
        ("memory", "state", "upper.qcow2", "bake.json"), 0o444
    )
    assert host.running == set()
    assert await baker.baked(release, SMALL) is baked


async def test_a_restarted_node_finds_it(baker: QuickBaker, tmp_path: Path, host: Host, release: Release) -> None:
    baked = await baker.baked(release, SMALL)
    assert await new_baker(tmp_path, host).baked(release, SMALL) == baked
    assert len(host.started) == 1
    assert Bakes(tmp_path / "baked").verify(baked)
    warm_page_cache(baked)


@pytest.mark.parametrize("name", ["memory", "state", "upper.qcow2", "bake.json"])
async def test_a_damaged_one_is_made_anew(
    baker: QuickBaker, tmp_path: Path, host: Host, release: Release, name: str
) -> None:
    baked = await baker.baked(release, SMALL)
    path = baked.folder / name
    path.chmod(0o600)
    with path.open("r+b") as file:
        if name == "memory":
            file.truncate(100)
        else:
            file.write(b"#")
    assert not Bakes(tmp_path / "baked").verify(baked)
    again = await new_baker(tmp_path, host).baked(release, SMALL)
    assert len(host.started) == 2
    assert Bakes(tmp_path / "baked").verify(again)


async def test_discard_makes_a_new_one(baker: QuickBaker, host: Host, release: Release) -> None:
    baked = await baker.baked(release, SMALL)
    content = baked.memory.open("rb")
    with content:
        await baker.discard(baked)
        await baker.discard(baked)
        assert content.read(4), "who has it open goes on"
    assert not baked.folder.exists()
    again = await baker.baked(release, SMALL)
    assert again is not None
    await baker.discard(baked)  # who is late with it
    assert again.memory.exists()
    assert len(host.started) == 2


async def test_bakes_that_are_always_useless_are_not_made_for_ever(
    baker: QuickBaker, host: Host, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e6]
    monkeypatch.setattr(bake_module, "monotonic", lambda: now[0])
    for _ in range(2):
        baked = await baker.baked(release, SMALL)
        assert baked is not None
        await baker.discard(baked)
    assert await baker.baked(release, SMALL) is None
    assert len(host.started) == 2
    now[0] += 121.0
    baked = await baker.baked(release, SMALL)
    assert baked is not None
    await baker.discard(baked)
    now[0] += 121.0
    assert await baker.baked(release, SMALL) is None
    now[0] += 7200.0
    for _ in range(2):
        baked = await baker.baked(release, SMALL)
        assert baked is not None
        await baker.discard(baked)


async def test_a_bake_that_failed_is_not_tried_again_at_once(
    baker: QuickBaker, host: Host, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e6]
    monkeypatch.setattr(bake_module, "monotonic", lambda: now[0])
    baker.job_error = LinkLost("the guest agent did not answer")
    for _ in range(3):
        with pytest.raises(Internal) as caught:
            await baker.baked(release, SMALL)
        assert caught.value.code == "bake_failed"
    assert len(host.started) == 1
    baker.job_error = None
    now[0] += 3.0
    assert await baker.baked(release, SMALL) is not None
    assert len(host.started) == 2


@pytest.mark.parametrize(
    ("where", "error", "expected"),
    [
        ("start", LaunchRefused("no_slot", "none is free"), LaunchRefused),
        ("start", OSError(errno.ENOSPC, "full"), HostExhausted),
        ("job", LinkLost("the guest agent did not answer within 120 s"), Internal),
        ("snapshot", VmmDied("it died"), Internal),
        ("snapshot", OSError(errno.EDQUOT, "quota"), HostExhausted),
        ("snapshot", OSError(errno.EIO, "broken"), OSError),
    ],
)
async def test_a_failure_leaves_nothing_and_can_be_tried_again(
    baker: QuickBaker,
    tmp_path: Path,
    host: Host,
    release: Release,
    where: str,
    error: Exception,
    expected: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bake_module, "FAILED_PAUSE_S", 0.0)
    setattr(
        *{"start": (host, "start_error"), "job": (baker, "job_error"), "snapshot": (host, "snapshot_error")}[where],
        error,
    )
    with pytest.raises(expected) as caught:
        await baker.baked(release, SMALL)
    if expected is Internal:
        assert str(error) in caught.value.cause
        assert caught.value.cause.endswith("\n[2Jlast words of the kernel")
    assert [path.name for path in (tmp_path / "baked").iterdir()] == [".work"]
    assert list((tmp_path / "baked/.work").iterdir()) == []
    assert host.running == set()
    host.start_error = host.snapshot_error = baker.job_error = None
    assert (await baker.baked(release, SMALL)).memory.exists()


async def test_closing_ends_a_bake_and_its_machine(
    baker: QuickBaker, tmp_path: Path, host: Host, release: Release
) -> None:
    baker.gate.clear()
    asked = asyncio.create_task(baker.baked(release, SMALL))
    while not host.running:
        await asyncio.sleep(0)
    assert baker.baking() == host.running
    await baker.close()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert host.running == set()
    assert baker.baking() == frozenset()
    assert list((tmp_path / "baked/.work").iterdir()) == []


async def test_what_a_dead_node_left_is_ended_first(
    baker: QuickBaker, tmp_path: Path, host: Host, release: Release
) -> None:
    left = new_id()
    for name in (left, "removed-key-1"):
        (tmp_path / "baked/.work" / name / "vm").mkdir(parents=True)
    host.running.add(left)
    assert baker.baking() == {left}
    await baker.baked(release, SMALL)
    assert host.killed[0] == left
    assert host.running == set()
    assert list((tmp_path / "baked/.work").iterdir()) == []


def fill(bakes: Bakes, key: str, size: int, used: float) -> None:
    made = bakes.work / "made"
    made.mkdir(parents=True)
    for name in ("memory", "state", "upper.qcow2"):
        (made / name).write_bytes(os.urandom(size if name == "memory" else 10))
    os.utime(bakes.publish(key, made, template="t", vmm="v", shape=SMALL).folder, (used, used))


@pytest.mark.parametrize("host_keys", [False, True])
async def test_a_bake_says_whether_there_are_host_keys_on_its_disk(
    baker: QuickBaker, tmp_path: Path, release: Release, host_keys: bool
) -> None:
    baker.host_keys = host_keys
    baker.gate.set()
    baked = await baker.baked(release, SMALL)
    assert baked.host_keys is host_keys
    found = Bakes(tmp_path / "baked").find(baked.key)
    assert found is not None
    assert found.host_keys is host_keys


def test_a_bake_that_does_not_say_may_have_host_keys(tmp_path: Path) -> None:
    bakes = Bakes(tmp_path / "baked")
    bakes.prepare()
    fill(bakes, "a", 10, 0.0)
    manifest = bakes.folder / "a" / "bake.json"
    said = msgspec.json.decode(manifest.read_bytes())
    del said["host_keys"]
    manifest.chmod(0o644)
    manifest.write_bytes(msgspec.json.encode(said))
    found = bakes.find("a")
    assert found is not None
    assert found.host_keys


def present(bakes: Bakes) -> set[str]:
    return {path.name for path in bakes.folder.iterdir() if path.name != ".work"}


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    bakes = Bakes(tmp_path / "baked", budget=4 << 20)
    bakes.prepare()
    for key, used in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        fill(bakes, key, 1 << 20, used)
    bakes.make_room(512 << 10)
    assert present(bakes) == {"a", "b", "c"}
    bakes.make_room(1 << 20)
    assert present(bakes) == {"a", "c"}
    bakes.make_room(2 << 20, in_use={"c"})
    assert present(bakes) == {"c"}
    with pytest.raises(HostExhausted, match="disk_full"):
        bakes.make_room(4 << 20, in_use={"c"})
    assert present(bakes) == {"c"}


def test_what_was_used_a_moment_ago_stays(tmp_path: Path) -> None:
    bakes = Bakes(tmp_path / "baked", budget=3 << 20)
    bakes.prepare()
    fill(bakes, "a", 1 << 20, 100.0)
    fill(bakes, "b", 1 << 20, 200.0)
    bakes.touch("a")
    bakes.make_room(1 << 20)
    assert present(bakes) == {"a"}
    assert (tmp_path / "baked/a").stat().st_mtime > 200.0, "the use is noted for after a restart"


def test_a_full_disk_is_an_error_before_the_bake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bakes = Bakes(tmp_path / "baked", budget=1 << 60)
    bakes.prepare()
    fill(bakes, "a", 1000, 100.0)
    monkeypatch.setattr(bakes_module, "SPARE", 1 << 59)
    with pytest.raises(HostExhausted, match="of disk are free"):
        bakes.make_room(1)
    assert present(bakes) == set()


def test_keys_are_checked_before_they_become_paths(tmp_path: Path) -> None:
    bakes = Bakes(tmp_path / "baked")
    for key in ("", "../x", "a/b", ".work", "x" * 201):
        with pytest.raises(ValueError, match="not the key"):
            bakes.find(key)


def test_a_snapshot_without_its_files_is_not_published(tmp_path: Path) -> None:
    bakes = Bakes(tmp_path / "baked")
    bakes.prepare()
    made = bakes.work / "made"
    made.mkdir()
    for name in ("memory", "state", "extra"):
        (made / name).write_bytes(b"")
    with pytest.raises(ValueError, match="the driver left"):
        bakes.publish("a", made, template="t", vmm="v", shape=SMALL)
    assert present(bakes) == set()


async def test_disks_of_the_default_size_and_more_have_a_bake_of_their_own(
    baker: QuickBaker, host: Host, release: Release
) -> None:
    sizes = (MIN_DISK_MIB, DEFAULT_DISK_MIB - 1, DEFAULT_DISK_MIB, 10 * DEFAULT_DISK_MIB)
    found = [await baker.baked(release, Shape(memory_mib=128, disk_mib=size)) for size in sizes]
    assert [baked.shape.disk_mib for baked in found] == [MIN_DISK_MIB] * 2 + [DEFAULT_DISK_MIB] * 2
    assert len(host.started) == 2
