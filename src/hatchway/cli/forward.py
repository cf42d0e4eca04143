"""`hatchway forward`: ports of a sandbox on this machine, until a signal ends it."""

import contextlib
import signal
import threading

from hatchway.client import HatchwayError, InvalidRequest

from .front import Front, show
from .interrupts import Interrupted, Interrupts
from .output import print_json


def ports_of(text: str) -> tuple[int, int]:
    """Reads `LOCAL:REMOTE`, or one number for both."""
    local, colon, remote = text.partition(":")
    found = [
        part for part in (local, remote if colon else local) if part.isascii() and part.isdecimal() and len(part) <= 5
    ]
    if len(found) != 2:
        raise InvalidRequest("bad_port", f"{text!r} is no LOCAL:REMOTE.", "Give two numbers of ports, or one for both.")
    return int(found[0]), int(found[1])


def run_forward(front: Front, sandbox_id: str, texts: list[str], *, host: str) -> int:
    """Listens until a signal comes; returns the exit status that says which."""
    pairs = [ports_of(text) for text in texts]
    said = threading.Lock()

    def tell(error: HatchwayError) -> None:
        with said:
            show(error.as_dict(), front.json)

    with Interrupts() as interrupts, contextlib.ExitStack() as opened:
        try:
            sandbox = front.client.sandboxes.get(sandbox_id)
            sandbox.port_url(1)  # whether it can be reached at all
            listeners = [
                opened.enter_context(sandbox.forward(local, remote, host=host, on_error=tell))
                for local, remote in pairs
            ]
            remotes = [remote for _local, remote in pairs]
            if front.json:
                listed = zip(listeners, remotes, strict=True)
                print_json([{"host": one.host, "local": one.port, "remote": remote} for one, remote in listed])
            else:
                for one, remote in zip(listeners, remotes, strict=True):
                    print(f"{one.host}:{one.port} -> {sandbox_id}:{remote}", flush=True)
            while True:
                signal.pause()
        except Interrupted as error:
            interrupts.clean_up("nothing")
            return error.status
