"""What a sandbox's policy says of credentials: which it may use, where the guest finds their placeholders, what the broker is told."""

import msgspec

from hatchway.domain.policy.assembly import TieredDocument, assemble
from hatchway.domain.policy.schema import Credential
from hatchway.domain.policy.terms import BoundCredential
from hatchway.wire.broker import Binding, Injection
from hatchway.wire.egress import EgressSpec

MAX_PORTS = 4_096
"""Ports of one credential; what a wide range has beyond it gets no secret."""

_MENTIONED = '"credentials"'


class Bound(msgspec.Struct, frozen=True):
    """A credential that a sandbox may use, before it has a placeholder."""

    credential_id: str
    prefix: str
    """What its placeholder begins with."""
    variable: str | None
    """The environment variable in which the guest finds it."""
    binding: Binding
    """What the broker is told; its placeholder is empty."""


def of(egress: EgressSpec) -> tuple[Bound, ...]:
    """The credentials that a policy binds. Takes time where there are many rules. Raises `PolicyError`."""
    if not any(_MENTIONED in document.text for document in egress.documents):
        return ()
    documents = [TieredDocument.stored(one.tier, one.name, one.version, one.text) for one in egress.documents]
    found = assemble(documents).credentials.values()
    return tuple(_bound(one) for one in found if egress.credentials is None or one.credential.id in egress.credentials)


def wanted(bound: tuple[Bound, ...]) -> list[tuple[str, str]]:
    """Which placeholders have to be made: id and prefix of each."""
    return [(one.credential_id, one.prefix) for one in bound]


def environment(bound: tuple[Bound, ...], placeholders: dict[str, str]) -> dict[str, str]:
    """The variables that the guest gets."""
    return {
        one.variable: placeholders[one.credential_id]
        for one in bound
        if one.variable is not None and one.credential_id in placeholders
    }


def granted(bound: tuple[Bound, ...], placeholders: dict[str, str]) -> tuple[Binding, ...]:
    """What the broker is told."""
    return tuple(
        msgspec.structs.replace(one.binding, placeholder=placeholders[one.credential_id])
        for one in bound
        if one.credential_id in placeholders
    )


def _bound(one: BoundCredential) -> Bound:
    credential = one.credential
    return Bound(
        credential_id=one.credential_id,
        prefix="hwp_" if credential.placeholder == "auto" else credential.placeholder,
        variable=None if credential.expose is None else credential.expose.env,
        binding=Binding(
            credential_id=one.credential_id,
            source=credential.source.removeprefix("store:"),
            placeholder="",
            inject=_injections(credential),
            rules=one.rules,
            hosts=one.hosts,
            ports=_ports(one.ports),
            methods=one.methods,
            paths=one.paths,
            scrub=credential.response.scrub,
            lease_s=credential.lease.ttl,
        ),
    )


def _injections(credential: Credential) -> tuple[Injection, ...]:
    return tuple(Injection(where=one.where, name=one.name, format=one.format) for one in credential.inject)


def _ports(ports: tuple[int | str, ...]) -> tuple[int, ...]:
    found: set[int] = set()
    for port in ports:
        if isinstance(port, int):
            found.add(port)
            continue
        first, _, last = port.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found)[:MAX_PORTS])
