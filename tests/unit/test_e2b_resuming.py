"""Resuming: how often the control plane is asked where nothing helps."""

import asyncio
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hatchway.client import Conflict
from hatchway.client.errors import HatchwayError
from hatchway.control.config import ControlConfig
from hatchway.e2b import errors
from hatchway.e2b.envd import connect
from hatchway.e2b.errors import E2bError
from hatchway.e2b.reaching import Reaching
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


def test_one_project_cannot_take_all_connections_to_the_control_plane(tmp_path: Path) -> None:
    """It answers so many requests at once, and of one project half of them: there has to be a connection for each."""
    most = next(one.default for one in fields(ControlConfig) if one.name == "max_requests")
    driver = Reaching(tmp_path / "sock").with_key("e2b_0")
    assert driver.options()["limits"].max_connections > most
    full = HatchwayError("too_many_connections", "They are in use.")
    assert (errors.of_client(full).status, errors.of_client(full).retry) == (503, True)
    assert connect.of_client(full).code == "resource_exhausted"


def test_a_wake_that_is_refused_again_and_again_is_asked_for_with_pauses() -> None:
    refusing, within_s = Refusing(), 0.5
    with pytest.raises(E2bError) as caught:
        asyncio.run(Resuming(refusing, within_s=within_s).running("x" * 20))  # type: ignore[arg-type]  # it is played
    assert caught.value.status == 409
    assert 1 <= refusing.wakes <= within_s / LOOK_AGAIN_S + 1
