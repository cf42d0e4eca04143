"""Reads the first record of a TLS connection, to learn the name that the client wants before anything is answered.

Pure: octets in, `ClientHello` out; `Malformed` for all that a strict reader would not let pass. TLS libraries are lenient here (they take an
empty name or an address for a host name) and do not tell a name at all when an old session is resumed; the decision rests on this reader.
Sources: RFC 8446 §4.1.2 (layout, legacy_version), RFC 6066 §3 (server_name), RFC 7301 (ALPN), RFC 9849 (Encrypted ClientHello).
"""

from dataclasses import dataclass

from hatchway.domain.policy.names import NameRefused, canonical_host

MAX_HELLO = 16 * 1024
"""Octets of all that may come until the ClientHello is complete."""

_HANDSHAKE = 22
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_ALPN = 16
_EARLY_DATA = 42
_SUPPORTED_VERSIONS = 43
_ECH = 0xFE0D


class Malformed(ValueError):
    """This is no ClientHello that is let pass. `reason` is a stable code: `not_tls hello_malformed hello_too_large sni_malformed sni_multiple`."""

    def __init__(self, reason: str, explanation: str) -> None:
        super().__init__(f"{reason}: {explanation}")
        self.reason = reason
        self.explanation = explanation


@dataclass(frozen=True)
class ClientHello:
    """What matters of it."""

    server_name: str | None
    """In lower case and without a dot at the end; None where the client named none."""
    alpn: tuple[str, ...]
    tls13: bool
    """It offers TLS 1.3."""
    ech: bool
    """It carries an Encrypted ClientHello, real or as grease."""
    early_data: bool
    session: bool
    """It has a session id or ticket of before (in TLS 1.3 also for compatibility)."""


def parse(data: bytes) -> ClientHello | None:
    """Returns the ClientHello at the beginning of `data`, or None when more octets are needed. Raises `Malformed`."""
    return HelloReader().feed(data)


class HelloReader:
    """Puts the ClientHello together from records that come in pieces; each octet is looked at once, however small the pieces are."""

    def __init__(self) -> None:
        self._data = bytearray()
        """What belongs to no complete record yet."""
        self._message = bytearray()
        self._taken = 0

    def feed(self, data: bytes) -> ClientHello | None:
        """Takes further octets; returns the ClientHello when it is complete. Raises `Malformed`, and is of no use any more then."""
        self._data += data
        at = 0
        while True:
            length = _record_length(self._data, at, first=self._taken == 0)
            if length is None:
                break
            if self._taken + 5 + length > MAX_HELLO:
                raise Malformed("hello_too_large", f"the ClientHello is larger than {MAX_HELLO} octets")
            if len(self._data) < at + 5 + length:
                break
            self._message += self._data[at + 5 : at + 5 + length]
            self._taken += 5 + length
            at += 5 + length
            if self._is_complete():
                return _client_hello(_Reader(bytes(self._message[4:])))
        del self._data[:at]
        return None

    def _is_complete(self) -> bool:
        message = self._message
        if message[0] != _CLIENT_HELLO:
            raise Malformed("hello_malformed", "the first handshake message is no ClientHello")
        if len(message) < 4:
            return False
        length = int.from_bytes(message[1:4], "big")
        if length + 4 > MAX_HELLO:
            raise Malformed("hello_too_large", f"the ClientHello is larger than {MAX_HELLO} octets")
        if len(message) > length + 4:
            raise Malformed("hello_malformed", "something follows the ClientHello before it was answered")
        return len(message) == length + 4


def _record_length(data: bytearray, at: int, *, first: bool) -> int | None:
    """Checks as much of a record's head as is there; returns the length that it says, None while it is not there."""
    head = data[at : at + 5]
    if head[:1] and head[0] != _HANDSHAKE:
        raise Malformed("not_tls" if first else "hello_malformed", "this is no TLS handshake")
    if head[1:2] and head[1] != 3:
        raise Malformed("not_tls" if first else "hello_malformed", "this is no version of TLS")
    if len(head) < 5:
        return None
    length = int.from_bytes(head[3:5], "big")
    if not 0 < length <= 2**14:
        raise Malformed("hello_malformed", "a record of no octets, or of more than TLS allows")
    return length


class _Reader:
    """Octets with lengths before them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Malformed("hello_malformed", "a length goes beyond what contains it")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Reader":
        return _Reader(self.take(self.number(size)))

    def end(self) -> None:
        if self.left:
            raise Malformed("hello_malformed", "octets are left over")


def _client_hello(reader: _Reader) -> ClientHello:
    if reader.number(2) not in (0x0301, 0x0302, 0x0303):
        raise Malformed("hello_malformed", "the version of the ClientHello is none of TLS 1.0 to 1.3")
    reader.take(32)
    session_id = reader.vector(1)
    if session_id.left > 32:
        raise Malformed("hello_malformed", "the session id is longer than 32 octets")
    suites = reader.vector(2)
    if suites.left < 2 or suites.left % 2:
        raise Malformed("hello_malformed", "the list of cipher suites is empty or uneven")
    if b"\x00" not in (methods := reader.vector(1)).take(methods.left):
        raise Malformed("hello_malformed", "no compression is not among the compressions")
    extensions: dict[int, _Reader] = {}
    if reader.left:
        block = reader.vector(2)
        reader.end()
        while block.left:
            kind = block.number(2)
            if kind in extensions:
                raise Malformed(
                    "sni_multiple" if kind == _SERVER_NAME else "hello_malformed", f"the extension {kind} comes twice"
                )
            extensions[kind] = block.vector(2)
    versions = extensions.get(_SUPPORTED_VERSIONS)
    return ClientHello(
        server_name=_server_name(extensions[_SERVER_NAME]) if _SERVER_NAME in extensions else None,
        alpn=_alpn(extensions[_ALPN]) if _ALPN in extensions else (),
        tls13=versions is not None and _offers_13(versions),
        ech=_ECH in extensions,
        early_data=_EARLY_DATA in extensions,
        session=session_id.left > 0,
    )


def _offers_13(extension: _Reader) -> bool:
    versions = extension.vector(1)
    extension.end()
    if versions.left < 2 or versions.left % 2:
        raise Malformed("hello_malformed", "the list of versions is empty or uneven")
    found = False
    while versions.left:
        found |= versions.number(2) == 0x0304
    return found


def _server_name(extension: _Reader) -> str:
    names = extension.vector(2)
    extension.end()
    if not names.left:
        raise Malformed("sni_malformed", "the list of server names is empty")
    if names.number(1) != 0:
        raise Malformed("sni_malformed", "a server name of an unknown kind")
    name = names.vector(2)
    if names.left:
        raise Malformed("sni_multiple", "there is more than one server name")
    return host_name(name.take(name.left))


def host_name(name: bytes) -> str:
    """Returns a name as it came on the wire in its canonical form, that of policies. Raises `Malformed("sni_malformed")`.

    An address is no name; neither is anything with an octet that no host name has.
    """
    try:
        return canonical_host(name.decode("ascii"))
    except (NameRefused, UnicodeDecodeError) as error:
        why = error.cause if isinstance(error, NameRefused) else "it has characters beyond ASCII"
        raise Malformed("sni_malformed", f"the server name is no host name: {why}") from None


def _alpn(extension: _Reader) -> tuple[str, ...]:
    protocols = extension.vector(2)
    extension.end()
    found: list[str] = []
    while protocols.left:
        name = protocols.vector(1)
        if not name.left:
            raise Malformed("hello_malformed", "an application protocol without a name")
        found.append(name.take(name.left).decode("latin-1"))
    return tuple(found)
