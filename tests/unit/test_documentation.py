"""The documentation says what the code does: pages, paths, codes, the lifecycle, the examples."""

import ast
import builtins
import inspect
import re
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from hatchway.cli.app import app
from hatchway.client import Forward, Hatchway, Sandbox, Session, Terminal
from hatchway.control.app import ENDPOINTS
from hatchway.domain import errors
from hatchway.domain.lifecycle import CAUSES, VERBS, Verb
from hatchway.domain.problems import TITLES
from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.tokens import TokenChecker

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "hatchway"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]


def page(name: str) -> str:
    return (DOCS / name).read_text()


def section(text: str, title: str) -> str:
    """What stands below a heading, as far as the next of its level."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def anchors(text: str) -> set[str]:
    """The anchors that headings get."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.replace("`", "")).strip().lower().replace(" ", "-") for title in titles}


# -- pages


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^\s+- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_first_page_leads_to_all_but_the_decisions() -> None:
    led_to = set(re.findall(r"\]\(([\w/-]+\.md)\)", page("index.md")))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert led_to == {name for name in there if not name.startswith("decisions/")} - {"index.md"}


def test_decisions_are_numbered_once() -> None:
    numbers = [path.name[:4] for path in (DOCS / "decisions").iterdir()]
    assert len(numbers) == len(set(numbers))
    for path in (DOCS / "decisions").iterdir():
        assert path.read_text().startswith(f"# {int(path.name[:4])}. "), path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = path if not name else (path.parent / name).resolve()
        assert there.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_source_files_exist(path: Path) -> None:
    for name in re.findall(r"`((?:src|guest|shim|tests|scripts|examples|docs)/[\w./-]+)`", path.read_text()):
        assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_every_promise_names_tests_that_are_there() -> None:
    rows = [line for line in page("promises.md").splitlines() if re.match(r"\| [A-Z]", line)]
    assert rows
    for row in rows:
        shown = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row.split(" | ")[-1])
        assert shown, row
        for name, test in shown:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / name).read_text(), re.M), f"{name}::{test}"


def test_every_row_of_the_threat_model_names_its_assumption_and_tests() -> None:
    rows = [line.strip("| ").split(" | ") for line in page("threat-model.md").splitlines() if " → " in line[:60]]
    rows = [row for row in rows if len(row) > 1]
    assert len(rows) > 10
    for row in rows:
        assert len(row) == 4, row
        assert all(cell.strip() for cell in row), row
        assert re.search(r"`[\w/]+\.py::test_\w+`", row[3]), row


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_named_tests_exist(path: Path) -> None:
    for name, test in re.findall(r"`([\w/]+\.py)::(test_\w+)`", path.read_text()):
        assert re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / name).read_text(), re.M), f"{name}::{test}"


# -- paths


def same(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def listed(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"^\| `(GET|POST|PATCH|PUT|DELETE) (/[^?`\s]*)[^`]*`", text, re.M)
    return sorted((method, same(path)) for method, path in found)


def test_the_paths_of_the_control_plane() -> None:
    served = [(endpoint.method, same(endpoint.path)) for endpoint in ENDPOINTS]
    assert listed(section(page("api.md"), "Paths of the control plane")) == sorted([*served, ("GET", "/openapi.json")])


def commands(group: Any, before: str = "") -> set[str]:
    """The names of all commands, those of groups with the group's name."""
    found = set()
    for name, one in group.commands.items():
        found.add(before + name)
        if hasattr(one, "commands"):
            found |= commands(one, f"{before}{name} ")
    return found


def test_every_request_has_a_command_that_is_there() -> None:
    rows = re.findall(r"^\| `(\w+) (/\S*)` \| (.*) \|$", page("commands.md"), re.M)
    served = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS if endpoint.scope is not None]
    assert sorted((method, path) for method, path, _ in rows) == sorted(served)
    there = commands(typer.main.get_command(app))
    for _, _, named in rows:
        assert re.fullmatch(r"`[a-z ]+`(, `[a-z ]+`)*", named)
        assert set(re.findall(r"`([a-z ]+)`", named)) <= there, named


def test_the_scopes_and_answers_of_the_control_plane() -> None:
    rows = re.findall(
        r"^\| `(\w+) (/\S*)` \| (\w+) \| ([\d, ]+) \|", section(page("api.md"), "Paths of the control plane"), re.M
    )
    said = {
        (method, path): (scope, {int(status) for status in answers.split(",")}) for method, path, scope, answers in rows
    }
    for endpoint in ENDPOINTS:
        assert said[endpoint.method, endpoint.path] == (endpoint.scope or "anyone", set(endpoint.answers)), (
            endpoint.path
        )


@pytest.mark.parametrize("name", ["api.md", "protocols/data-plane.md"])
def test_the_paths_of_the_data_plane(name: str) -> None:
    app = make_app(cast(Any, None), TokenChecker(), cast(Any, None), archives=cast(Any, object()))
    routes = cast(Any, app)._inner.routes
    served = sorted(
        (method, same(route.path)) for route in routes for method in getattr(route, "methods", {"HEAD"}) - {"HEAD"}
    )
    text = section(page(name), "Paths of the data plane") if name == "api.md" else page(name)
    assert listed(text) == served


def test_the_kinds_of_events() -> None:
    kinds = {f"operation.{status}" for status in ("accepted", "succeeded", "failed", "cancelled")}
    for path in (*(SOURCE / "storage").rglob("*.py"), *(SOURCE / "control").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "outbox.append" in (
                ast.unparse(part) for part in (node.func, *node.args)
            ):
                kinds |= {kind for value in node.args if re.fullmatch(r"[a-z]+\.[a-z_]+", kind := text(value))}
    rows = [line.split(" | ")[0] for line in section(page("api.md"), "Events").splitlines() if line.startswith("| `")]
    assert {kind for row in rows for kind in re.findall(r"`([a-z._]+)`", row)} == {*kinds, "ping", "gap"}


# -- lifecycle


def test_the_lifecycle_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (\w+) \|", section(page("api.md"), "Lifecycle"), re.M)
    said = {verb: (set(sources.split(", ")), target) for verb, sources, target in rows if verb in set(Verb)}
    without = {Verb.ROLLBACK: "as_kept", Verb.IMPORT: "as_kept"}
    assert said == {
        str(verb): ({str(one) for one in rule.sources}, str(rule.target or without.get(verb, "unchanged")))
        for verb, rule in VERBS.items()
    }
    unasked = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]+ \|$", section(page("api.md"), "Lifecycle"), re.M)
    assert {cause: target for cause, target in unasked if cause not in set(Verb)} == {
        str(cause): str(rule.target) for cause, rule in CAUSES.items()
    }


def test_the_statuses_of_errors() -> None:
    rows = re.findall(r"^\| (\d{3}) \|", section(page("api.md"), "Errors"), re.M)
    assert [int(status) for status in rows] == sorted(TITLES)


# -- codes


def codes() -> dict[str, set[int]]:
    """Every code that the source names, with the statuses that it comes with (none for those that no HTTP answer has)."""
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    found: dict[str, set[int]] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        if room in ("bench", "chaos", "redteam", "launcher"):  # a command's own complaints; between our own processes
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for code, kind in named(node):
                statuses = found.setdefault(code, set())
                if kind in kinds and room not in ("client", "cli", "supervisor"):
                    statuses.add(kinds[kind].status)
    return found


def named(node: ast.AST) -> list[tuple[str, str]]:
    """Codes that an expression names, each with the class of its error (empty: a plain dict)."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(value.value, "") for key, value in pairs if text(key) == "code" and isinstance(value, ast.Constant)]
    if isinstance(node, ast.arguments):
        defaults = zip(node.kwonlyargs, node.kw_defaults, strict=True)
        return [(text(value), "") for argument, value in defaults if argument.arg == "code" and text(value)]
    if not isinstance(node, ast.Call):
        return []
    name = ast.unparse(node.func)
    if name == "super().__init__":
        name = ""
    elif not re.fullmatch(r"[A-Z][A-Za-z]+", name) or (name not in vars(errors) and name not in CLIENT_ERRORS):
        return []
    given = [node.args[0]] if node.args else []
    given += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
    return [(code, name) for value in given if (code := text(value)) and re.fullmatch(r"[a-z]+(_[a-z]+)*", code)]


def text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def client_errors() -> set[str]:
    tree = [ast.parse((SOURCE / name).read_text()) for name in ("client/errors.py",)]
    return {node.name for module in tree for node in module.body if isinstance(node, ast.ClassDef)}


CLIENT_ERRORS = client_errors()


def test_every_code_is_explained_with_its_status() -> None:
    said: dict[str, set[int]] = {}
    for cells in (line.split(" | ") for line in page("errors.md").splitlines() if line.startswith("| `")):
        for code in re.findall(r"`(\w+)`", cells[0]):
            said.setdefault(code, set()).update(map(int, re.findall(r"\d{3}", cells[1])) if len(cells) == 3 else ())
    known = codes()
    assert known.keys() - said.keys() == set(), "docs/errors.md lacks them"
    assert said.keys() - known.keys() == set(), "docs/errors.md names what is not there"
    for code, statuses in said.items():
        assert not statuses or statuses == known[code], code


def test_codes_that_other_pages_name_exist() -> None:
    known = codes()
    for title in re.findall(r"^## (.*)$", page("troubleshooting.md"), re.M):
        for code in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", title):
            assert code in known, title


# -- examples


def examples() -> list[tuple[str, str]]:
    return [
        (path.name, block)
        for path in (DOCS / "quickstart.md", ROOT / "README.md")
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
    ]


@pytest.mark.parametrize(("name", "block"), examples(), ids=lambda value: value if value.endswith(".md") else "")
def test_python_examples_use_what_there_is(name: str, block: str) -> None:
    kinds = {"hatchway": Hatchway, "sandbox": Sandbox, "session": Session, "terminal": Terminal, "forward": Forward}
    made = {word.id for word in ast.walk(ast.parse(block)) if isinstance(word, ast.Name)}
    assert made - set(dir(builtins)) <= {*kinds, "Hatchway", "change", "entry", "event", "result"}
    for owner, member in re.findall(
        r"\b(hatchway|sandbox|session|terminal|forward)\.(\w+)", re.sub(r"from \S+ import", "", block)
    ):
        kind = kinds[owner]
        assert hasattr(kind, member) or member in inspect.getsource(kind.__init__), f"{owner}.{member}"


def test_commands_of_the_documentation_exist() -> None:
    from typer.main import get_command

    from hatchway.cli.app import app

    commands = set(cast(Any, get_command(app)).commands)
    for path in PAGES:
        if path.parent.name == "decisions" or path.name == "CHANGELOG.md":
            continue  # they tell of another time
        for block in re.findall(r"^```\n(.*?)```|`(hatchway [^`]+)`", path.read_text(), re.S | re.M):
            for name in re.findall(r"(?:^|[\s;|&/])hatchway ([a-z]+)\b", "\n".join(block)):
                assert name in commands, f"{path.name}: hatchway {name}"


def test_every_command_but_run_and_exec_takes_json() -> None:
    def check(name: str, command: Any) -> None:
        options = {option for parameter in command.params for option in parameter.opts}
        for member, one in getattr(command, "commands", {}).items():
            check(f"{name} {member}", one)
        if getattr(command, "invoke_without_command", True):
            assert ("--json" in options) == (name not in ("run", "exec")), name

    for name, command in cast(Any, typer.main.get_command(app)).commands.items():
        check(name, command)
