"""Deadlines on a clock of the test's own: what histories of a sandbox may do to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.domain import lifetimes
from hatchway.domain.lifecycle import VERBS, State, Verb
from hatchway.domain.lifetimes import Lifetime, OnTimeout, Why

START = 1_000_000.0


def running(**settings: object) -> Lifetime:
    return lifetimes.entered_running(Lifetime(**settings), START)  # type: ignore[arg-type]  # whatever the test names


def test_only_the_time_in_which_it_runs_counts() -> None:
    lifetime = running(timeout_s=100.0)
    assert lifetime.expires_at == START + 100
    paused = lifetimes.left_running(lifetime, START + 30)
    assert (paused.expires_at, paused.left_s, lifetimes.due_at(paused)) == (None, 70.0, None)
    assert lifetimes.why_due(paused, START + 10_000) is None
    again = lifetimes.entered_running(paused, START + 10_000)
    assert (again.expires_at, again.left_s) == (START + 10_070, None)


def test_waking_one_whose_time_is_over_gives_it_its_whole_time_anew() -> None:
    over = lifetimes.left_running(running(timeout_s=100.0), START + 100.5)
    assert over.left_s == 0.0
    assert lifetimes.entered_running(over, START + 500).expires_at == START + 600


def test_the_deadline_that_comes_first_is_the_reason() -> None:
    lifetime = running(timeout_s=100.0, idle_timeout_s=60.0)
    assert lifetimes.due_at(lifetime) == START + 60
    assert lifetimes.why_due(lifetime, START + 59.9) is None
    assert lifetimes.why_due(lifetime, START + 60) is Why.IDLE
    assert lifetimes.why_due(lifetimes.used(lifetime, START + 50), START + 100) is Why.TIMEOUT
    assert lifetimes.due_at(running()) is None


def test_an_extension_never_shortens_and_a_change_says_when_it_does() -> None:
    lifetime = running(timeout_s=100.0)
    assert lifetimes.extended(lifetime, 50, START + 10) == lifetime
    assert lifetimes.extended(lifetime, 200, START + 10).expires_at == START + 210
    assert lifetimes.extended(running(), 5, START).expires_at is None
    assert lifetimes.shortens(lifetime, 50, START + 10)
    assert not lifetimes.shortens(lifetime, 95, START + 10)
    assert not lifetimes.shortens(lifetime, None, START)
    assert lifetimes.shortens(running(), 1e9, START)
    assert lifetimes.with_timeout(lifetime, 50, START + 10).expires_at == START + 60
    assert lifetimes.with_timeout(lifetime, None, START + 10).expires_at is None


@pytest.mark.parametrize("wanted", list(OnTimeout))
def test_what_fails_again_and_again_is_tried_later_and_later_and_then_something_else_is(wanted: OnTimeout) -> None:
    lifetime, now, tried, pauses = running(timeout_s=1.0, on_timeout=wanted), START + 1, [], []
    for _ in range(12):
        assert lifetimes.why_due(lifetime, now) is Why.TIMEOUT
        tried.append(lifetimes.next_verb(lifetime))
        lifetime = lifetimes.failed(lifetime, now)
        assert lifetimes.why_due(lifetime, now) is None
        due = lifetimes.due_at(lifetime)
        assert due is not None
        pauses.append(due - now)
        now = due
    assert tried[0] == wanted
    assert tried[-1] in (Verb.STOP, Verb.DELETE)
    assert pauses == sorted(pauses)
    assert pauses[0] >= 5
    assert pauses[-1] == 600
    for verb in tried:
        assert State.RUNNING in VERBS[verb].sources
        assert VERBS[verb].target is not None
    if wanted is OnTimeout.SUSPEND:
        assert tried[:3] == [Verb.SUSPEND] * 3
        assert Verb.PAUSE in tried


def test_an_extension_ends_what_failed() -> None:
    lifetime = lifetimes.failed(running(timeout_s=1.0), START + 1)
    assert lifetimes.extended(lifetime, 0.5, START + 2).tries == 0
    longer = lifetimes.extended(lifetime, 100, START + 2)
    assert (longer.tries, longer.retry_at, lifetimes.due_at(longer)) == (0, None, START + 102)


STEPS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0, 500)),
    st.tuples(st.sampled_from(["leave", "enter", "use", "fail"]), st.just(0.0)),
    st.tuples(st.sampled_from(["extend", "change"]), st.floats(1, 500)),
)


@given(
    st.lists(STEPS, max_size=40),
    st.one_of(st.none(), st.floats(1, 500)),
    st.one_of(st.none(), st.floats(1, 500)),
)
def test_no_history_shortens_a_deadline_or_loses_a_setting(
    steps: list[tuple[str, float]], timeout_s: float | None, idle_s: float | None
) -> None:
    lifetime = running(timeout_s=timeout_s, idle_timeout_s=idle_s, auto_wake=True, on_timeout=OnTimeout.PAUSE)
    now, settings = START, (timeout_s, idle_s)
    for step, value in steps:
        before, runs = lifetime, lifetime.active_at is not None
        if step == "wait":
            now += value
            continue
        if step == "leave" and runs:
            lifetime = lifetimes.left_running(lifetime, now)
            assert lifetimes.due_at(lifetime) is None
        elif step == "enter" and not runs:
            lifetime = lifetimes.entered_running(lifetime, now)
            assert (lifetime.expires_at is None) == (lifetime.timeout_s is None)
            if lifetime.expires_at is not None:
                assert lifetime.expires_at - now >= (before.left_s or lifetime.timeout_s or 0.0) - 1e-6
                assert lifetime.expires_at > now
        elif step == "use":
            lifetime = lifetimes.used(lifetime, now)
        elif step == "fail" and lifetimes.why_due(lifetime, now) is not None:
            lifetime = lifetimes.failed(lifetime, now)
            assert lifetime.retry_at is not None
            assert lifetime.retry_at > now
        elif step == "extend":
            lifetime = lifetimes.extended(lifetime, value, now)
        elif step == "change" and not lifetimes.shortens(lifetime, value, now):
            lifetime = lifetimes.with_timeout(lifetime, value, now)
            settings = (value, idle_s)
        if runs and lifetime.active_at is not None:
            assert before.expires_at is None or (lifetime.expires_at or 0) >= before.expires_at
        assert (lifetime.timeout_s, lifetime.idle_timeout_s) == settings
        assert (lifetime.auto_wake, lifetime.on_timeout) == (True, OnTimeout.PAUSE)
        due = lifetimes.due_at(lifetime)
        # Whatever is due is found by its time, and nothing is found before.
        if due is not None:
            assert lifetimes.why_due(lifetime, max(due, now)) is not None
            assert due <= now or lifetimes.why_due(lifetime, now) is None
