"""Frames that a hostile guest writes: each is refused and counted by the slot's rules, and shown to get through where its rule is missing.

The slots are real: made by a launcher and its shims, entered through the tap that a VMM gets. For the second half the launcher is
killed first, as it would put the rules back. Needs root, /dev/net/tun and nft.
"""

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from launcher_harness import Site
from slot_harness import (
    ACK,
    FIN,
    GATEWAY,
    GUEST,
    GUEST_MAC,
    RST,
    SYN,
    Guest,
    checksum,
    ethernet,
    inside,
    ipv4,
    is_tcp,
    tcp,
    udp,
)

from hatchway.launcher.ruleset import DROPS, RULESET
from hatchway.wire.launcher import VmRecord

ANYWHERE = "203.0.113.9"
ELSE = "10.200.0.77"
FOREIGN_MAC = bytes.fromhex("02fc00000077")
BROADCAST = b"\xff" * 6
PORT = 4000
"""The guest's, of datagrams that are tried; each TCP segment has one of its own, as the kernel answers a repeated one slowly."""
_ports = count(4001)


@dataclass
class Seen:
    """What came of frames: to the tap, to the sockets of the slot, and in its namespace."""

    frames: list[bytes]
    datagrams: list[bytes]
    vm: VmRecord


def dial(
    name: str, frames: Callable[[bytes], list[bytes]], counter: str, to: str = ANYWHERE, **more: tuple[str, ...] | str
) -> "Attack":
    """An attempt to open a connection, whose segment goes out in these frames."""
    port = next(_ports)

    def through(seen: Seen) -> bool:
        return any(is_tcp(frame, to, 80, port, SYN | ACK) for frame in seen.frames)

    return Attack(name, frames(tcp(to, 80, source_port=port)), counter, through, **more)  # type: ignore[arg-type] # the options are data


def is_arp(frame: bytes, operation: int) -> bool:
    return frame[12:14] == b"\x08\x06" and frame[20:22] == operation.to_bytes(2, "big")


def is_icmp(frame: bytes, kind: int) -> bool:
    return frame[12:14] == b"\x08\x00" and frame[23] == 1 and frame[34] == kind


def arp(operation: int = 1, *, sender: str = GUEST, mac: bytes = GUEST_MAC, source: bytes = GUEST_MAC) -> bytes:
    body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + mac + socket.inet_aton(sender)
    return ethernet(body + bytes(6) + socket.inet_aton(GATEWAY), 0x0806, source=source, to=BROADCAST)


def ipv6(kind: int, payload: bytes, to: str, source: str, header: int = 58) -> bytes:
    pseudo = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, to)
    body = bytes([kind, 0, 0, 0]) + payload
    total = checksum(pseudo + struct.pack("!IxxxB", len(body), 58) + body)
    body = body[:2] + total.to_bytes(2, "big") + body[4:]
    head = struct.pack("!IHBB", 6 << 28, len(body), header, 255) + pseudo
    multicast = b"\x33\x33" + socket.inet_pton(socket.AF_INET6, to)[12:]
    return ethernet(head + body, 0x86DD, to=multicast)


LINK_LOCAL, GUEST_LOCAL = "fe80::fc:ff:fe00:1", "fe80::fc:ff:fe00:2"


def solicitation(source: str = GUEST_LOCAL) -> bytes:
    target = socket.inet_pton(socket.AF_INET6, LINK_LOCAL)
    return ipv6(135, bytes(4) + target + b"\x01\x01" + GUEST_MAC, "ff02::1:ff00:1", source)


def advertisement() -> bytes:
    prefix = struct.pack("!BBBBIII", 3, 4, 64, 0xC0, 3600, 3600, 0) + socket.inet_pton(socket.AF_INET6, "2001:db8::")
    body = struct.pack("!BBHII", 64, 0, 1800, 0, 0) + prefix + b"\x01\x01" + GUEST_MAC
    return ipv6(134, body, "ff02::1", GUEST_LOCAL)


def fragments(whole: bytes) -> list[bytes]:
    return [
        ethernet(ipv4(whole[:16], 6, ANYWHERE, fragment=0x2000)),
        ethernet(ipv4(whole[16:], 6, ANYWHERE, fragment=2)),
    ]


def vlan(*tags: int) -> Callable[[bytes], list[bytes]]:
    """Tags of these types, each for the network 0, which is none."""

    def frames(segment: bytes) -> list[bytes]:
        kind, body = 0x0800, ipv4(segment, 6, ANYWHERE)
        for tag in reversed(tags):
            kind, body = tag, struct.pack("!HH", 0, kind) + body
        return [ethernet(body, kind)]

    return frames


def with_options(options: bytes) -> Callable[[bytes], list[bytes]]:
    return lambda segment: [ethernet(ipv4(segment, 6, ANYWHERE, options=options))]


def udp_to(port: int, to: str = ANYWHERE) -> list[bytes]:
    return [ethernet(ipv4(udp(b"out", port, PORT), 17, to))]


def protocol(number: int) -> list[bytes]:
    return [ethernet(ipv4(bytes(32), number, GATEWAY))]


ECHO = b"\x08\x00" + checksum(b"\x08\x00\x00\x00\x00\x01\x00\x01").to_bytes(2, "big") + b"\x00\x01\x00\x01"
REDIRECT = "table ip naive { chain pre { type nat hook prerouting priority -100; tcp dport 80 redirect to :15001; udp dport 5353 redirect to :53; }; }\n"
IPV6_ON = ("ipv6/conf/tap0/accept_dad=0", "ipv6/conf/tap0/accept_ra=2", "ipv6/conf/tap0/disable_ipv6=0")


@dataclass
class Attack:
    """Frames, the counter that they are refused under, and how it shows when they get through."""

    name: str
    frames: list[bytes]
    counter: str
    through: Callable[[Seen], bool]
    off: tuple[str, ...] = ()
    """Counters whose rules are missing in the naive slot, besides."""
    settings: tuple[str, ...] = ()
    rules: str = ""
    """The whole of the naive slot's rules; empty: the real ones without those of the counters."""


def to_address(name: str, address: str, rules: str = "") -> Attack:
    settings = ("ipv4/conf/all/route_localnet=1", "ipv4/conf/tap0/route_localnet=1") if rules else ()
    return dial(
        name,
        lambda segment: [ethernet(ipv4(segment, 6, address))],
        "destination",
        address,
        settings=settings,
        rules=rules,
    )


ATTACKS = [
    Attack("n03-ipv6", [solicitation()], "ipv6", lambda seen: any(f[12:14] == b"\x86\xdd" and f[54] == 136 for f in seen.frames), off=("mac", "ethertype", "protocol"), settings=IPV6_ON),
    Attack("n10-ipv6-source", [solicitation("fe80::77")], "ipv6", lambda seen: any(f[12:14] == b"\x86\xdd" and f[54] == 136 for f in seen.frames), off=("mac", "ethertype", "protocol"), settings=IPV6_ON),
    Attack("n13-router-advertisement", [advertisement()], "ipv6", lambda seen: "default" in inside(seen.vm, "ip", "-6", "route"), off=("mac", "ethertype", "protocol"), settings=IPV6_ON),
    to_address("n06-loopback", "127.0.0.1", REDIRECT),
    to_address("n07-unspecified", "0.0.0.0", REDIRECT),
    to_address("n07-broadcast", "255.255.255.255", REDIRECT),
    to_address("n07-multicast", "224.0.0.1", REDIRECT),
    to_address("n07-reserved", "240.0.0.1"),
    to_address("n32-metadata", "169.254.169.254"),
    Attack("n08-source", [ethernet(ipv4(tcp(ANYWHERE, 80, source=ELSE), 6, ANYWHERE, source=ELSE))], "source", lambda seen: any(is_arp(f, 1) and f[38:42] == socket.inet_aton(ELSE) for f in seen.frames)),
    dial("n11-foreign-mac", lambda segment: [ethernet(ipv4(segment, 6, ANYWHERE), source=FOREIGN_MAC)], "mac"),
    Attack("n11-foreign-mac-of-arp", [arp(source=FOREIGN_MAC)], "mac", lambda seen: any(is_arp(f, 2) for f in seen.frames), off=("arp",)),
    Attack("n12-arp-for-others", [arp(sender=ELSE)], "arp", lambda seen: any(is_arp(f, 2) for f in seen.frames)),
    Attack("n12-arp-of-another-mac", [arp(mac=FOREIGN_MAC)], "arp", lambda seen: any(is_arp(f, 2) for f in seen.frames)),
    dial("n15-priority-tag", vlan(0x8100), "vlan"),
    dial("n15-service-tag", vlan(0x88A8), "vlan"),
    dial("n15-two-tags", vlan(0x88A8, 0x8100), "vlan", off=("ethertype", "protocol")),
    dial("n16-record-route", with_options(b"\x07\x07\x04\0\0\0\0\0"), "options"),
    dial("n16-padding", with_options(b"\x01\x01\x01\0"), "options"),
    dial("n18-fragments", fragments, "fragment"),
    Attack("n20-icmp", [ethernet(ipv4(ECHO, 1, GATEWAY))], "protocol", lambda seen: any(is_icmp(f, 0) for f in seen.frames), off=("unserved",), settings=("ipv4/icmp_echo_ignore_all=0",)),
    Attack("n20-gre", protocol(47), "protocol", lambda seen: any(is_icmp(f, 3) for f in seen.frames), off=("unserved",)),
    Attack("n20-sctp", protocol(132), "protocol", lambda seen: any(is_icmp(f, 3) for f in seen.frames), off=("unserved",)),
    Attack("n20-experimental", protocol(253), "protocol", lambda seen: any(is_icmp(f, 3) for f in seen.frames), off=("unserved",)),
    Attack("n21-quic", udp_to(443), "udp", lambda seen: b"out" in seen.datagrams),
    Attack("n22-mdns", udp_to(5353, GATEWAY), "udp", lambda seen: b"out" in seen.datagrams),
    Attack("n22-mdns-group", udp_to(5353, "224.0.0.251"), "destination", lambda seen: b"out" in seen.datagrams, rules=REDIRECT),
    Attack("n22-llmnr", udp_to(5355, GATEWAY), "udp", lambda seen: b"out" in seen.datagrams),
    Attack("d06-dns-over-quic", udp_to(853), "udp", lambda seen: b"out" in seen.datagrams),
]  # fmt: skip
NAMES = [attack.name for attack in ATTACKS]


class Slot:
    """A VM of a launcher, as its guest and its gateway see it."""

    def __init__(self, runner: asyncio.Runner, site: Site) -> None:
        self.run = runner.run
        self.site = site
        self.vm = self.run(site.start_vm())
        self.guest = self.run(Guest.of(site, self.vm))
        fds = self.run(site.client.listeners(self.vm.sandbox_id, self.vm.generation))
        self.tcp, self.udp, self.dns = (socket.socket(fileno=fd) for fd in fds)
        self._probes = 0

    def close(self) -> None:
        for sock in (self.tcp, self.udp, self.dns):
            sock.close()
        os.close(self.guest.tap)

    def dropped(self) -> dict[str, int]:
        return self.run(self.site.client.dropped(self.vm.sandbox_id)).packets

    def after(self, frames: list[bytes]) -> Seen:
        """Writes frames, then one that is answered: what came before that answer is what came of the frames."""
        self.guest.frames()
        for frame in frames:
            self.guest.frame(frame)
        found: list[bytes] = []
        self.run(self._probe(found))
        datagrams = []
        while True:
            try:
                datagrams.append(self.udp.recv(2048))
            except BlockingIOError:
                return Seen(found, datagrams, self.vm)

    async def _probe(self, found: list[bytes]) -> None:
        """Behind a flood the rate of new connections refuses this one too, for a while: it is repeated."""
        for _ in range(200):
            self._probes += 1
            mine = 50_000 + self._probes
            self.guest.frame(ethernet(ipv4(tcp(GATEWAY, 80, source_port=mine), 6, GATEWAY)))

            def end(frame: bytes, port: int = mine) -> bool:
                found.append(frame)
                return is_tcp(frame, GATEWAY, 80, port, SYN | ACK)

            try:
                await self.guest.until(end, within=0.1)
            except TimeoutError:
                continue
            self.guest.frame(ethernet(ipv4(tcp(GATEWAY, 80, source_port=mine, flags=RST, seq=1001), 6, GATEWAY)))
            return
        raise AssertionError("the slot does not answer")

    def apply(self, rules: str, settings: tuple[str, ...]) -> None:
        for setting in settings:
            name, _, value = setting.partition("=")
            inside(self.vm, "sh", "-c", f"echo {value} >/proc/sys/net/{name}")
        inside(self.vm, "nft", "-f", "-", stdin=rules)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    assert os.geteuid() == 0, "these tests need root"
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def slot(runner: asyncio.Runner) -> Iterator[Slot]:
    """One whose launcher lives."""
    site = Site("--stock", "0")
    site.start()
    try:
        made = Slot(runner, site)
        yield made
        made.close()
    finally:
        runner.run(site.clean_up())


@pytest.fixture(scope="module")
def alone(runner: asyncio.Runner) -> Iterator[Slot]:
    """One whose launcher was killed: nobody puts its rules back."""
    site = Site("--stock", "0")
    site.start()
    try:
        made = Slot(runner, site)
        site.kill9()
        yield made
        made.close()
    finally:
        runner.run(site.clean_up())


def naive(attack: Attack) -> str:
    """The rules without those that stand against the attack, and without those that would only hide its answer."""
    if attack.rules:
        return "flush ruleset\n" + attack.rules
    off = {attack.counter, *attack.off}
    kept = []
    for line in RULESET.splitlines():
        missing = next((name for name in off if f"counter name drop_{name}" in line), "")
        if not missing:
            kept.append(line)
        elif missing in ("protocol", "arp") and line.strip().startswith("counter"):
            kept.append("accept")  # the end of a list of what is allowed
    text = "\n".join(kept) + "\n"
    # An attack's answer may go to where none of the guest's would.
    start = text.index("chain output {")
    text = text[:start] + text[start:].replace("policy drop", "policy accept", 1)
    if "unserved" in off:
        start = text.index("chain divert {")
        text = text[:start] + text[start:].replace("policy drop", "policy accept", 1).replace(
            "meta l4proto tcp reject with tcp reset", "", 1
        )
        start = text.index("chain input {")
        text = text[:start] + text[start:].replace("policy drop", "policy accept", 1)
    return text


@pytest.mark.parametrize("attack", ATTACKS, ids=NAMES)
def test_refused_and_counted(slot: Slot, attack: Attack) -> None:
    before = slot.dropped()
    seen = slot.after(attack.frames)
    assert not attack.through(seen)
    assert not seen.datagrams
    after = slot.dropped()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        attack.counter: len(attack.frames)
    }


@pytest.mark.parametrize("attack", ATTACKS, ids=NAMES)
def test_gets_through_where_its_rule_is_missing(alone: Slot, attack: Attack) -> None:
    alone.apply(naive(attack), attack.settings)
    try:
        assert attack.through(alone.after(attack.frames))
    finally:
        alone.apply(RULESET, ("ipv6/conf/tap0/disable_ipv6=1", "ipv4/icmp_echo_ignore_all=1"))


FLOOD = 3000
"""Frames: far more than a second's worth of any of the rates, written in a fraction of one."""


def flood(slot: Slot, frames: Callable[[int], bytes], wanted: Callable[[bytes], bool]) -> int:
    """Writes `FLOOD` frames; how many answers of a kind came."""
    slot.guest.frames()
    answers = 0
    for number in range(FLOOD):
        slot.guest.frame(frames(number))
        if number % 50 == 49:  # the queue of a tap holds some hundreds
            answers += sum(map(wanted, slot.guest.frames()))
    return answers + sum(map(wanted, slot.after([]).frames))


def syn_from(number: int, *, source: str = GUEST) -> bytes:
    return ethernet(ipv4(tcp(ANYWHERE, 443, source=source, source_port=1024 + number), 6, ANYWHERE, source=source))


def is_syn_ack(frame: bytes) -> bool:
    return frame[12:14] == b"\x08\x00" and frame[23] == 6 and frame[26:30] == socket.inet_aton(ANYWHERE)


def test_n26_a_flood_of_connection_attempts_is_bounded(slot: Slot, alone: Slot) -> None:
    started, before = time.monotonic(), slot.dropped()["syn_rate"]
    answered = flood(slot, syn_from, is_syn_ack)
    assert answered < 1000 + 1000 * (time.monotonic() - started) + 50  # the burst, and the rate for as long as it took
    assert slot.dropped()["syn_rate"] - before >= FLOOD - answered - 50
    alone.apply("\n".join(line for line in RULESET.splitlines() if "syn_rate drop" not in line), ())
    assert flood(alone, syn_from, is_syn_ack) > FLOOD * 0.9
    alone.apply(RULESET, ())


def test_n12_a_flood_of_arp_is_bounded(slot: Slot, alone: Slot) -> None:
    before = slot.dropped()["arp"]
    assert flood(slot, lambda _: arp(), lambda frame: is_arp(frame, 2)) < 100
    assert slot.dropped()["arp"] - before > FLOOD - 100
    alone.apply(RULESET.replace("limit rate 10/second burst 20 packets accept", "accept"), ())
    assert flood(alone, lambda _: arp(), lambda frame: is_arp(frame, 2)) > FLOOD * 0.9
    alone.apply(RULESET, ())


def test_n12_spoofed_sources_fill_no_table_of_neighbours(slot: Slot, alone: Slot) -> None:
    def spoofed(number: int) -> bytes:
        return syn_from(number, source=f"10.200.0.{number % 200 + 20}")

    def neighbours(of: Slot) -> int:
        return len(inside(of.vm, "ip", "neigh", "show", "dev", "tap0").splitlines())

    flood(slot, spoofed, is_syn_ack)
    assert neighbours(slot) == 1
    alone.apply(naive(next(attack for attack in ATTACKS if attack.name == "n08-source")), ())
    flood(alone, spoofed, is_syn_ack)
    assert neighbours(alone) > 100
    alone.apply(RULESET, ())
    inside(alone.vm, "ip", "neigh", "flush", "dev", "tap0", "nud", "incomplete", "nud", "failed")


def test_n27_connections_are_not_tracked(slot: Slot, alone: Slot) -> None:
    def tracked(of: Slot) -> int:
        return int(inside(of.vm, "cat", "/proc/sys/net/netfilter/nf_conntrack_count"))

    slot.after([syn_from(number) for number in range(100)])
    assert tracked(slot) == 0
    alone.apply(RULESET.replace("\tnotrack\n", "\tct state new accept\n"), ())
    alone.after([syn_from(number) for number in range(100)])
    assert tracked(alone) >= 100
    alone.apply(RULESET, ())


@pytest.mark.parametrize("flags", [FIN | SYN, SYN | RST, 0, 0x29, SYN | ACK], ids=lambda flags: f"{flags:#x}")
def test_n25_segments_that_nobody_sends_are_counted(slot: Slot, flags: int) -> None:
    """The kernel refuses most of these by itself: here they are seen not to reach it."""
    before = slot.dropped()["flags"]
    seen = slot.after([ethernet(ipv4(tcp(ANYWHERE, 80, source_port=60_000, flags=flags), 6, ANYWHERE))])
    assert not [frame for frame in seen.frames if frame[26:30] == socket.inet_aton(ANYWHERE)]
    assert slot.dropped()["flags"] - before == (
        flags != 0x29
    )  # FIN, PSH and URG, of a connection that is none: no answer


def test_n30_nothing_else_listens_in_a_slot(slot: Slot) -> None:
    listening = {
        int(words[1].rpartition(":")[2], 16)
        for table in ("tcp", "udp")
        for words in map(str.split, inside(slot.vm, "cat", f"/proc/net/{table}").splitlines()[1:])
        if words[3] in ("0A", "07")
    }
    assert listening == {15001, 15053, 53}


def test_without_rules_nothing_is_forwarded_and_no_connection_is_served(alone: Slot) -> None:
    """As between a flush and the launcher's answer to it, or for ever when there is no launcher."""
    inside(alone.vm, "nft", "flush", "ruleset")
    alone.guest.frames()
    for port in (80, 53, 15001):
        alone.guest.frame(ethernet(ipv4(tcp(ANYWHERE, port, source_port=45_000 + port % 1000), 6, ANYWHERE)))
    alone.guest.frame(udp_to(53)[0])
    # What is for the slot's own address is answered by its sockets still, and shows the order.
    alone.guest.frame(ethernet(ipv4(tcp(GATEWAY, 9, source_port=46_000), 6, GATEWAY)))
    seen: list[bytes] = []

    def refused(frame: bytes) -> bool:
        seen.append(frame)
        return is_tcp(frame, GATEWAY, 9, 46_000, RST | ACK)

    alone.run(alone.guest.until(refused))
    assert len(seen) == 1
    with pytest.raises(BlockingIOError):
        alone.udp.recv(2048)
    alone.apply(RULESET, ())


def test_what_no_socket_takes_is_reset(alone: Slot) -> None:
    """As when the sockets of a slot were gone: the guest is told at once."""
    alone.apply(RULESET.replace(":15001", ":15999"), ())
    alone.guest.frames()
    alone.guest.frame(ethernet(ipv4(tcp(ANYWHERE, 80, source_port=47_000), 6, ANYWHERE)))
    alone.run(alone.guest.until(lambda frame: is_tcp(frame, ANYWHERE, 80, 47_000, RST | ACK)))
    counters = inside(alone.vm, "nft", "list", "counter", "ip", "slot", "drop_unserved")
    assert "packets 1 " in counters
    alone.apply(RULESET, ())


def test_a_monitor_that_was_taken_over_reaches_nothing_from_its_namespace(slot: Slot) -> None:
    """It has sockets there, besides the tap: they lead neither to the gateway's nor to the guest."""
    before = slot.dropped()["output"]
    for address in ("127.0.0.1", GATEWAY, GUEST, ANYWHERE):
        inside(slot.vm, "bash", "-c", f"echo out >/dev/udp/{address}/53 || true")
    with pytest.raises(BlockingIOError):
        slot.udp.recv(2048)
    assert slot.dropped()["output"] - before >= 3  # to anywhere there is no route at all


def test_the_queue_to_the_guest_is_short(slot: Slot) -> None:
    """Places for packets that wait are memory of the kernel in each slot, whether any waits or not."""
    assert " qlen 256" in inside(slot.vm, "ip", "link", "show", "dev", "tap0")


def test_every_counter_is_in_the_rules_and_has_an_attack(slot: Slot) -> None:
    assert set(slot.dropped()) == set(DROPS)
    beside = {"ethertype", "flags", "syn_rate", "dns_rate", "unserved", "input", "output", "forward"}
    assert {attack.counter for attack in ATTACKS} | beside == set(DROPS)
