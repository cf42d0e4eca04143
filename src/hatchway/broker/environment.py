"""Environment variables that are secrets, on their way from who starts the service to the broker alone.

The roles are forked from one parent: what stands in its environment would stand in the memory of each of them, a gateway's among them. So
the parent, before anything else, moves those variables into a sealed file without a name and becomes a new program without them; the
descriptor goes to the broker.
"""

import fcntl
import os
import sys
from collections.abc import Iterable, Sequence

HANDED = "HATCHWAY_BROKER_ENVIRONMENT"
"""Names the descriptor to the new program."""
MAX_OCTETS = 1 << 20


def hand_over(names: Iterable[str], argv: Sequence[str] | None = None) -> int | None:
    """Returns the descriptor with the variables, or None where there are none; does not return where it has to become a new program first.

    Call it before the process has threads, children or files that matter: it may be replaced. `argv`: what it becomes; as it was started.
    """
    if (handed := os.environ.pop(HANDED, None)) is not None:
        os.set_inheritable(int(handed), False)
        return int(handed)
    there = [name for name in names if name in os.environ]
    if not there:
        return None
    fd = os.memfd_create("hatchway-broker-environment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        for name in there:
            file.write(os.fsencode(name) + b"=" + os.environb[os.fsencode(name)] + b"\0")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    os.set_inheritable(fd, True)
    left = {name: value for name, value in os.environ.items() if name not in there}
    program = list(argv or (sys.executable, *sys.orig_argv[1:]))
    return os.execve(program[0], program, {**left, HANDED: str(fd)})


def value(descriptor: int | None, name: str) -> bytes | None:
    """A variable from a descriptor of `hand_over`; without one from the process's own environment. None when it is not set."""
    wanted = os.fsencode(name)
    if descriptor is None:
        return os.environb.get(wanted)
    content = os.pread(descriptor, MAX_OCTETS, 0)
    for entry in content.split(b"\0"):
        found, equals, text = entry.partition(b"=")
        if equals and found == wanted:
            return text
    return None
