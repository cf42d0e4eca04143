"""What is said late, or slowly."""

import contextlib
import signal
import socket
import time

from . import network
from .notes import tried

DEADLINE_S = 40
PATIENCE_S = 12


def deadline(seconds: int = DEADLINE_S) -> None:
    """The attempt is over in so many seconds from now."""
    signal.alarm(seconds)


def slowly(name: str, data: bytes, before: float = 0.0) -> None:
    """Sends to a site octet by octet, over TLS."""
    tried.append(f"slowly {name}")
    raw = socket.create_connection((network.addr(name), 443), timeout=20)
    with raw, network.context().wrap_socket(raw, server_hostname=name) as sock:
        sock.settimeout(network.QUIET_S)
        time.sleep(before)
        for at in range(len(data)):
            sock.sendall(data[at : at + 1])
            time.sleep(0.05)
        network._answer(sock)


def silent(where: str, port: int, data: bytes) -> None:
    """Waits for the other side to speak first, and then says something."""
    tried.append(f"silent {where}:{port}")
    with socket.create_connection((where, port), timeout=20) as sock:
        sock.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):
            sock.recv(100)
        sock.settimeout(network.QUIET_S)
        sock.sendall(data)
        network._answer(sock)
