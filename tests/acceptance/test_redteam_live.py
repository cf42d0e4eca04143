"""`hatchway redteam` as its user runs it, in a real sandbox: a few attacks of each class. All of them are the command itself."""

import json
import os

import pytest
from conftest import Service

from hatchway.redteam.live import MARKED, MEMORY_MIB

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]


ONLY = (
    "D01.tls",
    "T02.host-alone",
    "T06.other-case",
    "N06.loopback-by-hand",
    "H28.dots",
    "H29.nominated",
    "H33.anew",
    "H41.two-answers",
    "A02.parameter-api-token",
    "C02.query",
    "C17.delete",
    "G03.tls",
    "G15.path",
    "G20.to-metadata",
    "G26.aws",
    "E01.path",
    "E10.other-ports",
    "E13.link-then-file",
)


def test_nothing_of_an_attack_arrives_and_what_is_allowed_does(service: Service) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root there are no namespaces to attack from: that nothing arrives was not shown")
    before = _made(service)
    with service.client() as hatchway:  # as a run leaves it that is killed
        hatchway.policies.put("redteam-0dead0-secret", {"version": 1}, tier="project")
        hatchway.credentials.put("redteam-0dead0", ["api.test"], value="of-nobody")
        hatchway.sandboxes.create(memory_mib=MEMORY_MIB, metadata={MARKED: MARKED})
    arguments = ["--only", ",".join(ONLY), "--condition", "source", "--json", "--data-dir", str(service.data_dir)]
    done = service.run("redteam", *arguments, timeout=500)
    *attempts, whole = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (attempts, done.stderr.decode())
    assert whole["bypasses"] == whole["invalid"] == 0
    assert {one["id"]: one["verdict"] for one in attempts} == dict.fromkeys((*ONLY, "C00.secret"), "blocked")
    assert _made(service) <= before  # what was made for the run is gone


def _made(service: Service) -> set[str]:
    with service.client() as hatchway:
        policies, credentials = hatchway.policies.list(), hatchway.credentials.list()
        return {one.name for one in (*policies, *credentials)} | {one.id for one in hatchway.sandboxes.list()}
