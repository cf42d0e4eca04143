"""Snapshots of real machines: the way back, and new sandboxes from what was kept."""

from typing import Any

import pytest
from conftest import Service
from test_suspend import COUNTER, Verbs, verbs

from hatchway.client import Hatchway, Output, Sandbox

pytestmark = pytest.mark.vm
__all__ = ["verbs"]


def snapshot(verbs: Verbs, sandbox: Sandbox, kind: str) -> dict[str, Any]:
    made = verbs.do(sandbox, "snapshots", kind=kind)["operation"]["result"]["snapshot"]
    kept: dict[str, Any] = verbs.http.get(f"/v1/snapshots/{made}").json()["snapshot"]
    assert kept["state"] == "ready"
    return kept


def from_snapshot(hatchway: Hatchway, verbs: Verbs, kept: dict[str, Any], **more: Any) -> Sandbox:
    made = verbs.ask("POST", "/v1/sandboxes", snapshot=kept["id"], **more)
    return hatchway.sandboxes.get(made["sandbox"]["id"])


def test_full_and_disk(service: Service, verbs: Verbs) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create(memory_mib=256, disk_mib=1024) as sandbox:
        assert int(sandbox.run("df --output=size -m / | tail -1").stdout) > 900
        counter = sandbox.start(["python3", "-c", COUNTER])
        for event in counter:
            if isinstance(event, Output) and b"2\n" in event.data:
                break
        sandbox.run("echo one > /dev/shm/memory; echo one > disk")
        full = snapshot(verbs, sandbox, "full")
        sandbox.run("echo two > /dev/shm/memory; echo two > disk")  # not flushed: a disk snapshot has it all the same
        disk = snapshot(verbs, sandbox, "disk")
        assert disk["parent"] == full["id"]
        assert disk["memory_bytes"] == 0 < full["memory_bytes"]
        late = sandbox.start(["sleep", "1000"])
        late.attach()
        sandbox.run("rm disk /dev/shm/memory")

        # Back to the full one: memory, disk and the process of then, under a session of its own; what came later never was.
        assert verbs.do(sandbox, "rollback", snapshot=full["id"])["sandbox"]["state"] == "running"
        assert sandbox.run("cat disk /dev/shm/memory").stdout == "one\none\n"
        assert [one.wait().reason for one in (counter, late)] == ["rolled_back", "rolled_back"]
        again = next(one for one in verbs.sessions(sandbox) if one["forked_from"] == counter.id)
        assert again["state"] == "running"
        assert any(isinstance(event, Output) for event in hatchway.sessions.get(again["id"]))
        # Back to the disk one: stopped, and clean.
        assert verbs.do(sandbox, "rollback", snapshot=disk["id"])["sandbox"]["state"] == "stopped"
        verbs.do(sandbox, "start")
        assert sandbox.run("cat disk; ls /dev/shm").stdout == "two\n"

        # New ones from both, also a larger one; the sandbox that they were made of may be gone.
        sandbox.delete()
        with (
            from_snapshot(hatchway, verbs, full, disk_mib=2048) as larger,
            from_snapshot(hatchway, verbs, disk, env={"A": "b"}) as booted,
        ):
            assert larger.run("cat disk /dev/shm/memory").stdout == "one\none\n"
            assert int(larger.run("df --output=size -m / | tail -1").stdout) > 1700
            assert booted.run("cat disk; echo $A; ls /dev/shm").stdout == "two\nb\n"
            assert len({one.run("cat /etc/machine-id").stdout for one in (larger, booted)}) == 2
            for kept in (full, disk):
                assert verbs.http.request("DELETE", f"/v1/snapshots/{kept['id']}").status_code == 200
            verbs.do(larger, "suspend")  # what it was made from is gone, and it has all that it needs
            verbs.do(larger, "restore")
            assert larger.run("cat /dev/shm/memory").stdout == "one\n"
