"""Room that is held for the day when the disk is full: records and databases can then still be written, and things deleted.

It is given up piece by piece, at the moment of need and not before: what is free on a full disk is gone in an instant where
sandboxes write, and the write that follows at once gets it.
"""

import contextlib
import errno
import os
from pathlib import Path

PIECE = 64 << 10
FULL = (errno.ENOSPC, errno.EDQUOT)


class Ballast:
    """A file of `size` octets with nothing in it. For one process; none of the methods raises."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self.whole = False
        """All of it is held, as far as was last seen."""

    def keep(self) -> bool:
        """Takes what is lacking, where the disk has twice as much; tells whether all is held."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            self.whole = False
            return False
        try:
            room = os.fstatvfs(fd)
            lacks = self._size - os.fstat(fd).st_size
            if lacks > 0:
                if room.f_bavail * room.f_frsize < 2 * lacks + PIECE:
                    raise OSError(errno.ENOSPC, "no room for ballast")
                os.posix_fallocate(fd, 0, self._size)
            elif lacks < 0:  # it was larger before
                os.ftruncate(fd, self._size)
            self.whole = True
        except OSError:
            self.whole = False
        finally:
            os.close(fd)
        return self.whole

    def give(self) -> bool:
        """Gives up a piece; tells whether there was one."""
        self.whole = False
        with contextlib.suppress(OSError):
            size = self._path.stat().st_size
            if size > 0:
                os.truncate(self._path, max(0, size - PIECE))
                return True
        return False
