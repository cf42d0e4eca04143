"""Suspend and restore with real machines: what was in memory, on disk and on its way is there afterwards, however often."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Service

from hatchway.client import Output, Sandbox

pytestmark = pytest.mark.vm
ROUNDS = 5


class Verbs:
    """Lifecycle verbs over the API."""

    def __init__(self, service: Service) -> None:
        headers = {"authorization": f"Bearer {service.key}", "prefer": "wait=60"}
        self.http = httpx.Client(base_url=service.url, headers=headers, timeout=90)

    def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        """One request whose operation succeeds."""
        answer = self.http.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        assert found["operation"]["status"] == "succeeded", answer.text
        return found

    def sessions(self, sandbox: Sandbox) -> list[dict[str, Any]]:
        """The sandbox's sessions."""
        found: list[dict[str, Any]] = self.http.get(f"/v1/sandboxes/{sandbox.id}/sessions").json()["sessions"]
        return found

    def do(self, sandbox: Sandbox, verb: str, **body: Any) -> dict[str, Any]:
        """One verb of a sandbox."""
        return self.ask("POST", f"/v1/sandboxes/{sandbox.id}/{verb}", **body)


@pytest.fixture
def verbs(service: Service) -> Iterator[Verbs]:
    made = Verbs(service)
    yield made
    made.http.close()


COUNTER = """
import sys, time
n = 0
while True:
    n += 1
    print(n, flush=True)
    time.sleep(0.05)
"""


def test_five_rounds_of_suspend_and_restore(service: Service, verbs: Verbs) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256, metadata={"k": "v"}) as sandbox:
        counter = sandbox.start(["python3", "-c", COUNTER])
        numbers: list[int] = []
        pending = ""
        stream = iter(counter)
        sandbox.run("head -c 100000 /dev/urandom > /dev/shm/value")
        value = sandbox.run("sha256sum < /dev/shm/value").stdout
        for turn in range(ROUNDS):
            sandbox.run(
                f"mkdir -p tree/{turn}; head -c 300000 /dev/urandom > tree/{turn}/file; sha256sum tree/{turn}/file >> sums"
            )
            assert verbs.do(sandbox, "suspend")["sandbox"]["state"] == "suspended"
            shown = sandbox.refresh()
            assert 0 < verbs.http.get(f"/v1/sandboxes/{sandbox.id}").json()["sandbox"]["stored_bytes"] < 64 << 20
            assert shown.metadata == {"k": "v"}
            assert verbs.do(sandbox, "wake" if turn % 2 else "restore")["sandbox"]["state"] == "running"
            assert sandbox.run("sha256sum < /dev/shm/value").stdout == value
            assert sandbox.run("sha256sum -c sums").exit_code == 0
            assert sandbox.run("find tree -type f | wc -l").stdout.strip() == str(turn + 1)
            assert abs(float(sandbox.run("date +%s.%N").stdout) - time.time()) < 5
            last = numbers[-1] if numbers else 0
            for event in stream:
                if isinstance(event, Output):
                    pending += event.data.decode()
                    *lines, pending = pending.split("\n")
                    numbers += [int(line) for line in lines]
                    if numbers and numbers[-1] > last + 20:
                        break
        assert numbers == list(range(1, len(numbers) + 1))
        counter.kill()


def test_a_paused_one_is_suspended_and_stopping_drops_its_memory(service: Service, verbs: Verbs) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256) as sandbox:
        sandbox.run("echo kept > kept; echo lost > /dev/shm/lost")
        verbs.do(sandbox, "pause")
        verbs.do(sandbox, "suspend")
        assert verbs.do(sandbox, "restore")["sandbox"]["state"] == "running"
        assert sandbox.run("cat kept /dev/shm/lost").stdout == "kept\nlost\n"
        verbs.do(sandbox, "suspend")
        verbs.do(sandbox, "stop")
        verbs.do(sandbox, "start")
        assert sandbox.run("cat kept; ls /dev/shm").stdout == "kept\n"
