"""Finds the rules about a host, an address or a request, without looking at the others.

A host is looked up once as it is and once for each of its parents; paths are looked up segment by segment; a network once for each
prefix length that some rule uses. So a decision costs what the rules about this destination cost, however many there are besides.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hatchway.domain.policy.addresses import Address, classify
from hatchway.domain.policy.paths import PathIndex
from hatchway.domain.policy.rules import Asked, CompiledRule, Entry
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Action


class _Bucket:
    """The rules of one host pattern."""

    __slots__ = ("_known", "gates", "paths")

    def __init__(self) -> None:
        self.gates: list[CompiledRule] = []
        """For connections: of rules that say the same about connections, the first in order."""
        self.paths: PathIndex[Entry] = PathIndex()
        self._known: set[Any] = set()

    def add(self, rule: CompiledRule) -> None:
        key = _as_gate(rule)
        if key not in self._known:
            self._known.add(key)
            self.gates.append(rule)
        for entry in rule.entries:
            for path in entry.paths:
                self.paths.add(path, entry)


def _as_gate(rule: CompiledRule) -> object:
    """What a rule is for a connection; equal for rules of which a connection needs to see only one."""
    if rule.action is not Action.DENY and rule.protocol not in HTTP_FAMILY:
        return id(rule)
    return (
        rule.action,
        rule.conditional,
        rule.tls,
        rule.ports,
        rule.expires,
        rule.observe_until,
        rule.rehome,
        rule.versions,
        rule.special_ports,
        rule.terms.rate.connections_per_min,
        rule.terms.rate.concurrent,
    )


class Matcher:
    """An index over rules. It keeps them in an order of their own: how documents order them makes no difference."""

    __slots__ = ("_by_name", "_exact", "_kinds", "_networks", "_wild", "rules")

    def __init__(self, rules: Sequence[CompiledRule]) -> None:
        self.rules = tuple(sorted(rules, key=lambda rule: (rule.order, rule.action)))
        self._exact: dict[str, _Bucket] = {}
        self._wild: tuple[dict[str, _Bucket], dict[str, _Bucket]] = ({}, {})
        self._networks: dict[tuple[int, int], dict[int, list[CompiledRule]]] = {}
        self._kinds: list[CompiledRule] = []
        self._by_name = tuple(rule for rule in self.rules if rule.by_name)
        for rule in self.rules:
            for pattern in dict.fromkeys(rule.hosts):
                where = self._wild[pattern.stars - 1] if pattern.stars else self._exact
                where.setdefault(pattern.base, _Bucket()).add(rule)
            for network in rule.networks:
                by_prefix = self._networks.setdefault((network.version, network.prefixlen), {})
                by_prefix.setdefault(int(network.network_address), []).append(rule)
            if rule.kinds:
                self._kinds.append(rule)

    def gates(self, host: str) -> Iterator[CompiledRule]:
        """What is to be known about connections to a host, most closely named first; not yet looked at port and expiry."""
        for bucket in self._buckets(host):
            yield from bucket.gates

    def by_name(self, port: int | None, now: float) -> list[CompiledRule]:
        """The rules about names that no rule is about, at a port (None: at any)."""
        return [rule for rule in self._by_name if rule.active(now) and (port is None or port in rule.ports)]

    def entries(self, asked: Asked) -> Iterator[tuple[int, Entry]]:
        """The entries whose host and path fit, each with how far off its host pattern is (0 the closest)."""
        for distance, bucket in enumerate(self._buckets(asked.request.host)):
            for entry in bucket.paths.find(asked.segments):
                yield distance, entry
            if asked.slash:
                for entry in bucket.paths.find(asked.further):
                    if entry.rule.action is Action.DENY:
                        yield distance, entry

    def at_address(self, address: Address) -> Iterator[CompiledRule]:
        """The rules about an address as such."""
        value, width = int(address), address.max_prefixlen
        for (version, length), networks in self._networks.items():
            if version == address.version:
                yield from networks.get(value >> (width - length) << (width - length), ())
        if self._kinds:
            kind = classify(address)
            yield from (rule for rule in self._kinds if kind in rule.kinds)

    def _buckets(self, host: str) -> Iterator[_Bucket]:
        bucket = self._exact.get(host)
        if bucket is not None:
            yield bucket
        single, several = self._wild
        at = host.find(".")
        if at >= 0 and single and (bucket := single.get(host[at + 1 :])) is not None:
            yield bucket
        while at >= 0 and several:
            if (bucket := several.get(host[at + 1 :])) is not None:
                yield bucket
            at = host.find(".", at + 1)
