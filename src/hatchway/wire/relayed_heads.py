"""What every relay of ours does with the heads of requests to ports of sandboxes, and of their answers. Pure; each adds what it alone reads."""

from collections.abc import Sequence

Fields = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""What is about one connection, in lower case (RFC 9110, 7.6.1); who carries no trailers or interim answers ends `Trailer` and `Expect` too."""
ABOUT_THE_CLIENT = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-proto",
        b"x-forwarded-server",
        b"x-real-ip",
    }
)
"""What a guest is told of the client comes from us alone. To be compared with `-` for `_`: servers take one for the other."""
END_TO_END = frozenset({b"host", b"content-length", b"cookie", b"set-cookie"})
"""Not to be removed by naming them in `Connection`."""


def listed(lower: Fields, wanted: bytes) -> set[bytes]:
    """What a field has, as a list; names of `lower` are in lower case."""
    return {one.strip().lower() for name, value in lower if name == wanted for one in value.split(b",")} - {b""}


def nominated(lower: Fields) -> set[bytes]:
    """What `Connection` says is about this connection alone."""
    return listed(lower, b"connection") - END_TO_END


def of_the_client(peer: str, host: bytes, *, secure: bool) -> list[tuple[bytes, bytes]]:
    """What a guest is told of the client: its address, the `Host` that it wrote, and whether it came over TLS."""
    return [
        (b"X-Forwarded-For", peer.encode("ascii", "replace")),
        (b"X-Forwarded-Host", host),
        (b"X-Forwarded-Proto", b"https" if secure else b"http"),
    ]


def without_domain(cookie: bytes) -> bytes:
    """A `Set-Cookie` for the port's own name alone, whatever domain the guest asks for: other sandboxes have names under the same one."""
    pair, *attributes = cookie.split(b";")
    kept = [one for one in attributes if one.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join([pair, *kept])
