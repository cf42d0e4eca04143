"""A person at a terminal: starts a program on a pseudo terminal, types, and waits for what it shows."""

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class Person:
    """Use it as a context manager; the program is killed at the end if it still runs."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], *, rows: int = 24, cols: int = 80, within_s: float = 120
    ) -> None:
        self._within_s = within_s
        self.master, self._slave = os.openpty()
        self.resize(rows, cols)
        self.settings = termios.tcgetattr(self._slave)
        self.shown = b""
        self.program = subprocess.Popen(
            argv,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**environ, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def settings_now(self) -> list[object]:
        """How the terminal is set."""
        return termios.tcgetattr(self._slave)

    def resize(self, rows: int, cols: int) -> None:
        """Makes the window of another size; the kernel tells the program."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def press(self, text: bytes) -> None:
        """Types."""
        os.write(self.master, text)

    def until(self, wanted: bytes) -> bytes:
        """Waits until `wanted` is shown; returns what was before it. What comes behind it waits for the next call."""
        deadline = time.monotonic() + self._within_s
        while wanted not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{wanted!r} was not shown, but {self.shown!r}"
            self.shown += os.read(self.master, 65536)
        before, _, self.shown = self.shown.partition(wanted)
        return before

    def ended(self) -> int:
        """Waits for the program's end and returns its exit status; what it shows is read meanwhile."""
        deadline = time.monotonic() + self._within_s
        while self.program.poll() is None:
            assert time.monotonic() < deadline, f"it does not end; shown is {self.shown!r}"
            if select.select([self.master], [], [], 0.05)[0]:
                self.shown += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.shown += os.read(self.master, 65536)
        return self.program.returncode

    def __enter__(self) -> "Person":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        os.close(self.master)
        os.close(self._slave)
