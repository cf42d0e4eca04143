"""E2B's network settings of a sandbox: what may be asked for, checked and in one writing. `network_policy` says what it is as a policy. Pure."""

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

import msgspec

from hatchway.domain.policy.addresses import Network
from hatchway.domain.policy.names import NameRefused, canonical_host
from hatchway.e2b.errors import E2bError

ALL_TRAFFIC = "0.0.0.0/0"
MAX_ENTRIES = 1000
"""In each of `allowOut`, `denyOut` and `rules`."""
MAX_HEADERS = 20
MAX_PORTS = 64
MAX_DNS_SERVERS = 10

EVERYWHERE: tuple[Network, ...] = (IPv4Network(ALL_TRAFFIC), IPv6Network("::/0"))
"""All addresses, of either version."""
_EGRESS = ("allowOut", "denyOut", "rules", "dnsServers", "egressProxy")
"""Settings about the way out: an update replaces them all."""
_MASK = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(:[0-9]{1,5})?", re.ASCII)
_IDENTITY = "${e2b."


class NetworkRefused(E2bError):
    """The settings are wrong, or ask for what there is not here."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """E2B's settings, checked, in one writing."""

    allow: tuple[Network, ...] = ()
    domains: tuple[str, ...] = ()
    """Names in lower case; `*.x` is any name below x, `*` any name."""
    deny: tuple[Network, ...] = ()
    headers: Mapping[str, Mapping[str, str]] = {}
    """By domain: what its requests get, whatever they had."""
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: frozenset[int] = frozenset()
    """Ports of the sandbox that speak TLS themselves."""


def read(network: Mapping[str, Any] | None, *, internet: bool | None = None, secure: bool = True) -> Settings:
    """Reads `network` of a creation; `internet` is `allow_internet_access`. Raises `NetworkRefused`."""
    given = _object(network, "network")
    known = {"allowPublicTraffic", "maskRequestHost", "httpsPorts", *_EGRESS}
    _only(given, known, "network")
    public = _flag(given.get("allowPublicTraffic"), "network.allowPublicTraffic", default=True)
    if not public and not secure:
        raise NetworkRefused(
            "network.allowPublicTraffic=false needs a secured sandbox: leave `secure` out, or set it to true."
        )
    return msgspec.structs.replace(
        _egress(given, internet, "network."),
        allow_public_traffic=public,
        mask_request_host=_mask(given.get("maskRequestHost")),
        https_ports=frozenset(_ports(given.get("httpsPorts"))),
    )


def way_in(network: Mapping[str, Any] | None) -> Settings:
    """Of settings that were read before, and kept: those about the way in to a sandbox alone."""
    given = network or {}
    return Settings(
        allow_public_traffic=given.get("allowPublicTraffic") is not False,
        mask_request_host=_mask(given.get("maskRequestHost")),
        https_ports=frozenset(_ports(given.get("httpsPorts"))),
    )


def updated(network: Mapping[str, Any] | None, body: Mapping[str, Any] | None) -> tuple[dict[str, Any], bool | None]:
    """`network` and `allow_internet_access` after an update, which takes the place of all that is about the way out: what it leaves out is cleared.

    Both are for `read`. Raises `NetworkRefused`.
    """
    given = _object(body, "the request")
    _only(given, {"allow_internet_access", *_EGRESS}, "the request")
    internet = given.get("allow_internet_access")
    kept = {name: value for name, value in (network or {}).items() if name not in _EGRESS}
    changed = {name: value for name, value in given.items() if name in _EGRESS}
    return {**kept, **changed}, None if internet is None else _flag(internet, "allow_internet_access")


def denies_all(settings: Settings) -> bool:
    """Whether the internet as such is denied: what E2B shows as `allowInternetAccess: false`."""
    return EVERYWHERE[0] in settings.deny


def _egress(given: Mapping[str, Any], internet: bool | None, at: str) -> Settings:
    allow: list[Network] = []
    domains: list[str] = []
    for text in _texts(given.get("allowOut"), f"{at}allowOut"):
        network = _network(text)
        if network is not None:
            allow.append(network)
        else:
            domains.append(_domain(text, f"{at}allowOut"))
    deny: list[Network] = []
    for text in _texts(given.get("denyOut"), f"{at}denyOut"):
        network = _network(text)
        if network is None:
            raise NetworkRefused(
                f"{at}denyOut has {_shown(text)}, which is neither an address nor a CIDR block: domains can only be allowed."
            )
        deny.append(network)
    if internet is False:
        deny.append(EVERYWHERE[0])
    if domains and EVERYWHERE[0] not in deny:
        raise NetworkRefused(
            f"{at}allowOut names domains, which means something only where all else is denied: add {ALL_TRAFFIC} to denyOut."
        )
    _no_proxy(given.get("egressProxy"), at)
    _name_servers(given.get("dnsServers"), at, bool(domains))
    return Settings(
        allow=tuple(allow),
        domains=tuple(dict.fromkeys(domains)),
        deny=tuple(deny),
        headers=_headers(given.get("rules"), f"{at}rules"),
    )


def _network(text: str) -> Network | None:
    """An address or network; None for what is a name. Bits behind the prefix are dropped, as Go does it."""
    try:
        return ip_network(text.strip(), strict=False)
    except ValueError:
        return None


def _domain(text: str, at: str) -> str:
    text = text.strip()
    if text == "*":
        return text
    stars = "*." if text.startswith("*.") else ""
    try:
        return stars + canonical_host(text.removeprefix(stars))
    except NameRefused as error:
        raise NetworkRefused(
            f"{at} has {_shown(text)}, which is no address, CIDR block or domain: {error.cause}. {error.remedy}"
        ) from None


def _headers(given: object, at: str) -> dict[str, dict[str, str]]:
    rules = _object(given, at)
    if len(rules) > MAX_ENTRIES:
        raise NetworkRefused(f"{at} has more than {MAX_ENTRIES} hosts.")
    made: dict[str, dict[str, str]] = {}
    for host, entries in rules.items():
        if _network(host) is not None or host.strip() == "*":
            raise NetworkRefused(f"{at} has {_shown(host)}: headers are for the requests to domains.")
        domain = _domain(host, at)
        headers: dict[str, str] = {}
        for entry in _list(entries, f"{at}[{_shown(host)}]"):
            _only(_object(entry, at), {"transform"}, at)
            transform = _object(_object(entry, at).get("transform"), f"{at}.transform")
            _only(transform, {"headers"}, f"{at}.transform")
            for name, value in _object(transform.get("headers"), f"{at}.transform.headers").items():
                if not isinstance(value, str):
                    raise NetworkRefused(f"{at} sets {_shown(name)} to what is no text.")
                if _IDENTITY in value:
                    raise NetworkRefused(
                        f"{at} sets {_shown(name)} to a token of a workload identity, which there is not here. "
                        "Register the secret (`hatchway credentials put`) and bind it in a policy of the project."
                    )
                headers[name.lower()] = value
        if len(headers) > MAX_HEADERS:
            raise NetworkRefused(f"{at} sets more than {MAX_HEADERS} headers for {domain}.")
        made[domain] = headers
    return made


def _no_proxy(given: object, at: str) -> None:
    if given is not None:
        raise NetworkRefused(
            f"{at}egressProxy is not supported: upstream proxies are the operator's (`[egress]` in hatchway.toml), and a policy routes through them."
        )


def _name_servers(given: object, at: str, domains: bool) -> None:
    servers = _texts(given, f"{at}dnsServers")
    if len(servers) > MAX_DNS_SERVERS:
        raise NetworkRefused(f"{at}dnsServers has more than {MAX_DNS_SERVERS} entries.")
    for text in servers:
        network = _network(text)
        if not isinstance(network, IPv4Network) or network.prefixlen != 32:
            raise NetworkRefused(f"{at}dnsServers has {_shown(text)}, which is no IPv4 address.")
    if servers and domains:
        raise NetworkRefused(
            f"{at}dnsServers is not supported: questions for names are answered here, whatever server they are sent to. Leave it out: allowed domains are resolved."
        )


def _mask(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not _MASK.fullmatch(given.replace("${PORT}", "8000")):
        raise NetworkRefused(
            "network.maskRequestHost is no host: write a name, with `${PORT}` where the port's number goes."
        )
    return given


def _ports(given: object) -> list[int]:
    ports = _list(given, "network.httpsPorts")
    if len(ports) > MAX_PORTS:
        raise NetworkRefused(f"network.httpsPorts has more than {MAX_PORTS} entries.")
    for port in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65_535:
            raise NetworkRefused("network.httpsPorts has an entry that is no port.")
    return ports


def _flag(given: object, at: str, *, default: bool | None = None) -> bool:
    if given is None and default is not None:
        return default
    if not isinstance(given, bool):
        raise NetworkRefused(f"{at} is neither true nor false.")
    return given


def _texts(given: object, at: str) -> list[str]:
    texts = _list(given, at)
    if len(texts) > MAX_ENTRIES:
        raise NetworkRefused(f"{at} has more than {MAX_ENTRIES} entries.")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise NetworkRefused(f"{at} has an entry that is no text.")
    return texts


def _list(given: object, at: str) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise NetworkRefused(f"{at} is no list.")
    return given


def _object(given: object, at: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise NetworkRefused(f"{at} is no object.")
    return given


def _only(given: Mapping[str, Any], known: Iterable[str], at: str) -> None:
    for name in given:
        if name not in set(known):
            raise NetworkRefused(f"{at} has {_shown(name)}, which is not known here.")


def _shown(text: object) -> str:
    return ascii(text if len(str(text)) <= 80 else str(text)[:77] + "...")
