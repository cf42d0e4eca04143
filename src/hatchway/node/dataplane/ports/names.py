"""The host names of ports: `PORT-SANDBOX.DOMAIN`, a name of its own for each, so that no two share a browser's origin."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from hatchway.domain.errors import Misdirected

DEFAULT_DOMAINS = ("localhost",)
"""Browsers and most resolvers take every name under it for this machine."""

_AUTHORITY = re.compile(r"([A-Za-z0-9.-]{1,253})(?::[0-9]{1,5})?", re.ASCII)
_LABEL = re.compile(r"([1-9][0-9]{0,4})-([a-z0-9]{20})", re.ASCII)
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one sandbox."""

    sandbox_id: str
    number: int


class PortNames:
    """The names under some domains, all of which belong to ports."""

    def __init__(self, domains: tuple[str, ...] = DEFAULT_DOMAINS) -> None:
        """Raises `ValueError` for what is no domain in lower-case letters, digits and hyphens."""
        for domain in domains:
            if len(domain) > 200 or not _DOMAIN.fullmatch(domain):
                raise ValueError(f"{domain!r} is no domain for the names of ports")
        self.domains = domains
        self._endings = tuple(f".{domain}" for domain in domains)

    def covers(self, host: str) -> bool:
        """Whether a `Host` lies under one of the domains, however it is written: such a request is never one of the API."""
        return host.strip().partition(":")[0].lower().removesuffix(".").endswith(self._endings)

    def parse(self, host: str) -> Port:
        """Reads a `Host`. Raises `Misdirected("unknown_host")` for what names no port."""
        authority = _AUTHORITY.fullmatch(host)
        name = "" if authority is None else authority[1].lower()
        for ending in self._endings:
            label = _LABEL.fullmatch(name.removesuffix(ending)) if name.endswith(ending) else None
            if label is not None and int(label[1]) < 2**16:
                return Port(sandbox_id=label[2], number=int(label[1]))
        raise Misdirected(
            "unknown_host",
            f"{host[:100]!r} is not the name of a port.",
            f"Ports have names like 8000-SANDBOX.{self.domains[0] if self.domains else 'DOMAIN'}; the API has the node's own address.",
        )

    def url(self, attach_url: str) -> str:
        """Where ports are, with `{port}` and `{sandbox}` to be filled in; "" when no domain is configured."""
        if not self.domains:
            return ""
        base = urlsplit(attach_url)
        number = "" if base.port is None else f":{base.port}"
        return f"{base.scheme}://{{port}}-{{sandbox}}.{self.domains[0]}{number}/"
