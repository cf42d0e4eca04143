"""Floods: what becomes of others while one guest has more of everything than anybody needs."""

from hatchway.redteam.attacks.attack import SOURCE, Attack, table

FLOOD = "flood"
"""The act: the host looks after another sandbox meanwhile."""

ATTACKS: tuple[Attack, ...] = (
    *table("N12", "A flood of strangers on the link", {"flood": "flood(M, strangers())"}, (SOURCE,), FLOOD),
    *table("N26", "Connections that are only begun", {
        "own-address": "begin_only(M, to('index.test', 443), others=False)",
        "addresses-of-others": "begin_only(M, to('index.test', 443), others=True)",
    }, (SOURCE,), FLOOD),
    *table("G10", "Connections without an end", {
        "kept": "flood(M, connecting(to('index.test', 443)))",
        "kept-in-clear": "flood(M, connecting(to('clear.test', 80), b'GET /simple/ HTTP/1.1\\r\\nHost: clear'))",
    }, (SOURCE,), FLOOD),
    *table("G08", "Denials without an end", {
        "connections": "flood(M, connecting(to('index.test', 443) if 'flooded' in facts else ('203.0.113.9', 80), kept=50))",
    }, (SOURCE,), FLOOD),
    *table("G11", "Work without an end", {
        "handshakes": "w = to('index.test', 443); flood(M, lambda: connecting(w, hellos('index.test'))())",
        "requests": "flood(M, connecting(to('clear.test', 80), b'GET /upload/x HTTP/1.1\\r\\nHost: clear.test\\r\\n\\r\\n' * 100))",
    }, (SOURCE,), FLOOD),
    *table("D21", "Questions without an end", {
        "below-an-allowed-name": "flood(M, asking('wild.test'))",
        "of-denied-names": "flood(M, asking('evil.test'))",
    }, (SOURCE,), FLOOD),
)  # fmt: skip
