"""E2B's Python SDK, as it is published, against the real service: each file of `tests/e2b_sdk` runs in the SDK's own environment."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Service

from hatchway.bench import e2b as bench
from hatchway.bench.options import Options

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
    service.bake()
    url = str(json.loads((service.data_dir / "endpoint.json").read_text())["e2b"])
    with service.client() as hatchway:
        key = hatchway.keys.create(f"sdk-{program.stem}"[:60], e2b=True)
    environ = {
        **service.environ,
        "E2B_API_KEY": key.key,
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "HATCHWAY_URL": service.url,
        "HATCHWAY_API_KEY": service.key,
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


def test_the_bench_measures_what_it_names(
    service: Service, python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run: sandboxes, files and memory are there, nothing failed, and nothing is left."""
    service.bake()
    for name, small in {"WARM_UP": 0, "FILE_RUNS": 1, "LARGE_MIB": 4, "MANY": 2, "MANY_ROUNDS": 1}.items():
        monkeypatch.setattr(bench, name, small)
    monkeypatch.setenv(bench.PYTHON, str(python))
    for name in ("HATCHWAY_URL", "HATCHWAY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HATCHWAY_DATA_DIR", str(service.data_dir))
    found = {one.metric: one for one in bench.e2b(Options(service.data_dir, 1))}
    assert all(found[name].ratio for name in ("create", "first_command", "upload", "download", "used_2_last")), found
    assert found["used_2_failed"].value == 0, capsys.readouterr().err
    assert {f"{way}_growth_{role}" for way in ("upload", "download") for role in ("e2b", "node")} <= set(found)
    assert service.sandboxes() == []
