"""Runs within E2B's SDK alone: its virtual environment, and the variables that any user of it sets. `tests/acceptance/test_e2b_sdk.py` starts it."""

import os
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from e2b import NotFoundException, Sandbox

WITHIN_S = 90


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Ids of sandboxes that are killed in the end; a test adds what `sandbox` does not know of."""
    ids: list[str] = []
    yield ids
    for sandbox_id in ids:
        Sandbox.kill(sandbox_id)


@pytest.fixture
def new(made: list[str]) -> Callable[..., Sandbox]:
    """Makes a sandbox."""

    def make(*arguments: object, **more: object) -> Sandbox:
        sandbox = Sandbox.create(*arguments, **more)
        made.append(sandbox.sandbox_id)
        return sandbox

    return make


def said(sandbox: Sandbox, command: str) -> str:
    """What a shell command wrote there."""
    return str(sandbox.commands.run(command).stdout)


def boot_id(sandbox_id: str) -> str:
    """What tells a sandbox that went on from one that was booted anew, as the service's own API says it."""
    answer = httpx.get(
        f"{os.environ['HATCHWAY_URL']}/v1/sandboxes/{sandbox_id}",
        headers={"authorization": f"Bearer {os.environ['E2B_API_KEY']}"},
        timeout=WITHIN_S,
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["sandbox"]["boot_id"])


def until(look: Callable[[], object]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + WITHIN_S
    while not look():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


def state(sandbox_id: str) -> str:
    """`running`, `paused`, or `gone`."""
    try:
        return str(Sandbox.get_info(sandbox_id).state.value)
    except NotFoundException:
        return "gone"
