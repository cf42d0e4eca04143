"""What an address is, before anything is dialled: the tables of the special-purpose registries, and what vendors put beside them.

`ipaddress.is_global` is not asked: it holds addresses of a translator or a tunnel for global although an inner IPv4 address, which
may be anything, is where the packet ends. Here an IPv6 address is public only in 2000::/3 and outside the tables, and one that
embeds an IPv4 address is never public.
Sources: IANA IPv4 and IPv6 Special-Purpose Address Registries; RFC 6052, 8215 (64:ff9b), 3056 (6to4), 4380 (Teredo), 5214 (ISATAP).
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class AddressKind(StrEnum):
    """What is at an address, as far as the address itself tells."""

    PUBLIC = "public"
    PRIVATE = "private"
    """Networks of an organization: RFC 1918, fc00::/7, 100.64.0.0/10 and others that the internet does not route, such as those for documentation."""
    LINK_LOCAL = "link_local"
    LOOPBACK = "loopback"
    METADATA = "metadata"
    """Services of a cloud that give credentials to whoever asks."""
    MULTICAST = "multicast"
    UNSPECIFIED = "unspecified"
    """0.0.0.0/8 and ::, which connect to the own host."""
    RESERVED = "reserved"
    """Broadcast, 240.0.0.0/4, IPv6 beyond 2000::/3."""
    EMBEDDED = "embedded"
    """An IPv6 address of a translator or tunnel, with an IPv4 address inside."""


EVERYWHERE: tuple[Network, ...] = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))

METADATA = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254",
            "169.254.169.253",
            "169.254.169.123",
            "169.254.170.2",
            "169.254.170.23",
            "169.254.0.23",
            "168.63.129.16",
            "100.100.100.200",
            "100.100.100.100",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::253",
            "fd00:ec2::123",
            "fd00:ec2::23",
            "fd20:ce::254",
        ),
    )
)
"""Metadata, time and resolver services of clouds. Beside the link-local ones some are private, shared or even public addresses."""

_V4: tuple[tuple[IPv4Network, AddressKind], ...] = tuple(
    (IPv4Network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", AddressKind.UNSPECIFIED),
        ("10.0.0.0/8", AddressKind.PRIVATE),
        ("100.64.0.0/10", AddressKind.PRIVATE),
        ("127.0.0.0/8", AddressKind.LOOPBACK),
        ("169.254.0.0/16", AddressKind.LINK_LOCAL),
        ("172.16.0.0/12", AddressKind.PRIVATE),
        ("192.0.0.0/24", AddressKind.RESERVED),
        ("192.0.2.0/24", AddressKind.PRIVATE),
        ("192.31.196.0/24", AddressKind.RESERVED),
        ("192.52.193.0/24", AddressKind.RESERVED),
        ("192.88.99.0/24", AddressKind.RESERVED),
        ("192.168.0.0/16", AddressKind.PRIVATE),
        ("192.175.48.0/24", AddressKind.RESERVED),
        ("198.18.0.0/15", AddressKind.PRIVATE),
        ("198.51.100.0/24", AddressKind.PRIVATE),
        ("203.0.113.0/24", AddressKind.PRIVATE),
        ("224.0.0.0/4", AddressKind.MULTICAST),
        ("240.0.0.0/4", AddressKind.RESERVED),
    )
)
_V6: tuple[tuple[IPv6Network, AddressKind], ...] = tuple(
    (IPv6Network(network), kind)
    for network, kind in (
        ("::/128", AddressKind.UNSPECIFIED),
        ("::1/128", AddressKind.LOOPBACK),
        ("::/96", AddressKind.EMBEDDED),
        ("::ffff:0:0:0/96", AddressKind.EMBEDDED),
        ("64:ff9b::/96", AddressKind.EMBEDDED),
        ("64:ff9b:1::/48", AddressKind.EMBEDDED),
        ("100::/64", AddressKind.RESERVED),
        ("2001::/32", AddressKind.EMBEDDED),
        ("2001::/23", AddressKind.RESERVED),
        ("2001:db8::/32", AddressKind.PRIVATE),
        ("2002::/16", AddressKind.EMBEDDED),
        ("2620:4f:8000::/48", AddressKind.RESERVED),
        ("3fff::/20", AddressKind.PRIVATE),
        ("fc00::/7", AddressKind.PRIVATE),
        ("fe80::/10", AddressKind.LINK_LOCAL),
        ("fec0::/10", AddressKind.PRIVATE),
        ("ff00::/8", AddressKind.MULTICAST),
    )
)
_UNICAST = IPv6Network("2000::/3")
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


def parse_address(text: str) -> Address:
    """Reads a literal address in its usual notation alone; raises ValueError. An IPv4-mapped one is the IPv4 address."""
    if "%" in text or "/" in text:
        raise ValueError(f"{text!r} is no plain address")
    return _unmapped(ip_address(text))


def parse_network(text: str) -> Network:
    """Reads `address/length` without host bits; raises ValueError with what to write instead."""
    address, slash, length = text.partition("/")
    if not slash or not length.isascii() or not length.isdigit() or (length != "0" and length.startswith("0")):
        raise ValueError(f"it has no prefix length: write {address}/32 for one IPv4 address")
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError("it is no network in the notation address/length") from None
    if "%" in text or str(network.network_address) != str(ip_address(address)):
        raise ValueError(f"it has bits set behind its prefix: write {network}")
    return network


def inner_address(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 address embeds, where the notation of a translator or tunnel has one."""
    if isinstance(address, IPv4Address):
        return None
    value = int(address)
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if (value >> 32) & 0xFFFFFFFF in _ISATAP or any(
        address in network for network, kind in _V6 if kind is AddressKind.EMBEDDED
    ):
        return IPv4Address(value & 0xFFFFFFFF)
    return None


def classify(address: Address) -> AddressKind:
    """What is there. An embedded IPv4 address counts as what it is, where that is worse than `EMBEDDED`."""
    address = _unmapped(address)
    if address in METADATA:
        return AddressKind.METADATA
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _V4 if address in network), AddressKind.PUBLIC)
    kind = next((kind for network, kind in _V6 if address in network), None)
    inner = inner_address(address)
    if inner is not None and kind not in (AddressKind.UNSPECIFIED, AddressKind.LOOPBACK):
        within = classify(inner)
        return within if within in NEVER else AddressKind.EMBEDDED
    if kind is not None:
        return kind
    return AddressKind.PUBLIC if address in _UNICAST else AddressKind.RESERVED


NEVER = frozenset(AddressKind) - {AddressKind.PUBLIC, AddressKind.PRIVATE}
"""Kinds that are dialled for no sandbox, whatever a policy says."""


def refusal(address: Address, *, private: Sequence[Network] = (), own: Collection[Address] = ()) -> str | None:
    """Why an address may not be dialled, in words; None where it may. Whoever dials asks this of each address that a name resolved to.

    `private`: networks whose private addresses are allowed. `own`: the addresses of this host, which are never dialled.
    """
    address = _unmapped(address)
    if address in own:
        return f"{address} is an address of this host"
    kind = classify(address)
    if kind in NEVER:
        return f"{address} is {_WORDS[kind]}, which no policy can allow"
    if kind is AddressKind.PRIVATE and not any(
        address in network for network in private if network.version == address.version
    ):
        return f"{address} is {_WORDS[kind]}, and the rule does not allow it (`resolve.private`)"
    return None


_WORDS = {
    AddressKind.PRIVATE: "a private address",
    AddressKind.LINK_LOCAL: "a link-local address",
    AddressKind.LOOPBACK: "a loopback address",
    AddressKind.METADATA: "a metadata service's address",
    AddressKind.MULTICAST: "a multicast address",
    AddressKind.UNSPECIFIED: "an unspecified address",
    AddressKind.RESERVED: "a reserved address",
    AddressKind.EMBEDDED: "an address of a translator or tunnel",
}


def _unmapped(address: Address) -> Address:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
