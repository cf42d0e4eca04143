"""Examples of all that rules speak about: for each rule flows and requests that it is about. What compares and judges policies tries them."""

from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Any

import msgspec

from hatchway.domain.policy.names import HostPattern
from hatchway.domain.policy.paths import DEEP, PathPattern, canonical_path
from hatchway.domain.policy.ports import PortSet
from hatchway.domain.policy.rules import CompiledRule, Entry
from hatchway.domain.policy.verdicts import Flow, Request
from hatchway.domain.policy.vocabulary import Protocol, TlsMode

UNNAMED = "no-rule-is-about-it.invalid"
"""Stands for all the names that no rule is about."""
USUAL_METHODS = ("GET", "POST", "PUT", "DELETE")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One example, and what it stands for in words of the rules."""

    host: str
    """The pattern, or the network."""
    port: int
    method: str = ""
    path: str = ""
    """The pattern."""
    flow: Flow
    request: Request | None = None


def probes(rules: Sequence[CompiledRule]) -> Iterator[Probe]:
    """Examples of what the rules are about, each once."""
    seen: set[Any] = set()
    ports = {port for rule in rules for port in _ports(rule.ports)}
    for rule in rules:
        here = _ports(rule.ports) or tuple(sorted(ports)) or (443,)
        for probe in (*_addresses(rule, here), *_names(rule, here)):
            key = (probe.host, probe.port, probe.method, probe.path, probe.request)
            if key not in seen:
                seen.add(key)
                yield probe


def _ports(ports: PortSet) -> tuple[int, ...]:
    return () if ports.all else tuple(port for port in ports.examples)


def _addresses(rule: CompiledRule, ports: tuple[int, ...]) -> Iterator[Probe]:
    for network in rule.networks:
        inside = ip_address(int(network.network_address) + (1 if network.num_addresses > 2 else 0))
        for port in ports:
            yield Probe(host=str(network), port=port, flow=Flow(address=str(inside), port=port))
            if rule.by_name:
                yield Probe(host=f"any name in {network}", port=port, flow=Flow(host=UNNAMED, port=port))


def _names(rule: CompiledRule, ports: tuple[int, ...]) -> Iterator[Probe]:
    for pattern in rule.hosts:
        for host in examples_of(pattern):
            for port in ports:
                flow = Flow(host=host, port=port)
                if not rule.entries:
                    yield Probe(host=str(pattern), port=port, flow=flow)
                for entry in rule.entries:
                    yield from _requests(rule, entry, pattern, flow)


def _requests(rule: CompiledRule, entry: Entry, pattern: HostPattern, flow: Flow) -> Iterator[Probe]:
    for path in entry.paths:
        for method in sorted(entry.methods) if entry.methods is not None else USUAL_METHODS:
            for tls in (True, False) if rule.tls is None else (rule.tls is TlsMode.INTERCEPT,):
                request = Request(
                    host=flow.host or "",
                    port=flow.port,
                    tls=tls,
                    method=method,
                    path=example_of(path),
                    query=entry.exact_query or entry.example_query,
                    headers=entry.example_headers,
                    websocket=rule.protocol is Protocol.WEBSOCKET,
                    version=rule.versions[0],
                )
                yield Probe(
                    host=str(pattern), port=flow.port, method=method, path=str(path), flow=flow, request=request
                )


def examples_of(pattern: HostPattern) -> tuple[str, ...]:
    """Names that a pattern matches: one for each way."""
    if not pattern.stars:
        return (pattern.base,)
    return (f"any.{pattern.base}", f"any.any.{pattern.base}")[: pattern.stars]


def example_of(path: PathPattern) -> str:
    """A path that a pattern matches."""
    parts = str(path)[1:].split("/")
    made = [
        "any/any" if segment is DEEP else part.replace("*", "any")
        for part, segment in zip(parts, path.segments, strict=True)
    ]
    return canonical_path("/" + "/".join(made))
