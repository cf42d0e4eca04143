"""From the places that installers read from to a policy: GET and HEAD, the paths of the index, and nothing else."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import yaml

from hatchway.domain.policy.addresses import AddressKind, classify, parse_address
from hatchway.domain.policy.names import NameRefused, canonical_host
from hatchway.domain.policy.paths import PathPattern, PathRefused, canonical_path

from .machine import Found, Index, Machine

HEADING = """\
# Lets package installers read from where those of this machine do, and write nowhere.
# Made by `hatchway policy init`; it is yours to change. docs/policy.md explains every key.
"""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The policy, where it comes from, and what it cannot say."""

    document: dict[str, Any]
    sources: tuple[dict[str, str], ...]
    """Rule, and where it was said."""
    notes: tuple[str, ...]

    def as_text(self) -> str:
        """The policy as YAML."""
        lines = yaml.safe_dump(self.document, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
        said = "".join(f"# {source['rule']}: {source['source']}\n" for source in self.sources)
        return HEADING + said + lines


class _Draft(msgspec.Struct, kw_only=True):
    """A rule in the making: one host and port, as one tool uses it."""

    tool: str
    host: str
    port: int
    clear: bool
    git: bool
    encoded_slash: bool
    private: bool
    paths: list[str]
    sources: list[str]


def profile(machine: Machine, found: Sequence[Found]) -> Profile:
    """The policy for what was found."""
    notes = [note for one in found for note in one.notes]
    drafts: dict[tuple[object, ...], _Draft] = {}
    for one in found:
        for index in one.indices:
            _draft(machine, index, drafts, notes)
    rules: list[dict[str, Any]] = []
    sources: list[dict[str, str]] = []
    numbers: dict[str, int] = {}
    for draft in drafts.values():
        numbers[draft.tool] = numbers.get(draft.tool, 0) + 1
        name = draft.tool if numbers[draft.tool] == 1 else f"{draft.tool}-{numbers[draft.tool]}"
        rules.append(_rule(name, draft))
        sources.append({"rule": name, "source": ", ".join(dict.fromkeys(draft.sources))})
    if any(draft.private for draft in drafts.values()):
        notes.append(
            "an index has a private address: store this policy at the platform or the project, whose rules may allow these"
        )
    through = sorted(
        name for name, value in machine.environment.items() if value and name.lower() in ("http_proxy", "https_proxy")
    )
    if rules and through:
        notes.append(
            f"this machine reaches its indices through a proxy ({', '.join(through)}): name it among the gateway's `proxies`,"
            " and in the rules (`route: {via: 'http:NAME'}`)"
        )
    if not rules:
        notes.append("no index was found: nothing is allowed")
    document: dict[str, Any] = {"version": 1, "description": "Package installers read from their indices"}
    if rules:
        document["rules"] = rules
    return Profile(document=document, sources=tuple(sources), notes=tuple(dict.fromkeys(notes)))


def _draft(machine: Machine, index: Index, drafts: dict[tuple[object, ...], _Draft], notes: list[str]) -> None:
    where = f"{index.tool}: the index in {index.source}"
    try:
        url = urlsplit(index.url)
        port = url.port
    except ValueError:
        notes.append(f"{where} is left out: it is no URL")
        return
    if url.scheme not in ("http", "https") or not url.hostname:
        notes.append(f"{where} is left out: only http and https become rules")
        return
    try:
        host = canonical_host(url.hostname)
    except NameRefused as error:
        notes.append(f"{where} is left out: its host is no name that a rule can have, because {error.cause}")
        return
    if url.username is not None or url.password is not None or index.needs_credential:
        notes.append(
            f"{where} needs a credential: it is not written into the policy; bind one to the rule (`credentials`)"
        )
    paths = _paths(url, index, where, notes)
    if not paths:
        return
    clear = url.scheme == "http"
    port = port or (80 if clear else 443)
    key = (index.tool, host, port, clear, index.git)
    draft = drafts.get(key)
    if draft is None:
        private = any(
            classify(parse_address(address)) is AddressKind.PRIVATE
            for address in machine.addresses(host)
            if "%" not in address
        )
        draft = drafts[key] = _Draft(
            tool=index.tool,
            host=host,
            port=port,
            clear=clear,
            git=index.git,
            encoded_slash=index.encoded_slash,
            private=private,
            paths=[],
            sources=[],
        )
    draft.paths += [path for path in paths if path not in draft.paths]
    draft.sources.append(index.source)


def _paths(url: SplitResult, index: Index, where: str, notes: list[str]) -> list[str]:
    """The path patterns of an index."""
    try:
        base = canonical_path(url.path or "/").rstrip("/").replace("*", "%2A")
    except PathRefused as error:
        notes.append(f"{where} is left out: its path cannot be read in one way only: {error.cause}")
        return []
    if index.git:
        return [base]
    made = []
    for path in index.paths or ("**",):
        inside, above = path, base
        if path.startswith("../"):
            inside, above = path[3:], base.rpartition("/")[0]
        made.append(str(PathPattern.parse(f"{above}/{inside}")))
    return made


def _rule(name: str, draft: _Draft) -> dict[str, Any]:
    rule: dict[str, Any] = {"id": name, "to": {"hosts": [draft.host]}}
    if draft.port != (80 if draft.clear else 443):
        rule["ports"] = [draft.port]
    if draft.clear:
        rule["tls"] = {"mode": "none"}
    if draft.private:
        rule["resolve"] = {"private": "allow"}
    if draft.git:
        rule["protocol"] = "git"
        rule["git"] = {"operations": ["fetch"], "repositories": draft.paths}
    else:
        rule["http"] = {"allow": [{"methods": ["GET", "HEAD"], "paths": draft.paths}]}
        if draft.encoded_slash:
            rule["http"]["encoded_slash"] = True
    rule["reason"] = "Packages are read here; publishing is not permitted"
    return rule
