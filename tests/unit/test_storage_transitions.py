"""Guarded transitions, on both databases."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as bounds
from hypothesis import strategies as st
from tests.support.databases import database, where

from hatchway.domain.errors import Conflict, Gone, NotFound, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import VERBS, State, Verb, admits, verbs_from
from hatchway.domain.shapes import Shape
from hatchway.storage import accepting, ending, operations, outbox, retention, sandboxes, sessions
from hatchway.storage.accepting import Accepted, NewSandbox
from hatchway.storage.database import Database
from hatchway.storage.idempotency import Answered, IdempotencyKey
from hatchway.storage.rows import SandboxRow
from hatchway.storage.sandboxes import Filter
from hatchway.wire.node import Observed, SessionSpec, SessionStatus

__all__ = ["database", "where"]


def new(**changes: Any) -> NewSandbox:
    return NewSandbox(
        **{
            "project": "default",
            "name": None,
            "node_id": "node-one",
            "template": "seed:latest",
            "template_digest": "sha256:00",
            "shape": Shape(),
            "metadata": {},
            "env": {},
            "require_isolation": None,
            **changes,
        }
    )


def seen(row: SandboxRow, state: State, sequence: int = 1, **changes: Any) -> Observed:
    fields: dict[str, Any] = {
        "sandbox_id": row.id,
        "project": row.project,
        "generation": row.generation,
        "boot_id": "b",
    }
    return Observed(**{**fields, "state": state, "sequence": sequence, **changes})


async def running(database: Database, **changes: Any) -> SandboxRow:
    accepted = await database.write(accepting.accept_create, new(**changes), None)
    finished = await database.write(ending.succeed, accepted.operation, seen(accepted.sandbox, State.RUNNING), 1.0)
    assert finished is not None
    assert finished.sandbox.state is State.RUNNING
    return finished.sandbox


async def bring_to(database: Database, state: State) -> SandboxRow:
    """A sandbox in any state, by the ways that lead there."""
    if state is State.PENDING:
        return (await database.write(accepting.accept_create, new(), None)).sandbox
    row = await running(database)
    if state is State.RUNNING:
        return row
    if state is State.FAILED:
        found = await database.write(ending.observe, seen(row, State.FAILED, 2, cause="vmm_died", reason="x"))
        assert found is not None
        return found
    verb = {
        State.PAUSED: Verb.PAUSE,
        State.STOPPED: Verb.STOP,
        State.SUSPENDED: Verb.SUSPEND,
        State.DELETED: Verb.DELETE,
    }[state]
    accepted = await database.write(accepting.accept_verb, "default", row.id, verb, None)
    finished = await database.write(ending.succeed, accepted.operation, seen(row, state, 2), 1.0)
    assert finished is not None
    return finished.sandbox


PLAIN = [verb for verb in Verb if verb is not Verb.CREATE and VERBS[verb].target is not None]
"""Verbs without arguments; the others are in `test_storage_copies.py`."""
REACHABLE = [State.RUNNING, State.SUSPENDED, State.PAUSED, State.STOPPED, State.FAILED, State.DELETED]


@pytest.mark.parametrize("state", REACHABLE)
@pytest.mark.parametrize("verb", PLAIN)
async def test_what_the_table_says_is_what_happens(database: Database, state: State, verb: Verb) -> None:
    row = await bring_to(database, state)
    rule = VERBS[verb]
    if state is State.DELETED and verb is not Verb.DELETE:
        with pytest.raises(Gone):
            await database.write(accepting.accept_verb, "default", row.id, verb, None)
        return
    if not admits(verb, state):
        with pytest.raises(Conflict) as raised:
            await database.write(accepting.accept_verb, "default", row.id, verb, None)
        assert raised.value.code == "wrong_state"
        assert raised.value.extra["verbs"] == [str(one) for one in verbs_from(state)]
        return
    accepted = await database.write(accepting.accept_verb, "default", row.id, verb, None)
    if state in rule.satisfied:
        assert not accepted.run
        assert accepted.operation.status == "succeeded"
        assert accepted.operation.result == {"state": str(state), "changed": False}
        assert accepted.sandbox == row
        return
    assert accepted.run
    assert accepted.sandbox.operation_id == accepted.operation.id
    assert accepted.sandbox.state is state
    assert accepted.sandbox.desired is rule.target
    finished = await database.write(ending.succeed, accepted.operation, seen(row, rule.target, 9), 1.0)
    assert finished is not None
    assert finished.sandbox.state is rule.target
    assert finished.sandbox.operation_id is None
    assert finished.sandbox.cause is None
    assert finished.operation.status == "succeeded"


async def test_a_second_verb_meets_the_operation_in_flight(database: Database) -> None:
    row = await running(database)
    first = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    with pytest.raises(Conflict) as raised:
        await database.write(accepting.accept_verb, "default", row.id, Verb.STOP, None)
    assert raised.value.code == "operation_in_flight"
    assert raised.value.extra["operation"] == first.operation.id


async def test_delete_preempts_and_the_old_operation_cannot_end_any_more(database: Database) -> None:
    row = await running(database)
    pause = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    deletion = await database.write(accepting.accept_verb, "default", row.id, Verb.DELETE, None)
    assert deletion.preempted == pause.operation.id
    assert await database.write(ending.succeed, pause.operation, seen(row, State.PAUSED, 5), 1.0) is None
    assert await database.write(ending.fail, pause.operation, {"code": "x"}, None, 1.0) is None
    old = await database.read(operations.get, "default", pause.operation.id)
    assert old.status == "cancelled"
    assert old.error is not None
    assert old.error["code"] == "preempted"
    again = await database.write(accepting.accept_verb, "default", row.id, Verb.DELETE, None)
    assert again.operation.id == deletion.operation.id
    assert not again.run


async def test_a_create_that_failed_leaves_a_failed_sandbox_with_its_cause(database: Database) -> None:
    accepted = await database.write(accepting.accept_create, new(), None)
    error = {"code": "host_disk_full", "cause": "The disk is full.", "remedy": "Free some."}
    finished = await database.write(ending.fail, accepted.operation, error, None, 1.0)
    assert finished is not None
    assert finished.sandbox.state is State.FAILED
    assert finished.sandbox.reason == "The disk is full."
    assert finished.operation.error == error


async def test_a_verb_that_failed_leaves_the_state_that_was_seen(database: Database) -> None:
    row = await running(database)
    pause = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    dead = seen(row, State.FAILED, 3, cause="vmm_died", reason="killed by signal 9")
    finished = await database.write(ending.fail, pause.operation, {"code": "vmm_died"}, dead, 1.0)
    assert finished is not None
    assert (finished.sandbox.state, finished.sandbox.cause) == (State.FAILED, "vmm_died")
    assert finished.sandbox.desired is State.FAILED
    row = await running(database)
    pause = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    finished = await database.write(ending.fail, pause.operation, {"code": "x"}, None, 1.0)
    assert finished is not None
    assert finished.sandbox.state is State.RUNNING


async def test_observations_are_guarded(database: Database) -> None:
    row = await running(database)
    died = seen(row, State.FAILED, 5, cause="vmm_died", reason="gone")
    assert await database.write(ending.observe, seen(row, State.FAILED, 0, cause="vmm_died")) is None, "older"
    stale = seen(row, State.FAILED, 9, generation=row.generation + 1)
    assert await database.write(ending.observe, stale) is None, "another generation"
    assert await database.write(ending.observe, died, version=row.version - 1) is None, "row changed meanwhile"
    stop = await database.write(accepting.accept_verb, "default", row.id, Verb.STOP, None)
    assert await database.write(ending.observe, died) is None, "an operation is in flight"
    await database.write(ending.fail, stop.operation, {"code": "x"}, None, 1.0)
    after = await database.write(ending.observe, died)
    assert after is not None
    assert (after.state, after.cause, after.reason, after.desired) == (State.FAILED, "vmm_died", "gone", State.FAILED)
    assert await database.write(ending.observe, died) is None, "known"


async def test_a_sandbox_that_its_node_lost_is_failed_not_deleted(database: Database) -> None:
    row = await running(database)
    after = await database.write(ending.observe, seen(row, State.DELETED, 9, reason="no trace"))
    assert after is not None
    assert (after.state, after.reason, after.deleted_at) == (State.FAILED, "no trace", None)


async def test_cancel_ends_only_what_has_not_begun(database: Database) -> None:
    accepted = await database.write(accepting.accept_create, new(), None)
    finished = await database.write(ending.cancel, "default", accepted.operation.id)
    assert finished.operation.status == "cancelled"
    assert finished.sandbox.state is State.FAILED
    with pytest.raises(Conflict):
        await database.write(ending.cancel, "default", accepted.operation.id)
    row = await running(database)
    pause = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    await database.write(operations.note_all_progress, [(pause.operation.id, "running", None, 1.0)])
    with pytest.raises(Conflict) as raised:
        await database.write(ending.cancel, "default", pause.operation.id)
    assert raised.value.code == "not_cancellable"


async def test_an_idempotency_key_repeats_or_refuses(database: Database) -> None:
    key = IdempotencyKey(key="k", request_hash=b"1" * 32)
    first = await database.write(accepting.accept_create, new(), key)
    with pytest.raises(Answered) as repeated:
        await database.write(accepting.accept_create, new(), key)
    assert repeated.value.answer == {"sandbox": first.sandbox.id, "operation": first.operation.id}
    with pytest.raises(Unprocessable):
        await database.write(accepting.accept_create, new(), IdempotencyKey(key="k", request_hash=b"2" * 32))
    other = await database.write(accepting.accept_create, new(project="other"), key)
    assert other.sandbox.id != first.sandbox.id
    rows = await database.read(sandboxes.list_page, "default", limit=10)
    assert [row.id for row in rows] == [first.sandbox.id]


async def test_other_projects_see_nothing(database: Database) -> None:
    row = await running(database)
    pause = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    with pytest.raises(NotFound):
        await database.read(sandboxes.get, "other", row.id)
    with pytest.raises(NotFound):
        await database.write(accepting.accept_verb, "other", row.id, Verb.DELETE, None)
    with pytest.raises(NotFound):
        await database.read(operations.get, "other", pause.operation.id)
    assert await database.read(outbox.after, 0, ("other",), 100) == []


async def test_intent_and_end_are_in_the_outbox(database: Database) -> None:
    row = await running(database)
    events = await database.read(outbox.after, 0, ("default",), 100)
    assert [event.kind for event in events] == ["operation.accepted", "operation.succeeded", "sandbox.state_changed"]
    assert events[2].subject == row.id
    assert events[2].data["state"] == "running"
    assert events[2].data["previous"] == "pending"


async def test_process_numbers_are_never_used_twice(database: Database) -> None:
    row = await running(database)
    wanted = SessionSpec(session_id="", sandbox_id="", project="", process_id=0, argv=("true",))
    numbers = []
    for _ in range(3):
        _, session = await database.write(sessions.create, "default", row.id, wanted, None)
        numbers.append(session.process_id)
        await database.write(sessions.close, session.id, "deleted")
    assert numbers == [1, 2, 3]
    assert await database.read(sessions.list_page, "default", row.id, before=None, limit=10) == []


async def test_sessions_follow_what_is_heard_until_they_are_deleted(database: Database) -> None:
    row = await running(database)
    wanted = SessionSpec(session_id="", sandbox_id="", project="", process_id=0, argv=("true",))
    _, session = await database.write(sessions.create, "default", row.id, wanted, None)
    heard = SessionStatus(session_id=session.id, sandbox_id=row.id, state="running", pid=7)
    await database.write(sessions.heard, (heard,))
    found = await database.read(sessions.get, "default", session.id)
    assert (found.state, found.status and found.status["pid"]) == ("running", 7)
    await database.write(sessions.close, session.id, "deleted")
    await database.write(sessions.heard, (heard,))
    with pytest.raises(NotFound):
        await database.read(sessions.get, "default", session.id)


async def test_sessions_need_a_running_sandbox(database: Database) -> None:
    row = await bring_to(database, State.PAUSED)
    wanted = SessionSpec(session_id="", sandbox_id="", project="", process_id=0, argv=("true",))
    with pytest.raises(Conflict) as raised:
        await database.write(sessions.create, "default", row.id, wanted, None)
    assert raised.value.code == "sandbox_not_running"
    assert "resume" in raised.value.extra["verbs"]  # type: ignore[operator]  # it is a list


async def test_deleted_sandboxes_are_kept_for_a_while_then_purged_with_all_that_is_theirs(database: Database) -> None:
    gone = await bring_to(database, State.DELETED)
    kept = await running(database)
    assert gone.deleted_at is not None
    assert await database.write(retention.sweep, gone.deleted_at + 3599) == 0
    assert (await database.read(sandboxes.get, "default", gone.id)).state is State.DELETED
    assert await database.write(retention.sweep, gone.deleted_at + 3601) == 1
    assert await database.read(sandboxes.find, gone.id) is None
    assert await database.read(operations.list_page, "default", target=gone.id, limit=10) == []
    assert await database.read(sandboxes.find, kept.id) is not None


async def test_sessions_that_are_over_or_were_never_started_go(database: Database) -> None:
    row = await running(database)
    wanted = SessionSpec(session_id="", sandbox_id="", project="", process_id=0, argv=("true",))
    made = {}
    for state in ("new", "created", "running", "exited", "ended"):
        _, session = await database.write(sessions.create, "default", row.id, wanted, None)
        made[state] = session
        if state != "new":
            heard = SessionStatus(session_id=session.id, sandbox_id=row.id, state=state)
            await database.write(sessions.heard, (heard,))
    await database.write(retention.sweep, row.created_at + retention.SESSION_S + 60)
    left = await database.read(sessions.list_page, "default", row.id, before=None, limit=10)
    assert {one.id for one in left} == {made["running"].id, made["exited"].id}


async def test_old_events_go_and_leave_their_mark(database: Database) -> None:
    row = await running(database)
    last = (await database.read(outbox.bounds))[1]
    await database.write(retention.sweep, row.created_at + retention.EVENT_S + 60)
    assert await database.read(outbox.bounds) == (0, 0)
    from hatchway.storage import settings

    assert await database.read(settings.get, retention.PURGED_TO) == last
    await database.write(outbox.append, "default", "test", "x", {})
    assert (await database.read(outbox.bounds))[0] == last + 1, "sequences are never used again"


async def test_lists_filter_and_page(database: Database) -> None:
    made = [await running(database, metadata={"n": str(n), "a.b/c": "x"}, name=f"s{n}") for n in range(5)]
    every = await database.read(sandboxes.list_page, "default", limit=10)
    assert [row.id for row in every] == [row.id for row in sorted(made, key=lambda one: (one.created_at, one.id))[::-1]]
    first = await database.read(sandboxes.list_page, "default", limit=2)
    place = (first[-1].created_at, first[-1].id)
    rest = await database.read(sandboxes.list_page, "default", behind=place, limit=10)
    assert [row.id for row in (*first, *rest)] == [row.id for row in every]
    wanted = Filter(metadata={"n": "3", "a.b/c": "x"})
    picked = await database.read(sandboxes.list_page, "default", wanted, limit=10)
    assert [row.name for row in picked] == ["s3"]
    for template in ("seed", "seed:latest", "sha256:00"):
        assert len(await database.read(sandboxes.list_page, "default", Filter(template=template), limit=10)) == 5
    assert await database.read(sandboxes.list_page, "default", Filter(template="see"), limit=10) == []


class Model:
    """What the tables should say of one sandbox after any sequence of verbs and events."""

    def __init__(self) -> None:
        self.state = State.RUNNING


@bounds(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([verb for verb in PLAIN if verb is not Verb.DELETE]),
            st.sampled_from(["succeed", "fail", "die", "preempt"]),
        ),
        max_size=8,
    )
)
async def test_any_history_leaves_a_state_with_a_way_out(database: Database, steps: list[tuple[Verb, str]]) -> None:
    row = await running(database)
    model = Model()
    sequence = 10
    for verb, end in steps:
        sequence += 1
        try:
            accepted: Accepted = await database.write(accepting.accept_verb, "default", row.id, verb, None)
        except Conflict:
            assert not admits(verb, model.state)
            continue
        assert admits(verb, model.state)
        if not accepted.run:
            continue
        if end == "succeed":
            model.state = VERBS[verb].target
            await database.write(ending.succeed, accepted.operation, seen(row, model.state, sequence), 1.0)
        elif end == "die":
            model.state = State.FAILED
            dead = seen(row, State.FAILED, sequence, cause="vmm_died", reason="x")
            await database.write(ending.fail, accepted.operation, {"code": "x"}, dead, 1.0)
        elif end == "fail":
            await database.write(ending.fail, accepted.operation, {"code": "x"}, None, 1.0)
        else:
            deletion = await database.write(accepting.accept_verb, "default", row.id, Verb.DELETE, None)
            await database.write(ending.succeed, deletion.operation, seen(row, State.DELETED, sequence), 1.0)
            model.state = State.DELETED
            break
        found = await database.read(sandboxes.get, "default", row.id)
        assert found.state is model.state
        assert found.operation_id is None
        assert Verb.DELETE in verbs_from(found.state)
    assert (await database.read(sandboxes.get, "default", row.id)).state is model.state


async def test_a_state_that_is_none_of_ours_is_not_taken_over(database: Database) -> None:
    row = await running(database)
    odd = Observed(sandbox_id=row.id, project="default", generation=1, state="deleting", sequence=10**9)
    assert await database.write(ending.observe, odd) is None
    accepted = await database.write(accepting.accept_verb, "default", row.id, Verb.PAUSE, None)
    finished = await database.write(ending.fail, accepted.operation, {"code": "x"}, odd, 1.0)
    assert finished is not None
    assert (finished.sandbox.state, finished.operation.status) == (State.RUNNING, "failed")


async def test_unknown_ids(database: Database) -> None:
    with pytest.raises(NotFound):
        await database.write(accepting.accept_verb, "default", new_id(), Verb.PAUSE, None)
    assert (
        await database.write(ending.observe, Observed(sandbox_id=new_id(), project="", generation=1, state="running"))
        is None
    )
