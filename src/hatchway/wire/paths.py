"""Unix sockets at paths of any length: an address holds 107 octets, and a data folder may lie deeper than that."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """An address for the socket at `path`, to connect or bind to within the block. Raises `OSError` where its folder is not there."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
