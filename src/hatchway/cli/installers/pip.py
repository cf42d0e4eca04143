"""pip and uv: the environment, `pip.conf`, `uv.toml`, `pyproject.toml`; else what the installed pip has as its default."""

import configparser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .machine import Found, Index, Machine

_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url, PyPI.file_storage_domain)"


def found(machine: Machine) -> Found:
    """What pip and uv read from."""
    configured = [*_pip(machine), *_uv(machine)]
    answer = Found(tool="pip", indices=[], notes=[])
    for url, source in configured:
        answer.indices.append(Index(tool="pip", url=url, source=source, paths=_paths(url)))
    replaced = any(
        source.startswith(("index-url", "default index", "PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"))
        for _, source in configured
    )
    if not replaced:
        _default(machine, answer)
    elif configured:
        answer.notes.append("pip: if the index links to files on other hosts, add these with GET to its rule")
    return answer


def _paths(url: str) -> tuple[str, ...]:
    """Pages of the index, and the files beside them."""
    inside = url.split("://", 1)[-1].partition("/")[2].strip("/")
    if "/" in inside:
        return ("../**",)
    return ("**", "../packages/**")


def _default(machine: Machine, answer: Found) -> None:
    for python in ("python3", "python"):
        said = (machine.ask(python, "-c", _DEFAULT) or "").split()
        if len(said) == 2:
            source = "the installed pip's default"
            answer.indices.append(Index(tool="pip", url=said[0], source=source, paths=("**",)))
            answer.indices.append(Index(tool="pip-files", url=f"https://{said[1]}/packages/", source=source))
            return
    answer.notes.append("pip: no index is configured, and there is no pip here that could say its default")


def _pip(machine: Machine) -> Iterator[tuple[str, str]]:
    environment = machine.environment
    settings: dict[str, tuple[str, str]] = {}
    for path in _files(machine):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(machine.text(path) or "")
        except configparser.Error:
            continue
        for section in ("global", "install", "download"):
            for key in ("index-url", "extra-index-url", "no-index"):
                if parser.has_option(section, key):
                    settings[key] = (parser.get(section, key), f"{key} in {path}")
    for key in ("index-url", "extra-index-url", "no-index"):
        variable = "PIP_" + key.upper().replace("-", "_")
        if environment.get(variable):
            settings[key] = (environment[variable], variable)
    if settings.get("no-index", ("",))[0].lower() in ("1", "true", "yes", "on"):
        return
    for key in ("index-url", "extra-index-url"):
        if key in settings:
            value, source = settings[key]
            for url in value.split():
                yield url, source


def _files(machine: Machine) -> Iterator[Path]:
    """From the least to the most important, as pip reads them."""
    environment = machine.environment
    named = environment.get("PIP_CONFIG_FILE")
    if named == "/dev/null":
        return
    for folder in reversed((environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")):
        yield machine.system(f"{folder}/pip/pip.conf")
    yield machine.system("/etc/pip.conf")
    yield machine.home / ".pip" / "pip.conf"
    yield machine.config("pip/pip.conf")
    if environment.get("VIRTUAL_ENV"):
        yield Path(environment["VIRTUAL_ENV"]) / "pip.conf"
    if named:
        yield Path(named)


def _uv(machine: Machine) -> Iterator[tuple[str, str]]:
    environment = machine.environment
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        for url in environment.get(variable, "").split():
            name, equals, rest = url.partition("=")
            yield (rest if equals and "://" not in name else url), variable
    for path in (machine.system("/etc/uv/uv.toml"), machine.config("uv/uv.toml")):
        yield from _uv_settings(machine.toml(path), str(path))
    if machine.project is not None:
        yield from _uv_settings(machine.toml(machine.project / "uv.toml"), "uv.toml of the project")
        tool = machine.toml(machine.project / "pyproject.toml").get("tool")
        if isinstance(tool, dict) and isinstance(tool.get("uv"), dict):
            yield from _uv_settings(tool["uv"], "pyproject.toml of the project")


def _uv_settings(settings: dict[str, Any], source: str) -> Iterator[tuple[str, str]]:
    pip = settings.get("pip")
    for table in (settings, pip if isinstance(pip, dict) else {}):
        if isinstance(table.get("index-url"), str):
            yield table["index-url"], f"index-url in {source}"
        extra = table.get("extra-index-url")
        for url in extra if isinstance(extra, list) else ():
            yield str(url), f"extra-index in {source}"
    indices = settings.get("index")
    for index in indices if isinstance(indices, list) else ():
        if isinstance(index, dict) and isinstance(index.get("url"), str):
            yield index["url"], f"{'default index' if index.get('default') else 'index'} in {source}"
