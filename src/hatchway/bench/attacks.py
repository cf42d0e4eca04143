"""What a hostile guest does: small programs for a sandbox, that say `on` on standard error once they are in effect.

Used by `hatchway bench hostile` and by the tests in tests/adversarial.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hatchway.client import Sandbox, Session

WITHIN_S = 120.0
"""How long an attack may take until it is in effect: software emulation makes ten thousand files in seconds."""

_FORK_BOMB = """
import os, sys
told = False
while True:
    try:
        if os.fork() == 0:
            told = True
    except OSError:
        if not told:
            told = True
            os.write(2, b"on\\n")
"""
_MEMORY = """
import os
kept = []
while True:
    kept.append(bytearray(b"x") * (1 << 20))
    if len(kept) == 48:
        os.write(2, b"on\\n")
"""
_DISK = """
import os
path = os.path.expanduser("~/fill")
file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
room = os.fstatvfs(file)
most = room.f_bavail * room.f_frsize - (8 << 20)
if most > 0:  # most of it at once: the octets of it are not the matter
    os.posix_fallocate(file, 0, most)
    os.lseek(file, 0, os.SEEK_END)
told = False
while True:
    try:
        os.write(file, b"x" * (1 << 16))
    except OSError:
        if not told:
            told = True
            os.write(2, b"on\\n")
"""
_FILES = """
import os
folder = os.path.expanduser("~/many")
os.mkdir(folder)
for number in range(100_000):
    os.close(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT, 0o600))
    if number == 2_000:
        os.write(2, b"on\\n")
"""
_CONNECTIONS = """
import os, socket, time
reading, writing = os.pipe()
for _ in range(13):
    if os.fork() == 0:
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        kept = []
        for _ in range(400):
            kept.append(socket.create_connection(listener.getsockname()))
            kept.append(listener.accept()[0])
        os.write(writing, b"x")
        time.sleep(3600)
had = 0
while had < 13:
    had += len(os.read(reading, 13))
os.write(2, b"on\\n")
time.sleep(3600)
"""
_CPU = "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; echo on >&2; wait"
_OUTPUT = "echo on >&2; exec cat /dev/zero"
_CONSOLE = "echo on >&2; while :; do head -c 1000000 /dev/zero | tr '\\0' x > /dev/ttyS0; done"


def _python(program: str) -> tuple[str, ...]:
    return ("/usr/bin/python3", "-c", program)


@dataclass(frozen=True)
class Attack:
    """One of them. `of_root`: only the administrator of the guest can do it."""

    name: str
    argv: tuple[str, ...]
    of_root: bool = False


ATTACKS: tuple[Attack, ...] = (
    Attack("fork_bomb", _python(_FORK_BOMB)),
    Attack("cpu_hogs", ("/bin/sh", "-c", _CPU)),
    Attack("memory_hog", _python(_MEMORY)),
    Attack("output_flood", ("/bin/sh", "-c", _OUTPUT)),
    Attack("many_connections", _python(_CONNECTIONS)),
    Attack("many_files", _python(_FILES)),
    Attack("full_disk", _python(_DISK)),
    Attack("console_flood", ("/bin/sh", "-c", _CONSOLE), of_root=True),
)


def begin(sandbox: Sandbox, attack: Attack, user: str) -> Session:
    """Starts an attack and returns when it is in effect (or over, where it was stopped by a bound). Raises `TimeoutError`."""
    session = sandbox.start(attack.argv, user=user, stdin=False)
    try:
        for octets in session.output("stderr"):
            if b"on" in octets:
                break
    finally:
        session.close()
    return session


def wait_for(what: str, condition: Callable[[], bool], within: float = WITHIN_S) -> None:
    """Looks again and again. Raises `TimeoutError` that says what did not happen."""
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not happen within {within:g} s")
        time.sleep(0.02)


def is_over(session: Session) -> bool:
    """Whether its leader is gone."""
    return session.refresh().state in ("exited", "ended")
