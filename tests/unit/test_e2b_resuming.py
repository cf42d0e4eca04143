"""Resuming: how often the control plane is asked where nothing helps."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hatchway.client import Conflict
from hatchway.e2b.errors import E2bError
from hatchway.e2b.resuming import LOOK_AGAIN_S, Resuming
from hatchway.wire.behalf import ANNOTATION


class Refusing:
    """A sandbox that sleeps, and that something keeps from waking."""

    wakes = 0

    async def look(self, sandbox_id: str) -> Any:
        annotations = {ANNOTATION: {"template": "base", "autoResume": True}}
        info = SimpleNamespace(
            id=sandbox_id, state="suspended", operation=None, timeout_s=60.0, annotations=annotations
        )
        return SimpleNamespace(id=sandbox_id, info=info)

    def knows(self, sandbox_id: str) -> bool:
        return False

    def for_sandbox(self, sandbox_id: str) -> Any:
        return self

    async def run(self, _: object) -> None:
        self.wakes += 1
        raise Conflict("wrong_state", "It cannot be woken.", "Look at it.")


def test_a_wake_that_is_refused_again_and_again_is_asked_for_with_pauses() -> None:
    refusing, within_s = Refusing(), 0.5
    with pytest.raises(E2bError) as caught:
        asyncio.run(Resuming(refusing, within_s=within_s).running("x" * 20))  # type: ignore[arg-type]  # it is played
    assert caught.value.status == 409
    assert 1 <= refusing.wakes <= within_s / LOOK_AGAIN_S + 1
