"""Snapshots, rollbacks and forks in the database, on both databases."""

from typing import Any

import pytest
from tests.support.databases import database, where

from hatchway.domain.errors import Conflict, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import SnapshotKind, State, Verb
from hatchway.domain.quotas import Quotas
from hatchway.domain.shapes import Shape
from hatchway.storage import (
    accepting,
    branches,
    claims,
    ending,
    operations,
    outbox,
    projects,
    sandboxes,
    sessions,
    snapshot_imports,
    snapshots,
    subjects,
)
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.branches import NewBranches
from hatchway.storage.database import Database
from hatchway.storage.idempotency import Answered, IdempotencyKey
from hatchway.storage.rows import SandboxRow, SnapshotRow
from hatchway.storage.snapshot_imports import NewSnapshot
from hatchway.wire.node import (
    BranchedSession,
    BranchOutcome,
    ForkAnswer,
    Observed,
    SessionSpec,
    SessionStatus,
    Snapshot,
    SnapshotMade,
)

__all__ = ["database", "where"]


def observed(row: SandboxRow, state: State, **changes: Any) -> Observed:
    fields: dict[str, Any] = {"sandbox_id": row.id, "project": row.project, "generation": 1, "boot_id": "b"}
    return Observed(**{**fields, "state": state, "sequence": 7, **changes})


async def ends(database: Database, made: list[SandboxRow]) -> list[tuple[str, str, str | None, str]]:
    """What the events say of the branches: the state that each came to, and why, in the order in which they are given."""
    events = await database.read(outbox.after, 0, ("default",), 100)
    told = {one.subject: one.data for one in events if one.kind == "sandbox.state_changed"}
    return [(one.id, told[one.id]["state"], told[one.id]["cause"], told[one.id]["reason"]) for one in made]


async def running(database: Database) -> SandboxRow:
    new = NewSandbox(
        project="default",
        name=None,
        node_id="node-one",
        template="seed:latest",
        template_digest="sha256:00",
        shape=Shape(),
        metadata={"a": "b"},
        env={"K": "V"},
        require_isolation=None,
    )
    accepted = await database.write(accepting.accept_create, new, None)
    finished = await database.write(ending.succeed, accepted.operation, observed(accepted.sandbox, State.RUNNING), 1.0)
    assert finished is not None
    return finished.sandbox


async def move(database: Database, row: SandboxRow, verb: Verb, state: State) -> SandboxRow:
    accepted = await database.write(accepting.accept_verb, "default", row.id, verb, None)
    finished = await database.write(ending.succeed, accepted.operation, observed(row, state), 1.0)
    assert finished is not None
    return finished.sandbox


async def snapshot(database: Database, row: SandboxRow, kind: SnapshotKind = SnapshotKind.FULL) -> SnapshotRow:
    accepted = await database.write(snapshots.accept, "default", row.id, kind, "mine", None)
    finished = await database.write(snapshots.made, accepted.operation, answer(row, accepted, kind), 1.0)
    assert finished is not None
    assert finished.sandbox.head_snapshot_id == accepted.operation.arguments["snapshot"]
    return await database.read(snapshots.get_ready, "default", accepted.operation.arguments["snapshot"])


def answer(row: SandboxRow, accepted: Accepted, kind: SnapshotKind) -> SnapshotMade:
    made = Snapshot(
        snapshot_id=accepted.operation.arguments["snapshot"],
        sandbox_id=row.id,
        project="default",
        kind=kind,
        template_digest="sha256:00",
        shape=Shape(),
        disk_bytes=5,
        memory_bytes=6,
        digest="sha256:11",
        created_at=1.0,
    )
    return SnapshotMade(snapshot=made, source=observed(row, row.state), source_stopped_ms=3.0)


# -- snapshots


async def test_snapshots_have_parents_and_the_sandbox_keeps_its_state(database: Database) -> None:
    row = await running(database)
    first = await snapshot(database, row)
    second = await snapshot(database, row, SnapshotKind.DISK)
    assert (first.parent_id, second.parent_id) == (None, first.id)
    assert (first.state, first.disk_bytes, first.memory_bytes, first.digest) == ("ready", 5, 6, "sha256:11")
    after = await database.read(sandboxes.get, "default", row.id)
    assert (after.state, after.operation_id) == (State.RUNNING, None)
    listed = await database.read(snapshots.list_page, "default", sandbox_id=row.id, limit=10)
    assert {one.id for one in listed} == {first.id, second.id}
    assert await database.read(snapshots.list_page, "other", limit=10) == []
    with pytest.raises(NotFound):
        await database.read(snapshots.get, "other", first.id)


@pytest.mark.parametrize(
    ("verb", "state", "kinds"),
    [
        (Verb.PAUSE, State.PAUSED, {SnapshotKind.DISK, SnapshotKind.FULL}),
        (Verb.SUSPEND, State.SUSPENDED, {SnapshotKind.DISK}),
        (Verb.STOP, State.STOPPED, {SnapshotKind.DISK}),
    ],
)
async def test_memory_is_kept_only_where_a_machine_is(
    database: Database, verb: Verb, state: State, kinds: set[SnapshotKind]
) -> None:
    row = await move(database, await running(database), verb, state)
    for kind in SnapshotKind:
        if kind in kinds:
            assert (await snapshot(database, row, kind)).kind is kind
        else:
            with pytest.raises(Conflict) as raised:
                await database.write(snapshots.accept, "default", row.id, kind, None, None)
            assert raised.value.code == "wrong_state"
            assert await database.read(snapshots.list_page, "default", sandbox_id=row.id, kind=kind, limit=9) == []


@pytest.mark.parametrize("end", ["failed", "preempted", "cancelled"])
async def test_a_snapshot_that_was_not_made_says_why_and_can_be_deleted(database: Database, end: str) -> None:
    row = await running(database)
    accepted = await database.write(snapshots.accept, "default", row.id, SnapshotKind.FULL, None, None)
    snapshot_id = accepted.operation.arguments["snapshot"]
    with pytest.raises(Conflict) as raised:
        await database.write(snapshots.begin_delete, "default", snapshot_id)
    assert raised.value.code == "snapshot_not_ready"
    if end == "failed":
        await database.write(ending.fail, accepted.operation, {"code": "x", "cause": "full"}, None, 1.0)
    elif end == "preempted":
        await database.write(accepting.accept_verb, "default", row.id, Verb.DELETE, None)
    else:
        await database.write(ending.cancel, "default", accepted.operation.id)
    assert (
        await database.write(snapshots.made, accepted.operation, answer(row, accepted, SnapshotKind.FULL), 1.0) is None
    )
    failed = await database.read(snapshots.get, "default", snapshot_id)
    assert failed.state == "failed"
    assert failed.error is not None
    with pytest.raises(Conflict):
        await database.read(snapshots.get_ready, "default", snapshot_id)
    assert [one.id for one in await database.read(snapshots.unwanted, "node-one")] == [snapshot_id]
    await database.write(snapshots.begin_delete, "default", snapshot_id)
    gone = await database.write(snapshots.deleted, snapshot_id)
    assert gone is not None
    assert gone.state == "deleted"
    assert await database.read(snapshots.unwanted, "node-one") == []


async def test_what_is_made_of_a_snapshot_numbers_on_from_its_sandbox(database: Database) -> None:
    """Its agent knows the processes of then by their numbers, those that have ended too."""
    row = await running(database)
    asked = SessionSpec(session_id="", sandbox_id="", project="", process_id=0, argv=("true",))
    for _ in range(3):
        await database.write(sessions.create, "default", row.id, asked, None)
    kept = await snapshot(database, row)
    await move(database, row, Verb.DELETE, State.DELETED)
    new = NewSandbox(
        project="default",
        name=None,
        node_id="node-one",
        template="seed:latest",
        template_digest="sha256:00",
        shape=Shape(),
        metadata={},
        env={},
        require_isolation=None,
        snapshot_id=kept.id,
    )
    made = await database.write(snapshots.accept_create, new, None)
    assert made.sandbox.last_process_id == 3


def imported(**more: Any) -> NewSnapshot:
    members: dict[str, Any] = {
        "project": "default",
        "node_id": "node-one",
        "kind": SnapshotKind.FULL,
        "name": "back",
        "template": "seed:latest",
        "template_digest": "sha256:00",
        "shape": Shape(),
        "source": new_id(),
        "snapshot": new_id(),
        "key_id": "k1",
        "last_process_id": 4,
    }
    return NewSnapshot(**{**members, **more})


def taken_in(new: NewSnapshot, accepted: Accepted, octets: int = 11) -> Snapshot:
    return Snapshot(
        snapshot_id=accepted.operation.target,
        sandbox_id=new.source,
        project=new.project,
        kind=new.kind,
        template_digest=new.template_digest,
        shape=new.shape,
        disk_bytes=5,
        memory_bytes=octets - 5,
        digest="sha256:11",
    )


async def test_an_imported_snapshot_has_no_sandbox_and_an_operation_of_its_own(database: Database) -> None:
    new = imported()
    begun = await database.write(snapshot_imports.accept, new, new_id(), IdempotencyKey(key="once", request_hash=b"h"))
    target = begun.operation.target
    with pytest.raises(Answered) as repeated:
        await database.write(snapshot_imports.accept, new, new_id(), IdempotencyKey(key="once", request_hash=b"h"))
    assert repeated.value.answer == {"snapshot": target, "operation": begun.operation.id}
    with pytest.raises(Conflict, match="is being made"):
        await database.write(snapshots.begin_delete, "default", target)
    assert await database.read(sandboxes.find, target) is None
    stand_in = await database.read(subjects.of, begun.operation)
    assert stand_in is not None
    assert (stand_in.id, stand_in.node_id, stand_in.project) == (target, "node-one", "default")

    finished = await database.write(snapshot_imports.made, begun.operation, taken_in(new, begun), 1.0)
    assert finished is not None
    assert (finished.operation.status, finished.operation.result) == (
        "succeeded",
        {"snapshot": target, "changed": True},
    )
    assert await database.write(snapshot_imports.made, begun.operation, taken_in(new, begun), 1.0) is None
    row = await database.read(snapshots.get_ready, "default", target)
    assert row.origin == {"sandbox": new.source, "snapshot": new.snapshot, "key": "k1"}
    assert (row.sandbox_id, row.kind, row.disk_bytes, row.memory_bytes) == (new.source, SnapshotKind.FULL, 5, 6)
    told = [one for one in await database.read(outbox.after, 0, ("default",), 100) if one.subject == target]
    assert [one.kind for one in told] == ["operation.accepted", "operation.succeeded", "snapshot.created"]
    assert [one.data.get("snapshot") for one in told[:2]] == [target, target]
    # Whatever runs in it has one of the first four numbers.
    made = await database.write(
        snapshots.accept_create,
        NewSandbox(
            project="default",
            name=None,
            node_id="node-one",
            template="seed:latest",
            template_digest="sha256:00",
            shape=Shape(),
            metadata={},
            env={},
            require_isolation=None,
            snapshot_id=target,
        ),
        None,
    )
    assert made.sandbox.last_process_id == 4


@pytest.mark.parametrize("end", ["fail", "cancel", "quota"])
async def test_of_a_snapshot_that_was_not_imported_nothing_stays(database: Database, end: str) -> None:
    new = imported()
    if end == "quota":
        await database.write(projects.change, "default", {"quotas": Quotas(snapshot_bytes=10)})
    begun = await database.write(snapshot_imports.accept, new, new_id(), None)
    target = begun.operation.target
    if end == "fail":
        error = {"code": "archive_altered", "cause": "It was altered.", "remedy": "Fetch it again."}
        finished = await database.write(ending.fail, begun.operation, error, None, 1.0)
    elif end == "cancel":
        finished = await database.write(ending.cancel, "default", begun.operation.id)
    else:
        finished = await database.write(snapshot_imports.made, begun.operation, taken_in(new, begun), 1.0)
    assert finished is not None
    status, code = {
        "fail": ("failed", "archive_altered"),
        "cancel": ("cancelled", "cancelled"),
        "quota": ("failed", "quota_exceeded"),
    }[end]
    assert finished.operation.error is not None
    assert (finished.operation.status, finished.operation.error["code"]) == (status, code)
    # Its node is told to remove what it may have made of it, and then it is gone.
    (row,) = await database.read(snapshots.unwanted, "node-one")
    assert (row.id, row.state) == (target, "deleting")
    await database.write(snapshots.deleted, target)
    assert await database.read(snapshots.list_page, "default", limit=10) == []


async def test_the_import_of_a_dead_control_process_is_another_ones(database: Database) -> None:
    begun = await database.write(snapshot_imports.accept, imported(), new_id(), None)
    assert await database.write(claims.claim, "other", ["node-two"], accepted_by=0.0) == []
    ((operation, sandbox),) = await database.write(claims.claim, "other", ["node-one"], accepted_by=0.0)
    assert (operation.id, sandbox.id) == (begun.operation.id, begun.operation.target)


async def test_a_snapshot_outlives_its_sandbox(database: Database) -> None:
    row = await running(database)
    kept = await snapshot(database, row)
    await move(database, row, Verb.DELETE, State.DELETED)
    assert (await database.read(snapshots.get_ready, "default", kept.id)).id == kept.id


# -- rollback


@pytest.mark.parametrize(("kind", "state"), [(SnapshotKind.FULL, State.RUNNING), (SnapshotKind.DISK, State.STOPPED)])
async def test_a_rollback_leads_to_what_its_kind_gives(database: Database, kind: SnapshotKind, state: State) -> None:
    row = await running(database)
    first = await snapshot(database, row, kind)
    second = await snapshot(database, row)
    accepted = await database.write(snapshots.accept_rollback, "default", row.id, first.id, None)
    assert accepted.sandbox.desired is state
    finished = await database.write(snapshots.rolled_back, accepted.operation, observed(row, state), 1.0)
    assert finished is not None
    assert (finished.sandbox.state, finished.sandbox.head_snapshot_id) == (state, first.id)
    assert finished.operation.result is not None
    assert finished.operation.result["snapshot"] == first.id
    assert second.id != first.id


async def test_another_sandboxes_snapshot_is_no_way_back(database: Database) -> None:
    one, two = await running(database), await running(database)
    kept = await snapshot(database, one)
    with pytest.raises(NotFound):
        await database.write(snapshots.accept_rollback, "default", two.id, kept.id, None)
    assert (await database.read(sandboxes.get, "default", two.id)).operation_id is None
    await database.write(snapshots.begin_delete, "default", kept.id)
    with pytest.raises(Conflict) as raised:
        await database.write(snapshots.accept_rollback, "default", one.id, kept.id, None)
    assert raised.value.code == "snapshot_not_ready"


# -- fork


async def fork(database: Database, row: SandboxRow, count: int = 3, **wanted: Any) -> tuple[Accepted, list[SandboxRow]]:
    accepted = await database.write(branches.accept, "default", row.id, NewBranches(count=count, **wanted), None)
    return accepted, await database.read(branches.open_branches, accepted.operation)


async def test_branches_are_there_before_they_run(database: Database) -> None:
    row = await running(database)
    accepted, made = await fork(database, row, env={"K": "W"})
    assert [one.id for one in made] == accepted.operation.arguments["branches"]
    assert {(one.state, one.forked_from, one.operation_id) for one in made} == {
        (State.PENDING, row.id, accepted.operation.id)
    }
    assert made[0].metadata == {"a": "b"}
    assert made[0].env == {"K": "W"}
    with pytest.raises(Conflict) as raised:
        await database.write(accepting.accept_verb, "default", made[0].id, Verb.PAUSE, None)
    assert raised.value.code == "operation_in_flight"


async def test_a_fork_succeeds_in_part_and_says_which(database: Database) -> None:
    row = await running(database)
    accepted, made = await fork(database, row)
    session = SessionSpec(session_id=new_id(), sandbox_id=made[0].id, project="default", process_id=4, argv=("x",))
    status = SessionStatus(session_id=session.session_id, sandbox_id=made[0].id, state="running")
    found = ForkAnswer(
        source=observed(row, State.RUNNING),
        source_stopped_ms=9.0,
        branches=(
            BranchOutcome(
                sandbox_id=made[0].id,
                observed=observed(made[0], State.RUNNING),
                sessions=(BranchedSession(spec=session, status=status, forked_from=new_id()),),
            ),
            BranchOutcome(sandbox_id=made[1].id, error={"code": "host_memory_full", "cause": "Full.", "remedy": "r"}),
        ),
    )
    finished = await database.write(branches.made, accepted.operation, found, 1.0)
    assert finished is not None
    assert finished.operation.status == "succeeded"
    assert finished.operation.result is not None
    assert [one["state"] for one in finished.operation.result["branches"]] == ["running", "failed", "failed"]
    after = [await database.read(sandboxes.get, "default", one.id) for one in made]
    assert [one.cause for one in after] == [None, "operation_failed", "operation_failed"]
    assert [one.state for one in after] == [State.RUNNING, State.FAILED, State.FAILED]
    assert all(one.operation_id is None for one in after)
    assert (after[1].reason, bool(after[2].reason)) == ("Full.", True)
    assert (await database.read(sandboxes.get, "default", row.id)).state is State.RUNNING
    told = await ends(database, made)
    assert told == [
        (one.id, one.state, one.cause, one.reason) for one in after
    ]  # each by an event, also what was not made
    kept = await database.read(sessions.get, "default", session.session_id)
    assert (kept.state, kept.process_id, kept.forked_from is not None) == ("running", 4, True)
    assert after[0].last_process_id == 4  # the next session gets a number that its agent does not know


async def test_a_fork_without_any_branch_failed(database: Database) -> None:
    row = await running(database)
    accepted, made = await fork(database, row, 2)
    error = {"code": "host_memory_full", "cause": "Full.", "remedy": "r"}
    outcomes = tuple(BranchOutcome(sandbox_id=one.id, error=error) for one in made)
    found = ForkAnswer(source=observed(row, State.RUNNING), branches=outcomes)
    finished = await database.write(branches.made, accepted.operation, found, 1.0)
    assert finished is not None
    assert (finished.operation.status, finished.operation.error) == ("failed", error)
    assert finished.sandbox.state is State.RUNNING
    for one in made:
        after = await database.read(sandboxes.get, "default", one.id)
        assert (after.state, after.cause, after.reason) == (State.FAILED, "operation_failed", "Full.")
        assert after.operation_id is None
    assert [state for _, state, _, _ in await ends(database, made)] == [State.FAILED, State.FAILED]


async def test_a_branch_can_be_deleted_while_it_is_made(database: Database) -> None:
    row = await running(database)
    accepted, made = await fork(database, row, 2)
    deletion = await database.write(accepting.accept_verb, "default", made[0].id, Verb.DELETE, None)
    assert deletion.preempted is None
    assert (await database.read(operations.get, "default", accepted.operation.id)).status == "pending"
    assert [one.id for one in await database.read(branches.open_branches, accepted.operation)] == [made[1].id]
    outcomes = tuple(BranchOutcome(sandbox_id=one.id, observed=observed(one, State.RUNNING)) for one in made)
    found = ForkAnswer(source=observed(row, State.RUNNING), branches=outcomes)
    assert await database.write(branches.made, accepted.operation, found, 1.0) is not None
    assert (await database.read(sandboxes.get, "default", made[0].id)).operation_id == deletion.operation.id
    assert (await database.read(sandboxes.get, "default", made[1].id)).state is State.RUNNING


async def test_deleting_the_source_leaves_no_branch_without_a_way_out(database: Database) -> None:
    row = await running(database)
    accepted, made = await fork(database, row, 2)
    deletion = await database.write(accepting.accept_verb, "default", row.id, Verb.DELETE, None)
    assert deletion.preempted == accepted.operation.id
    for one in made:
        after = await database.read(sandboxes.get, "default", one.id)
        assert (after.state, after.operation_id) == (State.FAILED, None)
        await move(database, after, Verb.DELETE, State.DELETED)


async def test_a_repeated_fork_names_the_first(database: Database) -> None:
    row = await running(database)
    key = IdempotencyKey(key="k", request_hash=b"h")
    accepted = await database.write(branches.accept, "default", row.id, NewBranches(count=2), key)
    with pytest.raises(Answered) as raised:
        await database.write(branches.accept, "default", row.id, NewBranches(count=2), key)
    assert raised.value.answer["operation"] == accepted.operation.id


async def test_suspended_sandboxes_tell_what_they_keep(database: Database) -> None:
    row = await running(database)
    accepted = await database.write(accepting.accept_verb, "default", row.id, Verb.SUSPEND, None)
    finished = await database.write(
        ending.succeed, accepted.operation, observed(row, State.SUSPENDED, stored_bytes=1234), 1.0
    )
    assert finished is not None
    assert (finished.sandbox.state, finished.sandbox.stored_bytes) == (State.SUSPENDED, 1234)
    lost = observed(row, State.SUSPENDED, stored_bytes=1234, cause="memory_lost", reason="another CPU", boot_id="b")
    found = await database.write(ending.observe, lost)
    assert found is not None
    assert (found.state, found.cause, found.reason) == (State.SUSPENDED, "memory_lost", "another CPU")
    assert (await move(database, found, Verb.RESTORE, State.RUNNING)).stored_bytes is None
