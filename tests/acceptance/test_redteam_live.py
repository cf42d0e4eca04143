"""`hatchway redteam` as its user runs it, in a real sandbox: a few attacks of each class. All of them are the command itself."""

import json
import os

import pytest
from conftest import Service

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("only", ["D01", "T02.host-alone", "N06.loopback-by-hand"])
def test_nothing_of_an_attack_arrives_and_what_is_allowed_does(service: Service, only: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root there are no namespaces to attack from: that nothing arrives was not shown")
    done = service.run(
        "redteam", "--only", only, "--condition", "index", "--json", "--data-dir", str(service.data_dir), timeout=500
    )
    *attempts, whole = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (attempts, done.stderr.decode())
    assert whole["bypasses"] == whole["invalid"] == 0
    assert {one["verdict"] for one in attempts} == {"blocked"}
    assert [one["id"] for one in attempts if one["id"].startswith(only)]
    with service.client() as hatchway:  # what was made for the run is gone
        assert not [one.name for one in hatchway.policies.list() if one.name.startswith("redteam-")]
        assert not [one.name for one in hatchway.credentials.list() if one.name.startswith("redteam-")]
