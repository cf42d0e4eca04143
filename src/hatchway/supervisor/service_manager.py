"""Tells a service manager (systemd, with `Type=notify`) how the service is; without one, nothing.

The protocol is one datagram to the socket that NOTIFY_SOCKET names (sd_notify(3)); a library would bring no more than that.
"""

import contextlib
import os
import socket


def ready(status: str) -> None:
    """The service serves."""
    _tell(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")


def stopping() -> None:
    """The service is about to end."""
    _tell("STOPPING=1")


def alive() -> None:
    """The supervisor turns; the manager ends one that does not say so within WATCHDOG_USEC."""
    if _watchdog_s() is not None:
        _tell("WATCHDOG=1")


def interval_s(most: float) -> float:
    """How long may pass until `alive` is due again, in seconds, at most `most`."""
    watchdog = _watchdog_s()
    return most if watchdog is None else min(most, watchdog / 3)


def _watchdog_s() -> float | None:
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return (
        int(microseconds) / 1e6 if microseconds.isascii() and microseconds.isdecimal() and int(microseconds) else None
    )


def _tell(message: str) -> None:
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.sendto(message.encode(), "\0" + name[1:] if name.startswith("@") else name)
