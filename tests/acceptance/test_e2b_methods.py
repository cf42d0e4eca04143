"""Every public method of E2B's SDKs, several versions of them, against one real service: what comes of each is what docs/e2b.md says."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Service
from e2b.table import in_python, said

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1500)]

SDKS = ROOT / "build" / "e2b-sdks"
PROGRAMS = ROOT / "tests" / "acceptance" / "e2b" / "programs"
PYTHONS = ("python-newest", "python-2.45", "python-2.20")
ASYNC = "-async"
"""After the name of an SDK: its asynchronous half."""
ALL = (*PYTHONS, *(name + ASYNC for name in PYTHONS), "javascript")
WITHIN_S = 1400
REFUSED = ("not supported", "501", "does not exist")
"""What the message of a refusal has in it."""

Used = dict[str, Any]


@pytest.fixture(scope="module")
def use(service: Service) -> Callable[[str], Used]:
    """Runs the programs with an SDK, once, and gives what they told."""
    told: dict[str, Used] = {}
    service.bake()

    def run(name: str) -> Used:
        if name not in told:
            told[name] = _run(service, name)
        return told[name]

    return run


def _run(service: Service, which: str) -> Used:
    name = which.removesuffix(ASYNC)
    made = subprocess.run([str(ROOT / "scripts/setup-e2b-sdks"), name], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    url = str(json.loads((service.data_dir / "endpoint.json").read_text())["e2b"])
    with service.client() as hatchway:
        key = hatchway.keys.create(f"sdk-{which}", e2b=True)
    folder = SDKS / name
    command = (
        [str(folder / "node"), str(PROGRAMS / "use_javascript.mjs")]
        if name == "javascript"
        else [
            str(folder / "bin" / "python"),
            str(PROGRAMS / ("use_python.py" if which == name else "use_python_async.py")),
        ]
    )
    environ = {
        **service.environ,
        "E2B_API_KEY": key.key,
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "E2B_SDK": str(folder),
    }
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    used: Used = json.loads(done.stdout.splitlines()[-1])
    if name == "javascript":
        used["public"] = [in_python(method) for method in used["public"]]
        used["results"] = {in_python(method): outcome for method, outcome in used["results"].items()}
    return used


@pytest.mark.parametrize("name", ALL)
def test_every_method_is_in_the_guide_and_does_what_it_says(use: Callable[[str], Used], name: str) -> None:
    used, table = use(name), said()
    assert set(used["public"]) <= set(table), "methods that the guide does not name"
    results = used["results"]
    assert all(outcome == "ok" for method, outcome in results.items() if table.get(method) == "yes"), results
    for method in used["public"]:
        outcome = results.get(method)
        if table[method] == "yes":
            assert outcome == "ok", f"{method}: {outcome}"
        elif table[method] == "no" and outcome is not None:
            assert outcome != "ok", f"{method} works, and the guide says that it does not"
            assert any(words in outcome for words in REFUSED), f"{method}: {outcome}"


def test_the_guide_names_no_method_that_no_sdk_has(use: Callable[[str], Used]) -> None:
    there = {method for name in ALL for method in use(name)["public"]}
    assert set(said()) <= there


def test_the_programs_are_there() -> None:
    assert all(
        path.exists()
        for path in map(
            Path, (PROGRAMS / one for one in ("use_python.py", "use_python_async.py", "use_javascript.mjs"))
        )
    )
