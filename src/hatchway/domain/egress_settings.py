"""What an installation says of the way out of its sandboxes: the table `[egress]` of hatchway.toml. What may leave is said by policies."""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_SHARDS = 16
USUAL_SHARDS = 4

_ADDRESS = r"[0-9a-fA-F.:]{2,45}"
Network = Annotated[str, Meta(pattern=rf"^{_ADDRESS}(/[0-9]{{1,3}})?$")]
ProxyName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]


class NameServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that gateways ask for the addresses of names; with `name` over TLS, whose certificate is for that name."""

    address: Annotated[str, Meta(pattern=rf"^{_ADDRESS}$")]
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Left out: 53, or 853 over TLS."""
    name: Annotated[str, Meta(max_length=253)] = ""


class HostService(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An address of this host, of loopback or link-local that policies may allow, on one port; no policy reaches such a one without this."""

    network: Network
    port: Annotated[int, Meta(ge=1, le=65535)]


class Proxy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proxy that rules may route through, by its name in the table."""

    url: Annotated[str, Meta(pattern=r"^(http|socks5)://[^/?#\s]+$", max_length=512)]
    by_address: bool = False
    """Names are resolved here, and the proxy is asked for an address."""


class EgressSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)] | None = None
    """How many gateway processes there are; left out: one for each core, at most `USUAL_SHARDS`."""
    name_servers: Annotated[tuple[NameServer, ...], Meta(max_length=8)] = ()
    """Left out: those of this host."""
    trusted_ca_files: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=16)] = ()
    """Authorities that upstreams may have beside the system's: PEM files, from the settings file's folder on."""
    host_services: Annotated[tuple[HostService, ...], Meta(max_length=64)] = ()
    proxies: Annotated[dict[ProxyName, Proxy], Meta(max_length=32)] = msgspec.field(default_factory=dict)


DEFAULT = EgressSettings()
