"""The processes of a service on this host."""

import contextlib
import json
import os
import signal
from pathlib import Path

SETTLED_S = 11.0
"""A role that dies sooner after its start is started again more and more slowly."""


class Roles:
    """Of the service in a data folder."""

    def __init__(self, data_dir: Path) -> None:
        self._run = data_dir / "run"

    def pids(self) -> dict[str, int]:
        """The processes of the roles."""
        return dict(json.loads((self._run / "roles.json").read_bytes()))

    def settled(self, role: str) -> bool:
        """Whether a role has lived for so long that it is started again at once."""
        pid = self.pids().get(role)
        return pid is not None and _age_s(pid) > SETTLED_S

    def kill(self, role: str) -> None:
        """Kills the process of a role."""
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self.pids()[role], signal.SIGKILL)


def starttime(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since the host's start; None: it is no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _age_s(pid: int) -> float:
    started = starttime(pid)
    if started is None:
        return 0.0
    return float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
