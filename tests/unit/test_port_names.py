"""Names of ports, and what of a head goes through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.domain.errors import InvalidRequest, Misdirected
from hatchway.node.dataplane.ports.front import for_ports
from hatchway.node.dataplane.ports.heads import AmbiguousAnswer, answer_fields, request_fields, trailer_fields
from hatchway.node.dataplane.ports.names import Port, PortNames

ID = "a1" * 10
NAMES = PortNames(("localhost", "ports.example"))


@pytest.mark.parametrize(
    "host",
    [f"8000-{ID}.localhost", f"8000-{ID}.localhost:7071", f"8000-{ID}.Ports.Example:1", f"8000-{ID.upper()}.LOCALHOST"],
)
def test_names_of_ports(host: str) -> None:
    assert NAMES.parse(host) == Port(ID, 8000)
    assert NAMES.covers(host)


@pytest.mark.parametrize(
    "host",
    [
        "", "localhost", "ports.example", f"8000-{ID}.example", f"8000-{ID}", f"0-{ID}.localhost", f"65536-{ID}.localhost",
        f"08-{ID}.localhost", f"8000-{ID}b.localhost", f"8000-{ID}.localhost.", f"8000-{ID}.localhost:", f"8000-{ID}.localhost:x",
        f"8000-{ID}.localhost:7071:7071", f"x.8000-{ID}.localhost", f"u@8000-{ID}.localhost", f"8000-{ID}.localhost/",
        f"8000%2d{ID}.localhost", f"8000-{ID}.localhost\0", f"８000-{ID}.localhost", f"8000-{ID}.localhost.ports.example", f" 8000-{ID}.localhost",
    ],
)  # fmt: skip
def test_names_that_are_none(host: str) -> None:
    with pytest.raises(Misdirected):
        NAMES.parse(host)


def test_every_name_under_a_domain_is_the_ports() -> None:
    for host in ("x.localhost", "x.localhost.", "X.LOCALHOST:80", " a.b.ports.example "):
        assert NAMES.covers(host)
    for host in ("localhost", "127.0.0.1:7071", "notlocalhost", "localhost.example", "[::1]:7071", ""):
        assert not NAMES.covers(host)


@pytest.mark.parametrize("domain", ["", ".", "-a", "a-", "a..b", ".a", "a.", "A", "ä", "a b", "a:1", "*.a", "x" * 64])
def test_domains_that_are_none(domain: str) -> None:
    with pytest.raises(ValueError, match="no domain"):
        PortNames((domain,))


def test_where_ports_are() -> None:
    assert NAMES.url("http://127.0.0.1:7071") == "http://{port}-{sandbox}.localhost:7071/"
    assert PortNames(("ports.example",)).url("https://data.example") == "https://{port}-{sandbox}.ports.example/"
    assert PortNames(()).url("http://127.0.0.1:7071") == ""


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: x.localhost", True),
        (b"GET / HTTP/1.1\r\nA: b\r\nhost :x.localhost:1", True),
        (b"GET / HTTP/1.1\nHOST:\tx.localhost", True),
        (b"GET / HTTP/1.1\r\nHost: api.example\r\nHost: x.localhost", True),
        (b"GET http://x.localhost/ HTTP/1.1\r\nHost: api.example", True),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1", False),
        (b"GET / HTTP/1.1\r\nX-Host: x.localhost\r\nReferer: http://x.localhost/", False),
        (b"\x16\x03\x01", False),
    ],
)
def test_whose_a_connection_is(head: bytes, expected: bool) -> None:
    assert for_ports(head, NAMES) is expected


KEYS = (
    b"hw_" + b"a1" * 20,
    b"e2b_" + b"0f" * 24,
    b"E".lower() + b"2b_" + b"AB" * 20,
    b"Bearer hw_" + b"z" * 40,
    b" bearer  e2b_" + b"0" * 40 + b" ",
    b'"e2b_' + b"0" * 48 + b'"',
    b"mine, e2b_" + b"0" * 48,
)
NO_KEYS = (
    b"Bearer eyJhbGciOiJIUzI1NiJ9.e30.x",
    b"Basic dXNlcjpwYXNz",
    b"sk-123",
    b"e2b_added",
    b"hw_",
    b"a e2b_x",
    b"",
)
"""Of users' own."""


def fields_of(*raw: tuple[bytes, bytes], version: bytes = b"1.1") -> list[tuple[bytes, bytes]]:
    return request_fields(raw, http_version=version, peer="10.0.0.9", host=b"h", secure=True)


def test_a_body_has_one_length() -> None:
    chunked, measured = (b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"3")
    assert chunked in fields_of(chunked)
    assert measured in fields_of(measured)
    for raw, version in (((chunked, measured), b"1.1"), ((chunked,), b"1.0")):
        with pytest.raises(InvalidRequest, match="malformed_request"):
            fields_of(*raw, version=version)
        with pytest.raises(AmbiguousAnswer):
            answer_fields(raw, http_version=version)
    assert answer_fields((chunked,), http_version=b"1.1") == []


def test_connection_cannot_take_away_what_belongs_to_the_message() -> None:
    kept = fields_of(
        (b"Connection", b"Host, Content-Length, X, hatchway-token"),
        (b"Host", b"h"),
        (b"Content-Length", b"3"),
        (b"X", b"1"),
    )
    assert [name for name, _ in kept] == [
        b"Host",
        b"Content-Length",
        b"X-Forwarded-For",
        b"X-Forwarded-Host",
        b"X-Forwarded-Proto",
    ]


def test_what_belongs_to_a_connection_stays_there_however_it_is_written() -> None:
    """Programs that are told of fields by variables take `Transfer_Encoding` for `Transfer-Encoding`."""
    raw = [
        (b"Transfer_Encoding", b"chunked"),
        (b"keep_alive", b"1"),
        (b"Content-Length", b"5"),
        (b"Proxy_Connection", b"x"),
    ]
    assert [name for name, _ in fields_of(*raw)][:-3] == [b"Content-Length"]


def test_an_upgrade_is_one_without_a_body() -> None:
    asked = ((b"Connection", b"keep-alive, Upgrade"), (b"Upgrade", b"websocket"))
    assert (b"Upgrade", b"websocket") in fields_of(*asked)
    assert b"Upgrade" not in dict(fields_of(*asked, (b"Content-Length", b"3")))
    assert b"Upgrade" not in dict(fields_of(asked[1]))


names = st.sampled_from(
    [b"Hatchway-Token", b"hatchway_token", b"X-Forwarded-For", b"x_forwarded_for", b"Forwarded", b"X-Real-IP", b"Cookie", b"X", b"Connection", b"TE"]
)  # fmt: skip
values = st.sampled_from(
    [b"SECRET", b"a=1; hatchway-port=SECRET", b"hatchway-port = SECRET;b", b"__Host-hatchway-port=SECRET", b"X"]
)


@given(st.lists(st.tuples(names, values), max_size=12))
def test_neither_token_nor_what_the_client_claims_to_be_reaches_the_guest(raw: list[tuple[bytes, bytes]]) -> None:
    secretive = [
        (name, value)
        for name, value in raw
        if name not in (b"X", b"Connection") and (name == b"Cookie") == (b"=" in value)
    ]
    for name, value in fields_of(*secretive):
        assert b"SECRET" not in value
        assert name != b"X-Forwarded-For" or value == b"10.0.0.9"


@pytest.mark.parametrize("name", [b"X-API-KEY", b"Authorization", b"x_api_key", b"Anything"])
def test_an_api_key_does_not_reach_a_guest(name: bytes) -> None:
    for value in KEYS:
        assert name not in dict(fields_of((name, value))), value
        assert trailer_fields([(name, value)]) == []
    for value in NO_KEYS:
        assert (name, value) in fields_of((name, value))


def test_trailers_change_nothing_of_the_message() -> None:
    raw = [
        (b"X-Sum", b"1"),
        (b"Content-Length", b"9"),
        (b"Transfer-Encoding", b"x"),
        (b"Set-Cookie", b"a"),
        (b"Hatchway_Token", b"t"),
    ]
    assert trailer_fields(raw) == [(b"X-Sum", b"1")]
