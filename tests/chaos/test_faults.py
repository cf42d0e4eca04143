"""Every verb, at every point that its processes pass, with each process killed there once; and with a disk that is full or broken.

The points are those that the verb was seen to pass (`hatchway.wire.fault_points`), so that a new phase is tested as soon as there is one.
"""

import asyncio
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.chaos_fixtures import api, world
from tests.support.played_node import BUSY, read_disk, read_kept_memory
from tests.support.played_world import ROLES, PlayedWorld

from hatchway.chaos.acts import Acts
from hatchway.chaos.api import Answer, Api
from hatchway.chaos.model import Box, Divergence, Kept
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import SnapshotKind, State, Verb
from hatchway.node.artifacts.spool import Entry, Spool

__all__ = ["api", "world"]

WHOLE = bool(os.environ.get("HATCHWAY_TEST_CHAOS_WHOLE"))
"""Every process at every point; without it those that have nothing to do with a point take turns in being killed there."""
BEHIND = re.compile(
    r"(call|answered|asked|done)\.(node\.|sandbox\.(list|get|activity)|session\.|events\.|template\.)|launcher(-did)?\.hello"
    r"|(written|commit)\..*(sweep|note_|_take_over|_write_|purge|flush|lease|beat|_signer|ensure|_void|Lifetimes|deleted)"
)
"""What happens by itself, beside every verb."""
OWNERS = {
    "written": "control",
    "commit": "control",
    "call": "control",
    "answered": "control",
    "launcher": "launcher",
    "launcher-did": "launcher",
}


@dataclass(frozen=True)
class Case:
    """A verb to be done, from a state."""

    before: Callable[[Acts, Box], Awaitable[None]]
    act: Callable[[Acts, Box], Awaitable[None]]
    at_least: tuple[str, ...]
    """Points that it is known to pass."""


def _to(*verbs: Verb) -> Callable[[Acts, Box], Awaitable[None]]:
    async def bring(acts: Acts, box: Box) -> None:
        for verb in verbs:
            await acts.do(box, verb)

    return bring


def _do(verb: Verb) -> Callable[[Acts, Box], Awaitable[None]]:
    async def act(acts: Acts, box: Box) -> None:
        await acts.do(box, verb)

    return act


def _keep(kind: SnapshotKind) -> Callable[[Acts, Box], Awaitable[None]]:
    return lambda acts, box: acts.keep(box, kind)


def _with_snapshot(kind: SnapshotKind) -> Callable[[Acts, Box], Awaitable[None]]:
    async def bring(acts: Acts, box: Box) -> None:
        if not any(kept.sandbox_id == box.id and kept.kind is kind for kept in acts.model.kept.values()):
            await acts.keep(box, kind)
            await acts.write(box)

    return bring


async def _roll_back(acts: Acts, box: Box) -> None:
    await acts.roll_back(next(kept for kept in acts.model.kept.values() if kept.sandbox_id == box.id))


async def _create(acts: Acts, box: Box) -> None:
    await acts.create()


async def _revive(acts: Acts, box: Box) -> None:
    await acts.create(next(iter(acts.model.kept.values())))


async def _forget(acts: Acts, box: Box) -> None:
    await acts.forget(next(iter(acts.model.kept.values())))


async def _with_archive(acts: Acts, box: Box) -> None:
    """The archive of a snapshot lies in the world's folder, and none is imported."""
    for old in [kept for kept in acts.model.kept.values() if kept.id != box.head]:
        await acts.forget(old)
    archive = _folder(acts) / "one.archive"
    if not archive.exists():
        await acts.keep(box, SnapshotKind.FULL)
        answer = await acts.api.post(f"/v1/snapshots/{box.head}/export", {})
        assert answer.body["export"]["state"] == "ready", answer
        (_folder(acts) / "exports" / f"{answer.body['export']['id']}.archive").rename(archive)
        archive.with_suffix(".content").write_text(json.dumps([box.memory, box.disk]))


async def _imported(acts: Acts, archive: str) -> tuple[Spool, str, Answer]:
    """Puts an archive where uploads lie, as the data plane does, and has it imported; returns where it lay, and what was answered."""
    spool, upload = Spool(_folder(acts) / "uploads"), new_id()
    shutil.copy(_folder(acts) / archive, spool.path(upload))
    spool.put(upload, Entry(project="default", expires_at=time.time() + 3600))
    answer = await acts.api.post("/v1/imports", {"upload": upload})
    while answer.status in (404, 503):  # its node is away
        await asyncio.sleep(0.05)
        answer = await acts.api.post("/v1/imports", {"upload": upload})
    acts.note(f"import: {answer.status} {answer.code}")
    return spool, upload, answer


async def _import(acts: Acts, box: Box) -> None:
    """Has a snapshot made of the archive."""
    spool, upload, answer = await _imported(acts, "one.archive")
    if await acts.succeeded(answer, None, None) is None:
        await acts.remove_failed_snapshots()
        spool.remove(upload)
        return
    kept = answer.body["snapshot"]["id"]
    memory, disk = json.loads((_folder(acts) / "one.content").read_text())  # the sandbox has gone on since
    acts.model.kept[kept] = Kept(kept, box.id, SnapshotKind.FULL, memory, disk)
    assert spool.find(upload) is None, "what was taken in is not kept twice"
    folder = _folder(acts) / "snapshots" / kept
    assert (read_kept_memory(folder), read_disk(folder)) == (memory, disk)


async def _with_archive_of_a_sandbox(acts: Acts, box: Box) -> None:
    """It is suspended, and its archive lies in the world's folder."""
    await acts.do(box, Verb.SUSPEND)
    archive = _folder(acts) / "sandbox.archive"
    archive.unlink(missing_ok=True)
    operation = await acts.succeeded(await acts.verb(box, Verb.EXPORT, include_template=False), box, None)
    assert operation is not None
    (_folder(acts) / "exports" / f"{operation['result']['export']}.archive").rename(archive)


async def _import_sandbox(acts: Acts, box: Box) -> None:
    """Has a sandbox made of it, which is then as good as its source."""
    spool, upload, answer = await _imported(acts, "sandbox.archive")
    operation = await acts.succeeded(answer, None, None)
    made = acts.model.created(answer.body["sandbox"]["id"], None)
    if operation is None:
        made.state = State((await acts.api.get(f"/v1/sandboxes/{made.id}")).body["sandbox"]["state"])
        assert made.state in (State.FAILED, State.DELETED), made
        if made.state is State.DELETED:
            del acts.model.boxes[made.id]
        else:
            await acts.do(made, Verb.DELETE)
        spool.remove(upload)
        return
    made.state, made.memory, made.disk = State.SUSPENDED, box.memory, box.disk
    assert spool.find(upload) is None, "what was taken in is not kept twice"
    assert isinstance(acts.ground, PlayedWorld)
    assert acts.ground.kept(made.id) == (made.memory, made.disk)


def _folder(acts: Acts) -> Path:
    assert isinstance(acts.ground, PlayedWorld)
    return acts.ground.folder


CASES = {
    "import of a sandbox": Case(
        _with_archive_of_a_sandbox, _import_sandbox, ("done.sandbox.import", "call.sandbox.import")
    ),
    "import of a snapshot": Case(_with_archive, _import, ("file.snapshot.json", "done.snapshot.import")),
    "create": Case(_to(), _create, ("file.record.json", "phase.ready", "vm.launched", "launcher.spawned")),
    "pause": Case(_to(), _do(Verb.PAUSE), ("vm-did.pause",)),
    "resume": Case(_to(Verb.PAUSE), _do(Verb.RESUME), ("vm-did.resume",)),
    "suspend": Case(_to(), _do(Verb.SUSPEND), ("phase.freeze", "phase.capture", "phase.store", "file.capture.json")),
    "suspend of a paused one": Case(_to(Verb.PAUSE), _do(Verb.SUSPEND), ("phase.freeze", "phase.store")),
    "restore": Case(_to(Verb.SUSPEND), _do(Verb.RESTORE), ("phase.load", "phase.ready")),
    "stop": Case(_to(), _do(Verb.STOP), ("launcher-did.forget_vm",)),
    "stop of a suspended one": Case(_to(Verb.SUSPEND), _do(Verb.STOP), ("replaced.record.json",)),
    "start": Case(_to(Verb.STOP), _do(Verb.START), ("phase.start", "phase.ready")),
    "fork": Case(_to(), lambda acts, box: acts.fork(box, 2), ("copy.memory-base", "copy.upper.qcow2")),
    "fork of a suspended one": Case(_to(Verb.SUSPEND), lambda acts, box: acts.fork(box), ("phase.load",)),
    "full snapshot": Case(_to(), _keep(SnapshotKind.FULL), ("file.snapshot.json", "create.memory.diff")),
    "disk snapshot": Case(_to(), _keep(SnapshotKind.DISK), ("agent.freeze", "copy.upper.qcow2")),
    "rollback to a full one": Case(_with_snapshot(SnapshotKind.FULL), _roll_back, ("phase.verify", "phase.load")),
    "rollback to a disk one": Case(_with_snapshot(SnapshotKind.DISK), _roll_back, ("phase.verify", "phase.disk")),
    "create from a full one": Case(_with_snapshot(SnapshotKind.FULL), _revive, ("phase.load",)),
    "create from a disk one": Case(_with_snapshot(SnapshotKind.DISK), _revive, ("phase.start",)),
    "delete of a snapshot": Case(_with_snapshot(SnapshotKind.FULL), _forget, ("done.snapshot.delete",)),
    "delete": Case(_to(), _do(Verb.DELETE), ("launcher-did.forget_vm",)),
}


class Trials:
    """One verb again and again, each time on a sandbox that is in the state for it."""

    def __init__(self, world: PlayedWorld, api: Api, case: Case) -> None:
        self.world = world
        self.case = case
        self.acts = Acts(api, world, tolerant=True)

    async def ready(self) -> Box:
        """A sandbox in the state that the verb begins with; whatever else there was is deleted."""
        acts = self.acts
        for other in list(acts.model.boxes.values())[1:]:
            await acts.do(other, Verb.DELETE)
        box = next(iter(acts.model.boxes.values()), None) or await acts.create()
        assert box is not None
        for old in [kept for kept in acts.model.kept.values() if kept.sandbox_id != box.id]:
            await acts.forget(old)
        if box.state is State.FAILED:
            await acts.do(box, Verb.START)
        await acts.do(box, Verb.WAKE)
        await acts.write(box)
        await self.case.before(acts, box)
        return box

    async def points(self) -> list[str]:
        """The points that the verb passes when nothing goes wrong, in their order."""
        box = await self.ready()
        trace = self.world.faults / "trace"
        trace.touch()
        try:
            await self.case.act(self.acts, box)
            found = trace.read_text().split("\n")
        finally:
            trace.unlink()
        await self.acts.compare()
        return [point for point in dict.fromkeys(found) if point and not BEHIND.match(point)]

    async def once(self, point: str, what: str) -> bool:
        """The verb with a fault at a point; afterwards everything is compared. Tells whether the point was passed."""
        box = await self.ready()
        self.acts.note(f"-- {what} at {point}")
        self.world.arm(point, what)
        try:
            await self.case.act(self.acts, box)
            await self.acts.compare()
        except Divergence as error:
            told = "\n  ".join(list(self.acts.history)[-12:])
            raise Divergence(f"{what} at {point}: {error}\n  {told}") from error
        return not self.world.disarm()


def _victims(point: str, number: int) -> list[str]:
    owner = OWNERS.get(point.partition(".")[0], "node")
    if WHOLE:
        return list(ROLES)
    others = [role for role in ROLES if role != owner]
    return [owner, others[number % 2]] if number % 3 == 0 else [owner]


@pytest.mark.parametrize("name", CASES)
async def test_every_process_may_die_at_every_point(world: PlayedWorld, api: Api, name: str) -> None:
    trials = Trials(world, api, CASES[name])
    points = await trials.points()
    assert set(CASES[name].at_least) <= set(points), points
    missed: list[str] = []
    for number, point in enumerate(points):
        for victim in _victims(point, number):
            pid = world.pid(victim)
            if not await trials.once(point, f"kill {pid}"):
                missed.append(point)
            async with asyncio.timeout(60):
                while world.pid(victim) == pid and point not in missed:
                    await asyncio.sleep(0.01)
    assert len(missed) <= len(points) // 4, f"not passed again: {missed}"
    await trials.acts.end()


@pytest.mark.parametrize("name", [name for name in CASES if name != "delete of a snapshot"])
async def test_a_disk_that_is_full_or_broken_loses_nothing(world: PlayedWorld, api: Api, name: str) -> None:
    trials = Trials(world, api, CASES[name])
    points = [
        point for point in await trials.points() if point.partition(".")[0] in ("file", "replaced", "copy", "create")
    ]
    assert points
    missed = []
    for point in points:
        for number in (errno.ENOSPC, errno.EIO):
            missed += [] if await trials.once(point, f"errno {number}") else [point]
    assert set(missed) <= {"copy.memory-base"}, "only the memory that is merged once for all"
    # What the node remembers, and what it wrote down, are the same.
    world.kill("node")
    await trials.acts.compare()
    await trials.acts.end()


@pytest.mark.parametrize("name", ["create", "suspend", "fork", "full snapshot"])
async def test_a_database_that_cannot_be_written_loses_no_operation(world: PlayedWorld, api: Api, name: str) -> None:
    trials = Trials(world, api, CASES[name])
    points = [point for point in await trials.points() if point.startswith("commit.")]
    assert len(points) >= 2, "one that takes it on, and one that ends it"
    for point in points:
        for number in (errno.ENOSPC, errno.EIO):
            assert await trials.once(point, f"errno {number}"), point
    await trials.acts.end()
    assert not trials.acts.failures


async def test_a_suspension_that_is_not_surely_recorded_is_none(world: PlayedWorld, api: Api) -> None:
    acts = Acts(api, world, tolerant=True)
    box = await acts.create()
    assert box is not None
    await acts.write(box)
    world.arm("replaced.record.json", f"errno {errno.EIO}")
    await acts.do(box, Verb.SUSPEND)
    assert box.state is State.RUNNING
    await acts.compare()
    world.kill("node")
    await acts.compare()
    await acts.same(box)


async def test_a_restore_that_did_not_end_leaves_memory_and_disk_of_one_instant(world: PlayedWorld, api: Api) -> None:
    """Also of a guest that could not be frozen, and wrote on while it was being restored."""
    acts = Acts(api, world, tolerant=True)
    box = await acts.create()
    assert box is not None
    await acts.write(box)
    world.arm("agent.freeze", f"errno {errno.EIO}")
    await acts.do(box, Verb.SUSPEND)
    (world.folder / BUSY).write_text("what is not in its memory")
    world.arm("vm-did.resume", f"kill {world.pid('node')}")
    await acts.do(box, Verb.RESTORE)
    assert not world.disarm()
    assert not (world.folder / BUSY).exists()
    await acts.same(box)
    await acts.compare()
