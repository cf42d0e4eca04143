"""E2B's network settings of a sandbox, as a policy document of the sandbox. Pure; docs/e2b.md and decision 66 say what is mapped to what.

There, what is allowed beats what is denied, and what nobody speaks about passes. Here denials win and nothing passes by itself. So nothing that
is denied there becomes a denial here: what remains of the internet is computed, and that is allowed.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_network, summarize_address_range
from typing import Any

import msgspec

from hatchway.domain.policy.addresses import Network
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import compile_policy
from hatchway.domain.policy.probes import UNNAMED
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import load, stored
from hatchway.domain.policy.verdicts import Action, Flow
from hatchway.e2b.network import ALL_TRAFFIC, EVERYWHERE, NetworkRefused, Settings, denies_all, read

PASSTHROUGH_FOR = timedelta(days=365)
"""How long TLS passes through that is not looked into; a policy says an end to it."""

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
    if EVERYWHERE[0] in denied:
        denied.append(EVERYWHERE[1])
    reached: list[Network] = []
    for everywhere in EVERYWHERE:
        whole = _spans([everywhere], everywhere)
        open_to = _merged([*_without(whole, _spans(denied, everywhere)), *_spans(settings.allow, everywhere)])
        if open_to == whole:
            reached.append(everywhere)
            continue
        address = IPv4Address if everywhere.version == 4 else IPv6Address
        for first, last in _without(open_to, _spans(_BLOCKED, everywhere)):
            reached += summarize_address_range(address(first), address(last))
    return tuple(reached)


def bars_internet(network: Mapping[str, Any] | None, documents: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the internet is barred by what stands above a sandbox's own policy, though the sandbox's settings do not deny it.

    `documents` are all that decide for the sandbox, as API v1 shows them.
    """
    if denies_all(read(network)):
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


# -- addresses

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
