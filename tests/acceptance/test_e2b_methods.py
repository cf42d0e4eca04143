"""Every public method of E2B's SDKs, several versions of them, against one real service: what comes of each is what docs/e2b.md says."""

import json
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
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
NEWEST = PYTHONS[0]
ALL = (*PYTHONS, *(name + ASYNC for name in PYTHONS), "javascript")
AT_ONCE = 2
"""Programs that run side by side. Each waits for its sandboxes half of the time, of which it has up to three."""
WITHIN_S = 1400
REFUSED = ("not supported", "501", "does not exist")
"""What the message of a refusal has in it."""

Used = dict[str, Any]


@pytest.fixture(scope="module")
def use(
    service: Service, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Used]]:
    """Runs the program of an SDK, once, and gives what it told. Those of all tests that are to come run meanwhile."""
    git = tmp_path_factory.mktemp("git") / "told.json"
    running: dict[str, Future[Used]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(name: str) -> None:
            if name != NEWEST and NEWEST not in running:
                begin(NEWEST)  # which all others need: it has its place before any of them waits
            if name not in running:
                running[name] = pool.submit(run, name)

        def run(name: str) -> Used:
            if name == NEWEST:
                used = _run(service, name)
                git.write_text(json.dumps(used["git"]))
                return used
            outcome = running[NEWEST].result()["results"]["Git.init"]
            assert outcome == "ok", f"git with the newest SDK, whose answers are needed here: {outcome}"
            return _run(service, name, {"GIT_TOLD": str(git), **({} if NEWEST in name else {"ROUNDS": "1"})})

        def give(name: str) -> Used:
            begin(name)
            return running[name].result()

        wanted = [name for name in ALL if any(f"[{name}]" in item.nodeid for item in request.session.items)]
        _set_up(wanted or ALL)
        service.bake()
        for name in wanted:
            begin(name)
        try:
            yield give
        finally:
            for one in running.values():
                one.cancel()


def _set_up(names: Iterable[str]) -> None:
    wanted = sorted({NEWEST, *(name.removesuffix(ASYNC) for name in names)})
    made = subprocess.run([str(ROOT / "scripts/setup-e2b-sdks"), *wanted], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def _run(service: Service, which: str, more: Mapping[str, str] = MappingProxyType({})) -> Used:
    name = which.removesuffix(ASYNC)
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
        **more,
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
    assert used.get("unknown", []) == [], "classes that nobody looked at"
    results = used["results"]
    failed = {method: outcome for method, outcome in results.items() if table.get(method) == "yes" and outcome != "ok"}
    assert failed == {}
    for method in used["public"]:
        outcome = results.get(method)
        if table[method] == "yes":
            assert outcome == "ok", f"{method}: {outcome}"
        elif table[method] == "no" and outcome is not None:
            assert outcome != "ok", f"{method} works, and the guide says that it does not"
            assert any(words in outcome for words in REFUSED), f"{method}: {outcome}"


def test_git_is_the_same_commands_in_every_sdk(use: Callable[[str], Used]) -> None:
    """The newest `Sandbox` had them run; the others took the same steps, and Python's had to ask for the same, see `git_steps`."""
    told = use(NEWEST)["git"]
    assert len(told) >= 20

    def words(asked: list[Any]) -> list[Any]:
        command, *rest = asked
        return [shlex.split(command), *rest]

    assert [words(asked) for asked, *_ in use("javascript")["git"]] == [words(asked) for asked, _ in told]


def test_the_guide_names_no_method_that_no_sdk_has(use: Callable[[str], Used]) -> None:
    there = {method for name in ALL for method in use(name)["public"]}
    assert set(said()) <= there
