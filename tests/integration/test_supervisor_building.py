"""A service that is still building its template, or waits for another that does, ends when it is told to."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 60


@pytest.mark.skipif(os.geteuid() != 0, reason="a template is built by root")
def test_one_that_waits_for_anothers_build_ends_when_it_is_told_to(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    held = os.open(images / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    command = [sys.executable, "-m", "hatchway.cli.main", "up", "--data-dir", str(tmp_path), "--json"]
    service = subprocess.Popen([*command, "--api-port", "0", "--data-port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        assert any('"waiting"' in line for line in service.stdout)
        builders = _children(service.pid)
        assert builders
        service.terminate()
        service.wait(WITHIN_S)
        assert not any(Path(f"/proc/{builder}").exists() for builder in builders)
    finally:
        service.kill()
        service.wait()
        os.close(held)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
