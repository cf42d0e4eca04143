"""Lifetimes with real machines: they suspend by themselves, traffic wakes them, and nothing is lost by it, however often."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Service

from hatchway.client import Output, Sandbox

pytestmark = pytest.mark.vm
ROUNDS = 5
WITHIN_S = 120.0
LONG = 100_000.0


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {service.key}", "prefer": "wait=60"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=90) as client:
        yield client


def show(http: httpx.Client, sandbox: Sandbox) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"/v1/sandboxes/{sandbox.id}").json()["sandbox"]
    return found


def until(http: httpx.Client, sandbox: Sandbox, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + WITHIN_S
    while (shown := show(http, sandbox))["state"] != state or shown["operation"] is not None:
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)
    return shown


def expire(http: httpx.Client, sandbox: Sandbox) -> None:
    """Its time is over in a second; what it gets when it comes back is a long one again."""
    sandbox.update(timeout_s=1, shorten=True)
    until(http, sandbox, "suspended")
    sandbox.update(timeout_s=LONG)


COUNTER = """
import time
n = 0
while True:
    n += 1
    print(n, flush=True)
    time.sleep(0.05)
"""


def test_five_rounds_of_timeout_and_waking_by_traffic(service: Service, http: httpx.Client) -> None:
    with (
        service.client() as hatchway,
        hatchway.sandboxes.create(memory_mib=256, timeout_s=LONG, auto_wake=True, metadata={"k": "v"}) as sandbox,
    ):
        counter = sandbox.start(["python3", "-c", COUNTER])
        stream, numbers, pending = iter(counter), [], ""
        sandbox.run("head -c 100000 /dev/urandom > /dev/shm/value")
        value = sandbox.run("sha256sum < /dev/shm/value").stdout
        for turn in range(ROUNDS):
            sandbox.run(f"mkdir -p tree/{turn}; head -c 300000 /dev/urandom > tree/{turn}/file")
            sandbox.run(f"sha256sum tree/{turn}/file >> sums")
            expire(http, sandbox)
            # A command, then a file: whatever comes first wakes it.
            if turn % 2:
                assert sandbox.files.read("/dev/shm/value")
            assert sandbox.run("sha256sum < /dev/shm/value").stdout == value
            shown = show(http, sandbox)
            assert (shown["state"], shown["metadata"], shown["timeout_s"]) == ("running", {"k": "v"}, LONG)
            assert shown["auto_wake"] is True
            assert shown["expires_at"] > time.time() + LONG / 2
            assert sandbox.run("sha256sum -c sums").exit_code == 0
            assert sandbox.run("find tree -type f | wc -l").stdout.strip() == str(turn + 1)
            last = numbers[-1] if numbers else 0
            for event in stream:
                if isinstance(event, Output):
                    pending += event.data.decode()
                    *lines, pending = pending.split("\n")
                    numbers += [int(line) for line in lines]
                    if numbers and numbers[-1] > last + 20:
                        break
        assert numbers == list(range(1, len(numbers) + 1))
        assert (sandbox.extend(2 * LONG).expires_at or 0) > time.time() + LONG
        counter.kill()


def test_an_idle_one_goes_to_sleep_and_input_wakes_it_and_without_auto_wake_nothing_does(
    service: Service, http: httpx.Client
) -> None:
    settings: dict[str, Any] = {"idle_timeout_s": 2, "on_timeout": "pause", "auto_wake": True}
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256, **settings) as sandbox:
        # A client that is attached uses it: as long as this runs it is not idle.
        assert sandbox.run("sleep 4; echo slept").stdout == "slept\n"
        until(http, sandbox, "paused")
        assert sandbox.run("echo woken").stdout == "woken\n"
        until(http, sandbox, "paused")
        session = http.post(f"/v1/sandboxes/{sandbox.id}/sessions", json={"command": "true"}).json()["session"]
        sandbox.update(auto_wake=False)
        refused = httpx.post(session["attach_url"], headers={"authorization": f"Bearer {session['token']}"}, timeout=60)
        assert (refused.status_code, refused.json()["code"]) == (409, "sandbox_not_running")
        assert show(http, sandbox)["state"] == "paused"
