"""The rules of a slot's network: one text, the same for every slot, that `nft` takes as one transaction.

Frames of the guest are judged where they enter the host's kernel (netdev ingress of tap0), before anything else has looked at
them: one address and one hardware address are the guest's, IPv4 without options and fragments is what it may speak, TCP
to any port and UDP to port 53 is what it may want. What passes is handed to the three sockets of the slot (TPROXY), whatever its
destination is; nothing is ever forwarded, and there is nowhere to forward it to. Connections are not tracked, so that a guest can
fill no table of the host's.

Every drop is counted under a name; `Counters` of the launcher's verbs tells them. Of the names and the order of the rules the
comments say what they stand against; the ids are those of the catalogue of attacks that the tests carry.
"""

import zlib

from hatchway.wire.egress import GATEWAY_ADDRESS, GUEST_ADDRESS

TAP = "tap0"
GATEWAY_MAC = "02:fc:00:00:00:01"
GUEST_MAC = "02:fc:00:00:00:02"
TCP_PORT = 15001
DNS_UDP_PORT = 53
"""Its own, so that an answer has it as its source; the address that was asked is set for each answer (IP_PKTINFO)."""
DNS_TCP_PORT = 15053
MARK = 1
PREFIX = "drop_"
"""Of the counters' names: without it some would be words of the language of the rules."""

DROPS = {
    "vlan": "frames with a VLAN tag, in either form",
    "mac": "frames that are not from the guest's hardware address, or not to the gateway's",
    "arp": "ARP other than the guest's own questions for the gateway, or too many of them",
    "ipv6": "IPv6",
    "ethertype": "frames that are not IPv4 or ARP",
    "options": "IPv4 headers with options",
    "fragment": "fragments",
    "source": "packets from an address that is not the guest's",
    "destination": "packets to loopback, link-local, multicast, broadcast and reserved addresses",
    "flags": "TCP segments with flags that nobody sends",
    "syn_rate": "TCP connection attempts beyond the rate",
    "dns_rate": "DNS questions over UDP beyond the rate",
    "udp": "UDP to ports other than 53",
    "protocol": "protocols other than TCP and UDP",
    "unserved": "packets that no socket of the slot took; TCP is answered with a reset",
    "input": "packets that were not handed to a socket of the slot",
    "output": "packets of the host's side that are no answers to the guest",
    "forward": "packets that were to be forwarded",
}
"""What the counters are called behind `PREFIX`, and what they count."""

# A tag that the kernel has taken off a frame shows where the frame's type was, and nowhere else: `vlan id` sees those of 802.1Q
# only. A second one, behind it, shows as the protocol.
_TAGS = "0x8100, 0x88a8, 0x9100, 0x9200, 0x9300"

_INGRESS = f"""
	@ll,96,16 {{ {_TAGS} }} counter name drop_vlan drop
	meta protocol {{ {_TAGS} }} counter name drop_vlan drop
	ether saddr != {GUEST_MAC} counter name drop_mac drop
	meta protocol arp goto check_arp
	meta protocol ip6 counter name drop_ipv6 drop
	ether daddr != {GATEWAY_MAC} counter name drop_mac drop
	meta protocol != ip counter name drop_ethertype drop
	ip hdrlength != 5 counter name drop_options drop
	ip frag-off & 0x3fff != 0 counter name drop_fragment drop
	ip saddr != {GUEST_ADDRESS} counter name drop_source drop
	ip daddr {{ 0.0.0.0/8, 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/3, 10.200.0.0, 10.200.0.255 }} counter name drop_destination drop
	ip protocol tcp goto check_tcp
	ip protocol udp goto check_udp
	counter name drop_protocol drop
"""

_ARP = f"""
	arp htype 1 arp ptype ip arp hlen 6 arp plen 4 arp operation request arp saddr ether {GUEST_MAC} arp saddr ip {GUEST_ADDRESS} arp daddr ip {GATEWAY_ADDRESS} limit rate 10/second burst 20 packets accept
	counter name drop_arp drop
"""

_TCP = """
	tcp flags & (fin | syn) == fin | syn counter name drop_flags drop
	tcp flags & (syn | rst) == syn | rst counter name drop_flags drop
	tcp flags & (fin | syn | rst | ack) == 0 counter name drop_flags drop
	tcp flags & (syn | ack) == syn | ack counter name drop_flags drop
	tcp flags & (syn | ack) == syn limit rate over 1000/second burst 1000 packets counter name drop_syn_rate drop
	accept
"""

_UDP = """
	udp dport != 53 counter name drop_udp drop
	limit rate over 1000/second burst 1000 packets counter name drop_dns_rate drop
	accept
"""

_DIVERT = f"""
	iifname != "{TAP}" counter name drop_unserved drop
	meta l4proto udp tproxy to :{DNS_UDP_PORT} meta mark set {MARK} accept
	tcp dport 53 tproxy to :{DNS_TCP_PORT} meta mark set {MARK} accept
	tcp dport != 53 tproxy to :{TCP_PORT} meta mark set {MARK} accept
	counter name drop_unserved
	meta l4proto tcp reject with tcp reset
"""

_OUTPUT = f"""
	oifname "{TAP}" ip daddr {GUEST_ADDRESS} meta l4proto tcp accept
	oifname "{TAP}" ip daddr {GUEST_ADDRESS} udp sport 53 accept
	counter name drop_output
"""


def _table(family: str, name: str, chains: dict[str, tuple[str, str]]) -> str:
    text = "".join(f"chain {chain} {{\n\t{head}{body}}}\n" for chain, (head, body) in chains.items())
    counters = "".join(f"counter {PREFIX}{drop} {{ }}\n" for drop in DROPS if f"counter name {PREFIX}{drop}" in text)
    return f"table {family} {name} {{\n{counters}{text}}}\n"


def _hook(hook: str, priority: int, policy: str = "drop") -> str:
    return f"type filter hook {hook} priority {priority}; policy {policy};"


RULESET = (
    "flush ruleset\n"
    + _table(
        "netdev",
        "guest",
        {
            "check_arp": ("", _ARP),
            "check_tcp": ("", _TCP),
            "check_udp": ("", _UDP),
            "ingress": (f'type filter hook ingress device "{TAP}" priority -500; policy drop;', _INGRESS),
        },
    )
    + _table(
        "ip",
        "slot",
        {
            "untracked": (_hook("prerouting", -300, "accept"), "\n\tnotrack\n"),
            "divert": (_hook("prerouting", -150), _DIVERT),
            "input": (_hook("input", 0), f'\n\tiifname "{TAP}" meta mark {MARK} accept\n\tcounter name drop_input\n'),
            "forward": (_hook("forward", 0), "\n\tcounter name drop_forward\n"),
            "untracked_out": (_hook("output", -300, "accept"), "\n\tnotrack\n"),
            "output": (_hook("output", 0), _OUTPUT),
        },
    )
)
"""What a slot's network is given, whole, whenever it is given rules: `flush ruleset` comes first, within the same transaction."""
VERSION = zlib.crc32(RULESET.encode())
"""Tells this text from that of another release."""
