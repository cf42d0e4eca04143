"""Times as E2B's API shows them."""

from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from hatchway.e2b.control.views import time


@given(st.floats(0, 4e9))
def test_what_is_shown_tells_apart_what_began_before_and_after(seconds: float) -> None:
    """A list takes a time that was shown as its beginning: what it is of is in it, and not in one that begins a microsecond later."""
    shown = datetime.fromisoformat(time(seconds))
    assert shown.timestamp() <= seconds < (shown + timedelta(microseconds=1)).timestamp()
