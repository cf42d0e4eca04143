"""What a `StartVm` may say. Everything here is about numbers and forms; no path of the request is ever followed."""

import os
import stat

from hatchway.domain.ids import is_id
from hatchway.domain.shapes import MAX_DISK_MIB, MAX_MEMORY_MIB, MAX_VCPUS
from hatchway.launcher.errors import Refused
from hatchway.wire.launcher import StartVm

MAX_ARGUMENTS = 512
MAX_DESCRIPTORS = 81
LOWEST_TARGET, HIGHEST_TARGET = 20, 99
MAX_GENERATION = 2**53
MIN_LIMIT_MIB = 16
MAX_RATE = 2**40


def _require(good: bool, message: str) -> None:
    if not good:
        raise Refused("invalid", message)


def check_id(sandbox_id: str) -> None:
    """Raises `Refused` for what is not an id."""
    _require(is_id(sandbox_id), "sandbox_id: not an id")


def check_start(request: StartVm, fds: list[int], owners: tuple[int, ...]) -> None:
    """Raises `Refused` for a start that may not be; `owners` are the uids that a jail's root folder may belong to."""
    check_id(request.sandbox_id)
    _require(0 <= request.generation <= MAX_GENERATION, "generation: out of range")
    _require(1 <= len(request.argv) <= MAX_ARGUMENTS, f"argv: from 1 to {MAX_ARGUMENTS} arguments")
    _require(request.argv[0].startswith("/"), "argv: the program is an absolute path in the jail")
    _require(not any("\0" in word for word in request.argv), "argv: NUL in an argument")
    _require(len(request.env) <= MAX_ARGUMENTS, f"env: at most {MAX_ARGUMENTS} variables")
    for name, value in request.env.items():
        _require(bool(name) and "=" not in name and "\0" not in name + value, "env: not a variable")
    _require(1 <= request.vcpus <= MAX_VCPUS, f"vcpus: from 1 to {MAX_VCPUS}")
    _require(MIN_LIMIT_MIB <= request.memory_limit_mib <= 2 * MAX_MEMORY_MIB, "memory_limit_mib: out of range")
    _require(1 <= request.disk_limit_mib <= 2 * MAX_DISK_MIB, "disk_limit_mib: out of range")
    _require(0 <= request.io_bps <= MAX_RATE and 0 <= request.io_iops <= MAX_RATE, "io_bps, io_iops: out of range")
    _require(len(fds) == len(request.pass_as) + 1, "pass_as: one number for each descriptor after the first")
    _require(len(fds) <= MAX_DESCRIPTORS, f"at most {MAX_DESCRIPTORS} descriptors")
    _require(len(set(request.pass_as)) == len(request.pass_as), "pass_as: a number twice")
    for number in request.pass_as:
        _require(LOWEST_TARGET <= number <= HIGHEST_TARGET, f"pass_as: from {LOWEST_TARGET} to {HIGHEST_TARGET}")
    root = os.fstat(fds[0])
    _require(stat.S_ISDIR(root.st_mode), "the first descriptor is the jail's root folder")
    if root.st_uid not in owners or root.st_mode & 0o022:
        raise Refused(
            "denied",
            "the jail's root folder belongs to somebody else, or others can write it",
            "chown it to the node's user or root, and chmod go-w",
        )
    for fd in fds[1:]:
        # A folder would lead out of the jail, a device to the host.
        mode = os.fstat(fd).st_mode
        _require(
            stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode), "only files, pipes and sockets are passed"
        )


def reopen_root(fd: int) -> int:
    """Returns the same folder, opened in the launcher's own mount namespace, which alone the jail can be cloned from.

    The path is a hint: what it leads to counts only if it is the very folder that was passed.
    """
    before = os.fstat(fd)
    try:
        again = os.open(os.readlink(f"/proc/self/fd/{fd}"), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise Refused("invalid", f"the jail's root folder cannot be seen by the launcher: {error.strerror}") from error
    after = os.fstat(again)
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        os.close(again)
        raise Refused("invalid", "the jail's root folder is not what its path leads to")
    return again
