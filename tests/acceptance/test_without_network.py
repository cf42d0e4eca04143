"""A host, or a user without root, that gives no access to /dev/net/tun: sandboxes run, without a network card."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import HATCHWAY, Service
from tests.support import baked

from hatchway.client import Hatchway, OperationFailed

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="hides the device in a mount namespace"),
]


def test_a_sandbox_without_a_network_card(service: Service, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = " ".join([*HATCHWAY, "up", "--no-bake", "--data-dir", str(data), "--api-port", "0", "--data-port", "0"])
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"mount -t tmpfs tmpfs /dev/net && exec {up}"],
        env=service.environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        endpoint = data / "endpoint.json"
        deadline = time.monotonic() + 120
        while not endpoint.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        baked.lend(data)
        url, key = json.loads(endpoint.read_text())["api"], (data / "dev.key").read_text().strip()
        with Hatchway(url, key) as hatchway, hatchway.sandboxes.create() as sandbox:
            assert sandbox.run("ls /sys/class/net").stdout == "lo\n"
            assert [one["type"] for one in sandbox.refresh().conditions] == ["network_unavailable"]
            sandbox.run("echo kept > file").check()
            sandbox.stop()
            sandbox.start_vm()
            assert sandbox.run("cat file").stdout == "kept\n"
            # What was given a policy is not made without it.
            policy = {"version": 1, "rules": [{"id": "one", "to": {"hosts": ["a.example"]}}]}
            with pytest.raises(OperationFailed, match="network_unavailable"):
                hatchway.sandboxes.create(policy=policy)
        assert "/dev/net/tun" in (data / "log" / "launcher.log").read_text()
    finally:
        baked.keep(data)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
