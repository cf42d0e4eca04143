"""Runs attempts.

Standard input is one JSON object: `facts` about the ground, and `attempts` with a script and a marker each. Every attempt is a process of
its own with a deadline; what it tried, and what went wrong with it, is printed as one JSON object each.
"""

import errno
import json
import os
import re
import signal
import socket
import ssl
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from . import floods, frames, impostor, machine, meanwhile, network
from .notes import facts, held, said, tried

AT_ONCE = 6
CANNOT = {errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENODEV}
"""Errors that say that an attempt could not be made. EACCES is what a broadcast without its option gets."""


def _words() -> dict[str, Any]:
    """What a script may call."""
    found: dict[str, Any] = {"re": re, "tarfile": tarfile, "frames": frames}
    for module in (network, machine, meanwhile, impostor, floods):
        found.update(vars(module))
    return found


def _attempt(script: str, mark: str) -> dict[str, Any]:
    meanwhile.deadline()
    why = ""
    try:
        exec(compile(script, "attack", "exec"), {**_words(), "M": mark, "B": mark.encode()})
    except (ssl.SSLError, TimeoutError, EOFError):
        pass
    except OSError as error:
        if error.errno in CANNOT:
            why = repr(error)
    except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError) as error:
        why = repr(error)
    if not tried:
        why = why or "nothing was tried"
    return {"tried": tried, "said": said, "why": why}


def _child(attempt: dict[str, Any], path: str) -> None:
    def late(*_: object) -> None:
        why = "" if tried else "it took too long"
        if held:
            why = f"it waited for {held[0]!r} in vain"
        Path(path).write_text(json.dumps({"tried": tried, "said": said, "why": why}))
        os._exit(0)

    signal.signal(signal.SIGALRM, late)
    try:
        found = _attempt(attempt["script"], attempt["mark"])
        signal.alarm(0)
        Path(path).write_text(json.dumps(found))
    finally:
        os._exit(0)  # whatever it died of: the loop that made it is another process's


def listen() -> None:
    """Prints each marker that is in a frame of this machine's, until it is ended. It begins with one of its own, which shows that it hears."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.sendto(sys.argv[2].encode(), (network.GATEWAY, 9))
        while True:
            for found in re.findall(rb"hx[0-9a-f]{12}z", sock.recv(65536).lower()):
                print(found.decode(), flush=True)


def main() -> None:
    """Runs all attempts, `at_once` at a time."""
    if sys.argv[1:2] == ["listen"]:
        listen()
    given = json.load(sys.stdin)
    facts.update(given["facts"])
    at_once = given.get("at_once") or AT_ONCE
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, str] = {}
        waiting = list(enumerate(given["attempts"]))
        while waiting or running:
            while waiting and len(running) < at_once:
                number, attempt = waiting.pop(0)
                path = f"{folder}/{number}"
                if not (pid := os.fork()):
                    _child(attempt, path)
                running[pid] = f"{attempt['mark']} {path}"
            pid, _ = os.wait()
            mark, _, path = running.pop(pid, " ").partition(" ")
            try:
                found = json.loads(Path(path).read_text())
            except (OSError, ValueError):
                found = {"tried": [], "said": [], "why": "its process died"}
            print(json.dumps({"mark": mark, **found}), flush=True)
