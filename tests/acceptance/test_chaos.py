"""The random walk of `tests/chaos` on real machines, and `hatchway chaos` as its user runs it."""

import json
from collections.abc import Iterator

import pytest
from conftest import Service, make_service

from hatchway.chaos.api import Api
from hatchway.chaos.commands import SMALL
from hatchway.chaos.ground import HostGround
from hatchway.chaos.walk import Walk
from hatchway.client import AsyncHatchway
from hatchway.domain.lifecycle import Verb

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

STEPS = 200
QUICK = {"plain": 25, "write": 30, "happen": 1, "refuse": 12, "forget": 8, "crowd": 3, "branch": 4, "race": 2}
"""Fewer of the steps that boot a machine: that takes seconds here."""
SELDOM = (Verb.STOP,)
"""What was stopped boots when it is wanted again."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of its own: its processes are killed."""
    yield from make_service(tmp_path_factory)


async def test_two_hundred_steps_on_real_machines(service: Service) -> None:
    api = Api(service.url, service.key)
    async with AsyncHatchway(service.url, service.key) as hatchway:
        walk = Walk(api, HostGround(service.data_dir, hatchway), 1, new=SMALL, weights=QUICK, seldom=SELDOM, most=3)
        try:
            await walk.look_away()
            await walk.run(STEPS)
            await walk.end()
        finally:
            await walk.leave()
            await api.close()
    assert not walk.failures


def test_a_few_kills_by_the_command(service: Service) -> None:
    done = service.run("chaos", "--kills", "3", "--seed", "3", "--json", "--data-dir", str(service.data_dir))
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(line["kills"] for line in lines if line["chaos"] == "kills") == 3
    assert lines[-1]["divergences"] == 0
    assert service.sandboxes() == []


def test_the_bench_of_recovery_kills_and_finds_the_way_out_again(service: Service) -> None:
    """Open connections are cut when their policy ends, and gateway and broker serve again when they were killed: it measures only what it saw happen."""
    done = service.run("bench", "recovery", "--runs", "1", "--json", "--data-dir", str(service.data_dir))
    assert done.returncode == 0, done.stderr.decode()
    values = {line["metric"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    assert {"policy_cut", "gateway_killed", "broker_killed"} <= values.keys()
    assert min(values.values()) > 0
    assert service.sandboxes() == []
