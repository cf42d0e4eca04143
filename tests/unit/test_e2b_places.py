"""One sandbox, or one project, cannot take all the places that requests to sandboxes have."""

import contextlib

import pytest

from hatchway.e2b import places
from hatchway.e2b.errors import E2bError
from hatchway.e2b.places import Places


def test_a_sandbox_a_project_and_all_have_a_bound() -> None:
    here = Places(of_sandbox=2, of_project=3, in_all=4)

    def refused(sandbox_id: str, project: str) -> None:
        with pytest.raises(E2bError) as caught, here.taken(sandbox_id, project):
            pass
        assert (caught.value.status, caught.value.retry) == (429, True)

    with contextlib.ExitStack() as held:
        for sandbox_id in ("a", "a", "b"):
            held.enter_context(here.taken(sandbox_id, "p"))
        refused("a", "p")
        refused("b", "p")
        refused("c", "p")
        held.enter_context(here.taken("d", "q"))
        refused("d", "q")
    with contextlib.ExitStack() as held:
        for sandbox_id in ("a", "a", "b"):
            held.enter_context(here.taken(sandbox_id, "p"))
    assert not here._taken, "nothing is kept of who has gone"


def test_one_project_never_has_all_places() -> None:
    assert places.OF_SANDBOX < places.OF_PROJECT <= places.IN_ALL // 2
