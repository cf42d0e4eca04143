"""A process whose memory is nobody else's business: no core dump of it, and no reading by others of its user."""

import ctypes
import os
import resource

_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def make_private() -> None:
    """Makes this process one. Raises `OSError` when that cannot be had: then the process must not go on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "PR_SET_DUMPABLE")
