"""Paths as requests have them: absolute, relative to a user's home, or with `~` for it; and for whom work is done.

E2B's agent works as root, for whoever a request names: it reads and writes what it likes, gives away what it makes, and takes relative
paths from the user's home. So does the guest's program with `owner`.
"""

import posixpath

from hatchway.client.afiles import AsyncFiles
from hatchway.client.aio import AsyncSandbox
from hatchway.e2b.envd import users
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.entries import ATTRIBUTES

ROOT = "root"
MAX_PATH = 4095


def local(path: str) -> str:
    """The path as the guest takes it: cleaned, relative ones to the home. Raises `ConnectError`."""
    if "\0" in path or len(path.encode()) > MAX_PATH:
        raise ConnectError("invalid_argument", f"invalid path: it has a NUL, or more than {MAX_PATH} octets")
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    elif path.startswith("~"):
        raise ConnectError(
            "invalid_argument", f"failed to resolve home directory: cannot expand user-specific home dir: {path[:80]}"
        )
    if path.startswith("/"):
        return "/" + posixpath.normpath(path).lstrip("/")
    return posixpath.normpath(path or ".")


def files_of(sandbox: AsyncSandbox, user: str | None) -> AsyncFiles:
    """The files of a sandbox, worked on for `user` (None: the usual one). Raises `ConnectError`."""
    owner = users.checked(user or users.DEFAULT)
    return sandbox.files.seeing(links=True, attributes_of=ATTRIBUTES, owner=owner)
