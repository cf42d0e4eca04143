"""Pools with real machines: a claimed sandbox is one of its own, and runs at once."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Service

pytestmark = pytest.mark.vm
WITHIN_S = 180.0
POOL = "/v1/pools/warm"


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {service.key}", "prefer": "wait=60"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=90) as client:
        yield client
        client.delete(POOL)
        until(client, lambda answer: answer.status_code == 404)


def until(http: httpx.Client, good: Any) -> httpx.Response:
    deadline = time.monotonic() + WITHIN_S
    while not good(answer := http.get(POOL)):
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    return answer


def filled(http: httpx.Client, size: int) -> None:
    until(http, lambda answer: answer.status_code == 200 and answer.json()["pool"]["ready"] == size)


def test_what_is_claimed_is_a_sandbox_of_its_own(service: Service, http: httpx.Client) -> None:
    assert http.put(POOL, json={"template": "seed:latest", "size": 2, "memory_mib": 256}).status_code == 201
    filled(http, 2)
    with service.client() as hatchway:
        seen: list[str] = []
        for number in range(2):
            body = {"template": "seed:latest", "memory_mib": 256, "name": f"box-{number}", "env": {"N": str(number)}}
            made = http.post("/v1/sandboxes", json=body).json()
            assert made["operation"]["result"]["pool"] == "warm", made
            with hatchway.sandboxes.get(made["sandbox"]["id"]) as sandbox:
                shown = sandbox.run(
                    "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | base64; echo $N; date +%s.%N"
                )
                hostname, machine_id, random, variable, now = shown.stdout.split()
                assert (hostname, variable) == (f"box-{number}", str(number))
                assert abs(float(now) - time.time()) < 5
                assert not {machine_id, random} & set(seen)
                seen += [machine_id, random]
                assert sandbox.run('test "$HATCHWAY_SANDBOX_ID" = ' + sandbox.id).exit_code == 0
                if number:
                    http.post(f"/v1/sandboxes/{sandbox.id}/stop")
                    http.post(f"/v1/sandboxes/{sandbox.id}/start")
                    assert sandbox.run("hostname; echo $N").stdout.split() == [f"box-{number}", str(number)]
        filled(http, 2)
