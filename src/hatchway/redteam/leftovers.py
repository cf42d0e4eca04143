"""What a run that was killed left on this host: namespaces with processes in them, links, routes' rules, a folder. Names say whose they are.

All names of a run have its stamp: a number of its own, the process that made it, and when that process began. Of a process that lives nothing is
touched, and a number that the kernel gave to another process since is not taken for it.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDERS = "hatchway-redteam-"
SPACES = ("hwrt-n", "hwrt-g")
"""Beginnings of the names of namespaces: of the sites, and of what is in a guest's place."""
_STAMP = re.compile(rf"(?:{FOLDERS}|{'|'.join(SPACES)})([0-9a-f]{{6}})-(\d+)-(\d+)(?:-|$)")
_NETNS = Path("/run/netns")


@dataclass(frozen=True)
class Stamp:
    """Whose something is. `started` is in ticks of the kernel's since its boot."""

    run: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.run}-{self.pid}-{self.started}"

    @property
    def link(self) -> str:
        """The link between this host and the sites."""
        return f"hwrt{self.run}"

    @property
    def table(self) -> int:
        """The number of the table of routes, and of the rules that lead there."""
        return 20_000 + int(self.run, 16) % 10_000

    @property
    def lives(self) -> bool:
        """Whether the process that made it is there."""
        return start_time(self.pid) == self.started


def start_time(pid: int) -> int | None:
    """When a process began; None where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def own_stamp(run: str) -> Stamp:
    """The stamp of a run of this process."""
    return Stamp(run, os.getpid(), start_time(os.getpid()) or 0)


def remove() -> list[str]:
    """Removes what killed runs left, and names the runs. Needs root. What cannot be removed is left for the next time."""
    dead = _dead()
    for stamp in dead:
        for space in SPACES:
            _end_processes(f"{space}{stamp}")
            _quietly("ip", "netns", "del", f"{space}{stamp}")
        _quietly("ip", "link", "del", stamp.link)
        # One for each user that the run watched.
        while _quietly("ip", "rule", "del", "pref", str(stamp.table), "lookup", str(stamp.table)):
            pass
    for stamp in dead:  # last: while it is there, the rest is found again
        for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}{stamp}-*"):
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(stamp.run for stamp in dead)


def _dead() -> set[Stamp]:
    found: set[Stamp] = set()
    for place in (_NETNS, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                if match := _STAMP.match(name):
                    found.add(Stamp(match[1], int(match[2]), int(match[3])))
    living = {stamp.table for stamp in found if stamp.lives}
    return {stamp for stamp in found if not stamp.lives and stamp.table not in living}


def _end_processes(namespace: str) -> None:
    """Attempts that go on although nobody looks: nobody but that run could have put them there."""
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in done.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _quietly(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
