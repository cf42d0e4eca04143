"""What holds of the repository as a whole: its dependencies, its documentation, and what none of its files may name."""

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {"pyjwt": "jwt", "dnspython": "dns", "pyyaml": "yaml"}
REGISTRIES = re.compile(
    "|".join(
        # In two pieces each, so that this file does not name them either.
        re.escape(first + second)
        for first, second in (
            ("pypi", ".org"), ("python", "hosted.org"), ("registry.npm", "js.org"), ("crates", ".io"), ("deb.debian", ".org"),
            ("security.debian", ".org"), ("archive.ubuntu", ".com"), ("security.ubuntu", ".com"), ("ports.ubuntu", ".com"),
            ("proxy.golang", ".org"), ("docker", ".io"), ("ghcr", ".io"), ("quay", ".io"),
        )
    )
)  # fmt: skip
A_MACHINE = re.compile(r"(?<![\w.}/-])/" + r"work(?![\w-])")
"""The folder that some machine of a developer keeps its checkouts in."""


def files() -> list[Path]:
    """The files that a commit could hold; found without git, so that an unpacked archive is tested alike."""
    made = {"build", "site", "__pycache__", ".git", ".venv", ".hypothesis"}
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in made and not name.endswith(("_cache", ".egg-info"))]
        found += [Path(folder) / name for name in names if not name.endswith(".pyc")]
    return found


def test_every_dependency_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for requirement in project["dependencies"]:
        name = re.split(r"[\[<>=~! ]", requirement)[0]
        module = IMPORTED_AS.get(name, name).replace("-", "_")
        assert re.search(rf"^\s*(import|from) {module}\b|protocols\.http\.{module}_impl\b", source, re.M), (
            f"nothing imports {name}"
        )


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.M))
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        assert re.split(r"[\[<>=~! ]", requirement)[0] in locked, requirement


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    found = []
    for path in files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if REGISTRIES.search(line) or A_MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def rooms() -> list[Path]:
    return sorted(path.parent for path in (ROOT / "src").rglob("__init__.py") if path.parent.name != "versions")


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(ROOT / "src")))
def test_every_room_says_what_lives_there(room: Path) -> None:
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert len(said.split(". ")) > 1 or "\n\n" in said
    for name in re.findall(r"`([a-z][a-z_]*(?:\.[a-z_]+)*)`", said):
        assert any(
            found(base, name.split(".")) for base in (room, *room.parents[: len(room.relative_to(ROOT / "src").parts)])
        ), name


def found(base: Path, parts: list[str]) -> bool:
    """Whether a module, or a name in one, is reached from `base`."""
    for part in parts[:-1]:
        base /= part
    last = base / parts[-1]
    if last.is_dir() or last.with_suffix(".py").is_file():
        return True
    module = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    return len(parts) > 1 and module.is_file() and re.search(rf"\b{parts[-1]}\b", module.read_text()) is not None


def test_no_two_test_files_share_a_name() -> None:
    """pytest takes the second for the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
