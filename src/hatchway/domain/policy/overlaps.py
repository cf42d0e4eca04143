"""Finds rules of one document whose connections would have to be treated in two ways, in little time also where there are many."""

from collections.abc import Iterator

from hatchway.domain.policy.checks import hosts_of, protocol_of, tls_of
from hatchway.domain.policy.names import HostPattern
from hatchway.domain.policy.ports import PortSet, ports_of
from hatchway.domain.policy.schema import Document, Rule
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Action, TlsMode


def overlaps(document: Document) -> Iterator[tuple[int, int, HostPattern]]:
    """Numbers of two rules, the later first, and a host pattern of the later that the earlier is about too, on a port of both."""
    groups: dict[tuple[str, PortSet], _Patterns] = {}
    meeting: dict[tuple[PortSet, PortSet], bool] = {}
    for number, rule in enumerate(document.rules):
        if rule.action is Action.DENY:
            continue
        own = (treatment(rule), ports_of(rule))
        patterns = [HostPattern.parse(text) for text in hosts_of(document, rule)]
        for (way, ports), others in groups.items():
            if way == own[0]:
                continue
            pair = (own[1], ports)
            if pair not in meeting:
                meeting[pair] = own[1].overlaps(ports)
            found = others.first(patterns) if meeting[pair] else None
            if found is not None:
                yield number, *found
                break
        mine = groups.setdefault(own, _Patterns())
        for pattern in patterns:
            mine.add(pattern, number)


def treatment(rule: Rule) -> str:
    """What has to be one for all flows to a name and port: who ends TLS, and whether requests are looked at."""
    protocol, mode = protocol_of(rule), tls_of(rule)
    if protocol in HTTP_FAMILY:
        return "intercept" if mode is TlsMode.INTERCEPT else "http in clear"
    return {TlsMode.PASSTHROUGH: "passthrough", TlsMode.INTERCEPT: "intercepted relay"}.get(mode, "tcp")


class _Patterns:
    """Patterns of rules that treat connections alike, found by the domains that they are at and below of."""

    def __init__(self) -> None:
        self._at: dict[str, dict[HostPattern, int]] = {}
        self._below: dict[str, dict[HostPattern, int]] = {}

    def add(self, pattern: HostPattern, number: int) -> None:
        self._at.setdefault(pattern.base, {}).setdefault(pattern, number)
        for domain in _above(pattern.base):
            self._below.setdefault(domain, {}).setdefault(pattern, number)

    def first(self, patterns: list[HostPattern]) -> tuple[int, HostPattern] | None:
        """The number of a rule that one of the patterns overlaps, and that pattern."""
        for pattern in patterns:
            candidates = [self._at.get(domain, {}) for domain in (pattern.base, *_above(pattern.base))]
            if pattern.stars:
                candidates.append(self._below.get(pattern.base, {}))
            for others in candidates:
                for other, number in others.items():
                    if pattern.overlaps(other):
                        return number, pattern
        return None


def _above(name: str) -> Iterator[str]:
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)
