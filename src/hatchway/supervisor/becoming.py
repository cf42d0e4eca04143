"""How `hatchway up` becomes the supervisor: a new program in its place, which has no command line in its memory.

The roles are forked from the supervisor: what it has loaded is in the memory of each of them. Commands, their library and the client
are a sixth of that, and none of it is used again once the settings are known.
"""

import contextlib
import fcntl
import os
import pickle
import sys
from collections.abc import Iterator
from typing import NoReturn

from hatchway.supervisor.settings import Settings

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


_DRAW = ("rich", "pygments")


@contextlib.contextmanager
def nothing_that_draws() -> Iterator[None]:
    """Imports within this go without what draws on terminals, where it is wanted only if it is there.

    The libraries of our logs and of HTTP would load it, 4 MiB in every role; our logs are lines of JSON.
    """
    missing = [name for name in _DRAW if name not in sys.modules]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]  # what the import system itself puts where there is no such module
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def supervisor(settings: Settings, reports: str, writing: int | None = None) -> NoReturn:
    """Goes on as the supervisor of this installation, in the same process.

    `reports`: `text` or `json` on the standard streams; `detached` for the log, and for `writing` until the service is ready.
    """
    fd = os.memfd_create("hatchway-settings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        pickle.dump(settings, file)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    environments = settings.broker_environment, settings.database_environment
    handed = [fd, *(number for number in (writing, *environments) if number is not None)]
    for number in handed:
        os.set_inheritable(number, True)
    program = [sys.executable, "-m", "hatchway.supervisor", str(fd), reports]
    if writing is not None:
        program.append(str(writing))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program[0], program)


def handed_over(descriptor: int) -> Settings:
    """The settings that `supervisor` left for the program which it became; what was inheritable for it is so no more."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        settings = pickle.load(file)
    if not isinstance(settings, Settings):
        raise TypeError(f"no settings but {type(settings).__name__}")
    for environment in (settings.broker_environment, settings.database_environment):
        if environment is not None:
            os.set_inheritable(environment, False)
    return settings
