"""Schedules of snapshots: on the beat, and thinned so that what is left still leads back."""

from hypothesis import given
from hypothesis import strategies as st

from hatchway.domain import schedules
from hatchway.domain.schedules import Keep, Point, Schedule

NOW = 9_600_000.0


def test_the_beat_is_kept_and_nothing_is_made_up_for() -> None:
    assert schedules.next_due(None, 60, NOW) == NOW + 60
    assert schedules.next_due(NOW, 60, NOW + 0.4) == NOW + 60
    assert schedules.next_due(NOW, 60, NOW + 605) == NOW + 660
    assert schedules.next_due(NOW, None, NOW) is None
    assert schedules.next_due(NOW + 9999, 60, NOW) == NOW + 60


def test_the_older_the_sparser() -> None:
    points = [Point(f"{age}", "disk", NOW - age, 1) for age in range(0, 7200, 60)]
    schedule = Schedule(disk_every_s=60, keep=(Keep(older_than_s=600, one_per_s=600), Keep(older_than_s=3600)))
    gone = {one.id: one.why for one in schedules.thin(points, schedule, NOW)}
    kept = [point for point in points if point.id not in gone]
    assert [point.id for point in kept[:11]] == [str(age) for age in range(0, 660, 60)]
    assert len(kept) == 11 + 5
    assert {gone[one] for one in gone if int(one) > 3600} == {"max_age"}
    assert {gone[one] for one in gone if int(one) <= 3600} == {"thinned"}


def test_the_budget_takes_the_oldest_and_never_the_newest() -> None:
    points = [Point(str(number), "full", NOW - number, 100) for number in range(10)]
    gone = schedules.thin(points, Schedule(max_bytes=250), NOW)
    assert [one.id for one in gone] == ["9", "8", "7", "6", "5", "4", "3", "2"]
    assert {one.why for one in gone} == {"max_bytes"}
    assert len(schedules.thin(points, Schedule(max_bytes=0), NOW)) == 9


POINTS = st.lists(
    st.tuples(st.sampled_from(["disk", "full"]), st.floats(0, 10_000), st.integers(0, 100)), max_size=60, unique=True
)
RULES = st.lists(
    st.builds(Keep, older_than_s=st.floats(0, 5_000), one_per_s=st.one_of(st.none(), st.floats(5, 3_000))), max_size=4
)


@given(POINTS, RULES, st.one_of(st.none(), st.integers(0, 2_000)))
def test_what_is_left_stays_left_and_every_span_keeps_one(
    made: list[tuple[str, float, int]], rules: list[Keep], budget: int | None
) -> None:
    points = [Point(f"p{n}", kind, NOW - age, size) for n, (kind, age, size) in enumerate(made)]
    schedule = Schedule(keep=tuple(rules), max_bytes=budget)
    gone = {one.id: one.why for one in schedules.thin(points, schedule, NOW)}
    kept = [point for point in points if point.id not in gone]
    assert schedules.thin(kept, schedule, NOW) == []
    if budget is not None and len(kept) > 1:
        assert sum(point.size for point in kept) <= budget
    # What was thinned has another of its kind beside it, not farther away than the rule's span.
    spans = [rule.one_per_s for rule in rules if rule.one_per_s is not None]
    for point in points:
        if gone.get(point.id) == "thinned":
            near = [
                other
                for other in points
                if other.kind == point.kind and gone.get(other.id) in (None, "max_bytes") and other.id != point.id
            ]
            assert any(abs(other.made_at - point.made_at) <= max(spans) for other in near)
    youngest = min((rule.older_than_s for rule in rules), default=float("inf"))
    assert all(gone.get(p.id) in (None, "max_bytes") for p in points if NOW - p.made_at <= youngest)
