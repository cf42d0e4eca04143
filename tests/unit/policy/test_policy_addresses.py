"""Addresses: what the registries say is not the internet is not dialled, in whatever notation."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy.addresses import (
    METADATA,
    NEVER,
    AddressKind,
    classify,
    inner_address,
    parse_address,
    parse_network,
    refusal,
)

# The IANA special-purpose registries: every block that is not globally reachable, and those that are but lead to one of these.
SPECIAL_V4 = [
    "0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.0.0/29", "192.0.0.8/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32",
]  # fmt: skip
SPECIAL_V6 = [
    "::1/128", "::/128", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001::/32", "2001:2::/48",
    "2001:10::/28", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "::/96",
]  # fmt: skip


@pytest.mark.parametrize("block", SPECIAL_V4 + SPECIAL_V6)
def test_n05_no_special_purpose_block_is_public(block: str) -> None:
    network = ip_network(block)
    for address in (network.network_address, network.broadcast_address, network[network.num_addresses // 3]):
        if block == "::ffff:0:0/96" and classify(address) is AddressKind.PUBLIC:
            assert not isinstance(
                parse_address(str(address)), IPv6Address
            )  # a mapped address is the address that it maps
            continue
        assert classify(address) is not AddressKind.PUBLIC, address
        assert refusal(address) is not None


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.0", "172.32.0.1", "192.0.1.1", "2600::1", "2a00::1"]
)
def test_the_internet_is(text: str) -> None:
    assert classify(parse_address(text)) is AddressKind.PUBLIC
    assert refusal(parse_address(text)) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("64:ff9b::a9fe:a9fe", AddressKind.METADATA),
        ("2002:7f00:1::", AddressKind.LOOPBACK),
        ("::127.0.0.1", AddressKind.LOOPBACK),
        ("::ffff:127.0.0.1", AddressKind.LOOPBACK),
        ("::ffff:10.0.0.1", AddressKind.PRIVATE),
        ("64:ff9b::808:808", AddressKind.EMBEDDED),
        ("64:ff9b::a00:1", AddressKind.EMBEDDED),
        ("2002:808:808::1", AddressKind.EMBEDDED),
        ("2600::5efe:7f00:1", AddressKind.LOOPBACK),
        ("2600::200:5efe:808:808", AddressKind.EMBEDDED),
        ("2001:0:1:1:1:1:5601:fefe", AddressKind.LINK_LOCAL),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", AddressKind.LOOPBACK),
    ],
)
def test_n05_what_is_embedded_counts(text: str, kind: AddressKind) -> None:
    assert classify(parse_address(text)) is kind
    assert (
        refusal(parse_address(text), private=(ip_network("0.0.0.0/0"), ip_network("fc00::/7"))) is None or kind in NEVER
    )


def test_n32_metadata_services_are_refused_whatever_is_allowed() -> None:
    everywhere = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    for address in METADATA:
        assert classify(address) is AddressKind.METADATA
        assert refusal(address, private=everywhere) is not None


def test_n31_loopback_and_the_own_host_are_refused_whatever_is_allowed() -> None:
    everywhere = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    for text in ("127.0.0.1", "127.255.0.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"):
        assert refusal(ip_address(text), private=everywhere) is not None
    assert refusal(ip_address("10.1.2.3"), private=everywhere) is None
    assert refusal(ip_address("10.1.2.3"), private=everywhere, own={ip_address("10.1.2.3")}) is not None
    assert refusal(ip_address("::ffff:10.1.2.3"), private=everywhere, own={ip_address("10.1.2.3")}) is not None


def test_private_addresses_are_allowed_within_their_networks_alone() -> None:
    private = (ip_network("10.20.0.0/16"),)
    assert refusal(ip_address("10.20.3.4"), private=private) is None
    assert refusal(ip_address("10.21.3.4"), private=private) is not None
    assert refusal(ip_address("fd00::1"), private=private) is not None


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
@settings(max_examples=300, deadline=None)
def test_no_wrapping_makes_an_address_public(address: IPv4Address) -> None:
    value = int(address)
    wrapped = [0x64FF9B << 96 | value, 0x2002 << 112 | value << 80, value, 0x2600 << 112 | 0x5EFE << 32 | value]
    wrapped.append(0x2001 << 112 | (value ^ 0xFFFFFFFF))
    for outer in map(IPv6Address, wrapped):
        assert classify(outer) is not AddressKind.PUBLIC
        if value > 1:
            assert inner_address(outer) == address
        if classify(address) in NEVER:
            assert classify(outer) in NEVER
    assert classify(IPv6Address(0xFFFF << 32 | value)) is classify(address)


@pytest.mark.parametrize("text", ["10.0.0.0/", "10.0.0.0", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/08", "10/8", "010.0.0.0/8", "10.0.0.0/-1", "10.0.0.0/٨",
                                  "2001:db8::1/32", "::/129", "10.0.0.0/255.0.0.0", "10.0.0.0/8 ", "fe80::%eth0/64", ""])  # fmt: skip
def test_g17_networks_are_read_strictly(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_network(text)


@pytest.mark.parametrize("text", ["10.0.0.0/8", "0.0.0.0/0", "2001:db8::/32", "192.0.2.1/32"])
def test_networks_without_host_bits_are(text: str) -> None:
    assert str(parse_network(text)) == text


@pytest.mark.parametrize(
    "text", ["127.1", "0x7f.0.0.1", "0177.0.0.1", "fe80::1%eth0", "1.2.3.4/32", " 1.2.3.4", "①.2.3.4", "2130706433", ""]
)
def test_n02_addresses_are_read_in_their_usual_notation_alone(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_address(text)
