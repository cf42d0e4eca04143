"""apt: `sources.list` and the files in `sources.list.d`, in both formats."""

import re
import shlex
from collections.abc import Iterator

from .machine import Found, Index, Machine

_OPTIONS = re.compile(r"\[[^\]]*\]")


def found(machine: Machine) -> Found:
    """What apt reads from."""
    answer = Found(tool="apt", indices=[], notes=[])
    folder = machine.system("/etc/apt/sources.list.d")
    files = [machine.system("/etc/apt/sources.list")]
    if folder.is_dir():
        files += sorted(path for path in folder.iterdir() if path.suffix in (".list", ".sources"))
    for path in files:
        text = machine.text(path) or ""
        entries = _stanzas(text) if path.suffix == ".sources" else _lines(text)
        for url, flat in entries:
            if not url.startswith(("http://", "https://")):
                if not url.startswith(("cdrom:", "file:", "copy:")):
                    answer.notes.append(
                        f"apt: {url.split(':')[0]} in {path} is left out: only http and https become rules"
                    )
                continue
            paths = None if flat else ("dists/**", "pool/**")
            answer.indices.append(Index(tool="apt", url=url, source=str(path), paths=paths))
    return answer


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    for line in text.splitlines():
        words = _OPTIONS.sub(" ", line.partition("#")[0], count=1).split()
        if len(words) >= 3 and words[0] in ("deb", "deb-src"):
            yield words[1], words[2].endswith("/")


def _stanzas(text: str) -> Iterator[tuple[str, bool]]:
    for stanza in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields.setdefault(name, []).extend(_words(line))
                continue
            name, colon, value = line.partition(":")
            name = name.strip().lower()
            if colon:
                fields[name] = _words(value)
        if [word.lower() for word in fields.get("enabled", [])] in (["no"], ["false"], ["0"], ["off"]):
            continue
        flat = any(suite.endswith("/") for suite in fields.get("suites", []))
        for url in fields.get("uris", []):
            yield url, flat


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
