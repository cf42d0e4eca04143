"""Who runs: identity of processes, and the record of a VM in its folder."""

import os
import select

import msgspec

from hatchway.wire.launcher import VmRecord

NAME = "launch.json"
_MAX_RECORD = 4096
_decoder = msgspec.json.Decoder(VmRecord)


def host_boot_id() -> str:
    """Returns what names this boot of the host."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """Returns when the process began (clock ticks since boot, field 22 of stat); None when it is no more, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold parentheses and spaces.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def open_process(pid: int, started: int) -> int | None:
    """Returns a pidfd of exactly the process that began at `started`; None when it is no more."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The pidfd was first: if the number still has that start time now, the pidfd is that process's.
    if start_time(pid) != started:
        os.close(pidfd)
        return None
    return pidfd


def has_ended(pidfd: int, within: float) -> bool:
    """Tells whether the process ends within so many seconds; 0 looks only. (`select` ends at descriptor 1023.)"""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within * 1000))


def write(folder: int, record: VmRecord) -> None:
    """Stores the record in the folder (a descriptor) so that it is whole, or not there, whenever this process dies.

    It is not flushed to the disk: it names a process of this boot of the host, and what a crash of the host loses is then true.
    """
    new = NAME + ".new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    try:
        rest = memoryview(msgspec.json.encode(record))
        while rest:  # a disk that becomes full takes a part first
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)
    os.rename(new, NAME, src_dir_fd=folder, dst_dir_fd=folder)


def read(folder: int) -> VmRecord | None:
    """Reads the record; None when there is none, or none that can be understood (a half-made folder)."""
    try:
        fd = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return None
    try:
        return _decoder.decode(os.read(fd, _MAX_RECORD))
    except msgspec.DecodeError:
        return None
    finally:
        os.close(fd)
