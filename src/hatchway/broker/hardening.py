"""What the broker's process gives up before it has a secret."""

import ctypes
import logging
import os
import resource

from hatchway.wire.private_memory import make_private

MAX_FILES = 8192
"""Open descriptors, where the system's hard limit gives so many: each leg has two."""
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


def harden() -> None:
    """No core dump, no reading of this process's memory by others of its user, and no swap where the limit of locked memory allows it.

    Descriptors for all legs on the way. Raises `OSError` when the first two cannot be had: then the process must not go on.
    """
    make_private()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MAX_FILES), hard))
    # Pages are locked when they are first used, so that nothing which is shared with other roles is copied for it. A process without
    # the privilege would fail later, in the middle, where its limit is finite: there each secret's own page is locked, no more.
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        if _libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0:
            log.warning("memory cannot be locked as a whole: %s", os.strerror(ctypes.get_errno()))
    else:
        log.info("memory is locked for the pages of secrets alone: the limit of locked memory is %d octets", soft)
