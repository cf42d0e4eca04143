"""The lifecycle table keeps its promises: every state has a way out, delete works from all of them."""

import pytest

from hatchway.domain.lifecycle import (
    CAUSES,
    ROLLBACK_TARGETS,
    SNAPSHOT_SOURCES,
    VERBS,
    Cause,
    SnapshotKind,
    State,
    Verb,
    admits,
    verbs_from,
)

LIVING = [state for state in State if state is not State.DELETED]


@pytest.mark.parametrize("state", LIVING)
def test_delete_leads_out_of_every_state(state: State) -> None:
    assert admits(Verb.DELETE, state)
    assert VERBS[Verb.DELETE].target is State.DELETED


@pytest.mark.parametrize("state", [State.PAUSED, State.SUSPENDED, State.STOPPED, State.FAILED])
def test_a_sandbox_that_does_not_run_can_be_made_to(state: State) -> None:
    assert any(VERBS[verb].target is State.RUNNING and state in VERBS[verb].sources for verb in verbs_from(state))


@pytest.mark.parametrize("verb", list(Verb))
def test_a_verb_is_satisfied_only_by_its_target(verb: Verb) -> None:
    rule = VERBS[verb]
    assert rule.satisfied <= {rule.target}
    assert not rule.sources & rule.satisfied


def test_nothing_leads_out_of_deleted_and_create_is_never_offered() -> None:
    assert verbs_from(State.DELETED) == (Verb.DELETE,)
    assert all(Verb.CREATE not in verbs_from(state) for state in State)


@pytest.mark.parametrize("cause", list(Cause))
def test_what_happens_unasked_leads_to_a_state_with_a_way_out(cause: Cause) -> None:
    rule = CAUSES[cause]
    assert State.DELETED not in rule.sources
    if cause not in (Cause.OPERATION_FAILED, Cause.DISK_LOST, Cause.MEMORY_LOST):
        assert rule.sources == {State.RUNNING, State.PAUSED}, "it happens to living machines only"
    assert rule.target in (State.STOPPED, State.FAILED, State.SUSPENDED)


def test_memory_is_lost_by_stop_and_kept_by_pause() -> None:
    assert not admits(Verb.RESUME, State.STOPPED)
    assert not admits(Verb.START, State.PAUSED)
    assert admits(Verb.WAKE, State.PAUSED)
    assert admits(Verb.WAKE, State.STOPPED)
    assert admits(Verb.WAKE, State.SUSPENDED)


def test_lost_memory_leaves_a_suspended_sandbox_its_disk() -> None:
    assert CAUSES[Cause.MEMORY_LOST].target is State.SUSPENDED
    assert admits(Verb.STOP, State.SUSPENDED)


@pytest.mark.parametrize("verb", [Verb.FORK, Verb.SNAPSHOT])
def test_copies_leave_the_original_in_its_state(verb: Verb) -> None:
    assert VERBS[verb].target is None
    assert not VERBS[verb].satisfied


@pytest.mark.parametrize("kind", list(SnapshotKind))
def test_a_snapshot_can_be_gone_back_to_from_wherever_it_can_be_made(kind: SnapshotKind) -> None:
    assert SNAPSHOT_SOURCES[kind] <= VERBS[Verb.SNAPSHOT].sources <= VERBS[Verb.ROLLBACK].sources
    assert ROLLBACK_TARGETS[kind] in (State.RUNNING, State.STOPPED)
