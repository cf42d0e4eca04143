"""HTTP/2: streams that name other sites, pseudo fields that are none, frames without end."""

from hatchway.redteam.attacks.attack import INDEX, SOURCE, Attack, table

_PARTLY = (INDEX, SOURCE)
_FIRST = "h2_request(1, *get('/simple/'))"


def _one(*fields: str) -> str:
    return f"h2(h2_request(1, {', '.join(fields)}))"


ATTACKS: tuple[Attack, ...] = (
    *table("H16", "A stream for another site", {
        "first": _one("*get('/simple/' + M, 'other.test')"),
        "second": f"h2({_FIRST}, h2_request(3, *get('/simple/' + M, 'other.test')))",
        "second-path": f"h2({_FIRST}, h2_request(3, *get('/upload/' + M)))",
        "second-method": f"h2({_FIRST}, h2_request(3, *get('/simple/' + M, method='DELETE')))",
        "marker": _one("*get('/simple/', M + '.test')"),
        "port": _one("*get('/simple/' + M, 'index.test:8443')"),
    }, _PARTLY),
    *table("H17", "Another allowed site on one connection", {
        "api": f"h2({_FIRST}, h2_request(3, *get('/v1/' + M, 'api.test')))",
        "files": f"h2({_FIRST}, h2_request(3, *get('/packages/' + M, 'files.test')))",
    }, _PARTLY),
    *table("H18", "Authority and Host", {
        "different": _one("*get('/simple/' + M)", "('host', 'other.test')"),
        "host-alone": _one("(':method', 'GET')", "(':scheme', 'https')", "(':path', '/simple/' + M)", "('host', 'index.test')"),
        "neither": _one("(':method', 'GET')", "(':scheme', 'https')", "(':path', '/simple/' + M)"),
        "empty": _one("*get('/simple/' + M, '')"),
    }, _PARTLY),
    *table("H20", "Pseudo fields", {
        "absolute-path": _one("*get('https://evil.test/simple/' + M)"),
        "user": _one("*get('/simple/' + M, 'index.test@evil.test')"),
        "scheme-http": _one("*get('/simple/' + M, scheme='http')"),
        "scheme-odd": _one("*get('/simple/' + M, scheme='gopher')"),
        "twice": _one("*get('/simple/' + M)", "(':path', '/upload')"),
        "unknown": _one("*get('/simple/' + M)", "(':evil', 'x')"),
        "late": _one("(':method', 'GET')", "('x', 'y')", "(':scheme', 'https')", "(':authority', 'index.test')", "(':path', '/simple/' + M)"),
        "no-path": _one("(':method', 'GET')", "(':scheme', 'https')", "(':authority', M + '.test')"),
        "empty-path": _one("*get('')", "('x-a', M)"),
        "star": _one("*get('*')", "('x-a', M)"),
        "connect": _one("(':method', 'CONNECT')", "(':authority', M + '.test:443')"),
        "extended-connect": _one("*get('/simple/' + M, method='CONNECT')", "(':protocol', 'websocket')"),
        "line-end-in-path": _one("*get('/simple/ HTTP/1.1\\r\\nHost: other.test\\r\\nX: ' + M)"),
        "line-end-in-field": _one("*get('/simple/')", "('x', 'y\\r\\nx-smuggled: ' + M)"),
        "line-end-in-name": _one("*get('/simple/')", "('x\\r\\ny', M)"),
        "upper-case": _one("*get('/simple/' + M)", "('X-Upper', 'y')"),
        "connection": _one("*get('/simple/' + M)", "('connection', 'x')"),
        "transfer-encoding": _one("*get('/simple/' + M, method='POST')", "('transfer-encoding', 'chunked')"),
        "dots": _one("*get('/simple/../' + M)"),
        "dots-encoded": _one("*get('/simple/%2e%2e/' + M)"),
        "space-in-path": _one("*get('/simple/ ' + M)"),
        "method-with-space": _one("*get('/simple/', method='GET /' + M)"),
    }, _PARTLY),
    *table("H21", "Fields without end", {
        "continuation": "h2(h2_request(1, *get('/simple/' + M))[:4] + b'\\1' + h2_request(1, *get('/simple/' + M))[5:], *[h2_frame(9, 0, 1, field('x', 'y' * 1000)) for _ in range(200)])",
        "list": "h2(h2_frame(1, 1, 1, b''.join(field(*one) for one in get('/simple/' + M))), *[h2_frame(9, 0, 1, field(f'x-{n}', 'y' * 12000)) for n in range(5)], h2_frame(9, 4, 1, field('x', 'y')))",
        "length-of-data": "h2(h2_request(1, *get('/simple/', method='POST'), ('content-length', '3'), end=False), h2_frame(0, 1, 1, B * 3))",
    }, _PARTLY),
    *table("H22", "Streams that are begun and dropped", {
        "rapid": "h2(*[h2_request(n, *get('/upload/' + M)) + h2_frame(3, 0, n, b'\\0\\0\\0\\x08') for n in range(1, 401, 2)])",
        "stream-0": "h2(h2_request(0, *get('/simple/' + M)))",
        "even": "h2(h2_request(2, *get('/simple/' + M)))",
        "backwards": "h2(h2_request(5, *get('/simple/')), h2_request(3, *get('/simple/' + M)))",
    }, _PARTLY),
)  # fmt: skip
