"""E2B's Python SDK, as it is published, against the real service: each file of `tests/e2b_sdk` runs in the SDK's own environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Service

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

PROGRAMS = sorted((ROOT / "tests/e2b_sdk").glob("test_*.py"))
SDK = ROOT / "build/e2b-sdks/python-newest"
WITHIN_S = 850


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter that has the SDK."""
    done = subprocess.run([str(ROOT / "scripts/setup-e2b-sdks"), SDK.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return SDK / "bin/python"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_sdk(service: Service, python: Path, program: Path) -> None:
    url = str(json.loads((service.data_dir / "endpoint.json").read_text())["e2b"])
    with service.client() as hatchway:
        key = hatchway.keys.create(f"sdk-{program.stem}"[:60], e2b=True)
        # The first one waits for the template to be baked; SDKs wait for no creation longer than a minute.
        hatchway.sandboxes.create(timeout=WITHIN_S).delete()
    environ = {
        **service.environ,
        "E2B_API_KEY": key.key,
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "HATCHWAY_URL": service.url,
        "HATCHWAY_API_KEY": service.key,
        "HATCHWAY_PYTHON": sys.executable,
    }
    command = [str(python), "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(program.parent)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(program)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
