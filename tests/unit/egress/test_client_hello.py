"""The reader of the ClientHello: what it takes is what OpenSSL sends; what is not one plain name is refused, whatever OpenSSL would do."""

import contextlib
import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.egress.client_hello import MAX_HELLO, ClientHello, HelloReader, Malformed, parse


def _vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size, "big") + data


def _names(*names: bytes, kind: int = 0) -> bytes:
    return _vector(2, b"".join(bytes((kind,)) + _vector(2, name) for name in names))


def _hello(*extensions: tuple[int, bytes], version: int = 0x0303, session: bytes = b"", tail: bytes = b"") -> bytes:
    body = struct.pack(">H", version) + bytes(32) + _vector(1, session) + _vector(2, b"\x13\x01") + _vector(1, b"\x00")
    if extensions:
        body += _vector(2, b"".join(struct.pack(">H", kind) + _vector(2, data) for kind, data in extensions))
    return b"\x01" + _vector(3, body + tail)


def _records(message: bytes, *sizes: int) -> bytes:
    parts = []
    for size in sizes:
        parts.append(message[:size])
        message = message[size:]
    parts.append(message)
    return b"".join(b"\x16\x03\x01" + _vector(2, part) for part in parts if part)


def _real(name: str | None = "index.example", *, alpn: list[str] | None = None, tls12: bool = False) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols(alpn)
    if tls12:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def _parsed(data: bytes) -> ClientHello:
    hello = parse(data)
    assert hello is not None
    return hello


def _reason(data: bytes) -> str:
    with pytest.raises(Malformed) as caught:
        parse(data)
    return caught.value.reason


def test_what_openssl_sends_is_read():
    hello = _parsed(_real(alpn=["h2", "http/1.1"]))
    assert hello == ClientHello(
        "index.example", ("h2", "http/1.1"), tls13=True, ech=False, early_data=False, session=True
    )
    assert _parsed(_real(tls12=True)).tls13 is False


def test_it_waits_for_all_of_it_and_not_longer():
    data = _real()
    for end in range(len(data)):
        assert parse(data[:end]) is None
    assert parse(data) is not None


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 1), (10, 20, 30), (4,)])
def test_a_message_in_several_records_is_put_together(sizes):
    message = _hello((0, _names(b"index.example")))
    data = _records(message, *sizes)
    assert _parsed(data).server_name == "index.example"
    for end in range(len(data)):
        assert parse(data[:end]) is None


def test_t01_a_hello_without_a_name_says_so():
    assert _parsed(_real(None)).server_name is None
    assert _parsed(_records(_hello())).server_name is None


@pytest.mark.parametrize("name", [b"Index.EXAMPLE", b"index.example.", b"INDEX.example."])
def test_t06_case_and_one_dot_at_the_end_do_not_matter(name):
    assert _parsed(_records(_hello((0, _names(name))))).server_name == "index.example"


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b".",
        b"index.example..",
        b"index..example",
        b".index.example",
        b"index\x00.example",
        b"index.example\x00",
        b"\xc3\xadndex.example",
        b"index.example\n",
        b"a" * 64 + b".example",
        b".".join([b"a" * 60] * 5),
        b"127.0.0.1",
        b"::1",
        b"[::1]",
        b"2130706433",
        b"index.0x7f",
        b"-index.example",
        b"index_.example",
        b"*.example",
        b"user@index.example",
        b"index.example:443",
    ],
)
def test_t07_odd_names_are_no_names(name):
    assert _reason(_records(_hello((0, _names(name))))) == "sni_malformed"


def test_t08_two_names_are_refused_even_when_they_are_the_same():
    assert _reason(_records(_hello((0, _names(b"index.example", b"other.example"))))) == "sni_multiple"
    assert _reason(_records(_hello((0, _names(b"index.example", b"index.example"))))) == "sni_multiple"
    twice = ((0, _names(b"index.example")), (0, _names(b"other.example")))
    assert _reason(_records(_hello(*twice))) == "sni_multiple"
    assert _reason(_records(_hello((0, _names(b"index.example", kind=1))))) == "sni_malformed"
    assert _reason(_records(_hello((0, b"\x00\x00")))) == "sni_malformed"


def test_t10_encrypted_hello_is_seen():
    assert _parsed(_records(_hello((0, _names(b"index.example")), (0xFE0D, b"\x00" * 40)))).ech is True


def test_t13_early_data_is_seen():
    assert _parsed(_records(_hello((0, _names(b"index.example")), (42, b"")))).early_data is True


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-x\r\n", b"GET / HTTP/1.1\r\n", b"\x80\x2e\x01\x03\x01", b"\x15\x03\x01\x00\x02\x02\x28", b"\x16\x02"],
)
def test_t15_other_protocols_are_told_from_tls(data):
    assert _reason(data) == "not_tls"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x40\x01",
        _records(b"\x02" + _vector(3, bytes(40))),
        _records(_hello((0, _names(b"index.example"))) + b"\x01"),
        _records(_hello((0, _names(b"index.example")), tail=b"\x00")),
        _records(_hello(version=0x0304)),
        _records(_hello(version=0x0300)),
        _records(_hello((0, _names(b"index.example") + b"\x00"))),
        _records(_hello(session=bytes(33))),
        _records(_hello((43, b"\x00"), (0, _names(b"index.example")))),
        _records(_hello((16, _vector(2, b"\x00")))),
        _records(_hello((10, b""), (10, b""))),
        _records(_hello(), 5) + b"\x17\x03\x03\x00\x01a",
    ],
)
def test_what_is_malformed_is_refused(data):
    parse_reason = None
    try:
        assert parse(data) is not None
    except Malformed as error:
        parse_reason = error.reason
    if data.endswith(b"\x17\x03\x03\x00\x01a"):
        assert parse_reason is None, "what follows a complete ClientHello in another record is not its business"
    else:
        assert parse_reason == "hello_malformed"


def test_its_size_is_bounded():
    big = _hello((0, _names(b"index.example")), (21, bytes(MAX_HELLO)))
    assert _reason(_records(big, 8000)) == "hello_too_large"
    many = b"".join(b"\x16\x03\x01\x00\x01" + bytes((octet,)) for octet in _hello((21, bytes(4000))))
    assert _reason(many) == "hello_too_large"


def test_g11_pieces_of_one_octet_cost_what_the_octets_cost():
    """One octet in each record, one octet at a time: every octet is read once."""
    message = _hello((0, _names(b"index.example")), (21, bytes(2000)))
    data = b"".join(b"\x16\x03\x01\x00\x01" + bytes((octet,)) for octet in message)
    reader = HelloReader()
    found = None
    for octet in data:
        assert found is None
        found = reader.feed(bytes((octet,)))
        assert len(reader._data) <= 6
    assert found is not None
    assert found.server_name == "index.example"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_read_or_refused(data):
    try:
        parse(b"\x16\x03\x01" + data)
    except Malformed:
        return


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_hello_is_read_by_openssl_with_the_same_name_or_refused_here(data):
    """OpenSSL is what answers in the end: whatever name it finds is the one that was decided on, where this reader let it pass."""
    octets = bytearray(_HELLO)
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(5, len(octets) - 1))] = data.draw(st.integers(0, 255))
    try:
        hello = parse(bytes(octets))
    except Malformed:
        return
    if hello is None:
        return
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda sock, name, ctx: seen.append(name)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(bytes(octets))
    with contextlib.suppress(ssl.SSLError):
        server.do_handshake()
    if seen and seen[0] is not None:
        assert seen[0].lower().removesuffix(".") == hello.server_name


_HELLO = _real()
