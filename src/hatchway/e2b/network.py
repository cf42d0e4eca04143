"""E2B's network settings of a sandbox, as a policy document of the sandbox. Pure; docs/e2b.md and decision 66 say what is mapped to what.

There, what is allowed beats what is denied, and what nobody speaks about passes. Here denials win and nothing passes by itself. So nothing that
is denied there becomes a denial here: what remains of the internet is computed, and that is allowed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network, summarize_address_range
from typing import Any

import msgspec

from hatchway.domain.policy.addresses import Network
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import compile_policy
from hatchway.domain.policy.names import NameRefused, canonical_host
from hatchway.domain.policy.probes import UNNAMED
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import load, stored
from hatchway.domain.policy.verdicts import Action, Flow
from hatchway.e2b.errors import E2bError

ALL_TRAFFIC = "0.0.0.0/0"
MAX_ENTRIES = 1000
"""In each of `allowOut`, `denyOut` and `rules`."""
MAX_HEADERS = 20
MAX_PORTS = 64
MAX_DNS_SERVERS = 10
PASSTHROUGH_FOR = timedelta(days=365)
"""How long TLS passes through that is not looked into; a policy says an end to it."""

_EVERYWHERE: tuple[Network, ...] = (IPv4Network(ALL_TRAFFIC), IPv6Network("::/0"))
_PORTS = ("1-24", "26-52", "54-852", "854-65535")
"""All but 25, 53 and 853, which no document of a sandbox can open."""
_IN_RULE = 256
"""Networks that one rule can have."""
_BLOCKED: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
        *("192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
        *("::/8", "2001:db8::/32", "3fff::/20", "fc00::/7", "fe80::/9", "ff00::/8"),
    )
)
"""What is blocked whatever is allowed. The floor of every policy says so too, and more: it is left out so that a document says what it gives."""
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


def document(settings: Settings, now: datetime) -> dict[str, Any]:
    """The policy document of the tier `sandbox` that gives just this. Raises `NetworkRefused` for more than a document can hold."""
    reached = remaining(settings)
    rules: list[dict[str, Any]] = []
    rules += _domains(settings, now)
    rules += _changed(settings, reached)
    for version in (4, 6):
        cidrs = [str(network) for network in reached if network.version == version]
        for number, at in enumerate(range(0, len(cidrs), _IN_RULE)):
            to = {"cidrs": cidrs[at : at + _IN_RULE], "by_name": True}
            rules.append({"id": f"networks-v{version}-{number}", "to": to, "ports": list(_PORTS), "protocol": "tcp"})
    made: dict[str, Any] = {"version": 1, "description": "From the network settings of E2B"}
    if rules:
        made["rules"] = rules
    try:
        load(msgspec.json.encode(made).decode(), now.timestamp())
    except PolicyError as error:
        first = error.problems[0]
        raise NetworkRefused(f"These network settings make no policy: {first.cause} {first.remedy}") from None
    return made


def remaining(settings: Settings) -> tuple[Network, ...]:
    """The networks that may be reached, whatever the name: everything without what is denied, and what is allowed."""
    denied = list(settings.deny)
    if _EVERYWHERE[0] in denied:
        denied.append(_EVERYWHERE[1])
    reached: list[Network] = []
    for everywhere in _EVERYWHERE:
        whole = _spans([everywhere], everywhere)
        open_to = _merged([*_without(whole, _spans(denied, everywhere)), *_spans(settings.allow, everywhere)])
        if open_to == whole:
            reached.append(everywhere)
            continue
        address = IPv4Address if everywhere.version == 4 else IPv6Address
        for first, last in _without(open_to, _spans(_BLOCKED, everywhere)):
            reached += summarize_address_range(address(first), address(last))
    return tuple(reached)


_Span = tuple[int, int]
"""The first and the last address of a stretch of them."""


def _spans(networks: Iterable[Network], like: Network) -> list[_Span]:
    """Networks of the same version as stretches, in their order, none touching another."""
    return _merged(
        (int(one.network_address), int(one.broadcast_address)) for one in networks if one.version == like.version
    )


def _merged(spans: Iterable[_Span]) -> list[_Span]:
    made: list[_Span] = []
    for first, last in sorted(spans):
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return made


def _without(spans: Sequence[_Span], taken: Sequence[_Span]) -> list[_Span]:
    """What is left of some stretches; both are merged. Takes time in proportion to how many there are."""
    left: list[_Span] = []
    at = 0
    for first, last in spans:
        while at < len(taken) and taken[at][1] < first:
            at += 1
        number = at
        while number < len(taken) and taken[number][0] <= last:
            if taken[number][0] > first:
                left.append((first, taken[number][0] - 1))
            first = taken[number][1] + 1
            number += 1
        if first <= last:
            left.append((first, last))
    return left


def denies_all(settings: Settings) -> bool:
    """Whether the internet as such is denied: what E2B shows as `allowInternetAccess: false`."""
    return _EVERYWHERE[0] in settings.deny


def bars_internet(network: Mapping[str, Any] | None, documents: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the internet is barred by what stands above a sandbox's own policy, though the sandbox's settings do not deny it.

    `documents` are all that decide for the sandbox, as API v1 shows them.
    """
    if denies_all(_egress(_object(network, "network"), None, "network.")):
        return False
    kept = [
        TieredDocument(
            tier=str(one["tier"]), name=str(one["name"]), document=stored(msgspec.json.encode(one["document"]).decode())
        )
        for one in documents
    ]
    policy = compile_policy(kept)
    now = datetime.now(UTC).timestamp()
    return all(policy.connect(Flow(host=UNNAMED, port=port), now).action is Action.DENY for port in (80, 443))


# -- rules


def _domains(settings: Settings, now: datetime) -> Iterable[dict[str, Any]]:
    """Rules for names that are allowed: clear HTTP on 80, and TLS on 443, looked into only where headers are to be changed."""
    if not settings.domains:
        return
    named = [domain for domain in settings.domains if domain != "*"]
    if len(named) < len(settings.domains):
        yield {
            "id": "any-domain",
            "to": {"cidrs": [ALL_TRAFFIC, "::/0"], "by_name": True},
            "ports": [80, 443],
            "protocol": "tcp",
        }
    changed = {_pattern(domain) for domain in settings.headers}
    passed = [_pattern(domain) for domain in named]
    seen = list(changed)
    # A name is looked into or passed through: what has names in common with what is looked into is looked into as well.
    while more := [one for one in passed if any(_overlap(one, other) for other in seen)]:
        passed = [one for one in passed if one not in more]
        seen += more
    until = (now.astimezone(UTC) + PASSTHROUGH_FOR).strftime("%Y-%m-%dT%H:%M:%SZ")
    tls = {"mode": "passthrough", "fronting_risk": "accepted", "expires": until}
    for number, hosts in _portions(passed):
        yield {"id": f"tls-{number}", "to": {"hosts": hosts}, "protocol": "tls", "tls": tls}
        yield from (rule for rule in _seen(f"clear-{number}", hosts) if "tls" in rule)
    for number, hosts in _portions([one for one in seen if one not in changed]):
        yield from _seen(f"seen-{number}", hosts)


def _changed(settings: Settings, reached: Sequence[Network]) -> Iterable[dict[str, Any]]:
    """Rules for names whose requests get headers: only where they may be reached at all, and only at addresses that may be."""
    allowed = [_pattern(domain) for domain in settings.domains if domain != "*"]
    anywhere = "*" in settings.domains
    for number, (domain, headers) in enumerate(sorted(settings.headers.items())):
        pattern = _pattern(domain)
        within: list[str] | None = None
        if not (anywhere or any(_covers(other, pattern) for other in allowed)):
            if not reached:
                continue
            within = [str(network) for network in reached]
        edits = {"request_headers": {"set": dict(headers)}} if headers else {}
        yield from _seen(f"changed-{number}", [pattern], edits, within)


def _seen(name: str, hosts: list[str], edits: dict[str, Any] | None = None, within: list[str] | None = None) -> Any:
    """Rules by which all requests to some names pass and are looked at, over TLS and in clear."""
    for clear in (False, True):
        for protocol in ("http", "websocket"):
            changes = edits if edits and protocol == "http" else {}
            rule: dict[str, Any] = {
                "id": f"{name}-{protocol}" + "-clear" * clear,
                "to": {"hosts": hosts},
                "protocol": protocol,
                "client_auth": "allow",
                "http": {"allow": [{"methods": ["*"]}], **({"encoded_slash": True} if protocol == "http" else {}), **changes},
            }  # fmt: skip
            if protocol == "websocket":
                rule["websocket"] = {"max_frame": "1MiB"}
            if clear:
                rule["tls"] = {"mode": "none"}
            if within is not None:
                rule["resolve"] = {"within": within}
            yield rule


def _portions(patterns: Sequence[str]) -> Iterable[tuple[int, list[str]]]:
    for number, at in enumerate(range(0, len(patterns), _IN_RULE)):
        yield number, list(patterns[at : at + _IN_RULE])


def _pattern(domain: str) -> str:
    """A domain of E2B as a host pattern: its star stands for any number of labels."""
    return f"*{domain}" if domain.startswith("*.") else domain


def _covers(pattern: str, other: str) -> bool:
    if pattern == other:
        return True
    return pattern.startswith("**.") and other.removeprefix("**").endswith(pattern.removeprefix("**")) and other != pattern.removeprefix("**.")  # fmt: skip


def _overlap(one: str, other: str) -> bool:
    return _covers(one, other) or _covers(other, one)


# -- reading

_EGRESS = ("allowOut", "denyOut", "rules", "dnsServers", "egressProxy")


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
        deny.append(_EVERYWHERE[0])
    if domains and _EVERYWHERE[0] not in deny:
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
