"""Quotas hold whatever runs beside a request, on both databases; and how a project ends."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import select, update
from tests.support.databases import database, where

from hatchway.domain.errors import Conflict, Exhausted, Forbidden, HatchwayError, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import SnapshotKind, State, Verb
from hatchway.domain.quotas import Caps, ProjectUsage, Quotas, template_allowed
from hatchway.domain.shapes import Shape
from hatchway.storage import accepting, branches, ending, keys, outbox, projects, quotas, sessions, snapshots, tokens
from hatchway.storage.accepting import NewSandbox
from hatchway.storage.branches import NewBranches
from hatchway.storage.database import Connection, Database
from hatchway.storage.idempotency import IdempotencyKey
from hatchway.storage.rows import SandboxRow
from hatchway.storage.tables import metadata, sandboxes
from hatchway.wire.node import Observed, SessionSpec, Snapshot, SnapshotMade

__all__ = ["database", "where"]

SHAPE = Shape(vcpus=2, memory_mib=512, disk_mib=1024)
SPEC = SessionSpec(session_id="", sandbox_id="", project="", process_id=0, argv=("true",))


def new(project: str = "default") -> NewSandbox:
    return NewSandbox(
        project=project,
        name=None,
        node_id="node-one",
        template="seed:latest",
        template_digest="sha256:00",
        shape=SHAPE,
        metadata={},
        env={},
        require_isolation=None,
    )


def seen(row: SandboxRow, state: State, sequence: int) -> Observed:
    return Observed(
        sandbox_id=row.id,
        project=row.project,
        generation=row.generation,
        boot_id="b",
        state=state,
        sequence=sequence,
    )


async def bound(database: Database, **limits: int) -> None:
    await database.write(projects.change, "default", {"quotas": Quotas(**limits)})


async def running(database: Database, project: str = "default") -> SandboxRow:
    accepted = await database.write(accepting.accept_create, new(project), None)
    finished = await database.write(ending.succeed, accepted.operation, seen(accepted.sandbox, State.RUNNING, 1), 1.0)
    assert finished is not None
    return finished.sandbox


async def done(database: Database, row: SandboxRow, verb: Verb, state: State, sequence: int) -> SandboxRow:
    accepted = await database.write(accepting.accept_verb, row.project, row.id, verb, None)
    finished = await database.write(ending.succeed, accepted.operation, seen(row, state, sequence), 1.0)
    assert finished is not None
    return finished.sandbox


async def refused(database: Database, body: Any, *arguments: Any) -> dict[str, Any]:
    """What a refusal by a quota says."""
    with pytest.raises(Forbidden) as raised:
        await database.write(body, *arguments)
    assert raised.value.code == "quota_exceeded"
    assert raised.value.remedy
    return raised.value.extra


async def usage(database: Database) -> ProjectUsage:
    return await database.read(quotas.usage, "default")


async def accepted_of(attempts: list[Any]) -> int:
    """How many of what runs at once was accepted; all others were refused by a quota."""
    ended = await asyncio.gather(*attempts, return_exceptions=True)
    failures = [one for one in ended if isinstance(one, BaseException)]
    codes = {one.code if isinstance(one, HatchwayError) else repr(one) for one in failures}
    assert codes <= {"quota_exceeded", "create_rate_exceeded"}
    return len(ended) - len(failures)


@pytest.mark.parametrize(
    "limits",
    [
        {"sandboxes": 7},
        {"disk_mib": 7 * 1024 + 1023},
        {"running_vcpus": 15},
        {"running_memory_mib": 7 * 512},
        {"creates_per_minute": 7},
    ],
    ids=lambda limits: next(iter(limits)),
)
async def test_creates_at_once_do_not_pass_a_quota_together(database: Database, limits: dict[str, int]) -> None:
    await bound(database, **limits)
    made = await accepted_of([database.write(accepting.accept_create, new(), None) for _ in range(24)])
    assert made == 7
    assert (await usage(database)).sandboxes == 7


async def test_a_fork_counts_all_its_branches_or_makes_none(database: Database) -> None:
    source = await running(database)
    await bound(database, sandboxes=100)
    extra = await refused(database, branches.accept, "default", source.id, NewBranches(count=100), None)
    assert extra == {"quota": "sandboxes", "limit": 100, "used": 1, "wanted": 100}
    assert (await usage(database)).sandboxes == 1
    await database.write(branches.accept, "default", source.id, NewBranches(count=99), None)
    assert await usage(database) == ProjectUsage(
        sandboxes=100,
        running_vcpus=200,
        running_memory_mib=51_200,
        disk_mib=102_400,
        creates_last_minute=100,
    )


async def test_forks_and_creates_at_once_share_the_quota(database: Database) -> None:
    sources = [await running(database) for _ in range(3)]
    await bound(database, sandboxes=10)
    attempts = [database.write(branches.accept, "default", one.id, NewBranches(count=3), None) for one in sources]
    attempts += [database.write(accepting.accept_create, new(), None) for _ in range(6)]
    await accepted_of(attempts)
    assert (await usage(database)).sandboxes in (9, 10)  # a fork of three does not fit into one or two places


async def test_what_gets_a_machine_again_needs_room_for_it(database: Database) -> None:
    rows = [await running(database) for _ in range(3)]
    stopped = await done(database, rows[0], Verb.STOP, State.STOPPED, 2)
    suspended = await done(database, rows[1], Verb.SUSPEND, State.SUSPENDED, 2)
    paused = await done(database, rows[2], Verb.PAUSE, State.PAUSED, 2)
    await bound(database, running_vcpus=3)
    assert (await usage(database)).running_vcpus == 2  # what is paused has its machine
    for row, verbs in ((stopped, (Verb.START, Verb.WAKE)), (suspended, (Verb.RESTORE, Verb.WAKE))):
        for verb in verbs:
            extra = await refused(database, accepting.accept_verb, "default", row.id, verb, None)
            assert extra == {"quota": "running_vcpus", "limit": 3, "used": 2, "wanted": 2}
    await done(database, paused, Verb.RESUME, State.RUNNING, 3)
    await bound(database, running_vcpus=4)
    starts = [database.write(accepting.accept_verb, "default", row.id, Verb.WAKE, None) for row in (stopped, suspended)]
    assert await accepted_of(starts) == 1
    assert (await usage(database)).running_vcpus == 4  # it counts from its acceptance


async def test_a_wrong_state_is_told_before_a_quota(database: Database) -> None:
    row = await done(database, await running(database), Verb.STOP, State.STOPPED, 2)
    await bound(database, running_vcpus=0, sandboxes=0)
    for body, arguments in (
        (accepting.accept_verb, (Verb.RESTORE, None)),
        (branches.accept, (NewBranches(count=1), None)),
    ):
        with pytest.raises(Conflict, match="wrong_state"):
            await database.write(body, "default", row.id, *arguments)  # type: ignore[arg-type]


async def test_a_repetition_is_answered_beyond_the_quota(database: Database) -> None:
    from hatchway.storage.idempotency import Answered

    await bound(database, sandboxes=1)
    key = IdempotencyKey(key="one", request_hash=b"x" * 32)
    await database.write(accepting.accept_create, new(), key)
    with pytest.raises(Answered):
        await database.write(accepting.accept_create, new(), key)


async def test_sandboxes_that_are_gone_leave_room(database: Database) -> None:
    await bound(database, sandboxes=1, running_vcpus=2, disk_mib=1024)
    row = await running(database)
    await refused(database, accepting.accept_create, new(), None)
    await done(database, row, Verb.DELETE, State.DELETED, 2)
    await running(database)


async def test_a_rate_says_when_there_is_room(database: Database) -> None:
    await bound(database, creates_per_minute=3)
    rows = [await running(database) for _ in range(3)]

    def age(connection: Connection, row: SandboxRow, seconds: float) -> None:
        query = update(sandboxes).where(sandboxes.c.id == row.id)
        connection.execute(query.values(created_at=sandboxes.c.created_at - seconds))

    await database.write(age, rows[0], 50.0)
    await database.write(age, rows[1], 20.0)
    source = rows[2]
    waits = []
    for wanted in (1, 2, 3):
        with pytest.raises(Exhausted) as raised:
            await database.write(branches.accept, "default", source.id, NewBranches(count=wanted), None)
        assert raised.value.code == "create_rate_exceeded"
        waits.append(float(str(raised.value.extra["retry_after_s"])))
    assert 0 <= waits[0] <= 10 < waits[1] <= 40 < waits[2] <= 60
    extra = await refused(database, branches.accept, "default", source.id, NewBranches(count=4), None)
    assert (extra["quota"], extra["limit"], extra["wanted"]) == ("creates_per_minute", 3, 4)
    await database.write(age, rows[0], 11.0)
    await running(database)


async def test_sessions_count_until_they_end_or_their_sandbox_does(database: Database) -> None:
    one, other = await running(database), await running(database)
    await bound(database, sessions=2)
    attempts = [database.write(sessions.create, "default", one.id, SPEC, None) for _ in range(8)]
    assert await accepted_of(attempts) == 2
    extra = await refused(database, sessions.create, "default", other.id, SPEC, None)
    assert extra == {"quota": "sessions", "limit": 2, "used": 2, "wanted": 1}
    await done(database, one, Verb.DELETE, State.DELETED, 2)
    _, row = await database.write(sessions.create, "default", other.id, SPEC, None)
    await database.write(sessions.create, "default", other.id, SPEC, None)
    await database.write(sessions.close, row.id, "deleted")
    await database.write(sessions.create, "default", other.id, SPEC, None)


def made(row: SandboxRow, snapshot_id: str, octets: int) -> SnapshotMade:
    kept = Snapshot(
        snapshot_id=snapshot_id,
        sandbox_id=row.id,
        project=row.project,
        kind="disk",
        template_digest="sha256:00",
        shape=SHAPE,
        disk_bytes=octets,
        memory_bytes=0,
        digest="sha256:00",
        created_at=1.0,
    )
    return SnapshotMade(snapshot=kept, source=seen(row, State.RUNNING, 2))


async def test_snapshots_never_take_more_than_their_quota(database: Database) -> None:
    rows = [await running(database) for _ in range(3)]
    await bound(database, snapshot_bytes=100)
    # Nobody knows how large they get: all begin, and one of those that do not fit together fails.
    begun = [await database.write(snapshots.accept, "default", row.id, SnapshotKind.DISK, None, None) for row in rows]
    ids = [str(one.operation.arguments["snapshot"]) for one in begun]
    ended = await asyncio.gather(
        *(
            database.write(snapshots.made, one.operation, made(row, name, 40), 1.0)
            for one, row, name in zip(begun, rows, ids, strict=True)
        )
    )
    assert sorted(one.operation.status for one in ended if one is not None) == ["failed", "succeeded", "succeeded"]
    failed = next(one for one in ended if one is not None and one.operation.status == "failed")
    assert failed.operation.error is not None
    assert failed.operation.error["code"] == "quota_exceeded"
    assert failed.sandbox.state is State.RUNNING
    name = str(failed.operation.arguments["snapshot"])
    assert (await database.read(snapshots.get, "default", name)).state == "failed"
    assert (await usage(database)).snapshot_bytes == 80
    await bound(database, snapshot_bytes=80)
    extra = await refused(database, snapshots.accept, "default", rows[0].id, SnapshotKind.DISK, None, None)
    assert extra == {"quota": "snapshot_bytes", "limit": 80, "used": 80, "wanted": 1}


async def test_one_project_does_not_use_up_what_another_may_have(database: Database) -> None:
    await bound(database, sandboxes=0)
    await running(database, "other")
    await refused(database, accepting.accept_create, new(), None)


async def test_a_bound_below_what_is_there_ends_nothing(database: Database) -> None:
    row = await running(database)
    await bound(database, sandboxes=0, running_vcpus=0, disk_mib=0, sessions=0, snapshot_bytes=0, creates_per_minute=0)
    row = await done(database, row, Verb.PAUSE, State.PAUSED, 2)
    await done(database, row, Verb.RESUME, State.RUNNING, 3)


def test_templates_are_named_in_three_ways() -> None:
    release = {"name": "seed", "tag": "latest", "digest": "sha256:00"}
    assert template_allowed(None, **release)
    for allowed in (("seed",), ("x", "seed:latest"), ("seed@sha256:00",)):
        assert template_allowed(allowed, **release)
    for allowed in ((), ("see",), ("seed:other",), ("seed@sha256:01",), ("seed:",)):
        assert not template_allowed(allowed, **release)


async def test_a_project_goes_with_everything_that_is_recorded_of_it(database: Database) -> None:
    await database.write(projects.create, "tenant", {"quotas": Quotas(sandboxes=5), "caps": Caps(vcpus=4)})
    await database.write(lambda c: keys.create(c, project="tenant", name="k", scopes=("read",)))
    accepted = await database.write(
        accepting.accept_create, new("tenant"), IdempotencyKey(key="one", request_hash=b"x" * 32)
    )
    await database.write(ending.succeed, accepted.operation, seen(accepted.sandbox, State.RUNNING, 1), 1.0)
    row = accepted.sandbox
    await database.write(sessions.create, "tenant", row.id, SPEC, None)
    token = tokens.TokenRow(
        id=new_id(),
        project="tenant",
        sandbox_id=row.id,
        key_id="k",
        scopes=("files",),
        created_at=1.0,
        expires_at=2.0,
        revoked_at=None,
    )
    await database.write(tokens.create, token)
    await database.write(tokens.revoke_of_sandbox, "tenant", row.id)
    with pytest.raises(Conflict) as raised:
        await database.write(_begin, "tenant", False)
    assert (raised.value.code, raised.value.extra["objects"]) == ("project_not_empty", {"sandboxes": 1})
    await database.write(_begin, "tenant", True)
    for refusal in (
        database.write(accepting.accept_create, new("tenant"), None),
        database.write(sessions.create, "tenant", row.id, SPEC, None),
        database.write(projects.change, "tenant", {"quotas": Quotas()}),
    ):
        with pytest.raises(Conflict, match="project_deleting"):
            await refusal
    assert not await database.write(projects.purge, "tenant")
    await done(database, row, Verb.DELETE, State.DELETED, 2)
    assert await database.write(projects.purge, "tenant")
    assert await database.write(projects.purge, "tenant")  # another process may have been quicker

    def left(connection: Connection) -> dict[str, int]:
        tables = [table for table in metadata.sorted_tables if "project" in table.c]
        assert len(tables) > 8
        return {
            table.name: len(connection.execute(select(table.c.project).where(table.c.project == "tenant")).all())
            for table in tables
        }

    assert set((await database.read(left)).values()) == {0}
    with pytest.raises(NotFound, match="unknown_project"):
        await database.read(projects.get, "tenant")
    told = await database.read(outbox.after, 0, (outbox.INSTALLATION,), 100)
    assert [one.kind for one in told if one.subject == "tenant"] == [
        "project.created",
        "project.deleting",
        "project.deleted",
    ]


async def test_what_is_made_while_a_project_ends_is_not_forgotten(database: Database) -> None:
    """A create may have been admitted just before; the project is purged without it, or not at all."""
    for number in range(8):
        name = f"tenant-{number}"
        await database.write(projects.create, name, {})

        async def end(name: str = name) -> bool:
            await database.write(_begin, name, True)
            return await database.write(projects.purge, name)

        created, purged = await asyncio.gather(
            database.write(accepting.accept_create, new(name), None), end(), return_exceptions=True
        )
        if purged is True:
            assert isinstance(created, HatchwayError), created
            assert created.code in ("project_deleting", "unknown_project")
        else:
            assert purged is False
            assert not isinstance(created, BaseException)


def _begin(connection: Connection, name: str, force: bool) -> None:
    projects.begin_delete(connection, name, force=force)
