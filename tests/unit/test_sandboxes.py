"""The node's sandboxes: verbs that meet each other, deaths and restarts, on played machines."""

import asyncio
import contextlib
import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support.node_parts import Node

from hatchway.domain.errors import Conflict, HatchwayError, Internal, Unavailable
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import Cause, State
from hatchway.domain.shapes import Shape
from hatchway.node import adoption, branching, creation, pausing, pooling
from hatchway.node import record as records
from hatchway.node import sandbox as sandbox_module
from hatchway.node import sandboxes as sandboxes_module
from hatchway.node.endings import ended_by
from hatchway.node.guest.seam import LinkLost
from hatchway.node.starts import AT_ONCE
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.seam import ExitStatus, LauncherUnavailable, VmmTimeout
from hatchway.wire.egress import EgressSpec, PolicyDocument
from hatchway.wire.node import Branch, SandboxSpec

WITHIN = 10.0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


class Gate:
    """A hook that holds whoever comes until it is opened."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self.entered.set()
        await self.open.wait()


async def settle() -> None:
    """Lets everything run that can run."""
    for _ in range(50):
        await asyncio.sleep(0)


# -- verbs that meet each other


async def test_a_creation_that_waits_makes_nothing_once_its_sandbox_was_deleted(node: Node) -> None:
    gate = node.launcher.hooks["restore"] = Gate()
    busy = [asyncio.create_task(node.sandboxes.create(node.spec())) for _ in range(AT_ONCE)]
    spec = node.spec()
    waiting = asyncio.create_task(node.sandboxes.create(spec))
    await gate.entered.wait()
    await settle()
    deleted = await node.sandboxes.get(spec.sandbox_id).delete()
    assert deleted.state == "deleted"
    gate.open.set()
    await asyncio.gather(*busy)
    with pytest.raises(Conflict) as caught:
        await waiting
    assert caught.value.code == "preempted"
    assert spec.sandbox_id not in node.launcher.machines
    assert not (node.root / spec.sandbox_id).exists()


async def test_those_who_wait_for_a_bake_hold_up_no_other_template(node: Node) -> None:
    gate = Gate()

    async def bake(release: Any, shape: Any, progress: Any) -> Any:
        if shape.memory_mib == 512:
            await gate()
        return SimpleNamespace(shape=shape, host_keys=False)

    node.baker.baked = bake  # type: ignore[method-assign]
    slow = [
        asyncio.create_task(node.sandboxes.create(msgspec.structs.replace(node.spec(), shape=Shape(memory_mib=512))))
        for _ in range(AT_ONCE + 1)
    ]
    await gate.entered.wait()
    await settle()
    assert (await node.sandboxes.create(node.spec())).state == "running"
    gate.open.set()
    assert {observed.state for observed in await asyncio.gather(*slow)} == {"running"}


async def test_without_a_bake_that_can_be_used_it_is_booted_cold(node: Node) -> None:
    async def useless(*_: Any) -> None:
        return None

    node.baker.baked = useless  # type: ignore[method-assign]
    begun = []

    async def start() -> None:
        begun.append("cold")

    node.launcher.hooks["start"] = start
    assert (await node.sandboxes.create(node.spec())).state == "running"
    assert begun == ["cold"]


async def test_two_who_make_a_failed_sandbox_anew_share_one(node: Node) -> None:
    spec = node.spec()

    async def fail() -> None:
        raise OSError(errno.ENOSPC, "full")

    node.launcher.hooks["restore"] = fail
    with pytest.raises(HatchwayError):
        await node.sandboxes.create(spec)
    del node.launcher.hooks["restore"]
    made = node.launcher.made
    both = await asyncio.gather(node.sandboxes.create(spec), node.sandboxes.create(spec))
    assert [one.state for one in both] == ["running", "running"]
    assert node.launcher.made == made + 1


async def test_a_creation_that_is_repeated_late_leaves_the_disk_alone(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    again = await node.sandboxes.create(spec)
    assert again.state == "stopped"
    assert node.launcher.made == 1


async def test_a_drain_waits_for_what_is_being_made_and_begins_nothing_more(node: Node) -> None:
    gate = node.launcher.hooks["restore"] = Gate()
    making = [asyncio.create_task(node.sandboxes.create(node.spec())) for _ in range(AT_ONCE + 1)]
    await gate.entered.wait()
    await settle()
    draining = asyncio.create_task(node.sandboxes.drain())
    await settle()
    gate.open.set()
    await draining
    results = await asyncio.gather(*making, return_exceptions=True)
    assert sum(isinstance(result, Unavailable) for result in results) == 1
    assert node.launcher.machines == {}


# -- restarts


async def test_after_a_reboot_of_the_host_sessions_hear_that_their_sandbox_is_gone(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    node.boot_id = "boot-2"
    node.launcher.machines.clear()
    await node.restart()
    assert node.sandboxes.get(spec.sandbox_id).observed().state == "stopped"
    assert [name for name, _ in node.sessions.lost] == [spec.sandbox_id]


@pytest.mark.parametrize(("with_disk", "state"), [(True, "stopped"), (False, "failed")])
async def test_a_host_that_crashes_right_after_a_creation_finds_what_was_durable_by_then(
    node: Node, monkeypatch: pytest.MonkeyPatch, with_disk: bool, state: str
) -> None:
    flushed: list[bytes] = []
    flush = records.flush

    def note(folder: Path) -> None:
        flush(folder)
        flushed.append((folder / records.FILE).read_bytes())

    monkeypatch.setattr(records, "flush", note)
    spec = node.spec()
    await node.sandboxes.create(spec)
    folder = node.root / spec.sandbox_id
    (before,) = flushed  # and before the answer
    assert records.read(folder).state == "running"
    (folder / records.FILE).write_bytes(before)
    if with_disk:
        (folder / disks.RECORD).write_bytes(b'[{"name": "upper.raw", "format": "raw"}]')
    node.boot_id = "boot-2"
    node.launcher.machines.clear()
    await node.restart()
    assert node.sandboxes.get(spec.sandbox_id).observed().state == state
    # As the operation does that had not ended: anew, and not from a disk on which that guest may have written.
    assert (await node.sandboxes.create(spec)).state == "running"
    assert not (folder / disks.RECORD).exists()


async def test_a_record_that_cannot_be_read_keeps_no_other_sandbox_from_being_found(node: Node) -> None:
    damaged, kept = node.spec(), node.spec()
    await node.sandboxes.create(damaged)
    await node.sandboxes.create(kept)
    (node.root / damaged.sandbox_id / records.FILE).write_bytes(b'{"sandbox_id": "')
    await node.restart()
    assert node.sandboxes.get(kept.sandbox_id).observed().state == "running"
    seen = node.sandboxes.get(damaged.sandbox_id).observed()
    assert seen.state == "failed"
    assert "damaged" in seen.reason
    assert (await node.sandboxes.get(damaged.sandbox_id).delete()).state == "deleted"
    assert damaged.sandbox_id not in node.launcher.machines
    assert not (node.root / damaged.sandbox_id).exists()


async def test_a_folder_without_a_record_stays_while_its_machine_runs(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    (node.root / spec.sandbox_id / records.FILE).unlink()
    await node.restart()
    assert (node.root / spec.sandbox_id).is_dir()
    assert node.sandboxes.quarantined == (spec.sandbox_id,)


def test_a_record_that_the_disk_took_in_part_only_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Node.spec(None, new_id())  # type: ignore[arg-type]
    record = sandboxes_module.new_record(spec, "boot")
    records.write(tmp_path, record)
    before = (tmp_path / records.FILE).read_bytes()
    write, left = os.write, [10]

    def full(fd: int, data: Any) -> int:
        taken = min(len(data), left[0])
        if taken == 0:
            raise OSError(errno.ENOSPC, "full")
        left[0] -= taken
        return write(fd, data[:taken])

    monkeypatch.setattr(os, "write", full)
    record.state = "running"
    with pytest.raises(OSError, match="full"):
        records.write(tmp_path, record)
    assert (tmp_path / records.FILE).read_bytes() == before
    left[0] = 10**9
    records.write(tmp_path, record)
    assert b"running" in (tmp_path / records.FILE).read_bytes()


async def test_a_machine_that_died_is_cleared_away_before_it_is_started_again(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox = node.sandboxes.get(spec.sandbox_id)
    gate = node.launcher.hooks["forget_vm"] = Gate()
    node.launcher.machines[spec.sandbox_id].end(ExitStatus(signal=9))
    await gate.entered.wait()
    assert (sandbox.observed().state, sandbox.observed().cause) == ("failed", "vmm_died"), "told at once"
    starting = asyncio.create_task(node.sandboxes.start(sandbox))
    await settle()
    gate.open.set()
    assert (await starting).state == "running"
    await settle()
    assert not node.launcher.machines[spec.sandbox_id].ended.is_set()
    assert sandbox.observed().state == "running"


async def test_a_death_right_behind_a_pause_is_not_overwritten(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox = node.sandboxes.get(spec.sandbox_id)
    machine = node.launcher.machines[spec.sandbox_id]

    async def die() -> None:
        machine.end(ExitStatus(code=1))
        await settle()

    node.launcher.hooks["pause"] = die
    with pytest.raises(HatchwayError):
        await pausing.pause(sandbox)
    await settle()
    assert (sandbox.observed().state, sandbox.observed().cause) == ("failed", "vmm_died")


# -- verbs that fail


@pytest.mark.parametrize("verb", ["create", "start"])
@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        (ExitStatus(signal=9), "vmm_died"),
        (ExitStatus(code=0, guest_reset=True), "operation_failed"),
        (None, "operation_failed"),
    ],
)
async def test_a_machine_that_does_not_come_up_says_whether_it_died(
    node: Node, monkeypatch: pytest.MonkeyPatch, verb: str, ends: ExitStatus | None, cause: str
) -> None:
    monkeypatch.setattr(creation, "END_SEEN_WITHIN_S", 0.0 if ends is None else 20.0)
    spec = node.spec()
    if verb == "start":
        await node.sandboxes.create(spec)
        await node.sandboxes.get(spec.sandbox_id).stop("", 0.0)

    async def fall_silent() -> None:
        if ends is not None:  # the end of the machine is seen a little later than the silence of its agent
            asyncio.get_running_loop().call_later(0.01, node.launcher.machines[spec.sandbox_id].end, ends)
        raise LinkLost("its agent is silent")

    node.connects = fall_silent
    comes_up = (
        node.sandboxes.start(node.sandboxes.get(spec.sandbox_id)) if verb == "start" else node.sandboxes.create(spec)
    )
    with pytest.raises(HatchwayError):
        await comes_up
    seen = node.sandboxes.get(spec.sandbox_id).observed()
    assert (seen.state, seen.cause) == ("failed", cause)


def test_a_guest_that_reset_itself_did_not_power_off() -> None:
    assert ended_by(ExitStatus(code=0, guest_reset=True))[:2] == (State.STOPPED, Cause.GUEST_RESET)
    assert ended_by(ExitStatus(code=0, guest_shutdown=True))[:2] == (State.STOPPED, Cause.GUEST_POWER_OFF)


@pytest.mark.parametrize("hook", ["kill_vm", "forget_vm"])
@pytest.mark.parametrize("verb", ["create", "start", "stop"])
async def test_a_verb_that_fails_without_a_launcher_leaves_a_way_out(node: Node, verb: str, hook: str) -> None:
    spec = node.spec()

    async def gone() -> None:
        raise LauncherUnavailable("it is being restarted")

    async def refuse() -> None:
        raise VmmTimeout("it does not answer")

    if verb != "create":
        await node.sandboxes.create(spec)
    if verb == "start":
        await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    node.launcher.hooks.update({hook: gone, "restore": refuse, "start": refuse})
    with contextlib.suppress(HatchwayError):
        match verb:
            case "create":
                await node.sandboxes.create(spec)
            case "start":
                await node.sandboxes.start(node.sandboxes.get(spec.sandbox_id))
            case "stop":
                await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    sandbox = node.sandboxes.get(spec.sandbox_id)
    assert sandbox.observed().state in ("failed", "stopped")
    node.launcher.hooks.clear()
    await sandbox.stop("", 0.1)
    assert sandbox.observed().state == "stopped"
    await node.sandboxes.start(sandbox)
    assert sandbox.observed().state == "running"
    await sandbox.delete()
    assert node.launcher.machines == {}


async def test_a_mistake_of_ours_in_a_verb_leaves_a_way_out(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox = node.sandboxes.get(spec.sandbox_id)

    async def mistake() -> None:
        raise KeyError("what was not thought of")

    await sandbox.stop("", 0.1)
    node.launcher.hooks["start"] = mistake
    with pytest.raises(Internal):
        await node.sandboxes.start(sandbox)
    assert sandbox.observed().state == "failed"
    node.launcher.hooks.clear()
    assert (await node.sandboxes.start(sandbox)).state == "running"


async def test_a_deletion_without_a_launcher_is_repeated_and_nothing_else_is_possible(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox = node.sandboxes.get(spec.sandbox_id)

    async def gone() -> None:
        raise LauncherUnavailable("it is being restarted")

    node.launcher.hooks["forget_vm"] = gone
    with pytest.raises(Unavailable):
        await sandbox.delete()
    assert State(sandbox.observed().state) is State.FAILED
    for verb in (creation.start, pausing.pause, pausing.resume):
        with pytest.raises(Conflict):
            await verb(sandbox)
    node.launcher.hooks.clear()
    assert (await sandbox.delete()).state == "deleted"
    assert node.launcher.machines == {}


async def test_a_full_disk_stops_neither_a_stop_nor_a_deletion(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, deleted = node.spec(), node.spec()
    for spec in (stopped, deleted):
        await node.sandboxes.create(spec)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(records, "write", full)
    assert (await node.sandboxes.get(stopped.sandbox_id).stop("", 0.1)).state == "stopped"
    assert (await node.sandboxes.get(deleted.sandbox_id).delete()).state == "deleted"
    assert node.launcher.machines == {}


async def test_a_pause_that_was_done_and_not_answered_shows_as_done(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox, machine = node.sandboxes.get(spec.sandbox_id), node.launcher.machines[spec.sandbox_id]

    async def late() -> None:
        machine.status = "paused"
        raise VmmTimeout("it did not answer in time")

    node.launcher.hooks["pause"] = late
    with pytest.raises(Unavailable):
        await pausing.pause(sandbox)
    assert sandbox.observed().state == "paused"
    node.launcher.hooks.clear()
    assert (await pausing.resume(sandbox)).state == "running"


async def test_a_resume_whose_agent_does_not_answer_stays_paused_and_can_be_tried_again(node: Node) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox, machine = node.sandboxes.get(spec.sandbox_id), node.launcher.machines[spec.sandbox_id]
    await pausing.pause(sandbox)

    async def silent() -> None:
        raise LinkLost("the agent does not answer")

    node.launcher.hooks["setup"] = silent
    with pytest.raises(HatchwayError):
        await pausing.resume(sandbox)
    assert (sandbox.observed().state, machine.status) == ("paused", "paused")
    node.launcher.hooks.clear()
    assert (await pausing.resume(sandbox)).state == "running"
    assert machine.status == "running"


async def test_a_fork_that_is_asked_again_waits_for_the_one_in_hand(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    source, gate = node.sandboxes.get(spec.sandbox_id), Gate()

    async def slowly(_: Any, made: Any, __: Any) -> float:
        await gate()
        for branch in made:
            branch.save(State.RUNNING)
        return 1.0

    monkeypatch.setattr(branching, "fork", slowly)
    monkeypatch.setattr(node.sessions, "branched", lambda _: (), raising=False)
    wanted = [Branch(sandbox_id=new_id(), generation=1, hostname="branch", env={})]
    first = asyncio.create_task(node.sandboxes.fork(source, wanted))
    await gate.entered.wait()
    again = asyncio.create_task(node.sandboxes.fork(source, wanted))
    await settle()
    assert not again.done(), "the branch is on its way: nothing can be said of it yet"
    gate.open.set()
    for answer in await asyncio.gather(first, again):
        assert [(one.error, one.observed and one.observed.state) for one in answer.branches] == [(None, "running")]


# -- restarts of the node


async def test_a_silent_guest_keeps_no_other_sandbox_from_being_served(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes_module, "ADOPT_WITHIN_S", 0.05)
    spec = node.spec()
    await node.sandboxes.create(spec)
    gate = node.connects = Gate()
    await asyncio.wait_for(node.restart(), WITHIN)
    sandbox = node.sandboxes.get(spec.sandbox_id)
    assert sandbox.observed().state == "running"
    pause = asyncio.create_task(pausing.pause(sandbox))
    await settle()
    assert not pause.done(), "verbs wait until it is found out"
    gate.open.set()
    assert (await pause).state == "paused"
    gate.open.clear()
    await pausing.resume(sandbox)
    await asyncio.wait_for(node.restart(), WITHIN)
    assert (await asyncio.wait_for(node.sandboxes.get(spec.sandbox_id).delete(), WITHIN)).state == "deleted"
    assert node.launcher.machines == {}


async def test_a_host_that_is_busy_loses_no_machine_at_a_restart(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "ADOPT_AGAIN_S", 0.0)
    spec = node.spec()
    await node.sandboxes.create(spec)
    left = [3]

    async def busy() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise VmmTimeout("it did not answer in time")

    node.launcher.hooks["adopt"] = busy
    await node.restart()
    assert node.sandboxes.get(spec.sandbox_id).observed().state == "running"
    assert node.sessions.up == [spec.sandbox_id]
    assert "time_ns" in node.links[-1].setups[-1], "it may have stood still"


async def test_a_machine_that_cannot_be_taken_over_is_ended_and_said_to_be(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "ADOPT_AGAIN_S", 0.0)
    monkeypatch.setattr(adoption, "ADOPT_WITHIN_S", 0.0)
    spec = node.spec()
    await node.sandboxes.create(spec)

    async def never() -> None:
        raise VmmTimeout("it did not answer in time")

    node.launcher.hooks["adopt"] = never
    await node.restart()
    await settle()
    seen = node.sandboxes.get(spec.sandbox_id).observed()
    assert (seen.state, seen.cause) == ("failed", "vmm_died")
    assert "did not answer" in seen.reason
    assert node.launcher.machines == {}
    assert [name for name, _ in node.sessions.lost][:1] == [spec.sandbox_id]


async def test_what_a_stopped_sandbox_left_with_the_launcher_is_cleared_at_the_next_start_of_the_node(
    node: Node,
) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)

    async def gone() -> None:
        raise LauncherUnavailable("it is being restarted")

    node.launcher.hooks["forget_vm"] = gone
    await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    assert spec.sandbox_id in node.launcher.machines
    node.launcher.hooks.clear()
    await node.restart()
    assert node.launcher.machines == {}
    assert node.sandboxes.get(spec.sandbox_id).observed().state == "stopped"


@pytest.mark.parametrize(
    "left",
    [
        "creating",
        "starting",
        "stopping",
        "restoring",
        "rolling_back",
        "deleting",
        "running",
        "paused",
        "suspended",
        "stopped",
        "failed",
    ],
)
@pytest.mark.parametrize("machine", ["lives", "dead", "gone"])
@pytest.mark.parametrize("rebooted", [False, True])
async def test_whatever_a_node_left_has_a_state_and_a_way_out(
    node: Node, left: str, machine: str, rebooted: bool
) -> None:
    spec = node.spec()
    await node.sandboxes.create(spec)
    sandbox = node.sandboxes.get(spec.sandbox_id)
    record = msgspec.structs.replace(sandbox.record, state=left)
    await sandbox.release()
    records.write(node.root / spec.sandbox_id, record)
    if machine == "dead":
        node.launcher.machines[spec.sandbox_id].end(ExitStatus(signal=9))
    if machine == "gone" or rebooted:
        node.launcher.machines.clear()
    if rebooted:
        node.boot_id = "boot-2"
    await node.restart()
    await settle()
    if left == "deleting":
        assert node.sandboxes.all() == []
        assert not (node.root / spec.sandbox_id).exists()
    else:
        sandbox = node.sandboxes.get(spec.sandbox_id)
        state = sandbox.observed().state
        alive = machine == "lives" and not rebooted and left in ("running", "paused")
        kept = left in ("restoring", "suspended")
        assert state in (("running",) if alive else ("suspended",) if kept else ("stopped", "failed"))
        assert bool(node.launcher.machines) == alive
        await sandbox.stop("", 0.1)
        assert (await node.sandboxes.start(sandbox)).state == "running"
        await sandbox.delete()
    assert node.launcher.machines == {}


async def test_a_machine_that_a_dying_node_left_standing_goes_on(node: Node) -> None:
    spec, asked = node.spec(), node.spec()
    for one in (spec, asked):
        await node.sandboxes.create(one)
    await pausing.pause(node.sandboxes.get(asked.sandbox_id))
    node.launcher.machines[spec.sandbox_id].status = "paused"  # for a snapshot, say
    thawed: list[str] = []

    async def thaw() -> None:
        thawed.append("yes")

    node.launcher.hooks["thaw"] = thaw
    await node.restart()
    assert node.sandboxes.get(spec.sandbox_id).observed().state == "running"
    assert node.launcher.machines[spec.sandbox_id].status == "running"
    assert thawed == ["yes"]
    assert node.sandboxes.get(asked.sandbox_id).observed().state == "paused"


async def test_a_state_that_the_disk_did_not_take_is_recorded_when_there_is_room(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "SAVE_AGAIN_S", 0.0)
    spec = node.spec()
    await node.sandboxes.create(spec)
    write, left = records.write, [3]

    def full(*arguments: Any, **more: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "full")
        write(*arguments, **more)

    monkeypatch.setattr(records, "write", full)
    await node.sandboxes.get(spec.sandbox_id).stop("", 0.1)
    await settle()
    await node.restart()
    assert node.sandboxes.get(spec.sandbox_id).observed().state == "stopped"


async def test_who_waits_for_a_creation_hears_that_it_was_given_up(node: Node) -> None:
    gate = node.launcher.hooks["restore"] = Gate()
    spec = node.spec()
    creating = [asyncio.create_task(node.sandboxes.create(spec)) for _ in range(2)]
    await gate.entered.wait()
    await settle()
    await node.sandboxes.get(spec.sandbox_id).delete()
    for result in await asyncio.gather(*creating, return_exceptions=True):
        assert isinstance(result, Conflict)
        assert result.code == "preempted"
    assert node.launcher.machines == {}


# -- everything at once


@pytest.mark.parametrize("seed", range(30))
async def test_any_history_ends_in_the_truth(node: Node, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Verbs, deaths, failures and restarts in any order: when all is quiet, what is shown is what there is."""
    chance = random.Random(seed)
    monkeypatch.setattr(adoption, "ADOPT_AGAIN_S", 0.0)
    monkeypatch.setattr(sandbox_module, "SAVE_AGAIN_S", 0.0)
    specs = [node.spec() for _ in range(3)]
    write, quiet = records.write, False

    async def hook() -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if not quiet and chance.random() < 0.15:
            raise chance.choice((VmmTimeout("late"), LauncherUnavailable("gone"), OSError(errno.ENOSPC, "full")))

    async def talk() -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if not quiet and chance.random() < 0.15:
            raise LinkLost("silent")

    def record(*arguments: Any, **more: Any) -> None:
        if not quiet and chance.random() < 0.05:
            raise OSError(errno.ENOSPC, "full")
        write(*arguments, **more)

    monkeypatch.setattr(records, "write", record)
    verbs = ("start", "restore", "adopt", "pause", "resume", "kill_vm", "forget_vm")
    node.launcher.hooks.update({**dict.fromkeys(verbs, hook), "setup": talk, "shutdown": talk})
    node.connects = talk

    async def one(spec: SandboxSpec) -> None:
        sandbox = node.sandboxes._sandboxes.get(spec.sandbox_id)
        action = chance.choice(("create", "create", "start", "stop", "pause", "resume", "delete", "die"))
        with contextlib.suppress(HatchwayError):
            if action == "create":
                await node.sandboxes.create(spec)
            elif action == "die" and spec.sandbox_id in node.launcher.machines:
                node.launcher.machines[spec.sandbox_id].end(ExitStatus(code=0, guest_shutdown=chance.random() < 0.5))
            elif sandbox is not None and action == "start":
                await node.sandboxes.start(sandbox)
            elif sandbox is not None and action == "stop":
                await sandbox.stop("", 0.1)
            elif sandbox is not None and action in ("pause", "resume"):
                await getattr(pausing, action)(sandbox)
            elif sandbox is not None and action == "delete":
                await sandbox.delete()

    for _ in range(12):
        tasks = [asyncio.create_task(one(chance.choice(specs))) for _ in range(chance.randrange(1, 5))]
        done, pending = await asyncio.wait(tasks, timeout=WITHIN)
        assert not pending
        for task in done:
            task.result()
        if chance.random() < 0.2:
            await node.restart()
    quiet = True
    await settle()
    for task in [task for task in asyncio.all_tasks() if task.get_name().startswith("clear ")]:
        await asyncio.wait([task])
    for spec in specs:
        sandbox = node.sandboxes._sandboxes.get(spec.sandbox_id)
        machine = node.launcher.machines.get(spec.sandbox_id)
        if machine is not None and machine.ended.is_set():
            machine = None  # what the launcher still holds of one that ended
        if sandbox is None:
            assert machine is None
            continue
        state = sandbox.observed().state
        if sandbox.record.state != "deleting":
            # A resume that failed leaves the machine paused; one whose launcher was away may leave it behind a failure.
            assert {"running": "running", "paused": "paused"}.get(state) == (
                machine.status if machine is not None and state != "failed" else None
            )
            await sandbox.stop("", 0.1)
            assert (await node.sandboxes.create(spec)).state in ("running", "stopped")
            if sandbox.observed().state == "stopped":
                assert (await node.sandboxes.start(node.sandboxes.get(spec.sandbox_id))).state == "running"
        assert (await node.sandboxes.get(spec.sandbox_id).delete()).state == "deleted"
    assert node.launcher.machines == {}
    assert list(node.root.iterdir()) == []


# -- what they may use


def with_secret(spec: SandboxSpec) -> SandboxSpec:
    """Of a project whose policy lets a sandbox use a secret."""
    text = (
        '{"version": 1, "rules": [{"id": "one", "to": {"hosts": ["a.example"]}, "credentials": ["bot"]}],'
        ' "credentials": [{"id": "bot", "source": "store:bot", "inject": [{"where": "header"}]}]}'
    )
    egress = EgressSpec(revision=1, documents=(PolicyDocument(tier="project", name="web", version=1, text=text),))
    return msgspec.structs.replace(spec, egress=egress)


async def test_c11_a_claim_that_is_tried_again_may_use_what_its_policy_says(node: Node) -> None:
    spec = node.spec()
    await pooling.prepare(node.sandboxes, spec)
    gateway = node.sandboxes.get(spec.sandbox_id).gateway

    async def fail() -> None:
        raise LinkLost("silent")

    node.launcher.hooks["setup"] = fail
    with pytest.raises(HatchwayError):
        await pooling.claim(node.sandboxes.get(spec.sandbox_id), with_secret(spec))
    assert not gateway.leases, "its machine stands still"
    del node.launcher.hooks["setup"]
    claimed = await pooling.claim(node.sandboxes.get(spec.sandbox_id), with_secret(spec))
    assert claimed.state == "running"
    assert gateway.leases


async def test_c11_what_a_sandbox_may_use_follows_its_machine(node: Node) -> None:
    """Through a pause that fails behind the machine, a resume that fails before it, and a node that ends in between."""
    spec = with_secret(node.spec())
    await node.sandboxes.create(spec)
    name = spec.sandbox_id

    def leases() -> bool:
        return node.sandboxes.get(name).gateway.leases

    machine = node.launcher.machines[name]

    async def late() -> None:
        machine.status = "paused"
        raise VmmTimeout("It did not say so.")

    node.launcher.hooks["pause"] = late
    assert leases()
    with pytest.raises(HatchwayError):
        await pausing.pause(node.sandboxes.get(name))
    assert (node.sandboxes.get(name).record.state, leases()) == ("paused", False)
    del node.launcher.hooks["pause"]

    await node.restart()
    assert (node.sandboxes.get(name).record.state, leases()) == ("paused", False)

    async def stays() -> None:
        raise VmmTimeout("It did not say so.")

    async def fail() -> None:
        raise LinkLost("silent")

    node.launcher.hooks |= {"pause": stays, "setup": fail}
    with pytest.raises(HatchwayError):
        await pausing.resume(node.sandboxes.get(name))
    assert (machine.status, node.sandboxes.get(name).record.state, leases()) == ("running", "running", True)
    node.launcher.hooks.clear()

    # A node that died behind the machine's resume, and before the record of it.
    await pausing.pause(node.sandboxes.get(name))
    machine.status = "running"
    await node.restart()
    assert (node.sandboxes.get(name).record.state, leases()) == ("running", True)
