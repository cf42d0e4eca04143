"""go: GOPROXY and GOSUMDB from the environment, else what `go env` says, which reads go's own file and has its default."""

import re

from .machine import Found, Index, Machine


def found(machine: Machine) -> Found:
    """What go reads modules from."""
    answer = Found(tool="go", indices=[], notes=[])
    proxies, source = _setting(machine, "GOPROXY")
    if proxies is None:
        return answer
    for entry in re.split(r"[,|]", proxies):
        if "://" in entry:
            answer.indices.append(Index(tool="go", url=entry.strip(), source=source))
        elif entry.strip() == "direct":
            answer.notes.append(
                "go: modules that the proxy has not would come from anywhere (`direct`): allow their hosts with `git` rules"
            )
    sums, source = _setting(machine, "GOSUMDB")
    words = (sums or "").split()
    if words and words[0] != "off":
        url = words[1] if len(words) > 1 else f"https://{words[0].split('+')[0]}"
        answer.indices.append(
            Index(tool="go-sums", url=url, source=source, paths=("supported", "latest", "lookup/**", "tile/**"))
        )
    return answer


def _setting(machine: Machine, name: str) -> tuple[str | None, str]:
    if machine.environment.get(name):
        return machine.environment[name], name
    said = machine.ask("go", "env", name)
    if said:
        return said, f"go env {name}"
    for line in (machine.text(machine.config("go/env")) or "").splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == name:
            return value.strip(), str(machine.config("go/env"))
    return None, ""
