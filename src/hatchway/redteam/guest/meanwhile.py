"""Attempts in which the host does something meanwhile, and floods: what is before and after is the same script.

The host and the script tell each other by files in `facts["place"]`: `held-MARK-STEP` says that the script waits, `go-STEP` that it may go on.
"""

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import network
from .notes import facts, held, tried

DEADLINE_S = 40
PATIENCE_S = 12
HOLD_S = 500
OPENED_WITHIN_S = 90


def deadline(seconds: int = DEADLINE_S) -> None:
    """The attempt is over in so many seconds from now."""
    signal.alarm(seconds)


def _file(name: str) -> Path:
    return Path(facts["place"]) / name


def hold(mark: str, step: str = "go") -> None:
    """Waits until the host has done what it does."""
    held.append(step)
    deadline(HOLD_S)
    _file(f"held-{mark}-{step}").touch()
    while not _file(f"go-{step}").exists():
        time.sleep(0.3)
    held.clear()
    deadline()


def until(mark: str, attempt: Callable[[], Any], step: str = "go") -> None:
    """Makes an attempt again and again while the host does what it does, and once more when that is done."""
    held.append(step)
    deadline(HOLD_S)
    over = False
    while not over:
        over = _file(f"go-{step}").exists()
        with contextlib.suppress(OSError):
            attempt()
        _file(f"held-{mark}-{step}").touch()
        time.sleep(0.5)
    held.clear()
    deadline()


def tries(*attempts: Callable[[], Any]) -> None:
    """Makes attempts one after the other, whatever becomes of each."""
    for one in attempts:
        with contextlib.suppress(OSError):
            one()


def opened(name: str, port: int = 443, *, secured: bool = True, alpn: list[str] | None = None) -> socket.socket:
    """A connection to a site, which stays open. Raises `LookupError` where it cannot be had."""
    tried.append(f"open {name}:{port}")
    deadline(HOLD_S)
    try:
        raw = socket.create_connection((network.addr(name), port), timeout=OPENED_WITHIN_S)
        sock = network.context(alpn).wrap_socket(raw, server_hostname=name) if secured else raw
    except OSError as error:
        raise LookupError(f"what is allowed was refused before: {error!r}") from error
    sock.settimeout(network.QUIET_S)
    return sock


def alive(sock: socket.socket, data: bytes) -> None:
    """Sends what is allowed. Raises `LookupError` where that is not answered: what is refused later would say nothing."""
    sock.settimeout(OPENED_WITHIN_S)
    try:
        sock.sendall(data)
        answered = bool(network._answer(sock))
    except OSError:
        answered = False
    if not answered:
        raise LookupError("what is allowed was not answered before")
    sock.settimeout(network.QUIET_S)


def late(sock: socket.socket, data: bytes) -> None:
    """Sends on a connection that was open before."""
    with contextlib.suppress(OSError):
        for _ in range(3):
            sock.sendall(data)
            network._answer(sock)


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
