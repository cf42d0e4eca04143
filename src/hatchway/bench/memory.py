"""What our own processes hold in memory, and how much more it becomes while something is going on."""

import json
import threading
from pathlib import Path

from hatchway.domain.errors import NotFound

EVERY_S = 0.1


def own_processes(data_dir: Path) -> list[int]:
    """Returns the pids of supervisor, roles and parked shims. Raises `NotFound("not_up")` when no service runs on this folder."""
    roles = role_processes(data_dir)
    try:
        supervisor = json.loads((data_dir / "endpoint.json").read_bytes())["pid"]
    except FileNotFoundError:
        raise _not_up(data_dir) from None
    return [supervisor, *roles.values(), *children(roles["launcher"])]


def role_processes(data_dir: Path) -> dict[str, int]:
    """Returns the pids of the roles. Raises `NotFound("not_up")`."""
    try:
        return dict(json.loads((data_dir / "run" / "roles.json").read_bytes()))
    except FileNotFoundError:
        raise _not_up(data_dir) from None


def _not_up(data_dir: Path) -> NotFound:
    return NotFound("not_up", f"No service runs on {data_dir}.", "Start it: hatchway up.")


def children(pid: int) -> list[int]:
    """Returns the pids of a process's children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def pss_mib(pid: int) -> float:
    """Returns the proportional memory of a process in MiB, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def private_mib(pid: int) -> float:
    """Returns the memory that a process has for itself alone in MiB, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:"))) / 1024


def rss_mib(pid: int) -> float:
    """Returns the resident memory of a process in MiB, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


class Growth:
    """Watches the resident memory of all our processes together, or of those that are named, while its block runs."""

    def __init__(self, data_dir: Path, pids: list[int] | None = None) -> None:
        self.mib = 0.0
        """The most that it was above where it began."""
        self._pids = own_processes(data_dir) if pids is None else pids
        self._before = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Growth":
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(EVERY_S)
            self.mib = max(self.mib, self._now() - self._before)

    def _now(self) -> float:
        return sum(map(rss_mib, self._pids))
