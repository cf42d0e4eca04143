"""Users of a sandbox, as requests name them."""

import re

from hatchway.client import errors as ours
from hatchway.e2b.envd.connect import ConnectError

DEFAULT = "user"
FALLBACK = "root"
"""For a template without the usual user."""
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}|[0-9]{1,10}", re.ASCII)


def checked(name: str) -> str:
    """A name as our API takes it. Raises `ConnectError`."""
    if not _NAME.fullmatch(name):
        raise invalid(name)
    return name


def invalid(name: str) -> ConnectError:
    """The error of a user that the sandbox does not have: what reads it looks for these words."""
    return ConnectError("unauthenticated", f"invalid username: '{name[:80]}'")


def is_unknown(error: ours.HatchwayError) -> bool:
    """Whether an error of file work says that there is no such user."""
    return error.code == "unknown_user"
