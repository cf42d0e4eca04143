"""Whether a leg, and each request on it, is what the grant is for. Pure; asked by the broker whatever a gateway has decided."""

import re
from collections.abc import Sequence

import msgspec

from hatchway.broker import injecting
from hatchway.broker.http1 import RequestHead
from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.domain.policy.addresses import Network, parse_network
from hatchway.domain.policy.names import HostPattern, NameRefused, is_canonical
from hatchway.domain.policy.paths import PathPattern, PathRefused, canonical_path
from hatchway.wire.broker import Binding, Leg

MAX_PLACES = 8
MIN_PLACEHOLDER = 16
_TLS_VERSIONS = ("1.2", "1.3")
_SPKI = re.compile(r"[A-Za-z0-9+/]{43}=")


class NotBound(Exception):
    """The grant is for something else. The text is for people, and names no value."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A binding, read."""

    binding: Binding
    hosts: tuple[HostPattern, ...]
    paths: tuple[PathPattern, ...]
    allow: tuple[tuple[frozenset[str], tuple[PathPattern, ...]], ...]
    """Methods and paths that go together; none of either: all."""
    private: tuple[Network, ...]

    @property
    def reached(self) -> tuple[object, ...]:
        """How its upstream is reached: a connection of another kind is not one of this binding."""
        return self.binding.upstream_ca, self.binding.upstream_spki, self.binding.tls_min, self.private


def read(binding: Binding) -> Bound:
    """Reads a binding. Raises `Unprocessable` with `credential_binding` or `credential_injection`."""
    try:
        hosts = tuple(HostPattern.parse(host) for host in binding.hosts)
        paths = tuple(PathPattern.parse(path) for path in binding.paths)
        allow = tuple(
            (frozenset(one.methods), tuple(PathPattern.parse(path) for path in one.paths)) for one in binding.allow
        )
        private = tuple(parse_network(network) for network in binding.private)
    except (NameRefused, PathRefused, ValueError) as error:
        raise _invalid(f"of its hosts, paths or networks one is none: {error}") from None
    if not 1 <= len(binding.inject) <= MAX_PLACES:
        raise _invalid(f"it has not from 1 to {MAX_PLACES} places")
    for one in binding.inject:
        injecting.check(one)
    if binding.tls_min not in _TLS_VERSIONS:
        raise _invalid(f"the lowest version of TLS is none of {', '.join(_TLS_VERSIONS)}")
    if len(binding.placeholder) < MIN_PLACEHOLDER or not binding.placeholder.isascii():
        raise _invalid("its placeholder is too short")
    if not all(_SPKI.fullmatch(key) for key in binding.upstream_spki):
        raise _invalid("of the upstream's public keys one is no SHA-256 in Base64")
    return Bound(binding=binding, hosts=hosts, paths=paths, allow=allow, private=private)


def leg_fits(bound: Bound, leg: Leg) -> bool:
    """Whether a leg is for this binding: credential, rule, host and port."""
    binding = bound.binding
    return (
        binding.credential_id == leg.credential_id
        and leg.rule in binding.rules
        and leg.port in binding.ports
        and is_canonical(leg.host)
        and any(pattern.matches(leg.host) for pattern in bound.hosts)
    )


def find(bounds: Sequence[Bound], leg: Leg) -> Bound:
    """The binding that a leg is for. Raises `NotBound`."""
    for bound in bounds:
        if leg_fits(bound, leg):
            return bound
    raise NotBound("no credential of this sandbox is for this rule, host and port")


def request(bound: Bound, leg: Leg, head: RequestHead) -> None:
    """Raises `NotBound` for a request that the credential is not for."""
    binding = bound.binding
    host = (head.get(b"host") or b"").decode("latin-1")
    if host not in (leg.host, f"{leg.host}:{leg.port}"):
        raise NotBound("its Host is not the host that the leg is for")
    method = head.method.decode("ascii")
    if binding.methods and method not in binding.methods:
        raise NotBound(f"the credential is not for {method}")
    raw, _, query = head.target.decode("ascii").partition("?")
    if raw == "*":
        if binding.paths or bound.allow:
            raise NotBound("the credential is for some paths only")
    else:
        _path(bound, method, raw)
    if head.websocket and not binding.websocket:
        raise NotBound("the rule lets no request become a WebSocket")
    if not head.websocket and head.get(b"upgrade") is not None:
        raise NotBound("it asks to become something else")
    if binding.placeholder in raw or binding.placeholder in query:
        raise NotBound("the placeholder is in its path or query")


def _path(bound: Bound, method: str, raw: str) -> None:
    try:
        path = canonical_path(raw)
    except PathRefused as error:
        raise NotBound(f"its path is refused: {error.cause}") from None
    if path != raw:
        raise NotBound("its path is not in canonical form")
    if "%2F" in path and not bound.binding.encoded_slash:
        raise NotBound("its path has an encoded slash")
    if bound.paths and not any(pattern.matches(path) for pattern in bound.paths):
        raise NotBound("the credential is not for this path")
    if bound.allow and not any(
        (not methods or method in methods) and (not paths or any(pattern.matches(path) for pattern in paths))
        for methods, paths in bound.allow
    ):
        raise NotBound("its rules let no such request pass")


def _invalid(cause: str) -> HatchwayError:
    return Unprocessable(
        "credential_binding", f"A credential's binding cannot be used: {cause}.", "See docs/credentials.md."
    )
