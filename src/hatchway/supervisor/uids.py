"""Which user ids an installation has on its host: its own range, that no other one uses.

Two machines that run under one user id could reach each other where the jail has a hole. So every data folder has a range of its
own: the one that it was made with (its folders' owner tells), else one that is named in the settings, else `/var/lib/hatchway` has the
first and every other folder one drawn at random from 120,000. While a service is up it holds the range's lock.
"""

import fcntl
import os
import random
import stat
from pathlib import Path

from hatchway.domain.egress_settings import MAX_SHARDS
from hatchway.domain.errors import Conflict, Forbidden, Unavailable, Unprocessable
from hatchway.supervisor.settings import DEFAULT_UID_BASE, MAX_UID_BASE, MIN_UID_BASE, SLOTS, UID_RANGE, Settings

LOCKS = Path("/run/hatchway-uids")
"""Root's own; gone with the boot, like what it guards."""
SYSTEM_FOLDER = Path("/var/lib/hatchway")
USED = 2 + SLOTS + 2 + MAX_SHARDS + 1
"""Control's, node's, one for each slot of the launcher, the audit writer's, the broker's, those of the gateways, and the E2B wrapper's."""
RANGES = (MAX_UID_BASE - DEFAULT_UID_BASE) // UID_RANGE
TRIES = 20


class Claim:
    """The hold on a range; the kernel drops it with the process."""

    def __init__(self, base: int, locks: dict[Path, int]) -> None:
        self.base = base
        self._locks = locks

    def release(self) -> None:
        """Lets another installation have it. Idempotent."""
        for path, fd in self._locks.items():
            path.unlink(missing_ok=True)  # while it is ours: who waits for this file looks whether it is still there
            os.close(fd)
        self._locks.clear()


def base_of(settings: Settings) -> int | None:
    """The range that the installation has or is to have by name; None where it is free to take any. Raises `Unprocessable("uid_base")`."""
    made = _made_with(settings.control)
    wanted = settings.uid_base
    if wanted is None and (named := os.environ.get("HATCHWAY_UID_BASE")):
        if not named.isascii() or not named.isdecimal() or not MIN_UID_BASE <= int(named) <= MAX_UID_BASE:
            raise Unprocessable(
                "uid_base",
                f"HATCHWAY_UID_BASE is {named[:40]!r}.",
                f"A number from {MIN_UID_BASE} to {MAX_UID_BASE}; or leave it out.",
            )
        wanted = int(named)
    if wanted is not None and made not in (None, wanted):
        raise Unprocessable(
            "uid_base",
            f"{settings.data_dir} was made with the user ids from {made} on, not from {wanted}.",
            f"Set it to {made}, or leave it out.",
        )
    if wanted is None and made is None and settings.data_dir == SYSTEM_FOLDER:
        return DEFAULT_UID_BASE
    return wanted if made is None else made


def claim(settings: Settings) -> Claim | None:
    """Takes the installation's range, or one that nobody has; None where all of it runs as one user.

    Raises `Conflict("uids_in_use")` while another installation runs under it, `Unprocessable("uid_base")`.
    """
    if os.geteuid() != 0:
        return None
    base = base_of(settings)
    if base is not None:
        taken = _lock(base)
        if taken is None:
            raise Conflict(
                "uids_in_use",
                f"Another installation on this host is up with the user ids from {base} on.",
                "Stop that one; or give this one others (`uid_base`) before its data folder is made.",
            )
        return taken
    for _ in range(TRIES):
        drawn = DEFAULT_UID_BASE + UID_RANGE * random.SystemRandom().randrange(1, RANGES)
        if not _inhabited(drawn) and (taken := _lock(drawn)) is not None:
            return taken
    raise Unavailable("uids_in_use", "No range of user ids is free.", "Name one: `uid_base` in the settings file.")


def _made_with(control: Path) -> int | None:
    """The range that a data folder was made with: control's folder belongs to the second user id before it."""
    try:
        owner = control.lstat().st_uid
    except FileNotFoundError:
        return None
    return owner + 2 if owner != 0 else None


def _lock(base: int) -> Claim | None:
    LOCKS.mkdir(mode=0o700, exist_ok=True)
    found = LOCKS.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise Forbidden("unsafe_folder", f"{LOCKS} is not root's alone.", f"`rm -r {LOCKS}`, or `chown root {LOCKS}`.")
    # One file per whole range; a base that somebody chose may lie across two of them.
    locks: dict[Path, int] = {}
    for number in sorted({(base - 2) // UID_RANGE, (base - 3 + USED) // UID_RANGE}):
        path = LOCKS / str(number)
        fd = _hold(path)
        if fd is None:
            Claim(base, locks).release()
            return None
        locks[path] = fd
    return Claim(base, locks)


def _hold(path: Path) -> int | None:
    """A descriptor that has the lock of the file that is at `path`; None where somebody else has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # who had it has removed it meanwhile


def _inhabited(base: int) -> bool:
    """Whether a process runs under the range's ids, such as the VMs of a service that was killed."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            status = (process / "status").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        # Not the owner of the folder in /proc, which is root for a process that changed its user.
        words = next((line.split() for line in status.splitlines() if line.startswith("Uid:")), [])
        if any(base - 2 <= int(uid) < base - 2 + UID_RANGE for uid in words[1:]):
            return True
    return False
