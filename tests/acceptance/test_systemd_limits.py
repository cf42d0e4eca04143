"""A sandbox under what the unit file for systemd leaves: its privileges, no new ones, and a file system that is read-only elsewhere."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import HATCHWAY, ROOT, Service
from tests.support import baked

UNIT = (ROOT / "deploy" / "systemd" / "hatchway.service").read_text()
pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="the unit is for root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
]


def test_a_sandbox_runs_with_what_the_unit_leaves(tmp_path: Path) -> None:
    capabilities = [
        "+" + name.removeprefix("CAP_").lower()
        for line in re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT, re.M)
        for name in line.split()
    ]
    service = Service(tmp_path / "data")
    service.data_dir.mkdir()
    writable = [service.data_dir, Path("/run"), Path(service.environ["HATCHWAY_IMAGES_DIR"])]
    own = " && ".join(f"mount --bind {path} {path}" for path in writable if path.exists())
    limits = ["setpriv", f"--bounding-set=-all,{','.join(capabilities)}", "--no-new-privs", "--"]
    up = [*HATCHWAY, "up", "--no-bake", "--data-dir", str(service.data_dir), "--api-port", "0", "--data-port", "0"]
    script = f"{own} && mount --bind / / && mount -o remount,bind,ro / && exec {' '.join([*limits, *up])}"
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        env=service.environ, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (service.data_dir / "endpoint.json").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        baked.lend(service.data_dir)
        # Such are the limits of the supervisor, of which the launcher and every jail have no more.
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert int(re.findall(r"CapBnd:\t(\w+)", status)[0], 16).bit_count() <= len(capabilities)
        with service.client() as client, client.sandboxes.create() as sandbox:
            assert sandbox.run(["echo", "still works"]).check().stdout == "still works\n"
            sandbox.pause()
            sandbox.resume()
            assert sandbox.run(["echo", "again"]).check().stdout == "again\n"
    finally:
        process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=120)
    assert process.returncode == 0, words
