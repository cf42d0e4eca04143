"""npm: the environment and the `.npmrc` files; else what `npm config get registry` says."""

import re
from collections.abc import Iterator
from pathlib import Path

from .machine import Found, Index, Machine

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SETTING = re.compile(r"\s*([^=;#\s][^=]*?)\s*=\s*(.*?)\s*")
_SECRETS = (":_authToken", ":_auth", ":username", ":_password", ":certfile")


def found(machine: Machine) -> Found:
    """What npm reads from."""
    answer = Found(tool="npm", indices=[], notes=[])
    settings: dict[str, tuple[str, str]] = {}
    for path in _files(machine):
        for line in (machine.text(path) or "").splitlines():
            match = _SETTING.fullmatch(line)
            if match is not None:
                value = _VARIABLE.sub(lambda name: machine.environment.get(name[1], ""), match[2].strip("\"'"))
                settings[match[1]] = (value, str(path))
    for name, value in machine.environment.items():
        if name.lower() == "npm_config_registry" and value:
            settings["registry"] = (value, name)
    for key, (url, source) in settings.items():
        if key == "registry" or (key.startswith("@") and key.endswith(":registry")):
            answer.indices.append(_index(url, source, settings))
    if "registry" not in settings:
        default = machine.ask("npm", "config", "get", "registry")
        if default and "://" in default:
            answer.indices.append(_index(default, "npm config get registry", settings))
        elif not answer.indices:
            answer.notes.append("npm: no registry is configured, and there is no npm here that could say its default")
    return answer


def _index(url: str, source: str, settings: dict[str, tuple[str, str]]) -> Index:
    bare = "//" + url.split("://", 1)[-1].split("@")[-1].rstrip("/")
    secret = any(key.endswith(_SECRETS) and bare.startswith(key.rpartition(":")[0].rstrip("/")) for key in settings)
    return Index(tool="npm", url=url, source=source, encoded_slash=True, needs_credential=secret)


def _files(machine: Machine) -> Iterator[Path]:
    """From the least to the most important, as npm reads them."""
    environment = {name.lower(): value for name, value in machine.environment.items()}
    yield machine.system("/etc/npmrc")
    yield machine.system("/usr/etc/npmrc")
    yield machine.system("/usr/local/etc/npmrc")
    if environment.get("npm_config_globalconfig"):
        yield Path(environment["npm_config_globalconfig"])
    yield Path(environment.get("npm_config_userconfig") or machine.home / ".npmrc")
    if machine.project is not None:
        yield machine.project / ".npmrc"
