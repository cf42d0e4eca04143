"""Places at which a test lets a process of ours die, or an artifact fail to be written. Without the variable below they do nothing.

`HATCHWAY_FAULT_POINTS` names a folder, and is read once, when the process starts; no role of a service sets it. In that folder

- the file `trace`, where it is there, gets a line with the name of each point that is passed: so a test learns which there are;
- a file with the name of a point says what happens when it is reached next: `kill PID` (SIGKILL), or `errno NUMBER` (the `OSError`
  that the system would have raised there). The first process that reaches the point takes the file away: it happens once.
"""

import contextlib
import os
import signal
from pathlib import Path

VARIABLE = "HATCHWAY_FAULT_POINTS"

_folder: Path | None = None


def listen(folder: Path | None) -> None:
    """Looks for faults in `folder` from now on; None: no more."""
    global _folder  # one for the process, as the variable that it comes from
    _folder = folder


def reached(kind: str, name: str) -> None:
    """Passes the point `kind.name`. Raises `OSError` where a test wants it to."""
    if _folder is not None:
        _pass(_folder, f"{kind}.{name}".replace("/", "_"))


def _pass(folder: Path, point: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(folder / "trace", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, f"{point}\n".encode())
        finally:
            os.close(fd)
    fired = folder / f"{point}.{os.getpid()}"
    try:
        os.rename(folder / point, fired)
    except FileNotFoundError:
        return
    what, number = fired.read_text().split()
    fired.unlink()
    if what == "kill":
        os.kill(int(number), signal.SIGKILL)
    elif what == "errno":
        raise OSError(int(number), os.strerror(int(number)), point)


listen(Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
