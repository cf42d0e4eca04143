"""Secrets of files and environment variables, on their way from who starts the service to the one role that needs them.

The roles are forked from one parent: whatever it has in its memory, or had, each of them has, a gateway among them. So the parent never has
one. A file is copied within the kernel into a sealed file without a name, whose descriptor goes to the role, which reads it when it is of
its own. What stands in the environment is moved into such a file before anything else, and the process becomes a new program without it.
"""

import fcntl
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

MAX_OCTETS = 1 << 20

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def hand_over(wanted: Mapping[str, Iterable[str]], argv: Sequence[str] | None = None) -> dict[str, int]:
    """Takes variables out of the environment. `wanted`: by the variable that names the descriptor to the new program, those that go into one file.

    Returns the descriptors of what was there; does not return where it has to become a new program first. Call it before the process has
    threads, children or files that matter: it may be replaced. `argv`: what it becomes; as it was started.
    """
    handed = {name: int(told) for name in wanted if (told := os.environ.pop(name, None)) is not None}
    for fd in handed.values():
        os.set_inheritable(fd, False)
    if handed:
        return handed
    there = {name: [one for one in variables if one in os.environ] for name, variables in wanted.items()}
    there = {name: variables for name, variables in there.items() if variables}
    if not there:
        return {}
    left = dict(os.environ)
    for name, variables in there.items():
        fd = os.memfd_create("hatchway-environment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(fd), "wb") as file:
            for variable in variables:
                file.write(os.fsencode(variable) + b"=" + os.environb[os.fsencode(variable)] + b"\0")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.set_inheritable(fd, True)
        left[name] = str(fd)
    for variable in {one for variables in there.values() for one in variables}:
        left.pop(variable, None)
    program = list(argv or (sys.executable, *sys.orig_argv[1:]))
    return os.execve(program[0], program, left)


def value(descriptor: int | None, name: str) -> bytes | None:
    """A variable from a descriptor of `hand_over`; without one from the process's own environment. None when it is not set."""
    wanted = os.fsencode(name)
    if descriptor is None:
        return os.environb.get(wanted)
    for entry in content(descriptor).split(b"\0"):
        found, equals, text = entry.partition(b"=")
        if equals and found == wanted:
            return text
    return None


def seal(file: int) -> int:
    """Copies an open file, from its beginning, into a sealed one without a name; returns its descriptor. No octet comes into this process.

    Raises `OSError`, and `ValueError` for a file of more than `MAX_OCTETS`.
    """
    fd = os.memfd_create("hatchway-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        while sent := os.sendfile(fd, file, offset, MAX_OCTETS + 1 - offset):
            offset += sent
            if offset > MAX_OCTETS:
                raise ValueError(f"it has more than {MAX_OCTETS} octets")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def content(descriptor: int) -> bytes:
    """What is in a sealed file."""
    return os.pread(descriptor, MAX_OCTETS, 0)


def path_of(descriptor: int) -> str:
    """A name under which this process can open a sealed file, for libraries that want one."""
    return f"/proc/self/fd/{descriptor}"
