"""The process of a naive host's end (`naive_end`), as the stage that asks it has it: what is not answered in time is not served."""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

WITHIN_S = 3.0


class NaiveHost:
    """One process, one guest."""

    def __init__(self, folder: Path) -> None:
        self.channel = folder / "channel"
        self.log = folder / "service"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hatchway.redteam.naive_end", str(self.channel), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._turn = threading.Lock()
        self._hangs = False
        self._buffer = b""
        self._line(60)

    def ask(self, **what: Any) -> dict[str, Any] | None:
        """Asks for one thing; None where there is no answer in time. From then on nothing is waited for any more."""
        assert self._process.stdin is not None
        if self._hangs or not self._turn.acquire(timeout=WITHIN_S):
            return None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._line(WITHIN_S)
        except OSError:
            answer = None
        finally:
            self._turn.release()
        self._hangs = answer is None
        return answer

    def _line(self, within: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], within)[0] or not (data := os.read(fd, 65536)):
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
