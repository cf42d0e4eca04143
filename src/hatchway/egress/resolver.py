"""The gateway's own questions to name servers: configured servers, absolute names, nothing of the host's files or search lists.

Asked when a connection was allowed, for the name of the rule, never for what the guest says. The answers are classified by whoever dials.
"""

import asyncio
import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from hatchway.domain.policy.addresses import Address
from hatchway.egress.http.seam import FlowError

RESOLVE_WITHIN_S = 8.0
TRY_WITHIN_S = 2.5
MAX_CACHED = 256
MAX_TTL_S = 60.0
MAX_ADDRESSES = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NameServer:
    """A server that is asked: over UDP and TCP, or over TLS where `name` (of its certificate) is given."""

    address: str
    port: int = 53
    name: str = ""


@dataclass(frozen=True)
class Resolved:
    """The addresses of a name, and over which other names they were found."""

    addresses: tuple[Address, ...]
    chain: tuple[str, ...] = ()


class Resolver:
    """Asks a set of servers, and remembers what they said for a minute at most. One for each sandbox: no sandbox learns from timing what others ask."""

    def __init__(self, servers: Sequence[NameServer], clock: Callable[[], float]) -> None:
        self._servers = tuple(servers)
        self._clock = clock
        self._cache: OrderedDict[str, tuple[float, Resolved]] = OrderedDict()

    async def resolve(self, name: str) -> Resolved:
        """Returns the IPv4 addresses of a canonical name, or its IPv6 addresses where it has no others.

        Raises `FlowError("resolve_failed")`, also when there is no such name or no server answers within 8 s.
        """
        found = self._cache.get(name)
        if found is not None and self._clock() < found[0]:
            return found[1]
        if not self._servers:
            raise FlowError("resolve_failed", "no name server is configured for the gateway")
        try:
            async with asyncio.timeout(RESOLVE_WITHIN_S):
                ttl, resolved = await self._ask(name)
        except dns.resolver.NXDOMAIN:
            raise FlowError("resolve_failed", f"there is no name {name}") from None
        except (dns.exception.DNSException, OSError, TimeoutError) as error:
            log.info("%s could not be resolved: %s", name, type(error).__name__)
            raise FlowError(
                "resolve_failed", f"the name servers of the gateway gave no answer for {name}", 504
            ) from error
        if not resolved.addresses:
            raise FlowError("resolve_failed", f"the name {name} has no address")
        self._cache[name] = (self._clock() + min(ttl, MAX_TTL_S), resolved)
        self._cache.move_to_end(name)
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return resolved

    async def _ask(self, name: str) -> tuple[float, Resolved]:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = [_server(server) for server in self._servers]
        resolver.lifetime = RESOLVE_WITHIN_S
        resolver.timeout = TRY_WITHIN_S
        absolute = dns.name.from_text(name + ".")
        ttl, addresses, chain = 0.0, (), ()  # type: float, tuple[Address, ...], tuple[str, ...]
        for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
            answer = await resolver.resolve(absolute, kind, search=False, raise_on_no_answer=False)
            ttl = float(answer.chaining_result.minimum_ttl)
            chain = tuple(str(target.target).rstrip(".") for rrset in answer.chaining_result.cnames for target in rrset)
            if answer.rrset is not None:
                addresses = tuple(ipaddress.ip_address(record.address) for record in answer.rrset)[:MAX_ADDRESSES]
                break
        return ttl, Resolved(addresses, chain)


def _server(server: NameServer) -> dns.nameserver.Nameserver:
    if server.name:
        return dns.nameserver.DoTNameserver(server.address, server.port, hostname=server.name)
    return dns.nameserver.Do53Nameserver(server.address, server.port)
