"""cargo: its configuration files and the environment. What cargo has built in it does not say, so without a configuration there is nothing."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .machine import Found, Index, Machine


def found(machine: Machine) -> Found:
    """What cargo reads from."""
    answer = Found(tool="cargo", indices=[], notes=[])
    sources: dict[str, Any] = {}
    places: list[tuple[str, str]] = []
    for path in _files(machine):
        settings = machine.toml(path)
        for name, table in _tables(settings.get("source")):
            sources.setdefault(name, {}).update(table)
        places += [
            (str(table["registry"]), str(path)) for _, table in _tables(settings.get("source")) if "registry" in table
        ]
        places += [
            (str(table["index"]), str(path)) for _, table in _tables(settings.get("registries")) if "index" in table
        ]
    for variable, value in machine.environment.items():
        if variable.startswith("CARGO_REGISTRIES_") and variable.endswith("_INDEX"):
            places.append((value, variable))
    for url, source in dict(places).items():
        sparse = url.startswith("sparse+")
        bare = url.removeprefix("sparse+")
        if bare.startswith(("http://", "https://")):
            answer.indices.append(Index(tool="cargo", url=bare, source=source, git=not sparse))
            if sparse:
                answer.notes.append(
                    f"cargo: the file config.json of the index in {source} says as `dl` where crates are; if that is another host, add it"
                )
        else:
            answer.notes.append(f"cargo: a registry in {source} is left out: only http and https become rules")
    if not answer.indices and shutil.which("cargo", path=machine.environment.get("PATH", "")):
        answer.notes.append(
            "cargo: no registry is configured, and cargo does not say its default: name one in config.toml"
        )
    return answer


def _tables(value: object) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        yield from ((name, table) for name, table in value.items() if isinstance(table, dict))


def _files(machine: Machine) -> Iterator[Path]:
    """From the least to the most important, as cargo reads them."""
    home = Path(machine.environment.get("CARGO_HOME") or machine.home / ".cargo")
    folders = [home]
    if machine.project is not None:
        project = machine.project.absolute()
        folders += [parent / ".cargo" for parent in (*reversed(project.parents), project)]
    for folder in dict.fromkeys(folders):
        yield folder / "config"
        yield folder / "config.toml"
